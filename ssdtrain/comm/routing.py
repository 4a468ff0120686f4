"""Routing of collectives: the codec of each hop, or the reason for which a call is sent uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ssdtrain.comm import probe
from ssdtrain.comm.algorithms import Call
from ssdtrain.comm.coding import Coder
from ssdtrain.comm.collectives import Collective, Sharded
from ssdtrain.comm.meter import Meter
from ssdtrain.comm.notices import Notices
from ssdtrain.comm.policy import OFF, WARMUP_CODEC, Policy, Rule, codec_of
from ssdtrain.comm.topology import Topology, check_two_hop, find_topology
from ssdtrain.device.runtime import made_current

# Calls of different sizes whose bytes are remembered.
MOST_SIZES = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUMS = ("SUM", "AVG")
OFF_EVERYWHERE = "off in the config"
OFF_INSIDE = "off inside a node"
TOO_SMALL = "smaller than min_bytes"
NOTHING_SAVED = "the codec has no fewer bits than the tensor"
NO_FEWER_BYTES = "compressed, it would be no smaller"
IN_FULL = "the first gather of a bucket, in full"
CHANGED = "weights changed since their last gather, in full"
# Reasons that follow from the config or from sizes: counted, without a warning.
EXPECTED_REASONS = (OFF_EVERYWHERE, OFF_INSIDE, TOO_SMALL, NOTHING_SAVED, NO_FEWER_BYTES, IN_FULL, CHANGED)

Specs = tuple[str, str]
"""Codecs inside a node and between nodes."""


@dataclass(frozen=True)
class Route:
    """The codecs of one call."""

    topology: Topology
    scatter: Specs
    """Of a reduce-scatter, an all-to-all, or the first half of an all-reduce."""
    gather: Specs
    """Of an all-gather, or the second half of an all-reduce."""

    @property
    def specs(self) -> tuple[str, ...]:
        """The codecs in use, those inside of a node first."""
        found = []
        for inside, between in (self.scatter, self.gather):
            if self.topology.inside is not None:
                found.append(inside)
            if self.topology.between is not None:
                found.append(between)
        return tuple(found)


def op_name(op: object) -> str:
    """ "SUM" for `ReduceOp.SUM`, and so on."""
    op = getattr(op, "op", None) or op  # of an object, as a sum with a factor is one: its text is its address
    return str(getattr(op, "name", None) or op).rsplit(".", 1)[-1].upper()


def reason_against(
    rules: Sequence[Rule], dtype: torch.dtype, nbytes: int | None, op: object = dist.ReduceOp.SUM
) -> str | None:
    """Why a message is not compressed by `rules`, whatever their codecs are; None: nothing is against it.

    Args:
        nbytes: of the message; None where it is not known.
    """
    if all(rule.off for rule in rules):
        return OFF_EVERYWHERE
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if op_name(op) not in SUMS:
        return f"reduction {op_name(op)}"
    if nbytes is not None and nbytes < min(rule.min_bytes for rule in rules if not rule.off):
        return TOO_SMALL
    return None


class Router:
    """Chooses the route of each call. All ranks of a group choose the same one, by policy, sizes, dtypes and shared measurements.

    Args:
        hosts: the node of each global rank.

    Raises:
        ConfigError: `two_hop` is "on", and the job's nodes do not have two hops.
    """

    def __init__(
        self, policy: Policy, hosts: Sequence[str], meter: Meter, notices: Notices, device: torch.device
    ) -> None:
        if policy.two_hop == "on":
            check_two_hop(hosts)
        self.policy = policy
        self.hosts = hosts
        self.meter = meter
        self.notices = notices
        self.device = device
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self._fewer: dict[tuple[object, ...], bool] = {}
        self._verdicts: dict[tuple[object, ...], int] = {}
        self._last: dict[tuple[object, ...], int] = {}

    def topology(self, group: dist.ProcessGroup) -> Topology:
        """The grid of `group`. The first call is a collective of its ranks."""
        found = self._topologies.get(group)
        if found is None:
            with made_current(self.device):
                found = find_topology(group, self.hosts, self.policy.two_hop)
            self._topologies[group] = found
        return found

    def route(
        self, collective: Collective, dimensions: tuple[str, str], group: dist.ProcessGroup
    ) -> Route | None:
        """The route of a call; None: it is sent uncompressed, and counted as such. A call that sends nothing, or cannot be made,
        is not counted.

        Args:
            dimensions: of the reduction and of the gather; the same twice for calls that are only one of them.
        """
        ranks = dist.get_world_size(group)
        # Of a group without this rank it is -1.
        if ranks < 2 or not collective.fits(ranks):
            return None
        rules = [self.policy.rules[name] for name in dimensions]
        reason = reason_against(rules, collective.dtype, collective.nbytes, collective.op)
        if reason is None:
            topology = self.topology(group)
            scatter, gather = ((rule.inside, rule.between) for rule in rules)
            found = Route(topology, scatter, gather)
            if all(spec == OFF for spec in found.specs):
                reason = OFF_INSIDE
            elif collective.scatters and self.is_identity(found, collective.dtype):
                reason = NOTHING_SAVED
            else:
                return found
        self.count_fallback(dimensions[0], reason, collective.raw_bytes(ranks))
        return None

    def is_identity(self, route: Route, dtype: torch.dtype) -> bool:
        """Whether no codec of `route` has fewer bits than `dtype`."""
        return all(self.policy.is_identity(spec, dtype) for spec in route.specs)

    def count_fallback(self, dimension: str, reason: str, raw_bytes: int) -> None:
        """Count an uncompressed call; its reason is logged once."""
        if self.meter.count_fallback(dimension, reason, raw_bytes) and reason not in EXPECTED_REASONS:
            text = f"comm.{dimension}: some messages go uncompressed: {reason}"
            self.notices.add(f"{dimension}: {reason}", text)

    def coder(self, spec: str, dtype: torch.dtype, step: int, excluded_dtype: torch.dtype) -> Coder:
        """The coder of `spec` for tensors of `dtype` in this step."""
        codec = None if self.policy.is_identity(spec, dtype) else self.policy.codec(spec, step)
        return Coder(codec, dtype, excluded_dtype)

    def with_more_bits(self, route: Route) -> Route | None:
        """The same route with int8 wherever `route` has fewer bits; None where it has none."""
        scatter, gather = (
            (_at_least_8_bits(inside), _at_least_8_bits(between))
            for inside, between in (route.scatter, route.gather)
        )
        found = Route(route.topology, scatter, gather)
        return found if found != route else None

    def sends_fewer(self, collective: Sharded, call: Call, route: Route, warming_up: bool) -> bool:
        """Whether no rank sends more than the plain collective would, and all together fewer bytes, agreement included; all ranks
        find the same, from sizes alone. Where the config says "raw", the same number of bytes is enough."""
        key = (*collective.sizes, route.topology.group, route.scatter, route.gather, warming_up)
        found = self._fewer.get(key)
        if found is None:
            sent = collective.wire_bytes(call, self.policy.chunk)
            plain = collective.raw_bytes(len(sent))
            agreement = collective.agreement_bytes(len(sent))
            fewer = sum(sent) < (plain - agreement) * len(sent) or self.is_identity(route, collective.dtype)
            found = max(sent) <= plain and fewer
            if len(self._fewer) >= MOST_SIZES:
                self._fewer.clear()
            self._fewer[key] = found
        return found

    def probed(
        self,
        collective: Sharded,
        dimension: str,
        routes: Sequence[Route],
        call: Call,
        warming_up: bool,
        run: Callable[[Sharded, Route], None],
    ) -> Route | None:
        """The route to take, measured at the first call of each kind and size; None: the call is sent uncompressed, and counted
        as such.

        Args:
            routes: in order of preference.
            call: by the first of them.
            run: a sample of the collective to its end, by a route.
        """
        where = routes[0].topology
        raw = collective.raw_bytes(where.size)
        like = (collective.name, dimension, where.group)
        key = (*like, routes[0].specs, warming_up, collective.nbytes.bit_length() // 2)
        if key not in self._verdicts:
            sample = collective.sample(where.size)
            ways = [partial(run, sample, route) for route in routes]
            before = min(self._last.get(like, 0), len(routes))
            verdict = probe.choose(
                [*ways, lambda: sample.plain(where.group)], where.group, self.device, before
            )
            self._verdicts[key] = self._last[like] = verdict.chosen
            if verdict.chosen:
                sent = max(sample.wire_bytes(call, self.policy.chunk))
                self._write(sample, dimension, routes, verdict, sent)
        chosen = self._verdicts[key]
        if chosen == len(routes):
            self.meter.count_fallback(dimension, "the codec costs more time than it saves", raw)
            return None
        return routes[chosen]

    def _write(
        self,
        collective: Sharded,
        dimension: str,
        routes: Sequence[Route],
        verdict: probe.Verdict,
        wire_bytes: int,
    ) -> None:
        """Log a probe that did not choose the first route."""
        plain = verdict.chosen == len(routes)
        instead = "as the framework sends them" if plain else f"with {WARMUP_CODEC}"
        seconds, raw_bytes = verdict.seconds, collective.raw_bytes(routes[0].topology.size)
        text = (
            f"comm.{dimension}: {collective.name} of {collective.nbytes / 2**20:.1f} MiB: "
            f"{'+'.join(routes[0].specs)} sends {wire_bytes / 1e6:.2f} instead of {raw_bytes / 1e6:.2f} MB from each rank and "
            f"takes {seconds[0] * 1e3:.1f} ms, without it takes {seconds[-1] * 1e3:.1f} ms "
            f"({raw_bytes / max(seconds[-1], 1e-9) / 1e9:.2f} GB/s; medians of {verdict.rounds}): "
            f"such messages go {instead} (comm.probe: false would compress them all the same)"
        )
        self.notices.add(f"{dimension}, {collective.name}, {instead}", text)


def _at_least_8_bits(spec: str) -> str:
    return WARMUP_CODEC if spec != OFF and codec_of(spec).bits_per_value < 8 else spec
