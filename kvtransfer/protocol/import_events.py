"""What happens to an importer's machine, and what it has its driver do. Pure values.

Events                                             what it means
    FromExporter(message, is_followed)             Accepted, Refused, Sealed, Finished, Failed or Settled; the next one
                                                   comes at once, so that one read may serve both
    Reserved(block_ids, num_cached, unverified)    the pool gave them; the first num_cached hold their content already,
                                                   the places `unverified` are taken as they come
    Unreservable()                                 the pool never can
    ReadCompleted(read_id, digests)                written and visible; digests of the local copies, in order, empty
                                                   where none was asked for
    OpenFailed(read_id, detail)                    there is no channel: nothing was written, and nothing will be
    ReadFailed(read_id, detail)                    an error: it may still write
    ChannelDestroyed()                             nothing can write any more
    Cancel()                                       the request does not need it
    CallEnded()                                    the stream to the exporter is gone
    Tick()                                         give one at `next_deadline_s`
Actions                                            what the driver does
    Send(message)                                  Attach, Renew or Settle
    Reserve(num_blocks)                            commands.Reserve; the answer is an event
    StartRead(read_id, remote, local, unverified)  opens the channel first, if there is none; no digests of the local
                                                   blocks `unverified`
    DestroyChannel()                               ends in ChannelDestroyed
    FallBack(reason)                               the channel is gone or never was: the next read opens the next way's
    Discard(quarantined)                           commands.Discard, once, if Reserve was asked; Reserved may still come
    Quiet(block_ids)                               commands.Quiet
    GiveUp(reason, detail)                         once: the request hears it now, the machine goes on until ENDED
    Admit(sealed, tails, first_tokens)             once: the blocks are good, and the request's
    ReportUnhealthy()                              destroying the channel did not end within quarantine_s
    Close()                                        the last: half-close the call after what was sent; the channel is
                                                   quiet: release it, unless destroyed
"""

from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import HandOffReason
from kvtransfer.protocol.handoff import ExporterMessage, FirstToken, ImporterMessage


@dataclass(frozen=True, slots=True)
class FromExporter:
    message: ExporterMessage
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Reserved:
    block_ids: tuple[int, ...]
    num_cached: int = 0
    unverified: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Unreservable:
    pass


@dataclass(frozen=True, slots=True)
class ReadCompleted:
    read_id: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OpenFailed:
    read_id: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    read_id: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChannelDestroyed:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    pass


@dataclass(frozen=True, slots=True)
class CallEnded:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    FromExporter
    | Reserved
    | Unreservable
    | ReadCompleted
    | OpenFailed
    | ReadFailed
    | ChannelDestroyed
    | Cancel
    | CallEnded
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    message: ImporterMessage


@dataclass(frozen=True, slots=True)
class Reserve:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StartRead:
    read_id: int
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DestroyChannel:
    pass


class FallBackReason(StrEnum):
    """Why a way to the exporter's blocks was left for the next one."""

    OPEN_FAILED = "open_failed"
    READ_FAILED = "read_failed"
    READ_TIMEOUT = "read_timeout"


@dataclass(frozen=True, slots=True)
class FallBack:
    reason: FallBackReason


@dataclass(frozen=True, slots=True)
class Discard:
    quarantined: frozenset[int]


@dataclass(frozen=True, slots=True)
class Quiet:
    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: HandOffReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Admit:
    sealed_block_ids: tuple[int, ...]
    tail_block_ids: tuple[int, ...]  # those of ended choices hold nothing
    first_tokens: tuple[FirstToken, ...]
    num_cached: int  # of the sealed ones, the pool's own
    num_read: int
    unverified_block_ids: frozenset[int] = frozenset()  # of those that were read; tails of ended choices may be among


@dataclass(frozen=True, slots=True)
class ReportUnhealthy:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Action = (
    Send | Reserve | StartRead | DestroyChannel | FallBack | Discard | Quiet | GiveUp | Admit | ReportUnhealthy | Close
)
