"""The kernel that copies blocks between two pools of device memory."""

import pytest
import torch

from kvtransfer.digests import coefficients, host_sums
from tests.unit.kvtransfer.digests.test_digest_kernel import kernel_device, random_blocks

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("block_bytes", [16, 37, 4100, 16_384, 2 * 16_384 + 16])
def test_blocks_are_copied_to_any_place_and_no_other_byte_changes(block_bytes: int) -> None:
    device = kernel_device()
    from kvtransfer.transports.cuda.copies import copy_blocks

    source, before = random_blocks(9, block_bytes).to(device), random_blocks(7, block_bytes + 1)[:, 1:].contiguous()
    target = before.to(device)
    sources, targets = [8, 0, 3], [1, 6, 0]
    copy_blocks(source.data_ptr(), torch.tensor(sources, device=device), target, torch.tensor(targets, device=device))
    expected = before.clone()
    expected[targets] = source.cpu()[sources]
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("block_bytes", [16, 37, 8191, 8192, 3 * 8192 + 48, 100_003])
@pytest.mark.parametrize("shift", [0, 1])
def test_blocks_are_copied_and_digested_in_one_pass(block_bytes: int, shift: int) -> None:
    """The source begins at an address that is aligned, or one byte after it."""
    device = kernel_device()
    from kvtransfer.digest_kernel import Source, copied_piece_sums

    source, before = random_blocks(9, block_bytes), random_blocks(7, block_bytes + 1)[:, 1:].contiguous()
    there = torch.zeros(source.numel() + shift, dtype=torch.uint8, device=device)
    there[shift:] = source.flatten().to(device)
    target, sources, targets = before.to(device), [8, 0, 3], [1, 6, 0]
    ids = torch.tensor((sources, targets), device=device)
    matrix = coefficients(0, b"secret").t().contiguous().to(device)
    sums = copied_piece_sums(Source(there.data_ptr() + shift, block_bytes, ids[0]), target, ids[1], matrix)
    expected = before.clone()
    expected[targets] = source[sources]
    assert torch.equal(target.cpu(), expected)
    assert torch.equal(sums.cpu(), host_sums(source[sources], 0, b"secret"))


def test_copying_no_blocks_changes_no_byte() -> None:
    device = kernel_device()
    from kvtransfer.transports.cuda.copies import copy_blocks

    target, none = random_blocks(2, 64).to(device), torch.tensor([], dtype=torch.int64, device=device)
    copy_blocks(target.data_ptr(), none, target, none)
    assert torch.equal(target.cpu(), random_blocks(2, 64))


@pytest.mark.whole_gpu
def test_blocks_past_four_gigabytes_are_copied_on_both_sides() -> None:
    """The offsets, in words and in bytes, need 64 bits."""
    if kernel_device() != "cuda" or torch.cuda.mem_get_info()[0] < 11 << 30:
        pytest.skip("needs a GPU with 11 GiB free")
    from kvtransfer.transports.cuda.copies import copy_blocks

    for block_bytes in (2 << 20, (2 << 20) + 1):
        num_blocks = (5 << 30) // block_bytes
        source = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        source[-1], source[0] = random_blocks(1, block_bytes)[0].cuda(), 7
        ids = torch.tensor([[num_blocks - 1, 0], [num_blocks - 2, num_blocks - 1]], device="cuda")
        copy_blocks(source.data_ptr(), ids[0], target, ids[1])
        assert torch.equal(target[-2], source[-1]) and bool((target[-1] == 7).all()) and not target[:-2].any()
        del source, target
    torch.cuda.empty_cache()  # other processes are on this device, too
