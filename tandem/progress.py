"""How far a generation has come, and how it goes on at another router when its own is lost.

Decides only: time is an argument. An accepted request is resumed: its acceptance goes with the tokens that came. A
request that was lost before its acceptance came begins again, since nothing of it has come. The client asks again where
the connection broke, the router is leaving or cannot reach its cluster, or the router that is to resume the request is
full. It raises an error that says that the request is wrong. Each resumption has a higher number than those before, so
that a call that was given up and reaches a router late cannot end the stream of a newer one.
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
# That router makes another prompt or other parameters of it than the one that accepted it; the next one may not.
_NOT_AS_ACCEPTED = frozenset({"prompt_changed", "request_changed"})
_DUPLICATE = "duplicate_request"
_SUPERSEDED = "resume_superseded"  # something on the way repeated the call: its number is taken, the next one is not
_MAX_IDS = 4
_MAX_REQUEST_ID_CHARACTERS = 128
# Every router reads the same registry, and the one that answered has waited for as long as there was any use.
_SAME_EVERYWHERE = frozenset({"no_worker_large_enough"})
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
        self._asked_id = request.request_id
        self._known = known
        self._deadline_s = deadline_s
        self._draw = draw
        self._assembly = Assembly(request.request_id)
        self._has_begun = False  # a router has accepted it
        self._num_lost = 0  # in a row, without a token
        self._num_resumes = 0
        self._num_ids = 1

    def take(self, response: inference_pb2.GenerateResponse) -> list[Delta]:
        """Raises InternalError when the stream is not what was promised. Neither a sign of life nor an acceptance shows
        that the router can serve the request."""
        is_answer = bool(response.deltas) or response.HasField("summary")
        if is_answer:
            self._num_lost = 0
        self._has_begun = self._has_begun or is_answer or response.HasField("accepted")
        return self._assembly.add(response)

    def result(self) -> Result:
        return self._assembly.result()

    def time_left_s(self, now_s: float) -> float:
        return self._deadline_s - now_s

    def lost(self, error: TandemError, now_s: float) -> float:
        """The stream ended with `error`. Returns after how many seconds to send `request` to `router`, both new.

        Raises `error` where asking again is no use, DeadlineExceeded where no time is left for it. An accepted
        generation ends only at its deadline, unless the routers say that it cannot be served; before its acceptance
        each router is asked once.
        """
        is_refusal = self._num_lost > 0 and isinstance(error, Overloaded) and error.reason not in _NOT_FOR_NOW
        if self._has_begun and self._assembly.accepted is None:
            raise error  # a router that sends tokens without an acceptance promises nothing
        if self._is_own_id(error):
            self._take_another_id()
            return 0.0
        is_asked_again = isinstance(error, Unavailable) or error.reason in _NOT_AS_ACCEPTED | {_SUPERSEDED}
        if error.reason in _SAME_EVERYWHERE or not (is_asked_again or (is_refusal and self._has_begun)):
            raise error
        self._num_lost += 1
        known = self._known()
        is_gone = error.is_lost or error.reason in (_DRAINING, _SUPERSEDED) or is_refusal
        if not (is_gone and self._has_begun) and self._num_lost >= len(known):
            raise error
        wait_s = self._draw() * min(_FIRST_WAIT_S * 2.0 ** min(self._num_lost - 1, _MAX_DOUBLINGS), _MAX_WAIT_S)
        wait_s += error.retry_after_s or 0.0
        if wait_s >= self.time_left_s(now_s):
            raise DeadlineExceeded(
                f"no router went on with it in time; the last one: {error.message}", reason="deadline_exceeded"
            ) from error
        self.router = _after(self.router, known)
        if self._has_begun:
            self.request = self._resumed()
        return wait_s

    def _is_own_id(self, error: TandemError) -> bool:
        """The id is live because a router has not seen yet that this client's stream broke before its acceptance."""
        is_lost_unaccepted = self._num_lost > 0 and not self._has_begun
        return is_lost_unaccepted and error.reason == _DUPLICATE and self._num_ids < _MAX_IDS

    def _resumed(self) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        accepted = self._assembly.accepted
        assert accepted is not None
        request.sampling.CopyFrom(accepted.sampling)
        request.stop.max_tokens = accepted.max_tokens
        self._num_resumes += 1
        request.resume_from.CopyFrom(self._assembly.resume_from(request.n or 1, self._num_resumes))
        return request

    def _take_another_id(self) -> None:
        """The request begins again as a new one: nothing of it has come."""
        self._num_ids += 1
        number = f".{self._num_ids}"
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id = self._asked_id[: _MAX_REQUEST_ID_CHARACTERS - len(number)] + number
        self._assembly.request_id = request.request_id
        self.request = request


def _after(router: str, known: Sequence[str]) -> str:
    return known[(known.index(router) + 1) % len(known)] if router in known else known[0]
