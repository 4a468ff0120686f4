"""From a call of a framework to how it goes: which codecs on which hops, or why as it always did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ssdtrain.comm import probe
from ssdtrain.comm.coding import Coder
from ssdtrain.comm.meter import Meter, ring_bytes
from ssdtrain.comm.policy import OFF, WARMUP_CODEC, Policy, Rule, codec_of
from ssdtrain.comm.topology import Topology, find_topology

logger = logging.getLogger("ssdtrain")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUMS = ("SUM", "AVG")
NOTHING_SAVED = "the codec has no fewer bits than the tensor"
# Reasons that the user asked for: they are counted, and not worth a warning.
ASKED = (
    "off in the config",
    "smaller than min_bytes",
    "off inside a node",
    NOTHING_SAVED,
    "the first gather of a bucket, in full",
)

Specs = tuple[str, str]
"""Codecs inside a node and between nodes."""


@dataclass(frozen=True)
class Route:
    """How a call goes."""

    topology: Topology
    scatter: Specs
    """Of a reduce-scatter, an all-to-all, or the first half of an all-reduce."""
    gather: Specs
    """Of an all-gather, or the second half of an all-reduce."""

    @property
    def specs(self) -> tuple[str, ...]:
        """What is really coded with, most wanted first."""
        found = []
        for inside, between in (self.scatter, self.gather):
            if self.topology.inside is not None:
                found.append(inside)
            if self.topology.between is not None:
                found.append(between)
        return tuple(found)


def op_name(op: object) -> str:
    """ "SUM" for `ReduceOp.SUM`, and so on."""
    return str(getattr(op, "name", None) or op).rsplit(".", 1)[-1].upper()


class Router:
    """Decides, and remembers. All ranks of a group decide alike: by the policy, sizes, dtypes and measurements agreed upon.

    Args:
        hosts: the node of each global rank.
    """

    def __init__(self, policy: Policy, hosts: Sequence[str], meter: Meter, device: torch.device) -> None:
        self.policy = policy
        self.hosts = hosts
        self.meter = meter
        self.device = device
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self._verdicts: dict[tuple[object, ...], int] = {}

    def topology(self, group: dist.ProcessGroup) -> Topology:
        """The grid of `group`; its ranks ask for the first time together."""
        found = self._topologies.get(group)
        if found is None:
            found = self._topologies[group] = find_topology(group, self.hosts, self.policy.two_hop)
        return found

    def route(
        self,
        kind: str,
        dimensions: tuple[str, str],
        nbytes: int | None,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        op: object = "SUM",
        raw_bytes: int | None = None,
    ) -> Route | None:
        """The way of a call on tensors of `nbytes` in all; None: as the framework does, and counted so.

        Args:
            dimensions: of the reduction and of the gather; the same twice for calls that are only one of them.
            nbytes: None where the sizes of messages differ and their minimum is looked at one by one.
            raw_bytes: what this rank would send, where no formula tells.
        """
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return None
        rules = [self.policy.rules[name] for name in dimensions]
        reason = self._refusal(rules, nbytes, dtype, op)
        if reason is None:
            topology = self.topology(group)
            scatter, gather = ((rule.inside, rule.between) for rule in rules)
            found = Route(topology, scatter, gather)
            sums = kind in ("all_reduce", "reduce_scatter")
            saved = [spec for spec in found.specs if not self.policy.is_identity(spec, dtype)]
            if all(spec == OFF for spec in found.specs):
                reason = "off inside a node"
            elif sums and not saved:
                reason = NOTHING_SAVED
            else:
                return found
        self.fell_back(
            dimensions[0], reason, ring_bytes(kind, nbytes or 0, ranks) if raw_bytes is None else raw_bytes
        )
        return None

    def _refusal(
        self, rules: Sequence[Rule], nbytes: int | None, dtype: torch.dtype, op: object
    ) -> str | None:
        if all(rule.off for rule in rules):
            return "off in the config"
        if dtype not in DTYPES:
            return f"dtype {str(dtype).removeprefix('torch.')}"
        if op_name(op) not in SUMS:
            return f"reduction {op_name(op)}"
        if nbytes is not None and nbytes < min(rule.min_bytes for rule in rules if not rule.off):
            return "smaller than min_bytes"
        return None

    def fell_back(self, dimension: str, reason: str, raw_bytes: int) -> None:
        """Count a call that goes uncompressed, and say why once."""
        if self.meter.fell_back(dimension, reason, raw_bytes) and reason not in ASKED:
            logger.warning("comm.%s: some messages go uncompressed: %s", dimension, reason)

    def coder(self, spec: str, dtype: torch.dtype, step: int) -> Coder:
        """What codes tensors of `dtype` with `spec` in this step."""
        return Coder(None if self.policy.is_identity(spec, dtype) else self.policy.codec(spec, step))

    def milder(self, route: Route) -> Route | None:
        """The same call with int8 wherever fewer bits were asked for; None where there is no such place."""
        scatter, gather = (
            (_at_least_8_bits(inside), _at_least_8_bits(between))
            for inside, between in (route.scatter, route.gather)
        )
        found = Route(route.topology, scatter, gather)
        return found if found != route else None

    def probed(
        self,
        kind: str,
        dimension: str,
        route: Route,
        nbytes: int,
        raw_bytes: int,
        warming_up: bool,
        ways: Callable[[], list[Callable[[], None]]],
    ) -> int | None:
        """Which of `ways` to go, measured at the first call of its like: 0 as planned, the last as the framework does (None)."""
        key = (kind, dimension, route.topology.group, route.specs, warming_up, nbytes.bit_length() // 2)
        if key not in self._verdicts:
            tried = ways()
            verdict = probe.choose(tried, route.topology.group, self.device)
            self._verdicts[key] = -1 if verdict.chosen == len(tried) - 1 else verdict.chosen
            if verdict.chosen:
                instead = "as the framework sends them" if self._verdicts[key] < 0 else f"with {WARMUP_CODEC}"
                logger.warning(
                    "comm.%s: %s of %.1f MiB took %.1f ms with %s and %.1f ms without: such messages go %s "
                    "(comm.probe: false would compress them all the same)",
                    dimension, kind, nbytes / 2**20, verdict.seconds[0] * 1e3, "+".join(route.specs),
                    verdict.seconds[-1] * 1e3, instead,
                )  # fmt: skip
        chosen = self._verdicts[key]
        if chosen < 0:
            self.meter.fell_back(dimension, "the codec costs more time than it saves", raw_bytes)
            return None
        return chosen


def _at_least_8_bits(spec: str) -> str:
    return WARMUP_CODEC if spec != OFF and codec_of(spec).bits_per_value < 8 else spec
