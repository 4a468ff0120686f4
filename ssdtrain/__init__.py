"""SSDTrain: train large transformers with less GPU memory and less network traffic.

This package is the engine. It needs torch and knows no training framework; `ssdtrain_ds` and `ssdtrain_megatron` adapt
it to DeepSpeed and Megatron-LM.
"""

__version__ = "0.1.0"
