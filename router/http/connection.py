"""One HTTP connection, with an end to every wait for its client: for a request's head, for the request to be whole, and
for what was written to be taken. Owns the timer; what is asked and answered is uvicorn's and the app's.
"""

import asyncio
from typing import Any

from h11 import IDLE, SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http.accept import AcceptedConnection, HttpLimits

ABORT = "tandem.abort"  # in a request's scope: closes its connection without waiting for the client


class HttpConnection(H11Protocol):
    def __init__(self, *, accepted: AcceptedConnection, limits: HttpLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._accepted, self._limits = accepted, limits
        self._timer: asyncio.TimerHandle | None = None
        self._expects_body = False
        self._is_answered = False  # and nothing has come since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted.opened(transport)
        self._set_timer(self._limits.head_s)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            self._is_answered = False
            self._accepted.waits()
            self._set_timer(self._limits.head_s)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is SEND_BODY and not self._expects_body:
            self._expects_body = True
            self._set_timer(self._limits.request_s)
        if self.conn.their_state not in (IDLE, SEND_BODY):
            self._accepted.works()
            self._set_timer(None)
        if self.scope is not None:
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope[ABORT] = self.transport.abort

    def on_response_complete(self) -> None:
        self._is_answered, self._expects_body = True, False
        self._set_timer(self._limits.request_s)  # the client may still be taking what was written
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._accepted.lost()
        super().connection_lost(exc)

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None else self.loop.call_later(delay_s, self.transport.abort)
