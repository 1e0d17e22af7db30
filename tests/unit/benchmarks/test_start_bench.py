"""The table of the starts compares the runs of one round with each other."""

from benchmarks.start.runs import Run
from benchmarks.start.table import interval, phases, totals


def test_ratios_are_paired_by_round() -> None:
    runs = {
        "tandem up": [Run(4.0, 2.0), Run(9.0, 2.0), Run(2.0, 2.0)],
        "weights": [Run(2.0, 1.0), Run(6.0, 1.0), Run(4.0, 1.0)],
        "tandem up (before)": [Run(8.0, 4.0), Run(9.0, 8.0), Run(8.0, 2.0)],
    }

    _, _, ours, weights, _ = totals({"small": runs})

    assert ours == (
        "| small | tandem up | 4.00 [2.00, 9.00] | 2.00 [2.00, 2.00] | 0.50 [0.25, 1.00] | 1.50 [0.50, 2.00] "
        "| 0.50 [0.25, 1.00] | 2.00 [2.00, 2.00] |"
    )
    assert weights == "| small | weights | 4.00 [2.00, 6.00] | 1.00 [1.00, 1.00] |  |  |  |  |"


def test_phases_keep_the_order_in_which_they_came() -> None:
    runs = {"tandem up": [Run(phases={"imports": 1.0, "workers": 3.0}), Run(phases={"imports": 2.0, "workers": 3.0})]}

    assert phases({"small": runs})[2:] == [
        "| imports | 1.50 [1.00, 2.00] |",
        "| workers | 3.00 [3.00, 3.00] |",
    ]


def test_an_interval_is_the_median_with_the_least_and_the_most() -> None:
    assert interval([3.0, 1.0, 2.0]) == "2.00 [1.00, 3.00]"
