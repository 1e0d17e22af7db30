"""Compiled digests equal the reference for every shape, and a copy digests exactly the bytes that it wrote."""

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.compiled_library import NotCompiled
from kvtransfer import compiled_digests as compiled_module
from kvtransfer import digests
from kvtransfer.compiled_digests import CompiledDigests
from kvtransfer.digests import PUBLIC

PIECE = 8192
SIZES = (1, 64, 511, 512, 513, PIECE - 1, PIECE, PIECE + 1, 20_000, 8 * PIECE, 45 * PIECE, (2 << 20) + 5)


@pytest.fixture(params=[512, 256])
def compiled(request: pytest.FixtureRequest) -> CompiledDigests:
    """The digests of each width of registers that this processor has."""
    try:
        found = CompiledDigests(digests.digest_form(), widest=request.param)
    except NotCompiled as why:
        pytest.skip(str(why))
    if found.width != request.param:
        pytest.skip("this processor has no AVX-512 VNNI")
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_rows(num_rows: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(num_bytes).integers(0, 256, (num_rows, num_bytes), dtype=np.uint8)


def aligned(num_rows: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return rows of zeros at a multiple of 64 bytes, as in a pool: a long copy to them bypasses the caches."""
    return torch.zeros(num_rows, num_bytes, dtype=torch.uint8).numpy()


def test_the_widest_registers_of_the_processor_are_used(compiled: CompiledDigests) -> None:
    found = digests.compiled_digests()
    assert found is not None and found.width >= compiled.width


@pytest.mark.parametrize("byte", [0x80, 0x7F, 0xFF])
def test_sums_are_exact_at_the_extremes(compiled: CompiledDigests, byte: int) -> None:
    rows = np.full((5, 3 * PIECE), byte, dtype=np.uint8)
    assert compiled.digest(rows, range(5)) == digests.reference_digests(torch.from_numpy(rows), range(5))


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize(("num_rows", "seed"), [(1, PUBLIC), (3, b"secret"), (11, PUBLIC), (11, b"secret")])
def test_digests_and_copies_equal_the_reference(
    compiled: CompiledDigests, num_rows: int, seed: bytes, num_bytes: int
) -> None:
    source, target = random_rows(num_rows, num_bytes), aligned(num_rows + 2, num_bytes)
    backwards = range(num_rows)[::-1]
    expected = digests.reference_digests(torch.from_numpy(source), backwards, seed)

    assert compiled.digest(source, backwards, seed) == expected
    assert compiled.copy(source, backwards, target, range(1, num_rows + 1), seed) == expected
    assert np.array_equal(target[1:-1], source[::-1])
    assert not target[0].any() and not target[-1].any()


@pytest.mark.usefixtures("two_threads")
def test_several_threads_share_a_long_copy(compiled: CompiledDigests) -> None:
    source, target = random_rows(101, 8 * PIECE), aligned(101, 8 * PIECE)
    scattered = [7 * place % 101 for place in range(101)]

    assert compiled.copy(source, scattered, target, range(101)) == compiled.digest(source, scattered)
    assert compiled.digest(target, range(101), b"secret") == compiled.digest(source, scattered, b"secret")
    assert compiled.digest(target, range(101)) == digests.reference_digests(torch.from_numpy(source), scattered)


def test_nothing_is_copied_for_no_rows(compiled: CompiledDigests) -> None:
    assert compiled.copy(random_rows(1, 64), (), aligned(1, 64), ()) == ()


def test_rows_outside_an_array_are_refused(compiled: CompiledDigests) -> None:
    rows = random_rows(2, 64)
    for outside in (2, -1):
        with pytest.raises(AssertionError, match="outside"):
            compiled.digest(rows, (outside,))
        with pytest.raises(AssertionError, match="outside"):
            compiled.copy(rows, (0,), aligned(2, 64), (outside,))


def test_a_copy_digests_the_written_bytes_while_its_source_changes(compiled: CompiledDigests) -> None:
    """An exporter may reuse a block that is being read. If the digest covered other bytes than those written to the
    importer's pool, it could match although the pool's bytes are wrong.
    """
    source, target = aligned(1, 8 * PIECE), aligned(1, 8 * PIECE)
    is_over = threading.Event()

    def change() -> None:
        value = 0
        while not is_over.is_set():
            source.fill(value := (value + 1) % 256)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        mixed = 0
        for _ in range(20_000):
            found = compiled.copy(source, (0,), target, (0,))
            assert found == compiled.digest(target, (0,))
            mixed += bool((target != target[0, 0]).any())
            if mixed == 500:
                break
    finally:
        is_over.set()
        writer.join()
    assert mixed, "the source never changed during a copy"


def test_digests_that_differ_from_the_reference_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CompiledDigests):
        def digest(self, rows: npt.NDArray[np.uint8], row_ids: object, seed: bytes = PUBLIC) -> tuple[bytes, ...]:
            return (bytes(16),) * 3

    monkeypatch.setattr(digests, "CompiledDigests", Wrong)
    assert digests.compiled_digests.__wrapped__() is None


def test_without_a_compiler_the_reference_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert digests.compiled_digests.__wrapped__() is None
    assert compiled_module.main(str(tmp_path)) == 1


def test_a_copy_that_fails_ends_only_when_no_part_of_it_writes(
    compiled: CompiledDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a copy run on helper threads. Its caller frees the rows when it ends, by whatever error."""
    monkeypatch.setattr(compiled_module, "_SPLIT_BYTES", PIECE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def write(part: compiled_module._Digests, width: int) -> None:
        if threading.current_thread() is copying:
            return
        if part.num_rows == 1:
            assert begun.wait(20)
            raise MemoryError
        begun.set()
        assert go_on.wait(20)
        ended.set()

    monkeypatch.setattr(compiled, "_digest_rows", write)
    rows, target = random_rows(4, PIECE), aligned(4, PIECE)  # the last part has two rows
    failures: list[bool] = []

    def copy() -> None:
        with pytest.raises(MemoryError):
            compiled.copy(rows, range(4), target, range(4))
        failures.append(ended.is_set())

    copying = threading.Thread(target=copy)
    copying.start()
    assert begun.wait(20)
    copying.join(0.2)
    go_on.set()
    copying.join(20)
    assert failures == [True], "the copy ended while a part of it was writing"
