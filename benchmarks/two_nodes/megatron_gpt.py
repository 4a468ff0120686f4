"""A GPT of megatron-core, tensor or pipeline parallel and data parallel, on one rank. Started and stepped by `Ranks`.

Run as `python -m tests.megatron.cpu -m benchmarks.two_nodes.megatron_gpt ...`: the arrangement that lets unmodified megatron-core
train without a GPU. Ranks of one tensor-parallel group are neighbours, as Megatron lays them out: with two ranks on each of two
nodes, tensor parallelism stays inside a node and data parallelism crosses, and pipelines cross where there is no tensor
parallelism.

The plain run is not attached to SSDTrain. `--silent` leaves out the data-parallel gradient reduction and nothing else: replicas
drift apart, and the losses mean nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.two_nodes.rank import Workload, add_sections, comm_meter, sections, serve, spill_meter


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    made.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    made.add_argument("--experts", type=int, help="of a layer, spread over the ranks of a stage")
    made.add_argument("--sequence-parallel", action="store_true")
    made.add_argument("--bf16", action="store_true", help="bfloat16, with a float32 master copy")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--hidden", type=int, default=512)
    made.add_argument("--heads", type=int, default=8)
    made.add_argument("--sequence", type=int, default=256)
    made.add_argument("--batch", type=int, default=1, help="sequences of a microbatch")
    made.add_argument("--microbatches", type=int, default=2, help="of a rank in a step")
    made.add_argument("--steps", type=int, default=64, help="at most: so much data is prepared")
    made.add_argument(
        "--distributed-optimizer", action="store_true", help="reduce-scatter and parameter all-gather"
    )
    made.add_argument("--seed", type=int, default=1234)
    made.add_argument("--data", default="out/demo-megatron/data", help="where the text and its indices are")
    add_sections(made)
    made.add_argument("--silent", action="store_true", help="do not reduce gradients over replicas")
    return made


class MegatronGPT(Workload):
    def __init__(self, options: argparse.Namespace) -> None:
        from examples.megatron_gpt import options as flags
        from examples.megatron_gpt.trainer import Trainer, initialize, training_set

        logging.getLogger("megatron").setLevel(logging.ERROR)
        self.options = options
        self.losses = []
        replicas = int(os.environ["WORLD_SIZE"]) // (options.tensor * options.pipeline)
        self._sequences = options.batch * options.microbatches * replicas
        given = {
            "tensor-model-parallel-size": options.tensor,
            "pipeline-model-parallel-size": options.pipeline,
            "num-layers": options.layers,
            "hidden-size": options.hidden,
            "num-attention-heads": options.heads,
            "seq-length": options.sequence,
            "micro-batch-size": options.batch,
            "global-batch-size": self._sequences,
            "train-iters": options.steps,
            "attention-dropout": 0.0,
            "hidden-dropout": 0.0,
            "seed": options.seed,
            "data-cache-path": options.data,
            "distributed-backend": "gloo",
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        if options.experts is not None:
            words += [
                "--num-experts",
                str(options.experts),
                "--expert-model-parallel-size",
                str(options.tensor),
            ]
        for flag, asked in (
            ("--use-distributed-optimizer", options.distributed_optimizer),
            ("--sequence-parallel", options.sequence_parallel),
            ("--bf16", options.bf16),
        ):
            words += [flag] if asked else []
        chosen = flags.parser().parse_args(words)
        initialize(chosen)
        self.trainer = Trainer(chosen, training_set(chosen))
        self._attachment: Any = None
        if (asked := sections(options)) is not None:
            import ssdtrain_megatron

            self._attachment = ssdtrain_megatron.attach(
                self.trainer.chunks, asked, optimizer=self.trainer.optimizer, logs=False
            )
        if options.silent:
            for chunk in self.trainer.chunks:
                chunk.finish_grad_sync = lambda *args, **kwargs: None

    def step(self) -> None:
        loss = self.trainer.gradients()
        self.trainer.update()
        if loss is not None:
            self.losses.append(loss)

    def about(self) -> dict[str, Any]:
        return {
            "tokens_per_step": self._sequences * self.options.sequence,
            "parameters": self.trainer.parameters(),
        }

    def digest(self) -> str:
        return self.trainer.digest()

    def replica(self) -> str:
        from megatron.core import parallel_state

        tensor = parallel_state.get_tensor_model_parallel_rank()
        return f"tensor {tensor}, stage {parallel_state.get_pipeline_model_parallel_rank()}"

    def meter(self) -> dict[str, Any] | None:
        return None if self._attachment is None else comm_meter(self._attachment.runtime)

    def outcome(self) -> dict[str, Any]:
        return {} if self._attachment is None else spill_meter(self._attachment.runtime)

    def close(self) -> None:
        from megatron.core import parallel_state

        if self._attachment is not None:
            self._attachment.close()
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    serve(MegatronGPT(options))


if __name__ == "__main__":
    main()
