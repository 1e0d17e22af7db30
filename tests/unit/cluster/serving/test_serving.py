"""The behaviour of every gRPC server of Tandem, shown on a real server and channel."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import errors
from cluster.observe.health import LIVENESS, READINESS
from cluster.observe.telemetry import Telemetry
from cluster.process import die_with_parent
from cluster.serving.rpc_errors import error_from_rpc
from cluster.serving.serving import GrpcServer, is_serving, join_address, open_channel
from tandem.v1 import inference_pb2, inference_pb2_grpc

DEADLINE_S = 10.0
ROOT = Path(__file__).parents[4]
Context = grpc.aio.ServicerContext[Any, Any]


class Service(inference_pb2_grpc.InferenceServicer):
    """A service whose behaviour each test sets."""

    def __init__(self) -> None:
        self.act: Callable[[], Awaitable[None]] = self.nothing
        self.peers: list[str] = []  # the connection of each Tokenize
        self.released = asyncio.Event()
        self.started = asyncio.Event()

    @staticmethod
    async def nothing() -> None:
        pass

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self.peers.append(context.peer())
        await self.act()
        return inference_pb2.TokenizeResponse(token_ids=request.text.encode())

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(request_id="first")
            self.started.set()
            await self.act()
        finally:
            self.released.set()


class Served:
    def __init__(
        self, *, max_message_bytes: int = 1 << 20, max_calls: int | None = None, max_connection_age_s: float = 0.0
    ) -> None:
        self.telemetry = Telemetry()
        self.service = Service()
        self.server = GrpcServer(
            service_names=["tandem.v1.Inference"],
            telemetry=self.telemetry,
            max_message_bytes=max_message_bytes,
            max_calls=max_calls,
            max_connection_age_s=max_connection_age_s,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, self.server.grpc)
        self.port = self.server.bind("127.0.0.1", 0)
        self.channel = open_channel(f"127.0.0.1:{self.port}")
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def raises(self, error: BaseException) -> None:
        async def act() -> None:
            raise error

        self.service.act = act

    async def tokenize(self, text: str = "x") -> inference_pb2.TokenizeResponse:
        answer: inference_pb2.TokenizeResponse = await self.stub.Tokenize(
            inference_pb2.TokenizeRequest(text=text), timeout=DEADLINE_S
        )
        return answer

    async def failure(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await self.tokenize()
        return failure.value


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.server.start()
    yield served
    await served.channel.close()
    await served.server.stop(0)


def every_error() -> list[errors.TandemError]:
    def kinds(base: type[errors.TandemError]) -> list[type[errors.TandemError]]:
        children = [child for child in base.__subclasses__() if child.__module__ == errors.__name__]
        return [base, *(kind for child in children for kind in kinds(child))]

    plain = [kind("what to change", retry_after_s=1.5) for kind in kinds(errors.InvalidRequest)]
    plain += [kind("what to change") for kind in kinds(errors.TandemError)[1:] if kind is not errors.HandOffFailed]
    return [*plain, errors.HandOffFailed(errors.HandOffReason.LEASE_LAPSED, "too late")]


async def test_every_error_arrives_with_its_type_and_message(served: Served) -> None:
    for error in every_error():
        served.raises(error)
        failure = await served.failure()
        arrived = error_from_rpc(failure)
        assert type(arrived) is type(error)
        assert (arrived.message, arrived.retry_after_s) == (error.message, error.retry_after_s)
        assert failure.code().name == errors.grpc_status(error)
        if isinstance(error, errors.HandOffFailed):
            assert isinstance(arrived, errors.HandOffFailed)
            assert arrived.handoff_reason is error.handoff_reason


async def test_an_error_that_a_package_derived_for_itself_arrives_as_its_kind(served: Served) -> None:
    class Special(errors.QueueFull):
        def __init__(self, number: int) -> None:
            super().__init__(f"number {number}")

    served.raises(Special(3))
    arrived = error_from_rpc(await served.failure())
    assert type(arrived) is errors.QueueFull
    assert arrived.message == "number 3"


async def test_an_error_in_mid_stream_arrives_after_the_sent_messages(served: Served) -> None:
    served.raises(errors.WorkerLost("gone"))
    call = served.stub.Generate(inference_pb2.GenerateRequest(), timeout=DEADLINE_S)
    assert (await call.read()).request_id == "first"
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call.read()
    assert type(error_from_rpc(failure.value)) is errors.WorkerLost


async def test_no_stack_trace_reaches_a_client_and_one_reaches_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.raises(RuntimeError("a secret of the house"))
    with caplog.at_level(logging.INFO):
        failure = await served.failure()
    assert type(error_from_rpc(failure)) is errors.InternalError
    assert "secret" not in str(failure.details())
    assert "secret" not in str(failure.trailing_metadata())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]
    assert served.telemetry.value("tandem_rpc_errors_total", reason="internal") == 1


async def test_a_malformed_message_is_the_clients_fault(served: Served) -> None:
    call: Any = served.channel.unary_unary("/tandem.v1.Inference/Tokenize")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(b"\xff\xff\xff", timeout=DEADLINE_S)
    assert type(error_from_rpc(failure.value)) is errors.InvalidRequest
    assert "malformed" in str(failure.value.details())


async def test_an_oversized_message_is_refused_with_both_sizes() -> None:
    served = Served(max_message_bytes=1000)
    await served.server.start()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await served.tokenize("x" * 2000)
    error = error_from_rpc(failure.value)
    assert type(error) is errors.InvalidRequest
    assert "1000" in error.message
    await served.tokenize("x" * 900)
    await served.channel.close()
    await served.server.stop(0)


async def test_the_server_releases_a_calls_resources_when_its_client_cancels(served: Served) -> None:
    async def hold() -> None:
        await asyncio.Event().wait()

    served.service.act = hold
    call = served.stub.Generate(inference_pb2.GenerateRequest())
    await call.read()
    await asyncio.wait_for(served.service.started.wait(), DEADLINE_S)
    call.cancel()
    await asyncio.wait_for(served.service.released.wait(), DEADLINE_S)


_READER = """
import asyncio, sys
from cluster.serving.serving import open_channel
from tandem.v1 import inference_pb2, inference_pb2_grpc

async def main():
    async with open_channel(sys.argv[1]) as channel:
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest()):
            pass

asyncio.run(main())
"""


@pytest.mark.slow  # keepalive's 15 s
async def test_the_server_releases_a_calls_resources_when_its_client_freezes(served: Served) -> None:
    """The connection of a stopped process stays open, but the process neither receives nor sends."""

    async def hold() -> None:
        await asyncio.Event().wait()

    served.service.act = hold
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _READER, f"127.0.0.1:{served.port}"), cwd=ROOT, preexec_fn=die_with_parent
    )
    try:
        async with asyncio.timeout(4 * DEADLINE_S):
            await served.service.started.wait()
            reader.send_signal(signal.SIGSTOP)
            await served.service.released.wait()
    finally:
        reader.kill()
        await reader.wait()


async def test_an_interceptor_may_refuse_a_call_with_a_named_error() -> None:
    class Doorman(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
            raise errors.Unauthenticated("send the key")

    server = GrpcServer(service_names=[], telemetry=Telemetry(), interceptors=[Doorman()])
    inference_pb2_grpc.add_InferenceServicer_to_server(Service(), server.grpc)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await stub.Generate(inference_pb2.GenerateRequest(), timeout=DEADLINE_S).read()
    await server.stop(0)
    assert type(error_from_rpc(unary.value)) is errors.Unauthenticated
    assert type(error_from_rpc(stream.value)) is errors.Unauthenticated


async def test_a_missing_server_is_unavailable_and_a_passed_deadline_is_deadline_exceeded(served: Served) -> None:
    async def hold() -> None:
        await asyncio.Event().wait()

    served.service.act = hold
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await served.stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=0.05)
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as no_server:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(
                inference_pb2.TokenizeRequest(), timeout=DEADLINE_S
            )
    assert type(error_from_rpc(late.value)) is errors.DeadlineExceeded
    assert type(error_from_rpc(no_server.value)) is errors.Unavailable


async def test_a_call_succeeds_though_connecting_takes_half_a_second(served: Served) -> None:
    """Connecting can take that long on a loaded machine. Half a second is a quarter of the connection timeout."""

    async def pass_on_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", served.port)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)

    slow = await asyncio.start_server(pass_on_late, "127.0.0.1", 0)
    address = f"127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    async with slow, open_channel(address) as channel:
        await served.server.set_ready(True)
        assert await is_serving(channel, timeout_s=DEADLINE_S)


async def test_a_port_in_use_is_refused_by_name(served: Served) -> None:
    second = GrpcServer(service_names=[], telemetry=Telemetry())
    with pytest.raises(errors.ConfigError, match=f"127.0.0.1:{served.port}"):
        second.bind("127.0.0.1", served.port)


async def test_health_follows_readiness(served: Served) -> None:
    async def states() -> list[bool]:
        names = ("", "tandem.v1.Inference")
        return [await is_serving(served.channel, timeout_s=DEADLINE_S, service=name) for name in names]

    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await states() == [False, False]
    await served.server.set_ready(True)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert await states() == [True, True]
    await served.server.set_ready(False)
    assert await states() == [False, False]
    watch.cancel()


async def test_a_draining_process_is_alive_and_a_process_with_a_problem_is_not(served: Served) -> None:
    async def states() -> dict[str, bool]:
        names = (LIVENESS, READINESS, "", "tandem.v1.Inference")
        return {name: await is_serving(served.channel, timeout_s=DEADLINE_S, service=name) for name in names}

    alive_only = {LIVENESS: True, READINESS: False, "": False, "tandem.v1.Inference": False}
    assert await states() == alive_only
    await served.server.set_ready(True)
    assert set((await states()).values()) == {True}
    await served.server.set_problem("step 7 has run for more than 60 s")
    assert set((await states()).values()) == {False}
    await served.server.set_ready(False)
    await served.server.set_problem("")
    assert await states() == alive_only


async def test_reflection_lists_the_served_services(served: Served) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    async for answer in stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S):
        names = {service.name for service in answer.list_services_response.service}
    assert {"tandem.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_a_graceful_stop_lets_a_call_finish(served: Served) -> None:
    finish, began = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        began.set()
        await finish.wait()

    served.service.act = hold
    call = asyncio.ensure_future(served.tokenize("kept"))
    await asyncio.wait_for(began.wait(), DEADLINE_S)
    stopping = asyncio.create_task(served.server.stop(DEADLINE_S))
    finish.set()
    assert (await call).token_ids == [*b"kept"]
    await stopping


def test_ipv4_and_ipv6_addresses_are_written_as_grpc_reads_them() -> None:
    assert join_address("127.0.0.1", 5) == "127.0.0.1:5"
    assert join_address("::1", 5) == "[::1]:5"


async def test_a_call_beyond_the_limit_is_refused_until_another_call_has_ended() -> None:
    served = Served(max_calls=1)
    await served.server.start()
    held = asyncio.Event()

    async def hold() -> None:
        await held.wait()

    served.service.act = hold
    try:
        call = served.stub.Generate(inference_pb2.GenerateRequest(), timeout=DEADLINE_S)
        await call.read()
        failure = await served.failure()
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error_from_rpc(failure), errors.Overloaded)
        held.set()
        assert await call.read() is grpc.aio.EOF
        async with asyncio.timeout(DEADLINE_S):
            while True:  # the server counts a call until it is taken apart
                try:
                    await served.tokenize()
                    break
                except grpc.aio.AioRpcError:
                    continue
    finally:
        await served.channel.close()
        await served.server.stop(0)
