"""A router without workers: a gRPC server whose answers a test scripts."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from tandem.v1 import inference_pb2, inference_pb2_grpc

Response = inference_pb2.GenerateResponse
Delta = inference_pb2.ChoiceDelta
SUMMARY = inference_pb2.Summary(
    usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=1),
    ledger=inference_pb2.Ledger(
        phases=[inference_pb2.Phase(phase=inference_pb2.REQUEST_PHASE_PREFILL, duration_s=0.25)],
        wall_s=0.5,
        ttft_s=0.25,
        members=["p@1", "d@2"],
        transport="shm",
        kv_bytes=4096,
        reasons=["worker_lost"],
        worker_times=[inference_pb2.WorkerTime(member="p@1", ended_s=0.25, queue_s=0.125, compute_s=0.0625)],
    ),
)
TWO_CHOICES = [
    Response(
        request_id="r",
        accepted=inference_pb2.AcceptedRequest(max_tokens=5, acceptance=b"signed"),
        deltas=[Delta(choice=0, token_ids=[7], text="a"), Delta(choice=1)],
    ),
    Response(
        deltas=[
            Delta(choice=1, token_ids=[8, 9], text="bc", finish_reason=inference_pb2.FINISH_REASON_STOP, stop_cause="!")
        ]
    ),
    Response(deltas=[Delta(choice=0, first_index=1, token_ids=[10, 11], text="")]),
    Response(deltas=[Delta(choice=0, first_index=3, text="de", finish_reason=inference_pb2.FINISH_REASON_LENGTH)]),
    Response(summary=SUMMARY),
]
_SCORED = inference_pb2.PromptTokenLogprobs(token={"token_id": 3, "logprob": -0.5}, rank=2, top=[{"token_id": 4}])
SCORED_PROMPT = Response(prompt_logprobs=inference_pb2.PromptLogprobs(first_position=1, tokens=[_SCORED]))


@dataclass
class ScriptedRouter(inference_pb2_grpc.InferenceServicer):
    """A router that sends `responses`, then fails with `failure`, or holds until the client disconnects."""

    responses: list[Response] = field(default_factory=lambda: list(TWO_CHOICES))
    failure: Callable[[grpc.ServicerContext], None] | None = None
    hold: bool = False
    seen: list[object] = field(default_factory=list)
    metadata: dict[str, str | bytes] = field(default_factory=dict)
    remaining_s: float = 0.0
    left: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Response]:
        self._note(request, context)
        context.add_callback(self.left.set)
        yield from self.responses
        if self.failure is not None:
            self.failure(context)
        if self.hold:
            assert self.left.wait(20), "no call ended"

    def Tokenize(self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext) -> object:
        self._note(request, context)
        return inference_pb2.TokenizeResponse(token_ids=[1, 2, 2**32 - 1])

    def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext) -> object:
        self._note(request, context)
        return inference_pb2.DetokenizeResponse(text="é")

    def ListModels(self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext) -> object:
        self._note(request, context)
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.Model(id="m", max_model_len=10, vocab_size=20, has_tokenizer=True)]
        )

    def _note(self, request: object, context: grpc.ServicerContext) -> None:
        self.seen.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.remaining_s = context.time_remaining() or math.inf


@contextmanager
def router(
    kind: type[ScriptedRouter] = ScriptedRouter, port: int = 0, **script: object
) -> Iterator[tuple[ScriptedRouter, str]]:
    servicer = kind(**script)  # type: ignore[arg-type]
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        assert server.stop(None).wait(10)


def aborting(code: grpc.StatusCode, message: str, **trailing: str) -> Callable[[grpc.ServicerContext], None]:
    def abort(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(
            tuple((f"tandem-{key}".replace("_", "-"), text) for key, text in trailing.items())
        )
        context.abort(code, message)

    return abort


def generation_request(servicer: ScriptedRouter) -> inference_pb2.GenerateRequest:
    request = servicer.seen[-1]
    assert isinstance(request, inference_pb2.GenerateRequest)
    return request
