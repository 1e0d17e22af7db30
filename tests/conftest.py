"""What every test runs under: one thread per process for arithmetic, and no setting from the caller's environment."""

import os

import pytest

# Before anything imports torch, and inherited by every process that a test starts: two threads that fight for a busy
# core cost more than they bring.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Every model of the tests is local or made up; a look at the hub would only wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """TANDEM_* of whoever runs the tests would change every process under test."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first, the longest of them before all: what is short fills the processes of the
    run evenly to its end. The order within each kind stays as it was."""
    items.sort(key=lambda item: ("tests/chaos/test_chaos" not in item.nodeid, "tests/unit" in item.nodeid))
