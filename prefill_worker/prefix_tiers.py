"""Prefixes that the pool has no room for: kept in host memory and on disk, and brought back before a prompt starts.

Lives on the event loop. Owns the index of the tiers, the copies in progress and what they hold of the pool: leases on
blocks that are copied out, reservations of blocks that are copied in. Best-effort: whatever fails, is full or takes
longer than computing would, the prompt is computed, and a counter says why.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cluster import tickets
from cluster.hashing import NATIVE, BlockChain, NewChain
from cluster.messages import PrefillJob
from cluster.telemetry import Telemetry
from engine.schedule import sealed_blocks
from prefill_worker import commands
from prefill_worker.pull_choice import CHEAPER_FACTOR
from prefill_worker.rates import RunningRate
from prefill_worker.tier_copies import OK, Fetched, TierCopies
from prefill_worker.tier_index import Place, Store, TierIndex

_LOG = logging.getLogger("tandem.prefill.tiers")
_MAX_STORES = 4  # prompts whose blocks are being copied out, or wait for it; one more is dropped
_LEAST_DEADLINE_S = 0.1  # a fetch may always take so long, however fast computing is
_ANSWER_S = 30.0  # of the step thread
_MEASURED_ANEW_S = 10.0
_CLOSE_S = 5.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class TierMeans:
    index: TierIndex
    copies: TierCopies
    new_chain: NewChain
    block_size: int
    block_bytes: int
    compute: RunningRate  # tokens
    pull_ids: Iterator[int]  # unique among all that reserve blocks for a prefix
    telemetry: Telemetry


class PrefixTiers:
    def __init__(self, means: TierMeans, post: Callable[[commands.Command], None]) -> None:
        """`post` reaches the step thread."""
        self._means = means
        self._post = post
        self._host_rate, self._disk_rate = RunningRate(), RunningRate()  # bytes
        self._measured_s = 0.0  # when one of them was last looked at
        self._fetcher = ThreadPoolExecutor(1, "tier-fetch")
        self._storer = ThreadPoolExecutor(1, "tier-store")
        self._stores: set[asyncio.Task[None]] = set()
        self._lent: dict[bytes, asyncio.Future[tuple[int, ...]]] = {}
        self._found: dict[int, asyncio.Future[int]] = {}
        self._reserved: dict[int, asyncio.Future[commands.PullReserved]] = {}
        self._tokens_fetched = 0
        self._closing = False

    def figures(self) -> dict[str, float]:
        index = self._means.index
        return {
            "blocks_in_host_tier": float(index.num_in_host),
            "blocks_on_disk_tier": float(index.num_on_disk),
            "tokens_from_tiers": float(self._tokens_fetched),
        }

    def chain(self, job: PrefillJob) -> BlockChain:
        """Names of the prompt's blocks."""
        chain = self._means.new_chain(job.cache_salt, NATIVE)
        chain.extend(job.token_ids)
        return chain

    async def fetch(self, job: PrefillJob, chain: BlockChain) -> None:
        """Brings what is worth it of the prompt's beginning into the pool. Never raises for it."""
        hashes = chain.hashes[: sealed_blocks(len(job.token_ids) - 1, self._means.block_size)]
        if not any(self._means.index.num_held((block_hash,)) for block_hash in hashes):
            return
        num_here = await self._num_here(hashes)
        num_held = self._means.index.num_held(hashes[num_here:])
        compute_s = self._worth_s(hashes[num_here : num_here + num_held])
        if compute_s is not None:
            await self._fetch(hashes[: num_here + num_held], chain.parent_of(0), compute_s)

    def store(self, chain: BlockChain) -> None:
        """The prompt is computed: its blocks are copied out, as far as they are not there. Returns at once."""
        hashes = tuple(chain.hashes)
        first = self._means.index.first_missing(hashes)
        if first == len(hashes) or self._closing:
            return
        if len(self._stores) >= _MAX_STORES:
            self._count("store", "dropped", len(hashes) - first)
            return
        task = asyncio.create_task(self._store(hashes, first), name="store prefix")
        self._stores.add(task)
        task.add_done_callback(self._stores.discard)

    def on_event(self, event: commands.PrefixLent | commands.PrefixFound | commands.PullReserved) -> None:
        """What the step thread answers."""
        match event:
            case commands.PrefixLent(ticket_id, block_ids):
                if not _settle(self._lent.get(ticket_id), block_ids):
                    self._post(commands.Release(ticket_id))
            case commands.PrefixFound(question_id, num_blocks):
                _settle(self._found.get(question_id), num_blocks)
            case commands.PullReserved(pull_id):
                _settle(self._reserved.get(pull_id), event)

    async def close(self) -> None:
        """Waits a moment for what is being copied, and leaves on disk what fits and was used last."""
        self._closing = True
        if self._stores:
            await asyncio.wait(self._stores, timeout=_CLOSE_S)
        self._storer.submit(self._means.copies.flush, self._means.index.only_in_host(), _CLOSE_S)
        ended = asyncio.get_running_loop().run_in_executor(self._storer, self._means.copies.close)
        await asyncio.wait((ended,), timeout=2 * _CLOSE_S)
        for executor in (self._storer, self._fetcher):
            executor.shutdown(wait=False, cancel_futures=True)

    def _worth_s(self, hashes: Sequence[bytes]) -> float | None:
        """What computing them would take; None where reading is not clearly cheaper. A rate that nobody looked at for a
        while is measured anew."""
        means = self._means
        if not hashes or means.compute.per_s is None:
            return None
        compute_s = len(hashes) * means.block_size / means.compute.per_s
        rate = self._rate(means.index.first_missing(hashes) < len(hashes)).per_s
        read_s = len(hashes) * means.block_bytes / rate if rate is not None else 0.0
        is_old = asyncio.get_running_loop().time() - self._measured_s > _MEASURED_ANEW_S
        return compute_s if is_old or read_s <= CHEAPER_FACTOR * compute_s else None

    def _rate(self, reads_disk: bool) -> RunningRate:
        return self._disk_rate if reads_disk else self._host_rate

    def _note_rate(self, fetched: Fetched, places: Sequence[Place]) -> None:
        """One that came to nothing counts as one block."""
        self._measured_s = asyncio.get_running_loop().time()
        num_bytes = max(1, fetched.num_blocks) * self._means.block_bytes
        self._rate(any(place.slot is None for place in places)).note(num_bytes, fetched.seconds)

    async def _num_here(self, hashes: Sequence[bytes]) -> int:
        question_id = next(self._means.pull_ids)
        answer: asyncio.Future[int]
        answer = self._found[question_id] = asyncio.get_running_loop().create_future()
        self._post(commands.FindPrefix(question_id, tuple(hashes)))
        try:
            return await answer
        finally:
            del self._found[question_id]

    async def _fetch(self, hashes: Sequence[bytes], root: bytes, compute_s: float) -> None:
        pull_id = next(self._means.pull_ids)
        reserved = await self._reserve(pull_id, tuple(hashes))
        if reserved.block_ids is None:
            self._count("fetch", "no_room", len(hashes))
            return
        places = self._means.index.begin_read(hashes[reserved.num_cached :])
        fresh = reserved.block_ids[reserved.num_cached :]
        stop, jobs = threading.Event(), list(zip(places, fresh, strict=False))
        work = self._fetcher.submit(self._means.copies.fetch, jobs, stop)
        try:
            async with asyncio.timeout(max(compute_s, _LEAST_DEADLINE_S)):
                fetched = await asyncio.shield(asyncio.wrap_future(work))
        except (TimeoutError, asyncio.CancelledError) as error:
            self._abandon(pull_id, work, places, frozenset(fresh), stop)
            if isinstance(error, asyncio.CancelledError):
                raise
            self._count("fetch", "late", len(places))
            return
        self._end_fetch(fetched, places)
        self._post(commands.AdmitPull(pull_id, root, tuple(hashes[: reserved.num_cached + fetched.num_blocks])))

    def _abandon(
        self,
        pull_id: int,
        work: Future[Fetched],
        places: Sequence[Place],
        block_ids: frozenset[int],
        stop: threading.Event,
    ) -> None:
        """The thread may still write to its blocks: nobody gets them before it has ended."""
        stop.set()
        loop = asyncio.get_running_loop()
        self._post(commands.DiscardPull(pull_id, block_ids))

        def ended() -> None:
            self._means.index.end_read(places)
            self._post(commands.Quiet(block_ids))
            if work.exception() is None:
                self._note_rate(work.result(), places)

        work.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))

    def _end_fetch(self, fetched: Fetched, places: Sequence[Place]) -> None:
        means, failed = self._means, fetched.outcome != OK
        lost = places[fetched.num_blocks].block_hash if failed else None
        means.index.end_read(places, lost)
        self._note_rate(fetched, places)
        self._tokens_fetched += fetched.num_blocks * means.block_size
        self._count("fetch", OK, fetched.num_blocks)
        if lost is not None:
            self._count("fetch", fetched.outcome, 1)
            self._storer.submit(means.copies.remove, (lost,))

    async def _reserve(self, pull_id: int, hashes: tuple[bytes, ...]) -> commands.PullReserved:
        answer: asyncio.Future[commands.PullReserved]
        answer = self._reserved[pull_id] = asyncio.get_running_loop().create_future()
        self._post(commands.ReservePull(pull_id, hashes))
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(commands.DiscardPull(pull_id))
            raise
        finally:
            del self._reserved[pull_id]

    async def _store(self, hashes: tuple[bytes, ...], first: int) -> None:
        """Slots are emptied before blocks are leased: a disk that hangs pins nothing of the pool."""
        index, copies = self._means.index, self._means.copies
        stores = index.begin_store(hashes[first:])
        demoted, stored = ["failed"] * len(stores), frozenset[bytes]()
        try:
            demoted = await asyncio.wrap_future(self._storer.submit(copies.demote, stores))
            stored = await self._copy_out(stores, hashes, first)
        except Exception:  # noqa: BLE001 - a tier is best-effort: its failure is told, and costs a miss
            _LOG.exception("blocks were not stored")
        finally:
            for store, outcome in zip(stores, demoted, strict=True):
                index.end_store(store, is_stored=store.block_hash in stored, is_demoted=outcome == OK)
                if store.demoted is not None:
                    self._count("demote", outcome, 1)
            self._count("store", OK, len(stored))
            self._count("store", "failed", len(stores) - len(stored))

    async def _copy_out(self, stores: Sequence[Store], hashes: tuple[bytes, ...], first: int) -> frozenset[bytes]:
        """Those that are stored: fewer, where the pool has evicted some meanwhile."""
        ticket_id = secrets.token_bytes(tickets.TICKET_ID_BYTES)
        try:
            block_ids = await self._lend(ticket_id, hashes, first)
        except TimeoutError:
            return frozenset()
        try:
            lent = dict(zip(hashes[first:], block_ids, strict=False))
            jobs = [(store, lent[store.block_hash]) for store in stores if store.block_hash in lent]
            await asyncio.wrap_future(self._storer.submit(self._means.copies.store, jobs))
        finally:
            self._post(commands.Release(ticket_id))
        return frozenset(store.block_hash for store, _ in jobs)

    async def _lend(self, ticket_id: bytes, hashes: tuple[bytes, ...], first: int) -> tuple[int, ...]:
        """Raises TimeoutError."""
        answer: asyncio.Future[tuple[int, ...]]
        answer = self._lent[ticket_id] = asyncio.get_running_loop().create_future()
        self._post(commands.LendPrefix(ticket_id, hashes, first))
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        finally:
            del self._lent[ticket_id]

    def _count(self, action: str, outcome: str, num_blocks: int) -> None:
        self._means.telemetry.count("tandem_prefix_tier_blocks_total", num_blocks, action=action, outcome=outcome)


def _settle(answer: asyncio.Future[_Answer] | None, value: _Answer) -> bool:
    """False: nobody waits for it any more."""
    if answer is None or answer.done():
        return False
    answer.set_result(value)
    return True
