"""The records of members in Redis. Members sign them, so that write access to Redis alone does not suffice to add one.

A record is signed with the cluster's key over all that the member registers (id, incarnation, addresses, role and the
rest), over the cluster's name, and over its version: the generation of the registration and the number of the record in
it. The entry by which an incarnation holds a name has the generation too. A record carries no time: an attacker can put
an old one back. A reader that has read a newer one of that name ignores it; at any other reader the handshake of the
first call fails, because it depends on the incarnation of the process that answers.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.accounts.audit import Audit
from cluster.auth.keys import ClusterKeys, Purpose
from cluster.auth.sessions import Refusal, signature_refusal
from cluster.member import Member, from_json, to_json
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry

_CLAIMED = 100  # characters of an id that stands in Redis, in the audit log
_ADVICE = "start that member with the file of --cluster-key-file that this one has, or with another --cluster-name"
_ADVICE_REPLAYED = "a process that can write to Redis has put back an old one; replace the password of Redis"
# Not for ever: a Redis that lost its data and whose clock was set back gives lower generations to new members.
_REMEMBERED_S = 600.0
_LOG = logging.getLogger("tandem.registry")


@dataclass(frozen=True, slots=True)
class Holder:
    """The incarnation that holds a member's name, with the generation of its registration."""

    incarnation: str
    generation: int


@dataclass(slots=True)
class _Valid:
    """A record that a member of this cluster has signed."""

    text: str
    member: Member
    version: tuple[int, int]  # the generation of its registration, its number in there
    read_s: float  # when it was read last


class SignedRecords:
    """Signs this process's records and verifies all others. A record is verified once. It stays valid while it is
    unchanged in Redis, even if its secret is dropped before its member has renewed it.
    """

    def __init__(self, keys: ClusterKeys, cluster_name: str, refused: Callable[[str, str], None]) -> None:
        """`refused` is called with a Refusal and the id under which the record stands, once for each record that is
        not used."""
        self._keys, self._cluster_name, self._on_refused = keys, cluster_name, refused
        self._newest: dict[str, _Valid] = {}  # by the id under which they stand
        self._refused: dict[str, str] = {}  # the last snapshot: records, likewise
        self._signed: dict[MemberId, tuple[str, int]] = {}  # the last record of each member here, and its number

    def sign(self, member: Member, generation: int) -> str:
        """Return the record of a member. It has a higher number than the last one with another content."""
        body = to_json(member)
        last, number = self._signed.get(member.id, (body, 0))
        number += body != last
        self._signed[member.id] = body, number
        version = f"{generation} {number}"
        signature = self._keys.sign(Purpose.REGISTRATIONS, self._text(version, body))
        return json.dumps({"version": version, "body": body, "signature": signature.hex()})

    def sign_holder(self, member: MemberId, generation: int) -> str:
        """Return the text by which an incarnation holds a member's name: itself, its generation, its signature."""
        signature = self._keys.sign(Purpose.REGISTRATIONS, self._held(member, generation))
        return f"{member.incarnation} {generation} {signature.hex()}"

    def holder_of(self, identifier: str, text: str) -> Holder | None:
        """Return the incarnation that holds a name; None if no member of this cluster wrote the text."""
        try:
            incarnation, number, signature = text.split(" ")
            generation = int(number)
            held = self._held(MemberId(identifier, incarnation), generation)
            is_signed = self._keys.verify(Purpose.REGISTRATIONS, held, bytes.fromhex(signature))
        except ValueError:
            return None
        return Holder(incarnation, generation) if is_signed else None

    def next_generation(self, identifier: str, text: str, time_ms: int) -> int:
        """Return the generation of a new registration under a name: by the time of Redis, and above that of the
        present holder if a member of this cluster wrote its text."""
        holder = self.holder_of(identifier, text)
        return max(time_ms, holder.generation + 1) if holder is not None else time_ms

    def read(self, stored: Sequence[tuple[str, str]], now_s: float) -> list[Member]:
        """Return the members of these (id, record). Those that are not signed, those of a later version of Tandem, and
        those older than a record that was read under the same id are left out."""
        newest = {key: valid for key, valid in self._newest.items() if now_s - valid.read_s < _REMEMBERED_S}
        found, refused = list[Member](), dict[str, str]()
        for identifier, record in stored:
            known = newest.get(identifier)
            reason, valid = self._verified(identifier, record, known, now_s)
            if valid is not None:
                newest[identifier] = valid
                found.append(valid.member)
            elif reason is not None:
                refused[identifier] = record
                if self._refused.get(identifier) != record:
                    self._on_refused(reason, identifier)
        self._newest, self._refused = newest, refused
        return found

    def strangers(self, stored: Sequence[tuple[str, str]]) -> list[str]:
        """Return the ids of the records that are signed with a secret that this process does not have; none if any
        record is a member's."""
        verified = {identifier: self._verified(identifier, record, None, 0.0) for identifier, record in stored}
        if any(valid is not None for _, valid in verified.values()):
            return []
        return sorted(identifier for identifier, (reason, _) in verified.items() if reason is Refusal.UNKNOWN_KEY)

    def _verified(
        self, identifier: str, record: str, known: _Valid | None, now_s: float
    ) -> tuple[Refusal | None, _Valid | None]:
        """Return why a record is refused, or what it says; neither if it is of a later version of Tandem. `known`: the
        newest record that was read under this id."""
        if known is not None and known.text == record:
            known.read_s = now_s
            return None, known
        try:
            values = json.loads(record)
            version, body, signature = str(values["version"]), str(values["body"]), bytes.fromhex(values["signature"])
            signed = self._text(version, body)  # raises ValueError for half of a surrogate pair
        except (ValueError, KeyError, TypeError, RecursionError):
            return Refusal.NO_PROOF, None
        if (reason := signature_refusal(self._keys, Purpose.REGISTRATIONS, signed, signature)) is not None:
            return reason, None
        try:
            generation, number = map(int, version.split())
            valid = _Valid(record, from_json(body), (generation, number), now_s)
        except ValueError:
            return None, None
        is_replayed = valid.member.id.id != identifier or (known is not None and valid.version < known.version)
        return (Refusal.REPLAYED, None) if is_replayed else (None, valid)

    def _text(self, version: str, body: str) -> bytes:
        return f"{self._cluster_name}\0{version}\0{body}".encode()

    def _held(self, member: MemberId, generation: int) -> bytes:
        return f"{self._cluster_name}\0name\0{member.id}\0{member.incarnation}\0{generation}".encode()


def reported_refusals(telemetry: Telemetry, audit: Audit) -> Callable[[str, str], None]:
    """Return the callback of SignedRecords that counts each refused record, puts it into the audit log, and logs the
    first one of each reason."""
    warned: set[str] = set()

    def on_refused(reason: str, identifier: str) -> None:
        if reason not in warned:
            warned.add(reason)
            advice = _ADVICE_REPLAYED if reason == Refusal.REPLAYED else _ADVICE
            _LOG.warning("the registration of %r is not used (%s): %s", identifier[:_CLAIMED], reason, advice)
        telemetry.count("tandem_refused_members_total", reason=reason)
        audit.record_refusal(what="registration", origin="registry", why=reason, claims=identifier[:_CLAIMED])

    return on_refused
