"""The header traceparent as W3C defines it."""

import pytest

from cluster.observe.trace_context import TraceParent, parse_trace_parent

_TEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_context_is_read_and_written_alike() -> None:
    found = parse_trace_parent(_TEXT)
    assert found == TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_sampled=True)
    assert str(found) == _TEXT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        _TEXT + "-more",  # version 00 has no more
        _TEXT.replace("00-4", "ff-4"),
        _TEXT.upper(),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        _TEXT + "-" + "x" * 1000,
    ],
)
def test_a_malformed_context_is_ignored(text: str) -> None:
    assert parse_trace_parent(text) is None


def test_a_later_version_may_have_more() -> None:
    assert parse_trace_parent(_TEXT.replace("00-4", "01-4") + "-more") == parse_trace_parent(_TEXT)
