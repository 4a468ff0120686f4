"""Error tables of the codecs on tensors of the demo's GPT, and docs/codecs.md, which holds them.

    python -m benchmarks.codec_errors docs/codecs.md [--speed docs/results/codecs.json]

The GPT is trained for a while on the demo's text, then one more step gives the tensors: the gradient of all
parameters, the residual stream between two blocks, and the hidden state of a feed-forward layer behind its activation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import GPT, GPTConfig
from examples.support.data import batches, corpus
from examples.support.model import Block
from ssdtrain.codecs import Codec, FixedSizeCodec, Key, available, make_codec

SPECS = (
    "bf16",
    "zfp:rate=16",
    "zfp:rate=12",
    "zfp:rate=8",
    "zfp:rate=4",
    "int8",
    "int8:round=stochastic",
    "fp8",
    "fp8:format=e5m2",
    "int4",
    "int4:hadamard",
    "int4:round=stochastic",
    "int4:block=64,asymmetric",
    "int2:block=32,asymmetric",
    "int2:block=32,asymmetric,round=stochastic",
)
LOSSLESS = ("exact", "lossless")
INTRODUCTION = Path(__file__).with_name("codecs_introduction.md")


def tensors(
    steps: int, hidden: int = 128, layers: int = 3, sequence: int = 128, microbatch: int = 8
) -> dict[str, Tensor]:
    """float32 tensors by name, from the step after `steps` of training."""
    config = GPTConfig(layers=layers, hidden=hidden, heads=4, sequence=sequence)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    kept: dict[str, Tensor] = {}
    block = model.blocks[layers // 2]
    assert isinstance(block, Block)
    block.register_forward_hook(lambda m, args, out: kept.update({"residual stream": out.detach().clone()}))
    block.contract.register_forward_pre_hook(
        lambda m, args: kept.update({"feed-forward hidden": args[0].detach().clone()})
    )
    batch: Iterator[tuple[Tensor, Tensor]] = batches(
        corpus(), microbatch=microbatch, sequence=sequence, seed=1
    )
    for step in range(steps + 1):
        optimizer.zero_grad()
        model(*next(batch)).backward()
        if step < steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
            optimizer.step()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    return {
        "gradient": gradient,
        **{name: kept[name].reshape(-1) for name in ("residual stream", "feed-forward hidden")},
    }


def relative_error(codec: Codec, x: Tensor) -> float:
    """L2 norm of the error over the L2 norm of `x`."""
    return float((codec.roundtrip(x, Key(0)) - x).norm() / x.norm())


def bias(codec: Codec, x: Tensor) -> float:
    """Mean error over the mean magnitude of `x`."""
    return float((codec.roundtrip(x, Key(0)) - x).double().mean() / x.double().abs().mean())


def rows(found: dict[str, Tensor], specs: tuple[str, ...] = SPECS) -> list[dict[str, Any]]:
    """One row per codec: spec, bits, relative error by tensor, bias on the gradient."""
    table = []
    for spec in specs:
        codec = make_codec(spec)
        errors = {name: relative_error(codec, x) for name, x in found.items()}
        table.append(
            {
                "codec": spec,
                "bits": codec.bits_per_value,
                **errors,
                "bias": bias(codec, found["gradient"]),
            }
        )
    return table


def lossless_rows(found: dict[str, Tensor]) -> list[list[str]]:
    """Tensor, dtype, and raw bytes over payload bytes of each codec in LOSSLESS."""
    table = []
    for name, x in found.items():
        for dtype in (torch.bfloat16, torch.float32):
            value = x.to(dtype)
            line = [name, str(dtype).removeprefix("torch.")]
            for codec in map(make_codec, LOSSLESS):
                buf = torch.empty(codec.max_payload_bytes(value.numel(), dtype), dtype=torch.uint8)
                line.append(f"{value.nbytes / codec.encode(value, buf):.2f}")
            table.append(line)
    return table


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def document(found: dict[str, Tensor], steps: int, speed: dict[str, Any] | None) -> str:
    """The page docs/codecs.md."""
    names = list(found)
    parts = [INTRODUCTION.read_text().rstrip() + "\n"]
    parts.append("## The codecs\n")
    parts.append(
        _table(["name", "what (parameters)"], [[f"`{name}`", about] for name, about in available().items()])
    )
    yes = {True: "yes", False: "no"}
    properties = []
    for spec in ("raw", "exact", *SPECS, "lossless", "mask", "mask:sparse"):
        codec = make_codec(spec)
        fixed = isinstance(codec, FixedSizeCodec)
        bits = f"{codec.bits_per_value:.4g}" if fixed else f"at most {codec.bits_per_value:.4g}"
        properties.append([f"`{spec}`", bits, yes[codec.unbiased], yes[codec.contractive], yes[fixed]])
    parts.append(_table(["spec", "bits per value", "unbiased", "contractive", "fixed size"], properties))
    parts.append(
        "## Errors\n\nL2 norm of the error over that of the tensor, on the demo's GPT "
        f"(3 layers, hidden 128, sequence 128) after {steps} steps. The last column is the mean error over the mean "
        "magnitude, on the gradient: the negabinary digits that ZFP cuts off move the values to one side.\n"
    )
    body = [
        [
            f"`{row['codec']}`",
            f"{row['bits']:.4g}",
            *(f"{row[name]:.2g}" for name in names),
            f"{row['bias']:+.3%}",
        ]
        for row in rows(found)
    ]
    parts.append(_table(["codec", "bits", *names, "bias"], body))
    parts.append("No error, raw bytes over payload bytes:\n")
    parts.append(_table(["tensor", "dtype", *(f"`{spec}`" for spec in LOSSLESS)], lossless_rows(found)))
    if speed is not None:
        parts.append(_speed(speed))
    return "\n".join(parts)


def _speed(speed: dict[str, Any]) -> str:
    """The figures of `python -m benchmarks.codecs --json` as a table."""
    suffix = " encode input GB/s"
    body = []
    for name in (key.removesuffix(suffix) for key in speed if key.endswith(suffix)):
        cells = [
            f"{speed[f'{name} {way} {kind} GB/s']:.2f}"
            for way in ("encode", "decode")
            for kind in ("input", "payload")
        ]
        cores = [f"{speed[f'{name} {way} cores for 10 Gbit/s']:.1f}" for way in ("encode", "decode")]
        body.append([f"`{name}`", *cells, " / ".join(cores)])
    header = [
        "codec",
        "encode, values",
        "encode, payload",
        "decode, values",
        "decode, payload",
        "cores for 10 Gbit/s",
    ]
    return (
        f"## Speed\n\nGB/s of values and of payload on one core ({speed['cpu']}), of {speed['mebibytes']} MiB of float32; "
        f"copying the tensor in the same run: {speed['copy GB/s']:.1f} GB/s. The last column is the number of cores that "
        "encode / decode as fast as a 10 Gbit/s link carries payload (1.25 GB/s).\n\n" + _table(header, body)
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("page", type=Path)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument(
        "--speed", type=Path, help="the JSON line that `python -m benchmarks.codecs --json` ends with"
    )
    chosen = arguments.parse_args()
    speed = json.loads(chosen.speed.read_text()) if chosen.speed else None
    chosen.page.write_text(document(tensors(chosen.steps), chosen.steps, speed))


if __name__ == "__main__":
    main()
