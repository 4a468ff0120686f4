"""The end of an optimizer step, and whether it dropped its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["follow"]


def follow(optimizer: Any, stepped: Callable[[bool], None]) -> Callable[[], None]:
    """Call `stepped(skipped)` after each step of one of Megatron's optimizers; returns what ends that.

    A step is skipped on an overflow of float16 gradients. Megatron decides that from reduced gradients, on all ranks alike.
    """
    plain = optimizer.step
    had_own = "step" in vars(optimizer)

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        successful = result[0] if isinstance(result, tuple) else result
        stepped(not successful)
        return result

    optimizer.step = step

    def undo() -> None:
        if vars(optimizer).get("step") is step:
            if had_own:
                optimizer.step = plain
            else:
                del optimizer.step

    return undo
