"""Timeouts of the client library that are infinite, or no numbers."""

import math
from typing import Any

import pytest

from tandem.client import AsyncClient, Client
from tests.unit.client.scripted_router import router


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e10])
async def test_an_infinite_timeout_never_passes(timeout_s: float) -> None:
    """gRPC takes a deadline that it cannot represent for one that has passed."""
    with router() as (_, address):
        with Client(address, timeout_s=timeout_s, keepalive_timeout_s=timeout_s) as client:
            assert client.generate("x").result().text == "ade"
            assert client.models()[0].id == "m"
        async with AsyncClient(address, keepalive_timeout_s=timeout_s) as asynchronous:
            assert (await asynchronous.generate("x", timeout_s=timeout_s).result()).text == "ade"


@pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s", "keepalive_timeout_s"])
@pytest.mark.parametrize(("value", "kind"), [(math.nan, ValueError), ("5", TypeError)])
def test_a_timeout_that_is_no_number_is_refused_by_name(name: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"{name} must be a number of seconds, not "):
        Client("127.0.0.1:1", **{name: value})
    with Client("127.0.0.1:1") as client, pytest.raises(kind, match="timeout_s must be a number of seconds, not "):
        client.generate("x", timeout_s=value)


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_keepalive_timeout_that_is_not_positive_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="keepalive_timeout_s must be positive, not"):
        Client("127.0.0.1:1", keepalive_timeout_s=timeout_s)
