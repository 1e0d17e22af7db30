"""The benchmark of role changes: when a worker was first of use in its new role, and which requests were lost."""

import math

from benchmarks.role_change import DECODE, PREFILL, Answer, change_of, summary


def test_a_worker_is_of_use_with_its_first_token_in_the_new_role() -> None:
    answers = [
        Answer(9.0, [10.2, 10.3], ["p1", "d0"], [10.1, 10.2]),  # sent before the call
        Answer(10.0, [10.5, 10.6], ["p1", "d0"], [10.3, 10.5]),  # placed before the router knew
        Answer(10.1, [10.7, 10.8], ["p0", "p1"], [10.4, 10.75]),
        Answer(10.1, [10.7, 11.0, 11.1], ["p0", "p2"], [10.5, 10.9]),
        Answer(10.4, [10.6, 10.7], ["p1"], [10.5]),  # one worker did both
        Answer(10.2, [10.9], []),
    ]
    change = change_of(DECODE, ["p1", "p2"], 10.0, answers[:5])
    assert change.used_s == [10.8 - 10.0, 11.0 - 10.0]
    assert (change.began_s, change.sent_s) == ([10.75 - 10.0, 10.9 - 10.0], [10.1 - 10.0, 10.1 - 10.0])
    assert change_of(DECODE, ["p3"], 10.0, answers).used_s == [math.inf]
    back = change_of(PREFILL, ["p1"], 10.0, answers)
    assert (back.used_s, back.num_requests, back.num_lost) == ([10.5 - 10.0], 6, 1)


def test_the_summary_has_the_median_and_the_worst_of_each_role_and_all_that_was_lost() -> None:
    answer = Answer(0.02, [0.1, 0.2], ["p0", "p0"], [0.05, 0.15])
    changes = [change_of(role, ["p0"], 0.0, [answer] * 3) for role in (DECODE, PREFILL)]
    assert summary(changes) == {
        "changes": 2,
        "decode_first_use_median_s": 0.2,
        "decode_first_use_worst_s": 0.2,
        "decode_began_median_s": 0.15,
        "decode_sent_median_s": 0.02,
        "prefill_first_use_median_s": 0.1,
        "prefill_first_use_worst_s": 0.1,
        "prefill_began_median_s": 0.05,
        "prefill_sent_median_s": 0.02,
        "requests": 6,
        "lost": 0,
    }
