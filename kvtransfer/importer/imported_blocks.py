"""The result of a hand-off at its importer."""

from dataclasses import dataclass

from kvtransfer.protocol.handoff import FirstToken


@dataclass(frozen=True, slots=True)
class ImportedBlocks:
    """Blocks that were read, verified as --kv-verify says, and settled. The caller owns them from now on."""

    sealed_block_ids: tuple[int, ...]  # in the prompt's order, shared by all choices
    tail_block_ids: tuple[int, ...]  # one per choice; empty when the prompt ends on a block boundary. Those of choices
    # that ended with their first token hold nothing
    first_tokens: tuple[FirstToken, ...]  # one per choice
    transport: str
    num_cached: int  # leading sealed blocks that the pool had already; they were not read
    kv_bytes: int  # read over the transport and verified as --kv-verify requires
    queue_s: float  # after the end of the prefill's last step, until this worker had room for the blocks
    exposed_transfer_s: float  # from that end to settled, without `queue_s`
    total_s: float
    unverified_block_ids: frozenset[int] = frozenset()  # not verified, here or at a worker before
