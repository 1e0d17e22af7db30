"""Members: running routers and workers as they register themselves, and the protocol versions that they support. Values
only; cluster/registry/registry.py keeps them in Redis.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.protocol.field_rules import Rule, Text, Whole

_TEXT = Text(most=1_024)
_COUNT = Whole(most=(1 << 40))
_POSITIVE = Whole(least=1, most=(1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The oldest and the newest version of the protocol between members that a member supports.

    One number covers everything that members exchange: the messages of proto/tandem/internal/v1 and their meaning,
    tickets, keyed hashes, digests, and the records in Redis. CONTRIBUTING.md says when it changes and how a version is
    retired. Raises ValueError unless 1 <= oldest <= newest."""

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 1 <= self.oldest <= self.newest:
            raise ValueError(f"{self} is not a range of protocol versions")

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def common(self, other: "ProtocolRange") -> int | None:
        """Return the newest version that both support, which they use with each other; None if there is none."""
        version = min(self.newest, other.newest)
        return version if version in self and version in other else None


OUR_VERSIONS = ProtocolRange(oldest=1, newest=1)


class MemberState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"  # gets no new work, and routers move its work to other workers


class DrainOutcome(StrEnum):
    """The ways in which a drain can end."""

    DRAINED = "drained"  # all work was finished or moved
    INCOMPLETE = "incomplete"  # the grace period ended first


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of a worker's pool and steps. `cluster/request_size.py` decides which requests fit."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int  # as configured or the model's, limited to the size of the pool
    block_bytes: int = 0  # 0: unknown
    num_watermark_blocks: int = 0  # blocks of a decode worker that hand-offs may not use
    max_input_length: int = 0  # 0: no limit
    max_output_length: int = 0  # 0: no limit
    max_prefill_tokens: int = 0  # prompt tokens in one step; 0: unknown
    slo_tpot_us: int = 0  # target for a step with running sequences, in microseconds; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member as it registered itself. A router has no fingerprint, transports or capacity."""

    id: MemberId
    role: Role
    address: str  # gRPC, host:port
    http_address: str = ""
    metrics_address: str = ""  # host:port of GET /metrics
    model: str
    state: MemberState = MemberState.STARTING
    fingerprint: LayoutFingerprint | None = None
    transports: tuple[str, ...] = ()  # best first
    capacity: Capacity | None = None
    grammar_engine: str = ""  # of a worker: equal if masks are (cluster/grammar/engine.py); empty: it has none
    scheduling_policy: str = ""  # of a worker, as --scheduling-policy names it; empty: unknown
    protocol_oldest: int = OUR_VERSIONS.oldest
    protocol_newest: int = OUR_VERSIONS.newest

    @property
    def protocol(self) -> ProtocolRange:
        return ProtocolRange(self.protocol_oldest, self.protocol_newest)

    def with_state(self, state: MemberState) -> "Member":
        return replace(self, state=state)

    def speaks_with(self, other: "Member") -> bool:
        """Return whether both members support a common version of the protocol."""
        return self.protocol.common(other.protocol) is not None


def fingerprint_difference(ours: LayoutFingerprint, theirs: LayoutFingerprint) -> str:
    """The fields that differ, with both values; empty if all are equal."""
    pairs = [(field.name, getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)]
    return "; ".join(f"{name}: {mine} here, {other} there" for name, mine, other in pairs if mine != other)


def to_json(member: Member) -> str:
    return json.dumps(asdict(member) | {"id": member.id._asdict()}, sort_keys=True)


def from_json(text: str) -> Member:
    """Inverse of to_json. Ignores fields that a newer version added. Raises ValueError for anything else, including an
    unknown role, because this version cannot call such a member."""
    try:
        values = json.loads(text)
        fingerprint, capacity = values["fingerprint"], values["capacity"]
        protocol = ProtocolRange(values["protocol_oldest"], values["protocol_newest"])
        member = Member(
            id=MemberId(values["id"]["id"], values["id"]["incarnation"]),
            role=Role(values["role"]),
            address=values["address"],
            http_address=values["http_address"],
            metrics_address=values["metrics_address"],
            model=values["model"],
            state=_state(values["state"]),
            fingerprint=LayoutFingerprint(**_known(LayoutFingerprint, fingerprint)) if fingerprint else None,
            transports=tuple(values["transports"]),
            capacity=Capacity(**_known(Capacity, capacity)) if capacity else None,
            grammar_engine=values["grammar_engine"],
            scheduling_policy=values["scheduling_policy"],
            protocol_oldest=protocol.oldest,
            protocol_newest=protocol.newest,
        )
        _require_bounds(member)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a member: {text[:200]!r}: {error}") from error
    return member


def _require_bounds(member: Member) -> None:
    """Check that every value is within its bounds, because other members compute with it. Raises ValueError."""
    addresses = (member.address, member.http_address, member.metrics_address)
    texts = (member.id.id, member.id.incarnation, member.model, member.grammar_engine, *addresses, *member.transports)
    texts = (*texts, member.scheduling_policy)
    for value in (*texts, *_values_of(member.fingerprint, str)):
        _require(_TEXT, value)
    for count in (member.protocol_oldest, member.protocol_newest, *_values_of(member.fingerprint, int)):
        _require(_COUNT, count)
    if member.capacity is not None:
        for field in fields(Capacity):
            may_be_zero = field.default == 0  # unknown, or no limit
            _require(_COUNT if may_be_zero else _POSITIVE, getattr(member.capacity, field.name))


def _values_of(fingerprint: LayoutFingerprint | None, kind: type[str] | type[int]) -> list[object]:
    """The values of the fields of this type."""
    if fingerprint is None:
        return []
    return [getattr(fingerprint, field.name) for field in fields(fingerprint) if field.type is kind]


def _require(rule: Rule, value: object) -> None:
    if isinstance(value, bool) or not rule.admits(value):
        raise ValueError(f"{str(value)[:80]!r} must be {rule}")


def _state(name: str) -> MemberState:
    """A state of a newer version counts as draining: the member gets no new work and keeps its present work."""
    return MemberState(name) if name in MemberState.__members__.values() else MemberState.DRAINING


def _known(kind: type[LayoutFingerprint | Capacity], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
