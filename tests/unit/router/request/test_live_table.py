"""The table of live requests: each has a place, an id and a stream at most once, for any order of events."""

import random

import pytest

from cluster.errors import DuplicateRequest, Overloaded
from router.policies.admission import AdmissionControl
from router.request.live_table import LiveRow, LiveTable


def _table(max_live_requests: int = 10) -> LiveTable:
    return LiveTable(AdmissionControl(max_live_requests))


def _served(table: LiveTable, request_id: str, stream: int, *, is_resumed: bool = False, number: int = 0) -> LiveRow:
    row = table.add(request_id, 0.0, is_resumed=is_resumed, takes_over=False)
    table.begin_stream(row, bytes([stream]), number)
    return row


def test_a_live_id_is_refused_until_its_request_has_been_served() -> None:
    table = _table()
    first = _served(table, "a", 1)
    second = table.add("a", 0.0, is_resumed=False, takes_over=False)
    with pytest.raises(DuplicateRequest, match="'a'"):
        table.begin_stream(second, b"2", 0)
    table.end_stream(first)
    table.begin_stream(second, b"2", 0)
    table.check()
    assert table.num_served == 1 and len(table) == 2


def test_a_request_beyond_the_limit_is_refused_and_takes_no_place() -> None:
    table = _table(2)
    rows = [table.add(name, 0.0, is_resumed=False, takes_over=False) for name in "ab"]
    with pytest.raises(Overloaded, match="2 requests"):
        table.add("c", 0.0, is_resumed=False, takes_over=False)
    table.remove(rows[0], 1.0)
    table.add("c", 0.0, is_resumed=False, takes_over=False)
    assert len(table) == 2
    table.check()


def test_one_takeover_of_a_live_stream_has_a_place_beside_the_stream_and_a_second_is_refused() -> None:
    table = _table(1)
    _served(table, "a", 1)
    table.add("a", 0.0, is_resumed=True, takes_over=True)
    with pytest.raises(Overloaded):
        table.add("a", 0.0, is_resumed=True, takes_over=True)


def test_a_resumed_request_is_admitted_under_an_id_that_another_request_holds() -> None:
    table = _table()
    first, resumed = _served(table, "a", 1), _served(table, "a", 2, is_resumed=True, number=1)
    table.end_stream(first)
    third = table.add("a", 0.0, is_resumed=False, takes_over=False)
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
                rows.append(table.add(dice.choice("abcd"), 0.0, is_resumed=dice.random() < 0.5, takes_over=False))
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


def test_every_choice_of_a_request_has_a_place() -> None:
    table = _table(10)
    whole = table.add("a", 0.0, is_resumed=False, takes_over=False, num_choices=128)
    with pytest.raises(Overloaded, match="128 requests are being served"):
        table.add("b", 0.0, is_resumed=False, takes_over=False)
    table.remove(whole, 1.0)
    table.add("c", 0.0, is_resumed=False, takes_over=False, num_choices=6)
    with pytest.raises(Overloaded, match="6 requests"):
        table.add("d", 0.0, is_resumed=False, takes_over=False, num_choices=5)
    table.add("e", 0.0, is_resumed=False, takes_over=False, num_choices=4)
    table.check()


@pytest.mark.parametrize("weight", [1, 3])
def test_a_flooding_tenant_keeps_no_other_out_and_both_come_to_their_shares(weight: int) -> None:
    """The flood asks for ten places whenever one is free; the other tenant asks for one at a time."""
    dice, table, now_s = random.Random(5), _table(64), 0.0
    rows: dict[str, list[LiveRow]] = {"flood": [], "other": []}

    def ask(tenant: str, tenant_weight: int) -> bool:
        try:
            rows[tenant].append(
                table.add("r", 0.0, is_resumed=False, takes_over=False, tenant=tenant, weight=tenant_weight)
            )
        except Overloaded:
            return False
        return True

    for _ in range(200):
        ask("flood", 1)
    assert len(rows["flood"]) == 56, "the last eighth stays free while it is alone"
    assert all(ask("other", weight) for _ in range(8)), "another tenant finds a place at once"
    for _ in range(2000):
        now_s += 1.0
        leaving = dice.choice([row for held in rows.values() for row in held])
        rows[leaving.tenant].remove(leaving)
        table.remove(leaving, now_s)
        for _ in range(10):
            ask("flood", 1)
        ask("other", weight)
        table.check()
    assert len(rows["other"]) >= 64 * weight / (weight + 2) - 9 and len(rows["flood"]) >= 64 / (weight + 2) - 1
