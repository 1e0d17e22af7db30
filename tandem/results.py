"""The results of a generation: deltas while it runs, a result at its end. Frozen values, made here from messages."""

from dataclasses import dataclass

from tandem.enum_words import FINISH_REASONS, REQUEST_PHASES
from tandem.errors import InternalError
from tandem.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # best first


@dataclass(frozen=True, slots=True)
class PromptTokenLogprobs:
    """One token of the prompt, given those before it."""

    token: TokenLogprob
    rank: int  # 1: no token was more likely
    top: tuple[TokenLogprob, ...]  # best first


@dataclass(frozen=True, slots=True)
class Part:
    """More of the answer to a conversation, as its model's format divides it."""

    kind: str  # "content", "reasoning", "call" where a call begins, or "arguments", more of their JSON text
    text: str = ""
    index: int = 0  # of the call
    id: str = ""  # of a call that begins
    name: str = ""  # of its tool


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text

    def message(self) -> dict[str, object]:
        """Return the call as the assistant's message has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and text of one choice. `token_ids` is empty if the delta only releases text that was held back."""

    choice: int
    first_index: int  # number of this choice's tokens before these
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]  # one per token if the request asked for them
    finish_reason: str  # "stop" or "length" on the choice's last delta, else empty
    stop_cause: str  # the stop string or stop token of the request that ended it, else empty
    parts: tuple[Part, ...] = ()  # of a conversation that asks for them


@dataclass(frozen=True, slots=True)
class Choice:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str
    stop_cause: str
    parts: tuple[Part, ...] = ()

    @property
    def content(self) -> str:
        """The answer to a conversation, without reasoning and calls; its whole text if it has no parts."""
        return self._of_kind("content") if self.parts else self.text

    @property
    def reasoning(self) -> str:
        return self._of_kind("reasoning")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call.id, call.name, self._of_kind("arguments", call.index))
            for call in self.parts
            if call.kind == "call"
        )

    def _of_kind(self, kind: str, index: int = 0) -> str:
        return "".join(part.text for part in self.parts if (part.kind, part.index) == (kind, index))


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """Time that one worker spent on one attempt before its next token, by the worker's clock."""

    member: str
    ended_s: float  # seconds after the request's arrival at the router
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """The time of a request in seconds, as disjoint phases that sum to `wall_s`."""

    phases: tuple[Phase, ...]
    wall_s: float
    ttft_s: float
    members: tuple[str, ...]  # "id@incarnation" of the members that served it, in the order in which they joined
    transport: str  # that moved the KV; "local" if the decode worker computed the prompt
    kv_bytes: int
    reasons: tuple[str, ...]  # the reason names of its retries, fallbacks and refusals
    worker_times: tuple[WorkerTime, ...] = ()  # queues and computing before each attempt's next token
    label: str = ""  # the request's own


@dataclass(frozen=True, slots=True)
class Result:
    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    ledger: Ledger
    prompt_logprobs: tuple[PromptTokenLogprobs, ...] = ()  # if asked for: of all tokens of the prompt but the first

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool


def model_from_wire(message: inference_pb2.Model) -> Model:
    return Model(
        message.id, message.max_model_len, message.vocab_size, message.has_tokenizer, message.has_chat_template
    )


def delta_from_wire(message: inference_pb2.ChoiceDelta) -> Delta:
    """Return the delta of a message. Raises InternalError for an unknown finish reason."""
    try:
        finish_reason = FINISH_REASONS.word(message.finish_reason)
    except ValueError as error:
        reason = "unknown_finish_reason"
        raise InternalError(f"{error}; the router is newer than this client library", reason=reason) from None
    return Delta(
        choice=message.choice,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(_position(position) for position in message.logprobs),
        finish_reason=finish_reason,
        stop_cause=message.stop_cause,
        parts=tuple(_part(part) for part in message.parts),
    )


def _part(message: inference_pb2.AnswerPart) -> Part:
    kind = message.WhichOneof("part") or ""
    if kind == "call":
        return Part(kind, "", message.call.index, message.call.id, message.call.name)
    if kind == "arguments":
        return Part(kind, message.arguments.text, message.arguments.index)
    return Part(kind, message.reasoning if kind == "reasoning" else message.content)


def _position(message: inference_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_token(message.chosen), tuple(map(_token, message.top)))


def prompt_token_from_wire(message: inference_pb2.PromptTokenLogprobs) -> PromptTokenLogprobs:
    return PromptTokenLogprobs(_token(message.token), message.rank, tuple(map(_token, message.top)))


def _token(message: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob)


def ledger_from_wire(message: inference_pb2.Ledger) -> Ledger:
    return Ledger(
        phases=tuple(Phase(REQUEST_PHASES.label(phase.phase), phase.duration_s) for phase in message.phases),
        wall_s=message.wall_s,
        ttft_s=message.ttft_s,
        members=tuple(message.members),
        transport=message.transport,
        kv_bytes=message.kv_bytes,
        reasons=tuple(message.reasons),
        worker_times=tuple(
            WorkerTime(spent.member, spent.ended_s, spent.queue_s, spent.compute_s) for spent in message.worker_times
        ),
        label=message.label,
    )
