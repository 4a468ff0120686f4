"""What holds for every test."""

import signal

import pytest

# A shell that runs tests in the background has them ignore Ctrl-C, and the processes that they start, whose end by it is
# tested, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start processes are handed out first, because they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)
