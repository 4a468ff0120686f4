"""Entry point for adapters: collectives by parallel dimension.

```python
comm = Communicator(Policy.from_config(config.comm), device)       # all ranks, once
work = comm.all_reduce(gradients, "dp", group, bucket=Bucket("layers.0-3"))
if work is None:
    dist.all_reduce(gradients, group=group)                        # uncompressed: the framework's own call
else:
    work.wait()
comm.step_end()
```

Every method returns a handle, or None where the call is sent uncompressed: the caller then issues the framework's own collective.
Either way the call is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.codecs import Key
from ssdtrain.codecs.exact import Exact
from ssdtrain.codecs.warm_up import warm_up
from ssdtrain.comm.adaptation import AdaptiveBitWidth
from ssdtrain.comm.algorithms import Call, Coders
from ssdtrain.comm.coding import Ranges
from ssdtrain.comm.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    DeltaAllGather,
    ReduceScatter,
    Sharded,
    flattened,
)
from ssdtrain.comm.feedback import Feedback
from ssdtrain.comm.meter import CommMetrics, Meter
from ssdtrain.comm.notices import Notices, add_inactive, few_bytes_saved
from ssdtrain.comm.overflow import Overflows
from ssdtrain.comm.point_to_point import PointToPoint
from ssdtrain.comm.policy import EXACT_CODEC, Policy, codec_of
from ssdtrain.comm.references import References
from ssdtrain.comm.routing import CHANGED, IN_FULL, Route, Router
from ssdtrain.comm.topology import node_name, world_if_none
from ssdtrain.comm.work import ChainedWork, CodingStreams, CompressedWork, UnderWay
from ssdtrain.device.runtime import made_current
from ssdtrain.features import FIRST_STEPS

logger = logging.getLogger("ssdtrain")

NOT_ROUNDED = (
    'comm.excluded: "bf16" is not applied: several groups of ranks reduce copies of the same parameters (tensor parallelism, '
    "embeddings that stages share), which have to stay equal; excluded gradients go in their own dtype"
)


class Bucket(NamedTuple):
    """Gradients or weights that are sent together in every step."""

    name: str
    """The same in every step for the same parameters: residuals are kept under it."""
    uncompressed_ranges: Ranges = ()
    """Elements of the flat tensor that are excluded from compression, ascending (start, stop)."""


class Communicator:
    """Compressed collectives on any process group, by `policy`. Used by one thread, in the same order on all ranks.

    The constructor is a collective call of all ranks: they compare their policies.

    Raises:
        RuntimeError: ranks differ in policy or in the version of the codecs; names them.
        ConfigError: `two_hop` is "on", and the job's nodes do not have two hops.
    """

    def __init__(self, policy: Policy, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.policy = policy = policy.for_device(self.device)
        self.meter = Meter()
        self.rank = dist.get_rank()
        self.notices = Notices(self.device)
        self.bit_widths: AdaptiveBitWidth | None = None
        if policy.adapt is not None:
            self.bit_widths = AdaptiveBitWidth(policy.adapt, policy.rules["dp"].between)
        hosts = agreed_hosts(policy, self.device)
        self.router = Router(policy, hosts, self.meter, self.notices, self.device, self.bit_widths)
        self._overflows = Overflows() if policy.may_overflow else None
        self.point_to_point = PointToPoint(self.router, self.key, self._overflows)
        self.feedback = None if policy.feedback == "off" else Feedback(policy.feedback)
        self.references = References(self.meter)
        self.steps = 0
        self._applied_steps = 0
        self.rounds_excluded = True
        """Whether `comm.excluded` applies; see `keep_excluded`."""
        self.loss_scale: Callable[[], float] | None = None
        """Factor that float16 training multiplies the gradients of a backward by, read once in each. None: 1."""
        self._scaled_at: tuple[int, int] | None = None
        self._streams = CodingStreams(self.device)
        self._under_way = UnderWay()
        for spec in sorted(policy.specs(self.steps)):
            warm_up(codec_of(spec), self.device, (torch.float32, torch.bfloat16))

    def key(self) -> Key:
        """Return the key of this rank's random numbers in this step."""
        return Key(self.policy.seed, self.steps, 0, self.rank)

    def all_reduce(
        self,
        tensor: Tensor,
        dimension: str,
        group: dist.ProcessGroup | None = None,
        op: Any = dist.ReduceOp.SUM,
        bucket: Bucket | None = None,
    ) -> CompressedWork | None:
        """Sum `tensor`, any shape, over ranks, in place; all ranks end with the same bits.

        Args:
            dimension: "dp" gathers by "dp_gather"; others are the same both ways.
            op: SUM or AVG; others go uncompressed.
            bucket: for gradients, named: error feedback belongs to it.
        """
        flat, then = flattened(tensor)
        return self._start(AllReduce(flat, flat, _ranges(bucket), op), dimension, group, bucket, then)

    def reduce_scatter(
        self,
        out: Tensor,
        tensor: Tensor,
        dimension: str,
        group: dist.ProcessGroup | None = None,
        op: Any = dist.ReduceOp.SUM,
        bucket: Bucket | None = None,
    ) -> CompressedWork | None:
        """Sum the contiguous `tensor` over ranks, in float32; each gets its share in `out`, as torch's reduce_scatter_tensor.
        `out` may be a part of `tensor`."""
        collective = ReduceScatter(tensor.detach().view(-1), out.detach().view(-1), _ranges(bucket), op)
        return self._start(collective, dimension, group, bucket)

    def all_gather(
        self,
        out: Tensor,
        tensor: Tensor,
        dimension: str,
        group: dist.ProcessGroup | None = None,
        bucket: Bucket | None = None,
    ) -> CompressedWork | None:
        """Gather every rank's `tensor` in the contiguous `out`, as torch's all_gather_into_tensor; its own is decoded like the
        others. `tensor` may be a part of `out`."""
        collective = AllGather(flattened(tensor)[0], out.detach().view(-1), _ranges(bucket))
        return self._start(collective, dimension, group, bucket)

    def gather_weights(
        self, out: Tensor, tensor: Tensor, group: dist.ProcessGroup | None, bucket: Bucket
    ) -> CompressedWork | ChainedWork | None:
        """Gather updated weights by their difference from what all ranks have in `out`.

        `out` [ranks x n] holds what this gave the last time, except for this rank's part, which may be anything. The first gather
        and that of weights that other code changed meanwhile, on any rank, are in full. See `references`.

        Args:
            tensor: [n]; this rank's updated weights. It may be its part of `out`.
        """
        group = world_if_none(group)
        flat, mine = out.detach().view(-1), flattened(tensor)[0]
        plain = AllGather(mine, flat, bucket.uncompressed_ranges)
        delta = DeltaAllGather(mine, flat, bucket.uncompressed_ranges)
        route = self._route(delta, "zero_gather", group)
        if route is None:
            # After an uncompressed gather there is no reference to take a difference from.
            self.references.forget(bucket.name)
            return None
        if self.router.is_identity(route, out.dtype) or codec_of(route.last_gather).lossless:
            return self._launch(plain, "zero_gather", route, bucket)
        start = route.topology.rank * mine.numel()

        def gathered() -> None:
            self.references.gathered(bucket.name, flat, start)

        changed = self.references.verify(group, self.steps)
        delta.reference = self.references.find(bucket.name, mine)
        if delta.reference is not None:
            return self._launch(delta, "zero_gather", route, bucket, gathered)
        reason = CHANGED if bucket.name in changed else IN_FULL
        self.router.count_fallback("zero_gather", reason, plain.raw_bytes(route.topology.size))
        self.references.remember(bucket.name, mine, group)
        return ChainedWork(plain.plain(group, async_op=True), gathered, (flat, mine))

    def _start(
        self,
        collective: Sharded,
        dimension: str,
        group: dist.ProcessGroup | None,
        bucket: Bucket | None,
        then: Callable[[], Any] | None = None,
    ) -> CompressedWork | None:
        """Choose a route and launch; None: the call is sent uncompressed."""
        route = self._route(collective, dimension, world_if_none(group), bucket)
        return None if route is None else self._launch(collective, dimension, route, bucket, then)

    def _route(
        self, collective: Sharded, dimension: str, group: dist.ProcessGroup, bucket: Bucket | None = None
    ) -> Route | None:
        trials = RouteTrials(self, dimension, collective)
        return self.router.choose(collective, dimension, group, self.steps, bucket and bucket.name, trials)

    def _launch(
        self,
        collective: Collective,
        dimension: str,
        route: Route,
        bucket: Bucket | None = None,
        then: Callable[[], Any] | None = None,
    ) -> CompressedWork:
        metrics = self.meter.count_compressed(dimension, collective.raw_bytes(route.topology.size))
        call = self._call(collective, dimension, route, metrics, bucket)
        call.collective = collective.name
        call.average = collective.op == dist.ReduceOp.AVG
        call.feedback = self._feedback_of(dimension) if bucket is not None else None
        call.measured = self.bit_widths is not None

        def finished() -> None:
            if then is not None:
                then()
            if call.feedback is not None and bucket is not None and self.bit_widths is not None:
                # All ranks have the same buckets, even where one had nothing to encode.
                errors = call.errors or [torch.zeros((), device=collective.tensors[0].device)]
                self.bit_widths.measured(route.topology.group, bucket.name, errors)

        group = route.topology.group
        if self._overflows is not None:
            name = bucket.name if bucket is not None else ""
            call.kind = (group.group_name, dimension, collective.name, name, collective.nbytes or 0)
            call.number = self._overflows.number(call.kind)
        steps = collective.steps(call, self.policy.chunk)
        stream, line = self._streams.of(dimension), self._under_way.of(group)
        work = CompressedWork(steps, metrics, self.meter, stream, collective.tensors, finished, line)
        if self._overflows is not None:
            self._overflows.began(call.kind, work)
        return work

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        dimension: str,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> CompressedWork | None:
        """Exchange rows as torch's all_to_all_single: `tensor` [rows, ...] split by rows, one part for each rank.

        Ranks may send different numbers of rows, so whether a message is worth coding is decided for each pair.
        """
        group = world_if_none(group)
        if (ranks := dist.get_world_size(group)) < 2:
            return None
        into, then = flattened(out)
        outgoing, incoming = (
            flat.split([n * whole.shape[1:].numel() for n in splits or [whole.shape[0] // ranks] * ranks])
            for flat, whole, splits in ((flattened(tensor)[0], tensor, in_splits), (into, out, out_splits))
        )
        minimum = self.policy.rules[dimension].min_bytes
        collective = AllToAll(incoming, outgoing, dist.get_rank(group), minimum)
        route = self.router.route(collective, (dimension, dimension), group)
        return None if route is None else self._launch(collective, dimension, route, then=then)

    # The loop

    def step_end(self, skipped: bool = False) -> None:
        """End an optimizer step. All ranks call it.

        Args:
            skipped: its gradients were dropped (overflow); then the residuals that came from them are, too.
        """
        self.steps += 1
        self._under_way.complete()
        if self._overflows is not None:
            self._overflows.complete()
        if self.feedback is not None:
            stale = self.feedback.step_end()
            if skipped and self.feedback.clear():
                logger.info("comm: the step was skipped, its residuals are dropped")
            elif stale:
                logger.info("comm: %d residuals of buckets that were rebuilt are dropped", stale)
        if self.bit_widths is not None:
            self.bit_widths.decide(self.steps)
        self._applied_steps += not skipped  # a skipped step gathers no weights
        if self._applied_steps == FIRST_STEPS and not skipped:
            add_inactive(self.notices, self.policy, self.metrics())
        self.notices.step_end(self.steps, self.policy.warmup_steps)

    def metrics(self) -> dict[str, CommMetrics]:
        """Return this rank's metrics by dimension, since the start."""
        return self.meter.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and the bits chosen for its buckets, from which a resumed run continues."""
        return {
            "steps": self.steps,
            "policy": self.policy.digest(),
            "ranks": dist.get_world_size(),
            "feedback": self.feedback and self.feedback.state_dict(),
            "bit_widths": self.bit_widths and self.bit_widths.state_dict(),
        }

    def begin_anew(self) -> None:
        """Drop the residuals, and what was chosen by the errors of a run's gradients. All ranks do it together."""
        for kept in (self.feedback, self.bit_widths):
            if kept is not None:
                kept.clear()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of the same rank. Residuals of another policy or world size are dropped, with a warning."""
        self.steps = int(state["steps"])
        self._scaled_at = None
        self.forget_weights()
        self.begin_anew()
        if self.feedback is None or state["feedback"] is None:
            return
        ranks = dist.get_world_size()
        if state["ranks"] != ranks or state["policy"] != self.policy.digest():
            logger.warning(
                "comm: the checkpoint's error-feedback residuals are of %d ranks with policy %s, this run has %d with %s: "
                "they are dropped, and feedback begins anew",
                state["ranks"], state["policy"], ranks, self.policy.digest(),
            )  # fmt: skip
            return
        self.feedback.load_state_dict(state["feedback"], self.device)
        if self.bit_widths is not None and state.get("bit_widths") is not None:
            self.bit_widths.load_state_dict(state["bit_widths"], self.device)

    def keep_excluded(self, repeated: Collection[Any]) -> None:
        """Send excluded gradients in their own dtype whatever `comm.excluded` says, if there are `repeated` parameters.

        Copies that ranks reduce in different groups have to stay equal, and sums that differ in their last bit may round apart.
        """
        if repeated and self.policy.excluded == "bf16":
            self.rounds_excluded = False
            self.notices.add("excluded", NOT_ROUNDED)

    def announce(self, parameters: Iterable[tuple[int, bool]], dtypes: Mapping[str, torch.dtype]) -> None:
        """Warn on rank 0 if sizes alone say that a step will send nearly as many bytes as without compression.

        Args:
            parameters: of those that train, the elements and whether they are excluded.
            dtypes: by dimension, what gradients or weights are sent in.
        """
        several_nodes = len(set(self.router.hosts)) > 1
        savings = few_bytes_saved(
            self.policy, several_nodes, list(parameters), dtypes, rounds_excluded=self.rounds_excluded
        )
        if savings is not None and self.rank == 0:
            share, remedy = savings
            logger.warning(
                "comm sends about %.0f%% of the plain bytes of gradients and weights; %s", 100 * share, remedy
            )

    def forget_weights(self) -> None:
        """Gather weights in full once, and free what is kept of them. All ranks call it together. Weights that change otherwise
        than by a step (a checkpoint is loaded, code writes in place) are found without it."""
        self.references.clear()

    # Parts

    def _call(
        self,
        collective: Collective,
        dimension: str,
        route: Route,
        metrics: CommMetrics,
        bucket: Bucket | None,
    ) -> Call:
        where, dtype = route.topology, collective.dtype
        excluded_dtype = dtype
        if dimension == "dp" and self.rounds_excluded:
            excluded_dtype = self.policy.excluded_dtype(dtype)
        # What comes after an exact section on a GPU runs when the caller waits. So there the last message alone has one.
        codec = self._excluded_codec(collective)
        early = codec if self.device.type == "cpu" else None
        before_gather = early if collective.gathers else codec
        hops = (early if where.between is not None else before_gather), before_gather, codec
        inside, between, gather = (
            self.router.coder(spec, dtype, self.steps, excluded_dtype, excluded_codec)
            for spec, excluded_codec in zip((*route.scatter, route.last_gather), hops, strict=True)
        )
        name = bucket.name if bucket is not None else f"{dimension}#{metrics.calls}"
        call = Call(where, Coders(inside, between), gather, metrics, f"{dimension}|{name}", self.key())
        call.overflows = self._overflows
        return call

    def _excluded_codec(self, collective: Collective) -> Exact | None:
        ranges = isinstance(collective, Sharded) and collective.uncompressed_ranges
        return (
            Exact() if ranges and self.policy.excluded == EXACT_CODEC and not self.router.captures else None
        )

    def _feedback_of(self, dimension: str) -> Feedback | None:
        if self.feedback is None or dimension != "dp":
            return None
        # A step that a scaler skips need not have an end.
        now = self.steps, torch._C._current_graph_task_id()
        if self.loss_scale is not None and self._scaled_at != now:
            self._scaled_at = now
            self.feedback.scale = float(self.loss_scale())
        return self.feedback


class RouteTrials:
    """Calls that the router compares: their results, metrics and residuals are dropped."""

    def __init__(self, comm: Communicator, dimension: str, collective: Collective) -> None:
        self._comm = comm
        self._dimension = dimension
        self._collective = collective
        has_feedback = comm.feedback is not None and dimension == "dp"
        self._feedback = Feedback(comm.policy.feedback) if has_feedback else None

    def call(self, route: Route) -> Call:
        """Return a call whose sizes are those of a real one."""
        return self._comm._call(self._collective, self._dimension, route, CommMetrics(), Bucket("probe"))

    def run(self, sample: Sharded, route: Route) -> None:
        """Run a sample of the collective to its end."""
        comm, call = self._comm, self.call(route)
        call.feedback = self._feedback
        if comm._overflows is not None:
            group = route.topology.group.group_name
            call.kind = (group, "probe", self._dimension, sample.name, sample.nbytes)
            call.number = comm._overflows.number(call.kind)
        steps = sample.steps(call, comm.policy.chunk)
        CompressedWork(steps, call.metrics, comm.meter, comm._streams.of(self._dimension)).wait()


def _ranges(bucket: Bucket | None) -> Ranges:
    return () if bucket is None else bucket.uncompressed_ranges


def agreed_hosts(policy: Policy, device: torch.device) -> list[str]:
    """Return the node of every rank, once all have the same policy. A collective call; errors: see `Communicator`."""
    answers: list[Any] = [None] * dist.get_world_size()
    with made_current(device):
        dist.all_gather_object(answers, (node_name(), policy.digest()))
    digests = [digest for _, digest in answers]
    if len(set(digests)) > 1:
        most = max(set(digests), key=digests.count)
        others = [rank for rank, digest in enumerate(digests) if digest != most]
        raise RuntimeError(
            f"ranks {others} have another ssdtrain.comm config, or another version of ssdtrain, than the rest "
            f"({', '.join(digests[rank] for rank in others[:8])} instead of {most}): give all ranks the same"
        )
    return [node for node, _ in answers]
