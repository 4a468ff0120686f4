"""Who records the forwards of a model, so that two ways of offloading never meet in one.

Of two pairs of saved-tensor hooks autograd calls the inner one only: the outer runtime would be enabled and see nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from torch import nn

__all__ = ["check_not_attached", "claim", "related"]

logger = logging.getLogger("ssdtrain")

_claims: list[tuple[weakref.ref[nn.Module], str]] = []


def claim(model: nn.Module, way: str) -> Callable[[], None]:
    """Let `way`, the function that the user called, record the forwards of `model` from now on. A warning says where it does so
    already.

    Returns:
        What ends the claim.

    Raises:
        ValueError: as `check_not_attached`.
    """
    check_not_attached(model, way)
    if any(held() is model for held, _ in _claims):
        logger.warning(
            "%s was called again with a model (%s) whose runtime was not closed: of two that offload the earlier one alone sees "
            "what is saved; call close() on that one first, or give one call all sections",
            way,
            type(model).__name__,
        )
    entry = (weakref.ref(model), way)
    _claims.append(entry)

    def release() -> None:
        if entry in _claims:
            _claims.remove(entry)

    return release


def check_not_attached(model: nn.Module, way: str) -> None:
    """Refuse a model that is recorded in another way, whole or in part. Runtimes of one way may nest.

    Raises:
        ValueError: names both ways and the remedy.
    """
    _claims[:] = [entry for entry in _claims if entry[0]() is not None]
    for held, other in _claims:
        found = held()
        if other != way and found is not None and related(found, model):
            raise ValueError(
                f"{other} offloads this model already ({type(found).__name__}), and of two only the inner one would see "
                f"what is saved: close what it returned before {way}, or leave out one of the two"
            )


def related(one: nn.Module, other: nn.Module) -> bool:
    """True if they are the same module, or one is inside of the other."""
    return any(module is other for module in one.modules()) or any(
        module is one for module in other.modules()
    )
