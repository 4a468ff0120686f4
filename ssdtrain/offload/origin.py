"""Where a saved tensor came from, for error messages: found when there is an error, so that it costs nothing before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ssdtrain.offload.region import Region

__all__ = ["origin_text"]

FURTHEST = 256
"""Nodes of the graph that are searched for a parameter."""


def origin_text(region: Region, models: Iterable[nn.Module]) -> str:
    """The place of `region`, and what is known of the module that saved it. Called while its tensor is being unpacked.

    Where modules are not watched, the module is found by the nearest parameter in the graph, from the node that asks for the
    tensor towards the inputs.
    """
    place = f"region {region.index} of chunk {region.tape.chunk}"
    if region.module:
        return f'{place}, saved by module "{region.module}"'
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None:
        return place
    parameter = _nearest_parameter(node, models)
    near = f' next to parameter "{parameter}"' if parameter else ""
    return f"{place}, saved for {node.name()}{near}"


def _nearest_parameter(node: Any, models: Iterable[nn.Module]) -> str:
    names = {id(p): name for model in models for name, p in nn.Module.named_parameters(model)}
    line, seen = deque([node]), {node}
    while line and len(seen) < FURTHEST:
        current = line.popleft()
        name = names.get(id(getattr(current, "variable", None)))
        if name is not None:
            return name
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                line.append(following)
    return ""
