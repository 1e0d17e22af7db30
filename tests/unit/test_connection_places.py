"""Which connection gives way when a server has no place left."""

from router.http.connection_places import PATIENT_S, ConnectionPlaces, Place


def _taken(places: ConnectionPlaces, now_s: float) -> Place:
    place, replaced = places.take(lambda: None, now_s)
    assert place is not None and replaced is None
    return place


def test_a_newcomer_replaces_the_connection_that_has_waited_longest() -> None:
    places = ConnectionPlaces(2)
    first, second = _taken(places, 0.0), _taken(places, 1.0)
    third, replaced = places.take(lambda: None, 2.0)
    assert third is not None and replaced is first and len(places) == 2
    places.leave(first)  # ended by its owner: it has no place any more
    assert len(places) == 2
    places.leave(second)
    assert len(places) == 1


def test_a_burst_does_not_replace_itself() -> None:
    places = ConnectionPlaces(2)
    _taken(places, 0.0)
    _taken(places, 0.0)
    assert places.take(lambda: None, PATIENT_S * 0.9) == (None, None)
    assert places.take(lambda: None, PATIENT_S)[0] is not None


def test_a_connection_whose_request_is_answered_is_never_replaced() -> None:
    places = ConnectionPlaces(1)
    place = _taken(places, 0.0)
    place.works()
    assert places.take(lambda: None, 100.0) == (None, None)
    place.waits(100.0)
    assert places.take(lambda: None, 100.1) == (None, None)
    assert places.take(lambda: None, 101.0)[1] is place
