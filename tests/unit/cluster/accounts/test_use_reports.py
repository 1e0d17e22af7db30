"""Reports of use between routers: newer reports that a router of the cluster has signed count, each for a while."""

import json

import pytest

from cluster.accounts.usage import Use
from cluster.auth.keys import ClusterKeys, Purpose
from router.accounts import UseReports, _signed

_KEYS, _THEIRS = ClusterKeys(b"k" * 32), ClusterKeys(b"t" * 32)
_USE = {"acme": Use(requests=3, tokens=40, live=1)}


class Reader(UseReports):
    """Collects what is refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        super().__init__(_KEYS, "r0@1", lambda reason, router: self.refused.append(f"{router} {reason}"))


def signed(body: str, router: str = "r1@1") -> str:
    return f"{_KEYS.sign(Purpose.USE_REPORTS, _signed(router, body)).hex()} {body}"


def test_a_report_of_a_router_counts_until_it_expires_or_is_replaced() -> None:
    reader, writer = Reader(), UseReports(_KEYS, "r1@1")
    first = writer.sign(_USE)
    assert reader.read({"r1@1": first}, 0.0) == {"r1@1": _USE}
    assert reader.read({"r1@1": first}, 4.9) == {"r1@1": _USE}
    assert reader.read({"r1@1": first}, 5.0) == {}, "a report that is never replaced is of a router that ended"
    assert reader.read({"r1@1": writer.sign({})}, 5.0) == {"r1@1": {}}
    assert not reader.refused


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_proof"),
        ('[1, {"acme": [9, 9, 9, 9]}]', "no_proof"),
        ('zz [1, {"acme": [9, 9, 9, 9]}]', "no_proof"),
        (UseReports(_THEIRS, "r1@1").sign(_USE), "unknown_key"),
        (UseReports(_KEYS, "r2@1").sign(_USE), "wrong_proof"),
        (UseReports(_KEYS, "r1@1").sign(_USE).replace("40", "90"), "wrong_proof"),
    ],
)
def test_a_report_that_its_router_has_not_signed_counts_for_nothing_and_is_refused_once(text: str, reason: str) -> None:
    reader, writer = Reader(), UseReports(_KEYS, "r1@1")
    assert reader.read({"r1@1": text}, 0.0) == reader.read({"r1@1": text}, 0.0) == {}
    assert reader.refused == [f"r1@1 {reason}"]
    reader.read({"r1@1": writer.sign(_USE)}, 1.0)
    assert reader.read({"r1@1": text}, 2.0) == {"r1@1": _USE}, "it lowers nothing either"


def test_an_old_report_that_is_put_back_neither_raises_nor_lowers_the_use_of_a_tenant() -> None:
    reader, writer = Reader(), UseReports(_KEYS, "r1@1")
    busy, idle = writer.sign(_USE), writer.sign({})
    reader.read({"r1@1": busy}, 0.0)
    assert reader.read({"r1@1": idle}, 1.0) == {"r1@1": {}}
    for now_s, routers in ((2.0, ["r1@1"]), (6.0, [])):
        assert reader.read({}, now_s) == reader.read({"r1@1": busy}, now_s) == {router: {} for router in routers}
    assert reader.refused == ["r1@1 replayed"] * 2


@pytest.mark.parametrize(
    "body", ["", "7", "[]", '["1"]', '[1, {"acme": [Infinity]}]', '[1, {"acme": 5}]', "[{}, {}]", "[" * 100_000]
)
def test_a_signed_report_of_a_later_version_counts_for_nothing(body: str) -> None:
    reader = Reader()
    assert reader.read({"r1@1": signed(body)}, 0.0) == {}
    assert not reader.refused


def test_no_report_counts_less_than_nothing() -> None:
    assert Reader().read({"r1@1": signed(json.dumps([1, {"acme": [-5, 2, -1, 0]}]))}, 0.0) == {
        "r1@1": {"acme": Use(tokens=2)}
    }
