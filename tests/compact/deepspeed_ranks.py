"""One rank that trains with DeepSpeed and compressed inputs: `python -m tests.compact.deepspeed_ranks FILE STAGE ...`.

STAGE is a ZeRO stage, "pipeline", or "one" for a pipeline of which one stage has the layers that are compressed. What is written
are losses and weights by the stage.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from tests.deepspeed.models import SEQUENCE, VOCABULARY, Block, Embedding, Head, loss_of

STEPS, WORLD, BATCH = 2, 2, 2
COMPACT = {"ratio": 0.25, "seed": 5}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embedding(), Block(), Block(), Head()]


def model() -> nn.Sequential:
    return nn.Sequential(*layers())


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (WORLD, BATCH, SEQUENCE + 1), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def train_plainly(**compact: Any) -> dict[str, Any]:
    import ssdtrain

    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    with ssdtrain.attach(whole, {"compact": {**COMPACT, **compact}, "report": {"interval": 0}}) as runtime:
        for step in range(STEPS):
            optimizer.zero_grad()
            for tokens, labels in batches(step):
                (loss_of(whole(tokens), labels) / WORLD).backward()
            optimizer.step()
            runtime.step_end()
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}


def train(stage: str) -> dict[str, Any]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ssdtrain_ds

    piped = stage in ("pipeline", "one")
    compact = {**COMPACT, "include": ["2.*"]} if stage == "one" else COMPACT
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": WORLD if piped else 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        # By default 1.0, which the noise of projections exceeds.
        "gradient_clipping": 0.0,
        "ssdtrain": {"compact": compact, "report": {"interval": 0}},
        "zero_optimization": {"stage": 0 if piped else int(stage), "stage3_param_persistence_threshold": 0},
    }
    module: nn.Module
    if piped:
        module = PipelineModule(
            layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform", seed_layers=False
        )
    else:
        module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    for step in range(STEPS):
        if piped:
            engine.train_batch(data_iter=iter(batches(step)))
        else:
            tokens, labels = batches(step)[int(os.environ["RANK"])]
            engine.backward(loss_of(engine(tokens), labels))
            engine.step()
    runtime = ssdtrain_ds.runtime_of(engine)
    counted = runtime.compact.compression.counted
    assert counted.saved_bytes * 4 == counted.input_bytes
    assert (counted.input_bytes > 0) == (stage != "one" or os.environ["RANK"] == "1")
    partitioned = [p for p in engine.module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    assert not any("forward" in module.__dict__ for module in engine.module.modules())
    return found


def main(file: str, *stages: str) -> None:
    torch.set_num_threads(1)
    import deepspeed

    import ssdtrain_ds
    from tests.deepspeed import upstream

    upstream.repair()
    ssdtrain_ds.install()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for stage in stages:
        torch.save(train(stage), f"{file}.{stage}.{os.environ['RANK']}")
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
