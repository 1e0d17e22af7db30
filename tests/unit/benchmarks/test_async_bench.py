"""The benchmark of steps planned ahead: sequences come and go, and steps are planned ahead only in the runs that ask
for it.
"""

from benchmarks.async_scheduling import Shape, measured, table


def test_steps_are_planned_ahead_only_in_the_runs_that_ask_for_it() -> None:
    runs = measured(num_steps=30, num_rounds=1, shapes=(Shape(batch=3, step_s=10.0, mean_output=8),))

    without, ahead = runs
    assert without.ahead_share == 0 and ahead.ahead_share > 0.5
    assert without.wait_s > 0 and without.commands_per_step > 0
    assert "| 3 | 10000 ms | 8 tokens |" in table(runs)
