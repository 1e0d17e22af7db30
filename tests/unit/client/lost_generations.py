"""Generations of the client at a given state, and the responses and errors that they get."""

from tandem.enum_words import FINISH_REASONS
from tandem.errors import Unavailable
from tandem.progress import Progress
from tandem.v1 import inference_pb2

Response = inference_pb2.GenerateResponse
LOST = Unavailable("Socket closed", reason="unavailable", is_lost=True)
SILENT = Unavailable("the router at a sent no message for 2.7 s", reason="keepalive_timeout", is_lost=True)
ACCEPTED = inference_pb2.AcceptedRequest(
    sampling=inference_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=1, min_p=0, seed=77),
    max_tokens=9,
    acceptance=b"signed",
)


def delta(choice: int, first_index: int, token_ids: tuple[int, ...], text: str = "", reason: str = "") -> Response:
    grown = inference_pb2.ChoiceDelta(
        choice=choice,
        first_index=first_index,
        token_ids=token_ids,
        text=text,
        finish_reason=FINISH_REASONS.number(reason),
    )
    return Response(deltas=[grown])


def progress(num_routers: int = 2, n: int = 1, draw: float = 1.0, router: str = "a", request_id: str = "r") -> Progress:
    request = inference_pb2.GenerateRequest(request_id=request_id, text="x", n=n)
    known = tuple("abcdef"[:num_routers])
    return Progress(request, known=lambda: known, router=router, deadline_s=100.0, draw=lambda: draw)


def begun(num_routers: int = 2) -> Progress:
    started = progress(num_routers)
    assert started.add(Response(request_id="r", accepted=ACCEPTED)) == []
    started.add(delta(0, 0, (5, 6), "ab"))
    return started
