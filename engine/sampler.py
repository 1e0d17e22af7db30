"""Draws tokens from logits. Owns the noise and the filters; keeps no state between calls.

A token is argmax(logits / temperature + Gumbel noise) over the tokens that the filters keep, which is a draw from their
softmax (Gumbel-max). The noise is a counter-based hash (the finaliser of SplitMix64, Steele et al. 2014) of seed,
position and token id: the same logits at the same position give the same token in any row, batch, process or worker.

Random rows are computed in float64. The noise then has 52 bits, so unlikely tokens keep their share down to 1e-15, and
the last-bit differences between the logarithms of a CPU and a GPU decide a draw less than once in 1e12.
"""

from collections.abc import Iterator, Sequence

import torch

from cluster.messages import Sampling, TokenLogprobs
from engine.step import DrawnToken, Sample

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FIRST_WIDTH = 1024  # how many of the best tokens are looked at before all are sorted
_ELEMENTS_AT_ONCE = 1 << 22  # bounds the temporaries to a few hundred megabytes


@torch.inference_mode()
def draw(logits: torch.Tensor, samples: Sequence[Sample]) -> list[DrawnToken]:
    """`logits`: floats `[rows, vocab]`; row i is drawn from by `samples[i]`, which sees no other row.

    Log-probabilities are those of the logits as they came: before temperature, filters and bans.
    """
    assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows of logits for {len(samples)} samples"
    allowed = _without_banned(logits, samples)
    token_ids = _argmax(allowed)
    random_rows = [row for row, sample in enumerate(samples) if sample.sampling.temperature > 0]
    for rows in _slices(random_rows, logits.shape[1]):
        index = torch.tensor(rows, device=logits.device)
        token_ids[index] = _draw_random(allowed[index], [samples[row] for row in rows])
    chosen: list[int] = token_ids.tolist()
    logprobs = _logprobs(logits, samples, chosen)
    return [DrawnToken(token_id, logprobs.get(row)) for row, token_id in enumerate(chosen)]


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """Of each row; the lowest among equals. On a CPU NumPy's, which is twenty times as quick as torch's for 16 bits."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.from_numpy(wide.numpy().argmax(axis=-1))


def _without_banned(logits: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    banned = [(row, token_id) for row, sample in enumerate(samples) for token_id in sample.banned_token_ids]
    if not banned:
        return logits
    rows, token_ids = torch.tensor(banned, device=logits.device).T
    return logits.index_put((rows, token_ids), torch.tensor(-torch.inf, dtype=logits.dtype, device=logits.device))


def _slices(rows: list[int], vocab_size: int) -> Iterator[list[int]]:
    num_rows = max(1, _ELEMENTS_AT_ONCE // vocab_size)
    return (rows[start : start + num_rows] for start in range(0, len(rows), num_rows))


def _draw_random(logits: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    scores = logits.double()
    scores -= scores.amax(dim=-1, keepdim=True)  # the best is 0, so no temperature overflows
    scores /= _column([sample.sampling.temperature for sample in samples], scores)
    scores = _filtered(scores, [sample.sampling for sample in samples])
    keys = torch.tensor([_noise_key(sample.seed, sample.position) for sample in samples], device=logits.device)
    return _argmax(_gumbel_noise(keys, logits.shape[1]).add_(scores))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _filtered(scores: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Drops what top-k, then top-p of what top-k left, and min-p do not keep."""
    if any(sampling.min_p > 0 for sampling in samplings):
        least = _column([sampling.min_p for sampling in samplings], scores).log()
        scores = scores.masked_fill(scores < least, -torch.inf)
    vocab_size = scores.shape[1]
    ranked = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocab_size or s.top_p < 1]
    if ranked:
        index = torch.tensor(ranked, device=scores.device)
        rows = scores[index]
        top_k = [samplings[row].top_k or vocab_size for row in ranked]
        counts, least = _num_kept(rows, top_k, [samplings[row].top_p for row in ranked])
        scores[index] = rows.masked_fill(~_best(rows, counts, least), -torch.inf)
    return scores


def _num_kept(scores: torch.Tensor, top_k: list[int], top_p: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the best tokens each row keeps, and the score of the last of them; both `[rows, 1]`."""
    vocab_size = scores.shape[1]
    limits = [k for k in top_k if k < vocab_size]
    width = min(vocab_size, max(_FIRST_WIDTH, *limits) if limits else _FIRST_WIDTH)
    counts, least = _num_kept_of(width, scores, top_k, top_p)
    full = torch.tensor([[k >= vocab_size] for k in top_k], device=scores.device)
    if width < vocab_size and bool(((counts == width) & full).any()):
        counts, least = _num_kept_of(vocab_size, scores, top_k, top_p)
    return counts, least


def _num_kept_of(
    width: int, scores: torch.Tensor, top_k: list[int], top_p: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, looking at the best `width` only. A count of `width` may then be too low where top-k is off."""
    best = scores.topk(width, dim=-1).values
    weights = best.exp()
    sums = weights.cumsum(dim=-1)
    limit = torch.tensor(top_k, device=scores.device).clamp(max=scores.shape[1]).unsqueeze(1)
    all_weights = scores.exp().sum(dim=-1, keepdim=True)
    mass = torch.where(limit < scores.shape[1], sums.gather(1, limit.clamp(max=width) - 1), all_weights)
    # A share of 1 keeps all, whatever the sums round to.
    nucleus = mass * _column([p if p < 1 else torch.inf for p in top_p], scores)
    before = sums - weights
    kept = (before < nucleus) & (torch.arange(width, device=scores.device) < limit)
    counts = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return counts, best.gather(1, counts - 1)


def _best(scores: torch.Tensor, counts: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Marks exactly `counts` tokens per row: the best, and among equals the lowest token ids."""
    above, equal = scores > least, scores == least
    num_equal_kept = counts - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= num_equal_kept))


def _noise_key(seed: int, position: int) -> int:
    """A signed 64-bit key for all the noise at one position of one sequence."""
    key = _mixed((_mixed(seed & _MASK_64) + position * _GOLDEN) & _MASK_64)
    return _signed(key)


def _gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`keys`: int64 `[rows]`. Noise for every token id, float64 `[rows, vocab]`, finite."""
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GOLDEN)
    bits = keys.unsqueeze(1) + counters
    bits = bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_MIX_1))
    bits = bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_MIX_2))
    bits = bits.bitwise_xor_(_shifted(bits, 31))
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)  # 52 bits and a half: never 0, never 1
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, distance: int) -> torch.Tensor:
    """A logical shift to the right: int64 shifts copy the sign."""
    return (bits >> distance).bitwise_and_((1 << (64 - distance)) - 1)


def _mixed(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK_64
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _logprobs(logits: torch.Tensor, samples: Sequence[Sample], chosen: list[int]) -> dict[int, TokenLogprobs]:
    """By row, for the samples that want them."""
    wanted = {row: s.sampling.num_logprobs for row, s in enumerate(samples) if s.sampling.num_logprobs is not None}
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits.device)
    logprobs = logits[rows].float().log_softmax(dim=-1)
    of_chosen = logprobs.gather(1, torch.tensor([[chosen[row]] for row in wanted], device=logits.device))
    best = logprobs.topk(min(max(wanted.values()), logits.shape[1]), dim=-1)
    columns = zip(wanted.items(), of_chosen[:, 0].tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        row: TokenLogprobs(chosen[row], logprob, tuple(zip(token_ids[:num_top], values[:num_top], strict=True)))
        for (row, num_top), logprob, token_ids, values in columns
    }
