"""One rank of data-parallel training on CUDA devices through NCCL, without the plugin and with it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
from tests.offload.zoo import Gpt

STEPS = 4

WAYS: dict[str, dict[str, Any]] = {
    "ssd": {"amount": "all"},
    "ssd, auto": {},
    "host": {"amount": "all", "host": "64MiB", "directories": None},
}


def _ddp(model: Gpt) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.05)


def _sharded(model: Gpt, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _sharded_bf16(model: Gpt) -> nn.Module:
    return _sharded(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )


def _sharded_on_host(model: Gpt) -> nn.Module:
    return _sharded(model, offload_policy=CPUOffloadPolicy())


WRAPPERS = {"ddp": _ddp, "fsdp": _sharded, "fsdp bf16": _sharded_bf16, "fsdp on the host": _sharded_on_host}


def _train(wrapper: str, config: dict[str, Any] | None) -> dict[str, Any]:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](Gpt().to("cpu" if wrapper.endswith("host") else device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runtime = None if config is None else ssdtrain.attach(model, config)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(97, (2, 32), generator=generator).to(device)
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    whole = (
        [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        if wrapper != "fsdp on the host"
        else [p.to_local() for p in model.parameters()]
    )
    result: dict[str, Any] = {"losses": losses, "weights": [one.detach().cpu() for one in whole]}
    if runtime is not None:
        torch.cuda.synchronize()
        runtime.close()
        statistics = runtime.statistics()
        if config is not None and "offload" in config:
            result["moved"] = statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes
        result["comm"] = {
            name: (one.raw_bytes, one.wire_bytes, one.compressed) for name, one in statistics.comm.items()
        }
    return result


def offloaded_and_not(rank: int, wrapper: str) -> dict[str, dict[str, Any]]:
    """Results of a run without the plugin ("plain") and of each of `WAYS`."""
    results = {"plain": _train(wrapper, None)}
    for way, options in WAYS.items():
        with tempfile.TemporaryDirectory() as directory:
            section = {"directories": directory, "min_bytes": 1024, **options}
            offload = {key: value for key, value in section.items() if value is not None}
            results[way] = _train(wrapper, {"offload": offload})
    return results


def compressed_and_not(rank: int, wrapper: str, comm: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of a run without the plugin ("plain") and with the section `comm` ("comm")."""
    return {
        "plain": _train(wrapper, None),
        "comm": _train(wrapper, {"comm": {"min_bytes": 0, "probe": False, **comm}}),
    }
