"""DeepSpeed ZeRO training of a GPT on one rank, float32 or bfloat16, communication not overlapped.

Started and stepped by `Ranks`. The plain run has no `ssdtrain` block and no SSDTrain installed. `--silent` is the same run whose
gradients and weights are not sent: collectives of at least 64 KiB return at once, so that everything else takes the time that it
takes. Its ranks drift apart and its losses mean nothing; its seconds say what communication costs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed

from benchmarks.models import gpt
from benchmarks.two_nodes.rank import Workload, add_sections, comm_meter, sections, serve, spill_meter
from examples.deepspeed_gpt.train import weights_digest
from examples.support.data import batches, corpus

SILENCED_BYTES = 64 << 10
"""Messages from here on are left out of a silent run: gradient buckets and weights, not norms and overflow flags."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--layers", type=int, default=6)
    made.add_argument("--hidden", type=int, default=768)
    made.add_argument("--heads", type=int, default=12)
    made.add_argument("--sequence", type=int, default=256)
    made.add_argument("--batch", type=int, default=2, help="sequences per rank")
    made.add_argument("--stage", type=int, default=2, help="of ZeRO")
    made.add_argument("--bucket", type=int, default=10_000_000, help="elements of a gradient bucket")
    made.add_argument("--vocabulary", type=int, default=256, help="rows of the embedding; the data are bytes")
    made.add_argument("--bf16", action="store_true", help="train in bfloat16 with a float32 master copy")
    made.add_argument("--seed", type=int, default=1234)
    add_sections(made)
    made.add_argument("--silent", action="store_true", help="do not send gradients and weights")
    return made


class DeepSpeedGPT(Workload):
    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled on first use
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        self.options = options
        self.losses = []
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": options.stage,
                "overlap_comm": False,
                "reduce_bucket_size": options.bucket,
                "allgather_bucket_size": options.bucket,
            },
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": options.bf16},
            "steps_per_print": 10**9,
        }
        self.sections = sections(options)
        if self.sections is not None:
            import ssdtrain_ds

            ssdtrain_ds.install()
            config["ssdtrain"] = self.sections
        torch.manual_seed(options.seed)
        model = gpt(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            sequence=options.sequence,
            vocabulary=options.vocabulary,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._data = batches(
            corpus(),
            microbatch=options.batch,
            sequence=options.sequence,
            seed=options.seed + torch.distributed.get_rank(),
        )
        if options.silent:
            silence()

    def step(self) -> None:
        tokens, targets = next(self._data)
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.item())

    def about(self) -> dict[str, Any]:
        options = self.options
        return {
            "tokens_per_step": options.batch * options.sequence * torch.distributed.get_world_size(),
            "parameters": sum(parameter.numel() for parameter in self.engine.module.parameters()),
        }

    def digest(self) -> str:
        import deepspeed

        partitioned = [p for p in self.engine.module.parameters() if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(partitioned) if partitioned else nullcontext():
            return weights_digest(self.engine.module)

    def replica(self) -> str:
        return "whole"

    def meter(self) -> dict[str, Any] | None:
        if self.sections is None:
            return None
        import ssdtrain_ds

        return comm_meter(ssdtrain_ds.runtime_of(self.engine))

    def outcome(self) -> dict[str, Any]:
        if self.sections is None:
            return {}
        import ssdtrain_ds

        return spill_meter(ssdtrain_ds.runtime_of(self.engine))

    def close(self) -> None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def silence() -> None:
    """Let this process's large collectives through DeepSpeed return at once, with what was there before."""
    from deepspeed.comm import comm

    for name in ("all_reduce", "all_gather_into_tensor"):
        setattr(comm.cdb, name, _silent(getattr(comm.cdb, name)))


def _silent(plain: Callable[..., Any]) -> Callable[..., Any]:
    def silent(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if max(tensor.nbytes for tensor in tensors) < SILENCED_BYTES:
            return plain(*args, **kwargs)
        if kwargs.get("async_op"):
            raise ValueError("a silent run knows no asynchronous collectives: leave overlap_comm off")
        return None

    return silent


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    serve(DeepSpeedGPT(options))


if __name__ == "__main__":
    main()
