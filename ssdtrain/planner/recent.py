"""Times of a model from the latest recorded steps.

Note: [A pause in a step that was recorded]
A page fault, a garbage collection or a checkpoint in one hook of one step is no property of the model. So the times of a region
are medians over the latest steps, and a plan that was made from fewer than `STEPS` is made again when there are so many. What
the host spends on the transfers of a region is known only where the region left, and one pause there would keep the region in
memory for good, where it is never measured again: such a cost counts once it was seen `STEPS` times, before that at most as much
as is usual on its tape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median_low

from ssdtrain.profile.passes import TapeTimes

__all__ = ["STEPS", "RecentSteps"]

STEPS = 3
"""Number of recorded steps whose median is used; of each, at most as many forwards of a chunk count."""

_Shape = tuple[int, ...]


class RecentSteps:
    """See Note: [A pause in a step that was recorded]."""

    def __init__(self) -> None:
        self._steps: deque[dict[int, list[TapeTimes]]] = deque(maxlen=STEPS)
        self._costs: dict[int, _HostCosts] = {}

    def add(self, tapes: Sequence[TapeTimes]) -> None:
        """A step that was recorded: its forwards whose backward came."""
        step: dict[int, list[TapeTimes]] = {}
        for tape in sorted(tapes, key=lambda one: sum(_shape(one)), reverse=True):
            alike = step.setdefault(tape.chunk, [])
            if len(alike) < STEPS and (not alike or _shape(tape) == _shape(alike[0])):
                alike.append(tape)
        self._steps.append(step)
        for chunk, alike in step.items():
            costs = self._costs.get(chunk)
            if costs is None or costs.shape != _shape(alike[0]):
                costs = self._costs[chunk] = _HostCosts(_shape(alike[0]))
            costs.add(alike[0])

    def seen(self, tape: TapeTimes) -> int:
        """Return in how many of the latest steps the largest forwards of its chunk were like `tape`."""
        return sum(bool(alike) for alike in self._alike(tape))

    def typical(self, tape: TapeTimes) -> TapeTimes:
        """`tape`, which is the largest of its chunk in the latest step, with the times of the latest steps."""
        alike = [one.regions for step in self._alike(tape) for one in step]
        costs = self._costs[tape.chunk]
        regions = tuple(
            latest._replace(
                forward=median_low(one.forward for one in every),
                backward=median_low(one.backward for one in every),
                storing=storing,
                loading=loading,
            )
            for latest, storing, loading, *every in zip(
                tape.regions, costs.storing(tape), costs.loading(tape), *alike, strict=True
            )
        )
        return tape._replace(regions=regions)

    def _alike(self, tape: TapeTimes) -> list[list[TapeTimes]]:
        shape = _shape(tape)
        found = [step.get(tape.chunk, []) for step in self._steps]
        return [alike for alike in found if alike and _shape(alike[0]) == shape]


class _HostCosts:
    """What the host spent on stores and loads, by the place on tapes of one shape, each time that there was one."""

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape
        self._storing: list[deque[float]] = [deque(maxlen=STEPS) for _ in shape]
        self._loading: list[deque[float]] = [deque(maxlen=STEPS) for _ in shape]

    def add(self, tape: TapeTimes) -> None:
        for region, storing, loading in zip(tape.regions, self._storing, self._loading, strict=True):
            if region.storing:
                storing.append(region.storing)
            if region.loading:
                loading.append(region.loading)

    def storing(self, tape: TapeTimes) -> list[float]:
        return _expected(self._storing, list(_begin_stores(tape)))

    def loading(self, tape: TapeTimes) -> list[float]:
        return _expected(self._loading, [not region.stays for region in tape.regions])


def _begin_stores(tape: TapeTimes) -> Iterator[bool]:
    """Whether a hook may begin stores: all that an operator saved begin in the first hook of the next one."""
    movable = False  # anything that the operator of the region before has saved
    before = None
    for region in tape.regions:
        same = before is not None and region.operator == before.operator != -1
        yield movable and not same
        movable = not region.stays or (movable and same)
        before = region


def _expected(seen: Sequence[Sequence[float]], possible: Sequence[bool]) -> list[float]:
    """What each place costs, of what was `seen` there. `possible`: whether there may be a cost where none was seen."""
    medians = [median_low(seconds) if seconds else None for seconds in seen]
    usual = median_low([one for one in medians if one is not None] or [0.0])
    return [
        usual * may if one is None else one if len(seconds) >= STEPS else min(one, usual)
        for one, seconds, may in zip(medians, seen, possible, strict=True)
    ]


def _shape(tape: TapeTimes) -> _Shape:
    return tuple(region.nbytes for region in tape.regions)
