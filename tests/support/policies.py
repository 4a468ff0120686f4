"""Policies and budgets of drives that a test decides."""

from __future__ import annotations

from collections.abc import Callable

from ssdtrain.offload.policy import Action, ForwardProfile, SavedTensorInfo


class Decides:
    """A policy that decides by a function."""

    needs_modules = False

    def __init__(self, decide: Callable[[SavedTensorInfo], Action]) -> None:
        self.decide = decide

    def observe(self, forward: ForwardProfile) -> None:
        pass


class FakeDrive:
    """A drive that bears `rate` bytes per second; None: any number."""

    devices = ("nvme0n1",)

    def __init__(self, rate: float | None, years: float = 5.0) -> None:
        self.rate, self.years = rate, years

    def allowed_rate(self, written: object) -> float | None:
        return self.rate
