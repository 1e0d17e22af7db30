"""The gRPC services of the router: Inference for clients, Admin for operators. Convert messages to values and back."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc

from cluster.accounts.key_store import RecordedKeys
from cluster.accounts.keys import Gate, new_key
from cluster.accounts.usage import KeyUsage
from cluster.errors import InvalidRequest, SlowClient, Unavailable
from cluster.messages import MAX_PROFILE_S, Role
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import TRACE_PARENT_KEY, RequestTrace
from cluster.protocol.field_rules import LONGEST_S
from cluster.registry.scale_target import POOLS
from cluster.serving.rpc_errors import abort
from router.fleet.fleet import Fleet
from router.grpc_api.admin_wire import (
    caller_from_wire,
    comparison_to_wire,
    live_requests_to_wire,
    member_to_wire,
    record_to_wire,
    usage_to_wire,
)
from router.grpc_api.inference_wire import (
    AnswerParts,
    chat_from_wire,
    generate_request_from_wire,
    model_to_wire,
    output_to_wire,
    prompt_to_wire,
)
from router.operator_commands import MemberCommands, OperatorCall, ScaleTargetView, target_to_wire
from router.overview.overview import Overview
from router.pipeline.migration import Migrations
from router.pipeline.pipeline import Pipeline
from router.request.divided_answers import ChatSettings
from router.request.request_acceptance import client_of
from router.request.validation import check_model
from router.requests import Output
from router.running import running
from router.text.tokenization import Tokenization, TokenizerThreads
from tandem.enum_words import DRAIN_OUTCOMES, MEMBER_ROLES
from tandem.keepalive import KEEPALIVE_KEY
from tandem.routers import ROUTERS_KEY
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_GENERATE = "/tandem.v1.Inference/Generate"


class WriteTimeout:
    """Ends the call of a gRPC client that reads nothing of its response for `stall_s`. router/http/edge.py does this
    for HTTP."""

    def __init__(self, stall_s: float, telemetry: Telemetry) -> None:
        self._stall_s = stall_s
        self._telemetry = telemetry
        self._telling: set[asyncio.Task[None]] = set()

    def of_call(self, context: _Context) -> "CallWriting":
        """Return the timeout of the call that the present task serves."""
        task = asyncio.current_task()
        assert task is not None
        return CallWriting(self._stall_s, partial(self._give_up, task, context))

    def _give_up(self, call: "asyncio.Task[object]", context: _Context) -> None:
        self._telemetry.count("tandem_stalled_clients_total", surface="grpc")
        telling = asyncio.create_task(_tell(context))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        call.cancel()


async def _tell(context: _Context) -> None:
    """End the call with an error, which its client gets once it reads again. Until then the call stays open."""
    with suppress(grpc.aio.BaseError):  # AbortError; another one where the call has ended
        await abort(context, SlowClient("the client took too little of the response; read faster"), _GENERATE)


class CallWriting:
    """Wrap every `yield` of a response in `with`: gRPC writes it in the task of the call, which is cancelled when the
    write times out. One timer serves all writes of a call, because a write takes less time than to start a timer."""

    def __init__(self, stall_s: float, give_up: Callable[[], None]) -> None:
        self._stall_s, self.give_up = stall_s, give_up
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None  # the present write
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_s, self._look)

    def __exit__(self, *_: object) -> None:
        self._began_s = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._began_s is None:
            return
        left_s = self._began_s + self._stall_s - self._loop.time()
        if left_s <= 0:
            self.give_up()
        else:
            self._timer = self._loop.call_later(left_s, self._look)


_EARLY_SHARE, _EARLY_MAX_S = 0.1, 0.25
_LOOK_AGAIN_S = 1.0
_LEAST_KEEPALIVE_INTERVAL_S = 0.1
_AUTHORIZATION = "authorization"

_NO_PARSERS = ChatSettings()


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        *,
        pipeline: Pipeline,
        tokenization: Tokenization,
        stalls: WriteTimeout,
        advertised_routers: Callable[[], Sequence[str]] = tuple,
        gate: Gate,
        chats: ChatSettings = _NO_PARSERS,
    ) -> None:
        """`advertised_routers` returns the addresses of the cluster's routers, this one's first; clients receive them.
        `gate` has admitted every caller; requests belong to the key of their call.
        """
        self._pipeline = pipeline
        self._tokenization = tokenization
        self._threads = TokenizerThreads()
        self._stalls = stalls
        self._advertised_routers = advertised_routers
        self._gate = gate
        self._chats = chats

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        keepalive_interval_s = _keepalive_interval_s(context)
        trace = self._pipeline.live_requests.begin_trace(_trace_parent(context))
        await self._send_metadata(context, keepalive_interval_s, trace)
        timeout_s = _timeout_s(context.time_remaining())
        shown = _authorization(context)
        client = client_of(shown) if self._gate.asks_for_keys else b""
        asked = generate_request_from_wire(request, timeout_s, client)
        asked = replace(asked, caller=self._gate.caller(shown), address=address_of(context.peer()), trace=trace)
        divide = partial(AnswerParts.asked_for, request.chat, chats=self._chats, tokenization=self._tokenization)
        # The text that the client of a resumed request has is divided again, which takes time.
        asked, parts = await self._threads.run(divide, asked) if asked.resume_from else divide(asked)
        with closing(self._stalls.of_call(context)) as writing:
            generating = self._pipeline.generate(asked, keepalive_interval_s=keepalive_interval_s)
            async with aclosing(generating) as outputs:
                async for output in outputs:
                    if output.prompt is not None:
                        async with aclosing(self._scored(output, writing)) as messages:
                            async for scored in messages:
                                with writing:
                                    yield scored
                    message = output_to_wire(output)
                    if parts is not None:
                        parts.add_to(message, output)
                    with writing:
                        yield message

    async def _scored(
        self, output: Output, writing: CallWriting
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yield the messages of an output's prompt, whose values count as buffered until the client has taken them."""
        with self._pipeline.live_requests.whole_answer() as answer:
            answer.add((), output.prompt)
            answer.begin_sending(on_ended=writing.give_up)
            for message in prompt_to_wire(output):
                yield message
                answer.part_sent()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        check_model(request.model, self._tokenization.model_info)
        match request.WhichOneof("input"):
            case "text":
                token_ids = await self._threads.run(self._tokenization.encode, request.text)
            case "chat":
                chat, now_us = chat_from_wire(request.chat), int(time.time() * 1e6)
                encode = partial(self._tokenization.encode_chat, rendered_at_us=now_us, options=chat.options)
                token_ids = await self._threads.run(encode, chat.messages)
            case _:
                raise InvalidRequest("there is no input: set text or chat")
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        check_model(request.model, self._tokenization.model_info)
        text = await self._threads.run(self._tokenization.decode, tuple(request.token_ids))
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[model_to_wire(self._tokenization.model_info)])

    async def _send_metadata(
        self, context: _Context, keepalive_interval_s: float | None, trace: RequestTrace | None
    ) -> None:
        """Send metadata before anything can fail here: the addresses of other routers, the interval of keep-alive
        messages, and the request's place in traces."""
        metadata: list[tuple[str, str]] = []
        if routers := self._advertised_routers():
            metadata.append((ROUTERS_KEY, ",".join(routers)))
        if keepalive_interval_s is not None:
            metadata.append((KEEPALIVE_KEY, f"{keepalive_interval_s:g}"))
        if trace is not None:
            metadata.append((TRACE_PARENT_KEY, str(trace.root)))
        if metadata:
            await context.send_initial_metadata(metadata)


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(
        self,
        *,
        pipeline: Pipeline,
        fleet: Fleet,
        migrations: Migrations,
        commands: MemberCommands,
        scaling: ScaleTargetView,
        overview: Overview,
        placement: str,
        explore: float,
        gate: Gate,
        keys: RecordedKeys | None = None,
        usage: Callable[[], Awaitable[list[KeyUsage]]] | None = None,
    ) -> None:
        """`placement`, `explore`: the router's settings of these names. `keys`: None where no keys are recorded.
        `usage` returns that of all keys."""
        self._usage = usage
        self._gate = gate
        self._keys = keys
        self._overview = overview
        self._placement = placement
        self._explore = explore
        self._pipeline = pipeline
        self._fleet = fleet
        self._migrations = migrations
        self._commands = commands
        self._scaling = scaling

    async def Status(self, request: admin_pb2.StatusRequest, context: _Context) -> admin_pb2.StatusResponse:
        members = await self._overview.members.fresh()
        comparison = self._pipeline.live_requests.explanations.comparison()
        response = self._response(members)
        response.disaggregation.CopyFrom(comparison_to_wire(comparison, self._placement, self._explore))
        return response

    async def Follow(
        self, request: admin_pb2.FollowRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.StatusResponse]:
        sent = None
        while True:
            found = [member_to_wire(member) for member in self._fleet.members()], target_to_wire(self._scaling.target)
            if found != sent:
                sent = found
                yield self._response(found[0])
            await self._changed()

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        operator = OperatorCall(context.time_remaining(), _shown_key(context))
        drained = await self._commands.drain(request.member_id, operator, wait=request.wait)
        outcome = DRAIN_OUTCOMES.number(drained.outcome)
        return admin_pb2.DrainResponse(member=str(drained.member), outcome=outcome)

    async def SetRole(self, request: admin_pb2.SetRoleRequest, context: _Context) -> admin_pb2.SetRoleResponse:
        roles = {MEMBER_ROLES.number(role): role for role in Role if role.is_worker}
        if request.role not in roles:
            raise InvalidRequest(f"the role of a worker is one of {', '.join(roles.values())}")
        change = await self._commands.set_role(request.member_id, roles[request.role])
        target = target_to_wire(await self._scaling.read())
        former = MEMBER_ROLES.number(change.former)
        return admin_pb2.SetRoleResponse(member=str(change.member), former_role=former, target=target)

    async def Profile(self, request: admin_pb2.ProfileRequest, context: _Context) -> admin_pb2.ProfileResponse:
        if not 0 < request.timeout_s <= MAX_PROFILE_S:
            raise InvalidRequest(f"a profile takes at most {MAX_PROFILE_S:g} s, not {request.timeout_s:g}")
        profiled = await self._commands.profile(request.member_id, request.num_steps, request.timeout_s)
        member, num_steps, trace = profiled
        return admin_pb2.ProfileResponse(member=str(member), num_steps=num_steps, trace=trace)

    async def Scale(self, request: admin_pb2.ScaleRequest, context: _Context) -> admin_pb2.ScaleResponse:
        wanted = {role: getattr(request, name) for name, role in POOLS.items() if request.HasField(name)}
        return admin_pb2.ScaleResponse(target=target_to_wire(await self._scaling.set(wanted)))

    async def Migrate(self, request: admin_pb2.MigrateRequest, context: _Context) -> admin_pb2.MigrateResponse:
        count = await self._migrations.migrate(request.source, request.target, request.max_sequences)
        return admin_pb2.MigrateResponse(num_moved=count.num_moved, num_kept=count.num_kept)

    async def Requests(self, request: admin_pb2.RequestsRequest, context: _Context) -> admin_pb2.RequestsResponse:
        return admin_pb2.RequestsResponse(
            requests=live_requests_to_wire(self._pipeline.live_requests, asyncio.get_running_loop().time())
        )

    async def Explain(self, request: admin_pb2.ExplainRequest, context: _Context) -> admin_pb2.ExplainResponse:
        return self._overview.explain(request.request)

    async def Overview(self, request: admin_pb2.OverviewRequest, context: _Context) -> admin_pb2.OverviewResponse:
        return await self._overview.of_cluster(request, _shown_key(context))

    async def AddKey(self, request: admin_pb2.AddKeyRequest, context: _Context) -> admin_pb2.AddKeyResponse:
        key, record = new_key(caller_from_wire(request.record))
        await self._recorded_keys().change(lambda present: present.with_record(record))
        return admin_pb2.AddKeyResponse(key=key, record=record_to_wire(record))

    async def ListKeys(self, request: admin_pb2.ListKeysRequest, context: _Context) -> admin_pb2.ListKeysResponse:
        await self._recorded_keys().refresh()
        return admin_pb2.ListKeysResponse(records=map(record_to_wire, self._gate.keys.records))

    async def RevokeKey(self, request: admin_pb2.RevokeKeyRequest, context: _Context) -> admin_pb2.RevokeKeyResponse:
        await self._recorded_keys().change(lambda present: present.without(request.key_id))
        return admin_pb2.RevokeKeyResponse()

    async def Usage(self, request: admin_pb2.UsageRequest, context: _Context) -> admin_pb2.UsageResponse:
        found = await self._usage() if self._usage is not None else []
        return admin_pb2.UsageResponse(keys=map(usage_to_wire, found))

    def _recorded_keys(self) -> RecordedKeys:
        if self._keys is None:
            raise Unavailable("this router keeps no records of API keys; start the routers with --keys redis")
        return self._keys

    async def _changed(self) -> None:
        """Wait for a change, `_LOOK_AGAIN_S` at most: a change during the last response may have been missed."""
        async with running(self._fleet.changed()) as members, running(self._scaling.changed()) as target:
            await asyncio.wait((members, target), timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)

    def _response(self, members: Iterable[admin_pb2.MemberStatus]) -> admin_pb2.StatusResponse:
        target = target_to_wire(self._scaling.target)
        return admin_pb2.StatusResponse(members=members, live_requests=len(self._pipeline.live_requests), target=target)


def _timeout_s(left_s: float | None) -> float | None:
    """Return the timeout of a call with this time to its deadline; None if it has no deadline.

    gRPC ends a call at the client's deadline without a message, so the router ends it slightly earlier and names the
    phase. gRPC transmits the time to the deadline with three digits, rounded up: 600.4 s arrive as 601 s.
    """
    if left_s is None or left_s <= 0.0:
        return left_s
    rounding_s = 10.0 ** (math.floor(math.log10(left_s)) - 2)
    return min(LONGEST_S, left_s - rounding_s - min(_EARLY_MAX_S, left_s * _EARLY_SHARE))


def _trace_parent(context: _Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get(TRACE_PARENT_KEY, ""))


def _keepalive_interval_s(context: _Context) -> float | None:
    """Return the interval of keep-alive messages that the client requests; None if it requests none."""
    asked = dict(context.invocation_metadata() or ()).get(KEEPALIVE_KEY)
    try:
        return max(_LEAST_KEEPALIVE_INTERVAL_S, float(asked)) if asked is not None else None
    except ValueError:
        return None


def _shown_key(context: _Context) -> tuple[tuple[str, str], ...]:
    """Return the caller's API key as metadata, to forward a call on the caller's behalf."""
    shown = context.invocation_metadata() or ()
    return tuple((key, str(value)) for key, value in shown if key == _AUTHORIZATION)


def address_of(peer: str) -> str:
    """Return the address of a peer's host, given gRPC's name for the peer; empty for a Unix socket's."""
    family, _, address = peer.partition(":")  # ipv4:10.0.0.1:50051, or ipv6:%5B::1%5D:50051
    return unquote(address.rpartition(":")[0]).strip("[]") if family in ("ipv4", "ipv6") else ""


def _authorization(context: _Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get(_AUTHORIZATION, ""))
