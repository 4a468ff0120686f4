"""A small GPT trained by DeepSpeed on real text, and its loss on text that it has not seen. One rank; started by `Ranks`.

Two layouts of the same model and start: `zero2` (data parallel on all ranks) and `pp2` (two pipeline stages, data parallel on
the rest). The held-out loss is that of the final weights: stages are put together first, and nothing is compressed then.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.two_nodes.rank import Workload, comm_meter, serve
from examples.deepspeed_gpt.train import weights_digest
from examples.support.data import batches, corpus
from examples.support.model import Block, GPTConfig

LAYOUTS = ("zero2", "pp2")
HELD_OUT = 0.05
"""The part of the text, at its end, that no step trains on."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--layout", choices=LAYOUTS, default="zero2")
    made.add_argument("--steps", type=int, default=500, help="of the learning rate's schedule")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--hidden", type=int, default=128)
    made.add_argument("--heads", type=int, default=4)
    made.add_argument("--sequence", type=int, default=64)
    made.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    made.add_argument("--learning-rate", type=float, default=2e-3)
    made.add_argument(
        "--bf16", action="store_true", help="bfloat16, with a float32 master copy that ranks share"
    )
    made.add_argument("--held-out-sequences", type=int, default=256, help="per rank")
    made.add_argument(
        "--comm", type=json.loads, help="the `comm` block as JSON; without it SSDTrain is absent"
    )
    return made


class Embedding(nn.Module):
    """(B, T) tokens to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        return embedded


class Head(nn.Module):
    """(B, T, C) to (B, T, V) logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.out = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x_BTC))
        return logits


def layers_of(config: GPTConfig, seed: int) -> list[nn.Module]:
    """All layers from one seed, GPT-2's initialisation; every rank builds all, so that both layouts start from the same."""
    torch.manual_seed(seed)
    layers = [Embedding(config), *(Block(config) for _ in range(config.layers)), Head(config)]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 2:
                joins = name.endswith(("attention.out.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if joins else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    return layers


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


class LossTraining(Workload):
    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled on first use
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        self.options = options
        self.losses = []
        self.config = GPTConfig(
            layers=options.layers, hidden=options.hidden, heads=options.heads, sequence=options.sequence
        )
        piped = options.layout == "pp2"
        self.microbatches = 2 if piped else 1
        settings: dict[str, Any] = {
            # The same sequences in a step for both layouts: half as many replicas, twice as many microbatches.
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(options.bf16) if piped else 2},
            "bf16": {"enabled": options.bf16},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if not piped:
            settings["zero_optimization"] |= {"reduce_bucket_size": 1_000_000}
        if options.comm is not None:
            import ssdtrain_ds

            ssdtrain_ds.install()
            settings["ssdtrain"] = {"comm": options.comm, "report": {"interval": 0}}
        layers = layers_of(self.config, options.seed)
        module: nn.Module
        if piped:
            from deepspeed.pipe import PipelineModule

            module = PipelineModule(
                layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", seed_layers=False
            )
        else:
            module = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule),
            config=settings,
            dist_init_required=False,
        )
        text = corpus()
        cut = int(len(text) * (1 - HELD_OUT))
        replica = self.engine.grid.get_data_parallel_id() if piped else dist.get_rank()
        self._data = batches(
            text[:cut],
            microbatch=options.batch,
            sequence=options.sequence,
            seed=1000 * options.seed + replica,
        )
        # The same windows for every variant and every seed; a part of them on each rank.
        self._held_out = batches(
            text[cut:], microbatch=32, sequence=options.sequence, seed=-1 - dist.get_rank()
        )

    def _schedule(self, step: int) -> float:
        """Linear for the first tenth, then a cosine down to a tenth."""
        warm = max(1, self.options.steps // 10)
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, self.options.steps - warm))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def step(self) -> None:
        if self.options.layout == "pp2":
            loss = self.engine.train_batch(data_iter=self._data)
        else:
            tokens, targets = next(self._data)
            loss = loss_of(self.engine(tokens), targets)
            self.engine.backward(loss)
            self.engine.step()
        self.losses.append(loss.detach().item())

    def about(self) -> dict[str, Any]:
        options = self.options
        sequences = options.batch * self.microbatches * self.engine.dp_world_size
        return {
            "tokens_per_step": sequences * options.sequence,
            "parameters": sum(parameter.numel() for parameter in self.engine.module.parameters()),
        }

    def digest(self) -> str:
        return weights_digest(self.engine.module)

    def replica(self) -> str:
        return f"stage {self.engine.grid.get_stage_id()}" if self.options.layout == "pp2" else "whole"

    def meter(self) -> dict[str, Any] | None:
        if self.options.comm is None:
            return None
        import ssdtrain_ds

        return comm_meter(ssdtrain_ds.runtime_of(self.engine))

    def outcome(self) -> dict[str, Any]:
        """`held_out`: mean loss of this rank's part, in nats per byte; all parts are of one size."""
        whole = nn.Sequential(*layers_of(self.config, self.options.seed))
        whole.load_state_dict(self._weights())
        whole.eval()
        with torch.no_grad():
            count = self.options.held_out_sequences // 32
            losses = [loss_of(whole(tokens), targets) for tokens, targets in self._some(count)]
        return {"held_out": float(torch.stack(losses).mean())}

    def _some(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return [next(self._held_out) for _ in range(count)]

    def _weights(self) -> dict[str, Tensor]:
        """Of all stages, by the names that they have in the whole: a stage calls its layers by their numbers."""
        own = dict(self.engine.module.named_parameters())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {name: tensor.detach() for name, tensor in own.items()})
        return {name: tensor for part in parts for name, tensor in part.items()}

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    serve(LossTraining(options))


if __name__ == "__main__":
    main()
