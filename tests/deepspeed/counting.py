"""How many bytes a forward saves, counted by plain autograd hooks that know nothing of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tests.deepspeed.models import MIN_BYTES


class Counter:
    """Sums, over forwards, the storages of saved activations; each once per forward, though ZeRO-3 hands each module `detach()`
    of its input.

    DeepSpeed's own checkpoint functions hold a block's inputs without saving them: where a model uses one, these are counted
    at the block.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._seen: dict[int, torch.UntypedStorage] = {}

    def see(self, tensor: torch.Tensor, part: int = 1) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        parameter = isinstance(base, nn.Parameter) or hasattr(base, "ds_id")
        inside_backward = torch._C._current_graph_task_id() != -1
        if not parameter and not inside_backward and tensor.nbytes >= MIN_BYTES:
            storage = tensor.untyped_storage()
            if id(storage) not in self._seen:
                self._seen[id(storage)] = storage  # held, so that no other gets its id
                self.nbytes += storage.nbytes() // part
        return tensor if tensor.is_leaf else tensor.detach()

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._seen = {}
        with torch.autograd.graph.saved_tensors_hooks(self.see, lambda held: held):
            yield
        self._seen = {}

    def see_inputs_of(self, blocks: list[nn.Module], part: int = 1) -> None:
        """Count the first input of each block; of partitioned activations 1/`part`."""

        def see(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.see(inputs[0], part)

        for block in blocks:
            block.register_forward_pre_hook(see)
