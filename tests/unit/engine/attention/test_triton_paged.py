"""The Triton kernel's own features: contexts read in parts, KV of 8 bits, and compilation for real GPUs."""

import importlib.util
import os

import pytest
import torch

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch, pack
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool, quantise, restore
from engine.scheduling.step import Chunk
from tests.unit.engine.rigs.interpreted_triton import kernel_device

pytestmark = pytest.mark.cuda

HEADS, BLOCK_SIZE = 4, 8
SHAPE = LayerShape(2, 16, 16)
LEAST_PART = 64  # of these heads' tile of columns


def long_case(lens: list[int], device: str) -> tuple[torch.Tensor, LayerKv, PackedBatch]:
    """Return one decode per context, whose values depend only on its length, not on the other decodes of the step."""
    layout = lay_out([SHAPE] * 2, BLOCK_SIZE, "float32")
    counts = [layout.num_blocks_for(length) for length in lens]
    pool = KvPool(layout, sum(counts), device)
    pool.tensor.fill_(100.0)
    keys, values = pool.layers[1]
    free = list(range(pool.num_blocks))[::-1]
    chunks, queries = [], []
    for length, count in zip(lens, counts, strict=True):
        generator = torch.Generator().manual_seed(length)
        block_ids = tuple(free.pop() for _ in range(count))
        for view in (keys, values):
            states = torch.randn(count * BLOCK_SIZE, 2, 16, generator=generator)
            states[length:] = 100.0
            view[list(block_ids)] = states.view(count, BLOCK_SIZE, 2, 16).to(device)
        queries.append(torch.randn(HEADS, 16, generator=generator))
        chunks.append(Chunk(0, (1,), length - 1, block_ids))
    query = torch.stack(queries).to(device)
    new = torch.zeros(len(lens), 2, 16, device=device)
    return query, LayerKv(new, new, keys, values), pack(chunks, BLOCK_SIZE, torch.device(device))


def triton_output(lens: list[int], options: AttentionOptions) -> torch.Tensor:
    device = kernel_device()
    from engine.attention.triton_paged import TritonBackend

    query, kv, batch = long_case(lens, device)
    return TritonBackend(LEAST_PART).attend(query, kv, batch, options).cpu()


def gathered(lens: list[int], options: AttentionOptions) -> torch.Tensor:
    from engine.attention.gather import GatherBackend

    query, kv, batch = long_case(lens, "cpu")
    return GatherBackend().attend(query, kv, batch, options)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.25),
        AttentionOptions(0.25, sliding_window=150, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ],
    ids=["plain", "all"],
)
def test_a_context_read_in_parts_gives_the_result_of_the_whole(options: AttentionOptions) -> None:
    kernel_device()
    lens = [300, 3, 64, 65, 129]
    on_device = options
    if options.sinks is not None:
        on_device = AttentionOptions(0.25, 150, 2.0, options.sinks.to(kernel_device()))
    assert (triton_output(lens, on_device) - gathered(lens, options)).abs().max() < 1e-5


def test_a_sequence_gets_the_same_bits_beside_any_other() -> None:
    """A context of 60 tokens alone is read whole; together with one of 700, every context is read in parts that are
    merged."""
    options = AttentionOptions(0.25)
    beside = triton_output([60, 700, 200], options)
    assert torch.equal(triton_output([60], options)[0], beside[0])
    assert torch.equal(triton_output([200], options)[0], beside[2])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_kv_of_eight_bits_is_restored_while_the_kernel_reads(dtype: torch.dtype) -> None:
    device = kernel_device()
    if device == "cuda" and dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs capability 8.9: Triton converts e4m3 from there on")
    from engine.attention.gather import GatherBackend
    from engine.attention.triton_paged import TritonBackend

    query, kv, batch = long_case([70, 9], device)
    codes = [quantise(view, dtype) for view in (kv.keys, kv.values)]
    coded = LayerKv(kv.new_keys, kv.new_values, codes[0][0], codes[1][0], codes[0][1], codes[1][1])
    plain = LayerKv(kv.new_keys, kv.new_values, *(restore(*pair, torch.float32) for pair in codes))
    options = AttentionOptions(0.25)
    ours = TritonBackend(LEAST_PART).attend(query, coded, batch, options)
    assert (ours - GatherBackend().attend(query, plain, batch, options)).abs().max() < 1e-5


# The types of the kernel's arguments by name; the others are whole numbers.
POINTERS = {
    **dict.fromkeys(("query", "output", "sinks"), "*{dtype}"),
    **dict.fromkeys(("keys", "values"), "*{kv}"),
    **dict.fromkeys(("key_scales", "value_scales"), "*bf16"),
    **dict.fromkeys(("part_values", "part_sums"), "*fp32"),
    **dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i64"),
    **dict.fromkeys(("tile_sequences", "tile_offsets"), "*i32"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
}
COMPILED_FOR = {
    "GROUP": 4, "BLOCK_SIZE": 16, "KEY_DIM": 128, "KEY_PAD": 128, "VALUE_DIM": 128, "VALUE_PAD": 128, "COLUMNS": 64,
    "LEAST_PART": 256, "HAS_WINDOW": True, "HAS_SOFTCAP": False, "HAS_SINKS": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("rows", "parts", "kv"), [(128, 1, "bf16"), (16, 8, "bf16"), (16, 8, "i8")])
def test_the_kernels_compile_without_a_device(arch: int, rows: int, parts: int, kv: str) -> None:
    if not importlib.util.find_spec("triton") or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton, which comes with torch's CUDA wheels, and not its interpreter")
    import triton
    from triton.backends.compiler import GPUTarget

    from engine.attention.triton_kernels import attend_tile, merge_parts

    constants = COMPILED_FOR | {"ROWS": rows, "PARTS": parts, "HAS_SCALES": kv == "i8"}
    options = {"num_stages": 2, "num_warps": 8 if rows == 128 else 4}
    for kernel in (attend_tile, merge_parts):
        ours = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {
            name: "constexpr" if name in ours else POINTERS.get(name, "i32").format(dtype="bf16", kv=kv)
            for name in kernel.arg_names
        }
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if name not in ours and (signature[name].startswith("*") or name.endswith("_stride"))
        }
        source = triton.compiler.ASTSource(kernel, signature, constexprs=ours, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        assert compiled.metadata.shared <= 99 << 10  # what every GPU since sm_80 has for one program
        if kernel is attend_tile:
            assert "cp.async" in compiled.asm["ptx"]  # K and V of the next tile come while this one is computed
            assert ("wgmma" in compiled.asm["ptx"]) == (arch == 90 and rows >= 64)


@pytest.mark.slow
def test_the_kernels_that_a_first_run_launches_are_found_and_compile() -> None:
    if not importlib.util.find_spec("triton") or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton, which comes with torch's CUDA wheels, and not its interpreter")
    from triton.backends.compiler import GPUTarget

    from tests.cuda.compiled import MODELS, SHARED_BYTES, compiled, noted

    target = GPUTarget("cuda", 90, 32)
    found = noted(target, [model for model in MODELS if model[0] == "wide llama, golden" and model[2] == "bfloat16"])
    assert {each.kernel.__name__ for each in found} == {
        "attend_tile", "_norm_rows", "_rotate_heads", "_gate_rows", "_sum_pieces", "_copy_words",
    }  # fmt: skip
    for each in found:
        made = compiled(each, target)
        assert made.shared_bytes <= SHARED_BYTES and made.spilt_bytes < 64, made
