"""Host tensors go to a device by one copy and arrive unchanged."""

import torch

from engine.batch import PackedBatch, _placed, pack, to_host, together_to_device
from engine.scheduling.step import Chunk

CHUNKS = (Chunk(1, (5, 6, 7), 4, (3, 1)), Chunk(2, (9,), 0, (2,)))


def test_tensors_of_any_shape_arrive_unchanged_by_one_copy() -> None:
    sent = [torch.arange(6).view(2, 3), torch.arange(0), torch.tensor([[7]])]
    arrived = together_to_device(sent, torch.device("cpu"))

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(arrived, sent, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1


def test_a_placed_batch_equals_the_packed_batch() -> None:
    packed = pack(CHUNKS, 4, torch.device("cpu"))
    placed = _placed(packed, torch.device("cpu"))

    for name in PackedBatch.__slots__:
        ours, theirs = getattr(placed, name), getattr(packed, name)
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_tensors_on_the_host_are_not_copied() -> None:
    tensor = torch.ones(3)
    assert to_host([tensor])[0] is tensor
