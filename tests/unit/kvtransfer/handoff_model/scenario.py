"""The parts of a world, and the words for its state."""

from dataclasses import dataclass

RUNNING, STOPPED, DEAD = range(3)  # a worker
NOT_BEGUN, ENDED, DECODING, DECODED, LOST = -1, -2, -3, -4, -5  # an importer that is no machine (any more)
LAPSED, TOLD_VALID, DESTROYING = 1, 2, 4  # what the world knows about a hand-off, beside the machines
FLYING, REPORTED, LANDED = range(3)  # a read: REPORTED as failed, but still able to write
# Owner of a local block: none, or the pool's prefix cache for ever; else hand-off h: h holds it, h + 10 decodes with
# it, h + 20 has it quarantined.
FREE, CACHED = -1, -2
CORRUPT = 255
READ_FAULTS = frozenset({"corrupt", "report", "unopened"})

Label = tuple[object, ...]
World = tuple[object, ...]


class Violation(Exception):
    """A promise is broken."""


@dataclass(frozen=True)
class Scenario:
    """Two hand-offs. Of `blocks`, each ticket's number, the last is a tail."""

    name: str
    blocks: tuple[int, ...] = (1, 1)  # per ticket; one ticket: the second hand-off is a second attempt on it
    workers: tuple[int, ...] = (1, 1)  # decode worker of each hand-off, from 1
    prefill_pool: int = 2
    decode_pool: int = 2
    watermark: int = 0
    faults: int = 2
    kinds: frozenset[str] = frozenset({"loss", "expiry", "cancel", "stop", "death"})
    duplicates: bool = True
    renewals: bool = False
    verified: int | None = None  # number of verified leading blocks; the others are used without a check
    cached: bool = False  # the decode workers have each prompt's first block already
    ended: bool = False  # every choice ends with its first token
    finished: bool = False  # every prefill ends before an importer attaches, as for the ticket of a frozen sequence
    hedged: bool = False  # the second attempt does not wait for the first one's failure
    alternatives: int = 0  # further ways to the same blocks
    together: bool = False  # what is on its way to an importer may also come as one
    # What the exporter reports wrongly: prompt, count, digest; provenance: it reports unverified blocks.
    wrong: str = ""

    @property
    def is_retry(self) -> bool:
        return len(self.blocks) == 1
