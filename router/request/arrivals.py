"""Requests that came in and have not ended: each is counted once, whatever its end. Never looks at what is asked."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.errors import TandemError
from cluster.observe.telemetry import Telemetry
from router.policies.admission import Admission
from router.request.accounting import RequestAccount
from router.request.ledger import LedgerRecorder
from router.request.outbox import Outbox, Outboxes
from router.requests import Accepted, GenerateRequest

_LOG = logging.getLogger("tandem.router.pipeline")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that came in, and where what happens to it is written down."""

    request: GenerateRequest
    request_id: str
    ledger: LedgerRecorder
    account: RequestAccount
    outbox: Outbox
    accepted: asyncio.Future[Accepted]  # done once the request is admitted, before its first delta


class Arrivals:
    def __init__(self, *, admission: Admission, outboxes: Outboxes, clock: Clock, telemetry: Telemetry) -> None:
        self._admission = admission
        self._outboxes = outboxes
        self._clock = clock
        self._telemetry = telemetry
        self._idle = asyncio.Event()
        self._idle.set()
        self._numbers = itertools.count()
        self._live: dict[int, Arrival] = {}  # the oldest first

    @property
    def live(self) -> tuple[Arrival, ...]:
        """The oldest first."""
        return tuple(self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def none_left(self) -> None:
        """Returns when all have ended."""
        await self._idle.wait()

    @contextmanager
    def arrived(self, request: GenerateRequest, *, takes_over: bool = False) -> Iterator[Arrival]:
        """Live, and with a place of its own, until the block is left. `takes_over`: it resumes a stream that is live
        here. Raises Overloaded."""
        request_id = request.request_id or f"req-{secrets.token_hex(12)}"
        ledger = LedgerRecorder(self._clock.now_s(), label=request.label)
        account = RequestAccount(self._telemetry)
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        outcome = "cancelled"
        number = next(self._numbers)
        try:
            with self._placed(takes_over=takes_over), self._outboxes.open() as outbox:
                arrival = self._live[number] = Arrival(request, request_id, ledger, account, outbox, accepted)
                self._on_change()
                yield arrival
            outcome = "ok"
        except TandemError as error:
            outcome = error.reason
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            account.ended(outcome, ledger.ledger(self._clock.now_s()))
            self._live.pop(number, None)
            self._on_change()
            label = {"label": request.label} if request.label else {}
            _LOG.info("request ended", extra={"request_id": request_id, "outcome": outcome} | label)

    @contextmanager
    def _placed(self, *, takes_over: bool) -> Iterator[None]:
        self._admission.enter(takes_over=takes_over)
        try:
            yield
        finally:
            self._admission.leave(self._clock.now_s())

    def _on_change(self) -> None:
        self._telemetry.gauge("tandem_requests_live", self.num_live)
        if self.num_live:
            self._idle.clear()
        else:
            self._idle.set()
