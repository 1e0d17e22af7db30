"""API keys between the messages of the Admin service and the values of cluster/accounts/keys.py."""

from dataclasses import asdict

from cluster.accounts.keys import Access, Caller, KeyRecord, Limits
from cluster.accounts.usage import KeyUsage
from cluster.errors import InvalidRequest
from tandem.enum_words import KEY_ACCESSES
from tandem.v1 import admin_pb2


def record_to_wire(record: KeyRecord) -> admin_pb2.KeyRecord:
    caller = record.caller
    return admin_pb2.KeyRecord(
        key_id=record.key_id,
        tenant=caller.tenant,
        access=[KEY_ACCESSES.number(access) for access in sorted(caller.access)],
        limits=admin_pb2.KeyLimits(**asdict(caller.limits)),
        weight=caller.weight,
        max_priority=caller.max_priority if caller.max_priority != Caller().max_priority else None,
    )


def caller_from_wire(record: admin_pb2.KeyRecord) -> Caller:
    """Return the caller that a new key shall name. Raises InvalidRequest."""
    known = {KEY_ACCESSES.number(access): access for access in Access}
    if not set(record.access) <= set(known):
        raise InvalidRequest(f"a key allows some of {', '.join(Access)}")
    limits = {item.name: getattr(record.limits, item.name) for item in record.limits.DESCRIPTOR.fields}
    return Caller(
        tenant=record.tenant,
        access=frozenset(known[number] for number in record.access),
        limits=Limits(**limits),
        weight=record.weight,
        max_priority=record.max_priority if record.HasField("max_priority") else Caller().max_priority,
    )


def usage_to_wire(found: KeyUsage) -> admin_pb2.KeyUsage:
    return admin_pb2.KeyUsage(tenant=found.tenant, key_id=found.key_id, **asdict(found.usage))
