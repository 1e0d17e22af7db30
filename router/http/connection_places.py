"""Which connections a server keeps when more come than it has places for. Pure.

Owns the places. A connection has its place from the moment it is accepted, before any handshake. It waits until a whole
request has come, and again from the first byte of the next request. When every place is taken, a newcomer replaces the
connection that has waited longest if that is at least `PATIENT_S`; otherwise the newcomer is refused. So clients that
connect and say nothing cannot keep others out, and a burst of clients does not replace itself before any of them could
send its request.
"""

from collections.abc import Callable

PATIENT_S = 0.5  # a client that means to ask has done its handshake and sent its request within this


class Place:
    """One connection's."""

    def __init__(self, end: Callable[[], object], now_s: float) -> None:
        self.end = end
        self.waits_since_s: float | None = now_s  # None: a request is being answered

    def waits(self, now_s: float) -> None:
        """A request has begun to come, and is not whole."""
        self.waits_since_s = now_s

    def works(self) -> None:
        """A whole request has come."""
        self.waits_since_s = None


class ConnectionPlaces:
    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._places: set[Place] = set()

    def __len__(self) -> int:
        return len(self._places)

    def take(self, end: Callable[[], object], now_s: float) -> tuple[Place | None, Place | None]:
        """(a place for a connection that was accepted, None if it is refused; the place that was taken from another
        connection). The caller ends that other connection by its `end`."""
        replaced = None
        if len(self._places) >= self._max_places:
            replaced = self._most_patient(now_s)
            if replaced is None:
                return None, None
            self._places.remove(replaced)
        place = Place(end, now_s)
        self._places.add(place)
        return place, replaced

    def leave(self, place: Place) -> None:
        """The connection is over; its place may have been taken before."""
        self._places.discard(place)

    def _most_patient(self, now_s: float) -> Place | None:
        waiting = [
            (place.waits_since_s, place)
            for place in self._places
            if place.waits_since_s is not None and now_s - place.waits_since_s >= PATIENT_S
        ]
        return min(waiting, key=lambda one: one[0])[1] if waiting else None
