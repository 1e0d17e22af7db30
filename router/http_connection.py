"""One HTTP connection, with an end to every wait for its client: for a request to be whole, and for what was written to
be taken. Owns the timer; what is asked and answered is uvicorn's and the app's.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from h11 import IDLE, SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

ABORT = "tandem.abort"  # in a request's scope: closes its connection without waiting for the client
REQUEST_S = 60.0  # from the connection, or the answer before, to the last byte of a request


class HttpConnection(H11Protocol):
    """Past `max_connections` a new one is closed at once, and told to `on_refused`."""

    def __init__(self, *, max_connections: int, on_refused: Callable[[], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._on_refused()
            transport.abort()
        else:
            self._expect_request()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state not in (IDLE, SEND_BODY):
            self._set_timer(None)
        if self.scope is not None:
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope[ABORT] = self.transport.abort

    def on_response_complete(self) -> None:
        self._expect_request()  # or the end of the connection, which waits for what is not taken yet
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._set_timer(self.loop.call_later(REQUEST_S, self.transport.abort))

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
