"""Block arithmetic and the budget of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import FinishReason, TokenStops
from cluster.request_size import blocks_for, sealed_blocks, tail_length
from engine.scheduling.batching.chunks import banned_token_ids, finish_reason
from engine.scheduling.batching.sequences import Deadlines
from engine.scheduling.step import ChunkBudget


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "sealed", "tail"),
    [(0, 0, 0, 0), (1, 1, 0, 1), (15, 1, 0, 15), (16, 1, 1, 0), (17, 2, 1, 1)],
)
def test_tokens_fill_blocks_of_sixteen(num_tokens: int, blocks: int, sealed: int, tail: int) -> None:
    assert blocks_for(num_tokens, 16) == blocks
    assert sealed_blocks(num_tokens, 16) == sealed
    assert tail_length(num_tokens, 16) == tail


@given(st.integers(1, 64), st.integers(0, 80), st.lists(st.integers(1, 100)))
def test_chunks_spend_the_whole_budget_while_there_is_work(budget: int, num_decodes: int, wanted: list[int]) -> None:
    chunk_budget = ChunkBudget(budget, num_decodes)
    available = max(1, budget - num_decodes)

    chunks = [chunk_budget.take(num_tokens) for num_tokens in wanted]

    assert sum(chunks) == min(available, sum(wanted))
    first_short = next((i for i, chunk in enumerate(chunks) if chunk < wanted[i]), len(chunks))
    assert not any(chunks[first_short + 1 :]), "no chunk overtakes"


def test_the_chunks_of_a_lone_prompt_end_on_block_boundaries() -> None:
    ends, num_left = [], 1000
    while num_left:
        num_left -= ChunkBudget(64).take(num_left)
        ends.append(1000 - num_left)

    assert [end % 16 for end in ends[:-1]] == [0] * (len(ends) - 1)
    assert ends[-1] == 1000


def test_stop_tokens_are_held_back_until_min_tokens_and_max_tokens_ends() -> None:
    stops = TokenStops(max_tokens=3, min_tokens=2, stop_token_ids=frozenset({7}))

    assert [banned_token_ids(stops, n) for n in range(3)] == [frozenset({7}), frozenset({7}), frozenset()]
    assert finish_reason(stops, 7, 3) is FinishReason.STOP
    assert finish_reason(stops, 8, 2) is None
    assert finish_reason(stops, 8, 3) is FinishReason.LENGTH


def test_deadlines_are_due_once_and_never_after_a_discard() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for name, deadline_s in (("late", 9.0), ("early", 3.0), ("gone", 2.0)):
        deadlines.add(name, deadline_s)
    deadlines.discard("gone")

    assert deadlines.due(2.9) == ()
    assert deadlines.due(3.0) == ("early",)
    assert deadlines.next_s() == 9.0
    assert deadlines.due(10.0) == ("late",)
    assert deadlines.next_s() is None
