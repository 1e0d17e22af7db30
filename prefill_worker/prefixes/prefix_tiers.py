"""Prefixes that the pool has no room for: kept in host memory and on disk, and brought back before a prompt starts.

Lives on the event loop. Owns the index of the tiers, the copies in progress and what they hold of the pool: leases on
blocks that are copied out, reservations of blocks that are copied in. Every copy gives back what it holds without an
await, whichever exception ends it. Best-effort: if a tier fails, is full or takes longer than computing would, the
prompt is computed, and a counter says why.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from cluster import holders
from cluster.messages import PrefillJob
from cluster.observe.telemetry import Telemetry
from cluster.protocol import tickets
from cluster.protocol.hashing import NATIVE, BlockChain, NewChain
from engine.scheduling.schedule import sealed_blocks
from prefill_worker.prefixes.pull_choice import CHEAPER_FACTOR
from prefill_worker.prefixes.tier_copies import LATE, OK, Fetched, TierCopies
from prefill_worker.prefixes.tier_index import Place, Store, TierIndex
from prefill_worker.scheduling import commands
from prefill_worker.scheduling.rates import RunningRate

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


@dataclass(slots=True, eq=False)
class _Fetch:
    """What one fetch holds: blocks that are reserved for it, and pinned places of the tiers."""

    pull_id: int
    places: tuple[Place, ...] = ()
    fresh: frozenset[int] = frozenset()  # blocks that the thread writes to
    stop: threading.Event = field(default_factory=threading.Event)
    work: Future[Fetched] | None = None  # None: not submitted


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
        self._copying_out: set[bytes] = set()  # tickets of blocks that are leased, or asked for
        self._fetches: set[_Fetch] = set()
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

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        yield from (holders.hand_off(fetch.pull_id) for fetch in self._fetches)
        yield from map(holders.ticket, self._copying_out)

    def chain(self, job: PrefillJob) -> BlockChain:
        """Names of the prompt's blocks."""
        chain = self._means.new_chain(job.cache_salt, NATIVE)
        chain.extend(job.token_ids)
        return chain

    async def fetch(self, job: PrefillJob, chain: BlockChain) -> None:
        """Copies the part of the prompt's beginning that is worth it into the pool. Raises CancelledError alone."""
        hashes = chain.hashes[: sealed_blocks(len(job.token_ids) - 1, self._means.block_size)]
        if not any(self._means.index.num_held((block_hash,)) for block_hash in hashes):
            return
        try:
            num_here = await self._num_here(hashes)
            num_held = self._means.index.num_held(hashes[num_here:])
            compute_s = self._worth_s(hashes[num_here : num_here + num_held])
            if compute_s is not None:
                await self._fetch(hashes[: num_here + num_held], chain.parent_of(0), compute_s)
        except Exception:  # noqa: BLE001 - a tier is best-effort: its failure is logged, and costs a miss
            _LOG.exception("request %s: blocks were not fetched", job.request_id)
            self._count("fetch", "failed", len(hashes))

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
                _settle(self._lent.get(ticket_id), block_ids)
            case commands.PrefixFound(question_id, num_blocks):
                _settle(self._found.get(question_id), num_blocks)
            case commands.PullReserved(pull_id):
                _settle(self._reserved.get(pull_id), event)

    async def close(self) -> None:
        """Waits a moment for what is being copied, and leaves on disk what fits and was used last."""
        self._closing = True
        if self._stores:
            _, late = await asyncio.wait(self._stores, timeout=_CLOSE_S)
            for store in late:  # it waits for a step thread or a disk that hangs
                store.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        try:
            self._storer.submit(self._means.copies.flush, self._means.index.only_in_host(), _CLOSE_S)
            ended = asyncio.get_running_loop().run_in_executor(self._storer, self._means.copies.close)
            await asyncio.wait((ended,), timeout=2 * _CLOSE_S)
        finally:
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
        fetch = _Fetch(next(self._means.pull_ids))
        self._fetches.add(fetch)
        try:
            reserved = await self._reserve(fetch.pull_id, tuple(hashes))
            if reserved.block_ids is None:
                self._count("fetch", "no_room", len(hashes))
                return
            fetch.places = self._means.index.begin_read(hashes[reserved.num_cached :])
            fetched = await self._copy_in(fetch, reserved.block_ids[reserved.num_cached :], compute_s)
            if fetched is None:
                self._count("fetch", "late", len(fetch.places))
                return
            known = tuple(hashes[: reserved.num_cached + fetched.num_blocks])
            self._post(commands.AdmitPull(fetch.pull_id, root, known))
            self._count_fetched(fetched, fetch.places)
        finally:
            self._give_back(fetch)

    async def _copy_in(self, fetch: _Fetch, fresh: Sequence[int], compute_s: float) -> Fetched | None:
        """None: it took longer than computing would."""
        fetch.fresh = frozenset(fresh)
        jobs = list(zip(fetch.places, fresh, strict=False))
        fetch.work = self._fetcher.submit(self._means.copies.fetch, jobs, fetch.stop)
        try:
            async with asyncio.timeout(max(compute_s, _LEAST_DEADLINE_S)):
                return await asyncio.shield(asyncio.wrap_future(fetch.work))
        except TimeoutError:
            return None

    def _give_back(self, fetch: _Fetch) -> None:
        """Release what a fetch that has ended still holds; nothing once its blocks are admitted. While the thread may
        write to its blocks, they are quarantined."""
        fetch.stop.set()  # a thread that begins only now copies nothing
        if fetch.work is None or fetch.work.cancel() or fetch.work.done():
            self._post(commands.DiscardPull(fetch.pull_id))
            self._end_fetch(fetch)
            return
        loop = asyncio.get_running_loop()
        self._post(commands.DiscardPull(fetch.pull_id, fetch.fresh))
        fetch.work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._on_late_end, fetch))

    def _on_late_end(self, fetch: _Fetch) -> None:
        """The thread of a fetch that was given up has ended."""
        self._post(commands.Quiet(fetch.fresh))
        self._end_fetch(fetch)

    def _end_fetch(self, fetch: _Fetch) -> None:
        """Nothing of it goes on: unpin the places. A block that could not be read is not held any more."""
        self._fetches.discard(fetch)
        work = fetch.work
        fetched = None if work is None or work.cancelled() or work.exception() is not None else work.result()
        is_lost = fetched is not None and fetched.outcome not in (OK, LATE)
        lost = fetch.places[fetched.num_blocks].block_hash if fetched is not None and is_lost else None
        self._means.index.end_read(fetch.places, lost)
        if fetched is not None:
            self._note_rate(fetched, fetch.places)
        if lost is not None:
            self._storer.submit(self._means.copies.remove, (lost,))

    def _count_fetched(self, fetched: Fetched, places: Sequence[Place]) -> None:
        self._tokens_fetched += fetched.num_blocks * self._means.block_size
        self._count("fetch", OK, fetched.num_blocks)
        if fetched.outcome != OK:
            self._count("fetch", fetched.outcome, 1)

    async def _reserve(self, pull_id: int, hashes: tuple[bytes, ...]) -> commands.PullReserved:
        """DiscardPull must follow, however it ends."""
        answer: asyncio.Future[commands.PullReserved]
        answer = self._reserved[pull_id] = asyncio.get_running_loop().create_future()
        self._post(commands.ReservePull(pull_id, hashes))
        try:
            return await answer
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
        self._copying_out.add(ticket_id)
        try:
            block_ids = await self._lend(ticket_id, hashes, first)
            lent = dict(zip(hashes[first:], block_ids, strict=False))
            jobs = [(store, lent[store.block_hash]) for store in stores if store.block_hash in lent]
            await asyncio.wrap_future(self._storer.submit(self._means.copies.store, jobs))
        except TimeoutError:
            return frozenset()
        finally:  # whether or not the answer came: the step thread applies this behind the question
            self._post(commands.Release(ticket_id))
            self._copying_out.discard(ticket_id)
        return frozenset(store.block_hash for store, _ in jobs)

    async def _lend(self, ticket_id: bytes, hashes: tuple[bytes, ...], first: int) -> tuple[int, ...]:
        """Raises TimeoutError. Release must follow, however it ends."""
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


def _settle(answer: asyncio.Future[_Answer] | None, value: _Answer) -> None:
    """Nothing when no task waits for it any more."""
    if answer is not None and not answer.done():
        answer.set_result(value)
