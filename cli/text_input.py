"""Text that a command is given: on stdin, in a file or as an argument."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ConfigError


@contextmanager
def expecting_text() -> Iterator[None]:
    """Raise ConfigError where what is read in the `with` block is not text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not {error.encoding} text, from byte {error.start} on") from error


def is_text(given: str) -> bool:
    """Return whether UTF-8 can encode it: bytes that are no UTF-8 come as halves of surrogate pairs."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True
