"""SSDTrain inside DeepSpeed.

A user adds `"ssdtrain": {...}` to the DeepSpeed config and calls `ssdtrain_ds.install()` once before
`deepspeed.initialize`. This package turns DeepSpeed's events and groups into calls on `ssdtrain.runtime.Runtime`; it holds no
algorithm, and touches DeepSpeed's private names in `_compat` only.
"""

from ssdtrain_ds.attach import install, runtime_of, uninstall

__all__ = ["install", "runtime_of", "uninstall"]
