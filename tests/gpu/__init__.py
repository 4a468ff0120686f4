"""Tests that need a GPU. `SSDTRAIN_GPU_DRY_RUN=1` tries them on the CPU, as far as they do not depend on streams."""
