"""Drawing tokens: the right distribution, the right sets, and the same token for the same seed, position and logits."""

import math
from collections import Counter

import pytest
import torch

from cluster.messages import Sampling
from engine.scheduling.step import Sample
from engine.steps.sampler import draw

_MASK_64 = (1 << 64) - 1


def _tokens(logits: torch.Tensor, samples: list[Sample]) -> list[int]:
    return [token.token_id for token in draw(logits, samples)]


def _over_positions(logits: list[float], sampling: Sampling, num_draws: int, seed: int = 11) -> list[int]:
    """Draw once per position from the same logits."""
    samples = [Sample(seed, position, sampling) for position in range(num_draws)]
    return _tokens(torch.tensor([logits]).expand(num_draws, -1), samples)


def _chi_square(counts: Counter[int], probabilities: dict[int, float], num_draws: int) -> float:
    return sum((counts[key] - num_draws * p) ** 2 / (num_draws * p) for key, p in probabilities.items())


def _limit(num_classes: int) -> float:
    """Return chi-square's 1 - 1e-4 quantile (Wilson and Hilferty)."""
    freedom = num_classes - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


# A plain sampler: one row, Python numbers, no torch.


def _mixed(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ (bits >> 31)


def _noise(seed: int, position: int, token_id: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = _mixed((_mixed(seed) + position * golden) & _MASK_64)
    bits = _mixed((key + (token_id + 1) * golden) & _MASK_64)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def _kept(scores: list[float], sampling: Sampling) -> list[int]:
    """Return the kept token ids, best first, lowest id first among equals."""
    ranked = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    mass, kept = sum(math.exp(scores[token_id]) for token_id in ranked), []
    before = 0.0
    for token_id in ranked:
        if before >= sampling.top_p * mass and sampling.top_p < 1:
            break
        before += math.exp(scores[token_id])
        kept.append(token_id)
    return [t for t in kept if sampling.min_p == 0 or scores[t] >= scores[ranked[0]] + math.log(sampling.min_p)]


def _plain_draw(logits: list[float], sample: Sample) -> int:
    allowed = [-math.inf if t in sample.banned_token_ids else logit for t, logit in enumerate(logits)]
    if sample.sampling.temperature == 0:
        return max(range(len(allowed)), key=lambda t: (allowed[t], -t))
    best = max(allowed)
    scores = [(logit - best) / sample.sampling.temperature for logit in allowed]
    kept = _kept(scores, sample.sampling)
    return max(kept, key=lambda t: scores[t] + _noise(sample.seed, sample.position, t))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.linspace(-2.0, 2.5, 13).tolist()

    counts = Counter(_over_positions(logits, Sampling(temperature), num_draws=20_000))

    probabilities = (torch.tensor(logits) / temperature).softmax(0).tolist()
    assert _chi_square(counts, dict(enumerate(probabilities)), 20_000) < _limit(13)


def test_draws_over_seeds_follow_the_softmax() -> None:
    logits = torch.linspace(-1.0, 2.0, 9)
    samples = [Sample(seed, 5, Sampling(1.0)) for seed in range(20_000)]

    counts = Counter(_tokens(logits.expand(20_000, -1), samples))

    assert _chi_square(counts, dict(enumerate(logits.softmax(0).tolist())), 20_000) < _limit(9)


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    for shift_seed, shift_position in ((0, 1), (1, 0), (1, -1)):
        places = [(seed, position) for seed in range(100) for position in range(1, 201)]
        logits = torch.zeros(len(places), 6)
        firsts = _tokens(logits, [Sample(seed, position, Sampling(1.0)) for seed, position in places])
        seconds = _tokens(logits, [Sample(s + shift_seed, p + shift_position, Sampling(1.0)) for s, p in places])

        counts = Counter(6 * first + second for first, second in zip(firsts, seconds, strict=True))

        assert _chi_square(counts, dict.fromkeys(range(36), 1 / 36), len(places)) < _limit(36)


def test_an_unlikely_token_is_drawn_with_its_probability() -> None:
    counts = Counter(_over_positions([0.0, math.log(1e-4)], Sampling(1.0), num_draws=40_000))

    assert 0 < counts[1] < 14


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_k=100),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, top_p=0.5),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, min_p=1.0),
        Sampling(1.5, top_k=5, top_p=0.8),
        Sampling(0.7, top_k=6, top_p=0.95, min_p=0.1),
    ],
    ids=lambda sampling: f"k{sampling.top_k}-p{sampling.top_p}-m{sampling.min_p}-t{sampling.temperature}",
)
def test_the_samplers_filters_keep_exactly_the_promised_tokens(sampling: Sampling) -> None:
    logits = [0.3, 1.9, -0.5, 1.2, 1.9, 0.0, 0.8, 1.9, -0.2, 0.5]

    drawn = set(_over_positions(logits, sampling, num_draws=4000))

    assert drawn == set(_kept([logit / sampling.temperature for logit in logits], sampling))


def test_every_draw_equals_a_plain_samplers() -> None:
    """The batch mixes settings; half-precision logits give ties."""
    generator = torch.Generator().manual_seed(3)
    settings = [
        Sampling(temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.4, 1.0, 2.0)
        for top_k in (0, 1, 7)
        for top_p in (1.0, 0.83, 0.31)
        for min_p in (0.0, 0.07)
    ]
    logits = (3 * torch.randn(len(settings), 40, generator=generator)).round().bfloat16()
    samples = [
        Sample((row << 57) + row, 1000 - row, sampling, frozenset({int(logits[row].argmax()), row % 40}))
        for row, sampling in enumerate(settings)
    ]

    tokens = _tokens(logits, samples)

    assert tokens == [_plain_draw(logits[row].tolist(), sample) for row, sample in enumerate(samples)]


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=2000, top_p=0.99), Sampling(1.0)])
def test_a_flat_distribution_over_a_large_vocabulary_is_filtered_exactly(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 0.01 * torch.randn(4, 3000, generator=generator)
    samples = [Sample(row, 7, sampling) for row in range(4)]

    assert _tokens(logits, samples) == [_plain_draw(logits[row].tolist(), sample) for row, sample in enumerate(samples)]


def test_the_same_seed_position_and_logits_give_the_same_token_in_any_row_and_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(64, 500, generator=generator)
    kinds = [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(), Sampling(1.3, top_k=20, min_p=0.01)]
    samples = [Sample(row, 3 * row, kinds[row % 4]) for row in range(64)]
    together = _tokens(logits, samples)

    order = torch.randperm(64, generator=generator).tolist()
    shuffled = _tokens(logits[order], [samples[row] for row in order])

    assert shuffled == [together[row] for row in order]
    assert [_tokens(logits[row : row + 1], samples[row : row + 1])[0] for row in range(64)] == together


def test_a_rows_token_does_not_depend_on_the_number_of_rows() -> None:
    logits = torch.zeros(5, 1 << 20)
    samples = [Sample(row, 1, Sampling(1.0)) for row in range(5)]

    together = _tokens(logits, samples)

    assert together == [_tokens(logits[:1], [sample])[0] for sample in samples]
    assert len(set(together)) == 5


def test_different_seeds_and_positions_differ() -> None:
    logits = torch.zeros(1, 1000).expand(50, -1)

    by_seed = _tokens(logits, [Sample((1 << 64) - 1 - seed, 4, Sampling(1.0)) for seed in range(50)])
    by_position = _tokens(logits, [Sample(4, position, Sampling(1.0)) for position in range(50)])

    assert len(set(by_seed)) > 40 and len(set(by_position)) > 40


def test_temperature_zero_draws_the_lowest_id_among_the_best_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0], [2.0, 2.0, 2.0, 2.0]])

    assert _tokens(logits, [Sample(1, 1, Sampling())] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-8, 1e-300])
def test_a_tiny_temperature_is_nearly_greedy_and_never_overflows(temperature: float) -> None:
    logits = torch.tensor([[5e4, 5.001e4, -torch.inf, 0.0]])

    assert _tokens(logits, [Sample(1, 1, Sampling(temperature))]) == [1]


def test_banned_tokens_are_never_drawn_under_any_settings() -> None:
    banned = frozenset({0, 3})
    logits = torch.tensor([[9.0, 1.0, 0.5, 8.0, 0.0]]).expand(400, -1)
    kinds = [Sampling(), Sampling(1.0), Sampling(1.0, top_k=1), Sampling(2.0, top_p=0.5)]

    drawn = _tokens(logits, [Sample(2, position, kinds[position % 4], banned) for position in range(400)])

    assert set(drawn) == {1, 2, 4}
    assert set(drawn[0::4]) == set(drawn[2::4]) == {1}


def test_logprobs_are_computed_from_the_unfiltered_logits() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 30, generator=generator)
    wanted = [None, 0, 3, 30]
    samples = [
        Sample(row, 9, Sampling(1.4, top_k=10, num_logprobs=k), frozenset({int(logits[row].argmax())}))
        for row, k in enumerate(wanted)
    ]

    drawn = draw(logits, samples)

    expected = logits.log_softmax(-1)
    assert drawn[0].logprobs is None
    for row, k in enumerate(wanted[1:], start=1):
        logprobs = drawn[row].logprobs
        assert logprobs is not None and k is not None
        assert logprobs.token_id == drawn[row].token_id
        assert logprobs.logprob == pytest.approx(float(expected[row, drawn[row].token_id]))
        best = expected[row].sort(descending=True)
        assert [token_id for token_id, _ in logprobs.top] == best.indices[:k].tolist()
        assert [logprob for _, logprob in logprobs.top] == pytest.approx(best.values[:k].tolist())


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(3, 20, dtype=torch.float64)
    before = logits.clone()

    draw(logits, [Sample(1, 2, Sampling(0.5, top_k=3, min_p=0.1), frozenset({4}))] * 3)

    assert torch.equal(logits, before)


def test_a_nucleus_wider_than_the_first_look_has_the_log_probability_of_its_token() -> None:
    logits = torch.linspace(0.0, 0.5, 5000)[None]

    drawn = draw(logits, [Sample(7, 3, Sampling(1.0, top_p=0.99, num_logprobs=1))])[0]

    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(float(logits.log_softmax(dim=-1)[0, drawn.token_id]))


@pytest.mark.cuda
def test_a_gpu_draws_the_tokens_of_a_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    logits = 2 * torch.randn(512, 5000, generator=torch.Generator().manual_seed(2))
    kinds = [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(), Sampling(1.3, top_k=20, min_p=0.01)]
    samples = [Sample(row, 3 * row, kinds[row % 4], frozenset({row})) for row in range(512)]

    assert _tokens(logits.cuda(), samples) == _tokens(logits, samples)
