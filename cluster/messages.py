"""What crosses a boundary inside Tandem: frozen values, standard library only.

Wire messages (tandem/v1) become these at the edge, in cluster/protocol/wire.py and kv_wire.py, and nowhere deeper.
"""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"


@dataclass(frozen=True, slots=True, order=True)
class MemberId:
    """One start of one process. A restarted process never passes for its predecessor."""

    id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.id}@{self.incarnation}"

    @staticmethod
    def parse(text: str) -> "MemberId":
        """Inverse of `str`. Raises ValueError."""
        member_id, separator, incarnation = text.partition("@")
        if not (member_id and separator and incarnation):
            raise ValueError(f"not a member id: {text!r}")
        return MemberId(member_id, incarnation)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Fully resolved. `temperature` 0 is greedy. `num_logprobs` None: none wanted; k: the chosen one's and top k."""

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenStops:
    """What a worker looks at to end a sequence. Stop strings are the router's."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # EOS included unless ignored


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """At one position: the chosen token's log-probability, and the most likely tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one sequence; `finish_reason` is set when the sequence ends with it."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Epoch:
    """Names one attempt for ever: who holds the KV, under which ticket, for which attempt."""

    exporter: MemberId
    ticket_id: bytes
    attempt: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who holds which KV, for whom, until when. See kv.proto for each field."""

    ticket_id: bytes
    exporter: MemberId
    exporter_address: str
    importer: MemberId
    request_id: str
    attempt: int
    num_tokens: int
    prompt_hash: bytes
    num_choices: int
    expires_at_s: float  # wall clock

    @property
    def epoch(self) -> Epoch:
        return Epoch(self.exporter, self.ticket_id, self.attempt)


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Two workers may exchange KV only if all of this is equal."""

    weights: str  # digest of the checkpoint's tensors
    model_config: str  # digest of the effective configuration
    dtype: str
    block_table: str  # digest of the block layout: offsets and shapes of every layer
    tp_size: int = 1
    tp_rank: int = 0
    wire_dtype: str = "native"
    kv_format: int = 2


@dataclass(frozen=True, slots=True)
class PairFigure:
    """How fast one worker reads another's KV by one transport, as completed reads showed it."""

    exporter: MemberId
    transport: str
    bytes_per_s: float
    latency_s: float  # of a read of nothing

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that is believed to hold the KV of the first `num_tokens` of a prompt."""

    member: MemberId
    address: str  # of its gRPC server
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """What changed in one worker's prefix cache, from its event `first_number` to before `next_number`. A block that
    came and went in between is not in it. A snapshot has in `added` all that is there, whatever was known before."""

    first_number: int
    next_number: int
    added: tuple[bytes, ...]
    evicted: tuple[bytes, ...] = ()
    is_snapshot: bool = False


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """One attempt at one prefill, as a prefill worker is asked for it."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    stops: TokenStops
    seeds: tuple[int, ...]  # one per choice
    num_committed: int  # how many of token_ids the client has already as output
    importer: MemberId | None  # None: nobody will come for the KV
    timeout_s: float
    cache_salt: str = ""  # prefixes are shared among jobs of one salt only
    prefix_holders: tuple[PrefixHolder, ...] = ()  # the longest first
    priority: int = 0  # less goes first, where the worker's policy asks for it
    is_batch: bool = False  # uses only what nothing else wants
    age_s: float = 0.0  # since the request arrived at its router, whatever was tried meanwhile
    is_unproven: bool = False  # its client claims what is committed, and has not shown that it got it here

    @property
    def is_interrupted(self) -> bool:
        """Its turn had come, at a worker that failed or that it left."""
        return self.num_committed > 0 and not self.is_unproven


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """One choice of a decode job. `handle` names (request, choice, attempt) on its router's stream for ever."""

    handle: int
    seed: int
    committed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One attempt at the decode leg. Without a ticket the prompt is prefilled on the decode worker."""

    request_id: str
    attempt: int
    router: MemberId
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stops: TokenStops
    sequences: tuple[SequenceStart, ...]
    signed_ticket: bytes | None  # a serialized tandem.v1.SignedTicket
    timeout_s: float
    cache_salt: str = ""  # this and what follows: as of PrefillJob
    priority: int = 0
    is_batch: bool = False
    age_s: float = 0.0
    is_unproven: bool = False

    @property
    def is_interrupted(self) -> bool:
        return bool(self.sequences[0].committed_token_ids) and not self.is_unproven


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks a worker's step thread to run check() and report. Answered by Inspected."""

    inspection_id: int


@dataclass(frozen=True, slots=True)
class Inspected:
    inspection_id: int
    blocks: dict[str, int]  # by state; they sum to the pool
    figures: dict[str, float]  # running, waiting, steps, ...
    violation: str  # empty, or what check() found broken
    holders: frozenset[str] = (
        frozenset()
    )  # everything that holds blocks or waits for them, as cluster/holders.py names it
