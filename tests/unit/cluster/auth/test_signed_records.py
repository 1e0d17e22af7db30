"""Records of members in Redis: signed ones are accepted, all others are refused and reported."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.auth.keys import ClusterKeys, Purpose, Secrets
from cluster.auth.sessions import Refusal
from cluster.member import Member, MemberState, to_json
from cluster.messages import MemberId, Role
from cluster.registry.signed_records import _REMEMBERED_S, Holder, SignedRecords

OURS, THEIRS = b"o" * 32, b"t" * 32


class Registrar(SignedRecords):
    """Collects the reasons of refused records."""

    def __init__(self, keys: ClusterKeys | bytes = OURS, cluster: str = "c") -> None:
        self.refused: list[str] = []
        super().__init__(keys if isinstance(keys, ClusterKeys) else ClusterKeys(keys), cluster, self._collect)

    def _collect(self, reason: str, identifier: str) -> None:
        self.refused.append(reason)


def member(name: str = "d0", incarnation: str = "1") -> Member:
    return Member(id=MemberId(name, incarnation), role=Role.DECODE, address="127.0.0.1:1", model="m")


def refusal(record: str, *, identifier: str = "d0", reader: Registrar | None = None) -> str:
    reader = reader or Registrar()
    assert reader.read([(identifier, record)], 0.0) == []
    (reason,) = reader.refused
    return reason


def test_the_registrations_of_another_cluster_are_known_by_their_key_and_only_without_a_member() -> None:
    foreign = [(name, Registrar(THEIRS).sign(member(name), 7)) for name in ("d1", "d0")]
    reader = Registrar()
    assert reader.strangers([*foreign, ("d2", "unsigned")]) == ["d0", "d1"]
    assert reader.strangers([*foreign, ("d2", reader.sign(member("d2"), 7))]) == []
    assert reader.strangers([]) == [] == reader.refused


def changed(record: str, **fields: object) -> str:
    """Return the record with these fields of its body, under the old signature."""
    values = json.loads(record)
    return json.dumps(values | {"body": json.dumps(json.loads(values["body"]) | fields)})


def test_a_signed_record_is_read_with_all_its_fields() -> None:
    record = Registrar().sign(member(), 1)
    assert Registrar().read([("d0", record)], 0.0) == [member()]


@pytest.mark.parametrize("record", ["", "{}", "[]", "7", to_json(member()), '{"body": "{}", "signature": "zz"}'])
def test_a_record_without_a_signature_is_ignored(record: str) -> None:
    assert refusal(record) == Refusal.NO_PROOF


@pytest.mark.parametrize(
    "fields",
    [
        {"id": {"id": "d0", "incarnation": "2"}},
        {"role": "prefill"},
        {"address": "127.0.0.1:2"},
        {"http_address": "127.0.0.1:2"},
        {"metrics_address": "127.0.0.1:2"},
        {"state": "ready"},
    ],
)
def test_a_changed_record_is_ignored(fields: dict[str, object]) -> None:
    assert refusal(changed(Registrar().sign(member(), 1), **fields)) == Refusal.WRONG_PROOF


@pytest.mark.parametrize("version", ["2 0", "1 1", "", "1", "1 0 0", "x"])
def test_a_record_under_another_version_is_ignored(version: str) -> None:
    values = json.loads(Registrar().sign(member(), 1))
    assert values["version"] == "1 0"
    assert refusal(json.dumps(values | {"version": version})) == Refusal.WRONG_PROOF


def test_an_older_record_that_is_put_back_is_ignored_and_counted_each_time() -> None:
    former, present = Registrar(), Registrar()
    old, starting = former.sign(member(incarnation="1"), 1), present.sign(member(incarnation="2"), 2)
    ready = present.sign(member(incarnation="2").with_state(MemberState.READY), 2)
    reader = Registrar()
    assert [reader.read([("d0", record)], 0.0) for record in (old, starting, ready)] == [
        [member(incarnation="1")],
        [member(incarnation="2")],
        [member(incarnation="2").with_state(MemberState.READY)],
    ]
    for replayed in (old, starting, old):
        assert reader.read([("d0", replayed)], 1.0) == reader.read([("d0", replayed)], 1.0) == []
        assert reader.read([], 1.0) == []
        assert reader.read([("d0", ready)], 1.0) == [member(incarnation="2").with_state(MemberState.READY)]
    assert reader.refused == [Refusal.REPLAYED] * 3


def test_a_lower_generation_is_accepted_once_the_higher_one_was_not_read_for_ten_minutes() -> None:
    """Redis has lost its data, and its clock was set back."""
    reader, before, after = Registrar(), Registrar().sign(member(), 9), Registrar().sign(member(incarnation="2"), 1)
    reader.read([("d0", before)], 0.0)
    assert reader.read([("d0", after)], _REMEMBERED_S - 1.0) == []
    assert reader.read([("d0", after)], _REMEMBERED_S + 1.0) == [member(incarnation="2")]


def test_the_holder_of_a_name_is_signed_with_its_name_and_its_generation() -> None:
    text = Registrar().sign_holder(MemberId("d0", "1"), 7)
    assert Registrar().holder_of("d0", text) == Holder("1", 7)
    assert Registrar().next_generation("d0", text, 5) == 8
    assert Registrar().next_generation("d0", text, 9) == 9
    changed_ones = (text.replace(" 7 ", " 8 "), text.replace("1 7", "2 7"), "", "1 7", "1 7 zz", f"{text} x")
    for forged in changed_ones:
        assert Registrar().holder_of("d0", forged) is None
        assert Registrar().next_generation("d0", forged, 5) == 5
    assert Registrar().holder_of("d1", text) is Registrar(THEIRS).holder_of("d0", text) is None
    assert Registrar(cluster="another").holder_of("d0", text) is None


def test_a_record_of_another_cluster_or_under_another_id_is_ignored() -> None:
    assert refusal(Registrar(THEIRS).sign(member(), 1)) == Refusal.UNKNOWN_KEY
    assert refusal(Registrar(cluster="another").sign(member(), 1)) == Refusal.WRONG_PROOF
    assert refusal(Registrar().sign(member(), 1), identifier="d1") == Refusal.REPLAYED


@given(data=st.data())
def test_no_change_of_a_character_is_accepted(data: st.DataObject) -> None:
    record = Registrar().sign(member(), 1)
    at = data.draw(st.integers(0, len(record) - 1))
    other = record[:at] + data.draw(st.characters(codec="ascii")) + record[at + 1 :]
    assert Registrar().read([("d0", other)], 0.0) in ([], [member()])


def test_a_refused_record_is_counted_once_while_it_stands() -> None:
    reader = Registrar()
    for _ in range(3):
        reader.read([("d0", "made up"), ("d1", "made up")], 0.0)
    assert reader.refused == [Refusal.NO_PROOF] * 2
    reader.read([("d0", "made up differently"), ("d1", "made up")], 0.0)
    assert len(reader.refused) == 3


def test_records_of_both_secrets_are_valid_and_a_known_one_outlives_its_secret_until_it_is_renewed() -> None:
    now = [Secrets(OURS, THEIRS)]
    reader = Registrar(ClusterKeys(now[0], lambda is_urgent: now[0]))
    old, new = Registrar(OURS).sign(member(), 1), Registrar(THEIRS).sign(member("d1"), 1)
    assert reader.read([("d0", old), ("d1", new)], 0.0) == [member(), member("d1")]
    now[0] = Secrets(THEIRS)
    assert reader.read([("d0", old), ("d1", new)], 0.0) == [member(), member("d1")]
    again = Registrar(OURS).sign(member().with_state(MemberState.READY), 1)
    assert reader.read([("d0", again), ("d1", new)], 0.0) == [member("d1")]
    assert reader.refused == [Refusal.UNKNOWN_KEY]


def test_a_signed_record_of_a_later_version_is_left_out_without_a_refusal() -> None:
    later = Registrar()
    body = json.dumps(json.loads(to_json(member())) | {"role": "encoder"})
    signature = later._keys.sign(Purpose.REGISTRATIONS, later._text("1 0", body))
    reader = Registrar()
    assert reader.read([("d0", json.dumps({"version": "1 0", "body": body, "signature": signature.hex()}))], 0.0) == []
    assert reader.refused == []
