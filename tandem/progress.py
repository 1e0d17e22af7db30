"""The progress of a generation, and how it continues at another router after its own is lost.

This module decides and makes no call: time is an argument. An accepted request is resumed: the client sends its
acceptance and the tokens that it received. A request that was lost before its acceptance is sent again as it was: the
client cancelled the lost call and reads no more of it, so one stream at most reaches the caller. If a router still
serves the lost call, it refuses the request's id, and the client sends the request with a new one. The client tries
another router if the connection broke, if the router is draining or cannot reach its cluster, or if the router that
shall resume the request is full. Errors about the request itself are raised. Each resumption has a higher number than
those before, so that a delayed call cannot end the stream of a newer one.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem.enum_words import FINISH_REASONS
from tandem.errors import HANDSHAKE_FAILED, DeadlineExceeded, InternalError, Overloaded, TandemError, Unavailable
from tandem.results import (
    Choice,
    Delta,
    PromptTokenLogprobs,
    Result,
    Usage,
    delta_from_wire,
    ledger_from_wire,
    prompt_token_from_wire,
)
from tandem.v1 import inference_pb2

_DRAINING = "draining"
# Overload that waiting does not end: the reader is too slow, or a message is too large for gRPC.
_NOT_FOR_NOW = frozenset({"slow_client", "resource_exhausted"})
# This router derives another prompt or other parameters from the request than the one that accepted it.
_NOT_AS_ACCEPTED = frozenset({"prompt_changed", "request_changed"})
_DUPLICATE = "duplicate_request"
_SUPERSEDED = "resume_superseded"  # the network repeated the call: its number is in use, the next one is free
_MAX_NEW_IDS = 3  # for one lost call
_MAX_REQUEST_ID_CHARACTERS = 128
# Reasons that every router would give: all read the same registry.
_SAME_EVERYWHERE = frozenset({"no_worker_large_enough"})
_FIRST_WAIT_S, _MAX_WAIT_S = (
    0.1,
    2.0,
)  # a random share of it, so that the clients of a lost router do not all call at once
_MAX_DOUBLINGS = 10
_MAX_PATIENCE = 4.0  # the longest keep-alive timeout before an acceptance, as a multiple of the usual one


class Progress:
    """The progress of one generation. `request` is the request to send now, and `router` the address to send it to."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        known: Callable[[], Sequence[str]],
        router: str,
        deadline_s: float,
        connect_by_s: float = math.inf,
        is_reached: Callable[[], bool] = lambda: True,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`connect_by_s`: the time until which the client tries to reach a first router; `is_reached` returns whether
        one has ever responded."""
        self.request = request
        self.router = router
        self._asked_id = request.request_id
        self._known = known
        self._deadline_s = deadline_s
        self._connect_by_s = connect_by_s
        self._is_reached = is_reached
        self._draw = draw
        self._assembly = Assembly(request.request_id)
        self._has_begun = False  # a router has accepted it
        self._num_lost = 0  # consecutive lost calls without a token
        self._last_loss: TandemError | None = None
        self._closed_until_s: dict[str, float] = {}  # by router that is full: when it may be called again
        self._num_resumes = 0
        self._num_ids = 1
        self._num_duplicates = 0  # consecutive refusals of the id since the last lost call

    def add(self, response: inference_pb2.GenerateResponse) -> list[Delta]:
        """Add a response and return its new deltas. Raises InternalError if a token is missing or differs.

        Only tokens or a summary show that the router can serve the request; a keep-alive or an acceptance does not."""
        is_answer = bool(response.deltas) or response.HasField("summary")
        if is_answer:
            self._num_lost = 0
        self._has_begun = self._has_begun or is_answer or response.HasField("accepted")
        return self._assembly.add(response)

    def result(self) -> Result:
        return self._assembly.result()

    def time_left_s(self, now_s: float) -> float:
        return self._deadline_s - now_s

    @property
    def patience(self) -> float:
        """Return the factor of the keep-alive timeout of the next call. Before an acceptance it doubles whenever
        each router was lost once more: they may be slow, and each call that is cancelled makes them slower."""
        if self._has_begun:
            return 1.0
        return min(2.0 ** min(self._num_lost // len(self._known()), _MAX_DOUBLINGS), _MAX_PATIENCE)

    def on_lost(self, error: TandemError, now_s: float) -> float:
        """Handle the end of the stream with `error`: update `request` and `router`, and return the seconds to wait
        before the next call.

        Raises `error` if another call is of no use, Unavailable if no router was reached by `connect_by_s`, and
        DeadlineExceeded if the deadline would pass first. A router that cannot be reached, is silent or drains is
        called again until then; a router that answers that its cluster cannot serve the request is called once.
        """
        is_refusal = self._num_lost > 0 and isinstance(error, Overloaded) and error.reason not in _NOT_FOR_NOW
        if self._has_begun and self._assembly.accepted is None:
            raise error  # without an acceptance it cannot be resumed
        if self._is_own_id(error):
            self._begin_with_new_id()
            return 0.0
        if isinstance(error, DeadlineExceeded) and self._last_loss is not None and not self._has_begun:
            raise _too_late("accepted", self._last_loss) from error
        is_asked_again = isinstance(error, Unavailable) or error.reason in _NOT_AS_ACCEPTED | {_SUPERSEDED}
        if error.reason in _SAME_EVERYWHERE or not (is_asked_again or (is_refusal and self._has_begun)):
            raise error
        self._num_lost += 1
        self._num_duplicates = 0
        self._last_loss = error
        known = self._known()
        is_gone = error.is_lost or error.reason in (_DRAINING, _SUPERSEDED) or is_refusal
        is_hopeless = not is_gone or (error.reason == HANDSHAKE_FAILED and not self._has_begun)
        if is_hopeless and self._num_lost >= len(known):
            raise error
        wait_s = self._draw() * min(_FIRST_WAIT_S * 2.0 ** min(self._num_lost - 1, _MAX_DOUBLINGS), _MAX_WAIT_S)
        self._closed_until_s[self.router] = now_s + (error.retry_after_s or 0.0)
        router, closed_s = self._next_router(known, now_s)
        wait_s += closed_s
        if wait_s >= self.time_left_s(now_s):
            raise _too_late("continued" if self._has_begun else "accepted", error) from error
        if not self._is_reached() and now_s + wait_s >= self._connect_by_s and self._num_lost >= len(known):
            raise error
        self.router = router
        if self._has_begun:
            self.request = self._resumed()
        return wait_s

    def _next_router(self, known: Sequence[str], now_s: float) -> tuple[str, float]:
        """Return the next router in turn that may be called now, with 0, or the first one that may, with the seconds
        until then: what a full router asks for delays no call to another."""
        waits_s = {one: max(0.0, self._closed_until_s.get(one, now_s) - now_s) for one in _in_turn(self.router, known)}
        return min(waits_s.items(), key=lambda one: one[1])

    def _is_own_id(self, error: TandemError) -> bool:
        """Return whether the id is live only because a router has not yet noticed that this client's stream broke."""
        is_lost_unaccepted = self._num_lost > 0 and not self._has_begun
        return is_lost_unaccepted and error.reason == _DUPLICATE and self._num_duplicates < _MAX_NEW_IDS

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

    def _begin_with_new_id(self) -> None:
        """Begin the request again with a new id: the client received nothing of it."""
        self._num_ids += 1
        self._num_duplicates += 1
        number = f".{self._num_ids}"
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id = self._asked_id[: _MAX_REQUEST_ID_CHARACTERS - len(number)] + number
        self._assembly.request_id = request.request_id
        self.request = request


def _too_late(what: str, error: TandemError) -> DeadlineExceeded:
    message = f"no router {what} the request before its deadline; the last error: {error.message}"
    return DeadlineExceeded(message, reason="deadline_exceeded")


def _in_turn(router: str, known: Sequence[str]) -> Sequence[str]:
    """Return the known routers, those after `router` first."""
    place = known.index(router) + 1 if router in known else 0
    return (*known[place:], *known[:place])


class Assembly:
    """The partial result of a generation, from the streams of its routers. It accepts every token once, in order."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.accepted: inference_pb2.AcceptedRequest | None = None  # the values of the request's unset fields
        self._choices: dict[int, _Growth] = {}
        self._summary: inference_pb2.Summary | None = None
        self._prompt: list[PromptTokenLogprobs] = []

    def add(self, response: inference_pb2.GenerateResponse) -> list[Delta]:
        """Return the new deltas of a response. Raises InternalError if a token is missing or differs from before."""
        if response.HasField("accepted"):
            self.accepted = response.accepted
        if response.HasField("summary"):
            self._summary = response.summary
        if response.HasField("prompt_logprobs"):
            self._add_prompt(response.prompt_logprobs)
        deltas = [delta_from_wire(message) for message in response.deltas]
        grown = [self._choices.setdefault(delta.choice, _Growth()).add(delta) for delta in deltas]
        return [delta for delta in grown if delta is not None]

    def resume_from(self, num_choices: int, resume_number: int) -> inference_pb2.ResumeFrom:
        """Return the state that another router needs to resume the accepted request. Later responses are those of its
        stream."""
        assert self.accepted is not None
        choices = [self._choices.setdefault(number, _Growth()) for number in range(num_choices)]
        return inference_pb2.ResumeFrom(
            choices=[choice.resume() for choice in choices],
            acceptance=self.accepted.acceptance,
            resume_number=resume_number,
        )

    def result(self) -> Result:
        """Return the result after the last response. Raises InternalError if the stream ended early."""
        if self._summary is None:
            raise InternalError("the stream ended without its summary", reason="no_summary")
        usage = self._summary.usage
        return Result(
            request_id=self.request_id,
            choices=tuple(_choice(self._choices[n].deltas) for n in sorted(self._choices) if self._choices[n].deltas),
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            ledger=ledger_from_wire(self._summary.ledger),
            prompt_logprobs=tuple(self._prompt),
        )

    def _add_prompt(self, message: inference_pb2.PromptLogprobs) -> None:
        """Add the log-probabilities that were not received before: a stream that is resumed from no token sends the
        prompt again."""
        num_known = 1 + len(self._prompt) - message.first_position
        if num_known < 0:
            what = f"continue at token {message.first_position}, but {1 + len(self._prompt)} were received"
            raise InternalError(f"the prompt's log-probabilities {what}", reason="out_of_order")
        self._prompt += map(prompt_token_from_wire, message.tokens[num_known:])


@dataclass(slots=True)
class _Growth:
    """The progress of one choice: the tokens received, and the position of the present stream, which may be behind
    them.
    """

    deltas: list[Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0
    finish_reason: str = ""
    num_read: int = 0
    num_characters_read: int = 0
    is_new_stream: bool = True

    def add(self, delta: Delta) -> Delta | None:
        if delta.first_index == 0 and self.is_new_stream:  # the stream begins from the first token again
            self.num_read = self.num_characters_read = 0
        self.is_new_stream = False
        if delta.first_index != self.num_read:
            raise _out_of_order(
                delta, f"continues at token {delta.first_index}, but {self.num_read} tokens were received"
            )
        num_known = len(self.token_ids) - self.num_read
        num_characters_known = self.num_characters - self.num_characters_read
        if delta.token_ids[:num_known] != tuple(self.token_ids[self.num_read : self.num_read + len(delta.token_ids)]):
            raise _out_of_order(delta, f"has other tokens from index {delta.first_index} on than were received before")
        self.num_read += len(delta.token_ids)
        self.num_characters_read += len(delta.text)
        if num_known or num_characters_known:
            delta = replace(
                delta,
                first_index=delta.first_index + min(num_known, len(delta.token_ids)),
                token_ids=delta.token_ids[num_known:],
                text=delta.text[num_characters_known:],
                logprobs=delta.logprobs[num_known:],
            )
            if not (delta.token_ids or delta.text or delta.finish_reason):
                return None
            if delta.parts:
                raise _out_of_order(delta, "has parts of a text that was partly received before")
        if self.finish_reason:
            if delta.token_ids or delta.text:
                raise _out_of_order(delta, f"continues after its end at token {len(self.token_ids)}")
            return None
        self.token_ids.extend(delta.token_ids)
        self.num_characters += len(delta.text)
        self.finish_reason = delta.finish_reason
        self.deltas.append(delta)
        return delta

    def resume(self) -> inference_pb2.ResumedChoice:
        self.num_read, self.num_characters_read, self.is_new_stream = len(self.token_ids), self.num_characters, True
        return inference_pb2.ResumedChoice(
            token_ids=self.token_ids,
            num_characters=self.num_characters,
            finish_reason=FINISH_REASONS.number(self.finish_reason),
        )


def _out_of_order(delta: Delta, what: str) -> InternalError:
    return InternalError(f"choice {delta.choice} {what}", reason="out_of_order")


def _choice(deltas: Sequence[Delta]) -> Choice:
    return Choice(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(position for delta in deltas for position in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        stop_cause=deltas[-1].stop_cause,
        parts=tuple(part for delta in deltas for part in delta.parts),
    )
