"""Saved-tensor hooks that a model installs inside of ours, and those around it.

Autograd calls only the innermost pair: what inner hooks take is not offloaded. That is intended (torch's checkpoint recomputes
by such hooks), but silent. So during the first steps the hooks installed inside a forward are recorded, with the bytes that they
take, and a warning names them.

Note: [Copies to host memory]
Hooks that copy to host memory ask for what we do: `save_on_cpu`, by which trainers serve `offload=True` beside checkpointing, and
`OffloadActivations`, which torchtune and others have. Inside a forward ours are installed in their place, so that what they would
copy goes to the tiers; around a forward they are outer hooks, which autograd does not call. A policy of selective checkpointing
that answers CPU_OFFLOAD asks for the same without hooks: see `selective`. A line of the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.features import FIRST_STEPS, Feature, Forward, Step
from ssdtrain.integration.patching import Patches
from ssdtrain.integration.selective import hold_offloaded_outputs
from ssdtrain.messages import report
from ssdtrain.offload.functorch import PackHook
from ssdtrain.offload.hooks import current_recorder

logger = logging.getLogger("ssdtrain")

_watcher: ContextVar[InnerHooks | None] = ContextVar("ssdtrain_inner_hooks", default=None)
"""The watcher of this thread's innermost forward."""


HOST_COPIES = {"save_on_cpu", "OffloadActivations"}
"""Classes whose hooks copy to host memory."""


def _noting(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def enter(hooks: Any) -> None:
        watcher, recorder = _watcher.get(), current_recorder()
        if watcher is None:
            return plain(hooks)
        if recorder is not None and copies_to_host(type(hooks)):
            watcher.serve(f"{type(hooks).__module__}.{type(hooks).__qualname__}")
            return plain(saved_tensors_hooks(*recorder.hooks))  # threads may share `hooks`
        watcher._watch(hooks)
        return plain(hooks)

    return enter


def copies_to_host(kind: type) -> bool:
    """Whether hooks of this class copy to host memory. See Note: [Copies to host memory]."""
    return any(base.__name__ in HOST_COPIES for base in kind.__mro__)


def _serve(name: str) -> None:
    watcher = _watcher.get()
    if watcher is not None:
        watcher.serve(name)


class InnerHooks(Feature):
    """Counts what hooks nested inside a forward take, by who installed them, and warns of it after the first steps. Hooks that
    copy to host memory take nothing: what they are given goes to the tiers, see Note: [Copies to host memory].

    An adapter appends it to `Runtime.features`, behind the one that offloads; `ssdtrain.attach` does.

    Args:
        min_bytes: smaller tensors would not have been offloaded anyway.
        recomputing: modules whose hooks recompute: nothing is lost, as the inputs of the block are offloaded instead.
        reports: log what is served.
        moves: something may leave memory; False: steps are only measured, and all hooks are left alone.

    Attributes:
        served: names of what copies to host memory, served by the tiers.
        taken: bytes by the qualified name of the pack hook, recomputation left out.
        steps: steps so far.
    """

    def __init__(self, min_bytes: int, *recomputing: str, reports: bool = False, moves: bool = True) -> None:
        self.taken: dict[str, int] = {}
        self.served: set[str] = set()
        self._reports, self._moves = reports, moves
        self._min_bytes = min_bytes
        self._recomputing = ("torch.utils.checkpoint", *recomputing)
        self.steps = 0

    def on_forward(self, forward: Forward) -> AbstractContextManager[None] | None:
        watches = self._moves and (self.steps < FIRST_STEPS or self.served)
        return self._watched() if watches else None

    def serve(self, name: str) -> None:
        """Note that the tiers serve what is called `name`."""
        if name not in self.served:
            self.served.add(name)
            if self._reports:
                report(
                    f"offload: what {name} would copy to host memory goes to the tiers of the section offload"
                )

    def on_step_end(self, step: Step) -> None:
        self.steps += 1
        if self.steps == FIRST_STEPS and self.taken:
            logger.warning(
                "saved-tensor hooks inside the model take precedence, and what they take is not offloaded: %s",
                ", ".join(
                    f"{name} takes {nbytes // FIRST_STEPS} bytes a step"
                    for name, nbytes in sorted(self.taken.items())
                ),
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        patches = Patches()
        patches.replace(saved_tensors_hooks, "__enter__", _noting)
        token = _watcher.set(self)
        recorder = current_recorder()
        if recorder is not None and recorder.around is not None:
            pack = recorder.around[0]
            owner = getattr(pack, "__qualname__", "").split(".")[0]  # an engine's has none
            if owner in HOST_COPIES:
                self.serve(f"{pack.__module__}.{owner}")
        try:
            hold_offloaded_outputs(patches, _serve)
            yield
        finally:
            _watcher.reset(token)
            patches.undo()

    def _watch(self, hooks: Any) -> None:
        pack: Callable[[torch.Tensor], Any] = hooks.pack_hook
        if getattr(pack, "__module__", "") in self._recomputing or hasattr(pack, "watches"):
            return
        if isinstance(pack, PackHook) or self.steps >= FIRST_STEPS:
            return  # another engine's forward inside this one; or the warning was given
        name = f"{type(hooks).__module__}.{type(hooks).__qualname__}"
        if type(hooks) is saved_tensors_hooks:
            name = f"{getattr(pack, '__module__', '?')}.{getattr(pack, '__qualname__', repr(pack))}"

        def counting(tensor: torch.Tensor) -> Any:
            # Sparse tensors have no `nbytes`, and would not have been offloaded either.
            strided = tensor.layout is torch.strided and not isinstance(tensor, torch.nn.Parameter)
            if strided and tensor.nbytes >= self._min_bytes:
                self.taken[name] = self.taken.get(name, 0) + tensor.nbytes
            return pack(tensor)

        counting.watches = pack  # type: ignore[attr-defined]
        hooks.pack_hook = counting
