"""State dicts of models whose parameters come and go: whole values, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssdtrain.state.chunk import Chunk
from ssdtrain.state.residency import Residency

__all__ = ["StateDicts"]


class StateDicts:
    """Hooks on the blocks: `state_dict` gives copies in host memory, `load_state_dict` writes what it changes to the tier.

    Args:
        residency: of the chunks.
        prefixes: by chunk, that of its block in the names of the model's parameters.
    """

    def __init__(self, residency: Residency, prefixes: Mapping[Chunk, str]) -> None:
        self._residency = residency
        self._handles: list[RemovableHandle] = []
        for chunk in residency.chunks:
            local = {name.removeprefix(prefixes[chunk]): parameter for parameter, name in chunk.names.items()}
            self._watch(chunk, local)

    def _watch(self, chunk: Chunk, local: dict[str, nn.Parameter]) -> None:
        def load(*_: Any) -> None:
            self._residency.load(chunk, chunk.values)

        def copy(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            for name in local:
                value = state_dict.get(f"{prefix}{name}")
                if isinstance(value, torch.Tensor):
                    state_dict[f"{prefix}{name}"] = value.detach().to("cpu", copy=True)
            self._residency.release(chunk.values)

        def load_to_change(*_: Any) -> None:
            self._residency.load(chunk, chunk.values)
            self._residency.settle(chunk.values)

        def store(module: nn.Module, _: Any) -> None:
            for name, parameter in local.items():
                if module.get_parameter(name) is not parameter:
                    raise RuntimeError(
                        f"load_state_dict put another tensor in the place of {chunk.names[parameter]} (config section "
                        "state): load without assign=True, or before ssdtrain.attach"
                    )
            self._residency.release(chunk.values)

        block = chunk.module
        self._handles += [
            block.register_state_dict_pre_hook(load),
            block.register_state_dict_post_hook(copy),
            block.register_load_state_dict_pre_hook(load_to_change),
            block.register_load_state_dict_post_hook(store),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
