"""Compiles every Triton kernel for an NVIDIA GPU, which needs none, and checks the arithmetic of the result.

Run by test_kernels.py.
"""

import re

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ssdtrain.codecs.kernels import block, zfp

POINTERS = {"scale_out": "*i16", "scale_in": "*i16", "code_out": "*u8", "code_in": "*u8"}
NUMBERS = {"cap": "fp32", "lowest": "fp32"}


def ptx(kernel: object, types: dict[str, str], constants: dict[str, object]) -> str:
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {
        n: "constexpr" if n in constants else (POINTERS | NUMBERS | types).get(n, "i32") for n in names
    }
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
    compiled = compile_kernel(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})
    return str(compiled.asm["ptx"])


def check(text: str) -> None:
    assert not re.search(r"\bfma\.", text), "a product and a sum were fused into one rounding"
    divisions = set(re.findall(r"div\.[a-z.0-9]*f32", text))
    assert divisions <= {"div.rn.f32"}, f"divisions that are not rounded to nearest: {divisions}"


for bits, symmetric, stochastic in ((8, True, False), (4, False, True)):
    shape = {"Q": 32, "R": 4096 // 128, "BITS": bits, "SYMMETRIC": symmetric}
    text = ptx(block._encode_kernel, {"x": "*bf16"}, shape | {"STOCHASTIC": stochastic})
    assert "div.rn.f32" in text
    check(text)
    check(ptx(block._decode_kernel, {"out": "*fp32"}, shape | {"ACCUMULATE": True, "BFLOAT16": False}))
    check(ptx(block._decode_kernel, {"out": "*i16"}, shape | {"ACCUMULATE": False, "BFLOAT16": True}))

rate_8 = {"R": 256, "BLOCK_BITS": 32, "PLANES": 23}
integers = {"table": "*i32", "stream": "*i32", "finite_out": "*i32"}
check(ptx(zfp._encode_kernel, integers | {"x": "*fp16"}, rate_8))
check(ptx(zfp._decode_kernel, integers | {"out": "*fp32"}, rate_8 | {"ACCUMULATE": True, "BFLOAT16": False}))
