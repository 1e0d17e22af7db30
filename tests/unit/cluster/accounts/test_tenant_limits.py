"""The limits of API keys: counted by tenant, shared by routers, divided while nothing is shared; usage that counts
once."""

import random

import pytest

from cluster.accounts.keys import Caller, Limits
from cluster.accounts.usage import (
    KeyUsage,
    MinuteCount,
    TenantLimits,
    Usage,
    UsageMeter,
    Use,
    check_request,
    read_usage,
)
from cluster.errors import LimitReached, PermissionDenied


def caller(tenant: str = "acme", key_id: str = "k1", **limits: int) -> Caller:
    return Caller(tenant, key_id, limits=Limits(**limits))


def num_admitted(tenants: TenantLimits, who: Caller, now_s: float, tries: int = 100) -> int:
    """Begin and end requests; return how many were admitted."""
    admitted = 0
    for _ in range(tries):
        try:
            with tenants.place(who, now_s):
                admitted += 1
        except LimitReached:
            pass
    return admitted


def test_requests_in_any_minute_stay_within_the_limit_and_the_time_to_retry_is_right() -> None:
    tenants, who = TenantLimits(), caller(requests_per_minute=5)
    times = [
        now_s for now_s in (0.0, 10.0, 30.0, 61.0, 71.5, 100.0) for _ in range(num_admitted(tenants, who, now_s, 2))
    ]
    assert times == [0.0, 0.0, 10.0, 10.0, 30.0, 61.0, 61.0, 71.5, 71.5, 100.0]
    for begin_s in times:
        assert sum(begin_s <= at_s < begin_s + 60 for at_s in times) <= 5
    with pytest.raises(LimitReached, match="requests_per_minute: ") as refused, tenants.place(who, 100.0):
        pass
    assert refused.value.param == "requests_per_minute" and refused.value.retry_after_s == pytest.approx(21.0)
    assert num_admitted(tenants, who, 100.0 + 21.0) == 2


def test_all_keys_of_a_tenant_share_its_limit_and_another_tenant_has_its_own() -> None:
    tenants = TenantLimits()
    keys = [caller(key_id=f"k{number}", requests_per_minute=5) for number in range(4)]
    assert sum(num_admitted(tenants, key, 0.0, 3) for key in keys) == 5
    assert num_admitted(tenants, caller("other", requests_per_minute=5), 0.0) == 5


def test_tokens_are_reserved_and_settled_by_what_was_used() -> None:
    tenants, who = TenantLimits(), caller(tokens_per_minute=100)
    with tenants.place(who, 0.0) as first, tenants.place(who, 0.0) as second:
        first.reserve(80, 0.0)
        with pytest.raises(LimitReached, match="may use 30") as refused:
            second.reserve(30, 1.0)
        assert refused.value.retry_after_s == pytest.approx(59.0)
        first.settle(10, 2.0)
        second.reserve(90, 2.0)
    with tenants.place(who, 3.0) as third, pytest.raises(LimitReached) as never:
        third.reserve(101, 3.0)
    assert never.value.retry_after_s is None, "no time makes it smaller"


@pytest.mark.parametrize("ended_s", [1.0, 30.0, 59.5, 90.0])
def test_a_request_that_uses_less_than_it_reserved_gives_no_credit_in_the_next_minute(ended_s: float) -> None:
    """The unused tokens leave the minute together with the reservation, however long the request took."""
    tenants, who = TenantLimits(), caller(tokens_per_minute=100)
    with tenants.place(who, 0.0) as reservation:
        reservation.reserve(100, 0.0)
        tenants.own(ended_s)  # as every report to other routers does
        reservation.settle(1, ended_s)
    assert tenants.use("acme", ended_s).tokens == (1 if ended_s < 60 else 0)
    for now_s in (61.0, 90.0, 119.0, 150.0):
        assert tenants.use("acme", max(now_s, ended_s)).tokens == 0
    with tenants.place(who, 151.0) as reservation:
        reservation.reserve(100, 151.0)
        with pytest.raises(LimitReached), tenants.place(who, 151.0) as another:
            another.reserve(1, 151.0)


def test_concurrency_and_bytes_are_free_again_after_a_request() -> None:
    tenants, who = TenantLimits(), caller(max_concurrency=2, max_buffered_bytes=100)
    with tenants.place(who, 0.0, 60), tenants.place(who, 0.0, 40):
        with pytest.raises(LimitReached, match="max_concurrency"), tenants.place(who, 0.0):
            pass
        with pytest.raises(LimitReached, match="max_buffered_bytes"):
            tenants.hold_bytes(who, 1, 0.0)
        with tenants.place(who, 0.0, is_resumed=True):
            pass  # a stream that was admitted once is never refused
    tenants.hold_bytes(who, 100, 0.0)
    tenants.hold_bytes(who, -100, 0.0)
    tenants.check()


def test_limits_of_a_key_on_single_requests() -> None:
    who = Caller("acme", "k1", limits=Limits(max_sequences=4), max_priority=0)
    check_request(who, 4, 0)
    with pytest.raises(LimitReached, match="5 sequences") as refused:
        check_request(who, 5, 0)
    assert refused.value.retry_after_s is None
    with pytest.raises(PermissionDenied, match="priority is -1"):
        check_request(who, 1, -1)


@pytest.mark.parametrize("seed", range(5))
def test_routers_that_share_admit_one_limit_with_the_slack_of_one_report(seed: int) -> None:
    dice, routers = random.Random(seed), {str(number): TenantLimits() for number in range(3)}
    who, period_s, rate = caller(requests_per_minute=120), 0.5, 12
    admitted: list[float] = []
    now_s = 0.0
    while now_s < 150:
        for name, router in routers.items():
            others = {other: tenants.own(now_s) for other, tenants in routers.items() if other != name}
            router.set_others(others, now_s)
        for _ in range(rate):
            at_s = now_s + dice.random() * period_s
            admitted += [at_s] * num_admitted(dice.choice(list(routers.values())), who, at_s, 1)
        now_s += period_s
    for begin_s in admitted:
        assert sum(begin_s <= at_s < begin_s + 59 for at_s in admitted) <= 120 + rate


def test_routers_that_share_nothing_any_more_admit_one_limit_together() -> None:
    routers, who = [TenantLimits() for _ in range(3)], caller(requests_per_minute=120, max_concurrency=30)
    for router in routers:
        router.set_others({"a": {}, "b": {}}, 0.0)
    assert sum(num_admitted(router, who, 10.0, 200) for router in routers) == 120


def test_the_use_of_a_lost_router_counts_until_its_report_expires() -> None:
    tenants, who = TenantLimits(), caller(requests_per_minute=10, max_concurrency=10)
    tenants.set_others({"lost": {"acme": Use(requests=9, live=9)}}, 0.0)
    assert num_admitted(tenants, who, 0.0) == 1
    tenants.set_others({}, 1.0)
    assert num_admitted(tenants, who, 1.0) == 9


def test_tenants_without_use_are_forgotten() -> None:
    tenants = TenantLimits()
    for number in range(50):
        num_admitted(tenants, caller(f"t{number}"), 0.0, 1)
    assert len(tenants.own(1.0)) == 50
    assert tenants.own(61.0) == {} and tenants.use("t1", 61.0) == Use()


def test_a_minutes_count_never_drifts() -> None:
    count, dice, added, now_s = MinuteCount(), random.Random(3), [], 0.0
    for _ in range(500):
        now_s += dice.random() * 2
        amount = dice.randrange(-3, 10)
        count.expire(now_s)
        count.add(amount, now_s)
        added.append((now_s, amount))
        newest = sum(amount for at_s, amount in added if at_s > now_s - 60)
        oldest = sum(amount for at_s, amount in added if at_s > now_s - 61)
        assert min(newest, oldest) - 27 <= count.total <= max(newest, oldest) + 27
    count.expire(now_s + 61)
    assert count.total == 0


def test_a_batch_that_is_stored_twice_counts_once_and_none_is_lost() -> None:
    meter, sums, last = UsageMeter(), dict[str, int](), 0
    meter.record("acme", "k1", Usage(1, 10, 4, 5))
    for answers in (False, True, True):
        number, fields = meter.batch()
        meter.record("acme", "k1", Usage(output_tokens=7))  # while the batch is on its way
        if number > last:
            last = number
            for field, amount in fields.items():
                sums[field] = sums.get(field, 0) + amount
        if answers:
            meter.stored(number)
    assert read_usage({field: str(amount) for field, amount in sums.items()}) == [
        KeyUsage("acme", "k1", Usage(1, 10, 4, 5 + 7 + 7))
    ]
    assert read_usage({"later|k1|acme": "3", "requests|k1|a|b": "2"}) == [KeyUsage("a|b", "k1", Usage(2))]
