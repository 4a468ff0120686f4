"""PTX of a Triton kernel for a GPU that need not be there: what it loads and stores, and whether registers are spilled."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACCESS = re.compile(r"\b(ld|st)\.global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[bfsu](\d+)\b")


@dataclass(frozen=True)
class KernelCode:
    """A compiled kernel."""

    ptx: str
    architecture: int
    """Compute capability times ten."""
    threads: int
    """Threads of a program."""

    def spilled_bytes(self) -> int:
        """Bytes of registers that a thread stores to local memory or loads back, of which ptxas tells."""
        from triton.backends.nvidia.compiler import get_ptxas

        target = re.search(r"\.target (\w+)", self.ptx)
        assert target is not None, self.ptx[:200]
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "kernel.ptx"
            source.write_text(self.ptx)
            ptxas = str(get_ptxas(self.architecture).path)
            arguments = ["-v", "--gpu-name", target[1], str(source), "-o", f"{directory}/kernel.cubin"]
            told = subprocess.run([ptxas, *arguments], capture_output=True, text=True, check=True).stderr
        spills = re.findall(r"(\d+) bytes spill", told)
        assert len(spills) >= 2, told
        return sum(int(nbytes) for nbytes in spills)

    def bytes_by_width(self, direction: str) -> dict[int, int]:
        """Bytes that a program reads ("ld") or writes ("st") in global memory, by the bytes of one access of a thread, if every
        instruction ran once in every thread: more than it does where most lanes are masked."""
        found: dict[int, int] = {}
        for way, vector, bits in ACCESS.findall(self.ptx):
            if way == direction:
                width = int(vector or 1) * int(bits) // 8
                found[width] = found.get(width, 0) + width * self.threads
        return found


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, object],
    *,
    multiples_of_16: tuple[str, ...] = (),
    architecture: int = 90,
    **options: object,
) -> KernelCode:
    """Compile `kernel` as a launch would specialise it.

    Args:
        types: of arguments that are not int32; pointers ("*u8") are multiples of 16 bytes.
        constants: values of its constexpr arguments.
        multiples_of_16: names of integers that are.
        options: as of a launch: num_warps, maxnreg, enable_fp_fusion.
    """
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n][0] == "*" or n in multiples_of_16
    }
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = compile_source(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return KernelCode(str(compiled.asm["ptx"]), architecture, 32 * compiled.metadata.num_warps)
