"""A router whose gRPC services are served to clients, as in its process, and what clients ask."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import ScaleTargets
from cluster.serving.rpc_errors import REASON
from cluster.serving.serving import GrpcServer, open_channel
from router.accounts import KeyInterceptor
from router.grpc_api.service import AdminService, InferenceService, WriteTimeout
from router.operator_commands import MemberCommands, ScaleTargetView
from tandem.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.system.rigs.members.overview_rig import overview_of
from tests.system.rigs.members.router_harness import (
    PROMPT,
    RouterUnderTest,
    router_under_test,
)
from tests.system.rigs.members.scripted_workers import connect

MAX_MESSAGE_BYTES = 100_000
ADMIN_KEY = "operators"


@asynccontextmanager
async def served(
    api_key: str = "", client_stall_s: float = 60.0, **settings: object
) -> AsyncIterator[tuple[RouterUnderTest, grpc.aio.Channel]]:
    async with listening(api_key, client_stall_s, **settings) as (router, address), open_channel(address) as channel:
        yield router, channel


@asynccontextmanager
async def listening(
    api_key: str = "", client_stall_s: float = 60.0, **settings: object
) -> AsyncIterator[tuple[RouterUnderTest, str]]:
    async with router_under_test(**settings) as router:
        gate = Gate(api_key=api_key, admin_key=ADMIN_KEY if api_key else "")
        server = GrpcServer(
            service_names=["tandem.v1.Inference", "tandem.v1.Admin"],
            telemetry=router.telemetry,
            max_message_bytes=MAX_MESSAGE_BYTES,
            interceptors=[KeyInterceptor(gate, Audit())],
        )
        stalls = WriteTimeout(client_stall_s, router.telemetry)
        inference = InferenceService(
            pipeline=router.pipeline, tokenization=router.tokenization, stalls=stalls, gate=gate
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.grpc)
        drains = MemberCommands(
            router=router.member.id,
            fleet=router.fleet,
            connect=connect,
            stop=asyncio.Event(),
            drained=asyncio.get_running_loop().create_future(),
        )
        registry = Registry(url="redis://127.0.0.1:1/0", cluster_name="nobody", ttl_s=5.0)  # it does not answer
        scaling = ScaleTargetView(ScaleTargets(registry), router.fleet.set_scale_target)
        admin = AdminService(
            pipeline=router.pipeline,
            fleet=router.fleet,
            migrations=router.migrations,
            commands=drains,
            scaling=scaling,
            overview=overview_of(router, scaling, registry, str(settings.get("placement", "least-loaded"))),
            placement=str(settings.get("placement", "least-loaded")),
            explore=float(str(settings.get("explore", 0.0))),
            gate=gate,
        )
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server.grpc)
        port = server.bind("127.0.0.1", 0)
        await server.start()
        try:
            yield router, f"127.0.0.1:{port}"
        finally:
            await server.stop(0)
            await registry.close()


def generate_request(max_tokens: int = 8, **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=inference_pb2.SamplingParams(temperature=0, seed=1),
        stop=inference_pb2.StopConditions(max_tokens=max_tokens),
        **fields,  # type: ignore[arg-type]
    )


async def collect(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, **options: object
) -> list[inference_pb2.GenerateResponse]:
    stub = inference_pb2_grpc.InferenceStub(channel)
    return [response async for response in stub.Generate(request, **{"timeout": 20, **options})]


async def read_to_the_end(call: "grpc.aio.UnaryStreamCall[Any, Any]") -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return str(dict(error.trailing_metadata() or ()).get(REASON, ""))
