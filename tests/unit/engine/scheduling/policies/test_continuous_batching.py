"""Sequences join and leave between two steps (Orca, Yu et al., 2022), and blocks are reserved as they are filled
(PagedAttention, Kwon et al., 2023): the gain of both on a real conversation's lengths.
"""

import pytest

from tests.unit.engine.scheduling.policies.decoding import BLOCK_SIZE, Asked, decode, limits, scheduler
from tests.unit.engine.scheduling.policies.simulation import StepCost
from tests.unit.engine.scheduling.policies.traces import Row, conversation_rows

SLOTS = 8
PER_STEP = StepCost(fixed_s=1.0)
ALL_AT_ONCE = 1 << 20  # a budget that holds every prompt


def shortened(rows: list[Row], by: int) -> list[Asked]:
    """Return the rows with one token of prompt and their output divided by `by`: the sequences share steps as
    before.
    """
    return [Asked(num_prompt=1, num_output=-(-row.num_output // by)) for row in rows]


def static_slot_use(asked: list[Asked]) -> float:
    """Return the share of slots used by groups in order of arrival, each group as long as its longest sequence."""
    lengths = [one.num_output for one in asked]
    groups = [lengths[first : first + SLOTS] for first in range(0, len(lengths), SLOTS)]
    return sum(lengths) / sum(SLOTS * max(group) for group in groups)


def test_groups_of_eight_conversations_would_use_55_percent_of_their_slots() -> None:
    assert static_slot_use(shortened(conversation_rows(2000), by=1)) == pytest.approx(0.551, abs=0.001)


@pytest.mark.parametrize("by", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_joining_between_steps_reaches_nine_tenths_of_the_ideal(by: int) -> None:
    """The ideal is that no slot is ever empty: 1.81 times the rate of static batching with 8 slots."""
    asked = shortened(conversation_rows(2000), by)
    decoded = decode(asked, scheduler(limits(max_prefill_tokens=ALL_AT_ONCE, max_num_seqs=SLOTS)), PER_STEP)
    static_rate = SLOTS * static_slot_use(asked)
    ideal = SLOTS / static_rate
    assert ideal == pytest.approx(1.81, abs=0.02)
    assert decoded.output_rate / static_rate >= 0.9 * ideal


def test_a_sequence_that_arrives_during_a_step_starts_in_the_next_one() -> None:
    asked = [Asked(num_prompt=40, num_output=60) for _ in range(4)] + [
        Asked(arrives_s=20.5, num_prompt=40, num_output=5)
    ]
    late = decode(asked, scheduler(limits()), PER_STEP).answers[-1]
    assert late.token_times_s[0] == 22.0  # the step that ran when it came ended at 21


def test_continuous_batching_gives_the_tokens_of_a_serial_run() -> None:
    asked = [
        Asked(arrives_s=1.5 * number, num_prompt=1 + 53 * number % 90, num_output=1 + 31 * number % 60)
        for number in range(40)
    ]
    num_blocks = 40  # so few that sequences are preempted
    decode_limits = limits(num_blocks=num_blocks, max_prefill_tokens=32)
    decoded = decode(asked, scheduler(decode_limits), PER_STEP, num_blocks=num_blocks)
    decoded.assert_exact()
    assert decoded.inspected.figures["preemptions"] > 0


def test_blocks_of_sixteen_tokens_waste_half_a_percent() -> None:
    """The share counts all positions of each conversation's blocks, at the conversation's end."""
    rows = conversation_rows(2000)
    asked = [Asked(num_prompt=row.num_prompt + row.num_output - 1, num_output=1) for row in rows]
    decoded = decode(asked, scheduler(limits(max_prefill_tokens=ALL_AT_ONCE)), PER_STEP)
    chunks = [chunk for step in decoded.steps for chunk in step.plan.chunks]
    assert len(chunks) == len(rows)
    held = sum(len(chunk.block_ids) for chunk in chunks) * BLOCK_SIZE
    assert 1 - sum(chunk.end for chunk in chunks) / held == pytest.approx(0.0055, abs=0.001)
