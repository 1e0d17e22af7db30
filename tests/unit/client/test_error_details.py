"""Rich details of failed calls and the maximum age of connections, on a real server with real channels."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster import errors
from tandem import errors as client_errors
from tandem.client import AsyncClient, Client
from tandem.v1 import inference_pb2
from tests.unit.client.scripted_router import router
from tests.unit.cluster.serving.test_serving import Served, every_error

PATIENCE_S = 60.0


@asynccontextmanager
async def serving(**settings: float) -> AsyncIterator[Served]:
    served = Served(**settings)  # type: ignore[arg-type]
    await served.server.start()
    try:
        yield served
    finally:
        await served.channel.close()
        await served.server.stop(0)


def unpacked(failure: grpc.aio.AioRpcError) -> dict[str, object]:
    """Return the rich details by the names of their messages."""
    status = rpc_status.from_call(failure)
    assert status is not None
    found: dict[str, object] = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])
        detail = kind()
        assert packed.Unpack(detail)
        found[kind.__name__] = detail
    return found


async def test_every_error_has_its_reason_and_its_domain() -> None:
    async with serving() as served:
        for error in every_error():
            served.raises(error)
            details = unpacked(await served.failure())
            assert details["ErrorInfo"] == error_details_pb2.ErrorInfo(
                reason=error.reason.upper(),
                domain="tandem",
                metadata={"limit": error.param} if isinstance(error, errors.LimitReached) else {},
            )
            assert ("RetryInfo" in details) == (error.retry_after_s is not None)
            assert "BadRequest" not in details


async def test_a_refused_field_is_a_violation_and_a_retry_time_is_a_duration() -> None:
    refused = errors.UnsupportedField("give a smaller one", param="stop.max_tokens")
    later = errors.QueueFull("the queue is full", retry_after_s=1.25)
    async with serving() as served:
        served.raises(refused)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field="stop.max_tokens", description="give a smaller one", reason="UNSUPPORTED_FIELD"
        )
        assert unpacked(await served.failure())["BadRequest"] == error_details_pb2.BadRequest(
            field_violations=[violation]
        )
        served.raises(later)
        retry = unpacked(await served.failure())["RetryInfo"]
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToMilliseconds() == 1250


@pytest.mark.parametrize(
    ("error", "kind", "param"),
    [
        (errors.InvalidRequest("too many", param="max_tokens"), client_errors.InvalidRequest, "max_tokens"),
        (errors.UnknownModel("no such model", param="model"), client_errors.UnknownModel, "model"),
        (errors.LimitReached("requests_per_minute"), client_errors.Overloaded, "requests_per_minute"),
        (errors.WorkerLost("gone"), client_errors.Unavailable, None),
    ],
)
async def test_both_clients_name_the_field_or_the_limit(
    error: errors.TandemError, kind: type[client_errors.TandemError], param: str | None
) -> None:
    async with serving() as served:
        served.raises(error)
        address = f"127.0.0.1:{served.port}"
        async with AsyncClient(address) as client:
            with pytest.raises(kind) as failure:
                await client.tokenize("x")
        with Client(address) as blocking:
            with pytest.raises(kind) as blocking_failure:
                await asyncio.to_thread(blocking.tokenize, "x")
    for raised in (failure.value, blocking_failure.value):
        assert (raised.reason, raised.param) == (error.reason, param)


@pytest.mark.parametrize("details", [b"\xff", b"\x08\x05"])  # no message; the status of another code
def test_damaged_details_hide_no_error(details: bytes) -> None:
    def abort(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("tandem-reason", "queue_full"), (client_errors.DETAILS_KEY, details)))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    with router(failure=abort, responses=[]) as (_, address), Client(address) as client:
        with pytest.raises(client_errors.Overloaded, match="full") as raised:
            client.generate("x").result()
    assert (raised.value.reason, raised.value.param) == ("queue_full", None)


async def test_a_long_message_is_cut_and_keeps_its_status() -> None:
    """A client reports RESOURCE_EXHAUSTED, which means "try again", for a status with more metadata than it takes."""
    async with serving() as served:
        served.raises(errors.InvalidRequest("é" * 20_000, param="model"))
        failure = await served.failure()
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(failure.details()).startswith("é" * 500)
        assert "BadRequest" in unpacked(failure)


async def test_an_old_connection_takes_no_further_call_and_cuts_none() -> None:
    async with serving(max_connection_age_s=0.2) as served:
        goes_on = asyncio.Event()

        async def hold() -> None:
            await goes_on.wait()

        served.service.act = hold
        stream = served.stub.Generate(inference_pb2.GenerateRequest(), timeout=PATIENCE_S)
        assert (await stream.read()).request_id == "first"
        await asyncio.wait_for(served.service.started.wait(), PATIENCE_S)
        served.service.act = served.service.nothing
        async with asyncio.timeout(PATIENCE_S):
            while len(set(served.service.peers)) < 2:  # the channel connects again by itself
                await served.tokenize()
        goes_on.set()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


def test_a_request_that_is_too_large_for_the_router_must_change() -> None:
    with router() as (servicer, address), Client(address) as client:
        for call in (client.generate("a" * 5_000_000).result, lambda: client.tokenize("a" * 5_000_000)):
            with pytest.raises(
                client_errors.InvalidRequest, match=r"has 5,000,0\d\d bytes; this router takes at most 4,194,304"
            ) as raised:
                call()
            assert raised.value.reason == "request_too_large"
        assert servicer.seen == []
