"""Compiled drawing gives the tokens of engine/steps/sampler.py: over settings, types, ties and edges, row by row."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.cpu.compiled_draw import CompiledDraw
from engine.cpu.library import load_library
from engine.decoders.layer_parts import NotCompiled
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.sampler import draw
from tests.golden.families import FAMILIES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=[512, 256, 128], ids="{}-bits".format)
def compiled(request: pytest.FixtureRequest) -> CompiledDraw:
    """Compiled drawing at each register width of this processor, down to the width that every x86-64 has."""
    try:
        return CompiledDraw(load_library(), widest=request.param)
    except NotCompiled as why:
        pytest.skip(f"{why}")


def drawn(compiled: CompiledDraw, logits: torch.Tensor, samples: list[Sample]) -> list[int]:
    token_ids = compiled(logits, samples)
    assert token_ids is not None
    return token_ids.tolist()


def by_torch(logits: torch.Tensor, samples: list[Sample]) -> list[int]:
    return [token.token_id for token in draw(logits, samples)]


def random_sample(dice: random.Random, vocab_size: int) -> Sample:
    sampling = Sampling(
        temperature=dice.choice([0.0, 1e-300, 1e-8, 1e-3, 0.1, 0.3, 0.7, 1.0, 1.3, 2.0]),
        top_k=dice.choice([0, 0, 1, 2, 7, 50, vocab_size // 2, vocab_size, vocab_size + 3]),
        top_p=dice.choice([1.0, 1.0, 0.999999, 0.99, 0.95, 0.83, 0.5, 0.31, 1e-6]),
        min_p=dice.choice([0.0, 0.0, 1e-9, 0.02, 0.07, 0.5, 1.0]),
    )
    num_banned = dice.choice([0, 0, min(3, vocab_size - 1)])
    banned = frozenset(dice.sample(range(vocab_size), num_banned))
    return Sample(dice.getrandbits(64), dice.randrange(10_000), sampling, banned)


def flat(x: torch.Tensor) -> torch.Tensor:
    return 0.01 * x


def peaked(x: torch.Tensor) -> torch.Tensor:
    return 2.5 * x + 8 * (torch.arange(x.shape[1]) % 50 == 0)


def full_of_ties(x: torch.Tensor) -> torch.Tensor:
    return (2 * x).round()


def all_equal(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def half_excluded(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill((x < 0) & (torch.arange(x.shape[1]) > 3), -torch.inf)


def masked_by_large_numbers(x: torch.Tensor) -> torch.Tensor:
    return (100 * x).masked_fill(torch.arange(x.shape[1]) % 3 == 1, -6e4)


def unequal_logits_of_equal_scores(x: torch.Tensor) -> torch.Tensor:
    """Relative to the best score, differences below 1e-17 vanish."""
    return torch.where(torch.arange(x.shape[1]) % 3 == 0, x.round(), 1e-20 * x)


@pytest.mark.parametrize(
    "shape",
    [
        torch.Tensor.clone,
        flat,
        peaked,
        full_of_ties,
        all_equal,
        half_excluded,
        masked_by_large_numbers,
        unequal_logits_of_equal_scores,
    ],
    ids=lambda shape: shape.__name__,
)
def test_compiled_drawing_gives_every_token_that_torch_draws(
    compiled: CompiledDraw, shape: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    dice, generator = random.Random(7), torch.Generator().manual_seed(7)
    for vocab_size in (2, 63, 64, 65, 300, 2500):
        for dtype in DTYPES:
            logits = shape(torch.randn(30, vocab_size, generator=generator)).to(dtype)
            samples = [random_sample(dice, vocab_size) for _ in range(30)]
            before = logits.clone()

            assert drawn(compiled, logits, samples) == by_torch(logits, samples)
            assert torch.equal(logits, before)


def test_compiled_drawing_over_a_large_vocabulary_gives_the_tokens_of_torch(compiled: CompiledDraw) -> None:
    logits = 2.5 * torch.randn(6, 49_152, generator=torch.Generator().manual_seed(3))
    kinds = [Sampling(1.0), Sampling(1.0, top_p=0.95), Sampling(1.0, top_k=50), Sampling(0.8, 50, 0.95, 0.02)]
    kinds += [Sampling(2.0, top_p=0.999), Sampling(1.0, top_k=30_000, top_p=0.9)]
    samples = [Sample(row, 5, sampling) for row, sampling in enumerate(kinds)]

    assert drawn(compiled, logits, samples) == by_torch(logits, samples)


def test_filters_keep_exactly_the_tokens_of_top_k_top_p_and_min_p(compiled: CompiledDraw) -> None:
    """Every kept token is drawn at some of the 4000 positions; ties at the threshold are broken by token id."""
    logits = torch.tensor([0.3, 1.9, -0.5, 1.2, 1.9, 0.0, 0.8, 1.9, -0.2, 0.5]).expand(4000, -1)
    for sampling, kept in (
        (Sampling(1.0, top_k=2), {1, 4}),
        (Sampling(1.0, top_p=0.5), {1, 4, 7}),
        (Sampling(1.0, top_p=1e-6), {1}),
        (Sampling(1.0, min_p=0.4), {1, 3, 4, 7}),
        (Sampling(1.0, top_k=4, top_p=0.7), {1, 4, 7}),
    ):
        assert set(drawn(compiled, logits, [Sample(3, place, sampling) for place in range(4000)])) == kept


def test_rows_may_be_one_row_and_have_any_stride(compiled: CompiledDraw) -> None:
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(1))
    samples = [Sample(row, 2, Sampling(1.0, top_p=0.9)) for row in range(5)]
    for view in (logits[:1].expand(5, -1), logits[:, :301], logits[:, ::2], logits.T.contiguous().T):
        assert drawn(compiled, view, samples) == by_torch(view, samples)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_compiled_drawing_cannot_handle_are_left_to_torch(
    compiled: CompiledDraw, bad: float, temperature: float
) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    logits[1, 40] = bad
    samples = [Sample(row, 2, Sampling(temperature)) for row in range(3)]

    assert compiled(logits, samples) is None
    assert draw(logits, samples, compiled) == draw(logits, samples)
    assert compiled(torch.full((3, 100), -torch.inf), samples) is None
    assert compiled(torch.zeros(3, 100, dtype=torch.float64), samples) is None


def test_bans_of_ids_outside_the_vocabulary_have_no_effect(compiled: CompiledDraw) -> None:
    """Such bans also cause no write outside the row."""
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    samples = [Sample(1, 2, Sampling(1.0), frozenset({-1, 100, 1 << 40}))]

    assert drawn(compiled, logits, samples) == drawn(compiled, logits, [Sample(1, 2, Sampling(1.0))])


def test_log_probabilities_are_computed_from_the_unfiltered_logits(compiled: CompiledDraw) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    samples = [Sample(row, 2, Sampling(0.5, top_k=5, num_logprobs=3), frozenset({row})) for row in range(3)]

    assert draw(logits, samples, compiled) == draw(logits, samples)


def drawing_of(folder: Path, **others: object) -> tuple[str, list[int]]:
    """Return the engine's report line on drawing, and the tokens of a step of four choices."""
    FAMILIES["llama"].save(folder)
    values: dict[str, object] = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 4} | others
    engine: Engine = build_engine(EngineSettings(model=str(folder), **values))  # type: ignore[arg-type]
    samples = tuple(Sample(seed, 3, Sampling(1.5, top_p=0.95)) for seed in range(4))
    (tokens,) = engine.runner.run(StepPlan((Chunk(0, (5, 6, 7), 0, (0,), samples),))).tokens
    engine.pool.close()
    (line,) = [line for line in engine.report if line.startswith("drawing: ")]
    return line, [token.token_id for token in tokens]


def test_an_engine_of_any_model_uses_compiled_drawing_and_reports_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load_library()
    except NotCompiled as why:
        pytest.skip(f"{why}")
    line, tokens = drawing_of(tmp_path)
    assert line == "drawing: compiled"
    assert drawing_of(tmp_path, cpu_kernels="off") == ("drawing: torch (--cpu-kernels off)", tokens)

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drawing_of(tmp_path) == ("drawing: torch (no compiler found)", tokens)
