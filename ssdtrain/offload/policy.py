"""Which saved tensors leave memory: the object that the pack hook asks for every region.

`AmountPolicy` is `offload.amount`, `ModulePolicy` is `offload.include`, `exclude` and `modules`. Another policy is given to
`Runtime` or `ssdtrain.attach` and takes the place of the amount:

```python
class KeepAttention:
    needs_modules = True

    def decide(self, saved: SavedTensorInfo) -> Action:
        return KEEP if any(module.kind == "Attention" for module in saved.modules) else OFFLOAD

    def observe(self, forward: ForwardProfile) -> None:
        pass
```
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple, Protocol

import torch

from ssdtrain.config import Amount
from ssdtrain.profile.modules import Running, matches

__all__ = [
    "KEEP",
    "OFFLOAD",
    "STAY",
    "Action",
    "AmountPolicy",
    "ForwardProfile",
    "ForwardSizes",
    "ModulePolicy",
    "OffloadPolicy",
    "SavedTensorInfo",
]


class SavedTensorInfo(NamedTuple):
    """What is known of a region when it is saved."""

    chunk: int
    """The model chunk (virtual pipeline stage)."""
    microbatch: int
    """-1 where the training loop does not name it."""
    position: int
    """Place on the tape, from 0."""
    saved_before: int
    """Bytes of the tape before this region."""
    nbytes: int
    dtype: torch.dtype
    """Dtype of the first tensor saved in the region."""
    modules: tuple[Running, ...]
    """The modules that were running, outermost first; () where they are unknown, or the policy needs none."""

    @property
    def module(self) -> str:
        """Qualified name of the module that saved it; "" where it is unknown."""
        return self.modules[-1].name if self.modules else ""


class Action(NamedTuple):
    """What happens to a region."""

    offload: bool
    codec: str | None = None
    """The codec that encodes it; None: that of the config."""
    tier: Literal["host", "ssd", "device"] | None = None
    """Where it is stored; None: in the first tier that has room. "device": it stays in the memory that it is in, encoded; what
    `codec` cannot hold or makes no smaller stays as it is."""
    stays: bool = False
    """It stays in memory whatever the plan is: plans count it as memory that cannot be freed."""
    part: float = 1.0
    """The leading share of its bytes that is offloaded, 0 < part <= 1, in whole pages of 4 KiB; the rest stays in memory. For
    tensors so large that all or nothing is too coarse. A region that a codec encodes is offloaded whole."""
    must_write: bool = False
    """Its store is not cancelled where backward comes before it has begun: by it the bandwidth of a tier is measured. It may be
    while another such store is under way."""


KEEP = Action(False)
STAY = Action(False, stays=True)
OFFLOAD = Action(True)


class ForwardProfile(NamedTuple):
    """A forward that completed."""

    chunk: int
    microbatch: int
    saved_bytes: int
    """Bytes of all its regions, kept ones included."""
    store_wait_seconds: float
    """Total time since the start that training has waited for stores."""
    load_wait_seconds: float
    """Total time since the start that training has waited for loads."""


class OffloadPolicy(Protocol):
    """Decides for each region. Called under the engine's lock, in the pack hook: microseconds count.

    Attributes:
        needs_modules: fill `SavedTensorInfo.modules`, which takes a hook before and after every module's forward.
    """

    needs_modules: bool

    def decide(self, saved: SavedTensorInfo) -> Action:
        """What happens to the region that is being saved."""

    def observe(self, forward: ForwardProfile) -> None:
        """Called when a forward has completed; not called for one that ended with an exception."""


class ForwardSizes:
    """Bytes that forwards saved, by model chunk: chunks of a pipeline differ (the first has the embedding).

    Lengths vary from one forward to the next, and repeat within a few: after a short microbatch comes a long one. So of the
    latest forwards the largest counts.
    """

    REMEMBERED = 8
    """Number of latest forwards of a chunk."""

    def __init__(self) -> None:
        self.forwards = 0
        """Number of forwards that saved something; the others do not count."""
        self._latest: dict[int, deque[int]] = {}
        self._usual: dict[int, int] = {}

    def add(self, nbytes: int, chunk: int = 0) -> None:
        """A forward is complete."""
        if nbytes:
            self.forwards += 1
            self._latest.setdefault(chunk, deque(maxlen=self.REMEMBERED)).append(nbytes)

    def largest(self, chunk: int = 0) -> int:
        """Bytes of the largest of the latest forwards; 0: there was none."""
        return max(self._latest.get(chunk, ()), default=0)

    def settle(self) -> None:
        """Compare later forwards with the latest ones."""
        self._usual = {chunk: self.largest(chunk) for chunk in self._latest}

    def changed(self) -> bool:
        """Whether the largest of a chunk is another one by a fifth and more than it was at `settle`."""
        every = self._usual.items()
        return any(not 0.8 * usual <= self.largest(chunk) <= 1.2 * usual for chunk, usual in every)


class AmountPolicy:
    """`offload.amount`: everything, a fraction of the bytes, or all but a number of bytes that stay.

    The last saved tensors of a tape are needed first by backward, so they are the ones that stay. How large a tape will be is
    known from the tapes before it: until one has completed, everything is offloaded.
    """

    needs_modules = False

    def __init__(self, amount: Amount) -> None:
        self.amount = amount
        self.always = OFFLOAD if amount.kind == "all" else KEEP if amount.is_nothing else None
        """What it answers whatever is saved; None: that depends."""
        self._sizes = ForwardSizes()

    def decide(self, saved: SavedTensorInfo) -> Action:
        if self.always is not None:
            return self.always
        total = self._sizes.largest(saved.chunk)
        if not total:
            return OFFLOAD
        if self.amount.kind == "fraction":
            limit = int(self.amount.value * total)
        else:
            limit = total - int(self.amount.value)
        return OFFLOAD if saved.saved_before + saved.nbytes <= limit else KEEP

    def observe(self, forward: ForwardProfile) -> None:
        self._sizes.add(forward.saved_bytes, forward.chunk)


class ModulePolicy:
    """`offload.include`, `offload.exclude` and `offload.modules`: what the modules they name save, and what is inside of these,
    stays or goes where they say; the rest goes by the policy.

    Args:
        policy: of what they do not decide.
        include: patterns of modules; () is all.
        exclude: patterns of modules that are left out of these.
        rules: (pattern, "keep", "offload", "host" or "ssd"), of which the first that fits counts.
    """

    needs_modules = True

    def __init__(
        self,
        policy: OffloadPolicy,
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        rules: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.policy = policy
        self.include = include
        self.exclude = exclude
        self.rules = rules
        self._known: dict[tuple[Running, ...], Action | None] = {}

    def decide(self, saved: SavedTensorInfo) -> Action:
        stack = saved.modules
        if stack not in self._known:
            self._known[stack] = self._of(stack)
        return self._known[stack] or self.policy.decide(saved)

    def _of(self, stack: tuple[Running, ...]) -> Action | None:
        """Return what happens to all that is saved in these modules; None: the policy decides."""
        if (self.include and not matches(stack, self.include)) or matches(stack, self.exclude):
            return STAY
        place = next((place for pattern, place in self.rules if matches(stack, (pattern,))), "offload")
        return _RULED[place]

    def observe(self, forward: ForwardProfile) -> None:
        self.policy.observe(forward)


_RULED: dict[str, Action | None] = {
    "keep": STAY,
    "offload": None,
    "host": Action(True, tier="host"),
    "ssd": Action(True, tier="ssd"),
}
"""What happens where a rule of `offload.modules` fits."""
