"""The commands of a worker's event loop to its step thread, and the events that come back. Pure values.

These two directions are the only meeting place of asyncio and the thread that owns the device and the block pool.
"""

from dataclasses import dataclass

from cluster.errors import TandemError
from cluster.messages import DecodeJob, ExportWait, MemberId, PrefillJob, PromptLogprobs, Role, SampledToken
from cluster.service_times import StepLimit
from engine.scheduling.cache_commands import CacheAnswer, CacheCommand
from engine.scheduling.step import Answer, Key, Question, Refusal


@dataclass(frozen=True, slots=True)
class Release:
    """The ticket's blocks have no lease left and get no new one: free them. Does nothing for an unknown ticket."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class Quiet:
    """No transport can write to these quarantined blocks any more: free them."""

    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """The last, partly filled block: unused positions are zeroed, and it does not change while it is leased."""

    block_id: int
    num_valid: int
    is_unverified: bool  # as of `Frozen.unverified`


@dataclass(frozen=True, slots=True)
class Inspected(Answer):
    inspection_id: int
    blocks: dict[str, int]  # by state; they sum to the pool
    figures: dict[str, float]  # running, waiting, steps, ...
    violation: str  # the invariant that check() found broken; empty if none is
    holders: frozenset[str] = frozenset()  # everything that holds blocks or waits for them, named by cluster/holders.py

    @property
    def key(self) -> Key:
        return Inspect, self.inspection_id


@dataclass(frozen=True, slots=True)
class Inspect(Question[Inspected]):
    """Run check() and report the blocks, the figures and the holders of blocks."""

    inspection_id: int

    @property
    def key(self) -> Key:
        return Inspect, self.inspection_id


@dataclass(frozen=True, slots=True)
class Reserve(Question["Reserved"]):
    """Reserve blocks for one hand-off, all at once, in the order of the policy and above the watermark. Answered by
    Reserved, or by Unreservable. `block_hashes`: of the leading full blocks; those
    found in the prefix cache are not transferred. `job`: the job whose sequences will join; None if none will.
    `is_announced`: the exporter has begun to compute."""

    handoff_id: int
    num_blocks: int
    block_hashes: tuple[bytes, ...] = ()
    job: DecodeJob | None = None
    is_announced: bool = False

    @property
    def key(self) -> Key:
        return Reserve, self.handoff_id


@dataclass(frozen=True, slots=True)
class Announce:
    """The exporter of a hand-off that waits for blocks has begun to compute."""

    handoff_id: int


@dataclass(frozen=True, slots=True)
class ImporterWaits:
    """The importer of a ticket has reported how it waits for room."""

    ticket_id: bytes
    wait: ExportWait


@dataclass(frozen=True, slots=True)
class Discard:
    """End a hand-off whose sequences will not join, or a pull that failed, and free its blocks. Blocks that a read may
    still write to go to quarantine instead. Hand-offs and pulls of one worker have different ids."""

    handoff_id: int
    quarantined_block_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class AdmitImported:
    """Admit the sequences of a settled hand-off, with its reserved blocks: `sealed_block_ids` are shared by all
    choices, `tail_block_ids` are one per choice (none if the prompt ends on a block boundary). `first_tokens[i]` is the
    first token of choice i, or None if the choice ended with it."""

    handoff_id: int
    job: DecodeJob
    sealed_block_ids: tuple[int, ...]
    tail_block_ids: tuple[int, ...]
    first_tokens: tuple[int | None, ...]
    unverified: frozenset[int] = frozenset()  # those of its blocks that were not verified


@dataclass(frozen=True, slots=True)
class AdmitLocal:
    """Prefill the job on this worker. Its choices share the prompt's blocks. A sequence with committed tokens continues
    after them. Answered by Failed if the queue is full or the job can never fit."""

    job: DecodeJob


@dataclass(frozen=True, slots=True)
class AdmitExport:
    """Prefill the job for a worker that imports the KV: its blocks are leased to the ticket and announced as they are
    sealed, and it ends with the first token of each choice. Without an importer nothing is leased. Answered by
    ExportAccepted or ExportRefused."""

    ticket_id: bytes
    job: PrefillJob


@dataclass(frozen=True, slots=True)
class CancelExport:
    """Cancel an export. Its sealed blocks stay leased until Release, its other blocks are free at once. Answered by
    ExportFailed (reason cancelled) if it was still waiting or running, by nothing if it had ended."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class DrainExports:
    """Refuse new exports, and exports that have no blocks yet, with Draining."""


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """End these sequences at the latest when the running step ends. Unknown handles are ignored: they ended already."""

    router: MemberId
    handles: frozenset[int]


@dataclass(frozen=True, slots=True)
class Freeze:
    """Exclude a decoding sequence from steps and lease its blocks to this ticket until Release. It remains live until
    it is cancelled, is thawed, or exceeds its deadline. Answered by Frozen, or by FreezeRefused if it does not
    decode."""

    ticket_id: bytes
    router: MemberId
    handle: int


@dataclass(frozen=True, slots=True)
class Thaw:
    """Continue a frozen sequence on this worker, as `new_handle`. Answered by Thawed, or by ThawRefused if it is not
    frozen."""

    router: MemberId
    handle: int
    new_handle: int


@dataclass(frozen=True, slots=True)
class SetRole:
    """The worker's role from now on. If it decodes, its exports leave room for hand-offs that come to it; if it
    prefills too, hand-offs whose exporter has not begun to compute leave room for an export."""

    role: Role


@dataclass(frozen=True, slots=True)
class LimitQueue:
    """Refuse further requests while `max_queue` wait. Those that wait already stay."""

    max_queue: int


@dataclass(frozen=True, slots=True)
class LimitSteps:
    """Limit further steps that compute prompts beside running sequences by this target."""

    step_limit: StepLimit


Command = (
    Reserve
    | Announce
    | ImporterWaits
    | Discard
    | Quiet
    | AdmitImported
    | AdmitLocal
    | AdmitExport
    | CancelExport
    | DrainExports
    | CancelSequences
    | Freeze
    | Thaw
    | Release
    | LimitQueue
    | LimitSteps
    | SetRole
    | Inspect
    | CacheCommand
)


@dataclass(frozen=True, slots=True)
class Reserved(Answer):
    """The blocks of a hand-off. The first `num_cached` hold their content already."""

    handoff_id: int
    block_ids: tuple[int, ...]
    num_cached: int

    @property
    def key(self) -> Key:
        return Reserve, self.handoff_id


@dataclass(frozen=True, slots=True)
class Unreservable(Refusal):
    """The pool can never reserve that many blocks, or a cycle of workers waits for each other's exports."""

    handoff_id: int
    error: TandemError

    @property
    def key(self) -> Key:
        return Reserve, self.handoff_id


@dataclass(frozen=True, slots=True)
class WaitsForExports:
    """A hand-off that has no blocks waits for exports of this worker."""

    handoff_id: int
    wait: ExportWait


@dataclass(frozen=True, slots=True)
class Started:
    """These sequences are in a step for the first time. `queue_s`: seconds from AdmitImported or AdmitLocal to that
    step. `num_cached`: prompt tokens whose KV was found in the prefix cache."""

    router: MemberId
    handles: tuple[int, ...]
    queue_s: float
    num_cached: int


@dataclass(frozen=True, slots=True)
class SequenceToken:
    """One token of one choice. `index` counts its output tokens from 0, including committed and imported ones."""

    router: MemberId
    handle: int
    index: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All tokens of one engine step, for all routers."""

    step: int
    tokens: tuple[SequenceToken, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    router: MemberId
    handles: tuple[int, ...]
    error: TandemError


@dataclass(frozen=True, slots=True)
class Frozen:
    """The sequence is frozen; no token of it follows. `token_ids`: the tokens whose KV the blocks hold, which are all
    but `last_token_id`, the one drawn last."""

    ticket_id: bytes
    request_id: str
    token_ids: tuple[int, ...]
    last_token_id: int
    num_output: int
    sealed_block_ids: tuple[int, ...]
    tail: Tail | None
    unverified: frozenset[int] = frozenset()  # those of its blocks that came from another worker and were not verified


@dataclass(frozen=True, slots=True)
class FreezeRefused:
    ticket_id: bytes
    error: TandemError


@dataclass(frozen=True, slots=True)
class Thawed:
    router: MemberId
    handle: int  # the new one


@dataclass(frozen=True, slots=True)
class ThawRefused:
    router: MemberId
    handle: int  # the new one
    error: TandemError


@dataclass(frozen=True, slots=True)
class ExportAccepted:
    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class ExportRefused:
    """The export was refused: too many sequences wait, the worker drains, or the prompt can never fit."""

    ticket_id: bytes
    error: TandemError


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks that were sealed, in the ticket's order. Only for exports with an importer."""

    ticket_id: bytes
    first_index: int
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()  # of these, those that came from elsewhere and were not verified


@dataclass(frozen=True, slots=True)
class ExportFinished:
    """The prompt is computed. Comes after its last Sealed. Durations by the step thread's clock."""

    ticket_id: bytes
    tokens: tuple[SampledToken, ...]  # one per choice
    tail: Tail | None
    num_cached: int  # tokens that were found in the prefix cache and not computed
    queue_s: float
    prefill_s: float
    ended_s: float  # when its last step ended
    chunks: tuple[tuple[int, float], ...] = ()  # tokens of each step, and when it ended, since the first was planned
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # if the job wants them: all tokens but the first, in order


@dataclass(frozen=True, slots=True)
class ExportFailed:
    ticket_id: bytes
    error: TandemError


Event = (
    Reserved
    | Unreservable
    | WaitsForExports
    | Started
    | StepTokens
    | Failed
    | Frozen
    | FreezeRefused
    | Thawed
    | ThawRefused
    | ExportAccepted
    | ExportRefused
    | Sealed
    | ExportFinished
    | ExportFailed
    | Inspected
    | CacheAnswer
)
