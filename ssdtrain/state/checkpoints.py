"""State dicts of models whose parameters come and go: whole values, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssdtrain.state.chunk import Chunk
from ssdtrain.state.residency import Residency


class StateDicts:
    """Hooks on the model, its blocks, and the modules in them that have parameters of chunks: `state_dict` gives copies in host
    memory, `load_state_dict` writes what it changes to the tier.

    Args:
        model: whose blocks the chunks are.
        residency: of the chunks.
        prefixes: by chunk, that of its block in the names of the model's parameters.
    """

    def __init__(self, model: nn.Module, residency: Residency, prefixes: Mapping[Chunk, str]) -> None:
        self._residency = residency
        self._handles: list[RemovableHandle] = []
        for chunk in residency.chunks:
            local = {name.removeprefix(prefixes[chunk]): parameter for parameter, name in chunk.names.items()}
            within: list[nn.Module] = []  # modules whose state dict is being made or loaded
            for prefix, module in chunk.module.named_modules():
                start = f"{prefix}." if prefix else ""
                of_module = {
                    name[len(start) :]: value for name, value in local.items() if name.startswith(start)
                }
                if of_module:
                    self._watch(chunk, module, of_module, within)
        self._handles.append(model.register_state_dict_post_hook(_copier()))

    def _watch(
        self, chunk: Chunk, module: nn.Module, local: dict[str, nn.Parameter], within: list[nn.Module]
    ) -> None:
        def begin(entered: nn.Module) -> None:
            if entered is chunk.module:
                within.clear()  # also of one that raised
            within.append(entered)
            self._residency.load(chunk, chunk.values)

        def end() -> None:
            if within:
                within.pop()
            # In use: a hook or a signal handler asks, and the forward or backward goes on.
            if not within and not chunk.in_use:
                self._residency.release(chunk.values)

        def copy(left: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            for name, parameter in local.items():
                value = state_dict.get(f"{prefix}{name}")
                if isinstance(value, torch.Tensor) and _share(value, parameter):
                    state_dict[f"{prefix}{name}"] = value.detach().to("cpu", copy=True)
            end()

        def load_to_change(entered: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
            replaced = {
                parameter
                for name, parameter in local.items()
                if getattr(state_dict.get(f"{prefix}{name}"), "shape", None) == parameter.shape
            }
            self._residency.discard_writes(chunk.values, replaced)
            begin(entered)
            self._residency.settle(chunk.values)

        def store(left: nn.Module, _: Any) -> None:
            for name, parameter in local.items():
                if left.get_parameter(name) is not parameter:
                    raise RuntimeError(
                        f"load_state_dict put another tensor in the place of {chunk.names[parameter]} (config section "
                        "state): load without assign=True, or before ssdtrain.attach"
                    )
            end()

        self._handles += [
            module.register_state_dict_pre_hook(lambda entered, *_: begin(entered)),
            module.register_state_dict_post_hook(copy),
            module.register_load_state_dict_pre_hook(load_to_change),
            module.register_load_state_dict_post_hook(store),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _copier() -> Any:
    """Make a hook that copies what stays in memory as well, so that a state dict is of one moment."""

    def copy(model: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        owned = {
            tensor.untyped_storage()._cdata
            for tensor in (*model.parameters(), *model.buffers())
            if _is_plain(tensor)
        }
        copies: dict[tuple[Any, ...], torch.Tensor] = {}  # tied parameters stay tied in a file
        for name, value in state_dict.items():
            if not (name.startswith(prefix) and isinstance(value, torch.Tensor) and _is_plain(value)):
                continue
            if value.untyped_storage()._cdata in owned:
                key = value.data_ptr(), value.dtype, value.shape, value.stride()
                if key not in copies:
                    copies[key] = value.detach().to("cpu", copy=True)
                state_dict[name] = copies[key]

    return copy


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided


def _share(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
