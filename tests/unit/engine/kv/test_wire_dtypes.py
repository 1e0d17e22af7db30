"""Wire dtypes: size, error, which positions of a block are touched, and numbers that are not finite."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from engine.kv.layout import BlockLayout, LayerShape, lay_out
from engine.kv.pool import TORCH_DTYPES, KvPool
from kvtransfer.wire.wire_format import NativeFormat, WireDtype, WireFormat
from tests.examples import num_examples

QUANTISED = ("int8", "fp8", "int4")
BLOCK_SIZE = 16
SMALL = lay_out([LayerShape(num_kv_heads=2, key_dim=8, value_dim=8)] * 3, BLOCK_SIZE, "bfloat16")
UNLIKE = lay_out(
    [LayerShape(1, 48, 32), LayerShape(1, 48, 32), LayerShape(2, 8, 24), LayerShape(2, 16, 16)], 32, "float32"
)
SMALL_BLOCKS = lay_out([LayerShape(1, 8, 8)] * 2, 4, "float32")  # too few tokens to group keys by channel
REAL = {
    "demo model": ([LayerShape(2, 32, 32)] * 4, "bfloat16"),
    "SmolLM-135M": ([LayerShape(3, 64, 64)] * 30, "bfloat16"),
    "Qwen2.5-0.5B": ([LayerShape(2, 64, 64)] * 24, "bfloat16"),
    "Llama-3-8B": ([LayerShape(8, 128, 128)] * 32, "float16"),
    "DeepSeek-V2-Lite": ([LayerShape(16, 192, 128)] * 27, "bfloat16"),
}


def pool_of(layout: BlockLayout, num_blocks: int = 6, seed: int = 1) -> KvPool:
    pool = KvPool(layout, num_blocks)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def round_trip(pool: KvPool, wire_dtype: str, block_ids: Sequence[int] | None = None) -> KvPool:
    """Send these blocks over the wire, and return the pool that received them."""
    ids = list(range(pool.num_blocks)) if block_ids is None else list(block_ids)
    wire = WireDtype(wire_dtype)
    target = KvPool(pool.layout, pool.num_blocks)
    sent, received = wire.format(pool, pool.layout), wire.format(target, pool.layout)
    sent.encode(ids)
    received.memory.raw[ids] = sent.memory.raw[ids]
    received.decode(ids)
    return target


@pytest.mark.parametrize(("wire_dtype", "limit"), [("int8", 0.53), ("fp8", 0.53), ("int4", 0.30)])
@pytest.mark.parametrize("model", REAL)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_wire_bytes_with_scales_against_16_bits(model: str, block_size: int, wire_dtype: str, limit: float) -> None:
    shapes, dtype = REAL[model]
    layout = lay_out(shapes, block_size, dtype)
    assert WireDtype(wire_dtype).copy_bytes(layout) <= limit * layout.block_bytes


@pytest.mark.parametrize("wire_dtype", QUANTISED)
def test_encoded_blocks_have_the_announced_size(wire_dtype: str) -> None:
    pool = pool_of(SMALL)
    wire = WireDtype(wire_dtype)
    memory = wire.format(pool, SMALL).memory
    assert memory.block_bytes == wire.copy_bytes(SMALL) == memory.raw.shape[1]
    assert memory.num_blocks == pool.num_blocks == memory.raw.shape[0]


def test_the_native_format_is_sent_from_the_pool_itself() -> None:
    pool = pool_of(SMALL)
    wire = WireDtype("native")
    assert isinstance(wire.format(pool, SMALL), NativeFormat)
    assert wire.format(pool, SMALL).memory is pool
    assert wire.copy_bytes(SMALL) == 0


# The error as a share of the group's largest magnitude (8 bits: half a step of a scale that may be twice too wide)
# or of its range.
@pytest.mark.parametrize(("wire_dtype", "share"), [("int8", 1 / 127), ("fp8", 1 / 16), ("int4", 1.125 / 30)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_error_of_every_element_is_within_the_scale_of_its_group(wire_dtype: str, share: float, dtype: str) -> None:
    layout = lay_out([LayerShape(2, 32, 32)] * 2, BLOCK_SIZE, dtype)
    pool = pool_of(layout)
    target = round_trip(pool, wire_dtype)
    rounding = torch.finfo(TORCH_DTYPES[dtype]).eps
    for (keys, values), (keys_after, values_after) in zip(pool.layers, target.layers, strict=True):
        for before, after, axis in (
            (keys.float(), keys_after.float(), 1),  # [blocks, tokens, heads, dim]: one channel over 16 tokens
            (values.float().flatten(2), values_after.float().flatten(2), 2),  # one token's 64 elements
        ):
            low, high = before.amin(axis, keepdim=True), before.amax(axis, keepdim=True)
            reach = high - low if wire_dtype == "int4" else torch.maximum(high, -low)
            off = (after - before).abs()
            assert bool((off <= share * reach + rounding * before.abs()).all())
            assert float(off.max()) > 0.1 * share * float(reach.max())  # the bound is not an idle one


@pytest.mark.parametrize("wire_dtype", QUANTISED)
@pytest.mark.parametrize("layout", [SMALL, UNLIKE, SMALL_BLOCKS], ids=["small", "unlike", "small blocks"])
def test_every_element_of_any_layout_arrives_with_a_small_error(wire_dtype: str, layout: BlockLayout) -> None:
    pool = pool_of(layout)
    target = round_trip(pool, wire_dtype)
    off = (target.tensor.float() - pool.tensor.float()).abs()
    assert float(off.max()) < (0.4 if wire_dtype == "int4" else 0.3)
    assert torch.corrcoef(torch.stack([pool.tensor.float().flatten(), target.tensor.float().flatten()]))[0, 1] > 0.99


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_second_hand_off_in_8_bits_changes_no_further_bit(wire_dtype: str, dtype: str) -> None:
    once = round_trip(pool_of(lay_out([LayerShape(2, 16, 16)], BLOCK_SIZE, dtype)), wire_dtype)
    twice = round_trip(once, wire_dtype)
    assert torch.equal(once.raw, twice.raw)


def test_ten_hand_offs_in_4_bits_have_little_more_error_than_one() -> None:
    pool = pool_of(SMALL)
    once = moved = round_trip(pool, "int4")
    for _ in range(9):
        moved = round_trip(moved, "int4")

    def error(other: KvPool) -> float:
        return float((other.tensor.float() - pool.tensor.float()).square().mean().sqrt())

    assert error(moved) < 1.2 * error(once)


@pytest.mark.parametrize(("wire_dtype", "limit"), [("int8", 0.01), ("fp8", 0.05), ("int4", 0.1)])
def test_a_channel_of_k_far_from_zero_does_not_raise_the_error_of_others(wire_dtype: str, limit: float) -> None:
    """The keys of some models have a few such channels, for every token."""
    pool = pool_of(lay_out([LayerShape(2, 32, 32)] * 2, BLOCK_SIZE, "float32"))
    for keys, _ in pool.layers:
        keys[:, :, :, 5] += 100
    target = round_trip(pool, wire_dtype)
    others = [channel for channel in range(32) if channel != 5]
    for (keys, _), (after, _) in zip(pool.layers, target.layers, strict=True):
        off = (after - keys)[..., others].square().mean().sqrt()
        assert float(off) < limit


@settings(max_examples=num_examples(suite=10, search=30))
@given(
    wire_dtype=st.sampled_from(QUANTISED),
    layout=st.sampled_from([SMALL, UNLIKE]),
    block_ids=st.lists(st.integers(0, 7), unique=True),
)
def test_only_the_named_blocks_are_touched_in_any_order(
    wire_dtype: str, layout: BlockLayout, block_ids: list[int]
) -> None:
    pool = pool_of(layout, 8)
    whole = WireDtype(wire_dtype).format(pool, layout)
    whole.encode(range(8))
    some = WireDtype(wire_dtype).format(pool, layout)
    some.encode(block_ids)
    others = [block_id for block_id in range(8) if block_id not in block_ids]
    assert torch.equal(some.memory.raw[block_ids], whole.memory.raw[block_ids])
    assert not some.memory.raw[others].any()

    before, restored = pool.raw.clone(), round_trip(pool, wire_dtype).raw
    some.decode(block_ids)
    assert torch.equal(pool.raw[others], before[others])
    assert torch.equal(pool.raw[block_ids], restored[block_ids])


@pytest.mark.parametrize("wire_dtype", QUANTISED)
def test_the_same_block_gives_the_same_bytes_at_every_place(wire_dtype: str) -> None:
    """A digest taken for one ticket therefore holds for another, and a slot that is written again does not change."""
    pool, other = pool_of(SMALL), KvPool(SMALL, 9)
    other.raw[[8, 0, 4]] = pool.raw[[1, 2, 5]]
    formats = [WireDtype(wire_dtype).format(one, SMALL) for one in (pool, other)]
    formats[0].encode([5, 1, 2])
    formats[1].encode([0, 4])
    formats[1].encode([8])
    assert torch.equal(formats[0].memory.raw[[1, 2, 5]], formats[1].memory.raw[[8, 0, 4]])


@pytest.mark.parametrize("wire_dtype", QUANTISED)
@pytest.mark.parametrize("num_used", [0, 1, 7, 15])
def test_unused_positions_stay_zero_and_do_not_raise_the_error_of_used_ones(wire_dtype: str, num_used: int) -> None:
    """A tail of keys far from zero is no worse than a full block of them."""
    pool = pool_of(SMALL, 2)
    for keys, values in pool.layers:
        keys += 20
        keys[0, num_used:] = values[0, num_used:] = 0
    target = round_trip(pool, wire_dtype)
    for (keys, values), (keys_after, values_after) in zip(pool.layers, target.layers, strict=True):
        assert not keys_after[0, num_used:].any() and not values_after[0, num_used:].any()
        off = (keys_after.float() - keys.float()).abs()
        if num_used:
            assert float(off[0, :num_used].max()) <= float(off[1].max()) + 0.13  # a step of bfloat16 at 20
        assert float((values_after - values).abs().max()) < 0.5


@pytest.mark.parametrize("wire_dtype", QUANTISED)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_only_a_group_that_is_not_finite_arrives_as_nan(wire_dtype: str, broken: float) -> None:
    pool = pool_of(SMALL, 3)
    keys, values = pool.layers[1]
    keys[1, 3, 0, 5] = broken
    values[2, 6, 1, 2] = broken
    target = round_trip(pool, wire_dtype)
    is_nan = target.tensor.isnan()
    keys_after, values_after = target.layers[1]
    assert keys_after[1, :, 0, 5].isnan().all() and values_after[2, 6, 1, 2].isnan()
    assert int(is_nan.sum()) == 16 + 64
    other = round_trip(pool_of(SMALL, 3), wire_dtype)
    assert torch.equal(target.tensor[~is_nan], other.tensor[~is_nan])


@pytest.mark.parametrize("wire_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_largest_and_smallest_numbers_stay_finite(wire_dtype: str, dtype: str) -> None:
    layout = lay_out([LayerShape(1, 32, 32)], BLOCK_SIZE, dtype)
    pool = KvPool(layout, 4)
    limits = torch.finfo(pool.tensor.dtype)
    pool.tensor[0], pool.tensor[1], pool.tensor[2] = limits.max, -limits.max, limits.tiny
    pool.tensor[3, ::2], pool.tensor[3, 1::2] = limits.max, -limits.max
    after = round_trip(pool, wire_dtype).tensor.float()
    assert bool(after.isfinite().all())
    assert bool((after[0] > 0).all()) and bool((after[1] < 0).all()) and float(after[2].abs().max()) < 1e-3
    if wire_dtype != "int4":  # whose scales end before these
        assert bool((after[0] >= 0.96 * limits.max).all())


@pytest.mark.parametrize("wire_dtype", QUANTISED)
def test_bytes_of_any_kind_can_be_decoded(wire_dtype: str) -> None:
    """A damaged read is decoded before its digest has been compared."""
    target = KvPool(SMALL, 4)
    wire: WireFormat = WireDtype(wire_dtype).format(target, SMALL)
    wire.memory.raw.copy_(torch.randint(0, 256, wire.memory.raw.shape, dtype=torch.uint8))
    wire.memory.raw[0, -1], wire.memory.raw[1, -1] = 3, 255  # unused positions
    wire.decode([0, 1, 3])
    assert not target.raw[2].any() and target.raw[0].any() and not target.raw[1].any()


@pytest.mark.parametrize("wire_dtype", QUANTISED)
def test_blocks_that_cannot_be_grouped_are_refused_with_the_block_size_to_set(wire_dtype: str) -> None:
    layout = lay_out([LayerShape(1, 10, 10)], 5, "bfloat16")
    with pytest.raises(ConfigError, match=r"50 elements of 5 tokens cannot be divided.* --block-size of 32 they can"):
        WireDtype(wire_dtype).copy_bytes(layout)
    WireDtype(wire_dtype).copy_bytes(lay_out([LayerShape(1, 10, 10)], 32, "bfloat16"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("wire_dtype", QUANTISED)
@pytest.mark.parametrize("layout", [SMALL, UNLIKE], ids=["small", "unlike"])
def test_a_gpu_makes_the_same_bytes_and_restores_the_same_numbers(wire_dtype: str, layout: BlockLayout) -> None:
    pool, on_gpu = pool_of(layout, 8), KvPool(layout, 8, "cuda")
    pool.tensor[1, 5] = torch.nan
    on_gpu.raw.copy_(pool.raw)
    host, device = (WireDtype(wire_dtype).format(one, layout) for one in (pool, on_gpu))
    for block_ids in ([6, 1, 3], [0, 2], [4, 5, 7]):
        host.encode(block_ids)
        device.encode(block_ids)
    assert torch.equal(device.memory.raw.cpu(), host.memory.raw)
    for wire in (host, device):
        wire.decode([7, 1, 2])
    restored = on_gpu.tensor.cpu()
    assert torch.equal(restored.nan_to_num(9), pool.tensor.nan_to_num(9))
