"""What a generation gives: deltas while it runs, a result at its end. Frozen values, made here from wire messages."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

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
class Delta:
    """What one choice grew by. `token_ids` may be empty when only text that was held back comes."""

    choice: int
    first_index: int  # how many tokens of this choice came before
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]  # one per token when asked for
    finish_reason: str  # "stop" or "length" on the choice's last delta, else empty
    stop_cause: str  # the stop string or stop token of the request that ended it, else empty


@dataclass(frozen=True, slots=True)
class Choice:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str
    stop_cause: str


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
    """What one worker spent on one attempt before its next token, by the worker's own clock."""

    member: str
    ended_s: float  # after the request's arrival at the router
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the request's time went: disjoint phases that sum to `wall_s`."""

    phases: tuple[Phase, ...]
    wall_s: float
    ttft_s: float
    members: tuple[str, ...]  # "id@incarnation" of those that served it, in the order they joined
    transport: str  # how the KV travelled; "local" when prefill ran on the decode worker
    kv_bytes: int
    reasons: tuple[str, ...]  # every retry, fallback and refusal that it met
    worker_times: tuple[WorkerTime, ...] = ()  # queues and computing before each attempt's next token
    label: str = ""  # the request's own


@dataclass(frozen=True, slots=True)
class Result:
    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    ledger: Ledger

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32. Raises ValueError for an id that does not fit."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError("token ids must be whole numbers from 0 to 2**32 - 1") from error


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def model_from_wire(message: inference_pb2.Model) -> Model:
    return Model(
        message.id, message.max_model_len, message.vocab_size, message.has_tokenizer, message.has_chat_template
    )


def delta_from_wire(message: inference_pb2.ChoiceDelta) -> Delta:
    return Delta(
        choice=message.choice,
        first_index=message.first_index,
        token_ids=unpack_ids(message.token_ids),
        text=message.text,
        logprobs=tuple(_position(position) for position in message.logprobs),
        finish_reason=message.finish_reason,
        stop_cause=message.stop_cause,
    )


def _position(message: inference_pb2.PositionLogprobs) -> PositionLogprobs:
    chosen = TokenLogprob(message.chosen.token_id, message.chosen.logprob)
    return PositionLogprobs(chosen, tuple(TokenLogprob(token.token_id, token.logprob) for token in message.top))


def ledger_from_wire(message: inference_pb2.Ledger) -> Ledger:
    return Ledger(
        phases=tuple(Phase(phase.name, phase.duration_s) for phase in message.phases),
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
