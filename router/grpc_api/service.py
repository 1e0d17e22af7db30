"""The router's gRPC face: Inference for clients, Admin for operators. Turns messages into values and back."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from cluster.errors import InvalidRequest, TandemError, Unauthenticated
from cluster.member import Member
from cluster.protocol import wire
from cluster.protocol.pair_wire import figures_to_wire
from router.drain.drains import Drains, Operator
from router.drain.scaling import Scaling, target_to_wire
from router.fleet.decode_peer import DecodePeer
from router.fleet.fleet import Fleet
from router.grpc_api.client_stalls import ClientStalls
from router.grpc_api.inference_wire import chat_from_wire, generate_request_from_wire, model_to_wire, output_to_wire
from router.grpc_api.live_listing import live_requests_to_wire
from router.pipeline.migration import Migrations
from router.pipeline.pipeline import Pipeline
from router.request.request_acceptance import client_of
from router.request.validation import check_model
from router.running import running
from router.text.tokenization import Tokenization
from router.text.tokenizer_threads import TokenizerThreads
from tandem.routers import ROUTERS_KEY
from tandem.silence import ALIVE_KEY
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

# What gRPC ends at the client's deadline carries no message: the router's own end comes a little before, and names the
# phase.
_EARLY_SHARE, _EARLY_MAX_S = 0.1, 0.25
_LOOK_AGAIN_S = 1.0
_LEAST_SIGN_S = 0.1
_GUARDED_PREFIX = "/tandem.v1."
_AUTHORIZATION = "authorization"

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        *,
        pipeline: Pipeline,
        tokenization: Tokenization,
        stalls: ClientStalls,
        told_routers: Callable[[], Sequence[str]] = tuple,
        asks_for_keys: bool = False,
    ) -> None:
        """`told_routers`: addresses of the cluster's routers, this one's first; none: clients are told of none.
        `asks_for_keys`: callers have shown a valid API key, which their requests belong to from then on."""
        self._pipeline = pipeline
        self._tokenization = tokenization
        self._threads = TokenizerThreads()
        self._stalls = stalls
        self._told_routers = told_routers
        self._asks_for_keys = asks_for_keys

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        sign_every_s = _sign_every_s(context)
        await self._tell_first(context, sign_every_s)
        left_s = context.time_remaining()
        timeout_s = None if left_s is None else left_s - min(_EARLY_MAX_S, left_s * _EARLY_SHARE)
        client = client_of(_authorization(context)) if self._asks_for_keys else b""
        asked = generate_request_from_wire(request, timeout_s, sign_every_s, client)
        async with aclosing(self._pipeline.generate(asked)) as outputs:
            async for output in outputs:
                with self._stalls.writing():
                    yield output_to_wire(output)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        check_model(request.model, self._tokenization.model_info)
        match request.WhichOneof("input"):
            case "text":
                token_ids = await self._threads.run(self._tokenization.encode, request.text)
            case "chat":
                encode = partial(self._tokenization.encode_chat, rendered_at_us=int(time.time() * 1e6))
                token_ids = await self._threads.run(encode, chat_from_wire(request.chat))
            case _:
                raise InvalidRequest("there is no input: set text or chat")
        return inference_pb2.TokenizeResponse(token_ids=wire.pack_ids(token_ids))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        check_model(request.model, self._tokenization.model_info)
        text = await self._threads.run(self._tokenization.decode, wire.unpack_ids(request.token_ids))
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[model_to_wire(self._tokenization.model_info)])

    async def _tell_first(self, context: _Context, sign_every_s: float | None) -> None:
        """At once, before anything can go wrong here: a client that loses this router knows where to go on, and one
        that asked for signs of life may count on them."""
        told: list[tuple[str, str]] = []
        if routers := self._told_routers():
            told.append((ROUTERS_KEY, ",".join(routers)))
        if sign_every_s is not None:
            told.append((ALIVE_KEY, f"{sign_every_s:g}"))
        if told:
            await context.send_initial_metadata(told)


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(
        self, *, pipeline: Pipeline, fleet: Fleet, migrations: Migrations, drains: Drains, scaling: Scaling
    ) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._migrations = migrations
        self._drains = drains
        self._scaling = scaling

    async def Status(self, request: admin_pb2.StatusRequest, context: _Context) -> admin_pb2.StatusResponse:
        members = await asyncio.gather(*(self._status(member) for member in self._fleet.members()))
        return self._response(members)

    async def Follow(
        self, request: admin_pb2.FollowRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.StatusResponse]:
        told = None
        while True:
            found = [_member_status(member) for member in self._fleet.members()], target_to_wire(self._scaling.target)
            if found != told:
                told = found
                yield self._response(found[0])
            await self._changed()

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        operator = Operator(context.time_remaining(), _shown_key(context))
        drained = await self._drains.drain(request.member_id, operator, wait=request.wait)
        return admin_pb2.DrainResponse(member=str(drained.member), outcome=drained.outcome)

    async def Scale(self, request: admin_pb2.ScaleRequest, context: _Context) -> admin_pb2.ScaleResponse:
        prefill = request.prefill if request.HasField("prefill") else None
        decode = request.decode if request.HasField("decode") else None
        return admin_pb2.ScaleResponse(target=target_to_wire(await self._scaling.set(prefill, decode)))

    async def Migrate(self, request: admin_pb2.MigrateRequest, context: _Context) -> admin_pb2.MigrateResponse:
        count = await self._migrations.migrate(request.source, request.target, request.max_sequences)
        return admin_pb2.MigrateResponse(num_moved=count.num_moved, num_kept=count.num_kept)

    async def Requests(self, request: admin_pb2.RequestsRequest, context: _Context) -> admin_pb2.RequestsResponse:
        return admin_pb2.RequestsResponse(
            requests=live_requests_to_wire(self._pipeline.live, asyncio.get_running_loop().time())
        )

    async def _status(self, member: Member) -> admin_pb2.MemberStatus:
        """A worker that does not answer is listed without figures, and with how long it has been silent."""
        figures: dict[str, float] = {}
        last_seen_s = 0.0
        peer = self._fleet.peer(member.id)
        if peer is not None:
            try:
                inspected = await peer.inspect()
                figures = dict(inspected.figures) | {f"blocks_{k}": float(v) for k, v in inspected.blocks.items()}
            except TandemError:
                last_seen_s = peer.silent_s
                if isinstance(peer, DecodePeer):
                    figures = {"step_s": peer.stream.heartbeat.step_s}
        status = _member_status(member)
        status.last_seen_s = last_seen_s
        status.figures.update(figures)
        status.pairs.extend(figures_to_wire(self._fleet.pairs(member.id)))
        return status

    async def _changed(self) -> None:
        """Or a little later, as what changed while an answer was being sent is not heard of."""
        async with running(self._fleet.changed()) as members, running(self._scaling.changed()) as target:
            await asyncio.wait((members, target), timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)

    def _response(self, members: Iterable[admin_pb2.MemberStatus]) -> admin_pb2.StatusResponse:
        target = target_to_wire(self._scaling.target)
        return admin_pb2.StatusResponse(members=members, live_requests=self._pipeline.num_live, target=target)


def _sign_every_s(context: _Context) -> float | None:
    """None: not asked for, or by no number."""
    asked = dict(context.invocation_metadata() or ()).get(ALIVE_KEY)
    try:
        return max(_LEAST_SIGN_S, float(asked)) if asked is not None else None
    except ValueError:
        return None


def _member_status(member: Member) -> admin_pb2.MemberStatus:
    """What the registry says."""
    return admin_pb2.MemberStatus(
        member_id=member.id.id,
        incarnation=member.id.incarnation,
        role=member.role,
        state=member.state,
        address=member.address,
        model=member.model,
        kv_transports=member.transports,
    )


def _shown_key(context: _Context) -> tuple[tuple[str, str], ...]:
    """What the caller showed, for a router that is asked in their name."""
    shown = context.invocation_metadata() or ()
    return tuple((key, str(value)) for key, value in shown if key == _AUTHORIZATION)


def _authorization(context: _Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get(_AUTHORIZATION, ""))


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Asks for the key on Tandem's own methods; health and reflection stay open to probes."""

    def __init__(self, api_key: str) -> None:
        self._expected = f"Bearer {api_key}".encode()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method.startswith(_GUARDED_PREFIX):
            given = dict(handler_call_details.invocation_metadata or ()).get(_AUTHORIZATION, "")
            if not hmac.compare_digest(str(given).encode(), self._expected):
                raise Unauthenticated("send this router's API key as metadata `authorization: Bearer KEY`")
        return await continuation(handler_call_details)
