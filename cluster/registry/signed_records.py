"""The records of members in Redis. Members sign them, so that write access to Redis alone does not suffice to add one.

A record is signed with the cluster's key over all that the member registers (id, incarnation, addresses, role and the
rest) and over the cluster's name. It carries no time: an attacker can put an old record back, but the handshake of the
first call then fails, because it depends on the incarnation of the process that answers.
"""

import json
import logging
from collections.abc import Callable, Sequence

from cluster.accounts.audit import Audit
from cluster.auth.keys import KEY_ID_BYTES, ClusterKeys, Purpose
from cluster.auth.sessions import Refusal
from cluster.member import Member, from_json, to_json
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry

_CLAIMED = 100  # characters of an id that stands in Redis, in the audit log
_LOG = logging.getLogger("tandem.registry")


class SignedRecords:
    """Signs this process's records and verifies all others. A record is verified once. It stays valid while it is
    unchanged in Redis, even if its secret is dropped before its member has renewed it.
    """

    def __init__(self, keys: ClusterKeys, cluster_name: str, refused: Callable[[str, str], None]) -> None:
        """`refused` is called with a Refusal and the id under which the record stands, once for each record without a
        valid signature."""
        self._keys, self._cluster_name, self._on_refused = keys, cluster_name, refused
        self._valid: dict[str, tuple[str, Member]] = {}  # the last snapshot: records by the id under which they stand
        self._refused: dict[str, str] = {}  # likewise

    def sign(self, member: Member) -> str:
        body = to_json(member)
        return json.dumps({"body": body, "signature": self._keys.sign(Purpose.REGISTRATIONS, self._text(body)).hex()})

    def sign_holder(self, member: MemberId) -> str:
        """Return the text by which an incarnation holds a member's name: itself and its signature."""
        return f"{member.incarnation} {self._keys.sign(Purpose.REGISTRATIONS, self._text(_held(member))).hex()}"

    def holder_of(self, identifier: str, text: str) -> str:
        """Return the incarnation that holds a name; empty if no member of this cluster wrote the text."""
        incarnation, _, signature = text.partition(" ")
        try:
            held = self._text(_held(MemberId(identifier, incarnation)))
            is_signed = self._keys.verify(Purpose.REGISTRATIONS, held, bytes.fromhex(signature))
        except ValueError:
            return ""
        return incarnation if is_signed else ""

    def read(self, stored: Sequence[tuple[str, str]]) -> list[Member]:
        """Return the members of these (id, record). Those that are not signed, and those of a later version, are left
        out."""
        valid, refused = {}, {}
        for identifier, record in stored:
            known = self._valid.get(identifier)
            if known is not None and known[0] == record:
                valid[identifier] = known
                continue
            reason, member = self._verified(identifier, record)
            if member is not None:
                valid[identifier] = record, member
            elif reason is not None:
                refused[identifier] = record
                if self._refused.get(identifier) != record:
                    self._on_refused(reason, identifier)
        self._valid, self._refused = valid, refused
        return [member for _, member in valid.values()]

    def _verified(self, identifier: str, record: str) -> tuple[Refusal | None, Member | None]:
        """Return why a record is refused, or the member; neither if it is of a later version."""
        try:
            values = json.loads(record)
            body, signature = str(values["body"]), bytes.fromhex(values["signature"])
            signed = self._text(body)  # raises ValueError for half of a surrogate pair
        except (ValueError, KeyError, TypeError, RecursionError):
            return Refusal.NO_PROOF, None
        if self._keys.secret_of(signature[:KEY_ID_BYTES]) is None:
            return Refusal.UNKNOWN_KEY, None
        if not self._keys.verify(Purpose.REGISTRATIONS, signed, signature):
            return Refusal.WRONG_PROOF, None
        try:
            member = from_json(body)
        except ValueError:
            return None, None
        return (None, member) if member.id.id == identifier else (Refusal.REPLAYED, None)

    def _text(self, body: str) -> bytes:
        return f"{self._cluster_name}\0{body}".encode()


def _held(member: MemberId) -> str:
    return f"name\0{member.id}\0{member.incarnation}"  # no record's JSON begins so


def reported_refusals(telemetry: Telemetry, audit: Audit) -> Callable[[str, str], None]:
    """Return the callback of SignedRecords that counts each refused record, puts it into the audit log, and logs the
    first one of each reason."""
    warned: set[str] = set()

    def on_refused(reason: str, identifier: str) -> None:
        if reason not in warned:
            warned.add(reason)
            _LOG.warning(
                "the registration of %r is not used (%s): start that member with the file of --cluster-key-file"
                " that this one has, or with another --cluster-name",
                identifier[:_CLAIMED],
                reason,
            )
        telemetry.count("tandem_refused_members_total", reason=reason)
        audit.record_refusal(what="registration", origin="registry", why=reason, claims=identifier[:_CLAIMED])

    return on_refused
