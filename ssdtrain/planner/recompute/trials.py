"""Proves that a block which backward runs again computes what it computed in forward, to the bit.

Note: [What is compared]
Backward of a recomputed block uses the graph of its forward, and takes nothing from the second run but the saved tensors. So in
some steps both runs take a fingerprint of each tensor when it is saved, and the second run raises before backward gets a tensor
that differs. Outputs are not compared: a difference that no saved tensor has reaches no gradient, and the second run ends at its
last saved tensor in these steps too, since what comes after may free what backward has gathered (hooks of sharded parameters).
What counts as a difference: `ssdtrain.planner.recompute.fingerprints`.

Note: [Trials]
The first time that a block is to be recomputed it runs twice in forward, while what the first run saved is kept: if they differ,
backward uses that, and the block is not recomputed from then on. So a block that never computes the same twice (a generator of
its own, a kernel that adds in another order each time, memory that no kernel writes, which is filled in the second run) is found
at no harm, and what differs later was changed by the loop. A block that is kept, or whose saved tensors leave memory, is tried in
backward while steps are profiled: backward uses what was saved, and the second run is only compared, so what the loop changes is
no error either. Either costs one more forward, and the memory of one block. The second run of a trial hands nothing to torch's
checkpoint, and ends by an exception.

Note: [What leaves a block beside its outputs]
A block may give a tensor to somebody else: a global list of losses that the loop adds up, a forward hook that collects what
routers return. In a trial in forward it would come there twice, and the loss would be another one; in backward that loss has been
computed. So a block is not tried in forward if a tensor of its graph, made in its first run, has an owner that is not known.
Known are the outputs, what was saved, and attributes of modules, which are put back.

Note: [Ranks]
Where ranks recompute the same blocks, nothing is tried, since a trial may end by an error on one rank while others communicate. A
block that differs stays an error there, since one rank alone cannot leave it out. Elsewhere a block that communicates is not
tried either: whether it is would depend on what a rank sees (a tensor that the thread of a collective still holds looks given
away), and the second run of one rank would pair with the next message of another.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from ssdtrain.offload.functorch import disabled_because, replaced_hooks, top_hooks, without_modes
from ssdtrain.planner.recompute.fingerprints import Fingerprint, difference, fingerprints
from ssdtrain.profile.containers import leaves

__all__ = ["COMPARED_EVERY", "COMPARED_FIRST", "Proven", "Recomputations"]

logger = logging.getLogger("ssdtrain")

COMPARED_FIRST = 2
"""Number of first steps in which every recomputation is compared: while steps are profiled, those that are not measured."""

COMPARED_EVERY = 31
"""One step in so many is compared later. A prime: no period of a loop falls on these steps alone."""


class Recomputations:
    """What is compared, and which blocks differed.

    Args:
        agreed: whether ranks recompute the same blocks, so that one which differs stays an error.
    """

    def __init__(self, *, agreed: bool = False) -> None:
        self.differing: dict[str, str] = {}
        """Names of blocks that computed other values when they ran again, with what differed."""
        self.settled: set[str] = set()
        """Names of blocks that are not tried any more: they computed the same twice, or give tensors away."""
        self.communicated = False
        """A collective or message was seen in a block. Whoever runs one sets it to False before."""
        self._agreed, self._steps = agreed, 0
        self._warned = False

    @property
    def compares(self) -> bool:
        """Whether this step is one in which recomputations are compared."""
        return self._steps < COMPARED_FIRST or self._steps % COMPARED_EVERY == 0

    def tries(self, name: str) -> bool:
        """Whether the block, which is to be recomputed, is tried in forward before. See Note: [Trials] and Note: [Ranks]."""
        return self.compares and not self._agreed and name not in self.settled

    def step_ended(self) -> None:
        self._steps += 1

    def begin_again(self) -> None:
        """Other blocks are recomputed from now on: compare the first steps."""
        self._steps = 0

    def skips(self, name: str) -> bool:
        """Whether a call of the block must run plainly: it differed, or this thread may have no saved-tensor hooks, which is said
        once."""
        if name in self.differing and not self._agreed:
            return True
        reason = disabled_because()
        if reason is not None and not self._warned:
            self._warned = True
            logger.warning(
                "ssdtrain.plan: the block %r is not recomputed where saved-tensor hooks are disabled (%s)",
                name,
                reason,
            )
        return reason is not None

    def note(self, name: str, what: str) -> None:
        """A block differed, without harm."""
        if name not in self.differing:
            self.differing[name] = f"it computed other values when it ran again ({what})"
            logger.warning(
                "ssdtrain.plan: the block %r computed other values when it ran again: it is not recomputed (%s)",
                name,
                what,
            )

    def error(self, name: str, what: str) -> RuntimeError:
        """Note a block whose gradients would be wrong. Returns the error to raise."""
        self.differing.setdefault(name, f"it computed other values when it ran again ({what})")
        late = self._steps >= COMPARED_FIRST
        since = (
            f" (and those of up to {COMPARED_EVERY - 1} steps before, which were not compared)"
            if late
            else ""
        )
        return RuntimeError(
            f"ssdtrain.plan: the block {name!r} computed other values when backward ran it again ({what}), and gradients of "
            f"this step{since} may be wrong: something that its forward reads was changed in between (a global, a flag of a "
            "shared object, a context around the forward), or it saves memory that it does not write. Keep it as it is "
            'until backward, leave the block out of plan.blocks, or set plan.recompute to "off"'
        )


class Proven:
    """A block's forward under torch's checkpoint, whose second run is named in errors, and compared in steps that compare.

    Args:
        name: of the block, for errors.
        function: its forward.
        compared: whether this call is compared.
        beside: saved-tensor hooks that take what is saved, for a trial; while they have it, backward uses that, and differences
            are noted only. None: backward uses what the second run saves.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        recomputations: Recomputations,
        *,
        compared: bool,
        beside: Any = None,
    ) -> None:
        self.name, self.recomputations, self.beside = name, recomputations, beside
        self._function, self._compared = function, compared
        self.saved: list[weakref.ref[_SavedRecord]] = []
        self.packed: list[weakref.ref[torch.Tensor]] = []  # for a trial
        self._since = 0 if beside is None else _sequence_number()
        # torch's own, while the block runs: a graph keeps our pack hook as long as it lives, and torch's keep the block's inputs.
        self.hooks: Any = None
        self.tries = self._began = self._tried = False
        self._first: _ComparedRun | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._began = self._began, True
        hooks = top_hooks()
        if hooks is None:
            return self._function(*args, **kwargs)
        pack, unpack = hooks
        run: _ComparedRun | None = None
        around, self.hooks = self.hooks, hooks
        # Backward may run inside of the forward (gradients of gradients), when it is not known what the forward will save.
        if self._compared and (not again or self._first is not None):
            most = None if self._first is None else len(self._first.saved)
            run = _ComparedRun(most)
            pack = partial(_without_dynamo("torch._dynamo" in sys.modules), self, run)
        if not again:
            unpack = (
                partial(_unpack_again, self, unpack) if self.beside is None else partial(_unpack_beside, self)
            )
        try:
            with replaced_hooks(pack, unpack), _Filled() if self.tries else nullcontext():
                outputs = self._function(*args, **kwargs)
        finally:
            self.hooks = around
        if run is not None and self._first is None:
            self._first = run
        elif run is not None and self._first is not None and len(run.saved) < len(self._first.saved):
            self.differs(f"it saved {len(self._first.saved)} tensors, then {len(run.saved)}")
        if run is not None and self.tries:
            raise _TrialEnded
        return outputs

    def try_now(self, known: Any) -> None:
        """Run the block again inside of its forward, which has ended. If that is alike, backward runs it again; else it uses what
        the forward saved.

        Args:
            known: outputs and attributes of the block.
        """
        saved = self._alive()
        if self._first is not None and saved and self._gives_away(known):
            self.recomputations.settled.add(self.name)
        elif self._first is not None and saved:
            self._try_again(saved[0])
        if self.name in self.recomputations.differing:
            self._drop_holders()
        else:
            for one in saved:
                one.beside = None

    def _gives_away(self, known: Any) -> bool:
        """See Note: [What leaves a block beside its outputs]."""
        owned = {id(leaf) for leaf in leaves(known)}
        owned |= {id(tensor) for reference in self.packed if (tensor := reference()) is not None}
        made = range(self._since + 1, _sequence_number())  # other threads number their nodes by themselves
        return any(
            issubclass(type(one), torch.Tensor) and id(one) not in owned and _number_of(one) in made
            for one in gc.get_objects()
        )

    def try_once(self, saved: _SavedRecord) -> None:
        """Run the block again inside of backward, unless it was tried."""
        if not self._tried:
            self._try_again(saved)
            self._drop_holders()

    def give_up(self, what: str = "") -> None:
        """Have backward use what the forward saved.

        Args:
            what: why the block is not recomputed from now on; "": that is known already.
        """
        self._tried = True
        if what:
            self.recomputations.note(self.name, what)
        self._drop_holders()

    def _try_again(self, saved: _SavedRecord) -> None:
        """Run the block again, only to compare."""
        self._tried = self.tries = True
        try:
            saved.unpack(saved.holder)
        except _TrialEnded:
            if self.name not in self.recomputations.differing:
                self.recomputations.settled.add(self.name)
        except torch.OutOfMemoryError:
            pass  # says nothing of the block
        except Exception as error:  # noqa: BLE001 - whatever it is, the block cannot run again
            self.differs(f"{type(error).__name__}: {error}")
        finally:
            self.tries = False

    def _drop_holders(self) -> None:
        """Let go of what torch keeps for a second run: a graph that is retained would keep it."""
        for one in self._alive():
            one.holder = one.unpack = None

    def _alive(self) -> list[_SavedRecord]:
        return [one for reference in self.saved if (one := reference()) is not None]

    def check(self, run: _ComparedRun) -> None:
        """Compare a second run that has saved as many tensors as the first one.

        Raises:
            RuntimeError: a tensor differs, and backward would use it.
        """
        assert self._first is not None
        what = difference(self._first.saved, run.saved)
        if what:
            self.differs(what)

    def differs(self, what: str) -> None:
        """Raise, or where backward uses what was kept beside, take a note."""
        if not self.tries:
            raise self.recomputations.error(self.name, what)
        self.recomputations.note(self.name, what)


class _TrialEnded(BaseException):
    """Ends the second run of a trial; no block's forward catches it by accident."""


class _SavedRecord:
    """A tensor of a trial as it was packed.

    Attributes:
        beside: what the hooks beside returned, in a tuple; None: backward runs the block again.
        holder, unpack: torch's, which run the block again; None: they are not needed any more.
    """

    __slots__ = ("__weakref__", "beside", "holder", "unpack")

    def __init__(self, beside: tuple[Any] | None, holder: Any, unpack: Any) -> None:
        self.beside, self.holder, self.unpack = beside, holder, unpack


class _ComparedRun:
    """Fingerprints of what one run saved, a list for each tensor.

    Args:
        most: number of tensors that the run may save; None: any.
    """

    def __init__(self, most: int | None) -> None:
        self.saved: list[list[Fingerprint]] = []
        self.most = most


def _pack(proven: Proven, run: _ComparedRun, tensor: torch.Tensor) -> Any:
    pack, unpack = proven.hooks
    run.saved.append(fingerprints(tensor))
    if run.most is None:
        if proven.beside is None:
            return pack(tensor)
        proven.packed.append(weakref.ref(tensor))
        saved = _SavedRecord((proven.beside[0](tensor),), pack(tensor), unpack)
        proven.saved.append(weakref.ref(saved))
        return saved
    if len(run.saved) > run.most:
        raise proven.recomputations.error(proven.name, f"it saved {run.most} tensors, then more")
    if len(run.saved) == run.most:
        proven.check(run)
        if proven.tries:
            raise _TrialEnded
    # torch would keep what it is given as long as the graph of the forward.
    return tensor.detach() if proven.tries else pack(tensor)


def _unpack_again(proven: Proven, unpack: Callable[[Any], torch.Tensor], holder: Any) -> torch.Tensor:
    try:
        return unpack(holder)
    except CheckpointError as error:
        what = str(error).removeprefix("torch.utils.checkpoint: ").split("\n")[0].rstrip(".")
        raise proven.recomputations.error(proven.name, what) from error


def _unpack_beside(proven: Proven, saved: _SavedRecord) -> torch.Tensor:
    if saved.beside is None:
        return _unpack_again(proven, saved.unpack, saved.holder)
    proven.try_once(saved)
    return proven.beside[1](*saved.beside)  # type: ignore[no-any-return]


def _sequence_number() -> int:
    """Return that of a new node of this thread's graphs: later ones have larger numbers."""
    with without_modes(), torch.enable_grad():
        node = torch.empty((), requires_grad=True, device="cpu").view(()).grad_fn
    return 0 if node is None else int(node._sequence_nr())  # type: ignore[attr-defined]


def _number_of(tensor: torch.Tensor) -> int:
    """Return the number of the node that made `tensor`; -1: none did."""
    with torch._C.DisableTorchFunctionSubclass():
        node = tensor.grad_fn
    return -1 if node is None else int(node._sequence_nr())  # type: ignore[attr-defined]


@cache
def _without_dynamo(imported: bool) -> Callable[..., Any]:
    return torch.compiler.disable(_pack) if imported else _pack  # type: ignore[no-any-return]


_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_dirt = itertools.count(1)


class _Filled(TorchDispatchMode):
    """Fills what a program allocates and may not write: zeros, or what the first run left there, would be the same twice."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave alone what is compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        if (
            getattr(func, "overloadpacket", None) in _EMPTY
            and type(output) is torch.Tensor
            and output.layout is torch.strided
        ):
            memory = torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage())
            memory.fill_(37 * next(_dirt) % 251)
        return output
