"""The blocks of a model, by the names of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn


def names_a_module(model: nn.Module, patterns: Sequence[str]) -> bool:
    """True if one of these patterns of `find_blocks` names a module of `model`."""
    return any(fnmatchcase(name, pattern) for name, _ in _inner_modules(model) for pattern in patterns)


def _inner_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside of `model` by qualified name. The model itself, whose name is empty, is no block: "*" would name it."""
    return ((name, module) for name, module in model.named_modules() if name)


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The blocks of a model by qualified name: those that `patterns` name, else the children of all ModuleLists whose
    children are of the class of the longest one's (an encoder and a decoder have one each).

    Args:
        patterns: shell patterns of qualified names, such as "layers.*"; a block inside of a block is left out, and so is
            `model` itself.

    Raises:
        ValueError: there are none.
    """
    found: dict[str, nn.Module] = {}
    if patterns:
        for name, module in _inner_modules(model):
            inside = any(name.startswith(f"{known}.") for known in found)
            if not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
                found[name] = module
    else:
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module)
        }
        if lists:
            longest = max(lists.values(), key=len)
            for name, each in lists.items():
                if type(each[0]) is type(longest[0]) and not any(
                    name.startswith(f"{known}.") for known in found
                ):
                    found |= {f"{name}.{index}": block for index, block in enumerate(each)}
    if not found:
        why = f"no module is named by {tuple(patterns)}" if patterns else "it has no ModuleList"
        raise ValueError(
            f"{type(model).__name__} has no blocks: {why}; name them by patterns such as 'layers.*' "
            "(plan.blocks, state.blocks; --blocks of `ssdtrain estimate`)"
        )
    return found
