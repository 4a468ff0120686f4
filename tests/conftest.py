"""What holds for every test."""

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes, or its making, says how busy the machine is. The rest is as Hypothesis has it, which in CI draws
# the same examples every time.
settings.register_profile(
    "tests", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# A shell that runs tests in the background has them ignore Ctrl-C, and the processes that they start, whose end by it is
# tested, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Collecting makes some hundred thousand objects that all live on: looking for garbage among them is a fifth of its time.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Failures are also printed as they happen: a run that is cut off has no summary."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(terminal))


class _FailuresAtOnce:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(
                f"FAILED ({report.when}) {report.nodeid}\n" + report.longreprtext[-3000:]
            )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start processes are handed out first, because they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)


def pytest_collection_finish() -> None:
    """Collections of garbage, which many tests ask for, look at what the tests make, and not at all that was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()
