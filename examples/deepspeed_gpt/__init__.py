"""One GPT trained by DeepSpeed three times with one seed: keeping its activations, recomputing them, and with SSDTrain.

`settings`, `train` (one mode, in a process of its own), `compare` (starts the modes, shows progress, the table and the plot).
`python -m examples.deepspeed_gpt` and `ssdtrain demo` are the same.

`train` alone imports deepspeed. Its training loop is a user's: it calls `ssdtrain_ds.install()` and nothing else of SSDTrain,
apart from reading the statistics.
"""
