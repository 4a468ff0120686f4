"""Checks between ranks at start: equal policies, and the node of each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm.policy import Policy
from ssdtrain.comm.topology import node_name
from ssdtrain.device.runtime import made_current


def agreed_hosts(policy: Policy, device: torch.device) -> list[str]:
    """The node of every rank, once all of them have the same policy. A collective call of all ranks.

    Args:
        device: of this rank.

    Raises:
        RuntimeError: ranks differ in policy or in the version of the codecs; names them.
    """
    found: list[Any] = [None] * dist.get_world_size()
    with made_current(device):
        dist.all_gather_object(found, (node_name(), policy.digest()))
    digests = [digest for _, digest in found]
    if len(set(digests)) > 1:
        most = max(set(digests), key=digests.count)
        others = [rank for rank, digest in enumerate(digests) if digest != most]
        raise RuntimeError(
            f"ranks {others} have another ssdtrain.comm config, or another version of ssdtrain, than the rest "
            f"({', '.join(digests[rank] for rank in others[:8])} instead of {most}): give all ranks the same"
        )
    return [node for node, _ in found]
