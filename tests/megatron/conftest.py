"""Tests under `arranged` run in a process of their own, where torch's CUDA is replaced: see `test_arranged.py`."""

import os

import pytest

collect_ignore = [] if "SSDTRAIN_TESTS_ARRANGED" in os.environ else ["arranged"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tells each matrix which of its rows and cases were selected: its ranks run these and no others."""
    for item in session.items:
        matrix = getattr(getattr(item, "module", None), "MATRIX", None)
        if matrix is not None:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            if "row" in parameters:
                matrix.selected.add(getattr(parameters["row"], "row", parameters["row"]).name)
            if "case" in parameters:
                matrix.selected.add(parameters["case"])
