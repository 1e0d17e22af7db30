"""Which sequences of a worker that leaves should not wait for their end there."""

from router.policies.course import Course, to_move

_PAUSES_S = [number / 8 for number in range(100)]


def _course(num_left: int, token_s: float | None) -> Course:
    """One that has shown its pace, or None: not yet; so many tokens are left."""
    course = Course(num_left + 3)
    for number in range(3):
        course.drew(number * (token_s or 0.0))
    if token_s is None:
        course = Course(num_left)
    return course


def test_what_ends_within_half_of_the_time_that_is_left_stays() -> None:
    courses = {1: _course(100, 0.1), 2: _course(101, 0.1)}
    assert to_move(courses, now_s=5.0, leaves_at_s=25.05) == [2]
    assert to_move(courses, now_s=5.0, leaves_at_s=26.0) == []


def test_whose_pace_is_unknown_moves_however_little_is_left() -> None:
    once = Course(2)
    once.drew(1.0)
    assert to_move({1: Course(1), 2: once}, now_s=0.0, leaves_at_s=1e9) == [1, 2]


def test_those_with_most_left_go_first() -> None:
    courses = {1: _course(50, 1.0), 2: _course(900, 1.0), 3: _course(200, None)}
    assert to_move(courses, now_s=0.0, leaves_at_s=10.0) == [2, 3, 1]


def test_when_no_time_is_left_nothing_stays() -> None:
    assert to_move({1: _course(1, 0.001)}, now_s=10.0, leaves_at_s=10.0) == [1]


def test_a_batch_that_becomes_slower_is_noticed() -> None:
    course = _course(1000, 0.01)
    assert course.ends_within(11.0)
    for number in range(20):
        course.drew(1.0 + number)
    assert not course.ends_within(11.0)


def test_what_could_not_move_is_left_in_peace_each_time_for_longer_and_then_tried_again() -> None:
    course, now_s, pauses_s = _course(100, 1.0), 0.0, list[float]()
    for _ in range(8):
        course.stayed(now_s)
        assert to_move({1: course}, now_s, now_s + 1.0) == []
        pauses_s.append(next(pause_s for pause_s in _PAUSES_S if course.may_move(now_s + pause_s)))
        now_s += pauses_s[-1]
        assert to_move({1: course}, now_s, now_s + 1.0) == [1]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[0] < 0.5 < 2.0 < pauses_s[-1] == pauses_s[-2]


def test_what_was_preempted_may_move_as_soon_as_it_draws_again() -> None:
    course = _course(100, 1.0)
    course.is_waiting = True
    for _ in range(5):
        course.stayed(10.0)
    assert to_move({1: course}, 10.5, 11.0) == []
    course.drew(10.5)
    assert to_move({1: course}, 10.5, 11.0) == [1] and not course.is_waiting
