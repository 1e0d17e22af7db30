"""The fixtures under which every contract test runs, besides those of tests/conftest.py."""

import pytest


@pytest.fixture(autouse=True)
def ucx_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use the loopback interface only.

    It asks for every interface of the machine when an agent is created, and fails if one disappears in the meantime.
    Tests that run concurrently create and remove interfaces for their network namespaces.
    """
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
