"""The tiers with the real scheduler, pool, threads and disk: a fetched block is the block that was computed, and every
failure of a tier is a counted miss."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.messages import LayoutFingerprint
from kvtransfer.digests import digest_tensor
from prefill_worker.prefixes.tier_storage import BadBlockFile, BlockFiles, StoredBlock
from tests.prefill_jobs import prefill_job
from tests.unit.prefill_worker.tier_bench import BLOCK_BYTES, LAYOUT, TierBench, prompt

_ANOTHER_USER = 12_345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


async def _fill(worker: TierBench, *numbers: int) -> None:
    """Compute these prompts. After two of them the pool holds no block of an earlier one."""
    for number in numbers:
        await worker.ask(*prompt(number))


async def test_evicted_blocks_are_fetched_from_host_memory() -> None:
    worker = TierBench()
    await _fill(worker, 1, 2, 3)
    assert await worker.ask(*prompt(1)) == 12
    assert worker.outcomes("fetch") == {"ok": 3}
    await worker.tiers.close()


async def test_demoted_blocks_are_fetched_from_disk(tmp_path: Path) -> None:
    worker = TierBench(tmp_path, slots=3)
    await _fill(worker, 1, 2, 3)
    assert await worker.ask(*prompt(1)) == 12
    assert worker.outcomes("demote") == {"ok": 9}
    await worker.tiers.close()


async def test_a_restarted_worker_finds_the_blocks_of_both_tiers_on_disk(tmp_path: Path) -> None:
    worker = TierBench(tmp_path, slots=6)
    await _fill(worker, 1, 2, 3)
    await worker.tiers.close()

    again = TierBench(tmp_path)
    assert [await again.ask(*prompt(number)) for number in (1, 2, 3)] == [12, 12, 12]
    await again.tiers.close()


async def test_a_block_keeps_its_provenance_in_both_tiers_and_after_a_restart(tmp_path: Path) -> None:
    """The second block of the prompt was pulled from another worker and not verified."""
    worker, job = TierBench(tmp_path, slots=3), prefill_job(prompt(1))
    chain = worker.tiers.chain(job)
    worker.compute_prompt(job)
    pool = worker.scheduler._pool
    pool._unverified.add(pool.find(chain.hashes)[1])
    worker.tiers.store(chain)
    await worker.stored()

    async def unverified_after_fetch(bench: TierBench) -> list[bool]:
        await _fill(bench, 2, 3)  # evicts the prompt from the pool
        assert bench.scheduler._pool.find(chain.hashes) == ()
        assert await bench.ask(*prompt(1)) == 12
        found = bench.scheduler._pool.find(chain.hashes)
        return [block_id in bench.scheduler._pool.unverified_among(found) for block_id in found]

    assert await unverified_after_fetch(worker) == [False, True, False]
    await worker.tiers.close()
    again = TierBench(tmp_path)
    assert await unverified_after_fetch(again) == [False, True, False]
    await again.tiers.close()
    strict = TierBench(tmp_path, kv_verify="all")
    assert await strict.ask(*prompt(1)) == 4, "the unverified block and the block after it are computed"
    assert strict.outcomes("fetch") == {"ok": 1, "unverified": 1}
    await strict.tiers.close()


async def test_files_are_private_and_separate_for_each_layout(tmp_path: Path) -> None:
    worker = TierBench(tmp_path)
    await _fill(worker, 1)
    await worker.tiers.close()
    (folder,) = tmp_path.iterdir()
    blocks = [path for path in folder.iterdir() if path.name != "lock"]
    assert len(blocks) == 3
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700

    other = BlockFiles(tmp_path, LayoutFingerprint("other", "c", "float32", "t"), BLOCK_BYTES)
    assert other.hashes() == []
    other.close()


@only_root
async def test_a_folder_that_another_user_made_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another user of the machine can make the folder first where --prefix-disk is open to all, such as /tmp."""
    await TierBench(tmp_path, slots=3).tiers.close()
    (folder,) = tmp_path.iterdir()
    os.chown(folder, _ANOTHER_USER, -1)
    worker = TierBench(tmp_path, slots=3)
    assert f"cannot use --prefix-disk {tmp_path}: {folder} belongs to another user ({_ANOTHER_USER})" in caplog.text
    assert f"root_squash, root's folders get another owner there: run the worker as user {_ANOTHER_USER}" in caplog.text
    await _fill(worker, 1, 2)
    assert worker.index.num_on_disk == 0
    assert [path.name for path in folder.iterdir()] == ["lock"]
    await worker.tiers.close()


async def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await TierBench(tmp_path / "tier", slots=3).tiers.close()
    (folder,) = (tmp_path / "tier").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    await TierBench(tmp_path / "tier", slots=3).tiers.close()
    assert f"cannot use --prefix-disk {tmp_path}/tier: " in caplog.text


@only_root
async def test_a_folder_that_was_open_to_others_is_closed_and_their_files_are_no_blocks(tmp_path: Path) -> None:
    worker = TierBench(tmp_path, slots=3)
    await _fill(worker, 1, 2)
    await worker.tiers.close()
    (folder,) = tmp_path.iterdir()
    blocks = [path for path in folder.iterdir() if path.name != "lock"]
    folder.chmod(0o777)
    again = TierBench(tmp_path, slots=3)
    assert (folder.stat().st_mode & 0o777, again.index.num_on_disk) == (0o700, len(blocks))
    await again.tiers.close()
    os.chown(blocks[0], _ANOTHER_USER, -1)
    third = TierBench(tmp_path, slots=3)
    assert third.index.num_on_disk == len(blocks) - 1
    await third.tiers.close()


async def test_a_folder_has_one_process_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = TierBench(tmp_path, slots=3), TierBench(tmp_path, slots=3)
    assert f"cannot use --prefix-disk {tmp_path}: another process uses it" in caplog.text
    await _fill(first, 1, 2)
    await _fill(second, 1, 2)
    assert (first.index.num_on_disk, second.index.num_on_disk) == (3, 0)
    for worker in (first, second):
        await worker.tiers.close()


async def test_a_disk_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    await TierBench(tmp_path / "file" / "tier").tiers.close()
    assert f"cannot use --prefix-disk {tmp_path}/file/tier: Not a directory" in caplog.text


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def _empty(path: Path) -> None:
    os.truncate(path, 3)


def _rename(path: Path) -> None:
    """Rename another block's file to the name of this block's."""
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
async def test_a_changed_file_is_a_miss_and_never_enters_the_pool(
    tmp_path: Path, spoil: Callable[[Path], None], outcome: str
) -> None:
    worker = TierBench(tmp_path, slots=3)
    await _fill(worker, 1, 2, 3)
    second = worker.tiers.chain(prefill_job(prompt(1))).hashes[1].hex()
    spoil(next(tmp_path.glob(f"*/{second}")))

    assert await worker.ask(*prompt(1)) == 4  # the block before it
    assert worker.outcomes("fetch") == {"ok": 1, outcome: 1}
    await _fill(worker, 4, 5)
    assert await worker.ask(*prompt(1)) == 12  # the block was computed and written again
    await worker.tiers.close()


async def test_a_file_whose_bytes_and_digest_were_changed_together_is_taken_for_its_block(tmp_path: Path) -> None:
    """As docs/security.md says: digests of files have no key, also with --kv-verify keyed."""
    worker = TierBench(tmp_path, slots=3, kv_verify="keyed")
    await _fill(worker, 1, 2, 3)
    job = prefill_job(prompt(1))
    chain = worker.tiers.chain(job)
    path = next(tmp_path.glob(f"*/{chain.hashes[0].hex()}"))
    genuine = path.read_bytes()
    forged = bytes(range(256)) * (BLOCK_BYTES // 256 + 1)
    old, new = (_digest(data) for data in (genuine[-BLOCK_BYTES:], forged[:BLOCK_BYTES]))
    path.write_bytes(genuine[:-BLOCK_BYTES].replace(old, new) + forged[:BLOCK_BYTES])

    await worker.tiers.fetch(job, chain)

    assert worker.outcomes("fetch") == {"ok": 3}
    assert list(forged[:BLOCK_BYTES]) in worker.pool.raw.tolist()
    await worker.tiers.close()


def _digest(data: bytes) -> bytes:
    return digest_tensor(torch.tensor([list(data)], dtype=torch.uint8))[0]


async def test_changed_host_memory_is_a_miss() -> None:
    worker = TierBench()
    await _fill(worker, 1, 2, 3)
    worker.tiers._resources.storage._slots.add_(1)
    assert await worker.ask(*prompt(1)) == 0
    assert worker.outcomes("fetch") == {"damaged": 1}
    await worker.tiers.close()


async def test_a_deleted_folder_is_a_miss_and_prompts_are_computed(tmp_path: Path) -> None:
    worker = TierBench(tmp_path / "prefixes", slots=3)
    await _fill(worker, 1, 2, 3)
    shutil.rmtree(tmp_path / "prefixes")

    assert await worker.ask(*prompt(1)) == 0
    assert worker.outcomes("fetch") == {"unreadable": 1}
    assert worker.outcomes("demote")["unwritable"] == 3
    await worker.tiers.close()


async def test_a_full_disk_is_counted_and_its_files_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes no byte: every file that is opened for writing from now on is a link to it."""
    worker = TierBench(tmp_path, slots=3)
    await _fill(worker, 1, 2)
    real_open = os.open
    monkeypatch.setattr(
        "prefill_worker.prefixes.tier_storage.os.open",
        lambda path, flags, mode=0o777: real_open(
            "/dev/full" if flags & os.O_WRONLY else path, flags & ~os.O_CREAT, mode
        ),
    )
    await _fill(worker, 3)
    assert worker.outcomes("demote") == {"ok": 3, "unwritable": 3}
    assert list(tmp_path.glob("*/*.draft")) == []
    assert await worker.ask(*prompt(1)) == 12
    await worker.tiers.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_an_unwritable_folder_leaves_out_the_disk_tier(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    worker = TierBench(tmp_path / "prefixes", slots=3)
    await _fill(worker, 1, 2, 3)
    assert worker.index.num_on_disk == 0
    await worker.tiers.close()


async def test_a_path_that_is_not_a_folder_leaves_out_the_disk_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker = TierBench(tmp_path / "file", slots=3)
    await _fill(worker, 1, 2, 3)
    assert worker.index.num_on_disk == 0
    assert await worker.ask(*prompt(3)) == 12
    await worker.tiers.close()


async def test_stores_beyond_four_prompts_are_dropped_and_counted() -> None:
    worker = TierBench()
    chains = [worker.tiers.chain(prefill_job(prompt(number))) for number in range(6)]
    for chain in chains:
        worker.tiers.store(chain)
    assert worker.outcomes("store") == {"dropped": 6}
    await worker.stored()
    await worker.tiers.close()


async def test_copying_a_block_to_a_tier_does_not_count_as_a_use() -> None:
    """Otherwise every block would count as used again."""
    worker = TierBench()
    await _fill(worker, 1)
    uses = worker.scheduler._pool._cache._eviction._last_use.values()  # type: ignore[attr-defined]
    assert [use.num_uses for use in uses] == [1, 1, 1]
    await worker.tiers.close()


def test_a_truncated_header_is_reported(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, LAYOUT, 8)
    files.write(b"h" * 16, StoredBlock(b"d" * 16, is_verified=True), memoryview(b"12345678"))
    os.truncate(next(tmp_path.glob("*/6868*")), 20)
    with pytest.raises(BadBlockFile, match="header has 20 bytes"):
        files.read(b"h" * 16, memoryview(bytearray(8)))
    files.close()


async def test_a_hung_disk_delays_one_prompt_by_the_timeout_and_quarantines_blocks_until_the_read_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = TierBench(tmp_path, slots=3)
    await _fill(worker, 1, 2, 3)
    worker.token_s = 1e-9  # computing is quick: the shortest deadline
    hangs, reads = threading.Event(), list[bytes]()
    real_read = BlockFiles.read

    def read(self: BlockFiles, block_hash: bytes, into: memoryview) -> StoredBlock:
        reads.append(block_hash)
        hangs.wait(30)
        return real_read(self, block_hash, into)

    monkeypatch.setattr(BlockFiles, "read", read)
    job = prefill_job(prompt(1))
    await worker.tiers.fetch(job, worker.tiers.chain(job))
    assert worker.outcomes("fetch") == {"late": 3}
    assert worker.scheduler._pool.counts()["quarantined"] == 3

    hangs.set()
    await asyncio.wrap_future(worker.tiers._fetcher.submit(int))  # runs after the read that hung
    assert worker.scheduler._pool.counts()["quarantined"] == 0
    await worker.tiers.fetch(job, worker.tiers.chain(job))
    assert len(reads) == 1, "a slow disk is left alone"
    worker.scheduler.check()
    worker.index.check()
    await worker.tiers.close()
