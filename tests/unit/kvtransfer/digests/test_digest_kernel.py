"""Digests on a GPU: the kernel's sums equal the definition's to the last bit, for every size and order of blocks."""

import importlib.util
import os

import pytest
import torch

from kvtransfer.digests import (
    NUM_SUMS,
    coefficients,
    digest_blocks,
    digest_bytes,
    digest_tensor,
    folded,
    host_sums,
    pieces_of,
    wide_product,
)
from tests.contract.rigs.kv_pools import BLOCK_SIZE, LAYOUT, random_pool

pytestmark = pytest.mark.cuda


def kernel_device() -> str:
    """Return the device on which the Triton kernel can run: a GPU, or the CPU if TRITON_INTERPRET selects Triton's
    interpreter.
    """
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("needs a GPU (or Triton and TRITON_INTERPRET=1): Triton's kernel is compiled for CUDA")


def random_blocks(num_blocks: int, block_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(block_bytes)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


def kernel_sums(blocks: torch.Tensor, block_ids: list[int], fold: int = 0, seed: bytes = b"") -> torch.Tensor:
    device = kernel_device()
    from kvtransfer.digest_kernel import piece_sums

    ids = torch.tensor(block_ids, device=device)
    return piece_sums(blocks.to(device), ids, coefficients(fold, seed).t().contiguous().to(device)).cpu()


def defined_sums(blocks: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    pieces = pieces_of(blocks[block_ids])
    return wide_product(pieces, coefficients(0)[: pieces.shape[1]]).reshape(len(block_ids), -1, NUM_SUMS)


@pytest.mark.parametrize("block_bytes", [1, 64, 8191, 8192, 8193, 24_592, 100_003])
def test_the_kernel_computes_the_definition_at_any_size(block_bytes: int) -> None:
    blocks = random_blocks(4, block_bytes)
    assert torch.equal(kernel_sums(blocks, [3, 0, 3]), defined_sums(blocks, [3, 0, 3]))


def test_the_kernel_computes_secret_coefficients_as_the_host_does() -> None:
    blocks = random_blocks(4, 24_592)
    of_host = host_sums(blocks[[3, 0]], 0, b"secret")
    assert torch.equal(kernel_sums(blocks, [3, 0], 0, b"secret"), of_host)


@pytest.mark.parametrize("byte", [0x80, 0x7F, 0xFF])
def test_the_kernel_is_exact_at_the_extremes(byte: int) -> None:
    blocks = torch.full((2, 16_384), byte, dtype=torch.uint8)
    assert torch.equal(kernel_sums(blocks, [1, 0]), defined_sums(blocks, [1, 0]))


@pytest.mark.parametrize("num_pieces", [2, 3, 8, 129])
def test_the_kernel_folds_its_own_output_as_the_host_does(num_pieces: int) -> None:
    """Folds end at the sums of one piece, or of two."""
    blocks = random_blocks(3, num_pieces * 8192 - 5)
    of_kernel = folded(kernel_sums(blocks, [2, 0]), lambda rows, fold: kernel_sums(rows, [0, 1], fold))
    of_host = folded(host_sums(blocks[[2, 0]], 0), host_sums)
    assert of_kernel.shape == (2, 2 if num_pieces in (2, 129) else 1, NUM_SUMS)
    assert torch.equal(of_kernel, of_host)


@pytest.mark.whole_gpu
def test_blocks_past_four_gigabytes_are_found() -> None:
    """The test digests the last block of a pool that needs 64-bit offsets."""
    if kernel_device() != "cuda" or torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs a GPU with 6 GiB free")
    blocks = torch.zeros(((5 << 30) // 65_536, 65_536), dtype=torch.uint8, device="cuda")
    last = random_blocks(1, 65_536)
    blocks[-1] = last[0].cuda()
    assert digest_tensor(blocks[-1:]) == digest_tensor(last)
    assert torch.equal(kernel_sums(blocks, [len(blocks) - 1]), defined_sums(last, [0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "data",
    [b"tandem", bytes(4), bytes(range(256)) * 512, b"\x80" * 8193, b"\x7f" * (2 << 20)],
    ids=lambda data: f"{len(data)} bytes",  # pytest passes the name on to compilers in an environment variable
)
def test_a_gpu_gives_the_golden_digests(data: bytes) -> None:
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)[None].cuda()
    assert digest_tensor(row) == (digest_bytes(data),)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pool_on_a_gpu_is_digested_like_its_copy_on_the_host() -> None:
    from engine.kv.pool import KvPool

    host = random_pool(9, seed=4)
    pool = KvPool(LAYOUT, 9, "cuda")
    assert LAYOUT.block_size == BLOCK_SIZE
    pool.raw.copy_(host.raw)
    torch.cuda.synchronize()
    for block_ids in ([8, 0, 8, 3], [1, 2, 3], [5], []):
        assert digest_blocks(pool, block_ids) == digest_blocks(host, block_ids)
    pool.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digests_wait_for_no_step_that_still_computes() -> None:
    """A long computation on the engine's stream does not delay them."""
    blocks = random_blocks(8, 65_536)
    on_gpu = blocks.cuda()
    digest_tensor(on_gpu)  # compiled
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # clock cycles: some two seconds
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    assert digest_tensor(on_gpu) == digest_tensor(blocks)
    assert not computed.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_repeated_digests_keep_no_more_memory_than_the_first() -> None:
    """Their sums are 4 MiB: with a pool that takes nearly all memory, the memory kept per stream matters."""
    blocks = torch.zeros((256, 2 << 20), dtype=torch.uint8, device="cuda")
    digest_tensor(blocks)
    before = torch.cuda.memory_reserved()
    for _ in range(40):
        digest_tensor(blocks)
    assert torch.cuda.memory_reserved() == before
