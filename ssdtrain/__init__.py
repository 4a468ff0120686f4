"""SSDTrain: train large transformers with less GPU memory and less network traffic.

This package needs torch and knows no training framework; `ssdtrain_ds` and `ssdtrain_megatron` adapt
it to DeepSpeed and Megatron-LM.

For a plain PyTorch loop:

```python
offloading = ssdtrain.offload("/mnt/nvme", model=model)
with offloading:
    loss = model(batch)
loss.backward()
```

`ssdtrain.attach(model, config)` does the same for every call of a model, and `ssdtrain.checkpoint(function, *args)` recomputes a
block and offloads its inputs. Only these names are public here; everything else is imported from its own module.
"""

from ssdtrain.offload.checkpoint import checkpoint
from ssdtrain.pytorch.api import attach, offload

__all__ = ["__version__", "attach", "checkpoint", "offload"]

__version__ = "0.1.0"
