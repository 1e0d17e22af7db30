"""Waiting for input, however many files the process has open: `select.select` fails above 1,023."""

import selectors
from collections.abc import Sequence
from socket import socket
from typing import TypeVar

_Source = TypeVar("_Source", int, socket)


def readable(sources: Sequence[_Source], timeout_s: float) -> list[_Source]:
    """Return those that have input, or whose other end is closed. Empty after `timeout_s` seconds without any."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ, source)
        return [key.data for key, _ in selector.select(timeout_s)]
