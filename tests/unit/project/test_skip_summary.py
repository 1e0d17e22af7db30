"""The summary names each reason of skipped tests once."""

from tests.skip_summary import skip_lines


def test_each_reason_is_one_line_with_its_count_and_the_most_frequent_comes_first() -> None:
    reasons = ["Skipped: no compiler", *["Skipped: needs a GPU"] * 3, "needs a GPU", "Skipped: needs Triton"]
    assert skip_lines(reasons) == ["SKIPPED [4] needs a GPU", "SKIPPED [1] needs Triton", "SKIPPED [1] no compiler"]


def test_a_run_without_skips_has_no_line() -> None:
    assert skip_lines([]) == []
