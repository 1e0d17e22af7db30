"""A continuation of a request: its committed tokens and their text.

`Choice.append` is the only place where a token is appended: exactly once, in order, and only if the request allows it,
whatever the workers send. All other state of a choice (detokenizer, stop matcher) is replayed from its tokens and never
sent.
"""

from cluster.errors import InvalidRequest, WrongTokens
from cluster.messages import FinishReason, SampledToken
from router.policies.hedging import Execution, Race
from router.request.validation import ResolvedRequest
from router.requests import ChoiceDelta, ResumedChoice
from router.text.text_stream import TextStream
from router.text.tokenization import Tokenization


class OutOfOrder(Exception):
    """A token arrived twice, or a token before it is missing, so its attempt fails."""


class Choice:
    """A continuation of a request: its committed tokens and their text."""

    def __init__(self, number: int, request: ResolvedRequest, text: TextStream) -> None:
        self.number = number
        self.execution = Execution()
        self.race: Race | None = None
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
        """Return the number of tokens that the choice may still get."""
        return self._request.stops.max_tokens - len(self._committed)

    def append(self, index: int, token: SampledToken) -> ChoiceDelta:
        """Append the token at `index` and return the client's delta for it. Raises OutOfOrder, and WrongTokens for a
        token outside the vocabulary or with an end that the request does not give it."""
        if self.ended or index != len(self._committed):
            expected = "none" if self.ended else str(len(self._committed))
            raise OutOfOrder(f"choice {self.number} got token {index}, expected {expected}")
        finish_reason = token.finish_reason
        if finish_reason is not self._finish_reason(token.token_id) or token.token_id >= self._request.vocab_size:
            raise WrongTokens(f"token {index} of choice {self.number} is {token.token_id} with end {finish_reason}")
        self._committed.append(token.token_id)
        stop_cause: str | int | None
        if finish_reason is FinishReason.STOP:  # EOS or a stop token, which has no text unless the request includes it
            text = self._text.push_one(token.token_id)[0] if self._request.includes_stop else ""
            text += self._text.flush()
            stop_cause = token.token_id if token.token_id in self._request.named_stop_token_ids else None
        else:
            text, stop_cause = self._text.push_one(token.token_id)
            if stop_cause is not None:
                finish_reason = FinishReason.STOP
            elif finish_reason is FinishReason.LENGTH:
                text += self._text.flush()
        self.ended = finish_reason is not None
        logprobs = () if token.logprobs is None else (token.logprobs,)
        # By position: names would double what it takes to make a tuple for each token.
        return ChoiceDelta(self.number, index, (token.token_id,), text, logprobs, finish_reason, stop_cause)

    def resume(self, has: ResumedChoice) -> ChoiceDelta | None:
        """Replay the tokens that the client received from another router. Returns the text or the end that it has
        missed; tokens that did not reach it are sampled again. Raises InvalidRequest if no choice can have had these
        tokens."""
        assert not self._committed, "only a new choice can be resumed"
        text, ending = [], None
        for index, token_id in enumerate(has.token_ids):
            if self.ended:
                raise InvalidRequest(f"resume_from: choice {self.number} has ended with its token {index - 1}")
            ending = self.append(index, SampledToken(token_id, None, self._finish_reason(token_id)))
            text.append(ending.text)
        missed = "".join(text)[has.num_characters :]
        if sum(map(len, text)) < has.num_characters:
            raise InvalidRequest(
                f"resume_from: choice {self.number} has {has.num_characters} characters, and its tokens make"
                f" {sum(map(len, text))}"
            )
        if has.finish_reason is not None:
            self.ended = True
            return None
        if ending is None or not (missed or self.ended):
            return None
        return ending._replace(first_index=len(has.token_ids), token_ids=(), text=missed)

    def _finish_reason(self, token_id: int) -> FinishReason | None:
        """Return the finish reason that a worker gives when it samples this token next."""
        if token_id in self._request.stops.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_missing == 1 else None


def text_stream_of(request: ResolvedRequest, tokenization: Tokenization) -> TextStream:
    """Return the text stream of one choice, without any token."""
    return tokenization.text_stream(
        request.stop_strings,
        request.stops.min_tokens,
        includes_stop=request.includes_stop,
        skips_special_tokens=request.skips_special_tokens,
    )
