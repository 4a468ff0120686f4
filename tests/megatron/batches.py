"""Rows of a matrix, a few at a time: one start of ranks trains a batch, whose time counts against one test's limit."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.processes import DEVICE, forked

Results = dict[str, list[Any]]


class Matrix:
    """What the ranks found in the rows whose tests were selected. A batch of rows is trained when the first of them is read.

    Args:
        module: ranks call its `main(DIRECTORY, NAME ...)` and write their results by name to `WORLD-RANK.json`.
        worlds: how many ranks a row or case has, by its name, in the order in which they are to run.
        batch: the most rows that one start of ranks trains, few enough for the time limit of a test on a busy machine;
            half as many on the emulated device, where a row takes longer.
    """

    def __init__(self, module: str, worlds: dict[str, int], batch: int) -> None:
        self._module = module
        self._worlds = worlds
        self._batch = batch if DEVICE == "cpu" else batch // 2
        self.selected: set[str] = set()
        """Names of the rows and cases whose tests were selected; filled by conftest.py."""
        self._trained = functools.cache(self._train)

    def results(self, name: str) -> list[Any] | None:
        """Of one row or case, by rank; None where this megatron-core lacks what the row needs.

        Raises:
            AssertionError: a rank of its batch failed or did not end in time.
        """
        world = self._worlds[name]
        names = [one for one in self._worlds if one in self.selected and self._worlds[one] == world]
        first = names.index(name) // self._batch * self._batch
        found = self._trained(world, tuple(names[first : first + self._batch]))
        assert not isinstance(found, str), found
        return found.get(name)

    def _train(self, world: int, names: tuple[str, ...]) -> Results | str:
        """The batch by name, or why there is nothing: a failure is not tried again for each test."""
        with tempfile.TemporaryDirectory(prefix="ssdtrain-matrix-") as directory:
            try:
                forked(world, self._module, directory, *names)
            except AssertionError as error:
                return str(error)
            ranks = [json.loads(Path(directory, f"{world}-{rank}.json").read_text()) for rank in range(world)]
        return {name: [rank[name] for rank in ranks] for name in ranks[0]}
