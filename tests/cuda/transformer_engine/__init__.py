"""Transformer Engine without its kernels: NVIDIA's Python package as it is, on `compiled.py` in place of its compiled module.

Its layers, what they save for backward, weight workspaces, the marks of tensors that stay, its own offloading and its context
parallelism are the real ones. bf16, fp16 and fp32; a call of anything else (fp8, grouped products, overlap of products with
communication) raises an error that names the missing function.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types

__all__ = ["INSTALLED", "install"]

PACKAGE = "transformer_engine"

INSTALLED = importlib.util.find_spec(PACKAGE) is not None
"""Whether the package is there (requirements-cuda.txt)."""


def install() -> None:
    """Make `import transformer_engine` work in this process. Call it before anything has imported that package.

    Raises:
        RuntimeError: it was imported already, or is not installed.
    """
    if PACKAGE in sys.modules:
        raise RuntimeError("transformer_engine was imported before its stand-ins: call install() earlier")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("transformer_engine is not installed: see requirements-cuda.txt")
    # transformer_engine.common loads libraries of CUDA at its import, but not where the package is being built.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # what a compiler makes of its small functions are kernels
    sys.modules["transformer_engine_torch"] = importlib.import_module(f"{__name__}.compiled")
    # The common part comes first, below a parent that has not run, since that imports all of it.
    parent = types.ModuleType(PACKAGE)
    parent.__path__ = list(spec.submodule_search_locations)
    sys.modules[PACKAGE] = parent
    common = importlib.import_module(f"{PACKAGE}.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    del sys.modules[PACKAGE]
    importlib.import_module(PACKAGE).common = common  # type: ignore[attr-defined]
