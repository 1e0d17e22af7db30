"""Measure what logit rules cost: decode steps of the demo model whose requests have none, and some. The first table is
that of all features of generation that a step can have and does not.

`python -m benchmarks.logit_rules` prints the table of benchmarks/results/logit_rules.md; `--write` stores it. A pair is
one step computed twice, in random order, from the making of its samples to its drawn tokens: with the code as it is,
and with the code that looks for rules, grammars and scored prompts replaced by what stood there before. Figures are
CPU time of the thread, which other processes disturb little. The interval is that of the median of the ratios of pairs
(bootstrap, 95 %).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks.machine import about
from cluster.messages import DecodeJob, LogitRules, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.batching import chunks
from engine.scheduling.batching.chunks import banned_token_ids, chunk_of
from engine.scheduling.batching.sequences import Group, Sequence
from engine.scheduling.step import Sample, StepPlan
from engine.steps import sampler
from engine.steps.runner import NO_SCORES, ModelRunner, StartedStep
from engine.steps.sampler import StepDraws

_MODEL = Path(__file__).parents[1] / "examples" / "demo_model"
_RESULT = Path(__file__).parent / "results" / "logit_rules.md"
_BLOCK_SIZE, _CONTEXT = 16, 200
_NUM_PAIRS, _NUM_PAIRS_UNUSED, _NUM_RESAMPLED = 600, 3000, 500
_SAMPLINGS = {"greedy": Sampling(), "temperature 1, top-p 0.95": Sampling(1.0, top_p=0.95)}
_RULES = {
    "penalties": LogitRules(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5),
    "bias of 100 tokens": LogitRules(logit_bias=tuple((token_id, 1.0) for token_id in range(100))),
    "50 bad words": LogitRules(bad_words=tuple((token_id, token_id + 1) for token_id in range(50))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store the table in {_RESULT.name}")
    write = parser.parse_args().write
    engine = build_engine(
        EngineSettings(model=str(_MODEL), device="cpu", block_size=_BLOCK_SIZE, num_blocks=32 * 16, num_threads=1)
    )
    lines = [", ".join(about().values()), "", *_unused(engine), "", *_used(engine)]
    print("\n".join(lines))
    if write:
        _RESULT.write_text("# Cost of penalties, bias and bad words\n\n" + _ABOUT + "\n".join(lines) + "\n")


_ABOUT = """Decode steps of the demo model (vocabulary 1,024) at a context of 200 tokens, CPU time of one thread, by
`python -m benchmarks.logit_rules --write`. Unused rules are compared with a step without the code that looks for
them, for grammars and for prompts to score: each pair computes one step both ways, in random order. The interval is
the 95 % bootstrap interval of the median ratio, and the goal is an interval within 2 % of 1.
The model is so small that everything beside it weighs more than it does beside a model in use.

"""


def _unused(engine: Engine) -> list[str]:
    lines = ["| sequences | sampling | step, ms | ratio to a step without the code | 95 % interval |", "|---" * 5 + "|"]
    for batch in (1, 8, 32):
        for name, sampling in _SAMPLINGS.items():
            step = _step(engine, batch, sampling)
            pairs = _pairs(step, lambda step=step: _without_features(step), _NUM_PAIRS_UNUSED)  # type: ignore[misc]
            ratios = [with_code / without for with_code, without in pairs]
            low, high = _interval(ratios)
            median_ms = 1e3 * statistics.median(with_code for with_code, _ in pairs)
            ratio = statistics.median(ratios)
            lines.append(f"| {batch} | {name} | {median_ms:.2f} | {ratio:.4f} | {low:.4f} to {high:.4f} |")
    return lines


def _used(engine: Engine) -> list[str]:
    lines = ["| sequences, all with | added, ms a step | of the step |", "|---" * 3 + "|"]
    for batch in (1, 8, 32):
        for name, rules in _RULES.items():
            plain, ruled = (_step(engine, batch, Sampling(1.0, rules=chosen)) for chosen in (None, rules))
            pairs = _pairs(ruled, plain)
            added_ms = 1e3 * statistics.median(one - other for one, other in pairs)
            share = statistics.median(one / other for one, other in pairs) - 1
            lines.append(f"| {batch}, {name} | {added_ms:.3f} | {share:.1%} |")
    return lines


def _step(engine: Engine, batch: int, sampling: Sampling) -> Callable[[], float]:
    """Return a function that plans and computes one decode step and returns its seconds of CPU time."""
    running = [_sequence(number, sampling) for number in range(batch)]

    def step() -> float:
        began_s = time.thread_time()
        engine.runner.run(StepPlan(tuple(chunk_of(one, 1, _BLOCK_SIZE) for one in running)))
        return time.thread_time() - began_s

    return step


def _sequence(number: int, sampling: Sampling) -> Sequence:
    dice = random.Random(number)
    token_ids = [dice.randrange(1000) for _ in range(_CONTEXT)]
    start = SequenceStart(number, seed=number)
    job = DecodeJob(
        *("r", 0, MemberId("router", "1"), tuple(token_ids[:150]), sampling, TokenStops(500), (start,), None, 1e9)
    )
    num_blocks = -(-_CONTEXT // _BLOCK_SIZE)
    return Sequence(
        number,
        Group(number, job, 150, 0.0),
        ((0, start),),
        token_ids,
        nameless_chains()("", "native"),
        num_slots=1,
        num_computed=_CONTEXT - 1,
        block_ids=tuple(range(number * num_blocks, (number + 1) * num_blocks)),
    )


def _without_features(step: Callable[[], float]) -> float:
    """Compute a step without the code of logit rules, grammars and scored prompts."""
    without_rows = mock.patch.object(sampler, "_changed_rows", _no_rows)
    plain_start = mock.patch.object(ModelRunner, "start", _plain_start)
    with mock.patch.object(chunks, "_samples", _plain_samples), without_rows, plain_start:
        return step()


def _plain_start(runner: ModelRunner, plan: StepPlan) -> StartedStep:
    """Do what `start` did before there were masks and scored prompts."""
    draws = StepDraws(runner.logits(plan), plan, runner.compiled_draw)
    return StartedStep(runner, plan, draws, NO_SCORES, None, {}, can_feed=runner.feeds and draws.is_whole)


def _plain_samples(sequence: Sequence, draft_tokens: tuple[int, ...]) -> tuple[Sample, ...]:
    """Do what `_samples` did before there were rules; steps of this benchmark have no draft tokens."""
    job, known, num_output = sequence.group.job, len(sequence.token_ids), sequence.num_output
    banned = banned_token_ids(job.stops, num_output)
    return tuple(Sample(choice.seed, known, job.sampling, banned) for _, choice in sequence.choices)


def _no_rows(*_: object) -> tuple[None, None]:
    return None, None


def _pairs(
    one: Callable[[], float], other: Callable[[], float], num_pairs: int = _NUM_PAIRS
) -> list[tuple[float, float]]:
    """Return the times of both, in pairs whose order is random."""
    dice, pairs = random.Random(1), []
    for number in range(num_pairs + 20):
        if dice.random() < 0.5:
            pair = one(), other()
        else:
            second = other()
            pair = one(), second
        if number >= 20:
            pairs.append(pair)
    return pairs


def _interval(ratios: list[float]) -> tuple[float, float]:
    dice = random.Random(2)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_NUM_RESAMPLED))
    return medians[int(0.025 * _NUM_RESAMPLED)], medians[int(0.975 * _NUM_RESAMPLED)]


if __name__ == "__main__":
    main()
