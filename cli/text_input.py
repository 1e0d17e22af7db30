"""Text that a command reads from stdin."""

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
