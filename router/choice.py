"""One continuation of a request: the tokens that the client has been given, and the text they make.

The only place where a token is appended: exactly once and in order, whatever the workers say. Everything else about a
sequence (detokenizer, stop matcher) is replayed from these tokens, never sent.
"""

from cluster.messages import FinishReason, SampledToken
from router.requests import ChoiceDelta
from router.text_stream import TextStream
from router.validation import ResolvedRequest


class OutOfOrder(Exception):
    """A token came twice, or one before it is missing: its attempt cannot be trusted any more."""


class Choice:
    def __init__(self, number: int, request: ResolvedRequest, text: TextStream) -> None:
        self.number = number
        self.seed = request.seeds[number]
        self.ended = False
        self._request = request
        self._text = text
        self._committed: list[int] = []

    @property
    def committed(self) -> tuple[int, ...]:
        return tuple(self._committed)

    @property
    def num_committed(self) -> int:
        return len(self._committed)

    @property
    def num_missing(self) -> int:
        """Tokens that it may still get."""
        return self._request.stops.max_tokens - len(self._committed)

    def append(self, index: int, token: SampledToken) -> ChoiceDelta:
        """What the client gets for the token at `index`. Raises OutOfOrder."""
        if self.ended or index != len(self._committed):
            expected = "none" if self.ended else str(len(self._committed))
            raise OutOfOrder(f"choice {self.number} got token {index}, expected {expected}")
        self._committed.append(token.token_id)
        finish_reason, stop_cause, text = token.finish_reason, None, ""
        if finish_reason is FinishReason.STOP:  # EOS or a stop token: it has no text of its own
            text = self._text.flush()
            stop_cause = str(token.token_id) if token.token_id in self._request.named_stop_token_ids else None
        else:
            grown = self._text.push((token.token_id,))
            text, stop_cause = grown.text, grown.stopped_by
            if stop_cause is not None:
                finish_reason = FinishReason.STOP
            elif finish_reason is FinishReason.LENGTH:
                text += self._text.flush()
        self.ended = finish_reason is not None
        return ChoiceDelta(
            choice=self.number,
            first_index=index,
            token_ids=(token.token_id,),
            text=text,
            logprobs=(token.logprobs,) if token.logprobs is not None else (),
            finish_reason=finish_reason,
            stop_cause=stop_cause,
        )
