"""Fuzz targets for every protobuf message that a Tandem process receives, and for bytes inside of messages: tickets,
acceptances, endpoints of transports.

Messages between members pass through the receiver's own conversions. Clients' messages go over a socket to a real gRPC
server with the router's service; only the workers' tokens are scripted.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from cluster.accounts.keys import Gate
from cluster.auth.keys import SIGNATURE_BYTES, Purpose
from cluster.errors import HandOffFailed, MalformedMessage, ResumeRefused
from cluster.observe.telemetry import Telemetry
from cluster.protocol import tickets
from cluster.protocol.received import checked
from cluster.serving.serving import GrpcServer
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl.transport import _parse_endpoint as parse_nccl
from kvtransfer.transports.nixl.agent import Region
from kvtransfer.transports.nixl.exporting import MAGIC, NixlEndpoint, _for_epoch
from kvtransfer.transports.tcp.exporting import pack_endpoint, parse_endpoint
from router.grpc_api.service import InferenceService, WriteTimeout
from router.request.request_acceptance import Acceptance, AcceptanceSigner, _client_digest
from router.requests import GenerateRequest, SamplingParams, TextPrompt
from tandem.errors import InternalError
from tandem.internal.v1 import kv_pb2
from tandem.progress import Progress
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.transport_rig import EPOCH
from tests.fuzz.http_targets import ShortAnswers, live_requests, tokenization
from tests.fuzz.mutations import any_message, changed_message
from tests.fuzz.target import Refused, Target, refusals
from tests.unit.client.scripted_router import SCORED_PROMPT, TWO_CHOICES
from tests.unit.cluster.protocol.member_messages import examples, kinds
from tests.unit.cluster.protocol.test_received_messages import CONVERSIONS, KEY

_GENERATE = inference_pb2.GenerateRequest
_SEEDS: dict[str, list[Message]] = {
    "Generate": [
        _GENERATE(text="hello", stop={"max_tokens": 3, "stop": ["x"]}, sampling={"temperature": 0.5, "top_k": 3}),
        _GENERATE(token_ids={"ids": [5, 6]}, n=2, logprobs=1, stop={"max_tokens": 2}, request_id="r", cache_salt="s",
                  prompt_logprobs=1),
        _GENERATE(chat={"messages": [{"role": 2, "content": "a"}]}, stop={"max_tokens": 2}, stream_interval=2),
        _GENERATE(text="a", grammar={"kind": 1, "text": "{}"}, slo_ttft_s=1.0, truncate_prompt_tokens=3,
                  sampling={"logit_bias": {5: 1.0}, "bad_words": ["x"], "allowed_token_ids": [5]}, is_batch=True),
        _GENERATE(text="a", stop={"max_tokens": 2}, resume_from={"choices": [{"token_ids": [5], "num_characters": 1}],
                  "acceptance": b"x" * 100, "resume_number": 1}),
    ],
    "Tokenize": [inference_pb2.TokenizeRequest(text="hello")],
    "Detokenize": [inference_pb2.DetokenizeRequest(token_ids=[1, 2, 3])],
    "ListModels": [inference_pb2.ListModelsRequest()],
}  # fmt: skip


def targets() -> Iterator[Target]:
    for kind in kinds():
        seeds = [example.SerializeToString() for example in examples(kind)]
        run = partial(_convert, kind, CONVERSIONS.get(kind, checked))
        yield Target(f"message {kind.DESCRIPTOR.name}", seeds, run, partial(_made, kind, tuple(examples(kind))))
    for method, messages in _SEEDS.items():
        kind = type(messages[0])
        seeds = [message.SerializeToString() for message in messages]
        yield Target(f"grpc {method}", seeds, partial(_call, method), partial(_made, kind, tuple(messages)))
    response = inference_pb2.GenerateResponse
    known = (SCORED_PROMPT, *TWO_CHOICES)
    answers = [answer.SerializeToString() for answer in known]
    yield Target("client GenerateResponse", answers, _progress, partial(_made, response, known))
    yield from _inside_messages()


def _inside_messages() -> Iterator[Target]:
    yield Target("ticket", [_signed(next(examples(_kind("Ticket"))))], _read_ticket, _made_ticket)
    acceptance = Acceptance(b"s" * 16, 1, 2, _client_digest(b""), b"p" * 32, b"q" * 32)
    yield Target("acceptance", [AcceptanceSigner(KEY).sign("r", acceptance)], _show_acceptance)
    endpoint = pack_endpoint(b"t" * 16, "127.0.0.1", 4000)
    for name, parse in (("tcp", parse_endpoint), ("nccl", parse_nccl)):
        yield Target(f"{name} endpoint", [endpoint], partial(_parse, parse))
    region = Region(4096, 8, 64)
    nixl = NixlEndpoint(1, b"t" * 16, region, Region(1 << 20, 64, 16), b"metadata").pack(PROOFS, EPOCH)
    yield Target("nixl descriptor", [nixl], partial(_parse, _parse_nixl), partial(_made_nixl, nixl))


def _parse_nixl(data: bytes) -> NixlEndpoint:
    return NixlEndpoint.parse(data, PROOFS, EPOCH)


def _kind(name: str) -> type[Message]:
    return next(kind for kind in kinds() if kind.DESCRIPTOR.name == name)


def _made(kind: type[Message], known: tuple[Any, ...], draw: random.Random) -> bytes:
    message = any_message(draw, kind) if draw.random() < 0.3 else changed_message(draw, draw.choice(known))
    return bytes(message.SerializeToString())


def _convert(kind: type[Message], convert: Callable[[Any], object], data: bytes) -> str:
    with refusals(DecodeError, MalformedMessage, HandOffFailed):
        return type(convert(kind.FromString(data))).__name__


def _signed(ticket: Any) -> bytes:
    serialized = ticket.SerializeToString()
    envelope = kv_pb2.SignedTicket(ticket=serialized, signature=KEY.sign(Purpose.TICKETS, serialized))
    return bytes(envelope.SerializeToString())


def _made_ticket(draw: random.Random) -> bytes:
    """Return a ticket of any content with a valid signature, as another version of a member may sign it."""
    return _signed(changed_message(draw, next(examples(_kind("Ticket")))))


def _read_ticket(data: bytes) -> str:
    with refusals(HandOffFailed):
        ticket = tickets.read(data, KEY)
        tickets.refuse_expired(ticket, 0.0)
        reissued = tickets.reissue(data, KEY, attempt=2, importer=ticket.importer)
        tickets.verify(reissued, KEY, importer="member@1")
        return "ticket"


def _show_acceptance(data: bytes) -> str:
    request = GenerateRequest(prompt=TextPrompt("a"), request_id="r", sampling=SamplingParams(), acceptance=data)
    with refusals(ResumeRefused):
        return str(AcceptanceSigner(KEY).shown(request))


def _parse(parse: Callable[[bytes], object], data: bytes) -> str:
    with refusals(TransportError):
        return type(parse(data)).__name__


def _made_nixl(seed: bytes, draw: random.Random) -> bytes:
    """Return an endpoint with fields of any content and a valid checksum."""
    body = bytearray(seed[len(MAGIC) + SIGNATURE_BYTES :])
    for _ in range(draw.choice((1, 2, 8))):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return MAGIC + PROOFS.seal("nixl", _for_epoch(EPOCH, bytes(body))) + bytes(body)


def _progress(data: bytes) -> str:
    progress = Progress(_GENERATE(request_id="r", n=2), known=lambda: ("a:1",), router="a:1", deadline_s=10.0)
    with refusals(DecodeError, InternalError):
        return f"{len(progress.add(inference_pb2.GenerateResponse.FromString(data)))} deltas"


def _call(method: str, data: bytes) -> str:
    """Send the bytes as the request of a method, and read its answers to the end."""
    call: Any = _channel().unary_stream(f"/tandem.v1.Inference/{method}")  # a single answer is a stream of one
    try:
        return f"{len(list(call(data, timeout=20)))} answers"
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise AssertionError(f"{code} {details}")
    raise Refused(f"{code} {details}")


@cache
def _channel() -> grpc.Channel:
    """Return a channel to a server of the router's service, which runs on a thread until the process ends."""
    ready, ports = threading.Event(), []

    async def serve() -> None:
        telemetry = Telemetry()
        server = GrpcServer(service_names=["tandem.v1.Inference"], telemetry=telemetry, max_message_bytes=100_000)
        pipeline: Any = ShortAnswers(tokenization())
        pipeline.live_requests = live_requests(telemetry)
        service = InferenceService(
            pipeline=pipeline, tokenization=tokenization(), stalls=WriteTimeout(20.0, telemetry), gate=Gate()
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server.grpc)
        ports.append(server.bind("127.0.0.1", 0))
        await server.start()
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    assert ready.wait(20), "the server did not start"
    return grpc.insecure_channel(f"127.0.0.1:{ports[0]}")
