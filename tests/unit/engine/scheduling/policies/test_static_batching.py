"""The baseline: no sequence joins or leaves a batch before all its sequences have ended (FasterTransformer behind
Triton).
"""

from itertools import groupby

import pytest

from benchmarks.static_batching import StaticBatching
from tests.unit.engine.scheduling.policies.decoding import Asked, Decoded, decode, limits, scheduler
from tests.unit.engine.scheduling.policies.test_continuous_batching import ALL_AT_ONCE, PER_STEP, SLOTS, shortened
from tests.unit.engine.scheduling.policies.traces import conversation_rows


def in_batches(asked: list[Asked], window: int = 1) -> Decoded:
    decode_limits = limits(max_prefill_tokens=ALL_AT_ONCE, max_num_seqs=SLOTS)
    return decode(asked, StaticBatching(scheduler(decode_limits), SLOTS, window), PER_STEP)


def padding(decoded: Decoded) -> float:
    """Return the share of padding in all computed prompt tokens, if a server pads each batch to its longest prompt."""
    starts = sorted((answer.token_times_s[0], answer.asked.num_prompt) for answer in decoded.answers)
    batches = [[length for _, length in batch] for _, batch in groupby(starts, key=lambda start: start[0])]
    assert {len(batch) for batch in batches} == {SLOTS}
    return 1 - sum(map(sum, batches)) / sum(len(batch) * max(batch) for batch in batches)


@pytest.mark.parametrize("by", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_groups_of_eight_conversations_use_55_percent_of_their_slots(by: int) -> None:
    asked = shortened(conversation_rows(2000), by)
    decoded = in_batches(asked)
    assert sum(one.num_output for one in asked) / (SLOTS * len(decoded.steps)) == pytest.approx(0.551, abs=0.01)


def test_a_static_batch_keeps_its_sequences_from_start_to_end() -> None:
    asked = [Asked(num_prompt=4, num_output=num_output) for num_output in (3, 30)]
    asked += [Asked(arrives_s=2.5, num_prompt=4, num_output=num_output) for num_output in (2, 2)]
    answers = decode(asked, StaticBatching(scheduler(limits()), 2), PER_STEP).answers
    assert [answer.token_times_s[0] for answer in answers] == [1.0, 1.0, 31.0, 31.0]


@pytest.mark.parametrize(("window", "wasted"), [(1, 0.595), (64, 0.17)])
def test_sorting_eight_batches_by_length_spares_most_of_the_padding(window: int, wasted: float) -> None:
    asked = [Asked(num_prompt=row.num_prompt, num_output=2) for row in conversation_rows(2000)]
    decoded = in_batches(asked, window)
    assert padding(decoded) == pytest.approx(wasted, abs=0.01)
    # Tandem pads nothing in either: a step has the tokens that there are.
    assert sum(step.num_tokens for step in decoded.steps) == sum(one.num_prompt + 1 for one in asked)
