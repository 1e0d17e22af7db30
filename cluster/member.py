"""What the cluster knows about one running router or worker.

Values only; cluster/registry/registry.py keeps them in Redis.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.protocol.field_rules import Rule, Text, Whole
from cluster.protocol.versions import OURS, ProtocolRange

_TEXT = Text(most=1_024)
_COUNT = Whole(most=(1 << 40))
_POSITIVE = Whole(least=1, most=(1 << 31) - 1)


class MemberState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"  # gets no new work, and its routers take elsewhere what it had


class DrainOutcome(StrEnum):
    """What became of a member's work after it was asked to leave."""

    DRAINED = "drained"  # nothing was left
    INCOMPLETE = "incomplete"  # the grace ended before the work did


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker's pool and steps hold. `cluster/request_size.py` says which requests fit."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int  # as given, or the model's own, cut to what the pool holds
    block_bytes: int = 0  # 0: not known
    num_watermark_blocks: int = 0  # of a decode worker: blocks that hand-offs never get
    max_input_length: int = 0  # 0: no limit
    max_output_length: int = 0  # 0: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member as it registered itself. A router has no fingerprint, transports or capacity."""

    id: MemberId
    role: Role
    address: str  # gRPC, host:port
    http_address: str = ""
    model: str
    state: MemberState = MemberState.STARTING
    fingerprint: LayoutFingerprint | None = None
    transports: tuple[str, ...] = ()  # best first
    capacity: Capacity | None = None
    protocol_oldest: int = OURS.oldest
    protocol_newest: int = OURS.newest

    @property
    def protocol(self) -> ProtocolRange:
        return ProtocolRange(self.protocol_oldest, self.protocol_newest)

    def with_state(self, state: MemberState) -> "Member":
        return replace(self, state=state)

    def speaks_with(self, other: "Member") -> bool:
        """There is a version of the protocol that both understand."""
        return self.protocol.common(other.protocol) is not None

    def may_exchange_kv(self, other: "Member") -> bool:
        """Only members of equal fingerprints form a pair."""
        return self.fingerprint is not None and self.fingerprint == other.fingerprint and self.speaks_with(other)


def fingerprint_difference(ours: LayoutFingerprint, theirs: LayoutFingerprint) -> str:
    """Each field that differs with both values; empty when nothing does."""
    pairs = [(field.name, getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)]
    return "; ".join(f"{name}: {mine} here, {other} there" for name, mine, other in pairs if mine != other)


def to_json(member: Member) -> str:
    return json.dumps(asdict(member), sort_keys=True)


def from_json(text: str) -> Member:
    """Inverse of to_json; what a newer version added is left out. Raises ValueError for anything else, a role that this
    version does not know among it: nobody here could ask such a member for anything."""
    try:
        values = json.loads(text)
        fingerprint, capacity = values["fingerprint"], values["capacity"]
        protocol = ProtocolRange(values["protocol_oldest"], values["protocol_newest"])
        member = Member(
            id=MemberId(**_known(MemberId, values["id"])),
            role=Role(values["role"]),
            address=values["address"],
            http_address=values["http_address"],
            model=values["model"],
            state=_state(values["state"]),
            fingerprint=LayoutFingerprint(**_known(LayoutFingerprint, fingerprint)) if fingerprint else None,
            transports=tuple(values["transports"]),
            capacity=Capacity(**_known(Capacity, capacity)) if capacity else None,
            protocol_oldest=protocol.oldest,
            protocol_newest=protocol.newest,
        )
        _require_bounds(member)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a member: {text[:200]!r}: {error}") from error
    return member


def _require_bounds(member: Member) -> None:
    """What one member writes, all others compute with. Raises ValueError."""
    texts = [member.id.id, member.id.incarnation, member.address, member.model, member.http_address]
    for value in (*texts, *member.transports, *_values_of(member.fingerprint, str)):
        _require(_TEXT, value)
    for count in (member.protocol_oldest, member.protocol_newest, *_values_of(member.fingerprint, int)):
        _require(_COUNT, count)
    if member.capacity is not None:
        for field in fields(Capacity):
            may_be_zero = field.default == 0  # what is not known, and what has no limit
            _require(_COUNT if may_be_zero else _POSITIVE, getattr(member.capacity, field.name))


def _values_of(fingerprint: LayoutFingerprint | None, kind: type[str] | type[int]) -> list[object]:
    """Of the fields that should have this type."""
    if fingerprint is None:
        return []
    return [getattr(fingerprint, field.name) for field in fields(fingerprint) if field.type is kind]


def _require(rule: Rule, value: object) -> None:
    if isinstance(value, bool) or not rule.admits(value):
        raise ValueError(f"{str(value)[:80]!r} must be {rule}")


def _state(name: str) -> MemberState:
    """One that only newer versions know is less than ready: the member gets no new work, and keeps what it has."""
    return MemberState(name) if name in MemberState.__members__.values() else MemberState.DRAINING


def _known(kind: type[MemberId | LayoutFingerprint | Capacity], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
