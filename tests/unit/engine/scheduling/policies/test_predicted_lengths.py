"""The value of predicted lengths in memory (S3, Jin et al., 2023): as many sequences as fit until their end, and never
more than the pool, even with wrong predictions.
"""

import random
from statistics import mean

import pytest

from engine.scheduling.length_prediction import LengthPredictor
from tests.unit.engine.scheduling.policies.decoding import Asked, Decoded, decode, limits, scheduler
from tests.unit.engine.scheduling.policies.simulation import StepCost

PER_STEP = StepCost(fixed_s=1.0)
NUM_BLOCKS = 128
MAX_TOKENS = 1000


class Oracle(LengthPredictor):
    """A predictor that reads each length from the tenant's name. A share of its predictions is wrong, by half or by
    double.
    """

    def __init__(self, wrong: float) -> None:
        super().__init__()
        self._wrong = wrong

    def predict(self, tenant: str, num_prompt: int, num_output: int, max_tokens: int) -> int:
        dice = random.Random(tenant)
        factor = dice.choice((0.5, 2.0)) if dice.random() < self._wrong else 1.0
        predicted = int(int(tenant.partition(" ")[0]) * factor)
        return min(max(predicted, num_output + 1), max_tokens)


def conversations() -> list[Asked]:
    dice = random.Random(1)
    lengths = [min(300, max(4, int(dice.lognormvariate(3.6, 0.9)))) for _ in range(200)]
    return [
        Asked(num_prompt=dice.randrange(8, 100), num_output=length, max_tokens=MAX_TOKENS, tenant=f"{length} {number}")
        for number, length in enumerate(lengths)
    ]


def decoded(lengths: LengthPredictor | None) -> Decoded:
    """Decode, and check that every output equals that of the sequence alone and that the pool was never exceeded."""
    decode_limits = limits(num_blocks=NUM_BLOCKS, max_num_seqs=256, max_prefill_tokens=4096)
    decoded = decode(conversations(), scheduler(decode_limits, lengths=lengths), PER_STEP, num_blocks=NUM_BLOCKS)
    decoded.assert_exact()
    return decoded


def share_of_ideal(decoded: Decoded) -> float:
    """Return the mean share of blocks in use while sequences wait, which is the share of the ideal number of running
    sequences.
    """
    last_start = max(place for place, step in enumerate(decoded.steps) if step.num_tokens > step.num_drawn)
    num_blocks = [sum(len(chunk.block_ids) for chunk in step.plan.chunks) for step in decoded.steps[:last_start]]
    return mean(num_blocks) / NUM_BLOCKS


def test_with_known_lengths_four_fifths_of_the_ideal_run_at_once() -> None:
    with_oracle = decoded(Oracle(wrong=0.0))
    assert share_of_ideal(with_oracle) >= 0.8
    assert with_oracle.inspected.figures["preemptions"] == 0


@pytest.mark.parametrize("wrong", [pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_wrong_predictions_cost_preemptions_and_never_exceed_the_pool(wrong: float) -> None:
    with_mistakes = decoded(Oracle(wrong))
    assert share_of_ideal(with_mistakes) >= 0.8
    assert with_mistakes.inspected.figures["preemptions"] > 0


def test_a_predictor_that_learns_from_ended_sequences_reduces_preemptions() -> None:
    """Without predictions, more sequences start than fit until their end."""
    learning, blind = decoded(LengthPredictor(0.7)), decoded(None)
    assert learning.inspected.figures["preemptions"] < 0.7 * blind.inspected.figures["preemptions"]
