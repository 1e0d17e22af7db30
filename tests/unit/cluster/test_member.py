"""Members of different versions: the protocol that two of them speak, and the fields read from a newer member's
entry.
"""

import json

import pytest

from cluster.errors import ConfigError
from cluster.member import Capacity, Member, MemberState, ProtocolRange, from_json, to_json
from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.registry.registration import refuse_unequal

FINGERPRINT = LayoutFingerprint("weights", "config", "float32", "table")
VERSIONS = [(1, 1), (1, 2), (2, 2), (2, 3)]
# The protocol that each two members of VERSIONS speak, by index; None: they never exchange KV.
COMMON: list[list[int | None]] = [
    [1, 1, None, None],
    [1, 2, 2, 2],
    [None, 2, 2, 2],
    [None, 2, 2, 3],
]


def member(name: str = "d0", versions: tuple[int, int] = (1, 1)) -> Member:
    return Member(
        id=MemberId(name, "a1"),
        role=Role.DECODE,
        address="127.0.0.1:7000",
        model="demo_model",
        state=MemberState.READY,
        fingerprint=FINGERPRINT,
        transports=("shm", "tcp"),
        capacity=Capacity(512, 16, 8, 2048, 4096),
        scheduling_policy="fcfs",
        protocol_oldest=versions[0],
        protocol_newest=versions[1],
    )


def record(**changes: object) -> str:
    return json.dumps(json.loads(to_json(member())) | changes)


@pytest.mark.parametrize("ours", range(4))
@pytest.mark.parametrize("theirs", range(4))
def test_two_members_speak_the_newest_version_that_both_understand(ours: int, theirs: int) -> None:
    one, other = ProtocolRange(*VERSIONS[ours]), ProtocolRange(*VERSIONS[theirs])
    assert one.common(other) == other.common(one) == COMMON[ours][theirs]


@pytest.mark.parametrize("ours", range(4))
@pytest.mark.parametrize("theirs", range(4))
def test_a_member_joins_only_with_a_protocol_version_that_the_others_support(ours: int, theirs: int) -> None:
    one, other = member("d0", VERSIONS[ours]), member("d1", VERSIONS[theirs])
    has_common = COMMON[ours][theirs] is not None
    assert one.speaks_with(other) == other.speaks_with(one) == has_common
    if has_common:
        refuse_unequal(one, (other,))
    else:
        with pytest.raises(ConfigError, match=r"supports protocol \d to \d"):
            refuse_unequal(one, (other,))


@pytest.mark.parametrize("versions", [(0, 1), (2, 1), (-1, -1)])
def test_an_invalid_range_of_versions_is_refused(versions: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a range"):
        ProtocolRange(*versions)
    with pytest.raises(ValueError, match="not a member"):
        from_json(record(protocol_oldest=versions[0], protocol_newest=versions[1]))


def test_unknown_fields_of_a_newer_member_are_ignored() -> None:
    values = json.loads(to_json(member()))
    values["zone"] = {"name": "a"}
    for part in ("id", "fingerprint", "capacity"):
        values[part] |= {"later": 1}
    assert from_json(json.dumps(values)) == member()


def test_a_member_in_an_unknown_state_gets_no_new_work() -> None:
    assert from_json(record(state="evacuating")) == member().with_state(MemberState.DRAINING)


def test_a_member_with_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="not a member"):
        from_json(record(role="encoder"))


@pytest.mark.parametrize(
    "value", [None, True, -1, 1 << 70, 1e400, float("nan"), "x", "x" * 100_000, [], {}, [[]], "\0"]
)
@pytest.mark.parametrize(
    "place", [*json.loads(to_json(member())), "capacity.*", "fingerprint.*", "id.*", "transports.*"]
)
def test_any_wrong_value_of_an_entry_is_read_within_bounds_or_refused(place: str, value: object) -> None:
    whole = json.loads(to_json(member()))
    outer, _, inner = place.partition(".")
    if not inner:
        changes = [{outer: value}]
    elif isinstance(whole[outer], list):
        changes = [{outer: [value]}]
    else:
        changes = [{outer: whole[outer] | {name: value}} for name in whole[outer]]
    for change in changes:
        try:
            read = from_json(json.dumps(whole | change))
        except ValueError:
            continue
        capacity = read.capacity
        counts = [] if capacity is None else [capacity.num_blocks, capacity.block_size, capacity.max_num_seqs]
        assert all(type(count) is int and 0 < count < 1 << 31 for count in counts), change
        assert isinstance(read.address, str) and len(read.address) <= 1024


@pytest.mark.parametrize("text", ["", "[]", "1", "null", '{"id": 3}', "[" * 100_000, '{"capacity": NaN}'])
def test_text_that_is_not_an_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a member"):
        from_json(text)
