"""Transformer Engine without its kernels: NVIDIA's Python package as it is, on `compiled.py` in place of its compiled module.

Its layers, what they save for backward, weight workspaces, the marks of tensors that stay, its own offloading and its context
parallelism are the real ones. bf16, fp16 and fp32; a call of anything else (fp8, grouped products, overlap of products with
communication) raises an error that names the missing function.

`emulated_cuda.pth` imports this when Python starts, after which `import transformer_engine` works. torch is imported with that
package, and not before.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

PACKAGE = "transformer_engine"


class Loader(SourceFileLoader):
    """Executes the package with the stand-ins in place."""

    def exec_module(self, module: ModuleType) -> None:
        # Its common part loads libraries of CUDA at its import, but not where the package is being built.
        os.environ["NVTE_PROJECT_BUILDING"] = "1"
        os.environ["NVTE_TORCH_COMPILE"] = "0"  # what a compiler makes of its small functions are kernels
        sys.modules["transformer_engine_torch"] = importlib.import_module(f"{__name__}.compiled")
        common: Any = importlib.import_module(f"{PACKAGE}.common")
        common.load_framework_extension = lambda framework: None
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds the package where it is installed, for `Loader`."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == PACKAGE else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder())
