"""Counters in the groups and attributes of an optimizer, which its step changes beside parameters and their state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

_ABSENT = object()


class Options:
    """Lets every part of a step see the options of the groups as they were before the step, and merges what the parts leave.

    An optimizer that counts its steps in `group["step"]` would count the parts otherwise.

    Args:
        optimizer: before the step.

    Raises:
        RuntimeError: in `end_part` and `finish`, two parts leave different values, or one cannot be put back.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._name = type(optimizer).__name__
        self._groups = list(optimizer.param_groups)
        self._before = [_options(group) for group in self._groups]
        self._tensors = [_tensors(group) for group in self._groups]
        self._left: list[dict[str, Any] | None] = [None] * len(self._groups)
        self._optimizer = optimizer
        self._numbers = own_numbers(optimizer)

    def end_part(self, took_part: Sequence[bool]) -> None:
        """End a part of the step, in which these groups had parameters: the next one sees the options of before."""
        check_own(self._optimizer, self._numbers)
        for group, before in zip(self._groups, self._tensors, strict=True):
            changed = _tensors(group) ^ before
            if changed:
                raise RuntimeError(self._why(min(changed)[0], "is a tensor that a step changes"))
        for at, group in enumerate(self._groups):
            if not took_part[at]:
                continue
            now = _options(group)
            left = self._left[at]
            if left is not None and (different := different_options(left, now)):
                why = "comes out of a step differently for different parameters"
                raise RuntimeError(self._why(min(different), why))
            self._left[at] = now
            _put(group, self._before[at])

    def finish(self) -> None:
        """End the step: the groups have what the parts have left."""
        changed = self.changed()
        for group, left in zip(self._groups, self._left, strict=True):
            if left is not None:
                _put(group, left)
            elif changed and group["params"]:
                raise RuntimeError(
                    self._why(min(changed), "is changed by a step, and one group has no gradient")
                )

    def changed(self) -> set[str]:
        """Return the names of options that a part of the step has changed."""
        pairs = zip(self._before, self._left, strict=True)
        return {key for before, left in pairs if left is not None for key in different_options(before, left)}

    def refuse_changes(self) -> None:
        """Raise RuntimeError if a part of the step has changed an option."""
        if changed := self.changed():
            raise RuntimeError(self._why(min(changed), "is changed by a step"))

    def _why(self, key: str, what: str) -> str:
        return (
            f"{self._name} cannot be used with the config section state: the option {key} of its groups {what}, and the step "
            "comes to one chunk after the other: use an optimizer that updates each parameter alone"
        )


def own_numbers(optimizer: Optimizer) -> dict[str, int | float]:
    """Return counters of the optimizer itself: numbers among its attributes, and in its state those of no parameter."""
    numbers = {name: value for name, value in vars(optimizer).items() if _is_number(value)}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            inner = value if isinstance(value, Mapping) else {"": value}
            numbers |= {f"state[{key!r}] {name}".strip(): n for name, n in inner.items() if _is_number(n)}
    return numbers


def check_own(optimizer: Optimizer, before: Mapping[str, int | float]) -> None:
    """Raises RuntimeError: a counter of the optimizer itself has moved."""
    now = own_numbers(optimizer)
    for name in different_options(now, before):
        raise RuntimeError(
            f"{type(optimizer).__name__} cannot be used with the config section state: a step changes its attribute {name}, "
            "and would change it once for every chunk: use an optimizer that counts in the state of its parameters"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: copy.deepcopy(value) if isinstance(value, list | dict | set) else value
        for key, value in group.items()
        if key != "params" and not isinstance(value, torch.Tensor)
    }


def copied_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group as they are now, also those that are tensors, which are copied to host memory."""
    tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
    return _options(group) | {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}


def different_options(options: Mapping[str, Any], others: Mapping[str, Any]) -> set[str]:
    """Return the names of those that are not equal, or that one of the two lacks."""
    return {
        key
        for key in options.keys() | others.keys()
        if not _equal(options.get(key, _ABSENT), others.get(key, _ABSENT))
    }


def _put(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    now = _options(group)
    for key in now.keys() - options.keys():
        del group[key]
    for key, value in options.items():
        if key not in now or not _equal(now[key], value):
            group[key] = copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return type(value) is type(other) and (bool(value == other) or (value != value and other != other))
    except (RuntimeError, TypeError, ValueError):  # what has no single answer, such as an array
        return False


def _tensors(group: Mapping[str, Any]) -> set[tuple[str, int, int]]:
    """Return names, identities and versions of the options that are tensors."""
    return {
        (key, id(value), -1 if value.is_inference() else value._version)
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    }
