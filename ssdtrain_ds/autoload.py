"""Installs the plugin without a line in the training script: with SSDTRAIN_DS=1 in the environment, importing deepspeed does it.

`python -m ssdtrain_ds.autoload install` writes a .pth file of one line into site-packages (a .pth cannot be part of an editable
install, and is installed on request only); `remove` deletes it, `status` reports it. Python runs that line at the
start of every interpreter: without the variable it does nothing, and with it, it imports this module, which imports nothing
heavy. `accelerate` and others ask for the spec of deepspeed long before anybody imports it, so the watch ends with the import
and not with the question.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["VARIABLE", "after_import", "main", "path_of_file", "watch"]

VARIABLE = "SSDTRAIN_DS"
FILE = "ssdtrain_ds_autoload.pth"
LINE = (
    f"import os; os.environ.get('{VARIABLE}') == '1' and "
    "__import__('ssdtrain_ds.autoload', fromlist=['watch']).watch()\n"
)
WATCHED = "deepspeed"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module `watched` by the other finders, and calls `then` once it has been imported."""

    def __init__(self, watched: str, then: Callable[[], None]) -> None:
        self.watched = watched
        self.then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.watched:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, plain: importlib.abc.Loader, finder: _Finder) -> None:
        self._plain = plain
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        module.__loader__ = self._plain
        self._plain.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.then()

    def __getattr__(self, name: str) -> object:
        return getattr(self._plain, name)  # what tools ask a loader for, such as `get_source`


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as the module `name` has been imported; at once if it has been."""
    if name in sys.modules:
        then()
    elif not any(isinstance(finder, _Finder) and finder.watched == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


def watch() -> None:
    """Install the plugin as soon as deepspeed has been imported; at once if it has been."""
    after_import(WATCHED, _install)


def _install() -> None:
    import ssdtrain_ds

    ssdtrain_ds.install()


def path_of_file() -> Path:
    """Where the .pth file of this interpreter is or would be."""
    return Path(sysconfig.get_path("purelib")) / FILE


def main(arguments: list[str] | None = None) -> None:
    """`install`, `remove` or `status`."""
    given = sys.argv[1:] if arguments is None else arguments
    file = path_of_file()
    if given == ["install"]:
        try:
            file.write_text(LINE)
        except OSError as error:
            sys.exit(f"{file} cannot be written ({error}): run this in an environment of your own")
        print(f"wrote {file}: with {VARIABLE}=1 in the environment, importing deepspeed installs ssdtrain_ds")
    elif given == ["remove"]:
        existed = file.exists()
        file.unlink(missing_ok=True)
        print(f"removed {file}" if existed else f"there is no {file}")
    elif given == ["status"]:
        there = file.exists() and file.read_text() == LINE
        outdated = file.exists() and not there
        print(
            f"{file}: {'there' if there else 'of another version; install writes it anew' if outdated else 'not there'}"
        )
        asked = os.environ.get(VARIABLE) == "1"
        print(f"{VARIABLE}: {os.environ.get(VARIABLE, 'not set')}")
        print(f"autoload is {'on' if there and asked else 'off'} in this environment")
    else:
        sys.exit("usage: python -m ssdtrain_ds.autoload install | remove | status")


if __name__ == "__main__":
    main()
