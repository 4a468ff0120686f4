"""Tests that need a GPU. `SSDTRAIN_GPU_DRY_RUN=1` runs on the CPU what does not depend on streams, to try the tests themselves."""
