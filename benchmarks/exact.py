"""Codec `exact`: bytes of weights, gradients and activations of trained models, its speed, and what others take and cost.

    python -m benchmarks.exact --json
    python -m benchmarks.exact --json --parts ratios,speed,ptx --device cuda  # on a GPU

A GPT, a Llama-like model and a mixture of experts of more than 20 M parameters are trained in bfloat16, with float32 weights
in the optimizer, on the pages and sources of this repository. What they hold in bfloat16 at the first step and after `--steps`
is encoded: weights, gradients, these with every third row zeroed, and what autograd saves. A tensor whose payload would take more
bytes than it, or that overflows, counts as it is. Ratios are encoded over raw bytes; speeds are GB/s (10^9 bytes) of values.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import exact_wire, spill_exact
from benchmarks.common import finish, hardware, parser
from benchmarks.compact_training import Llama, LlamaConfig
from benchmarks.kernel_code import KernelCode, compile_kernel
from benchmarks.models import gpt
from examples.support.data import batches
from ssdtrain.codecs import HEADER_BYTES, make_codec
from ssdtrain.codecs.exact import EXCEPTION, FRONT_BYTES, GROUP, GROUP_BYTES, GROUPS, Exact
from ssdtrain.tools.bench.codec import CodecSubject, cpu_seconds, device_seconds

PARTS = ("ratios", "speed", "anchors", "ptx", "wire", "spill")
ARCHITECTURES = (80, 90, 100)
SUPERBLOCK = GROUP * GROUPS
VOCABULARY = 1024
"""Of which the text's bytes are a quarter: most rows of an embedding's gradient are zero."""
SEQUENCE = 128
KINDS = ("weights", "gradients", "zero rows", "activations")


class Mixture(nn.Module):
    """Mixtral: each token through two of six experts. Returns the mean cross entropy in nats per byte."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        self.model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=384,
                intermediate_size=768,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=6,
                num_local_experts=6,
                num_experts_per_tok=2,
                max_position_embeddings=SEQUENCE,
            )
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def text() -> Tensor:
    """The pages and Python sources of this repository, uint8 [bytes]."""
    root = Path(__file__).parents[1]
    files = [*root.glob("docs/*.md"), *root.glob("ssdtrain/**/*.py")]
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in sorted(files))), dtype=torch.uint8
    )


def _llama() -> nn.Module:
    return Llama(LlamaConfig(layers=7, hidden=512, heads=8, middle=1408, vocabulary=VOCABULARY))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(gpt, layers=7, hidden=512, heads=8, sequence=SEQUENCE, vocabulary=VOCABULARY),
    "llama": _llama,
    "moe": Mixture,
}


def training(
    name: str, steps: int, microbatch: int, device: torch.device
) -> Iterator[tuple[int, dict[str, list[Tensor]]]]:
    """(step, bfloat16 tensors on `device` by kind) of the first step and of the one after `steps`."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device, torch.bfloat16)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) >= 20_000_000, name
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95), fused=True)
    source = batches(text(), microbatch=microbatch, sequence=SEQUENCE, seed=1)
    for step in range(steps + 1):
        tokens, targets = (one.to(device) for one in next(source))
        if step in (0, steps):
            loss, saved = _saved_tensors(model, (tokens, targets))
        else:
            loss, saved = model(tokens, targets), []
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if step in (0, steps):
            yield (
                step,
                {
                    "weights": [p.detach() for p in parameters],
                    "gradients": gradients,
                    "zero rows": [_with_zero_rows(g) for g in gradients if g.dim() == 2],
                    "activations": saved,
                },
            )
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(tuple(parameters), masters)


def _saved_tensors(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss, and what autograd saves of it in bfloat16, each storage once and no weight."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if tensor.dtype == torch.bfloat16 and address not in weights:
            kept.setdefault(address, tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    return loss, [tensor.clone(memory_format=torch.contiguous_format) for tensor in kept.values()]


def _with_zero_rows(gradient: Tensor) -> Tensor:
    zeroed = gradient.clone()
    zeroed[::3] = 0
    return zeroed


def exceptions(payload: Tensor, numel: int) -> int:
    """Exceptions in a payload of bfloat16."""
    nbytes = GROUP_BYTES[torch.bfloat16]
    whole, groups = divmod(numel // GROUP, GROUPS)
    end = FRONT_BYTES + GROUPS * nbytes
    records = payload[HEADER_BYTES:]
    behind = records[whole * end + FRONT_BYTES :][: groups * nbytes]  # of the short superblock
    coded = records[: whole * end].view(whole, end)[:, FRONT_BYTES:]
    codes = torch.cat([part.reshape(-1, nbytes)[:, GROUP:].flatten() for part in (coded, behind)])
    return int((codes & 0xF == EXCEPTION).sum()) + int((codes >> 4 == EXCEPTION).sum())


def ratios(chosen: Any) -> dict[str, Any]:
    """Ratios and shares of exceptions by kind of tensor, model and step; all ratios are of bfloat16."""
    codec = Exact()
    totals = {kind: [0, 0, 0, 0] for kind in KINDS}
    overflows = 0
    details: dict[str, dict[str, float]] = {}
    for name in chosen.models:
        for step, tensors in training(name, chosen.steps, chosen.microbatch, torch.device(chosen.device)):
            for kind, group in tensors.items():
                raw = encoded = values = rare = 0
                for tensor in group:
                    nbytes = codec.payload_bytes(tensor.numel(), tensor.dtype)
                    buf = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
                    size = codec.encode(tensor, buf)
                    overflow = bool(codec.overflow_flag(buf))
                    overflows += overflow
                    raw += tensor.nbytes
                    encoded += tensor.nbytes if overflow else min(size, tensor.nbytes)
                    values += tensor.numel() // GROUP * GROUP
                    rare += exceptions(buf, tensor.numel())
                label = f"{name}, step {step}, {kind}"
                details[label] = {"ratio": encoded / raw, "exception_share": rare / values}
                print(f"{label}: {encoded / raw:.4f}, exceptions {rare / values:.3%}", flush=True)
                totals[kind] = [
                    a + b for a, b in zip(totals[kind], (raw, encoded, values, rare), strict=True)
                ]
    return {
        "steps": chosen.steps,
        "trained_on": chosen.device,
        "ratio_bf16": {kind: totals[kind][1] / totals[kind][0] for kind in KINDS},
        "exception_share": sum(t[3] for t in totals.values()) / sum(t[2] for t in totals.values()),
        "overflows": overflows,
        "ratios": details,
    }


def values(kind: str, numel: int) -> Tensor:
    """float32 values to measure speed with, like those of models."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator) * 0.02
    if kind == "zero rows":
        x.view(-1, 1024)[::3] = 0
    if kind == "outliers":
        x[::256] = 1e4
    return x


def speed(chosen: Any) -> dict[str, Any]:
    """GB/s of values in each direction: of one core, or of a GPU; the median of `--rounds`. On a GPU the payload is compared with
    that of the CPU."""
    device = torch.device(chosen.device)
    timed = partial(device_seconds, device=device) if device.type == "cuda" else cpu_seconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    equal = True
    for dtype in (torch.bfloat16, torch.float32):
        for kind in ("normal", "zero rows", "outliers"):
            host = values(kind, (chosen.mebibytes << 20) // dtype.itemsize).to(dtype)
            x = host.to(device)
            equal &= _same_everywhere(host, x)
            subject, copy = CodecSubject("exact", x), torch.empty_like(x)
            directions = {d: subject.directions[d] for d in ("encode", "decode")}
            directions["copy"] = lambda x=x, copy=copy: copy.copy_(x)
            seconds: dict[str, list[float]] = {direction: [] for direction in directions}
            for _ in range(chosen.rounds + 1):
                for direction, work in directions.items():
                    seconds[direction].append(timed(work))
            found[f"{str(dtype).removeprefix('torch.')}, {kind}"] = {
                direction: x.nbytes / max(1e-9, statistics.median(times[1:])) / 1e9
                for direction, times in seconds.items()
            }
    torch.set_num_threads(threads)
    first = found["bfloat16, normal"]
    return {
        "device": chosen.device,
        "mebibytes": chosen.mebibytes,
        "bits_equal": equal,
        "encode_gbps": first["encode"],
        "decode_gbps": first["decode"],
        "copy_gbps": first["copy"],
        "speed": found,
    }


def _same_everywhere(host: Tensor, x: Tensor) -> bool:
    """Whether `x` has the payload of its copy `host`, and decodes to the same bits."""
    codec = Exact()
    bufs = []
    for tensor in (host, x):
        bufs.append(
            torch.empty(
                codec.payload_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=tensor.device
            )
        )
        codec.encode(tensor, bufs[-1])
    out = codec.decode(bufs[1], torch.empty_like(x))
    return torch.equal(bufs[0], bufs[1].cpu()) and torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def anchors(chosen: Any) -> dict[str, Any]:
    """What others take of the same bfloat16 and cost on one core, on the CPU: {name: {ratio, encode_gbps, decode_gbps}}.

    ZFP knows no bfloat16: it gets the float32 of the same values. blosc2 is measured where it is installed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = values("normal", (chosen.mebibytes << 20) // 2).bfloat16()
    found: dict[str, Any] = {}
    for spec in ("exact", "lossless"):
        codec = make_codec(spec)
        buf = torch.empty(codec.max_payload_bytes(x.numel(), x.dtype), dtype=torch.uint8)
        out = torch.empty_like(x)
        size = codec.encode(x, buf)
        found["zstd byte planes" if spec == "lossless" else spec] = _cost(
            partial(codec.encode, x, buf), partial(codec.decode, buf, out), size, x, chosen.rounds
        )
    import zfpy

    array = x.float().numpy()
    stream = zfpy.compress_numpy(array)
    assert zfpy.decompress_numpy(stream).tobytes() == array.tobytes()
    found["zfp lossless, of float32"] = _cost(
        partial(zfpy.compress_numpy, array), partial(zfpy.decompress_numpy, stream), len(stream), x, 1
    )
    if importlib.util.find_spec("blosc2") is None:
        found["blosc2"] = "not installed: pip install blosc2"
    else:
        import blosc2

        raw = x.view(torch.int16).numpy()
        options = {"typesize": 2, "clevel": 1, "codec": blosc2.Codec.ZSTD}
        packed = blosc2.compress2(raw, nthreads=1, filters=[blosc2.Filter.SHUFFLE], **options)
        assert blosc2.decompress2(packed) == raw.tobytes()
        found["blosc2 shuffle, zstd"] = _cost(
            partial(blosc2.compress2, raw, nthreads=1, filters=[blosc2.Filter.SHUFFLE], **options),
            partial(blosc2.decompress2, packed, nthreads=1),
            len(packed),
            x,
            chosen.rounds,
        )
    torch.set_num_threads(threads)
    return {"anchors": found}


def _cost(
    encode: Callable[[], object], decode: Callable[[], object], size: int, x: Tensor, rounds: int
) -> dict[str, float]:
    def process_seconds(work: Callable[[], object]) -> float:
        start = time.process_time()  # of all threads, should a library start one
        work()
        return time.process_time() - start

    seconds = {
        name: statistics.median([process_seconds(work) for _ in range(rounds)])
        for name, work in (("encode", encode), ("decode", decode))
    }
    return {
        "ratio": size / x.nbytes,
        **{f"{name}_gbps": x.nbytes / taken / 1e9 for name, taken in seconds.items()},
    }


def exact_kernels(dtype: torch.dtype, architecture: int) -> dict[str, KernelCode]:
    """The kernels of `exact` for a compute capability times ten, by direction."""
    from ssdtrain.codecs.kernels import exact

    found = {}
    for direction, kernel, options in (
        ("encode", exact._encode_kernel, exact.ENCODE_OPTIONS),
        ("decode", exact._decode_kernel, exact.DECODE_OPTIONS),
    ):
        found[direction] = compile_kernel(
            kernel,
            dict.fromkeys(("x", "payload", "body", "out"), "*u8"),
            {"FLOAT32": dtype == torch.float32},
            multiples_of_16=("x_stride", "payload_stride"),
            architecture=architecture,
            **options,
        )
    return found


def bytes_per_value(direction: str, code: KernelCode, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of global memory that a program accesses for each value: in vectors of 16 bytes, and at most, if every instruction
    but those of the header, which one thread writes, ran once in every thread: most lanes of those of exceptions are masked.
    """
    widths = [code.bytes_by_width(way) for way in ("ld", "st")]
    header = 12 * code.threads if direction == "encode" else 0
    return {
        "vectors": sum(by_width[16] for by_width in widths) / SUPERBLOCK,
        "at most": (sum(sum(by_width.values()) for by_width in widths) - header) / SUPERBLOCK,
    }


def ptx(chosen: Any) -> dict[str, Any]:
    """Spilled bytes of all kernels, and `bytes_per_value` of bfloat16."""
    spills = 0
    per_value: dict[str, dict[str, float]] = {}
    for architecture in ARCHITECTURES:
        for dtype in (torch.bfloat16, torch.float32):
            for direction, code in exact_kernels(dtype, architecture).items():
                spills += code.spilled_bytes()
                if dtype == torch.bfloat16:
                    per_value[f"{direction}, sm_{architecture}"] = bytes_per_value(direction, code, dtype)
    return {"ptx": {"spills": spills, "bytes_per_value": per_value}}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--parts", default=",".join(PARTS), help="which of them, joined by commas")
    arguments.add_argument("--models", default=",".join(MODELS), help="which of them, joined by commas")
    arguments.add_argument("--steps", type=int, default=200, help="of training")
    arguments.add_argument("--microbatch", type=int, default=4, help=f"sequences of {SEQUENCE} bytes")
    arguments.add_argument(
        "--device", default="cpu", help="that trains, and whose speed is measured: cpu or cuda"
    )
    arguments.add_argument(
        "--mebibytes", type=int, help="size of the tensors whose speed is measured; 64, or 1024 on a GPU"
    )
    arguments.add_argument("--rounds", type=int, default=7)
    layouts = tuple(exact_wire.LAYOUTS)
    arguments.add_argument("--layouts", default=",".join(layouts), help="whose messages are counted")
    arguments.add_argument("--wire-steps", type=int, default=200, help="of training in each layout")
    arguments.add_argument("--wire-layers", type=int, default=2, help="of the layouts' models")
    arguments.add_argument(
        "--spill-steps", type=int, default=30, help="that are timed, of tensors that go to a drive"
    )
    chosen = arguments.parse_args()
    for option, allowed in (("parts", PARTS), ("models", tuple(MODELS)), ("layouts", layouts)):
        names = getattr(chosen, option).split(",")
        if unknown := set(names) - set(allowed):
            arguments.error(
                f"--{option}: {', '.join(sorted(unknown))} unknown; allowed: {', '.join(allowed)}"
            )
        setattr(chosen, option, names)
    chosen.mebibytes = chosen.mebibytes or (64 if chosen.device == "cpu" else 1024)
    run = {
        "ratios": ratios,
        "speed": speed,
        "anchors": anchors,
        "ptx": ptx,
        "wire": exact_wire.wire,
        "spill": spill_exact.spill,
    }
    figures: dict[str, Any] = {"benchmark": "exact", **hardware(), "torch": torch.__version__}
    for part in chosen.parts:
        figures |= run[part](chosen)
    finish(figures, chosen.json)


if __name__ == "__main__":
    main()
