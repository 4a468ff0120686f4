"""The demo: one GPT trained by DeepSpeed three times with one seed, and what SSDTrain changes about it.

What lives here: `model` and `data` (no framework, used by the benchmarks too), `settings`, `train` (one mode, in a process of
its own), `compare` (starts the modes, shows progress, the table and the plot). `python -m ssdtrain_ds.demo` and
`ssdtrain demo` are the same.

`train` alone imports deepspeed. The training loop is a user's: it calls `ssdtrain_ds.install()` and nothing else of SSDTrain,
apart from asking for the statistics. Nothing outside this package imports it, except benchmarks and tests.
"""
