"""What adapters call: collectives by parallel dimension.

```python
comm = Communicator(Policy.from_config(config.comm), device)       # all ranks, once
work = comm.all_reduce(gradients, "dp", group, bucket=Bucket("layers.0-3"))
if work is None:
    dist.all_reduce(gradients, group=group)                        # not compressed: as it always was
else:
    work.wait()
comm.step_end()
```

Every verb returns a `Pending`, or None where the call goes uncompressed: then the caller does what it would have done without the
plugin. Either way the call is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.codecs import Key
from ssdtrain.comm import algorithms, operations
from ssdtrain.comm.adaptation import Adaptation
from ssdtrain.comm.agreement import agreed_hosts
from ssdtrain.comm.algorithms import Call, Coders
from ssdtrain.comm.coding import Ranges
from ssdtrain.comm.difference import Differences
from ssdtrain.comm.feedback import Feedback
from ssdtrain.comm.meter import CommMetrics, Meter, ring_bytes
from ssdtrain.comm.point_to_point import PointToPoint
from ssdtrain.comm.policy import Policy
from ssdtrain.comm.routing import Route, Router
from ssdtrain.comm.work import Pending

logger = logging.getLogger("ssdtrain")

# Steps after which a dimension that was asked for must have done something.
FIRST_STEPS = 3


class Bucket(NamedTuple):
    """Gradients or weights that travel together in every step."""

    name: str
    """The same in every step for the same parameters: residuals are kept under it."""
    exact: Ranges = ()
    """Elements of the flat tensor that are excluded from compression, ascending (start, stop)."""


class Communicator:
    """Compressed collectives on any process group, as `policy` says. One thread uses it, on all ranks in the same order.

    Making one is a collective call of all ranks: they compare their policies.

    Raises:
        RuntimeError: ranks differ in policy or in the version of the codecs; names them.
    """

    def __init__(self, policy: Policy, device: torch.device | str = "cpu") -> None:
        self.policy = policy
        self.device = torch.device(device)
        self.meter = Meter()
        self.rank = dist.get_rank()
        self.router = Router(policy, agreed_hosts(policy), self.meter, self.device)
        self.point_to_point = PointToPoint(self.router, self.key)
        self.feedback = None if policy.feedback == "off" else Feedback(policy.feedback)
        self.differences = Differences()
        self.steps = 0
        self._adaptations: dict[dist.ProcessGroup, Adaptation] = {}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def key(self) -> Key:
        """Of the random numbers of this rank in this step."""
        return Key(self.policy.seed, self.steps, 0, self.rank)

    # Sums

    def all_reduce(
        self,
        tensor: Tensor,
        dimension: str,
        group: dist.ProcessGroup | None = None,
        op: Any = dist.ReduceOp.SUM,
        bucket: Bucket | None = None,
    ) -> Pending | None:
        """Sum `tensor`, any shape, over ranks, in place; all ranks end with the same bits.

        Args:
            dimension: "dp" gathers as "dp_gather" says; others are the same both ways.
            op: SUM or AVG; others go uncompressed.
            bucket: for gradients, named: error feedback belongs to it.
        """
        flat = tensor.detach().reshape(-1)
        after = (
            None
            if flat.data_ptr() == tensor.data_ptr()
            else lambda: tensor.detach().copy_(flat.view(tensor.shape))
        )
        return self._start("all_reduce", dimension, flat, flat, group, op, bucket, after)

    def reduce_scatter(
        self,
        out: Tensor,
        tensor: Tensor,
        dimension: str,
        group: dist.ProcessGroup | None = None,
        op: Any = dist.ReduceOp.SUM,
        bucket: Bucket | None = None,
    ) -> Pending | None:
        """Sum the contiguous `tensor` over ranks; each gets its share of it in `out`, as torch's reduce_scatter_tensor.

        `out` may be a part of `tensor`. Sums are in float32.
        """
        values, into = tensor.detach().view(-1), out.detach().view(-1)
        return self._start("reduce_scatter", dimension, values, into, group, op, bucket)

    # Gathers

    def all_gather(
        self,
        out: Tensor,
        tensor: Tensor,
        dimension: str,
        group: dist.ProcessGroup | None = None,
        bucket: Bucket | None = None,
    ) -> Pending | None:
        """Every rank's `tensor` into the contiguous `out`, this rank's own decoded like the others, as torch's
        all_gather_into_tensor.

        `tensor` may be a part of `out`.
        """
        values, into = tensor.detach().reshape(-1), out.detach().view(-1)
        return self._start("all_gather", dimension, values, into, group, None, bucket)

    def gather_weights(
        self, out: Tensor, tensor: Tensor, group: dist.ProcessGroup | None, bucket: Bucket
    ) -> Pending | None:
        """`all_gather` of updated weights, by their difference from what all ranks have in `out`.

        `out` [ranks x n] holds what this gave the last time (the first time: what is gathered as it is), except for this rank's
        part, which may be anything. `tensor` [n] are this rank's updated weights; it may be its part of `out`. See
        `difference`.
        """
        group = _world_if_none(group)
        route = self.router.route("all_gather", ("zero_gather", "zero_gather"), out.nbytes, out.dtype, group)
        if route is None:
            return None
        flat, mine = out.detach().view(-1), tensor.detach().reshape(-1)
        if all(self.policy.is_identity(spec, out.dtype) for spec in route.specs):
            return self._start("all_gather", "zero_gather", mine, flat, group, None, bucket)
        if self.policy.probe:
            found = self._probed("all_gather", "zero_gather", route, mine, flat, None)
            if found is None:
                return None
            route = found
        if not self.differences.known(bucket.name, tensor):
            # The caller gathers it as it is, and all ranks then have the same.
            self.differences.remember(bucket.name, tensor)
            raw = ring_bytes("all_gather", out.nbytes, route.topology.size)
            self.router.fell_back("zero_gather", "the first gather of a bucket, in full", raw)
            return None
        change = self.differences.start(bucket.name, flat, mine, route.topology.rank)
        figures = self._count("zero_gather", ring_bytes("all_gather", out.nbytes, route.topology.size))
        call = self._call("zero_gather", route, torch.float32, figures, bucket)
        call.added = True
        steps = operations.pieces(
            "all_gather", call, change.sent, change.into, bucket.exact, self.policy.chunk
        )
        return Pending(
            steps, figures, self.meter, self._stream, (out, change.sent, change.into), change.finish
        )

    def _start(
        self,
        kind: str,
        dimension: str,
        values: Tensor,
        into: Tensor,
        group: dist.ProcessGroup | None,
        op: Any,
        bucket: Bucket | None,
        after: Callable[[], Any] | None = None,
    ) -> Pending | None:
        group = _world_if_none(group)
        second = "dp_gather" if (kind, dimension) == ("all_reduce", "dp") else dimension
        whole = into if kind == "all_gather" else values
        route = self.router.route(kind, (dimension, second), whole.nbytes, whole.dtype, group, op or "SUM")
        if route is None:
            return None
        route = self._adapted(route, dimension, bucket)
        if self.policy.probe:
            found = self._probed(kind, dimension, route, values, into, op)
            if found is None:
                return None
            route = found
        figures = self._count(dimension, ring_bytes(kind, whole.nbytes, route.topology.size))
        call = self._call(dimension, route, whole.dtype, figures, bucket)
        call.average = op == dist.ReduceOp.AVG
        call.feedback = self.feedback if bucket is not None and dimension == "dp" else None
        call.measured = self.policy.adapt is not None

        def finished() -> None:
            if after is not None:
                after()
            if call.feedback is not None and bucket is not None and self.policy.adapt is not None:
                # All ranks have the same buckets, even where one had nothing to encode.
                errors = call.errors or [torch.zeros((), device=values.device)]
                self._adaptation(group, dimension).measured(bucket.name, errors)

        steps = operations.pieces(kind, call, values, into, bucket.exact if bucket else (), self.policy.chunk)
        return Pending(steps, figures, self.meter, self._stream, (values, into), finished)

    def _probed(
        self, kind: str, dimension: str, route: Route, values: Tensor, into: Tensor, op: Any
    ) -> Route | None:
        """The route that pays on this network; None: the framework's own does."""
        warming_up = self.steps < self.policy.warmup_steps
        milder = None if warming_up else self.router.milder(route)
        routes = [route] if milder is None else [route, milder]
        where = route.topology

        def ways() -> list[Callable[[], None]]:
            a, b = operations.samples(kind, values, into, where.size)
            feedback = None if self.feedback is None or dimension != "dp" else Feedback(self.feedback.kind)

            def coded(one: Route) -> Callable[[], None]:
                def way() -> None:
                    call = self._call(dimension, one, values.dtype, CommMetrics(), Bucket("probe"))
                    call.feedback = feedback
                    steps = operations.pieces(kind, call, a, b, (), self.policy.chunk)
                    Pending(steps, call.figures, self.meter, self._stream).wait()

                return way

            return [*map(coded, routes), lambda: operations.plain(kind, a, b, where.group, op)]

        nbytes = (into if kind == "all_gather" else values).nbytes
        raw = ring_bytes(kind, nbytes, where.size)
        way = self.router.probed(kind, dimension, route, nbytes, raw, warming_up, ways)
        return None if way is None else routes[way]

    # Exchanges

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        dimension: str,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Pending | None:
        """As torch's all_to_all_single: `tensor` [rows, ...] split by rows, one part for each rank.

        Ranks may send different numbers of rows, so whether a message is worth coding is decided for each pair.
        """
        group = _world_if_none(group)
        ranks = dist.get_world_size(group)
        row = tensor.shape[1:].numel()
        sends = [found * row for found in (in_splits or [tensor.shape[0] // ranks] * ranks)]
        receives = [found * row for found in (out_splits or [out.shape[0] // ranks] * ranks)]
        raw = (sum(sends) - sends[dist.get_rank(group)]) * tensor.element_size()
        route = self.router.route(
            "all_to_all", (dimension, dimension), None, tensor.dtype, group, raw_bytes=raw
        )
        if route is None:
            return None
        where = route.topology
        own = where.rank
        minimum = self.policy.rules[dimension].min_bytes
        figures = self._count(dimension, raw)
        call = self._call(dimension, route, tensor.dtype, figures, None)
        inside, between = call.scatter.inside, call.scatter.between
        peers = [inside if where.nodes[i] == where.nodes[own] else between for i in range(ranks)]
        incoming = list(out.detach().view(-1).split(receives))
        flat = tensor.detach().reshape(-1)
        outgoing = list(flat.split(sends))
        steps = algorithms.all_to_all(call, incoming, outgoing, peers, minimum, "0")
        return Pending([steps], figures, self.meter, self._stream, (out, flat))

    # The loop

    def step_end(self, skipped: bool = False) -> None:
        """An optimizer step is over, on all ranks.

        Args:
            skipped: its gradients were dropped (overflow); then the residuals that came from them are, too.
        """
        self.steps += 1
        self.point_to_point.settle()
        if self.feedback is not None:
            stale = self.feedback.step_end()
            if skipped and self.feedback.clear():
                logger.info("comm: the step was skipped, its residuals are dropped")
            elif stale:
                logger.info("comm: buckets have been rebuilt, %d residuals are dropped", stale)
        for group, adaptation in self._adaptations.items():
            adaptation.decide(self.steps, group)
        if self.steps == FIRST_STEPS:
            self._complain_of_idleness()

    def _complain_of_idleness(self) -> None:
        for dimension, found in self.figures().items():
            if found.calls and not found.compressed and not self.policy.rules[dimension].off:
                reasons = ", ".join(f"{reason} ({count})" for reason, count in found.fallbacks.items())
                logger.warning(
                    "comm.%s compressed nothing in the first %d steps: %s", dimension, FIRST_STEPS, reasons
                )

    def figures(self) -> dict[str, CommMetrics]:
        """Traffic of this rank by dimension, since the start."""
        return self.meter.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped: residuals, by rank."""
        feedback = self.feedback.state_dict() if self.feedback is not None else None
        return {
            "steps": self.steps,
            "policy": self.policy.digest(),
            "ranks": dist.get_world_size(),
            "feedback": feedback,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` of the same rank gave. Residuals of another policy or number of ranks are dropped, loudly."""
        self.steps = int(state["steps"])
        self.differences.clear()
        if self.feedback is None or state["feedback"] is None:
            return
        ranks = dist.get_world_size()
        if state["ranks"] != ranks or state["policy"] != self.policy.digest():
            self.feedback.clear()
            logger.warning(
                "comm: the checkpoint's error-feedback residuals are of %d ranks with policy %s, this run has %d with %s: "
                "they are dropped, and feedback begins anew",
                state["ranks"], state["policy"], ranks, self.policy.digest(),
            )  # fmt: skip
            return
        self.feedback.load_state_dict(state["feedback"], self.device)

    def forget_weights(self) -> None:
        """Weights have changed otherwise than by a step (a checkpoint was loaded): gather them in full once."""
        self.differences.clear()

    # Parts

    def _count(self, dimension: str, raw_bytes: int) -> CommMetrics:
        figures = self.meter.of(dimension)
        figures.calls += 1
        figures.compressed += 1
        figures.raw_bytes += raw_bytes
        return figures

    def _call(
        self, dimension: str, route: Route, dtype: torch.dtype, figures: CommMetrics, bucket: Bucket | None
    ) -> Call:
        where = route.topology
        inside, between = (self.router.coder(spec, dtype, self.steps) for spec in route.scatter)
        last = route.gather[0] if where.between is None else route.gather[1]
        gather = self.router.coder(last, dtype, self.steps)
        name = bucket.name if bucket is not None else f"{dimension}#{figures.calls}"
        return Call(where, Coders(inside, between), gather, dtype, figures, f"{dimension}|{name}", self.key())

    def _adaptation(self, group: dist.ProcessGroup, dimension: str) -> Adaptation:
        if group not in self._adaptations:
            assert self.policy.adapt is not None
            self._adaptations[group] = Adaptation(self.policy.adapt, self.policy.rules[dimension].between)
        return self._adaptations[group]

    def _adapted(self, route: Route, dimension: str, bucket: Bucket | None) -> Route:
        if self.policy.adapt is None or bucket is None or dimension != "dp":
            return route
        spec = self._adaptation(route.topology.group, dimension).codec(bucket.name)
        inside = spec if route.topology.between is None else route.scatter[0]
        return Route(route.topology, (inside, spec), route.gather)


def _world_if_none(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed is not initialised"
    return found
