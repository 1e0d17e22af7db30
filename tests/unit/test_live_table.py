"""The table of live requests: each has a place, an id and a stream at most once, for any order of events."""

import random

import pytest

from cluster.errors import DuplicateRequest, Overloaded
from router.policies.admission import AdmissionControl
from router.request.live_table import LiveRow, LiveTable


def _table(max_live_requests: int = 10) -> LiveTable:
    return LiveTable(AdmissionControl(max_live_requests))


def _served(table: LiveTable, request_id: str, stream: int, *, is_resumed: bool = False, number: int = 0) -> LiveRow:
    row = table.add(request_id, is_resumed=is_resumed, takes_over=False)
    table.begin_stream(row, bytes([stream]), number)
    return row


def test_a_live_id_is_refused_until_its_request_has_been_served() -> None:
    table = _table()
    first = _served(table, "a", 1)
    second = table.add("a", is_resumed=False, takes_over=False)
    with pytest.raises(DuplicateRequest, match="'a'"):
        table.begin_stream(second, b"2", 0)
    table.end_stream(first)
    table.begin_stream(second, b"2", 0)
    table.check()
    assert table.num_served == 1 and len(table) == 2


def test_a_request_beyond_the_limit_is_refused_and_takes_no_place() -> None:
    table = _table(2)
    rows = [table.add(name, is_resumed=False, takes_over=False) for name in "ab"]
    with pytest.raises(Overloaded, match="2 requests"):
        table.add("c", is_resumed=False, takes_over=False)
    table.remove(rows[0], 1.0)
    table.add("c", is_resumed=False, takes_over=False)
    assert len(table) == 2
    table.check()


def test_one_takeover_of_a_live_stream_has_a_place_beside_the_stream_and_a_second_is_refused() -> None:
    table = _table(1)
    _served(table, "a", 1)
    table.add("a", is_resumed=True, takes_over=True)
    with pytest.raises(Overloaded):
        table.add("a", is_resumed=True, takes_over=True)


def test_a_resumed_request_is_admitted_under_an_id_that_another_request_holds() -> None:
    table = _table()
    first, resumed = _served(table, "a", 1), _served(table, "a", 2, is_resumed=True, number=1)
    table.end_stream(first)
    third = table.add("a", is_resumed=False, takes_over=False)
    with pytest.raises(DuplicateRequest):
        table.begin_stream(third, b"3", 0)
    table.end_stream(resumed)
    table.begin_stream(third, b"3", 0)
    table.check()


def test_only_a_later_call_may_take_a_stream_over() -> None:
    table = _table()
    _served(table, "a", 1, is_resumed=True, number=3)
    assert [table.may_take_over(bytes([1]), number) for number in (2, 3, 4)] == [False, False, True]
    assert not table.may_take_over(bytes([2]), 9)


def test_rows_ids_and_streams_agree_after_any_order_of_events() -> None:
    dice = random.Random(7)
    table, rows = _table(20), list[LiveRow]()
    for step in range(5000):
        row = dice.choice(rows) if rows else None
        match dice.randrange(4):
            case 0 if len(rows) < 20:
                rows.append(table.add(dice.choice("abcd"), is_resumed=dice.random() < 0.5, takes_over=False))
            case 1 if row is not None and row.stream_id is None:
                try:
                    table.begin_stream(row, step.to_bytes(4, "big"), dice.randrange(3))
                except DuplicateRequest:
                    assert not row.is_resumed
            case 2 if row is not None and row.stream_id is not None:
                table.end_stream(row)
            case 3 if row is not None and row.stream_id is None:
                table.remove(row, float(step))
                rows.remove(row)
        table.check()
        assert len(table) == len(rows)
        assert table.num_served == sum(row.stream_id is not None for row in rows)
