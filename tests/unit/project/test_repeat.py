"""The log of repeated test runs: the runs read from it, and the runs that remain."""

from dataclasses import replace

import pytest

from tests.repeat.log import Failure, Kind, Outcome, Run, code_digest, left_to_do, read_junit, read_log

QUIET, LOADED = Kind("quiet", 3, (), is_loaded=False), Kind("loaded", 2, (), is_loaded=True)
RUN = Run("c0", "code", "quiet", "2026-01-01T00:00:00+00:00", 400.0, 7, 1, {"passed": 3}, (Failure("a::b", "no"),))
JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" tests="5">
<testcase classname="tests.unit.test_a" name="test_good" time="0.1" />
<testcase classname="tests.unit.test_a" name="test_bad[1]"><failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_worse"><error message="failed on setup">trace</error></testcase>
<testcase classname="tests.unit.test_a" name="test_other"><skipped type="pytest.skip" message="needs a GPU">x</skipped></testcase>
<testcase classname="tests.unit.test_b" name="test_good" time="0.1" />
</testsuite></testsuites>"""  # noqa: E501


def test_runs_in_the_log_of_this_code_are_not_repeated() -> None:
    log = [RUN, replace(RUN, kind="loaded"), replace(RUN, code="other"), replace(RUN, commit="c1")]
    assert left_to_do(log, "code", (QUIET, LOADED)) == [QUIET, LOADED]
    assert left_to_do(log, "new", (QUIET, LOADED)) == [QUIET] * 3 + [LOADED] * 2


def test_more_runs_than_wanted_leave_no_run_to_do() -> None:
    assert left_to_do([RUN] * 4, "code", (QUIET,)) == []


def test_a_line_of_the_log_reads_back_unchanged() -> None:
    assert read_log([RUN.to_line(), "\n", replace(RUN, failures=()).to_line()]) == [RUN, replace(RUN, failures=())]


def test_a_line_that_was_cut_is_an_error() -> None:
    with pytest.raises(ValueError):
        read_log([RUN.to_line()[:20]])


def test_outcomes_are_counted_and_failures_named_by_their_first_line() -> None:
    assert read_junit(JUNIT) == Outcome(
        {"passed": 2, "failed": 1, "error": 1, "skipped": 1},
        (
            Failure("tests.unit.test_a::test_bad[1]", "assert 1 == 2"),
            Failure("tests.unit.test_a::test_worse", "failed on setup"),
        ),
    )


def test_a_line_in_the_log_does_not_change_the_digest_of_the_code() -> None:
    tree = "100644 blob aaaa\tcluster/keys.py\n100644 blob bbbb\tbenchmarks/results/test_repeat.jsonl\n"
    assert code_digest(tree) == code_digest(tree.replace("bbbb", "cccc"))
    assert code_digest(tree) != code_digest(tree.replace("aaaa", "cccc"))
