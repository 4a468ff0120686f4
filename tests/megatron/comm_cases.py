"""What happens to collectives beside ordinary steps: skipped ones, overflows, checkpoints, layers of others. Two ranks
run each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.grad_scaler import ConstantGradScaler

import ssdtrain_megatron
from ssdtrain_megatron.attachment import Attachment
from ssdtrain_megatron.comm import Hooks
from tests.megatron.rows import INTERLEAVED, MOE, Row
from tests.megatron.training import LENGTH, SEQUENCES, Trainer, layout

BALANCED = {"comm": {"preset": "balanced", "min_bytes": 0, "probe": False, "warmup_steps": 0}}
REPLICAS = Row("dp2, bf16", 2, bf16=True, ddp={"use_distributed_optimizer": True})


class Warnings(logging.Handler):
    """Collects what is said loudly."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings() -> Iterator[list[str]]:
    handler, logger = Warnings(), logging.getLogger("ssdtrain")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@contextmanager
def trained(steps: int, row: Row = REPLICAS, config: Any = None) -> Iterator[tuple[Trainer, Attachment]]:
    with layout(row):
        trainer = Trainer(row)
        with ssdtrain_megatron.attach(
            trainer.chunks, config or BALANCED, optimizer=trainer.optimizer
        ) as attachment:
            for number in range(steps):
                trainer.step(number)
            yield trainer, attachment


def residual_bytes(attachment: Attachment) -> int:
    comm = attachment.runtime.comm
    return comm.feedback.nbytes


def skipped(directory: str) -> dict[str, Any]:
    """Megatron finds an overflow in the third step, and drops its gradients."""
    with trained(2) as (trainer, attachment):
        before = residual_bytes(attachment)
        trainer.optimizer.prepare_grads = lambda: True
        assert trainer.optimizer.step() == (False, None, None)
        after = residual_bytes(attachment)
        del trainer.optimizer.prepare_grads
        trainer.step(2)
        return {
            "residual_bytes": [before, after, residual_bytes(attachment)],
            "steps": attachment.runtime.comm.steps,
        }


def overflow(directory: str) -> dict[str, Any]:
    """One rank has an infinite gradient; the norm is Megatron's, of what was decoded."""
    norms = {}
    for name, row in {"all-reduce": Row("dp2", 2), "reduce-scatter": REPLICAS}.items():
        with trained(1, row) as (trainer, _):
            parameter = next(
                p for n, p in trainer.chunks[0].named_parameters() if n.endswith("linear_fc1.weight")
            )
            if dist.get_rank() == 1:
                parameter.register_hook(lambda gradient: gradient * float("inf"))
            norms[name] = trainer.step(1)[1]
    return norms


def checkpoint(directory: str) -> dict[str, Any]:
    """Residuals are written, and taken by runs of the same layout on which every rank finds its own."""
    found: dict[str, Any] = {}
    saved, partial = Path(directory, "whole"), Path(directory, "partial")
    with trained(2) as (_, attachment):
        state = attachment.runtime.comm.state_dict()
        attachment.save(saved)
        attachment.save(partial)
        if dist.get_rank() == 1:
            next(partial.rglob("rank_00001.pt")).unlink()
        dist.barrier()
    with trained(0) as (_, attachment), warnings() as said:
        comm = attachment.runtime.comm
        attachment.load(partial)
        found["with a rank missing"] = [comm.steps, residual_bytes(attachment), list(said)]
        attachment.load(saved)
        now = comm.state_dict()
        pieces, before = now["feedback"]["pieces"], state["feedback"]["pieces"]
        found["equal"] = (
            now["steps"] == state["steps"] == 2
            and pieces.keys() == before.keys()
            and all(torch.equal(pieces[name][0], before[name][0]) for name in pieces)
        )
        found["residual_bytes"] = residual_bytes(attachment)
    with warnings() as at_start, trained(0, config={"comm": {"preset": "balanced"}}):
        found["at start"] = [text for text in at_start if text.startswith("comm sends about")]
    said.clear()
    with trained(0, Row("tp2", 2, tp=2)) as (_, attachment), warnings() as said:
        attachment.load(saved)
        found["on another layout"] = [attachment.runtime.comm.steps, residual_bytes(attachment), list(said)]
    return found


def second_model(directory: str) -> dict[str, Any]:
    """A model that nothing is attached to takes turns with one whose collectives are compressed, on the same groups."""
    found = {}
    for row in (Row("tp2", 2, tp=2), Row("pp2", 2, pp=2), Row("pp2 vp2", 2, pp=2, vp=2, options=INTERLEAVED)):
        with layout(row):
            alone = Trainer(row)
            expected = [alone.step(number) for number in range(2)]
        with trained(1, row) as (trainer, attachment):
            other, steps, calls = Trainer(row), [], []
            for number in range(2):
                for turn in (other, trainer):
                    result = turn.step(number)
                    steps += [result] if turn is other else []
                    found_calls = attachment.statistics()
                    calls.append(sum(figures.calls for figures in found_calls.comm.values()))
            found[row.name] = {
                "equal": steps == expected,
                "weights": other.weights() == alone.weights(),
                "calls": calls,
            }
    return found


def probabilities(directory: str) -> list[list[int]]:
    """The shapes that are offered to the communicator where experts get their tokens by gathering all of them."""
    options = {**MOE, "moe_token_dispatcher_type": "allgather", "sequence_parallel": True}
    shapes = []
    with trained(0, Row("tp2, moe", 2, tp=2, model="moe", options=options)) as (trainer, attachment):
        comm: Any = attachment.runtime.comm

        def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(out: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> Any:
                shapes.append(list(tensor.shape))
                return plain(out, tensor, *rest)

            return call

        comm.all_gather, comm.reduce_scatter = noting(comm.all_gather), noting(comm.reduce_scatter)
        trainer.step(0)
    return shapes


def loss_scale(directory: str) -> list[Any]:
    """A CPU does not train in float16: bfloat16 with Megatron's own scaler, whose scale doubles after every second step."""
    found = []
    with layout(REPLICAS):
        trainer = Trainer(REPLICAS)
        scaler = ConstantGradScaler(1.0)
        for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
            part.grad_scaler, part.found_inf = scaler, torch.zeros(1)
        with ssdtrain_megatron.attach(trainer.chunks, BALANCED, optimizer=trainer.optimizer) as attachment:
            comm = attachment.runtime.comm
            assert comm.feedback is not None
            for number in range(5):
                scaler.scale.fill_(2.0 ** (number // 2))
                norm = trainer.step(number)[1]
                found.append([float(scaler.scale), comm.feedback.scale, residual_bytes(attachment), norm])
    return found


CALLS = """
import torch

def calls(x, wide, ranks, group):
    torch.distributed.all_reduce(x, group=group)
    handle = torch.distributed.all_reduce(wide, group=group, async_op=True)
    handle.wait()
    whole = torch.empty(ranks * x.shape[0], *x.shape[1:], dtype=x.dtype)
    torch.distributed.all_gather_into_tensor(whole, x, group=group)
    share = torch.empty_like(x)
    torch.distributed.reduce_scatter_tensor(share, whole, group=group, async_op=True).wait()
    return x, wide, share
"""


def transformer_engine(directory: str) -> dict[str, Any]:
    """Layers that call torch.distributed themselves, from modules with these names."""
    row = Row("tp2", 2, tp=2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, wide = (torch.randn(LENGTH, SEQUENCES, width, generator=generator) for width in (64, 256))
    found: dict[str, Any] = {}
    with layout(row):
        trainer = Trainer(row)
        group = parallel_state.get_tensor_model_parallel_group()
        replicas = parallel_state.get_data_parallel_group()
        expected = called("plain", x, wide, group)
        config = {"comm": {**BALANCED["comm"], "dp": "off"}}
        with ssdtrain_megatron.attach(trainer.chunks, config, optimizer=trainer.optimizer) as attachment:
            assert attachment.runtime.comm is not None
            for name, where, dtype in (
                ("transformer_engine.pytorch.distributed", group, torch.float32),
                ("transformer_engine.pytorch.cross_entropy", group, torch.float32),
                ("somebody.elses", group, torch.float32),
                ("transformer_engine.pytorch.of another group", replicas, torch.float32),
                ("transformer_engine.pytorch.integers", group, torch.int64),
            ):
                before = attachment.runtime.comm.metrics().get("tp")
                got = called(name, x.to(dtype), wide.to(dtype), where)
                now = attachment.runtime.comm.metrics().get("tp")
                errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]
                found[name] = [(now.calls if now else 0) - (before.calls if before else 0), errors]
    return found


def called(name: str, x: torch.Tensor, wide: torch.Tensor, group: Any) -> list[torch.Tensor]:
    module = ModuleType(name)
    exec(CALLS, module.__dict__)
    return list(module.calls(x.clone(), wide.clone(), dist.get_world_size(group), group))


def compressed_inputs(directory: str) -> list[int]:
    """Tensor-parallel messages that are compressed, without a compact section and with one."""
    found = []
    for more in ({}, {"compact": {"ratio": 0.25}}):
        with trained(1, Row("tp2", 2, tp=2), {**BALANCED, **more}) as (_, attachment):
            found.append(attachment.runtime.comm.metrics()["tp"].compressed)
    return found


def rejected(directory: str) -> dict[str, Any]:
    """What `attach` says no to, and that nothing stays replaced."""
    found = {}
    with layout(REPLICAS):
        one, other = Trainer(REPLICAS), Trainer(REPLICAS)
        for name, arguments in {"no optimizer": (None,), "second": (other.optimizer,)}.items():
            first = ssdtrain_megatron.attach(one.chunks, BALANCED, optimizer=one.optimizer)
            if name == "no optimizer":
                first.close()
            try:
                ssdtrain_megatron.attach(other.chunks, BALANCED, optimizer=arguments[0])
            except ValueError as error:
                found[name] = str(error)
            first.close()
        found["left"] = str(Hooks._installed)
    return found
