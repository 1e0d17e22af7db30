"""The compiled kernels against float32 torch, and the promise that a row's bits are its own."""

import pytest
import torch
import torch.nn.functional as F

from engine.cpu.library import WIDTHS, Kernels, load_kernels
from engine.decoders.layer_parts import NotCompiled
from tests.unit.engine.cpu.cpu_decoder import (
    FAMILIES,
    Chunk,
    Chunks,
    Decoder,
    Shape,
    aligned,
    attention,
    chunks_of,
    close,
    fill,
    packed,
    rms_norm,
)


@pytest.fixture(scope="module", params=WIDTHS, ids=lambda width: f"{width} bits")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        loaded = load_kernels(request.param)
    except NotCompiled as why:
        if "no compiler" in str(why) or "no AVX2" in str(why):
            pytest.skip(str(why))
        raise
    if loaded.width < request.param:
        pytest.skip(f"the registers of this processor have {loaded.width} bits")
    return loaded


@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (50, 34), (130, 1100), (200, 514), (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_equals_float32_for_any_number_of_rows(
    kernels: Kernels, out_features: int, in_features: int, bias: bool
) -> None:
    decoder = Decoder(kernels, Shape())
    weight = torch.randn(out_features, in_features).bfloat16()
    added = torch.randn(out_features) if bias else None
    product = packed(decoder, weight, added)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 23, 24, 25, 64, 70):
        x = torch.randn(rows, in_features).bfloat16()
        y = torch.full((rows, out_features), float("nan"))
        scratch = aligned(kernels.td_linear_scratch_bytes(rows), torch.uint8)
        kernels.td_linear(x.data_ptr(), rows, product, y.data_ptr(), scratch.data_ptr())
        assert close(y, F.linear(x.float(), weight.float(), added), 1e-5), rows


def test_the_product_of_a_row_has_the_same_bits_alone_and_among_others(kernels: Kernels) -> None:
    decoder = Decoder(kernels, Shape())
    product = packed(decoder, torch.randn(100, 1200).bfloat16(), None)
    x = torch.randn(70, 1200).bfloat16()

    def product_of(rows: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(rows), 100), float("nan"))
        scratch = aligned(kernels.td_linear_scratch_bytes(len(rows)), torch.uint8)
        kernels.td_linear(rows.data_ptr(), len(rows), product, y.data_ptr(), scratch.data_ptr())
        return y

    alone = torch.cat([product_of(row[None]) for row in x])
    for rows in range(2, 71):
        assert torch.equal(product_of(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("width", [1, 15, 64, 100, 576])
def test_rms_norm_equals_float32_up_to_the_final_rounding(kernels: Kernels, width: int) -> None:
    x, weight = torch.randn(5, width) * 0.01, torch.randn(width)  # small enough for eps to tell
    y = torch.zeros(5, width, dtype=torch.bfloat16)
    kernels.td_rms_norm(x.data_ptr(), 5, width, weight.data_ptr(), 1e-5, y.data_ptr())
    assert torch.allclose(y.float(), rms_norm(x, weight), rtol=2**-8, atol=1e-6)


RAGGED = [(0, 150), (299, 300), (63, 64), (0, 1), (64, 65), (40, 203), (130, 197)]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(block_size=1),
        Shape(block_size=8, num_kv_heads=6),
        Shape(block_size=24, num_kv_heads=1, head_dim=16),
        Shape(window=70),
        Shape(window=1, head_dim=64),
        Shape(softcap=2.0, head_dim=80),
        Shape(head_dim=256, window=200, softcap=30.0, num_heads=2, num_kv_heads=1),
    ],
    ids=str,
)
def test_attention_over_blocks_equals_float32_over_the_sequence(kernels: Kernels, shape: Shape) -> None:
    step = chunks_of(RAGGED, shape)
    decoder = Decoder(kernels, shape, num_blocks=3 + sum(len(chunk.block_ids) for chunk in step.chunks))
    contexts = [fill(decoder, chunk) for chunk in step.chunks]
    num_tokens = sum(len(chunk.tokens) for chunk in step.chunks)
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim).bfloat16()
    output = torch.full_like(query, float("nan"))
    model = decoder.model()
    scratch = aligned(kernels.td_scratch_bytes(model, num_tokens), torch.uint8)

    kernels.td_attend(
        model,
        decoder.layers[1],
        step.struct([]),
        query.data_ptr(),
        output.data_ptr(),
        scratch.data_ptr(),
    )

    rows = iter(zip(torch.split(query, [len(chunk.tokens) for chunk in step.chunks]), contexts, strict=True))
    reference = torch.cat([attention(ours.float(), *context, shape.window, shape) for ours, context in rows])
    assert close(output, reference, 0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_the_decoder_in_float32(kernels: Kernels, family: str) -> None:
    shape = FAMILIES[family]
    decoder = Decoder(kernels, shape)
    step = chunks_of([(0, 90), (0, 1), (0, 130)], shape)
    logits = decoder.run(step)
    assert close(logits, torch.cat([decoder.reference(chunk.tokens) for chunk in step.chunks]), 0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_a_sequence_has_the_same_bits_in_chunks_of_any_size(kernels: Kernels, family: str, size: int) -> None:
    shape = FAMILIES[family]
    decoder = Decoder(kernels, shape)
    (whole,) = chunks_of([(0, 170)], shape).chunks
    at_once = decoder.run(Chunks([whole], shape.block_size))
    written = decoder.pool.clone()
    decoder.pool.fill_(float("nan"))

    cut = [Chunk(tokens, size * index, whole.block_ids) for index, tokens in enumerate(torch.split(whole.tokens, size))]
    logits = torch.cat([decoder.run(Chunks([chunk], shape.block_size)) for chunk in cut])

    assert torch.equal(logits, at_once)
    assert torch.equal(decoder.pool.view(torch.int16), written.view(torch.int16))


def test_a_sequence_has_the_same_bits_alone_and_among_others(kernels: Kernels) -> None:
    shape = FAMILIES["llama"]
    decoder = Decoder(kernels, shape, num_blocks=120)
    prompts = chunks_of([(0, 3 + 5 * index) for index in range(24)], shape).chunks
    alone = [decoder.run(Chunks([chunk], shape.block_size)) for chunk in prompts]
    for count in (2, 3, 7, 24):
        together = decoder.run(Chunks(prompts[:count], shape.block_size))
        assert torch.equal(together, torch.cat(alone[:count])), count

    decodes = [Chunk(chunk.tokens[-1:], chunk.end - 1, chunk.block_ids) for chunk in prompts]
    together = decoder.run(Chunks(decodes, shape.block_size))
    assert torch.equal(together, torch.cat([logits[-1:] for logits in alone]))


def test_only_rows_with_logits_are_computed_to_the_end(kernels: Kernels) -> None:
    shape = FAMILIES["llama"]
    decoder = Decoder(kernels, shape)
    step = chunks_of([(0, 40), (0, 30)], shape)
    everything = decoder.run(step)
    for wanted in ([39, 69], [69], [], [3, 38, 39, 69]):
        assert torch.equal(decoder.run(step, wanted), everything[wanted])
