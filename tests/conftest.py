"""What holds for every test."""

import signal

import pytest

# A shell that runs tests in the background has them ignore Ctrl-C, and the processes that they start, whose end by it is
# tested, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests go to one worker, those that start processes first: they take longest."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)
