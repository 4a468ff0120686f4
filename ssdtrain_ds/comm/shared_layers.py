"""Layers whose collectives follow the policy of another engine.

The autograd functions of DeepSpeed's experts and tensor-parallel layers belong to no engine: with several engines in one process,
what they send follows the engine that was attached last, also where their own engine has another policy, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ssdtrain.comm import Communicator
from ssdtrain_ds import _compat
from ssdtrain_ds._compat_compact import tensor_parallel_layers
from ssdtrain_ds.block import BLOCK

__all__ = ["warn_of_shared_layers"]

logger = logging.getLogger("ssdtrain")


def warn_of_shared_layers(
    engine: Any, own: Communicator | None, others: Iterable[tuple[Any, Communicator]]
) -> None:
    """Warn where layers of a new engine do not send as its own config says, or those of an earlier engine as theirs does.

    Args:
        own: of the engine; None: its config compresses nothing.
        others: the engines that compress beside it, each with its own. One without a comm section that was made earlier is not
            among them: nothing tells whether it is still in use.
    """
    mine = _dimensions(engine)
    if own is None and not mine:
        return
    for other, their_own in others:
        for dimension in mine | _dimensions(other):
            rules = [None if one is None else one.policy.rules[dimension] for one in (own, their_own)]
            if rules[0] != rules[1] and any(rule is not None and not rule.off for rule in rules):
                logger.warning(
                    "two engines of this process have different %s.comm.%s, and layers of both send as the one says that "
                    "was made last with a comm section: give both the same section, or destroy one before the other is made",
                    BLOCK,
                    dimension,
                )
                return


def _dimensions(engine: Any) -> set[str]:
    """Of parallelism, whose collectives are issued by layers of the engine's model."""
    found = {"ep"} if _compat.has_experts(engine) else set()
    return found | ({"tp"} if tensor_parallel_layers(engine.module) else set())
