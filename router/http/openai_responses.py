"""Builds OpenAI responses from tokens and text, for both endpoints, whole or in chunks.

Each response has one builder. It keeps only the state that the response format needs: the text offsets of tokens, and
which choices have begun. Prompts are in vLLM's fields `prompt_token_ids` and `prompt_logprobs`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from cluster.messages import TokenLogprobs
from router.requests import (
    Accepted,
    ChoiceDelta,
    Ledger,
    Output,
    Prompt,
    PromptToken,
    ScoredPrompt,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from router.text.text_stream import TextStream
from router.text.tokenization import Tokenization

Json = dict[str, Any]
_Position = tuple[
    int, float | None, Sequence[tuple[int, float]]
]  # a token, its log-probability, the most likely tokens
_NO_END: Json = {"finish_reason": None, "stop_reason": None}


class Shape(Protocol):
    """The response format of one endpoint."""

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        """Yield the `choices` entries that a stream sends for a delta."""
        ...

    def plain(self, choice: int, text: str) -> Json | None:
        """Return the only entry that `chunks` would yield for a delta that has only this text; None where such deltas
        are encoded in different ways."""
        ...

    def whole(self, deltas: Sequence[ChoiceDelta]) -> Json:
        """Return a finished choice from all its deltas."""
        ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every body of one response has around its choices."""

    id: str
    model: str
    created: int  # seconds since 1970
    object: str
    chunk_object: str
    include_usage: bool
    continuous_usage: bool = False  # with include_usage: every chunk has the usage so far
    with_ledger: bool = False

    def chunk(self, choices: list[Json], so_far: Usage | None = None) -> Json:
        body = self._body(self.chunk_object, choices)
        if not self.include_usage:
            return body
        return body | {"usage": usage_body(so_far) if so_far is not None else None}

    def usage_chunk(self, usage: Usage) -> Json:
        return self._body(self.chunk_object, []) | {"usage": usage_body(usage)}

    def ledger_chunk(self, ledgers: Sequence[Ledger]) -> Json:
        return self._body(self.chunk_object, []) | {"ledger": [ledger_body(ledger) for ledger in ledgers]}

    def answer(self, choices: list[Json], usage: Usage, ledgers: Sequence[Ledger]) -> Json:
        body = self._body(self.object, choices) | {"usage": usage_body(usage)}
        return body | {"ledger": [ledger_body(ledger) for ledger in ledgers]} if self.with_ledger else body

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class UsageSoFar:
    """The usage of a stream's requests until now. Cached tokens are known at the end only."""

    def __init__(self) -> None:
        self.usage = Usage(0, 0)

    def add_prompt(self, accepted: Accepted) -> None:
        self.usage = replace(self.usage, prompt_tokens=self.usage.prompt_tokens + accepted.num_prompt_tokens)

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        self.usage = replace(self.usage, completion_tokens=self.usage.completion_tokens + num_tokens)


def ledger_body(ledger: Ledger) -> Json:
    return {
        "phases": [{"name": phase.name, "duration_s": phase.duration_s} for phase in ledger.phases],
        "wall_s": ledger.wall_s,
        "ttft_s": ledger.ttft_s,
        "members": list(ledger.members),
        "transport": ledger.transport,
        "kv_bytes": ledger.kv_bytes,
        "reasons": list(ledger.reasons),
    }


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(slots=True)
class ChatShape:
    tokenization: Tokenization
    return_token_ids: bool
    names_token_ids: bool = False  # in logprobs, instead of texts
    echo: str = ""  # with which every choice begins
    _begun: set[int] = field(default_factory=set)

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            yield chunk_choice(delta.choice, {"delta": {"role": "assistant", "content": self.echo}, "logprobs": None})
        if delta.text or delta.logprobs or (self.return_token_ids and delta.token_ids):
            ids = {"token_ids": list(delta.token_ids)} if self.return_token_ids else {}
            grown = {"delta": {"content": delta.text}, "logprobs": self._logprobs([delta])} | ids
            yield chunk_choice(delta.choice, grown)
        if delta.finish_reason is not None:
            ended: Json = {"delta": {}, "logprobs": None}
            yield chunk_choice(delta.choice, ended) | choice_end([delta])

    def plain(self, choice: int, text: str) -> Json | None:
        if self.return_token_ids or choice not in self._begun:
            return None
        return chunk_choice(choice, {"delta": {"content": text}, "logprobs": None})

    def whole(self, deltas: Sequence[ChoiceDelta]) -> Json:
        text = self.echo + "".join(delta.text for delta in deltas)
        return {
            "index": deltas[0].choice,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(deltas),
            **choice_end(deltas),
        } | token_ids(deltas, wanted=self.return_token_ids)

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> Json | None:
        positions = [position for delta in deltas for position in delta.logprobs]
        return {"content": [self._position(position) for position in positions], "refusal": None} if positions else None

    def _position(self, position: TokenLogprobs) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in position.top]
        return self._token(position.token_id, position.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        as_bytes = list(self.tokenization.token_bytes(token_id)) if self.tokenization.model_info.has_tokenizer else None
        return {"token": self._name(token_id), "logprob": logprob, "bytes": as_bytes}

    def _name(self, token_id: int) -> str:
        return self.tokenization.token_name(token_id, as_id=self.names_token_ids)


@dataclass(slots=True)
class CompletionShape:
    tokenization: Tokenization
    return_token_ids: bool
    names_token_ids: bool = False  # in logprobs, instead of texts
    skips_special_tokens: bool = True
    echoes: Mapping[int, Prompt] = field(default_factory=dict)  # by choice: the prompt with which its text begins
    num_logprobs: int | None = None
    prompts: "PromptFields | None" = None
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, "_Offsets"] = field(default_factory=dict)

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        logprobs = self._logprobs([delta])
        ids = token_ids([delta], wanted=self.return_token_ids)
        scored = self._scored(delta.choice)
        text = self._echo(delta.choice) + delta.text
        if text or logprobs or scored or ids.get("token_ids") or delta.finish_reason is not None:
            yield {"index": delta.choice, "text": text, "logprobs": logprobs} | choice_end([delta]) | ids | scored

    def plain(self, choice: int, text: str) -> Json | None:
        is_first = choice not in self._begun and (choice in self.echoes or self.prompts is not None)
        if self.return_token_ids or is_first:
            return None
        return {"index": choice, "text": text, "logprobs": None} | _NO_END

    def whole(self, deltas: Sequence[ChoiceDelta]) -> Json:
        choice = deltas[0].choice
        logprobs, scored = self._logprobs(deltas), self._scored(choice)
        return (
            {
                "index": choice,
                "text": self._echo(choice) + "".join(delta.text for delta in deltas),
                "logprobs": logprobs,
                **choice_end(deltas),
            }
            | token_ids(deltas, wanted=self.return_token_ids)
            | scored
        )

    def _scored(self, choice: int) -> Json:
        """Return the field with the log-probabilities of the prompt once, with the choice's beginning."""
        return self.prompts.in_choice(choice) if self.prompts is not None and choice not in self._begun else {}

    def _echo(self, choice: int) -> str:
        """Return the prompt's text once, before the choice's own. From now on the choice has begun."""
        if choice in self._begun:
            return ""
        self._begun.add(choice)
        match self.echoes.get(choice):
            case TextPrompt(text):
                return text
            case TokenPrompt(token_ids) if self.tokenization.model_info.has_tokenizer:
                return self.tokenization.decode(token_ids)
            case _:
                return ""

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> Json | None:
        choice = deltas[0].choice
        positions = [_of_token(position) for delta in deltas for position in delta.logprobs]
        if choice in self.echoes and choice not in self._begun:
            positions = [*self._echoed(choice), *positions]
        if not positions:
            return None
        if choice not in self._offsets:
            self._offsets[choice] = _Offsets(
                self.tokenization.text_stream((), 0, skips_special_tokens=self.skips_special_tokens)
            )
        offsets = self._offsets[choice]
        return {
            "tokens": [self._name(token_id) for token_id, _, _ in positions],
            "token_logprobs": [logprob for _, logprob, _ in positions],
            "top_logprobs": [self._top(position) for position in positions],
            "text_offset": [offsets.next(token_id) for token_id, _, _ in positions],
        }

    def _echoed(self, choice: int) -> Iterator[_Position]:
        """Yield the positions of the prompt, if they are wanted."""
        prompt = self.prompts.of(choice) if self.prompts is not None and self.num_logprobs is not None else None
        if prompt is not None:
            yield prompt.token_ids[0], None, ()
            for token in prompt.tokens():
                yield token.token_id, token.logprob, token.top[: self.num_logprobs]

    def _top(self, position: _Position) -> dict[str, float] | None:
        """Return the most likely tokens, and the chosen one if it is not among them; None of a prompt's first."""
        token_id, own, top = position
        if own is None:
            return None
        return {self._name(other): logprob for other, logprob in top} | {self._name(token_id): own}

    def _name(self, token_id: int) -> str:
        return self.tokenization.token_name(token_id, as_id=self.names_token_ids)


def _of_token(logprobs: TokenLogprobs) -> _Position:
    return logprobs.token_id, logprobs.logprob, logprobs.top


class _Offsets:
    """The offset in the text at which each token of one choice begins."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self._num_characters = 0

    def next(self, token_id: int) -> int:
        offset = self._num_characters
        self._num_characters += len(self._text.push_one(token_id)[0])
        return offset


def chunk_choice(choice: int, content: Json) -> Json:
    """Return a choice of a chunk, which has not ended unless `content` says so."""
    return {"index": choice} | _NO_END | content


def choice_end(deltas: Sequence[ChoiceDelta]) -> Json:
    """Return the fields about the end of the choice, if it has ended. `stop_reason`, as in vLLM: the stop string or
    stop token of the request that ended it.
    """
    last = next((delta for delta in deltas if delta.finish_reason is not None), None)
    if last is None or last.finish_reason is None:
        return _NO_END
    return {"finish_reason": last.finish_reason.value, "stop_reason": last.stop_cause}


def token_ids(deltas: Sequence[ChoiceDelta], *, wanted: bool) -> Json:
    """Return the field of a choice with its token ids, if it is wanted."""
    return {"token_ids": [token_id for delta in deltas for token_id in delta.token_ids]} if wanted else {}


@dataclass(frozen=True, slots=True)
class PromptNames:
    """The names of a prompt's tokens."""

    tokenization: Tokenization
    as_ids: bool

    def of(self, token_id: int) -> str:
        return self.tokenization.token_name(token_id, as_id=self.as_ids)


class PromptFields:
    """The fields of one response about its prompts: their tokens, and the log-probabilities of these. Prompt i belongs
    to the choices i * n to i * n + n - 1."""

    def __init__(
        self, names: PromptNames, num_top: int | None, has_token_ids: bool, *, n: int, is_of_body: bool
    ) -> None:
        """`num_top`: the request's `prompt_logprobs`; None: there is no such field. `has_token_ids`: there is
        `prompt_token_ids`. `is_of_body`: the fields stand beside the choices, else in each choice."""
        self._names = names
        self._num_top = num_top
        self._has_token_ids = has_token_ids
        self._n = max(1, n)
        self._is_of_body = is_of_body
        self._is_begun = False
        self._token_ids: dict[int, tuple[int, ...]] = {}  # by prompt
        self._scored: dict[int, ScoredPrompt] = {}

    def add(self, output: Output) -> None:
        """Read the prompt in an output, if it has one."""
        prompt = output.first_choice // self._n
        if output.accepted is not None and self._has_token_ids:
            self._token_ids[prompt] = output.accepted.prompt_token_ids
        if output.prompt is not None:
            self._scored[prompt] = output.prompt

    def of(self, choice: int) -> ScoredPrompt | None:
        return self._scored.get(choice // self._n)

    def in_choice(self, choice: int) -> Json:
        """Return the fields of the first chunk of a choice, or of a whole one."""
        return {} if self._is_of_body else self._fields(choice)

    def in_body(self) -> Json:
        """Return the fields of the body, once: of the first chunk, or of the whole response."""
        if self._is_begun or not self._is_of_body:
            return {}
        fields = self._fields(0)
        self._is_begun = bool(fields)
        return fields

    def _fields(self, choice: int) -> Json:
        token_ids, scored = self._token_ids.get(choice // self._n), self.of(choice)
        fields: Json = {} if token_ids is None else {"prompt_token_ids": list(token_ids)}
        if scored is not None and self._num_top is not None:
            fields["prompt_logprobs"] = [None, *map(self._position, scored.tokens())]
        return fields

    def _position(self, token: PromptToken) -> Json:
        """Return the token and the most likely ones, by their ids."""
        top = enumerate(token.top[: self._num_top], start=1)
        others = ((token_id, logprob, rank) for rank, (token_id, logprob) in top if token_id != token.token_id)
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._names.of(token_id)}
            for token_id, logprob, rank in chain([(token.token_id, token.logprob, token.rank)], others)
        }
