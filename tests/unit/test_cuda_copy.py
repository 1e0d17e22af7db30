"""The kernel that copies blocks between two pools of device memory."""

import pytest
import torch

from tests.unit.test_digest_triton import kernel_device, random_blocks

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("block_bytes", [16, 37, 4100, 16_384, 2 * 16_384 + 16])
def test_blocks_are_copied_wherever_they_go_and_nothing_else_is_touched(block_bytes: int) -> None:
    device = kernel_device()
    from kvtransfer.transports.cuda_copy import copy_blocks

    source, before = random_blocks(9, block_bytes).to(device), random_blocks(7, block_bytes + 1)[:, 1:].contiguous()
    target = before.to(device)
    sources, targets = [8, 0, 3], [1, 6, 0]
    copy_blocks(source.data_ptr(), torch.tensor(sources, device=device), target, torch.tensor(targets, device=device))
    expected = before.clone()
    expected[targets] = source.cpu()[sources]
    assert torch.equal(target.cpu(), expected)


def test_no_blocks_are_no_copy() -> None:
    device = kernel_device()
    from kvtransfer.transports.cuda_copy import copy_blocks

    target, none = random_blocks(2, 64).to(device), torch.tensor([], dtype=torch.int64, device=device)
    copy_blocks(target.data_ptr(), none, target, none)
    assert torch.equal(target.cpu(), random_blocks(2, 64))
