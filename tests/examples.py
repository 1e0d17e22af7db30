"""The number of examples of a Hypothesis test that names a number, by the kind of the run."""

from hypothesis import settings


def num_examples(*, suite: int, search: int) -> int:
    """Return `search` where new examples are drawn (`make test-all`, `make test-repeat`), otherwise `suite`.

    `make test` draws the same examples at every run: more of them cost time each time and find a failure only once.
    """
    return search if settings.get_current_profile_name().startswith("search") else suite
