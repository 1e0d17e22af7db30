"""What the prefill scheduler knows about its jobs. Pure. Owned by the scheduler alone."""

from dataclasses import dataclass

from cluster.hashing import BlockChain
from cluster.messages import PrefillJob


@dataclass(slots=True, eq=False)
class Waiting:
    ticket_id: bytes
    job: PrefillJob
    submitted_s: float
    has_importer: bool  # turns False when Release says that nobody will come
    chain: BlockChain


@dataclass(slots=True, eq=False)
class Running:
    number: int
    ticket_id: bytes
    job: PrefillJob
    has_importer: bool
    block_ids: tuple[int, ...]
    chain: BlockChain
    num_cached: int  # leading tokens that were in the cache
    queue_s: float
    started_s: float
    num_computed: int
    num_leased: int = 0  # leading blocks that are sealed and leased
    num_kept: int = 0  # leading blocks that are sealed and in the prefix cache

    @property
    def num_left(self) -> int:
        return len(self.job.token_ids) - self.num_computed
