"""Proves that a block which backward runs again computes what it computed in forward, to the bit.

Note: [What is compared]
Backward of a recomputed block uses the graph of its forward, and takes nothing from the second run but the saved tensors. So in
some steps both runs take a fingerprint of each tensor when it is saved, and the second run raises before backward gets a tensor
that differs. Outputs are not compared: a difference that no saved tensor has reaches no gradient, and the second run ends at its
last saved tensor in these steps too, since what comes after may free what backward has gathered (hooks of sharded parameters). A
parameter is compared by identity: backward reads it as it is, also without recomputation. Bytes (uint8) prove nothing, since they
are the workspace of a kernel that may leave some unwritten (LSTM); nor do one or two integers on a GPU: attention kernels leave
the state of a generator unwritten where nothing is dropped.

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
block that differs stays an error there, since one rank alone cannot leave it out.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointError

from ssdtrain.offload.functorch import disabled_because, replaced_hooks, top_hooks, without_modes
from ssdtrain.profile.containers import leaves

__all__ = ["COMPARED_EVERY", "COMPARED_FIRST", "Proven", "Recomputations"]

logger = logging.getLogger("ssdtrain")

COMPARED_FIRST = 2
"""Number of first steps in which every recomputation is compared: while steps are profiled, those that are not measured."""

COMPARED_EVERY = 31
"""One step in so many is compared later. A prime: no period of a loop falls on these steps alone."""

_SLICE = 1 << 17
"""Number of words of 8 bytes of which a fingerprint makes a product at a time."""

_ODD = (-7046029254386353131, -4658895280553007687)
"""Two odd numbers of 64 bits (those of the splitmix64 generator, as signed integers)."""


class Recomputations:
    """What is compared, and which blocks differed.

    Args:
        agreed: whether ranks recompute the same blocks, so that one which differs stays an error.
    """

    def __init__(self, *, agreed: bool = False) -> None:
        self.differing: dict[str, str] = {}
        """Names of blocks that computed other values when they ran again, with what differed."""
        self._alike: set[str] = set()
        self._untried: set[str] = set()  # these give tensors away
        self._agreed, self._steps = agreed, 0
        self._warned = False

    @property
    def compares(self) -> bool:
        """Whether this step is one in which recomputations are compared."""
        return self._steps < COMPARED_FIRST or self._steps % COMPARED_EVERY == 0

    def tries(self, name: str) -> bool:
        """Whether the block, which is to be recomputed, is tried in forward before. See Note: [Trials] and Note: [Ranks]."""
        return self.compares and not self._agreed and name not in self._alike and name not in self._untried

    def note_untried(self, name: str) -> None:
        """A block gives tensors away: see Note: [What leaves a block beside its outputs]."""
        self._untried.add(name)

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

    def note_alike(self, name: str) -> None:
        """A block computed the same twice."""
        self._alike.add(name)

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
            self.recomputations.note_untried(self.name)
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

    def give_up(self, what: str) -> None:
        """Have backward use what the forward saved."""
        self._tried = True
        self.recomputations.note(self.name, what)
        self._drop_holders()

    def _try_again(self, saved: _SavedRecord) -> None:
        """Run the block again, only to compare."""
        self._tried = self.tries = True
        try:
            saved.unpack(saved.holder)
        except _TrialEnded:
            if self.name not in self.recomputations.differing:
                self.recomputations.note_alike(self.name)
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
        what = _difference(self._first.saved, run.saved)
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
        self.saved: list[list[_Fingerprint]] = []
        self.most = most


class _Fingerprint(NamedTuple):
    """A tensor as it was at one moment."""

    like: tuple[Any, ...]
    """Dtype, sizes and strides."""
    parameter: nn.Parameter | None = None
    """The parameter that it is, or is a view of."""
    digest: torch.Tensor | None = None
    """A sum of all bytes, weighted by their places, on the device of the tensor; None: it is a parameter, or has no bytes."""


_NONE = _Fingerprint((None, ()))


def _pack(proven: Proven, run: _ComparedRun, tensor: torch.Tensor) -> Any:
    pack, unpack = proven.hooks
    run.saved.append(_fingerprints(tensor))
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


def _difference(first: Sequence[list[_Fingerprint]], second: Sequence[list[_Fingerprint]]) -> str:
    """Compare what two runs saved, as many tensors each. Returns what differs; "": nothing. Waits for each device once."""
    by_device: dict[torch.device, list[tuple[int, _Fingerprint, torch.Tensor]]] = {}
    for number, (ones, others) in enumerate(zip(first, second, strict=True), 1):
        for one, other in zip_longest(ones, others, fillvalue=_NONE):
            if one.like != other.like or one.parameter is not other.parameter:
                return f"saved tensor {number} of {len(first)} was {_text(one)}, then {_text(other)}"
            if one.digest is not None and other.digest is not None and _is_conclusive(one):
                by_device.setdefault(one.digest.device, []).append((number, one, one.digest != other.digest))
    for compared in by_device.values():
        with without_modes():
            answers = torch.stack([differs for _, _, differs in compared]).tolist()
        for (number, one, _), differs in zip(compared, answers, strict=True):
            if differs:
                return f"saved tensor {number} of {len(first)} differs: {_text(one)}"
    return ""


def _is_conclusive(one: _Fingerprint) -> bool:
    """See Note: [What is compared]."""
    dtype, sizes, *_ = one.like
    if dtype is torch.uint8:
        return False
    if one.digest is None or one.digest.device.type == "cpu" or dtype.is_floating_point or dtype.is_complex:
        return True
    return dtype is torch.bool or math.prod(sizes) > 2


def _text(one: _Fingerprint) -> str:
    dtype, sizes, *_ = one.like
    what = "" if one.parameter is None else "a parameter, "
    return f"{what}{str(dtype).removeprefix('torch.')} {list(sizes)}"


def _fingerprints(tensor: torch.Tensor) -> list[_Fingerprint]:
    """Return one of a tensor, or those of the plain tensors that a wrapper around some is made of."""
    with without_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            return [one for name in names for one in _fingerprints(getattr(tensor, name))]
        base = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        strided = tensor.layout is torch.strided and not tensor.is_nested
        like = (
            tensor.dtype,
            tuple(tensor.shape) if not tensor.is_nested else (),
            tensor.stride() if strided else (),
        )
        if isinstance(base, nn.Parameter):
            return [_Fingerprint(like, base)]
        if not strided or tensor.is_quantized or tensor.device.type == "meta":
            return [_Fingerprint(like)]
        return [_Fingerprint(like, digest=_digest(tensor.detach()))]


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


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Sum up all bytes of a tensor on its device, as words of 8 bytes, each times an odd number of its place in a slice; slices
    are summed up in the same way. It allocates a few slices, and a copy of a tensor that is not dense."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # Of an expanded dimension the memory has one element.
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.numel():
        tensor = tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if not dense or tensor.storage_offset() * tensor.itemsize % 8:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    length = flat.numel() // 8
    words, rest = flat[: 8 * length].view(torch.int64), flat[8 * length :].to(torch.int64)
    weights = _weights(min(length, _SLICE), tensor.device)
    sums = (
        [(part * weights[: part.numel()]).sum().reshape(1) for part in words.split(_SLICE)] if length else []
    )
    line = torch.cat([*sums, rest])
    return (line * _weights(line.numel(), line.device)).sum()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits without a pattern, drawn from no generator."""
    if count > _SLICE:
        return _made_weights(count, device)
    weights = _slice_weights.get(device)
    if weights is None:
        weights = _slice_weights[device] = _made_weights(_SLICE, device)
        if device.type == "cuda":  # any stream may read them from now on
            torch.cuda.current_stream(device).synchronize()
    return weights[:count]


_slice_weights: dict[torch.device, torch.Tensor] = {}
"""Weights of a slice, kept: to make them takes longer than a slice's sum."""


def _made_weights(count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        weights = torch.arange(1, count + 1, device=device) * _ODD[0]
        weights ^= weights >> 29
        weights *= _ODD[1]
        return weights ^ (weights >> 32) | 1
