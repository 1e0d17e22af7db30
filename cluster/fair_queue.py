"""The order in which tenants are served, by weight, and who enters a full queue. Pure: it has no clock, and never sees
a request.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) over the virtual tokens of Sheng et al. (2024): a tenant's virtual
time is the cost of what it was served, divided by its weight. Each piece of work begins where the pieces of its tenant
before it end, and the piece with the earliest beginning is served first. So tenants that always have work waiting are
served in proportion to their weights, up to one piece of each, whatever they send.

A tenant that uses less than its share saves up to `CREDIT`, so that a burst of a tenant that keeps to its share on
average is served at once, whatever others send. Beyond that nothing is remembered: a tenant of which nothing waits is
brought up to those that wait less the credit, so capacity that no other tenant wanted costs a tenant nothing later.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.messages import TenantShare

MAX_IDLE_TENANTS = 1024  # whose virtual time is kept while they have no work here
# How far ahead of the others a tenant may begin, in tokens of output: 1,024 tokens of a prompt, a few requests of most.
# A tenant that comes back delays the others by no more.
CREDIT = 128.0
_KEPT_PART = 8  # an eighth of a queue's places is added for tenants below their share


def has_place(newcomer: TenantShare, holders: Sequence[TenantShare], max_places: int) -> bool:
    """Return whether one more piece of work of `newcomer` enters a queue of `max_places`. `holders`: the tenant of each
    piece in it. Beyond a full queue an eighth more, at least one, is for tenants that have less than their share by
    weight, so that no tenant keeps all others out. One tenant alone has `max_places`."""
    if len(holders) < max_places:
        return True
    if len(holders) >= max_places + max(1, max_places // _KEPT_PART):
        return False
    weights = {holder.label: holder.weight for holder in holders} | {newcomer.label: newcomer.weight}
    num_own = sum(holder.label == newcomer.label for holder in holders)
    return num_own < max_places * newcomer.weight / sum(weights.values())


Order = tuple[float, ...]  # less is served first


@dataclass(frozen=True, slots=True)
class Demand:
    """A piece of work, as it competes with others. A piece in progress keeps its place until it ends: `charged` is what
    was charged for it so far, and counts as not served yet."""

    tenant: TenantShare
    cost_left: float
    charged: float = 0.0
    waits: bool = True  # it could be served more than it is

    @property
    def cost(self) -> float:
        """Return by how much it moves the virtual time of its tenant."""
        return (self.charged + self.cost_left) / self.tenant.weight


class FairQueue:
    """The virtual times of the tenants that have work at one server, and of others as long as they matter.

    The owner calls `enter` and `leave` for each piece of work, and `charge` for what it serves."""

    def __init__(self) -> None:
        self._pieces: Counter[str] = Counter()  # the number of pieces of work of each tenant here
        self._times: dict[str, float] = {}  # virtual: by the label of the tenant
        self._newcomers: set[str] = set()  # tenants with work here whose virtual time is not set yet
        self._floor = 0.0  # no tenant begins more than the credit below it

    @property
    def is_contended(self) -> bool:
        """Return whether more than one tenant has work here."""
        return len(self._pieces) > 1

    @property
    def num_tenants(self) -> int:
        return len(self._times)

    def enter(self, tenant: TenantShare) -> None:
        """Add one piece of work."""
        self._pieces[tenant.label] += 1
        if self._pieces[tenant.label] == 1:
            self._newcomers.add(tenant.label)

    def leave(self, tenant: TenantShare) -> None:
        """Remove one piece of work, which has ended or left."""
        label = tenant.label
        self._pieces[label] -= 1
        if self._pieces[label]:
            return
        del self._pieces[label]
        self._newcomers.discard(label)
        if not self._pieces:
            self._times.clear()
            self._floor = 0.0
        elif len(self._times) - len(self._pieces) > MAX_IDLE_TENANTS:
            idle = (other for other in self._times if other not in self._pieces)
            del self._times[min(idle, key=self._times.__getitem__)]

    def charge(self, tenant: TenantShare, cost: float) -> None:
        """Count what a tenant, which has work here, was served."""
        if tenant.label in self._newcomers:
            self._begin(tenant)
        self._times[tenant.label] += cost / tenant.weight

    def places(
        self, demands: Iterable[tuple[Order, Demand]], waiting: Iterable[tuple[Order, TenantShare]] = ()
    ) -> dict[str, float]:
        """Return the virtual time at which the first piece of work of each tenant begins, by label. Each further piece
        begins `cost` after the one before.

        `demands`: the pieces of all tenants that were charged for or that cannot be served more now, each with its
        place in its tenant's own order. `waiting`: the last of the other pieces of each tenant."""
        places, shares, waiting_labels = dict[str, float](), dict[str, tuple[Order, TenantShare]](), set[str]()
        for order, demand in demands:
            label = demand.tenant.label
            places[label] = places.get(label, 0.0) - demand.charged / demand.tenant.weight
            shares[label] = order, demand.tenant
            if demand.waits:
                waiting_labels.add(label)
        for order, tenant in waiting:
            places.setdefault(tenant.label, 0.0)
            waiting_labels.add(tenant.label)
            if tenant.label not in shares or shares[tenant.label][0] < order:
                shares[tenant.label] = order, tenant
        begun = {label: place for label, place in places.items() if label not in self._newcomers}
        self._raise_floor(begun, waiting_labels)
        for label, (_, tenant) in shares.items():
            if label in self._newcomers:
                self._begin(tenant)
            elif label not in waiting_labels:
                self._times[label] = max(self._times[label], self._lowest(tenant))
            places[label] += self._times[label]
        return places

    def check(self, present: Iterable[TenantShare]) -> None:
        """Raise AssertionError unless each piece of work that is here is counted. `present`: their tenants."""
        pieces = Counter(tenant.label for tenant in present)
        assert self._pieces == pieces, f"tenants have {dict(pieces)} pieces of work, and {dict(self._pieces)} counted"
        assert self._newcomers <= self._pieces.keys(), "a tenant without work is about to begin"
        assert self._pieces or not self._times, "the virtual times of tenants outlive all work"

    def _raise_floor(self, charged: dict[str, float], waiting: set[str]) -> None:
        """Raise the floor to the first beginning of those that wait; if none waits, to the latest virtual time. Forget
        the tenants without work that have all their credit."""
        if begins := [self._times[label] + place for label, place in charged.items() if label in waiting]:
            self._floor = max(self._floor, min(begins))
        elif charged:
            self._floor = max(self._floor, *(self._times[label] for label in charged))
        for label in [
            label for label, time in self._times.items() if time <= self._floor - CREDIT and label not in self._pieces
        ]:
            del self._times[label]

    def _begin(self, tenant: TenantShare) -> None:
        self._newcomers.discard(tenant.label)
        self._times[tenant.label] = max(self._times.get(tenant.label, -math.inf), self._lowest(tenant))

    def _lowest(self, tenant: TenantShare) -> float:
        """Return the virtual time of a tenant that has all its credit, which does not grow with its weight."""
        return self._floor - CREDIT / tenant.weight
