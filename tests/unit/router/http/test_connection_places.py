"""The connection that a server closes when no place is left."""

from router.http.connection_places import REPLACEABLE_AFTER_S, ConnectionPlaces, Place


def _taken(places: ConnectionPlaces, now_s: float) -> Place:
    place, replaced = places.occupy(lambda: None, now_s)
    assert place is not None and replaced is None
    return place


def test_a_new_connection_replaces_the_connection_that_has_waited_longest() -> None:
    places = ConnectionPlaces(2)
    first, second = _taken(places, 0.0), _taken(places, 1.0)
    third, replaced = places.occupy(lambda: None, 2.0)
    assert third is not None and replaced is first and len(places) == 2
    places.free(first)  # ended by its owner: it has no place any more
    assert len(places) == 2
    places.free(second)
    assert len(places) == 1


def test_a_burst_does_not_replace_itself() -> None:
    places = ConnectionPlaces(2)
    _taken(places, 0.0)
    _taken(places, 0.0)
    assert places.occupy(lambda: None, REPLACEABLE_AFTER_S * 0.9) == (None, None)
    assert places.occupy(lambda: None, REPLACEABLE_AFTER_S)[0] is not None


def test_a_connection_with_a_request_in_progress_is_never_replaced() -> None:
    places = ConnectionPlaces(1)
    place = _taken(places, 0.0)
    place.request_complete()
    assert places.occupy(lambda: None, 100.0) == (None, None)
    place.request_begun(100.0)
    assert places.occupy(lambda: None, 100.1) == (None, None)
    assert places.occupy(lambda: None, 101.0)[1] is place
