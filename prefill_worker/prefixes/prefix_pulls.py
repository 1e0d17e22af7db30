"""Pulls: before a prompt is queued, the part of its prefix that another worker has cached is fetched from there.

`choose_pull` decides whether to pull and from which worker; it is pure. `PrefixPulls` performs the pull on the event
loop: it asks the source for a ticket (`KvTransfer.LeasePrefix`), imports the blocks by an ordinary hand-off, and adds
them to the prefix cache. It owns the pulls in progress and is their view of the block pool (kvtransfer's
`BlockSource`). A pull is best-effort: when it fails or exceeds the time that computing would take, the prompt is
computed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import grpc

from cluster import holders
from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason, TandemError, Unavailable
from cluster.messages import LinkSpeed, MemberId, PrefillJob, PrefixSource
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import MAX_PREFIX_BLOCKS, NATIVE, BlockChain, NewChain
from cluster.protocol.received import checked, malformed
from cluster.request_size import sealed_blocks
from cluster.serving.rpc_errors import error_from_rpc
from engine.scheduling import cache_commands, commands
from engine.scheduling.commands import Quiet
from engine.steps.questions import StepInbox
from kvtransfer.importer.calls import GrpcChannelPool
from kvtransfer.importer.importer import ExpectedPrompt, Importer
from kvtransfer.importer.links import LinkTable
from kvtransfer.memory import Reservation
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc

_LOG = logging.getLogger("tandem.prefill.pulls")
MIN_TIMEOUT_S = 0.1  # a pull, or a fetch from a tier, may take this long even where computing is faster
_AVOIDED_S = 10.0  # after a failed or late pull, its source is not used again for this long
# Fewer blocks are never worth two round trips and a hand-off.
MIN_BLOCKS = 4
# Fetching must be clearly cheaper than computing: both sides are estimates, and fetched blocks are verified as well.
MAX_COST_RATIO = 0.7


# Predicts the seconds to compute (a number of tokens of a prompt, behind a number of tokens before them).
ComputeSeconds: TypeAlias = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class PullFacts:
    block_size: int
    block_bytes: int  # of one block on the wire
    num_cached: int  # leading blocks of the prompt that this worker has cached
    compute_s: ComputeSeconds
    links: Mapping[MemberId, LinkSpeed]  # to each source; a link that was never measured is missing


@dataclass(frozen=True, slots=True)
class Pull:
    source: PrefixSource
    num_blocks: int  # leading blocks of the prompt that the source is expected to have
    compute_s: float  # estimated time to compute the missing blocks: the timeout of the pull


def choose_pull(job: PrefillJob, facts: PullFacts) -> Pull | None:
    """Return the pull that saves most time, or None if no pull is clearly cheaper than computing. A source whose link
    was never measured counts as infinitely fast, so that it gets measured; the timeout bounds the cost of that.
    """
    max_blocks = min(sealed_blocks(len(job.token_ids) - 1, facts.block_size), MAX_PREFIX_BLOCKS)
    best: tuple[float, Pull] | None = None
    for source in job.prefix_sources:
        num_blocks = min(sealed_blocks(source.num_tokens, facts.block_size), max_blocks)
        num_missing = num_blocks - facts.num_cached
        if num_missing < MIN_BLOCKS:
            continue
        compute_s = facts.compute_s(num_missing * facts.block_size, facts.num_cached * facts.block_size)
        speed = facts.links.get(source.member)
        pull_s = speed.transfer_s(num_missing * facts.block_bytes) if speed is not None else 0.0
        saved_s = compute_s - pull_s
        if pull_s <= MAX_COST_RATIO * compute_s and (best is None or saved_s > best[0]):
            best = saved_s, Pull(source, num_blocks, compute_s)
    return best[1] if best is not None else None


@dataclass(frozen=True, slots=True)
class PullResources:
    """The parts of a worker that all its pulls share."""

    member: MemberId
    importer: Importer
    links: LinkTable
    channels: GrpcChannelPool
    block_size: int
    block_bytes: int  # of one block on the wire
    new_chain: NewChain
    compute_s: ComputeSeconds
    pull_ids: Iterator[int]  # unique among all pulls, fetches from tiers and look-ups of this worker
    clock: Clock
    telemetry: Telemetry


class PrefixPulls:
    def __init__(self, resources: PullResources, steps: StepInbox[commands.Command]) -> None:
        self._resources = resources
        self._steps = steps
        self._hashes: dict[int, tuple[bytes, ...]] = {}  # by pull in progress
        self._avoided_until_s: dict[MemberId, float] = {}
        self._num_pulls = 0
        self._tokens_pulled = 0

    def figures(self) -> dict[str, float]:
        return {"prefixes_pulled": float(self._num_pulls), "tokens_pulled": float(self._tokens_pulled)}

    def owners(self) -> Iterator[str]:
        """Return the names of the pulls in progress, as holders of blocks."""
        return map(holders.hand_off, self._hashes)

    async def pull(self, job: PrefillJob) -> int:
        """Pull the part of the prompt's prefix for which a pull pays. Return the number of tokens pulled; 0 for a pull
        that fails.
        """
        job = self._with_usable_sources(job)
        if not job.prefix_sources:
            return 0
        chain = self._resources.new_chain(job.cache_salt, NATIVE)
        chain.extend(job.token_ids)
        if len(chain.hashes) < MIN_BLOCKS:
            return 0
        pull = choose_pull(job, await self._facts(job, chain))
        return await self._pull_in_time(job, pull, chain) if pull is not None else 0

    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        """Reserve the blocks of a pull. Raises HandOffFailed."""
        hashes = self._hashes[handoff_id]
        assert len(hashes) == num_blocks, f"a pull of {len(hashes)} blocks reserves {num_blocks}"
        reserved = await self._steps.ask(cache_commands.ReservePull(handoff_id, hashes))
        if reserved.block_ids is None:
            raise HandOffFailed(HandOffReason.NOT_ENOUGH_BLOCKS, "the pool has too few blocks for the pull")
        return Reservation(reserved.block_ids, reserved.num_cached)

    def announce(self, handoff_id: int) -> None:
        """Do nothing: a pull gets its blocks at once or not at all."""

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        self._steps.post(commands.Discard(handoff_id, quarantined))

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        self._steps.post(Quiet(block_ids))

    async def close(self) -> None:
        await self._resources.channels.close()

    def _with_usable_sources(self, job: PrefillJob) -> PrefillJob:
        now_s = self._resources.clock.now_s()
        self._avoided_until_s = {m: until_s for m, until_s in self._avoided_until_s.items() if until_s > now_s}
        unusable = {self._resources.member, *self._avoided_until_s}
        return replace(job, prefix_sources=tuple(s for s in job.prefix_sources if s.member not in unusable))

    async def _facts(self, job: PrefillJob, chain: BlockChain) -> PullFacts:
        speeds = {source.member: self._resources.links.best(source.member) for source in job.prefix_sources}
        return PullFacts(
            block_size=self._resources.block_size,
            block_bytes=self._resources.block_bytes,
            num_cached=await self._num_cached(chain.hashes),
            compute_s=self._resources.compute_s,
            links={member: speed for member, speed in speeds.items() if speed is not None},
        )

    async def _num_cached(self, hashes: Sequence[bytes]) -> int:
        found = await self._steps.ask(cache_commands.FindPrefix(next(self._resources.pull_ids), tuple(hashes)))
        return found.num_blocks

    async def _pull_in_time(self, job: PrefillJob, pull: Pull, chain: BlockChain) -> int:
        num_tokens, outcome = 0, "late"
        try:
            async with asyncio.timeout(max(pull.compute_s, MIN_TIMEOUT_S)):
                num_tokens = await self._pull(job, pull, chain)
            outcome = "ok" if num_tokens else "gone"
            self._num_pulls += bool(num_tokens)
            self._tokens_pulled += num_tokens
        except TimeoutError:
            pass
        except TandemError as error:
            outcome = _outcome(error)
        except grpc.aio.AioRpcError as error:
            outcome = _outcome(error_from_rpc(error))
        except Exception:  # noqa: BLE001 - a pull is best-effort: its failure is logged, and the prompt is computed
            outcome = "failed"
            _LOG.exception("request %s: the pull of its prefix failed", job.request_id)
        if outcome not in ("ok", "gone", HandOffReason.NOT_ENOUGH_BLOCKS):
            self._avoided_until_s[pull.source.member] = self._resources.clock.now_s() + _AVOIDED_S
            _LOG.info("request %s: no prefix pulled from %s: %s", job.request_id, pull.source.member, outcome)
        self._resources.telemetry.count("tandem_prefix_pulls_total", outcome=outcome)
        return num_tokens

    async def _pull(self, job: PrefillJob, pull: Pull, chain: BlockChain) -> int:
        """Lease, read and cache the prefix; return the number of read tokens. Raises HandOffFailed, MalformedMessage,
        AioRpcError."""
        resources = self._resources
        leased = await self._ask_for_ticket(job, pull, chain.hashes[: pull.num_blocks])
        if not leased.ticket:
            return 0
        if leased.num_blocks > pull.num_blocks:
            raise malformed(leased, f"num_blocks must be at most {pull.num_blocks}, not {leased.num_blocks}")
        hashes = tuple(chain.hashes[: leased.num_blocks])
        pull_id = next(resources.pull_ids)
        self._hashes[pull_id] = hashes
        try:
            imported = await resources.importer.import_blocks(
                handoff_id=pull_id,
                signed_ticket=leased.ticket,
                expected=ExpectedPrompt(len(hashes) * resources.block_size, hashes[-1], num_choices=0),
                blocks=self,
            )
        finally:
            del self._hashes[pull_id]
        self._steps.post(cache_commands.AdmitPull(pull_id, chain.parent_of(0), hashes, imported.unverified_block_ids))
        return (len(hashes) - imported.num_cached) * resources.block_size

    async def _ask_for_ticket(self, job: PrefillJob, pull: Pull, hashes: Sequence[bytes]) -> kv_pb2.LeasePrefixResponse:
        request = kv_pb2.LeasePrefixRequest(
            request_id=job.request_id,
            attempt=job.attempt,
            importer=str(self._resources.member),
            block_hashes=b"".join(hashes),
            min_blocks=MIN_BLOCKS,
        )
        async with self._resources.channels.use(pull.source.address) as channel:
            leased: kv_pb2.LeasePrefixResponse = await kv_pb2_grpc.KvTransferStub(channel).LeasePrefix(
                request, timeout=job.timeout_s
            )
        return checked(leased)


def _outcome(error: TandemError) -> str:
    """Return the outcome to count for a failed pull: the reason that the source gave, or `unreachable` if no source
    answered. An error that a source sends always has a more exact kind than Unavailable.
    """
    outcome = "unreachable" if type(error) is Unavailable else error.reason
    return error.handoff_reason if isinstance(error, HandOffFailed) else outcome
