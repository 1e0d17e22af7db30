"""A short soak passes, and a faulty one is reported as such."""

import pytest

from tests.soak.__main__ import busy_loops, main
from tests.soak.result import Soak


def _whole() -> Soak:
    memory = {"decode0": [10.0, 10.0, 10.1, 10.1]}
    return Soak(
        0.05,
        1,
        "test",
        seconds=10.0,
        num_answers=5,
        faults={"flipped": 1},
        rss_mb=memory,
        descriptors={"decode0": [3, 3]},
    )


def test_only_a_run_with_faults_and_without_failures_passes() -> None:
    assert _whole().is_good
    harmed = [_whole() for _ in range(8)]
    harmed[0].num_wrong = 1
    harmed[1].num_failed = 1
    harmed[2].faults = {}
    harmed[3].rss_mb = {"decode0": [10.0, 10.0, 10.4, 10.6]}
    harmed[4].blocks_left = {"decode0": {"quarantined": 1}}
    harmed[5].members_lost = ["decode0"]
    harmed[6].false_suspicions = 1
    harmed[7].hedges = 1
    assert not any(soak.is_good for soak in harmed)
    assert "NOT GOOD" in harmed[0].as_markdown() and "wrong 1" in harmed[0].as_markdown()


def test_busy_loops_end_with_the_block() -> None:
    with busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert all(loop.returncode is not None for loop in loops)


@pytest.mark.slow
async def test_a_short_soak_passes() -> None:
    soak = await main(minutes=0.3, fault_rate=0.2, seed=5)
    assert soak.is_good, soak.as_markdown()
