"""The tiers under the block pool: host memory and disk keep blocks that the pool evicts; a fetch brings them back.

`PrefixTiers` lives on the event loop. It owns the tier index (where each block is stored), the copies in progress, and
their blocks of the pool: leases on blocks that are copied out, reservations of blocks that are copied in. Every copy
releases its blocks without an await, even if an exception ends it. The tiers are best-effort: when a tier fails, is
full or takes longer than computing would, the prompt is computed and a counter names the reason.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cluster import holders
from cluster.messages import LayoutFingerprint, PrefillJob
from cluster.observe.telemetry import Telemetry
from cluster.protocol import tickets
from cluster.protocol.hashing import NATIVE, BlockChain, NewChain
from cluster.request_size import sealed_blocks
from cluster.settings.config import WorkerConfig
from cluster.settings.worker_settings import parse_bytes
from engine.scheduling import cache_commands, commands
from engine.scheduling.commands import Quiet, Release
from engine.steps.questions import StepInbox
from kvtransfer.digests import VerifyMode
from kvtransfer.memory import PoolMemory
from prefill_worker.prefixes.prefix_pulls import MAX_COST_RATIO, MIN_TIMEOUT_S, ComputeSeconds
from prefill_worker.prefixes.tier_index import Place, Store, TierIndex
from prefill_worker.prefixes.tier_storage import LATE, OK, BlockFiles, Fetched, TierStorage

_LOG = logging.getLogger("tandem.prefill.tiers")
_MAX_STORES = 4  # prompts whose blocks are being copied out or wait for it; the blocks of one more are dropped
_ANSWER_TIMEOUT_S = 30.0  # of the step thread
_NEWEST_SHARE = 0.2  # of the newest copy in a rate
_RATE_EXPIRES_S = 10.0  # a measured rate older than this no longer rules a fetch out
_CLOSE_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer")


def open_tiers(config: WorkerConfig, pool: PoolMemory, fingerprint: LayoutFingerprint) -> tuple[TierIndex, TierStorage]:
    """Return the configured tiers, with the files of an earlier run. A disk that cannot be used is logged and left
    out.
    """
    files, hashes = _open_files(config, pool, fingerprint)
    num_slots = config.prefix_host_bytes // pool.block_bytes
    file_bytes = BlockFiles.file_bytes(pool.block_bytes)
    max_files = parse_bytes(config.prefix_disk_space) // file_bytes if files is not None else 0
    index = TierIndex(num_slots, max_files)
    storage = TierStorage(pool, num_slots, files, refuses_unverified=VerifyMode(config.kv_verify).verifies_all)
    storage.remove(index.add_files(hashes))
    _LOG.info(
        "tiers of the prefix cache: room for %d blocks in host memory and %d on disk, where %d were found",
        num_slots,
        max_files,
        index.num_on_disk,
    )
    return index, storage


def _open_files(
    config: WorkerConfig, pool: PoolMemory, fingerprint: LayoutFingerprint
) -> tuple[BlockFiles | None, list[bytes]]:
    if not config.prefix_disk:
        return None, []
    try:
        files = BlockFiles(Path(config.prefix_disk), fingerprint, pool.block_bytes)
        return files, files.hashes()
    except OSError as error:
        why = "another process uses it" if isinstance(error, BlockingIOError) else error.strerror
        _LOG.warning("the prefix cache has no disk tier: cannot use --prefix-disk %s: %s", config.prefix_disk, why)
        return None, []


@dataclass(frozen=True, slots=True)
class TierResources:
    """The parts of a worker that its tiers use."""

    index: TierIndex
    storage: TierStorage
    new_chain: NewChain
    block_size: int
    block_bytes: int
    compute_s: ComputeSeconds
    pull_ids: Iterator[int]  # unique among all pulls, fetches from tiers and look-ups of this worker
    telemetry: Telemetry


@dataclass(slots=True, eq=False)
class _Fetch:
    """The blocks reserved for one fetch, and the places of the tiers that it has pinned."""

    pull_id: int
    places: tuple[Place, ...] = ()
    fresh: frozenset[int] = frozenset()  # blocks that the thread writes to
    stop: threading.Event = field(default_factory=threading.Event)
    work: Future[Fetched] | None = None  # None: not submitted


class _CopyRate:
    """Bytes copied per second: a moving average that follows changes within a dozen copies."""

    def __init__(self) -> None:
        self.per_s: float | None = None  # None: nothing was measured yet

    def note(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            rate = num_bytes / seconds
            self.per_s = rate if self.per_s is None else self.per_s + _NEWEST_SHARE * (rate - self.per_s)


class PrefixTiers:
    def __init__(self, resources: TierResources, steps: StepInbox[commands.Command]) -> None:
        self._resources = resources
        self._steps = steps
        self._host_rate, self._disk_rate = _CopyRate(), _CopyRate()
        self._measured_s = 0.0  # when one of the rates was last measured
        self._fetcher = ThreadPoolExecutor(1, "tier-fetch")
        self._storer = ThreadPoolExecutor(1, "tier-store")
        self._stores: set[asyncio.Task[None]] = set()
        self._copying_out: set[bytes] = set()  # tickets that lease blocks, or have asked for it
        self._fetches: set[_Fetch] = set()
        self._tokens_fetched = 0
        self._closing = False

    def figures(self) -> dict[str, float]:
        index = self._resources.index
        return {
            "host_tier_blocks": float(index.num_in_host),
            "disk_tier_blocks": float(index.num_on_disk),
            "tokens_from_tiers": float(self._tokens_fetched),
        }

    def owners(self) -> Iterator[str]:
        """Return the names of the copies in progress, as holders of blocks."""
        yield from (holders.hand_off(fetch.pull_id) for fetch in self._fetches)
        yield from map(holders.ticket, self._copying_out)

    def chain(self, job: PrefillJob) -> BlockChain:
        """Return the hashes of the prompt's blocks."""
        chain = self._resources.new_chain(job.cache_salt, NATIVE)
        chain.extend(job.token_ids)
        return chain

    async def fetch(self, job: PrefillJob, chain: BlockChain) -> None:
        """Copy a part of the prompt's prefix from the tiers into the pool if that is faster than computing it. Raises
        CancelledError only."""
        hashes = chain.hashes[: sealed_blocks(len(job.token_ids) - 1, self._resources.block_size)]
        if not any(self._resources.index.num_held((block_hash,)) for block_hash in hashes):
            return
        try:
            num_cached = await self._num_cached(hashes)
            num_held = self._resources.index.num_held(hashes[num_cached:])
            compute_s = self._compute_s_if_cheaper(hashes[num_cached : num_cached + num_held], num_cached)
            if compute_s is not None:
                await self._fetch(hashes[: num_cached + num_held], chain.parent_of(0), compute_s)
        except Exception:  # noqa: BLE001 - a tier is best-effort: its failure is logged, and the prompt is computed
            _LOG.exception("request %s: blocks were not fetched from a tier", job.request_id)
            self._count("fetch", "failed", len(hashes))

    def store(self, chain: BlockChain) -> None:
        """Start to copy out the blocks of a computed prompt that the host tier lacks. Returns at once."""
        hashes = tuple(chain.hashes)
        first = self._resources.index.first_missing(hashes)
        if first == len(hashes) or self._closing:
            return
        if len(self._stores) >= _MAX_STORES:
            self._count("store", "dropped", len(hashes) - first)
            return
        task = asyncio.create_task(self._store(hashes, first), name="store prefix")
        self._stores.add(task)
        task.add_done_callback(self._stores.discard)

    async def close(self) -> None:
        """Wait up to 5 s for stores in progress, then up to 5 s more while the most recently used blocks are written
        to disk."""
        self._closing = True
        if self._stores:
            _, late = await asyncio.wait(self._stores, timeout=_CLOSE_TIMEOUT_S)
            for store in late:  # it waits for a step thread or a disk that hangs
                store.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        try:
            storage, index = self._resources.storage, self._resources.index
            self._storer.submit(storage.flush, index.only_in_host(), _CLOSE_TIMEOUT_S)
            closed = asyncio.get_running_loop().run_in_executor(self._storer, storage.close)
            await asyncio.wait((closed,), timeout=2 * _CLOSE_TIMEOUT_S)
        except RuntimeError as error:  # no thread can be started: the worker still ends in order
            _LOG.warning("the blocks in host memory were not written to disk: %s", error)
        finally:
            for executor in (self._storer, self._fetcher):
                executor.shutdown(wait=False, cancel_futures=True)

    def _compute_s_if_cheaper(self, hashes: Sequence[bytes], num_cached: int) -> float | None:
        """Return the estimated seconds to compute these blocks; None if reading them is not clearly cheaper. If the
        measured rate has expired, reading is tried, so that it is measured again.
        """
        resources = self._resources
        if not hashes:
            return None
        compute_s = resources.compute_s(len(hashes) * resources.block_size, num_cached * resources.block_size)
        rate = self._rate(resources.index.first_missing(hashes) < len(hashes)).per_s
        read_s = len(hashes) * resources.block_bytes / rate if rate is not None else 0.0
        is_expired = asyncio.get_running_loop().time() - self._measured_s > _RATE_EXPIRES_S
        return compute_s if is_expired or read_s <= MAX_COST_RATIO * compute_s else None

    def _rate(self, reads_disk: bool) -> _CopyRate:
        return self._disk_rate if reads_disk else self._host_rate

    def _note_rate(self, fetched: Fetched, places: Sequence[Place]) -> None:
        """Record the rate of a fetch. A fetch without a result counts as one block."""
        self._measured_s = asyncio.get_running_loop().time()
        num_bytes = max(1, fetched.num_blocks) * self._resources.block_bytes
        self._rate(any(place.slot is None for place in places)).note(num_bytes, fetched.seconds)

    async def _num_cached(self, hashes: Sequence[bytes]) -> int:
        found = await self._steps.ask(cache_commands.FindPrefix(next(self._resources.pull_ids), tuple(hashes)))
        return found.num_blocks

    async def _fetch(self, hashes: Sequence[bytes], root: bytes, compute_s: float) -> None:
        fetch = _Fetch(next(self._resources.pull_ids))
        self._fetches.add(fetch)
        try:
            reserved = await self._steps.ask(cache_commands.ReservePull(fetch.pull_id, tuple(hashes)))
            if reserved.block_ids is None:
                self._count("fetch", "no_room", len(hashes))
                return
            fetch.places = self._resources.index.begin_read(hashes[reserved.num_cached :])
            fetched = await self._copy_in(fetch, reserved.block_ids[reserved.num_cached :], compute_s)
            if fetched is None:
                self._count("fetch", "late", len(fetch.places))
                return
            filled = tuple(hashes[: reserved.num_cached + fetched.num_blocks])
            self._steps.post(cache_commands.AdmitPull(fetch.pull_id, root, filled, fetched.unverified))
            self._count_fetched(fetched, fetch.places)
        finally:
            self._release(fetch)

    async def _copy_in(self, fetch: _Fetch, fresh: Sequence[int], compute_s: float) -> Fetched | None:
        """Copy blocks into the pool. Returns None if the copy took longer than computing the blocks would."""
        fetch.fresh = frozenset(fresh)
        jobs = list(zip(fetch.places, fresh, strict=False))
        fetch.work = self._fetcher.submit(self._resources.storage.fetch, jobs, fetch.stop)
        try:
            async with asyncio.timeout(max(compute_s, MIN_TIMEOUT_S)):
                return await asyncio.shield(asyncio.wrap_future(fetch.work))
        except TimeoutError:
            return None

    def _release(self, fetch: _Fetch) -> None:
        """Release the blocks that an ended fetch still holds; none if they were admitted. Its blocks are quarantined
        while the thread may write to them.
        """
        fetch.stop.set()  # a thread that starts only now copies nothing
        if fetch.work is None or fetch.work.cancel() or fetch.work.done():
            self._steps.post(commands.Discard(fetch.pull_id))
            self._end_fetch(fetch)
            return
        loop = asyncio.get_running_loop()
        self._steps.post(commands.Discard(fetch.pull_id, fetch.fresh))
        fetch.work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._on_late_end, fetch))

    def _on_late_end(self, fetch: _Fetch) -> None:
        """Handle the end of the thread of a fetch that had timed out."""
        self._steps.post(Quiet(fetch.fresh))
        self._end_fetch(fetch)

    def _end_fetch(self, fetch: _Fetch) -> None:
        """Unpin the places of a fetch whose thread has ended. A block that could not be read leaves the tiers."""
        self._fetches.discard(fetch)
        work = fetch.work
        fetched = None if work is None or work.cancelled() or work.exception() is not None else work.result()
        is_lost = fetched is not None and fetched.outcome not in (OK, LATE)
        lost = fetch.places[fetched.num_blocks].block_hash if fetched is not None and is_lost else None
        self._resources.index.end_read(fetch.places, lost)
        if fetched is not None:
            self._note_rate(fetched, fetch.places)
        if lost is not None:
            self._remove((lost,))

    def _remove(self, block_hashes: Sequence[bytes]) -> None:
        """Delete the files of these blocks, after all earlier work of the storing thread."""
        if block_hashes:
            with suppress(RuntimeError, MemoryError):  # no thread can be started now; that of the next copy removes it
                self._storer.submit(self._resources.storage.remove, block_hashes)

    def _count_fetched(self, fetched: Fetched, places: Sequence[Place]) -> None:
        self._tokens_fetched += fetched.num_blocks * self._resources.block_size
        self._count("fetch", OK, fetched.num_blocks)
        if fetched.outcome != OK:
            self._count("fetch", fetched.outcome, 1)

    async def _store(self, hashes: tuple[bytes, ...], first: int) -> None:
        """Demote blocks to empty their slots, then lease and copy pool blocks. In this order a disk that hangs pins no
        block of the pool.
        """
        index, storage = self._resources.index, self._resources.storage
        stores = index.begin_store(hashes[first:])
        demoted, stored = None, frozenset[bytes]()
        try:
            demoted = await asyncio.wrap_future(self._storer.submit(storage.demote, stores))
            stored = await self._copy_out(stores, hashes, first)
        except Exception:  # noqa: BLE001 - a tier is best-effort: its failure is logged and counted
            _LOG.exception("blocks were not stored in a tier")
        finally:
            for store, outcome in zip(stores, demoted or ["failed"] * len(stores), strict=True):
                index.end_store(store, is_stored=store.block_hash in stored, is_demoted=outcome == OK)
                if store.demoted is not None:
                    self._count("demote", outcome, 1)
            if demoted is None:  # its thread may have done a part of the work, or may do it later
                self._remove(index.uncounted(stores))
            self._count("store", OK, len(stored))
            self._count("store", "failed", len(stores) - len(stored))

    async def _copy_out(self, stores: Sequence[Store], hashes: tuple[bytes, ...], first: int) -> frozenset[bytes]:
        """Return the hashes of the blocks that were stored; blocks that the pool has evicted since are missing."""
        ticket_id = secrets.token_bytes(tickets.TICKET_ID_BYTES)
        self._copying_out.add(ticket_id)
        try:
            leased = await self._lease(ticket_id, hashes, first)
            block_ids = dict(zip(hashes[first:], leased.block_ids, strict=False))
            jobs = [(store, block_ids[store.block_hash]) for store in stores if store.block_hash in block_ids]
            copying = self._storer.submit(self._resources.storage.store, jobs, leased.unverified)
            await asyncio.wrap_future(copying)
        except TimeoutError:
            return frozenset()
        finally:  # also without an answer: the step thread applies this command after LeaseForCopy
            self._steps.post(Release(ticket_id))
            self._copying_out.discard(ticket_id)
        return frozenset(store.block_hash for store, _ in jobs)

    async def _lease(self, ticket_id: bytes, hashes: tuple[bytes, ...], first: int) -> cache_commands.LeasedForCopy:
        """Lease the cached blocks from index `first` on. Release must follow in any case. Raises TimeoutError."""
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await self._steps.ask(cache_commands.LeaseForCopy(ticket_id, hashes, first))

    def _count(self, action: str, outcome: str, num_blocks: int) -> None:
        self._resources.telemetry.count("tandem_prefix_tier_blocks_total", num_blocks, action=action, outcome=outcome)
