"""Routing of collectives: the codec of each hop, or the reason for which a call is sent uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ssdtrain.codecs.exact import Exact
from ssdtrain.comm import probe
from ssdtrain.comm.adaptation import AdaptiveBitWidth
from ssdtrain.comm.algorithms import Call
from ssdtrain.comm.coding import SECTION, Coder
from ssdtrain.comm.collectives import Collective, Sharded
from ssdtrain.comm.meter import Meter
from ssdtrain.comm.notices import ORDER_OF_SUMS, Notices
from ssdtrain.comm.policy import OFF, WARMUP_CODEC, Policy, Rule, codec_of
from ssdtrain.comm.topology import Topology, check_two_hop, find_topology
from ssdtrain.device.runtime import made_current

if TYPE_CHECKING:
    from ssdtrain.comm.communicator import RouteTrials

# Calls of different sizes whose bytes are remembered.
MOST_SIZES = 4096
COMPRESSIBLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUMS = ("SUM", "AVG")
OFF_EVERYWHERE = "off in the config"
OFF_INSIDE = "off inside a node"
TOO_SMALL = "smaller than min_bytes"
NOTHING_SAVED = "the codec has no fewer bits than the tensor"
NO_FEWER_BYTES = "compressed, it would be no smaller"
IN_FULL = "the first gather of a bucket, in full"
CHANGED = "weights changed since their last gather, in full"
CAPTURED = "in a CUDA graph, where the host cannot read whether the codec exact fits"
# Reasons that follow from the config or from sizes: counted, without a warning.
EXPECTED_REASONS = (
    OFF_EVERYWHERE,
    OFF_INSIDE,
    TOO_SMALL,
    NOTHING_SAVED,
    NO_FEWER_BYTES,
    IN_FULL,
    CHANGED,
    ORDER_OF_SUMS,
)

Specs = tuple[str, str]
"""Codecs inside a node and between nodes."""


@dataclass(frozen=True)
class Route:
    """The codecs of one call."""

    topology: Topology
    scatter: Specs
    """Codecs of a reduce-scatter, an all-to-all, or the first half of an all-reduce."""
    gather: Specs
    """Codecs of an all-gather, or the second half of an all-reduce."""

    @property
    def last_gather(self) -> str:
        """The codec of an all-gather: a payload takes both hops as it is."""
        return self.gather[0] if self.topology.between is None else self.gather[1]

    @property
    def specs(self) -> tuple[str, ...]:
        """The codecs in use, those inside of a node first."""
        groups = self.topology.inside, self.topology.between
        hops = zip(self.scatter + self.gather, groups * 2, strict=True)
        return tuple(spec for spec, group in hops if group is not None)


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
    if dtype not in COMPRESSIBLE_DTYPES:
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
        bit_widths: chooses the codec of gradient buckets; None: the policy does.

    Raises:
        ConfigError: `two_hop` is "on", and the job's nodes do not have two hops.
    """

    def __init__(
        self,
        policy: Policy,
        hosts: Sequence[str],
        meter: Meter,
        notices: Notices,
        device: torch.device,
        bit_widths: AdaptiveBitWidth | None = None,
    ) -> None:
        if policy.two_hop == "on":
            check_two_hop(hosts)
        self.policy = policy
        self.hosts = hosts
        self.meter = meter
        self.notices = notices
        self.device = device
        self.section = SECTION.get(device.type, SECTION["cuda"])
        self._bit_widths = bit_widths
        self._topologies: dict[dist.ProcessGroup, Topology] = {}
        self._fewer: dict[tuple[object, ...], bool] = {}
        self._verdicts: dict[tuple[object, ...], int] = {}
        self._last: dict[tuple[object, ...], int] = {}

    def topology(self, group: dist.ProcessGroup) -> Topology:
        """Return the grid of `group`. The first call is a collective of its ranks."""
        if group not in self._topologies:
            with made_current(self.device):
                self._topologies[group] = find_topology(group, self.hosts, self.policy.two_hop)
        return self._topologies[group]

    def choose(
        self,
        collective: Sharded,
        dimension: str,
        group: dist.ProcessGroup,
        step: int,
        bucket: str | None,
        trials: RouteTrials,
    ) -> Route | None:
        """Choose the route of a call by policy, errors of the bucket, bytes and measured times; None: it is sent uncompressed,
        and counted as such.

        Args:
            bucket: name of the gradients' bucket.
            trials: calls of this collective.
        """
        second = "dp_gather" if dimension == "dp" and collective.gathers else dimension
        planned = self.route(collective, (dimension, second), group)
        if planned is None:
            return None
        if bucket is not None and dimension == "dp":
            planned = self._adapted(planned, bucket)
        warming_up = step < self.policy.warmup_steps
        with_more_bits = None if warming_up or not self.policy.probe else self.with_more_bits(planned)
        routes = [
            route
            for route in (planned, with_more_bits)
            if route is not None and self._sends_fewer(collective, trials.call(route), route, warming_up)
        ]
        if not routes:
            self.count_fallback(dimension, NO_FEWER_BYTES, collective.raw_bytes(planned.topology.size))
            return None
        if not self.policy.probe:
            return routes[0]
        return self._probed(collective, dimension, routes, trials, warming_up)

    def _adapted(self, route: Route, bucket: str) -> Route:
        if self._bit_widths is None:
            return route
        spec = self._bit_widths.codec(route.topology.group, bucket)
        inside = spec if route.topology.between is None else route.scatter[0]
        return Route(route.topology, (inside, spec), route.gather)

    def route(
        self, collective: Collective, dimensions: tuple[str, str], group: dist.ProcessGroup
    ) -> Route | None:
        """Return the policy's route of a call; None: it is sent uncompressed, and counted as such. A call that sends nothing, or
        cannot be made, is not counted.

        Args:
            dimensions: of the reduction and of the gather; the same twice for calls that are only one of them.
        """
        ranks = dist.get_world_size(group)  # -1 for a group without this rank
        if ranks < 2 or not collective.fits(ranks):
            return None
        rules = [self.policy.rules[name] for name in dimensions]
        reason = reason_against(rules, collective.dtype, collective.nbytes, collective.op)
        if reason is None:
            topology = self.topology(group)
            scatter, gather = ((rule.inside, rule.between) for rule in rules)
            route = Route(topology, scatter, gather)
            one_order = ranks == 2 and op_name(collective.op) == "SUM"  # the same bits in any order
            if all(spec == OFF for spec in route.specs):
                reason = OFF_INSIDE
            elif collective.scatters and self.is_identity(route, collective.dtype):
                reason = NOTHING_SAVED
            elif collective.scatters and self._is_exact(route) and not one_order:
                reason = ORDER_OF_SUMS
            elif self.captures and any(codec_of(spec).may_overflow for spec in route.specs if spec != OFF):
                reason = CAPTURED
            else:
                return route
        self.count_fallback(dimensions[0], reason, collective.raw_bytes(ranks))
        return None

    @property
    def captures(self) -> bool:
        """Whether the current stream of the device captures a graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _is_exact(self, route: Route) -> bool:
        """Return whether no codec of `route` loses anything."""
        return all(spec == OFF or codec_of(spec).lossless for spec in route.specs)

    def is_identity(self, route: Route, dtype: torch.dtype) -> bool:
        """Return whether no codec of `route` has fewer bits than `dtype`."""
        return all(self.policy.is_identity(spec, dtype) for spec in route.specs)

    def count_fallback(self, dimension: str, reason: str, raw_bytes: int) -> None:
        """Count an uncompressed call; its reason is logged once."""
        if self.meter.count_fallback(dimension, reason, raw_bytes) and reason not in EXPECTED_REASONS:
            text = f"comm.{dimension}: some messages go uncompressed: {reason}"
            self.notices.add(f"{dimension}: {reason}", text)

    def coder(
        self,
        spec: str,
        dtype: torch.dtype,
        step: int,
        excluded_dtype: torch.dtype,
        excluded_codec: Exact | None,
    ) -> Coder:
        """Return the coder of `spec` for tensors of `dtype` in this step."""
        codec = None if self.policy.is_identity(spec, dtype) else self.policy.codec(spec, step)
        lossy = codec is not None and not codec.lossless
        return Coder(codec, dtype, excluded_dtype, excluded_codec if lossy else None, self.section)

    def with_more_bits(self, route: Route) -> Route | None:
        """Return `route` with int8 wherever it has fewer bits; None where it has none."""
        scatter, gather = (
            (_at_least_8_bits(inside), _at_least_8_bits(between))
            for inside, between in (route.scatter, route.gather)
        )
        wider = Route(route.topology, scatter, gather)
        return wider if wider != route else None

    def _sends_fewer(self, collective: Sharded, call: Call, route: Route, warming_up: bool) -> bool:
        """Return whether no rank sends more than the plain collective would, and all together fewer bytes with agreement. All
        ranks find the same, from sizes alone. Where the config says "raw", the same number of bytes is enough."""
        key = (*collective.sizes, route.topology.group, route.scatter, route.gather, warming_up)
        if key not in self._fewer:
            sent = collective.wire_bytes(call, self.policy.chunk)
            plain = collective.raw_bytes(len(sent))
            agreement = collective.agreement_bytes(len(sent))
            fewer = sum(sent) < (plain - agreement) * len(sent) or self.is_identity(route, collective.dtype)
            if len(self._fewer) >= MOST_SIZES:
                self._fewer.clear()
            self._fewer[key] = max(sent) <= plain and fewer
        return self._fewer[key]

    def _probed(
        self,
        collective: Sharded,
        dimension: str,
        routes: Sequence[Route],
        trials: RouteTrials,
        warming_up: bool,
    ) -> Route | None:
        """Measure `routes`, in order of preference, at the first call of each kind and size."""
        where = routes[0].topology
        raw = collective.raw_bytes(where.size)
        like = (collective.name, dimension, where.group)
        key = (*like, routes[0].specs, warming_up, collective.nbytes.bit_length() // 2)
        if key not in self._verdicts:
            sample = collective.sample(where.size)
            ways: list[Callable[[], object]] = [partial(trials.run, sample, route) for route in routes]
            ways.append(partial(sample.plain, where.group))
            before = min(self._last.get(like, 0), len(routes))
            verdict = probe.choose(ways, where.group, self.device, before)
            self._verdicts[key] = self._last[like] = verdict.chosen
            if verdict.chosen:
                sent = max(sample.wire_bytes(trials.call(routes[0]), self.policy.chunk))
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
