"""Builds the C extensions; everything else about the package stands in pyproject.toml.

The extensions are optional: where there is no compiler the package still installs, and the pure Python and pure torch
implementations of the same interfaces take over (with one log line that says so).
"""

from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c11", "-pthread", "-Wall", "-Wextra", "-fvisibility=hidden", "-g0"]


def extension(module: str, source: str) -> list[Extension]:
    if not Path(source).exists():
        return []
    return [
        Extension(
            module,
            [source],
            depends=[str(header) for header in Path(source).parent.glob("*.h")],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,
        )
    ]


setup(
    ext_modules=[
        *extension("ssdtrain.storage._iopool", "ssdtrain/storage/_iopool.c"),
        *extension("ssdtrain.storage._signal_safe_lock", "ssdtrain/storage/_signal_safe_lock.c"),
        *extension("ssdtrain.device._streams", "ssdtrain/device/_streams.c"),
        *extension("ssdtrain.codecs._native", "ssdtrain/codecs/_native.c"),
    ]
)
