"""Tests of the tenants' fair queue alone, under any arrivals, and of who enters a full one."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.fair_queue import CREDIT, MAX_IDLE_TENANTS, Demand, FairQueue, has_place
from cluster.messages import TenantShare
from tests.examples import num_examples

_COSTS = st.integers(1, 40)


def starts(queue: FairQueue, demands: list[Demand]) -> list[float]:
    """Return the virtual time at which each piece of work begins. `demands`: each tenant's in its order."""
    places, found = queue.places(((float(number),), demand) for number, demand in enumerate(demands)), list[float]()
    for demand in demands:
        found.append(places[demand.tenant.label])
        places[demand.tenant.label] += demand.cost
    return found


class Server:
    """Serves one unit of cost at a time, always of the piece that begins first."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.pieces: list[tuple[TenantShare, float, float]] = []  # tenant, what was served, what is left
        self.served: Counter[str] = Counter()

    def add(self, tenant: TenantShare, cost: float) -> None:
        self.queue.enter(tenant)
        self.pieces.append((tenant, 0.0, cost))

    def serve(self) -> str:
        begins = starts(self.queue, [Demand(tenant, left, charged) for tenant, charged, left in self.pieces])
        first = min(range(len(self.pieces)), key=begins.__getitem__)
        tenant, charged, left = self.pieces.pop(first)
        self.queue.charge(tenant, 1.0)
        self.served[tenant.label] += 1
        if left > 1:
            self.pieces.insert(first, (tenant, charged + 1, left - 1))
        else:
            self.queue.leave(tenant)
        return tenant.label


@settings(max_examples=num_examples(suite=14, search=40))
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    costs=st.lists(_COSTS, min_size=1, max_size=5),
    begins=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
def test_tenants_that_always_wait_are_served_by_weight_up_to_a_piece_of_each(
    weights: list[int], costs: list[int], begins: list[int]
) -> None:
    """Whatever sizes the pieces have, and whenever each tenant begins. The shares count once all credit is used."""
    server, tenants = Server(), [TenantShare(str(number), weight) for number, weight in enumerate(weights)]
    before: Counter[str] = Counter()
    counted_from = max(begins[: len(tenants)]) + len(tenants) * int(CREDIT)
    for step in range(counted_from + 150):
        for number, tenant in enumerate(tenants):
            waiting = sum(piece[0] is tenant for piece in server.pieces)
            if step >= begins[number] and waiting < 3:
                server.add(tenant, costs[(step + number) % len(costs)])
        if step == counted_from:
            before = server.served.copy()
        if server.pieces:
            server.serve()
    got = {tenant.label: (server.served - before)[tenant.label] / tenant.weight for tenant in tenants}
    for one in tenants:
        for other in tenants:
            slack = 2 + max(costs) / one.weight + max(costs) / other.weight
            assert abs(got[one.label] - got[other.label]) <= slack


@given(st.lists(st.tuples(st.integers(0, 3), _COSTS, st.integers(0, 50)), min_size=1, max_size=60))
def test_every_piece_is_served_and_nothing_is_remembered_when_all_is_done(work: list[tuple[int, int, int]]) -> None:
    server = Server()
    for number, cost, pause in work:
        server.add(TenantShare(str(number), number + 1), cost)
        for _ in range(min(pause, len(server.pieces))):
            server.serve()
    while server.pieces:
        server.serve()
    assert server.served.total() == sum(cost for _, cost, _ in work)
    assert server.queue.num_tenants == 0


@settings(max_examples=num_examples(suite=5, search=12))
@given(idle_for=st.integers(int(2 * CREDIT), int(3 * CREDIT)), weight=st.integers(1, 4))
def test_a_tenant_that_comes_back_has_its_credit_ahead_of_the_others_and_no_more(idle_for: int, weight: int) -> None:
    """However long it was away, and whatever its weight."""
    server, busy, rare = Server(), TenantShare("busy"), TenantShare("rare", weight)
    for _ in range(65):
        server.add(busy, 10)
    for _ in range(idle_for):
        server.serve()
    for _ in range(30):
        server.add(rare, 10)
    order = [server.serve() for _ in range(250)]
    ahead = order.index("busy")
    assert CREDIT <= ahead <= CREDIT + (1 + weight) * 10, "it does not wait for the rest of the piece in progress"
    assert order[ahead:].count("rare") == pytest.approx((250 - ahead) * weight / (1 + weight), abs=20)


def test_a_tenant_that_is_idle_for_a_moment_has_saved_up_no_more_than_it_left_to_others() -> None:
    """It used its share until then. So pauses do not give a tenant more than its share."""
    server, busy, pauses = Server(), TenantShare("busy"), TenantShare("pauses")
    for _ in range(200):
        server.add(busy, 1)
    order: list[str] = []
    for _ in range(30):
        for _ in range(4):
            server.add(pauses, 1)
        while any(tenant is pauses for tenant, _, _ in server.pieces):
            order.append(server.serve())
        order.append(server.serve())
    used = order[int(CREDIT) :].count("pauses")
    assert used <= (len(order) - CREDIT) / 2 + 2


def test_a_tenant_that_never_waits_gives_newcomers_no_more_credit() -> None:
    """One tenant runs slowly without ever waiting, so its virtual time stays far behind that of another one."""
    queue, slow, busy, new = FairQueue(), TenantShare("slow"), TenantShare("busy"), TenantShare("new")
    queue.enter(slow)
    queue.enter(busy)
    running, waiting = Demand(slow, 1.0, waits=False), Demand(busy, 10.0)
    for _ in range(100):
        starts(queue, [running, waiting])
        queue.charge(slow, 1.0)
        queue.charge(busy, 2 * CREDIT)
    queue.enter(new)
    slow_start, busy_start, new_start = starts(queue, [running, waiting, Demand(new, 10.0)])
    assert new_start == busy_start - CREDIT and slow_start >= busy_start - 2 * CREDIT


def test_tenants_without_work_are_forgotten_beyond_a_bound() -> None:
    queue, busy = FairQueue(), TenantShare("busy")
    queue.enter(busy)
    for number in range(3 * MAX_IDLE_TENANTS):
        tenant = TenantShare(str(number))
        queue.enter(tenant)
        queue.charge(tenant, 5.0)
        queue.leave(tenant)
    assert queue.num_tenants <= MAX_IDLE_TENANTS + 1


@given(st.integers(1, 300), st.integers(1, 9))
def test_one_tenant_alone_fills_the_queue_and_no_more(max_places: int, weight: int) -> None:
    alone = TenantShare("alone", weight)
    assert has_place(alone, [alone] * (max_places - 1), max_places)
    assert not has_place(alone, [alone] * max_places, max_places)


@given(
    max_places=st.integers(1, 40),
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    arrivals=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=150),
    draws=st.randoms(use_true_random=False),
)
def test_whatever_others_send_a_tenant_below_its_share_enters_up_to_an_eighth_beyond_the_queue(
    max_places: int, weights: list[int], arrivals: list[tuple[int, int]], draws: random.Random
) -> None:
    """The first tenant sends as much as is accepted. Pieces end in any order."""
    tenants = [TenantShare(str(number), weight) for number, weight in enumerate(weights)]
    most, pieces = max_places + max(1, max_places // 8), list[TenantShare]()
    for number, num_ended in arrivals:
        while has_place(tenants[0], pieces, max_places):
            pieces.append(tenants[0])
        tenant = tenants[number % len(tenants)]
        is_below = (pieces.count(tenant) + 1) * sum(weights) <= max_places * tenant.weight or tenant not in pieces
        accepted = has_place(tenant, pieces, max_places)
        assert accepted or not is_below or len(pieces) == most
        if accepted:
            pieces.append(tenant)
        assert len(pieces) <= most and pieces.count(tenants[0]) <= max_places
        for _ in range(min(num_ended, len(pieces))):
            pieces.pop(draws.randrange(len(pieces)))


def test_a_tenant_above_its_share_does_not_enter_a_full_queue() -> None:
    flood, heavy, new = TenantShare("flood"), TenantShare("heavy", 3), TenantShare("new")
    assert not has_place(flood, [*[flood] * 9, *[heavy] * 7], 16)
    assert has_place(heavy, [*[flood] * 5, *[heavy] * 11], 16)
    assert not has_place(heavy, [*[flood] * 4, *[heavy] * 12], 16)
    assert has_place(new, [*[flood] * 4, *[heavy] * 13], 16)
    assert not has_place(new, [*[flood] * 5, *[heavy] * 13], 16)
