"""Builds the C extensions; everything else about the package stands in pyproject.toml.

A wheel has what is in the tree, not what an earlier build left in build/; one without an extension is named as a wheel for any
machine (`py3-none-any`), since that is what it is.

The extensions are optional: where there is no compiler the package still installs, and the pure Python and pure torch
implementations of the same interfaces take over (with one log line that says so).
"""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

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


class BuildFresh(build_py):
    """Builds into empty directories: modules of an earlier version would be packed with those of this one."""

    def run(self) -> None:
        if not self.editable_mode:
            for package in {name.partition(".")[0] for name in self.distribution.packages or ()}:
                shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        super().run()


class NamedByContent(bdist_wheel):
    """Names a wheel without extensions as one for any machine."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.bdist_dir).rglob("*.so"))
        return super().get_tag() if built else ("py3", "none", "any")


setup(
    cmdclass={"build_py": BuildFresh, "bdist_wheel": NamedByContent},
    ext_modules=[
        *extension("ssdtrain.storage._iopool", "ssdtrain/storage/_iopool.c"),
        *extension("ssdtrain.storage._signal_safe_lock", "ssdtrain/storage/_signal_safe_lock.c"),
        *extension("ssdtrain.storage._records", "ssdtrain/storage/_records.c"),
        *extension("ssdtrain.device._streams", "ssdtrain/device/_streams.c"),
        *extension("ssdtrain.codecs._native", "ssdtrain/codecs/_native.c"),
    ],
)
