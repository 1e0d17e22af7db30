"""The usage of each tenant and key, the use of this router by each tenant, and the limits of their keys. Pure.

`UsageMeter` counts requests, prompt tokens, cached prompt tokens and output tokens. A request counts once, at its end.
One that is resumed at another router counts there only for the tokens that its client receives there.

`TenantLimits` enforces limits. Limits belong to keys, use belongs to tenants: more keys give a tenant no higher limit.
Routers report their tenants' use to each other (router/accounts.py). A request is refused where the use at all routers
together would exceed the limit of its key; what other routers admitted since their last report is the slack. Without
reports for `_STALE_S`, each router allows its part of the limit: the limit divided by the number of routers that
reported last.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cluster.accounts.keys import Caller
from cluster.errors import LimitReached, PermissionDenied

KINDS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_SEPARATOR = "|"  # no key id has one
MINUTE_S = 60.0
_SLOT_S = 1.0
_STALE_S = 3.0
_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, MINUTE_S
_CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts' tokens
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))


@dataclass(frozen=True, slots=True)
class KeyUsage:
    tenant: str
    key_id: str
    usage: Usage


class UsageMeter:
    """The use that this router has not stored yet."""

    def __init__(self) -> None:
        self._new: dict[tuple[str, str], Usage] = {}
        self._batch: dict[tuple[str, str], Usage] = {}  # is being stored
        self._number = 0

    def record(self, tenant: str, key_id: str, usage: Usage) -> None:
        self._new[tenant, key_id] = self._new.get((tenant, key_id), Usage()) + usage

    def batch(self) -> tuple[int, dict[str, int]]:
        """Return the amounts to store, by field, and the number of this batch. Returns the same batch until `stored` is
        called, so that a store can ignore a batch that it has already.
        """
        if not self._batch:
            self._batch, self._new = self._new, {}
            self._number += 1
        fields = {
            _SEPARATOR.join((kind, key_id, tenant)): getattr(usage, kind)
            for (tenant, key_id), usage in self._batch.items()
            for kind in KINDS
            if getattr(usage, kind)
        }
        return self._number, fields

    def stored(self, number: int) -> None:
        if number == self._number:
            self._batch = {}


def read_usage(fields: Mapping[str, str]) -> list[KeyUsage]:
    """Return the usage of every key from the sums of all batches. Unknown fields are left out."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for field, amount in fields.items():
        kind, _, rest = field.partition(_SEPARATOR)
        key_id, _, tenant = rest.partition(_SEPARATOR)
        if kind in KINDS:
            with suppress(ValueError):  # another program may have written it
                found.setdefault((tenant, key_id), {})[kind] = int(amount)
    return [KeyUsage(*name, Usage(**kinds)) for name, kinds in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class Use:
    """The use of one tenant: its requests and tokens of the last minute, and its present reservations."""

    requests: int = 0
    tokens: int = 0
    live: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Use") -> "Use":
        return Use(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.live + other.live,
            self.num_bytes + other.num_bytes,
        )


NO_USE = Use()


@dataclass(slots=True)
class Slot:
    """The amounts of one second of a `MinuteCount`."""

    first_s: float
    last_s: float
    amount: int = 0
    is_counted: bool = True  # False once the minute is over


class MinuteCount:
    """A sum over the last minute, in slots of a second: an amount counts for 60 to 61 seconds."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque()
        self.total = 0

    def add(self, amount: int, now_s: float) -> Slot:
        """Count an amount from now on. Return its slot, for `take_back`."""
        if not self._slots or now_s >= self._slots[-1].first_s + _SLOT_S:
            self._slots.append(Slot(now_s, now_s))
        slot = self._slots[-1]
        slot.last_s = now_s
        slot.amount += amount
        self.total += amount
        return slot

    def take_back(self, amount: int, slot: Slot) -> None:
        """Subtract an amount that was added in this slot. Does nothing once the slot has left the minute, because its
        amount is no longer in the sum.
        """
        if slot.is_counted:
            slot.amount -= amount
            self.total -= amount

    def expire(self, now_s: float) -> None:
        while self._slots and self._slots[0].last_s <= now_s - MINUTE_S:
            slot = self._slots.popleft()
            slot.is_counted = False
            self.total -= slot.amount

    def free_after_s(self, amount: int, now_s: float) -> float | None:
        """Return the seconds until `amount` has left the minute; None: the sum is smaller."""
        freed = 0
        for slot in self._slots:
            freed += slot.amount
            if freed >= amount:
                return slot.last_s + MINUTE_S - now_s
        return None


class _TenantUse:
    def __init__(self) -> None:
        self.requests, self.tokens = MinuteCount(), MinuteCount()
        self.live = self.num_bytes = 0

    def now(self, now_s: float) -> Use:
        self.requests.expire(now_s)
        self.tokens.expire(now_s)
        return Use(self.requests.total, self.tokens.total, self.live, self.num_bytes)


class Reservation:
    """The tokens that one request has reserved. They count in the minute in which it was admitted."""

    def __init__(self, tenants: "TenantLimits", caller: Caller) -> None:
        self._tenants, self._caller = tenants, caller
        self._num_tokens = 0
        self._slot: Slot | None = None  # None: nothing is reserved

    def reserve(self, num_tokens: int, now_s: float) -> None:
        """Reserve the most that the request may use. Raises LimitReached."""
        self._tenants.check_tokens(self._caller, num_tokens, now_s)
        self._num_tokens = num_tokens
        self._slot = self._tenants.count_tokens(self._caller, num_tokens, now_s)

    def settle(self, num_tokens: int, now_s: float) -> None:
        """Replace the reserved tokens by those that the request has used."""
        unused, self._num_tokens = self._num_tokens - num_tokens, num_tokens
        if unused < 0:
            self._tenants.count_tokens(self._caller, -unused, now_s)
        elif self._slot is not None:
            self._tenants.take_back_tokens(self._caller, unused, self._slot)


def check_request(caller: Caller, num_sequences: int, priority: int) -> None:
    """Check a request against the limits of its key that concern single requests. Raises LimitReached without a retry
    delay, PermissionDenied.
    """
    most = caller.limits.max_sequences
    if most and num_sequences > most:
        raise LimitReached(
            "max_sequences",
            f"the request asks for {num_sequences} sequences (prompts x n); its API key allows {most}",
        )
    if priority < caller.max_priority:
        raise PermissionDenied(f"priority is {priority}; the API key allows {caller.max_priority} and higher numbers")


class TenantLimits:
    """Owns the use of all tenants at this router. Every caller is one that is counted (`Caller.is_counted`)."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantUse] = {}
        self._others: Mapping[str, Use] = {}
        self._num_routers = 1
        self._reported_s: float | None = None  # when the others' use was read last; None: it is not shared

    @contextmanager
    def place(
        self, caller: Caller, now_s: float, num_bytes: int = 0, *, is_resumed: bool = False
    ) -> Iterator[Reservation]:
        """Count a request and the bytes of its message until the `with` block ends. A resumed request is never refused.
        Raises LimitReached.
        """
        if not is_resumed:
            self._check_place(caller, now_s)
            self.hold_bytes(caller, num_bytes, now_s)
        use = self._tenants.setdefault(caller.tenant, _TenantUse())
        use.live += 1
        if not is_resumed:
            use.requests.add(1, now_s)
        try:
            yield Reservation(self, caller)
        finally:
            use.live -= 1
            use.num_bytes -= 0 if is_resumed else num_bytes

    def hold_bytes(self, caller: Caller, num_bytes: int, now_s: float) -> None:
        """Count bytes of requests that the router holds; negative: they were released. Raises LimitReached."""
        if not num_bytes:
            return
        most, use = caller.limits.max_buffered_bytes, self._tenants.setdefault(caller.tenant, _TenantUse())
        held = (self.use(caller.tenant, now_s) if most else NO_USE).num_bytes + num_bytes
        if num_bytes > 0 and most and held > self._allowed(most, now_s):
            raise LimitReached(
                "max_buffered_bytes",
                f"the routers hold {held} bytes of this tenant's requests; its API key allows {most}",
                retry_after_s=_CONCURRENCY_RETRY_S if num_bytes <= most else None,
            )
        use.num_bytes += num_bytes

    def check_tokens(self, caller: Caller, num_tokens: int, now_s: float) -> None:
        """Check that the caller may use more tokens in this minute. Raises LimitReached."""
        most = caller.limits.tokens_per_minute
        if not most:
            return
        if num_tokens > most:
            raise LimitReached(
                "tokens_per_minute",
                f"the request may use {num_tokens} tokens; its API key allows {most} in a minute: reduce max_tokens",
            )
        used, allowed = self.use(caller.tenant, now_s).tokens, self._allowed(most, now_s)
        if used + num_tokens > allowed:
            raise LimitReached(
                "tokens_per_minute",
                f"the tenant used {used} tokens in the last minute and this request may use {num_tokens}; its API key"
                f" allows {most}",
                retry_after_s=self._retry_s(caller, "tokens", used + num_tokens - allowed, now_s),
            )

    def count_tokens(self, caller: Caller, num_tokens: int, now_s: float) -> Slot | None:
        """Count tokens of a caller. Return where, for `take_back_tokens`."""
        if not num_tokens:
            return None
        return self._tenants.setdefault(caller.tenant, _TenantUse()).tokens.add(num_tokens, now_s)

    def take_back_tokens(self, caller: Caller, num_tokens: int, slot: Slot) -> None:
        """Subtract tokens that were counted, if they are still in the minute."""
        if (use := self._tenants.get(caller.tenant)) is not None:
            use.tokens.take_back(num_tokens, slot)

    def use(self, tenant: str, now_s: float) -> Use:
        """Return the use of a tenant at all routers, by their last reports."""
        own = self._tenants.get(tenant)
        use = own.now(now_s) if own is not None else NO_USE
        return use + self._others.get(tenant, NO_USE) if self._is_shared(now_s) else use

    def own(self, now_s: float) -> dict[str, Use]:
        """Return the use of this router's tenants, and remove tenants without any."""
        found = {tenant: use.now(now_s) for tenant, use in self._tenants.items()}
        for tenant, use in found.items():
            if use == NO_USE:
                del self._tenants[tenant]
        return {tenant: use for tenant, use in found.items() if use != NO_USE}

    def set_others(self, reports: Mapping[str, Mapping[str, Use]], now_s: float) -> None:
        """Replace the use of the other routers, by router and tenant."""
        others: dict[str, Use] = {}
        for report in reports.values():
            for tenant, use in report.items():
                others[tenant] = others.get(tenant, NO_USE) + use
        self._others, self._num_routers, self._reported_s = others, 1 + len(reports), now_s

    def check(self) -> None:
        """Raise AssertionError if anything is held although no request is live."""
        assert all(not use.live and not use.num_bytes for use in self._tenants.values()), "a place was not freed"

    def _check_place(self, caller: Caller, now_s: float) -> None:
        use, limits = self.use(caller.tenant, now_s), caller.limits
        if limits.max_concurrency and use.live >= self._allowed(limits.max_concurrency, now_s):
            raise LimitReached(
                "max_concurrency",
                f"{use.live} requests of this tenant are live; its API key allows {limits.max_concurrency}",
                retry_after_s=_CONCURRENCY_RETRY_S,
            )
        allowed = self._allowed(limits.requests_per_minute, now_s)
        if limits.requests_per_minute and use.requests >= allowed:
            raise LimitReached(
                "requests_per_minute",
                f"the tenant made {use.requests} requests in the last minute; its API key allows"
                f" {limits.requests_per_minute}",
                retry_after_s=self._retry_s(caller, "requests", use.requests + 1 - allowed, now_s),
            )

    def _retry_s(self, caller: Caller, kind: str, missing: int, now_s: float) -> float:
        own = self._tenants.get(caller.tenant)
        found = getattr(own, kind).free_after_s(missing, now_s) if own is not None else None
        return _MOST_RETRY_S if found is None else min(_MOST_RETRY_S, max(_LEAST_RETRY_S, found))

    def _is_shared(self, now_s: float) -> bool:
        return self._reported_s is not None and now_s - self._reported_s <= _STALE_S

    def _allowed(self, limit: int, now_s: float) -> int:
        """Return the limit, or this router's part of it while nothing is known of the others."""
        return limit if self._reported_s is None or self._is_shared(now_s) else -(-limit // self._num_routers)
