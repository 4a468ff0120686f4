"""Compiles every Triton kernel for an NVIDIA GPU, which needs none, and checks the arithmetic of the result.

Run by test_kernels.py.
"""

import re

import torch

from benchmarks.exact import ARCHITECTURES, bytes_per_value, exact_kernels
from benchmarks.kernel_code import compile_kernel
from ssdtrain.codecs.exact import Exact
from ssdtrain.codecs.kernels import block, exact, hadamard, mask, overflow, words, zfp
from ssdtrain.codecs.scales import ASYMMETRIC, E4M3, E5M2, SYMMETRIC
from ssdtrain.state.checksum import _MIX, _PLACE

POINTERS = {"payload": "*u8", "scale_in": "*i16", "code_in": "*u8", "sign": "*fp32", "rotated": "*fp32"}
STRIDES = ("x_stride", "payload_stride", "padded")
NUMBERS = {"cap": "fp32", "lowest": "fp32", "unit": "fp32"}


def ptx(
    kernel: object, types: dict[str, str], constants: dict[str, object], multiples: tuple[str, ...] = STRIDES
) -> str:
    code = compile_kernel(
        kernel, POINTERS | NUMBERS | types, constants, multiples_of_16=multiples, enable_fp_fusion=False
    )
    return code.ptx


def check(text: str) -> None:
    assert not re.search(r"\bfma\.", text), "a product and a sum were fused into one rounding"
    assert not re.search(r"\b(add|sub)\.[su]16x2\b", text), (
        "ptxas 12.8 adds 0 where only the upper half is used"
    )
    divisions = set(re.findall(r"div\.[a-z.0-9]*f32", text))
    assert divisions <= {"div.rn.f32"}, f"divisions that are not rounded to nearest: {divisions}"


for kernel, sizes in (
    (block._encode_kernel, ("numel", "blocks", "codes", "seed_low", "step")),
    (block._decode_kernel, ("blocks", "middle")),
    (hadamard._rotate_kernel, ("numel",)),
    (exact._encode_kernel, ("groups", "behind", "header", "values")),
    (exact._decode_kernel, ("groups",)),
    (zfp._encode_kernel, ("numel", "blocks")),
    (zfp._decode_kernel, ("numel", "words")),
    (overflow._copy_kernel, ("host", "first", "count")),
    (words._checksum_kernel, ("count",)),
):
    # Else a tensor of another size compiles a kernel in the step that has it.
    assert set(sizes) <= {p.name for p in kernel.params if p.do_not_specialize}, kernel

for bits, kind, reach, stochastic in (
    (8, SYMMETRIC, 127, False), (4, SYMMETRIC, 7, True), (4, ASYMMETRIC, 15, True),
    (8, E4M3, 448.0, False), (8, E5M2, 57344.0, False),
):  # fmt: skip
    shape = {"Q": 32, "R": 4096 // 128, "BITS": bits, "KIND": kind}
    text = ptx(block._encode_kernel, {"x": "*bf16"}, shape | {"REACH": reach, "STOCHASTIC": stochastic})
    assert "div.rn.f32" in text
    assert "ld.global.v4" in text, "values of whole blocks are loaded as vectors"
    check(text)
    check(ptx(block._decode_kernel, {"out": "*fp32"}, shape | {"ACCUMULATE": True, "BFLOAT16": False}))
    check(ptx(block._decode_kernel, {"out": "*i16"}, shape | {"ACCUMULATE": False, "BFLOAT16": True}))
    check(
        ptx(
            block._decode_kernel, {"out": "*i16"}, shape | {"numel": 1, "ACCUMULATE": False, "BFLOAT16": True}
        )
    )

rotation = {"R": 32, "B": 128, "STAGES": 7}
text = ptx(hadamard._rotate_kernel, {"x": "*bf16"}, rotation)
assert "ld.global.v4" in text
check(text)
check(ptx(hadamard._unrotate_kernel, {"out": "*i16"}, rotation | {"ACCUMULATE": False, "BFLOAT16": True}))

rate_8 = {"R": 256, "BLOCK_BITS": 32, "PLANES": 23}
integers = {"table": "*i32", "stream": "*i32", "finite_out": "*i32"}
check(ptx(zfp._encode_kernel, integers | {"x": "*fp16"}, rate_8))
check(ptx(zfp._decode_kernel, integers | {"out": "*fp32"}, rate_8 | {"ACCUMULATE": True, "BFLOAT16": False}))

text = ptx(mask._pack_kernel, {"flat": "*u8", "packed": "*u8"}, {"P": 1024}, ("numel",))
assert re.search(r"ld\.global\.(v2|v4)", text), "values are loaded as vectors"
text = ptx(mask._unpack_kernel, {"packed": "*u8", "out": "*u8"}, {"P": 1024}, ("numel",))
assert re.search(r"st\.global\.(v2|v4)", text), "values are stored as vectors"

for to_host in (False, True):
    flagged = {"flag": "*u8", "source": "*i16", "target": "*i16", "host": "i64"}
    text = ptx(overflow._copy_kernel, flagged, {"R": 4096, "TO_HOST": to_host})
    check(text)
    assert not re.search(r"setp\.\w+\.[su]32", text), "places of almost 2^31 values are counted in 32 bits"

sums = {"words": "*i64", "sums": "*i64"}
check(ptx(words._checksum_kernel, sums, {"PLACE": _PLACE, "MIX": _MIX, "W": 4096}, ("words",)))

for architecture in ARCHITECTURES:
    for dtype in (torch.bfloat16, torch.float32):
        share = Exact().payload_bytes(1 << 24, dtype) / (dtype.itemsize << 24)
        once = dtype.itemsize * (1 + share)  # the tensor is read once and the payload written once
        for direction, code in exact_kernels(dtype, architecture).items():
            where = f"{direction} of {dtype} for sm_{architecture}"
            assert code.spilled_bytes() == 0, where
            accessed = bytes_per_value(direction, code, dtype)
            assert accessed["vectors"] >= 0.98 * once, (where, accessed)
            assert accessed["at most"] <= 1.3 * once, (where, accessed)
