"""Digests on a pretended GPU equal those on the host, with one copy to the host and one wait."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer import digests
from kvtransfer.digests import (
    NUM_SUMS,
    PIECE_BYTES,
    PUBLIC,
    coefficients,
    copy_digested,
    digest_blocks,
    digest_tensor,
    folded,
    pieces_of,
    wide_product,
)
from tests.unit.engine.rigs.interpreted_triton import IS_INTERPRETED
from tests.unit.engine.rigs.pretend_gpu import DEVICE, OnGpu, PretendGpu
from tests.unit.engine.rigs.pretend_gpu import gpu as gpu

POOL_BYTES = 24_592  # of a block: three pieces and a part of one


class _Pool:
    def __init__(self, raw: torch.Tensor) -> None:
        self.raw, (self.num_blocks, self.block_bytes) = raw, raw.shape
        self.memfd = None


def blocks_of(num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_bytes)
    return torch.randint(0, 256, (5, num_bytes), dtype=torch.uint8, generator=generator)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, OnGpu)
    return tensor.inner


@pytest.fixture
def launches(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (rows, bytes per row) of every launch. Waiting for the stream's event counts as waiting for the stream."""
    made: list[tuple[int, int]] = []

    def piece_sums(blocks: torch.Tensor, block_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        assert factors.shape == (NUM_SUMS, PIECE_BYTES) and factors.is_contiguous()
        made.append((len(block_ids), blocks.shape[1]))
        rows = on_device(blocks)[on_device(block_ids)]
        pieces = pieces_of(rows)
        sums = wide_product(pieces, on_device(factors).t()[: pieces.shape[1]])
        return OnGpu(sums.reshape(len(rows), -1, NUM_SUMS))

    @contextmanager
    def side_stream(work: str, device: torch.device) -> Iterator[SimpleNamespace]:
        event = SimpleNamespace(synchronize=lambda: gpu.wait("event"))
        yield SimpleNamespace(record_event=lambda: event)

    def copied_piece_sums(
        source: SimpleNamespace, target: torch.Tensor, target_ids: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        on_device(target)[on_device(target_ids)] = source.address[on_device(source.ids)]
        return piece_sums(target, target_ids, factors)

    def source(address: torch.Tensor, stride: int, ids: torch.Tensor) -> SimpleNamespace:
        assert stride == address.shape[1]
        return SimpleNamespace(address=address, ids=ids)

    kernel = SimpleNamespace(piece_sums=piece_sums, copied_piece_sums=copied_piece_sums, Source=source)
    monkeypatch.setitem(sys.modules, "kvtransfer.digest_kernel", kernel)
    monkeypatch.setattr(digests, "side_stream", side_stream)
    monkeypatch.setattr(
        digests, "_device_coefficients", lambda device, fold, seed: OnGpu(coefficients(fold, seed).t().contiguous())
    )
    return made


@pytest.mark.parametrize(
    ("block_ids", "seed"),
    [((4, 0, 4), PUBLIC), ((1, 2, 3), PUBLIC), ((1, 2, 3), b"secret"), ((2,), PUBLIC), ((), PUBLIC)],
)
def test_a_pools_blocks_are_digested_as_on_the_host_with_one_wait(
    gpu: PretendGpu, launches: list[tuple[int, int]], block_ids: Sequence[int], seed: bytes
) -> None:
    blocks = blocks_of(POOL_BYTES)
    expected = digest_blocks(_Pool(blocks), block_ids, seed)
    assert digest_blocks(_Pool(OnGpu(blocks)), block_ids, seed) == expected
    assert gpu.waits == (["event"] if block_ids else [])


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_copied_blocks_are_digested_with_one_wait(
    gpu: PretendGpu, launches: list[tuple[int, int]], num_blocks: int
) -> None:
    blocks, target = blocks_of(POOL_BYTES), torch.zeros(5, POOL_BYTES, dtype=torch.uint8)
    source_ids, target_ids = (4, 0, 2)[:num_blocks], (1, 3, 0)[:num_blocks]
    expected = digest_blocks(_Pool(blocks), source_ids, b"secret")
    address: Any = blocks  # of the pretended kernel
    assert copy_digested(address, source_ids, OnGpu(target), target_ids, b"secret") == expected
    assert gpu.waits == (["event"] if num_blocks else [])
    assert torch.equal(target[list(target_ids)], blocks[list(source_ids)])


@pytest.mark.parametrize(
    ("num_bytes", "rows"), [(1, [1]), (2 * 8192, [16_384]), (65_536, [65_536, 512]), (2 << 20, [2 << 20, 16_384])]
)
def test_at_most_128_bytes_per_block_are_copied_to_the_host(
    gpu: PretendGpu, launches: list[tuple[int, int]], num_bytes: int, rows: list[int]
) -> None:
    blocks = blocks_of(num_bytes)
    assert digest_tensor(OnGpu(blocks)) == digest_tensor(blocks)
    assert launches == [(5, row_bytes) for row_bytes in rows]


def test_any_number_of_a_pools_blocks_is_summed_by_the_same_kernels(
    gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one kernel for the blocks and one for their fold: a kernel that is compiled during a hand-off delays it
    by seconds.
    """
    if not importlib.util.find_spec("triton") or IS_INTERPRETED:
        pytest.skip("needs Triton, which comes with torch's CUDA wheels, and not its interpreter")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from kvtransfer import digest_kernel

    kernel, variants = digest_kernel._sum_pieces, set[str]()
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: variants.add(str(bind(*given, **options)[1:]))

    monkeypatch.setattr(digest_kernel, "_sum_pieces", Noted())
    raw = torch.zeros((3, 65_536), dtype=torch.uint8, device=DEVICE)

    def summed(rows: torch.Tensor, num_blocks: int, fold: int) -> torch.Tensor:
        factors = OnGpu(coefficients(fold).t().contiguous())
        return digest_kernel.piece_sums(rows, torch.arange(num_blocks, device=DEVICE), factors)

    for num_blocks in (1, 2, 3, 15, 16, 17, 32, 100):
        folded(summed(raw, num_blocks, 0), lambda rows, fold: summed(rows, len(rows), fold))
    assert len(variants) == 2
    for num_blocks in (1, 2, 3, 15, 16, 17, 32, 100):
        ids = torch.zeros((2, num_blocks), dtype=torch.int64, device=DEVICE)
        source = digest_kernel.Source(1 << 40, 65_536, ids[0])
        digest_kernel.copied_piece_sums(source, raw, ids[1], OnGpu(coefficients(0).t().contiguous()))
    assert len(variants) == 3
