"""Admission: how many requests are live, each id once, and when to come back."""

import pytest

from cluster.errors import DuplicateRequest, Overloaded
from router.admission import Admission


def test_a_live_id_is_refused_until_it_is_released() -> None:
    admission = Admission(10)
    admission.admit("a")
    with pytest.raises(DuplicateRequest, match="'a'"):
        admission.admit("a")
    admission.release("a", 1.0)
    admission.admit("a")
    assert len(admission) == 1


def test_one_too_many_is_refused_and_costs_no_place() -> None:
    admission = Admission(2)
    admission.admit("a")
    admission.admit("b")
    with pytest.raises(Overloaded, match="2 requests"):
        admission.admit("c")
    admission.release("b", 1.0)
    admission.admit("c")
    assert len(admission) == 2


def test_retry_after_follows_how_often_a_place_becomes_free() -> None:
    admission = Admission(1)
    waits = []
    for gap_s in (4.0, 0.5):
        now_s = 0.0
        for _ in range(50):
            admission.admit("a")
            now_s += gap_s
            admission.release("a", now_s)
        admission.admit("a")
        with pytest.raises(Overloaded) as refusal:
            admission.admit("b")
        waits.append(refusal.value.retry_after_s)
        admission.release("a", now_s)
    assert waits[0] == pytest.approx(4.0, rel=0.1)
    assert waits[1] == pytest.approx(0.5, rel=0.1)


def test_retry_after_is_bounded_even_before_anything_ended() -> None:
    admission = Admission(1)
    admission.admit("a")
    with pytest.raises(Overloaded) as refusal:
        admission.admit("b")
    assert refusal.value.retry_after_s == 1.0
