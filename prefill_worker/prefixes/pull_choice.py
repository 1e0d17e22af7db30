"""Whether to pull a prefix from another worker, and from which. Pure: figures in, a holder or nothing out."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.messages import MemberId, PairFigure, PrefillJob, PrefixHolder
from engine.scheduling.schedule import sealed_blocks

# Fewer blocks are never worth two round trips and a hand-off.
MIN_BLOCKS = 4
# Pulling must look clearly cheaper: both sides are estimates, and what is pulled must be verified as well.
CHEAPER_FACTOR = 0.7


@dataclass(frozen=True, slots=True)
class PullFacts:
    block_size: int
    block_bytes: int  # as they travel
    num_here: int  # leading blocks that this worker has
    compute_tokens_per_s: float | None  # of its own prefills; None: it has computed nothing yet
    pairs: Mapping[MemberId, PairFigure]  # how fast each holder was; one that is missing was never measured


@dataclass(frozen=True, slots=True)
class Pull:
    holder: PrefixHolder
    num_blocks: int  # of the prompt's beginning, as far as the holder is believed to have it
    compute_s: float  # what computing the missing ones would take: pulling may not take longer


def choose_pull(job: PrefillJob, facts: PullFacts) -> Pull | None:
    """The one that saves most. A pair that was never measured counts as fast, so that it is measured: what a pull may
    cost is bounded by what it would have saved."""
    if facts.compute_tokens_per_s is None:
        return None
    most = sealed_blocks(len(job.token_ids) - 1, facts.block_size)
    best: tuple[float, Pull] | None = None
    for holder in job.prefix_holders:
        num_blocks = min(sealed_blocks(holder.num_tokens, facts.block_size), most)
        num_missing = num_blocks - facts.num_here
        if num_missing < MIN_BLOCKS:
            continue
        compute_s = num_missing * facts.block_size / facts.compute_tokens_per_s
        figure = facts.pairs.get(holder.member)
        pull_s = figure.transfer_s(num_missing * facts.block_bytes) if figure is not None else 0.0
        saved_s = compute_s - pull_s
        if pull_s <= CHEAPER_FACTOR * compute_s and (best is None or saved_s > best[0]):
            best = saved_s, Pull(holder, num_blocks, compute_s)
    return best[1] if best is not None else None
