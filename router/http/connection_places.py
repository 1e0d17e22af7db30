"""Bounds the connections of the HTTP server, and chooses which one is closed when more arrive. Pure.

A connection has a place from the moment it is accepted, before any handshake. It waits until a whole request has
arrived, and again from the first byte of the next request. When every place is occupied, a new connection replaces the
one that has waited longest, if it has waited for at least `REPLACEABLE_AFTER_S`; otherwise the new connection is
refused. Clients that connect and send nothing therefore cannot keep others out, and a burst of clients does not replace
itself before its requests arrive.
"""

from collections.abc import Callable

REPLACEABLE_AFTER_S = 0.5  # a client that means to ask has done its handshake and sent its request within this


class Place:
    """The place of one connection."""

    def __init__(self, end: Callable[[], object], now_s: float) -> None:
        self.end = end
        self.waits_since_s: float | None = now_s  # None: a request is being answered

    def request_begun(self, now_s: float) -> None:
        """Record that the first byte of a request has arrived."""
        self.waits_since_s = now_s

    def request_complete(self) -> None:
        """Record that a whole request has arrived."""
        self.waits_since_s = None


class ConnectionPlaces:
    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._places: set[Place] = set()

    def __len__(self) -> int:
        return len(self._places)

    def occupy(self, end: Callable[[], object], now_s: float) -> tuple[Place | None, Place | None]:
        """Return (place of the new connection, or None if it is refused; place of the connection that it replaces, or
        None). The caller closes the replaced connection by its `end`."""
        replaced = None
        if len(self._places) >= self._max_places:
            replaced = self._longest_waiting(now_s)
            if replaced is None:
                return None, None
            self._places.remove(replaced)
        place = Place(end, now_s)
        self._places.add(place)
        return place, replaced

    def free(self, place: Place) -> None:
        """Free the place of a closed connection. It may have been replaced before."""
        self._places.discard(place)

    def _longest_waiting(self, now_s: float) -> Place | None:
        waiting = [
            (place.waits_since_s, place)
            for place in self._places
            if place.waits_since_s is not None and now_s - place.waits_since_s >= REPLACEABLE_AFTER_S
        ]
        return min(waiting, key=lambda one: one[0])[1] if waiting else None
