"""Settings of every test: one thread per process for arithmetic, and no setting from the caller's environment."""

import asyncio
import gc
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.open_files import OpenFiles
from tests.reaper import start_reaper
from tests.skip_summary import skip_lines
from tests.stacks_of_slow_tests import StacksOfSlowTests

# Before anything imports torch, and inherited by every process that a test starts: two threads that fight for a busy
# core cost more than they bring.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Every model of the tests is local or made up; a look at the hub would only wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# gRPC's own lines, such as one per connection that a killed server cut, would stand between the dots of pytest. What
# goes wrong reaches the caller as an error, and Tandem's log is not gRPC's.
os.environ["GRPC_VERBOSITY"] = "ERROR"

# Hypothesis would fail an example that takes longer than 200 ms, or whose data come slowly; a busy machine does both.
# The suite draws the same examples at every run, so that its result depends on the code alone; runs that search for
# failures (`make test-all`, `make test-repeat`) draw new ones with --hypothesis-profile=search.
settings.register_profile("search", max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("search"), max_examples=100, derandomize=True)
settings.load_profile("suite")

# A slow test may need a minute of a core, which is ten minutes of one that is shared with ten others.
_SLOW_TIMEOUT_S = 1800.0


def pytest_configure(config: pytest.Config) -> None:
    """Configure the process that was started, and each one that pytest-xdist starts."""
    start_reaper(os.environ)
    config.pluginmanager.register(StacksOfSlowTests(limit_s=float(config.getini("timeout"))))
    config.pluginmanager.register(OpenFiles())
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Exclude the modules of the tests, torch and transformers from garbage collection: they are a million objects that
    stay to the end, and each full collection would traverse them for a second.
    """
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    for line in skip_lines(report.longrepr[2] for report in reports):
        terminalreporter.write_line(line)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("uvloop") is not None:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove TANDEM_* from the environment, because they would change every process under test."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first, the longest of them before all others, so that short tests fill the
    processes of the run evenly at its end. The order within each kind stays as it was. A slow test that names no time
    limit has `_SLOW_TIMEOUT_S`.
    """
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))
    items.sort(key=lambda item: ("tests/chaos/test_chaos" not in item.nodeid, "tests/unit" in item.nodeid))
