"""How far a generation has come, and how it goes on at another router when its own is lost.

Decides only: time is an argument. Asked again is what nobody has judged: the connection broke, the router is leaving or
cannot reach its cluster, or the one that is to go on is full. What says that the request is wrong is the answer.
"""

import random
from collections.abc import Callable, Sequence

from tandem.assembly import Assembly
from tandem.errors import DeadlineExceeded, Overloaded, TandemError, Unavailable
from tandem.results import Delta, Result
from tandem.v1 import inference_pb2

_DRAINING = "draining"
# Too much, but not for now: the reader is too slow, or gRPC itself finds a message too large.
_NOT_FOR_NOW = frozenset({"slow_client", "resource_exhausted"})
_FIRST_WAIT_S, _MAX_WAIT_S = 0.1, 2.0  # at most; the clients of a lost router do not all come at once
_MAX_DOUBLINGS = 10


class Progress:
    """`request` is what is to be asked of the router at `router` now."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        known: Callable[[], Sequence[str]],
        router: str,
        deadline_s: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.request = request
        self.router = router
        self._known = known
        self._deadline_s = deadline_s
        self._draw = draw
        self._assembly = Assembly(request.request_id)
        self._has_begun = False
        self._num_lost = 0  # in a row, without an answer

    def take(self, response: inference_pb2.GenerateResponse) -> list[Delta]:
        """Raises InternalError when the stream is not what was promised. A sign of life is not an answer yet."""
        if not response.deltas and not response.HasField("summary"):
            return []
        self._has_begun = True
        self._num_lost = 0
        return self._assembly.add(response)

    def result(self) -> Result:
        return self._assembly.result()

    def time_left_s(self, now_s: float) -> float:
        return self._deadline_s - now_s

    def lost(self, error: TandemError, now_s: float) -> float:
        """The stream ended so. Answers how many seconds later `request` is to be sent to `router`, both of them new.

        Raises `error` where asking again is no use, DeadlineExceeded where no time is left for it. A generation that
        has begun is given up for its deadline alone, as long as nobody says that it cannot be had; before, each router
        is asked once.
        """
        is_refusal = self._num_lost > 0 and isinstance(error, Overloaded) and error.reason not in _NOT_FOR_NOW
        if not (isinstance(error, Unavailable) or (is_refusal and self._has_begun)):
            raise error
        self._num_lost += 1
        known = self._known()
        is_gone = error.is_lost or error.reason == _DRAINING or is_refusal
        if not (is_gone and self._has_begun) and self._num_lost >= len(known):
            raise error
        wait_s = self._draw() * min(_FIRST_WAIT_S * 2.0 ** min(self._num_lost - 1, _MAX_DOUBLINGS), _MAX_WAIT_S)
        wait_s += error.retry_after_s or 0.0
        if wait_s >= self.time_left_s(now_s):
            raise DeadlineExceeded(
                f"no router went on with it in time; the last one: {error.message}", reason="deadline_exceeded"
            ) from error
        self.router = _after(self.router, known)
        self.request = self._resumed()
        return wait_s

    def _resumed(self) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        accepted = self._assembly.accepted
        if accepted is not None:
            request.sampling.CopyFrom(accepted.sampling)
            request.stop.max_tokens = accepted.max_tokens
        request.resume_from.CopyFrom(self._assembly.resume_from(request.n or 1))
        return request


def _after(router: str, known: Sequence[str]) -> str:
    return known[(known.index(router) + 1) % len(known)] if router in known else known[0]
