"""What the saved tensors of each module did in chosen steps, for the journal."""

from __future__ import annotations

import sys
import weakref

from torch import nn

from ssdtrain.features import Feature, Step
from ssdtrain.offload.checks.module_tally import ModuleTally
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.profile.modules import is_compiled

_EVERY = 1024


def _chosen(number: int) -> bool:
    """Steps 2, 4, 8 ... 1024, then each 1024th: at first a plan changes often, and a line names every module."""
    return number > 1 and (number % _EVERY == 0 or number & (number - 1) == 0)


class ModuleBytes(Feature):
    """Counts bytes that were offloaded and kept by module in steps 2, 4, 8 ... 1024, then in each 1024th, from the start of the
    process. Other steps run as without it.

    Modules have hooks in a chosen step, so that names are known. Hooks would have compiled modules compiled again: where
    `torch.compile` is in use, regions have the number on their tape in place of a name.

    Args:
        engine: that offloads.

    Attributes:
        names: module by `Region.place`, as of the chosen steps; "": several were seen there, as where layers are left
            out by chance.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._models: list[weakref.ref[nn.Module]] = []
        self._steps = 0  # that have ended
        self._tally: ModuleTally | None = None
        self._ended: ModuleTally | None = None
        self._watched = False  # modules have hooks for this feature
        self._graphs = 0  # compiled before the hooks were in place
        self._hooks_compile = False  # hooks were seen to have something compiled again
        self.names: dict[str, str] = {}

    def attach(self, model: nn.Module) -> None:
        self._models.append(weakref.ref(model))

    def take(self) -> ModuleTally | None:
        """The tally of the step that has just ended, once; None: it was not chosen."""
        taken, self._ended = self._ended, None
        return taken

    def on_step_end(self, step: Step) -> None:
        self._steps += 1
        self._ended = self._tally
        self._end()
        if _chosen(self._steps + 1):
            self._begin()

    def _begin(self) -> None:
        engine = self._engine
        self._tally = ModuleTally(engine.metrics)
        engine.observe_releases(self._tally)
        found = [model for known in self._models if (model := known()) is not None]
        if not (self._hooks_compile or any(map(is_compiled, found))):
            self._watched = True
            self._graphs = _compiled_graphs()
            for model in found:
                engine.modules.watch(model, owner=self)

    def _end(self) -> None:
        tally, self._tally = self._tally, None
        if tally is None:
            return
        self._engine.observe_releases(None)
        for place, name in [*tally.names.items()]:  # another thread may be in its `release`
            if self.names.setdefault(place, name) != name:
                self.names[place] = ""
        if self._watched:
            self._watched = False
            self._engine.modules.close(self)
            self._hooks_compile = _compiled_graphs() != self._graphs

    def detach(self) -> None:
        self._end()


def _compiled_graphs() -> int:
    """How many graphs `torch.compile` has made in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))
