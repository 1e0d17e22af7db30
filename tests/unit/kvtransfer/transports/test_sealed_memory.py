"""A process that is given the descriptor of a pool can read it, and neither change it nor end its owner."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.shared_memory import allocate_sealed, has_fixed_size
from engine.kv.pool import KvPool
from kvtransfer.wire.quantised import WireCopy
from tests.contract.rigs.kv_pools import random_pool

# The attempts of a process with a descriptor opened for reading. It prints one line per attempt that succeeds.
_ATTEMPTS = """
import fcntl, mmap, os, sys
given, num_bytes = int(sys.argv[1]), int(sys.argv[2])
assert mmap.mmap(given, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)[0] == 7, "cannot read what it was given"

def reopened():
    return os.open(f"/proc/self/fd/{given}", os.O_RDWR)

attempts = {
    "truncate": lambda: os.truncate(f"/proc/self/fd/{given}", 0),
    "shrink": lambda: os.ftruncate(reopened(), num_bytes - 1),
    "grow": lambda: os.ftruncate(reopened(), 2 * num_bytes),
    "allocate": lambda: os.posix_fallocate(reopened(), 0, 2 * num_bytes),
    "append": lambda: os.pwrite(reopened(), b"x", num_bytes),
    "write": lambda: os.pwrite(reopened(), b"x", 0),
    "map for writing": lambda: mmap.mmap(reopened(), num_bytes, mmap.MAP_SHARED),
    "map what was given for writing": lambda: mmap.mmap(given, num_bytes, mmap.MAP_SHARED),
    "seal": lambda: fcntl.fcntl(reopened(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""


@pytest.fixture(params=["pool", "wire copy"])
def shared(request: pytest.FixtureRequest) -> Iterator[KvPool | WireCopy]:
    pool = random_pool(2, seed=1)
    memory = pool if request.param == "pool" else WireCopy(num_blocks=2, block_bytes=4096, device=pool.device)
    yield memory
    memory.close()
    pool.close()


def test_a_process_that_was_given_the_descriptor_can_only_read(shared: KvPool | WireCopy) -> None:
    assert shared.memfd is not None
    num_bytes = os.fstat(shared.memfd).st_size
    shared.raw[0, 0] = 7
    given = os.open(f"/proc/self/fd/{shared.memfd}", os.O_RDONLY)
    try:
        attempts = subprocess.run(
            [sys.executable, "-c", _ATTEMPTS, str(given), str(num_bytes)],
            pass_fds=[given],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(given)

    assert (attempts.returncode, attempts.stdout, attempts.stderr) == (0, "", "")
    assert os.fstat(shared.memfd).st_size == num_bytes
    shared.raw[1] = 9
    assert os.pread(shared.memfd, 1, num_bytes - 1) == b"\x09", "the owner's own writes still arrive"


def test_a_kernel_without_the_write_seal_still_fixes_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.shared_memory._SEAL_FUTURE_WRITE", 0x4000)  # no kernel knows it: EINVAL
    descriptor, mapping = allocate_sealed("test", mmap.PAGESIZE)
    try:
        assert has_fixed_size(descriptor)
        mapping[0] = 3
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        mapping.close()
        os.close(descriptor)


def test_a_file_that_its_owner_can_truncate_has_no_fixed_size() -> None:
    unsealed = os.memfd_create("test")
    read_end, write_end = os.pipe()
    try:
        assert not has_fixed_size(unsealed)
        assert not has_fixed_size(read_end)
    finally:
        for descriptor in (unsealed, read_end, write_end):
            os.close(descriptor)
