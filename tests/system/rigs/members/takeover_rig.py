"""A router whose workers are scripted, an owner's and an attacker's calls to it, and streams that are live there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.serving.serving import MAX_MESSAGE_BYTES, GrpcServer, open_channel
from router.accounts import KeyInterceptor
from router.grpc_api.service import AdminService, InferenceService, WriteTimeout
from tandem.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.system.rigs.members.router_harness import PROMPT, RouterUnderTest, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import ScriptedPrefill

MAX_TOKENS = 12
HOUR_S = 3600.0
LARGEST_NUMBER = (1 << 32) - 1
Request: TypeAlias = inference_pb2.GenerateRequest
Response: TypeAlias = inference_pb2.GenerateResponse


class Served:
    """A router of the cluster behind its real gRPC server."""

    def __init__(
        self, router: RouterUnderTest, prefill: ScriptedPrefill, decode: ScriptedDecode, channel: grpc.aio.Channel
    ) -> None:
        self.router, self.prefill, self.decode = router, prefill, decode
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)

    async def answer(self, request: Request, api_key: str = "") -> list[Response]:
        call = self.stub.Generate(request, timeout=20, metadata=_shown(api_key))
        return [response async for response in call]

    async def refusal(self, request: Request, api_key: str = "") -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.answer(request, api_key)
        trailing = dict(refused.value.trailing_metadata() or ())
        return refused.value.code(), str(trailing["tandem-reason"])


def _shown(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


@asynccontextmanager
async def served(api_key: str = "", **settings: Any) -> AsyncIterator[Served]:
    async with router_under_test(**settings) as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        gate = Gate(api_key=api_key)
        server = GrpcServer(
            service_names=["tandem.v1.Inference", "tandem.v1.Admin"],
            telemetry=router.telemetry,
            interceptors=[KeyInterceptor(gate, Audit())],
            max_message_bytes=settings.get("max_message_bytes", MAX_MESSAGE_BYTES),
        )
        inference = InferenceService(
            pipeline=router.pipeline,
            tokenization=router.tokenization,
            stalls=WriteTimeout(60.0, router.telemetry),
            gate=gate,
        )
        admin: Any = AdminService(
            pipeline=router.pipeline,
            fleet=router.fleet,
            migrations=router.migrations,
            commands=None,  # type: ignore[arg-type]  # none of the three is asked for here
            scaling=None,  # type: ignore[arg-type]
            overview=None,  # type: ignore[arg-type]
            placement="least-loaded",
            explore=0.0,
            gate=gate,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.grpc)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server.grpc)
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        try:
            async with open_channel(address) as channel:
                yield Served(router, prefill, decode, channel)
        finally:
            await server.stop(0)


def question(**fields: Any) -> Request:
    asked: dict[str, Any] = {
        "request_id": "mine",
        "token_ids": inference_pb2.TokenIds(ids=PROMPT),
        "sampling": inference_pb2.SamplingParams(temperature=0, seed=1),
        "stop": inference_pb2.StopConditions(max_tokens=MAX_TOKENS),
    }
    return Request(**asked | fields)


def resuming(request: Request, acceptance: bytes, *token_ids: list[int], number: int = 1) -> Request:
    """Return the request as the client library resumes it for the `number`th time."""
    resumed = Request()
    resumed.CopyFrom(request)
    choices = [inference_pb2.ResumedChoice(token_ids=ids) for ids in token_ids]
    resume_from = inference_pb2.ResumeFrom(choices=choices, acceptance=acceptance, resume_number=number)
    resumed.resume_from.CopyFrom(resume_from)
    return resumed


def tokens(responses: list[Response]) -> list[int]:
    return [i for response in responses for delta in response.deltas for i in delta.token_ids]


class Live:
    """A client's stream that has begun and is paused before its fourth token."""

    def __init__(self, at: Served, call: Any, first: Response) -> None:
        self._at, self._call = at, call
        self.acceptance: bytes = first.accepted.acceptance
        assert first.request_id == "mine" and self.acceptance and not first.deltas

    async def goes_on(self) -> list[int]:
        """Let the stream continue to its end, and check that it is complete."""
        self._at.decode.resumed.set()
        responses = [response async for response in self._call]
        assert responses[-1].HasField("summary")
        return tokens(responses)

    async def is_ended(self) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="resumed this request") as ended:
            async for _ in self._call:
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED


async def live_at(at: Served, request: Request | None = None, api_key: str = "") -> Live:
    at.decode.pause_at = 4
    call = at.stub.Generate(request or question(), timeout=30, metadata=_shown(api_key))
    first = await anext(aiter(call))
    async with asyncio.timeout(10):
        await at.decode.paused.wait()
    return Live(at, call, first)
