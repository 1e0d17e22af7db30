"""The values that Tandem's packages exchange: frozen dataclasses, standard library only.

Wire messages (tandem/internal/v1) are converted to these values in cluster/protocol/wire.py and nowhere else.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple


class Role(StrEnum):
    """The work for which routers use a member. Every worker can do the work of all three roles of workers."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def is_worker(self) -> bool:
        return self is not Role.ROUTER

    def does(self, role: "Role") -> bool:
        """Return whether a worker of this role does the work of `role`."""
        return self is role or (self is Role.BOTH and role.is_worker)

    @property
    def prefills(self) -> bool:
        return self.does(Role.PREFILL)

    @property
    def decodes(self) -> bool:
        return self.does(Role.DECODE)


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"


class MemberId(NamedTuple):
    """Identifies one start of one process. A restarted process has another incarnation than its predecessor.

    It is a tuple because a placement looks up each worker in several tables: a frozen dataclass takes five times as
    long to hash and to compare.
    """

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
class LogitRules:
    """Changes of the logits before temperature and filters, in the order of the fields.

    The prompt's tokens count for `repetition_penalty` and `bad_words`; `frequency_penalty` and `presence_penalty` count
    output tokens alone.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit); each id once
    repetition_penalty: float = 1.0  # divides positive logits of tokens that occurred, multiplies the others
    frequency_penalty: float = 0.0  # is subtracted once per occurrence
    presence_penalty: float = 0.0  # is subtracted from the logits of tokens that occurred
    allowed_token_ids: tuple[int, ...] = ()  # no other token is drawn; each id once; empty: all tokens are allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens whose last one is not drawn after the others


@dataclass(frozen=True, slots=True)
class Sampling:
    """Fully resolved sampling parameters. `temperature` 0 is greedy. `num_logprobs`: None requests no
    log-probabilities; k requests those of the chosen token and of the k most likely ones. `rules`: None changes no
    logits; rules that would change none are None."""

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int | None = None
    rules: LogitRules | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the rules name."""
        if self.rules is None:
            return ()
        biased = (token_id for token_id, _ in self.rules.logit_bias)
        return (*biased, *self.rules.allowed_token_ids, *chain.from_iterable(self.rules.bad_words))


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # one of some texts
    GRAMMAR = "grammar"  # Lark, or GBNF


MAX_GRAMMAR_BYTES = 1 << 17
MAX_PROMPT_LOGPROBS = 1 << 17  # values of one request: of its prompt's tokens, and of the most likely ones
MAX_PREFILL_CHUNKS = 64  # that a prefill reports one by one
MAX_WAIT_DEPTH = 64  # of an ExportWait
MAX_PROFILED_STEPS, MAX_PROFILE_S = 1000, 60.0
MAX_WEIGHT = 1_000_000  # of a tenant
TENANT_LABEL_CHARACTERS = 32
MAX_PROFILE_BYTES = 3 << 20  # compressed; a gRPC message of default size holds it


@dataclass(frozen=True, slots=True)
class ExportWait:
    """How a hand-off without blocks waits for exports of its own worker: engine/scheduling/export_waits.py."""

    depth: int  # 0: it does not
    mark: int  # of a request for which it waits


NO_WAIT = ExportWait(0, 0)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of an answer, as its author wrote it. `text`: JSON for a schema and for choices."""

    kind: GrammarKind
    text: str

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the grammar."""
        return hashlib.blake2b(f"{self.kind}\0{self.text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class TokenStops:
    """The conditions by which a worker ends a sequence. The router applies stop strings."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # EOS included unless ignored


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of the chosen token at one position, and the most likely tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of consecutive tokens of a prompt, and the most likely tokens at their positions, best
    first. Packed as little-endian floats and unsigned integers of 32 bits, because a prompt may have a hundred thousand
    tokens."""

    first_position: int  # in the prompt, at least 1: nothing comes before the first token
    num_top: int
    logprobs: bytes  # [tokens]
    ranks: bytes  # [tokens]; 1: no token was more likely
    top_token_ids: bytes  # [tokens, num_top]
    top_logprobs: bytes  # [tokens, num_top]

    @property
    def num_tokens(self) -> int:
        return len(self.ranks) // 4

    def values(self) -> Iterator[tuple[float, int, tuple[tuple[int, float], ...]]]:
        """Yield each token's log-probability and rank, and the most likely tokens with theirs."""
        ids, logprobs, width = _unpacked("I", self.top_token_ids), _unpacked("f", self.top_logprobs), self.num_top
        own = zip(_unpacked("f", self.logprobs), _unpacked("I", self.ranks), strict=True)
        for place, (logprob, rank) in enumerate(own):
            places = slice(place * width, (place + 1) * width)
            yield logprob, rank, tuple(zip(ids[places], logprobs[places], strict=True))


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was drawn for a sequence; `finish_reason` is set if the sequence ends with it."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Epoch:
    """Identifies one attempt permanently: the member that holds the KV, the ticket and the attempt's number."""

    exporter: MemberId
    ticket_id: bytes
    attempt: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """States which exporter holds which KV for which importer, and until when. kv.proto describes each field."""

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
    wire_dtype: str = "native"
    kv_format: int = 2


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The bandwidth and latency at which one worker reads another's KV over one transport, measured on completed
    reads."""

    exporter: MemberId
    transport: str
    bytes_per_s: float
    latency_s: float  # of a read of zero bytes
    slowdown: float = 1.0  # how many times as long recent reads took as the fastest ones of their size; 0: not sent

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that is expected to hold the KV of the first `num_tokens` of a prompt, from which it may be pulled."""

    member: MemberId
    address: str  # of its gRPC server
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """The changes of one worker's prefix cache from event `first_number` up to, but not including, `next_number`.

    `stored` has the hashes of blocks that were added and are still cached, `removed` those of blocks that were cached
    before and are no longer. A block that was added and removed within these events is in neither. With `cleared`, all
    earlier events are void and `stored` is the whole content of the cache.
    """

    first_number: int
    next_number: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...] = ()
    cleared: bool = False


class TenantShare(NamedTuple):
    """The tenant to which a job belongs, and its weight against others. `label` stands for the tenant's name, which no
    worker receives; jobs without a tenant share the empty label. It is a tuple as MemberId is."""

    label: str = ""
    weight: int = 1


NO_TENANT = TenantShare()


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A router's request to a prefill worker: one attempt at the prefill of one prompt."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    stops: TokenStops
    seeds: tuple[int, ...]  # one per choice
    num_committed: int  # how many of token_ids are output that the client already has
    importer: MemberId | None  # None: no worker will import the KV
    timeout_s: float
    cache_salt: str = ""  # prefixes are shared among jobs of one salt only
    prefix_sources: tuple[PrefixSource, ...] = ()  # the longest prefix first
    priority: int = 0  # a lower value is served first, under --scheduling-policy priority
    is_batch: bool = False  # uses only capacity that no other request needs
    age_s: float = 0.0  # time since the request arrived at its router, earlier attempts included
    is_unproven: bool = False  # the client states the committed tokens without proof that this cluster generated them
    num_expected_cached: int = 0  # tokens of the prompt that the router expects the worker to have cached
    router: MemberId | None = None  # None: the caller is not a router
    grammar: Grammar | None = None  # that the text of each choice must match
    num_prompt_logprobs: int | None = None  # of the most likely tokens at each position; None: none of the prompt
    trace_parent: str = ""  # W3C trace context, which travels as metadata of the call; empty: none
    tenant: TenantShare = NO_TENANT
    packed: bytes = field(default=b"", repr=False, compare=False)  # the first of `token_ids`, as messages have them

    @property
    def is_interrupted(self) -> bool:
        """Return whether the request was already running on a worker that failed or that it left."""
        return self.num_committed > 0 and not self.is_unproven


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A choice of a decode job. `handle` identifies (request, choice, attempt) on its router's stream."""

    handle: int
    seed: int
    committed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A router's request to a decode worker: one attempt to decode some choices. Without a ticket the worker prefills
    the prompt itself.
    """

    request_id: str
    attempt: int
    router: MemberId
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stops: TokenStops
    sequences: tuple[SequenceStart, ...]
    signed_ticket: bytes | None  # a serialized tandem.internal.v1.SignedTicket
    timeout_s: float
    cache_salt: str = ""  # this field and those below: as in PrefillJob
    priority: int = 0
    is_batch: bool = False
    age_s: float = 0.0
    is_unproven: bool = False
    num_expected_cached: int = 0
    num_expected_output: float = 0.0  # tokens that a choice is expected to generate in all; 0: as many as it may
    grammar: Grammar | None = None
    trace_parent: str = ""
    tenant: TenantShare = NO_TENANT
    packed: bytes = field(default=b"", repr=False, compare=False)  # as in PrefillJob, of `prompt_token_ids`

    @property
    def is_interrupted(self) -> bool:
        return bool(self.sequences[0].committed_token_ids) and not self.is_unproven


def _unpacked(kind: str, packed: bytes) -> tuple[Any, ...]:
    """Unpack little-endian values of 32 bits: "f" for floats, "I" for unsigned integers."""
    return struct.unpack(f"<{len(packed) // 4}{kind}", packed)
