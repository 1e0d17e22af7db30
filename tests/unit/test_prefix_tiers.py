"""Prefixes in host memory and on disk, with the real scheduler, pool, threads and disk: what comes back is what was
computed, and whatever is wrong with a tier is a miss that is counted."""

import asyncio
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import WorkerConfig
from cluster.hashing import keyed_chains
from cluster.messages import LayoutFingerprint, PrefillJob
from cluster.telemetry import Telemetry
from engine.layout import LayerShape, lay_out
from engine.pool import KvPool
from engine.step import DrawnToken, StepResult
from prefill_worker import commands
from prefill_worker.block_files import BadBlockFile, BlockFiles
from prefill_worker.limits import PrefillLimits
from prefill_worker.prefix_tiers import PrefixTiers, TierMeans
from prefill_worker.rates import RunningRate
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.tier_opening import open_tiers
from tests.prefill_jobs import prefill_job

_LAYOUT = LayoutFingerprint(weights="w", model_config="c", dtype="float32", block_table="t")
_BLOCK_SIZE, _NUM_BLOCKS = 4, 7  # two prompts of three blocks, and one to compute in
_BLOCK_BYTES = lay_out([LayerShape(1, 8, 8)], _BLOCK_SIZE, "float32").block_bytes


class _Worker:
    """A prefill worker without a model: a computed block is filled with a number of its prompt's tokens."""

    def __init__(self, disk: Path | None = None, *, slots: int = 16, files: int = 16) -> None:
        self.pool = KvPool(lay_out([LayerShape(1, 8, 8)], _BLOCK_SIZE, "float32"), _NUM_BLOCKS)
        config = WorkerConfig(
            model="m",
            prefix_host_memory=str(slots * _BLOCK_BYTES),
            prefix_disk=str(disk) if disk is not None else "",
            prefix_disk_space=str(files * BlockFiles.file_bytes(_BLOCK_BYTES)),
        )
        chains = keyed_chains(b"key", _BLOCK_SIZE)
        self.scheduler = PrefillScheduler(
            PrefillLimits(
                num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_prefill_tokens=512, max_num_seqs=4, max_queue=4
            ),
            new_chain=chains,
        )
        self.index, copies = open_tiers(config, self.pool, _LAYOUT)
        self.telemetry, self.compute = Telemetry(), RunningRate()
        self.compute.note(1.0, 1.0)  # slow: any copy is worth it
        means = TierMeans(
            self.index, copies, chains, _BLOCK_SIZE, _BLOCK_BYTES, self.compute, itertools.count(), self.telemetry
        )
        self.tiers = PrefixTiers(means, self._post)

    async def ask(self, *tokens: int) -> int:
        """Prefills a prompt; how many tokens were found. What was found must be what was computed."""
        job = prefill_job(tokens)
        chain = self.tiers.chain(job)
        await self.tiers.fetch(job, chain)
        (finished,) = [event for event in self._compute(job) if isinstance(event, commands.Finished)]
        self.tiers.store(chain)
        await self._stored()
        self.index.check()
        self.scheduler.check()
        return finished.num_cached

    def outcomes(self, action: str) -> dict[str, float]:
        names = ("ok", "damaged", "unreadable", "unwritable", "dropped", "late", "no_room", "failed")
        values = {n: self.telemetry.value("tandem_prefix_tier_blocks_total", action=action, outcome=n) for n in names}
        return {name: value for name, value in values.items() if value}

    def _compute(self, job: PrefillJob) -> list[commands.Event]:
        self._post(commands.Submit(b"ticket", job))
        _, plan = self.scheduler.plan(0.0)
        assert plan is not None
        (chunk,) = plan.chunks
        for number, block_id in enumerate(chunk.block_ids[: len(job.token_ids) // _BLOCK_SIZE]):
            value = job.token_ids[number * _BLOCK_SIZE] % 251
            if number * _BLOCK_SIZE < chunk.start:
                assert self.pool.raw[block_id].tolist() == [value] * _BLOCK_BYTES
            else:
                self.pool.raw[block_id] = value
        return list(self.scheduler.complete(plan, StepResult(((DrawnToken(1),),)), 0.0))

    def _post(self, command: commands.Command) -> None:
        for event in self.scheduler.apply(command, 0.0):
            if isinstance(event, commands.PrefixLent | commands.PrefixFound | commands.PullReserved):
                asyncio.get_running_loop().call_soon(self.tiers.on_event, event)

    async def _stored(self) -> None:
        while tasks := [task for task in asyncio.all_tasks() if task.get_name() == "store prefix"]:
            await asyncio.wait(tasks, timeout=10)


def _prompt(number: int, num_blocks: int = 3) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + num_blocks * _BLOCK_SIZE + 1))


async def _fill(worker: _Worker, *numbers: int) -> None:
    """Two of these prompts leave nothing of another in the pool."""
    for number in numbers:
        await worker.ask(*_prompt(number))


async def test_what_the_pool_evicted_comes_back_from_host_memory() -> None:
    worker = _Worker()
    await _fill(worker, 1, 2, 3)
    assert await worker.ask(*_prompt(1)) == 12
    assert worker.outcomes("fetch") == {"ok": 3}
    await worker.tiers.close()


async def test_what_host_memory_has_no_room_for_comes_back_from_disk(tmp_path: Path) -> None:
    worker = _Worker(tmp_path, slots=3)
    await _fill(worker, 1, 2, 3)
    assert await worker.ask(*_prompt(1)) == 12
    assert worker.outcomes("demote") == {"ok": 9}
    await worker.tiers.close()


async def test_a_restart_finds_what_was_on_disk_and_what_was_in_host_memory(tmp_path: Path) -> None:
    worker = _Worker(tmp_path, slots=6)
    await _fill(worker, 1, 2, 3)
    await worker.tiers.close()

    again = _Worker(tmp_path)
    assert [await again.ask(*_prompt(number)) for number in (1, 2, 3)] == [12, 12, 12]
    await again.tiers.close()


async def test_files_are_their_owners_alone_and_of_one_layout(tmp_path: Path) -> None:
    worker = _Worker(tmp_path)
    await _fill(worker, 1)
    await worker.tiers.close()
    (folder,) = tmp_path.iterdir()
    blocks = [path for path in folder.iterdir() if path.name != "lock"]
    assert len(blocks) == 3
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700

    other = BlockFiles(tmp_path, LayoutFingerprint("other", "c", "float32", "t"), _BLOCK_BYTES)
    assert other.hashes() == []
    other.close()


async def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = _Worker(tmp_path, slots=3), _Worker(tmp_path, slots=3)
    await _fill(first, 1, 2)
    await _fill(second, 1, 2)
    assert (first.index.num_on_disk, second.index.num_on_disk) == (3, 0)
    for worker in (first, second):
        await worker.tiers.close()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def _empty(path: Path) -> None:
    os.truncate(path, 3)


def _rename(path: Path) -> None:
    """Another block's file under this one's name."""
    other = next(p for p in path.parent.iterdir() if p != path and p.name != "lock")
    shutil.copy(other, path)


@pytest.mark.parametrize(
    ("spoil", "outcome"),
    [
        (_flip, "damaged"),
        (_truncate, "damaged"),
        (_empty, "damaged"),
        (_rename, "damaged"),
        (Path.unlink, "unreadable"),
    ],
)
async def test_a_file_that_is_not_as_it_was_written_is_a_miss_and_never_enters_the_pool(
    tmp_path: Path, spoil: Callable[[Path], None], outcome: str
) -> None:
    worker = _Worker(tmp_path, slots=3)
    await _fill(worker, 1, 2, 3)
    second = worker.tiers.chain(prefill_job(_prompt(1))).hashes[1].hex()
    spoil(next(tmp_path.glob(f"*/{second}")))

    assert await worker.ask(*_prompt(1)) == 4  # the block before it
    assert worker.outcomes("fetch") == {"ok": 1, outcome: 1}
    await _fill(worker, 4, 5)
    assert await worker.ask(*_prompt(1)) == 12  # it was computed, and written anew
    await worker.tiers.close()


async def test_host_memory_that_changed_is_a_miss() -> None:
    worker = _Worker()
    await _fill(worker, 1, 2, 3)
    worker.tiers._means.copies._slots.add_(1)
    assert await worker.ask(*_prompt(1)) == 0
    assert worker.outcomes("fetch") == {"damaged": 1}
    await worker.tiers.close()


async def test_a_folder_that_vanishes_is_a_miss_and_prompts_go_on(tmp_path: Path) -> None:
    worker = _Worker(tmp_path / "prefixes", slots=3)
    await _fill(worker, 1, 2, 3)
    shutil.rmtree(tmp_path / "prefixes")

    assert await worker.ask(*_prompt(1)) == 0
    assert worker.outcomes("fetch") == {"unreadable": 1}
    assert worker.outcomes("demote")["unwritable"] == 3
    await worker.tiers.close()


async def test_a_full_disk_is_counted_and_what_it_has_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes no byte: every file that is opened for writing from now on is a link to it."""
    worker = _Worker(tmp_path, slots=3)
    await _fill(worker, 1, 2)
    real_open = os.open
    monkeypatch.setattr(
        "prefill_worker.block_files.os.open",
        lambda path, flags, mode=0o777: real_open(
            "/dev/full" if flags & os.O_WRONLY else path, flags & ~os.O_CREAT, mode
        ),
    )
    await _fill(worker, 3)
    assert worker.outcomes("demote") == {"ok": 3, "unwritable": 3}
    assert list(tmp_path.glob("*/*.draft")) == []
    assert await worker.ask(*_prompt(1)) == 12
    await worker.tiers.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_that_may_not_be_written_is_a_tier_less(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    worker = _Worker(tmp_path / "prefixes", slots=3)
    await _fill(worker, 1, 2, 3)
    assert worker.index.num_on_disk == 0
    await worker.tiers.close()


async def test_a_path_that_is_no_folder_is_a_tier_less(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker = _Worker(tmp_path / "file", slots=3)
    await _fill(worker, 1, 2, 3)
    assert worker.index.num_on_disk == 0
    assert await worker.ask(*_prompt(3)) == 12
    await worker.tiers.close()


async def test_under_load_what_cannot_be_copied_at_once_is_dropped_and_counted() -> None:
    worker = _Worker()
    chains = [worker.tiers.chain(prefill_job(_prompt(number))) for number in range(6)]
    for chain in chains:
        worker.tiers.store(chain)
    assert worker.outcomes("store") == {"dropped": 6}
    await worker._stored()
    await worker.tiers.close()


async def test_copying_a_block_out_is_no_use_of_it() -> None:
    """Else every block would seem to have been used again."""
    worker = _Worker()
    await _fill(worker, 1)
    uses = worker.scheduler._blocks.pool._cache._eviction._last_use.values()  # type: ignore[attr-defined]
    assert [use.num_uses for use in uses] == [1, 1, 1]
    await worker.tiers.close()


def test_a_header_cut_short_is_said_to_be(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, _LAYOUT, 8)
    files.write(b"h" * 16, b"d" * 16, memoryview(b"12345678"))
    os.truncate(next(tmp_path.glob("*/6868*")), 20)
    with pytest.raises(BadBlockFile, match="header has 20 bytes"):
        files.read(b"h" * 16, memoryview(bytearray(8)))
    files.close()


async def test_a_disk_that_hangs_costs_a_bounded_wait_then_none_and_its_blocks_only_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _Worker(tmp_path, slots=3)
    await _fill(worker, 1, 2, 3)
    worker.compute.note(1e9, 1.0)  # computing is quick: the shortest deadline
    hangs, reads = threading.Event(), list[bytes]()
    real_read = BlockFiles.read

    def read(self: BlockFiles, block_hash: bytes, into: memoryview) -> bytes:
        reads.append(block_hash)
        hangs.wait(30)
        return real_read(self, block_hash, into)

    monkeypatch.setattr(BlockFiles, "read", read)
    job = prefill_job(_prompt(1))
    await worker.tiers.fetch(job, worker.tiers.chain(job))
    assert worker.outcomes("fetch") == {"late": 3}
    assert worker.scheduler._blocks.pool.counts()["quarantined"] == 3

    hangs.set()
    await asyncio.wrap_future(worker.tiers._fetcher.submit(int))  # behind the one that hung
    assert worker.scheduler._blocks.pool.counts()["quarantined"] == 0
    await worker.tiers.fetch(job, worker.tiers.chain(job))
    assert len(reads) == 1, "a slow disk is left alone"
    worker.scheduler.check()
    worker.index.check()
    await worker.tiers.close()
