"""The baseline: a batch that nobody joins and nobody leaves before all are done (FasterTransformer behind Triton)."""

from itertools import groupby

import pytest

from engine.scheduling.policies import StaticBatching, make_policy
from tests.unit.scheduling.decoding import Asked, Decoded, decode, limits, scheduler
from tests.unit.scheduling.test_continuous_batching import ALL_AT_ONCE, PER_STEP, SLOTS, shortened
from tests.unit.scheduling.traces import conversation_rows


def in_batches(asked: list[Asked], policy: StaticBatching) -> Decoded:
    decode_limits = limits(max_prefill_tokens=ALL_AT_ONCE, max_num_seqs=SLOTS)
    return decode(asked, scheduler(decode_limits, policy), PER_STEP)


def padding(decoded: Decoded) -> float:
    """What a server that pads a batch's prompts to the longest would compute for nothing, of all it computes."""
    starts = sorted((answer.token_times_s[0], answer.asked.num_prompt) for answer in decoded.answers)
    batches = [[length for _, length in batch] for _, batch in groupby(starts, key=lambda start: start[0])]
    assert {len(batch) for batch in batches} == {SLOTS}
    return 1 - sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)


@pytest.mark.parametrize("by", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_groups_of_eight_conversations_use_55_percent_of_their_slots(by: int) -> None:
    asked = shortened(conversation_rows(2000), by)
    decoded = in_batches(asked, StaticBatching())
    assert sum(one.num_output for one in asked) / (SLOTS * len(decoded.steps)) == pytest.approx(0.551, abs=0.01)


def test_nobody_joins_a_batch_and_nobody_leaves_it() -> None:
    asked = [Asked(num_prompt=4, num_output=num_output) for num_output in (3, 30)]
    asked += [Asked(arrives_s=2.5, num_prompt=4, num_output=num_output) for num_output in (2, 2)]
    answers = decode(asked, scheduler(limits(), make_policy("static")), PER_STEP).answers
    assert [answer.token_times_s[0] for answer in answers] == [1.0, 1.0, 31.0, 31.0]


@pytest.mark.parametrize(("policy", "wasted"), [(StaticBatching(), 0.595), (StaticBatching("static-sorted", 64), 0.17)])
def test_sorting_eight_batches_by_length_spares_most_of_the_padding(policy: StaticBatching, wasted: float) -> None:
    asked = [Asked(num_prompt=row.num_prompt, num_output=2) for row in conversation_rows(2000)]
    decoded = in_batches(asked, policy)
    assert padding(decoded) == pytest.approx(wasted, abs=0.01)
    # Tandem pads nothing in either: a step has the tokens that there are.
    assert sum(step.num_tokens for step in decoded.steps) == sum(one.num_prompt + 1 for one in asked)
