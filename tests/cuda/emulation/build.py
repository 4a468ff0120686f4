"""Builds the emulated CUDA libraries into a virtual environment that has torch's CUDA build:

    .venv-cuda/bin/python tests/cuda/emulation/build.py

The libraries go to `<environment>/emulated_cuda`. In site-packages, `emulated_cuda.pth` makes every Python process of the
environment load them first, and an entry point makes torch register the operators.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
TORCH = SITE / "torch"
CUDA = SITE / "nvidia" / "cu13"
TARGET = Path(sys.prefix) / "emulated_cuda"
OBJECTS = TARGET / "objects"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-fPIC", "-std=c++20", "-pthread", f"-I{CUDA / 'include'}"]


BESIDE = ("driver", "nvml")
"""Sources of libraries of their own, which have no state."""


def run(*command: str | Path) -> str:
    """Run a command; its output.

    Raises:
        SystemExit: the command failed; its messages are printed.
    """
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(str(word) for word in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def newest(paths: list[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def compiled(sources: list[Path], flags: list[str]) -> list[Path]:
    """Object files of the sources; what has not changed is kept."""
    OBJECTS.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = OBJECTS / f"{source.parent.name}-{source.stem}.o"
        inputs = [source, *source.parent.glob("*.h")]
        if not target.exists() or target.stat().st_mtime < newest(inputs):
            run(COMPILER, *FLAGS, *flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def defined(library: Path) -> set[str]:
    """Names of functions that a library or an object file defines."""
    dynamic = ["-D"] if ".so" in library.name else []
    lines = run("nm", *dynamic, "--defined-only", library).splitlines()
    return {
        line.split()[-1].partition("@")[0]
        for line in lines
        if " T " in line or " t " in line or " W " in line
    }


def refusals(names: set[str], name: str) -> Path:
    """A source of functions that say "not supported", for all that nobody wrote: who calls one sees CUDA's own error."""
    source = OBJECTS / f"{name}.cpp"
    body = "".join(
        f'EXPORT int {each}() {{ emulated::count("refused call:{each}"); emulated::trace("refused {each}"); return 801; }}\n'
        for each in sorted(names)
    )
    source.write_text(DECLARATIONS + body)
    return source


DECLARATIONS = """#define EXPORT extern "C" __attribute__((visibility("default")))
namespace emulated { void count(const char* name, long amount = 1); void trace(const char* format, ...); }
"""


def build_runtime() -> None:
    sources = sorted(path for path in (HERE / "runtime").glob("*.cpp") if path.stem not in BESIDE)
    objects = compiled(sources, ["-O2"])
    own = set().union(*(defined(path) for path in objects))
    asked = {name for name in defined(CUDA / "lib" / "libcudart.so.13") if re.match(r"(__)?cuda[A-Z]", name)}
    objects += compiled([refusals(asked - own, "refused_runtime")], ["-O1"])
    versions = OBJECTS / "versions"
    versions.write_text(
        'libcudart.so.13 { global: cuda*; __cuda*; emulated_*; extern "C++" { emulated::*; }; local: *; };\n'
    )
    run(COMPILER, "-shared", *objects, "-pthread", "-ldl", f"-Wl,--version-script={versions}", "-Wl,-soname,libcudart.so.13",
        "-o", TARGET / "libcudart.so.13")  # fmt: skip
    driver = compiled([HERE / "runtime" / "driver.cpp"], ["-O2"])
    wanted = set(
        re.findall(
            rb"(?<![A-Za-z0-9_])cu[A-Z][A-Za-z0-9]+(?:_v[23])?(?![A-Za-z0-9_])",
            (TORCH / "lib" / "libc10_cuda.so").read_bytes(),
        )
    )
    names = {name.decode() for name in wanted}
    nvrtc = run("nm", "-D", "--undefined-only", TORCH / "lib" / "libcaffe2_nvrtc.so")
    names |= {
        line.split()[-1].partition("@")[0] for line in nvrtc.splitlines() if re.search(r" cu[A-Z]", line)
    }
    names |= {"cuLaunchKernelEx", "cuModuleGetGlobal_v2", "cuStreamWriteValue32_v2"}
    there = defined(driver[0])
    missing = {name for name in names if not there & {name, f"{name}_v2", f"{name}_v3"}}
    driver += compiled([refusals(missing, "refused_driver")], ["-O1"])
    run(COMPILER, "-shared", *driver, TARGET / "libcudart.so.13", "-Wl,-soname,libcuda.so.1", "-Wl,-rpath,$ORIGIN",
        "-o", TARGET / "libcuda.so.1")  # fmt: skip


def build_nvml() -> None:
    objects = compiled([HERE / "runtime" / "nvml.cpp"], ["-O1"])
    run(COMPILER, "-shared", *objects, TARGET / "libcudart.so.13", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-rpath,$ORIGIN",
        "-o", TARGET / "libnvidia-ml.so.1")  # fmt: skip


def build_operators() -> None:
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    objects = compiled(
        sorted((HERE / "operators").glob("*.cpp")), ["-O1", "-w", "-fvisibility=hidden", *include]
    )
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda"]
    run(COMPILER, "-shared", *objects, f"-L{TORCH / 'lib'}", *libraries, TARGET / "libcudart.so.13", "-o",
        TARGET / "emulated_operators.so")  # fmt: skip


def build_nccl() -> None:
    include = [f"-I{SITE / 'nvidia' / 'nccl' / 'include'}", f"-I{TORCH / 'include'}"]
    objects = compiled([HERE / "nccl" / "nccl.cpp"], ["-O2", *include])
    run(COMPILER, "-shared", *objects, "-pthread", TARGET / "libcudart.so.13", "-Wl,-soname,libnccl.so.2", "-o",
        TARGET / "libnccl.so.2")  # fmt: skip


def write(path: Path, text: str) -> None:
    """Write a new file: an environment that was copied with hard links has the old one too."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def install() -> None:
    write(
        SITE / "emulated_cuda.pth",
        f"{HERE}\n{HERE.parents[2]}\nimport emulated_cuda, emulated_transformer_engine\n",
    )
    description = SITE / "emulated_cuda-1.dist-info"
    description.mkdir(exist_ok=True)
    write(description / "METADATA", "Metadata-Version: 2.1\nName: emulated-cuda\nVersion: 1\n")
    write(description / "entry_points.txt", "[torch.backends]\nemulated_cuda = emulated_cuda:start\n")


if __name__ == "__main__":
    build_runtime()
    build_nvml()
    build_operators()
    build_nccl()
    install()
