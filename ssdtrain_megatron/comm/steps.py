"""The end of an optimizer step, and whether it dropped its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ssdtrain.integration.patching import Patches

__all__ = ["follow"]


def follow(patches: Patches, optimizer: Any, stepped: Callable[[bool], None]) -> None:
    """Call `stepped(skipped)` after each step of one of Megatron's optimizers, until `patches` are undone.

    A step is skipped on an overflow of float16 gradients. Megatron decides that from reduced gradients, on all ranks alike.
    """

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            successful = result[0] if isinstance(result, tuple) else result
            stepped(not successful)
            return result

        return step

    patches.replace(optimizer, "step", wrap)
