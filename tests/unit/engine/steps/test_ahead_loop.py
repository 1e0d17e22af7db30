"""The step loop over a device that computes while the host continues: what happens between a step's launch and its
result, and the cases in which the next step is launched early.
"""

import threading

import pytest

from cluster.clock import ManualClock
from engine.scheduling.commands import (
    CancelSequences,
    ExportFailed,
    ExportFinished,
    Failed,
    Freeze,
    Frozen,
    Inspect,
    Inspected,
)
from tests.unit.engine.rigs.loop_bench import DEADLINE_S, LoopBench
from tests.unit.engine.rigs.scheduler_bench import ROUTER


def test_a_steps_events_are_sent_after_the_launch_of_the_next_step() -> None:
    bench = LoopBench()
    bench.device.can_feed = False
    bench.export(48)
    bench.loop.start()
    bench.until(ExportFinished)
    bench.end()

    steps = [what for what in bench.device.log if what in ("launch", "result", "Sealed", "ExportFinished")]
    assert steps[:7] == ["launch", "result", "launch", "Sealed", "result", "launch", "Sealed"]
    assert steps[-3:] == ["result", "Sealed", "ExportFinished"]
    assert not bench.errors


def test_the_next_chunk_of_an_export_is_launched_before_the_result_of_the_last_is_read() -> None:
    bench = LoopBench()
    bench.export(48)
    bench.loop.start()
    bench.until(ExportFinished)
    bench.end()

    steps = [what for what in bench.device.log if what in ("launch", "result", "Sealed", "ExportFinished")]
    assert bench.steps() == ["launch", "launch", "result", "launch", "result", "result"]
    assert steps.count("Sealed") == 3 and steps[-1] == "ExportFinished"


def test_a_launch_that_raises_ends_its_exports_and_the_loop_continues() -> None:
    bench = LoopBench()
    bench.device.failing_launches = {0}
    bench.export(3)
    bench.loop.start()
    bench.until(ExportFailed)
    bench.export(5)
    bench.until(ExportFinished)
    bench.end()

    assert bench.errors == ["no memory"]


def test_the_next_step_is_launched_before_the_result_of_the_last_is_read() -> None:
    bench = LoopBench()
    bench.admit(1, max_tokens=4)
    bench.loop.start()
    bench.idle()
    bench.end()

    # The prompt's step and three tokens: every end but the last has the next one behind it.
    assert bench.steps() == ["launch", "launch", "result", "launch", "result", "launch", "result", "result"]
    assert len(bench.tokens[1]) == 4


def test_launching_ahead_gives_the_same_tokens_in_the_same_order() -> None:
    told = []
    for can_feed in (True, False):
        bench = LoopBench()
        bench.device.can_feed = can_feed
        for handle, max_tokens in ((1, 9), (2, 5), (3, 12)):
            bench.admit(handle, max_tokens, frozenset({handle, 11, 13}))
        bench.loop.start()
        bench.idle()
        bench.end()
        told.append(bench.tokens)
        assert ("launch", "launch") in zip(bench.steps(), bench.steps()[1:], strict=False) or not can_feed
    assert told[0] == told[1]


def test_a_runner_that_computes_at_once_is_never_launched_ahead() -> None:
    bench = LoopBench()
    bench.device.can_feed = False
    bench.admit(1, max_tokens=4)
    bench.loop.start()
    bench.idle()
    bench.end()
    assert bench.steps() == ["launch", "result"] * 4


def test_a_cancel_during_a_step_frees_the_blocks_after_the_step() -> None:
    bench = LoopBench()
    bench.device.before_result = lambda number: (
        bench.loop.post(CancelSequences(ROUTER, frozenset({1}))) if number == 2 else None
    )
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    assert bench.idle().blocks["free"] == 64
    bench.end()
    assert len(bench.tokens[1]) < 6


def test_a_sequence_freezes_after_all_launched_steps_have_ended() -> None:
    bench = LoopBench()
    bench.device.before_result = lambda number: bench.loop.post(Freeze(b"t", ROUTER, 1)) if number == 2 else None
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    frozen = bench.until(Frozen)
    assert isinstance(frozen, Frozen)
    assert [*frozen.token_ids[3:], frozen.last_token_id] == bench.tokens[1]
    bench.loop.post(CancelSequences(ROUTER, frozenset({1})))
    bench.end()
    assert bench.device.log.count("launch") == bench.device.log.count("result")


def test_commands_behind_a_waiting_command_keep_their_order() -> None:
    bench = LoopBench()

    def post(number: int) -> None:
        if number == 1:
            bench.loop.post(Freeze(b"t", ROUTER, 1))
            bench.loop.post(Inspect(5))

    bench.device.before_result = post
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    bench.until(Inspected)
    bench.end()
    assert bench.device.log.index("Frozen") < bench.device.log.index("Inspected")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_step_with_another_in_flight_ends_only_its_own_sequences(failing: int) -> None:
    bench = LoopBench()
    bench.device.failing_results = {failing}
    bench.admit(1, max_tokens=6)
    bench.loop.start()
    assert isinstance(failed := bench.until(Failed), Failed) and failed.handles == (1,)
    bench.admit(2, max_tokens=6)
    assert bench.idle().blocks["free"] == 64
    bench.end()

    assert bench.errors == ["the device is gone"]
    assert len(bench.tokens.get(1, [])) == failing and len(bench.tokens[2]) == 6


def test_a_failed_launch_is_reported_after_the_result_of_the_earlier_step() -> None:
    bench = LoopBench()
    bench.device.failing_launches = {2}
    bench.admit(1, max_tokens=6)
    bench.loop.start()
    bench.until(Failed)
    assert bench.idle().blocks["free"] == 64
    bench.end()

    assert bench.errors == ["no memory"]
    assert len(bench.tokens[1]) == 2
    assert [what for what in bench.device.log if what in ("Started", "StepTokens", "Failed")] == [
        "Started",
        "StepTokens",
        "StepTokens",
        "Failed",
    ]


def test_stop_waits_for_both_steps_in_flight_and_launches_no_other() -> None:
    bench = LoopBench()
    entered, may_go = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 3:
            entered.set()
            assert may_go.wait(DEADLINE_S)

    bench.device.before_result = hold
    bench.admit(1, max_tokens=50)
    bench.loop.start()
    assert entered.wait(DEADLINE_S)
    assert not bench.loop.stop(0.0)
    may_go.set()
    bench.end()
    assert bench.steps().count("launch") == bench.steps().count("result") == 5
    assert len(bench.tokens[1]) == 5


def test_progress_reports_the_running_step_from_the_end_of_the_earlier_step() -> None:
    clock = ManualClock(5.0)
    bench = LoopBench(clock)
    seen = []

    def look(number: int) -> None:
        progress = bench.loop.progress
        plan = progress.plan
        assert plan is not None
        seen.append((progress.steps, progress.busy_since_s, plan.chunks[0].start))
        clock.advance(1.0)

    bench.device.before_result = look
    bench.admit(1, max_tokens=4)
    bench.loop.start()
    bench.idle()
    bench.end()
    assert seen == [(0, 5.0, 0), (1, 6.0, 3), (2, 7.0, 4), (3, 8.0, 5)]
    assert (bench.loop.progress.steps, bench.loop.progress.busy_since_s) == (4, None)
    assert bench.loop.progress.longest_step_s == 1.0
