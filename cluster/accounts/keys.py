"""API keys: their records, and the signed set of all records. Pure.

A key is 256 random bits that its owner is shown once; the record has only its SHA-256. All records of a cluster are one
document with a version number, signed by the cluster. So a store can neither forge a record, nor give a router an older
document than the router has, nor bring a revoked record back.

`Gate` holds the present set of keys and decides by the caller's key whether a call is allowed. A router without any
key, and one with an admin key alone, lets every caller generate; otherwise every call but a health check needs a key.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from cluster.auth.keys import KEY_ID_BYTES, ClusterKeys, Purpose
from cluster.errors import ConfigError, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from cluster.messages import MAX_WEIGHT, NO_TENANT, TENANT_LABEL_CHARACTERS, TenantShare

MAX_KEYS = 4096
MAX_NAME_CHARACTERS = 64
_PREFIX = "tandem-"
_SECRET_BYTES = 32
_ID_BYTES = 6
_MOST = 1 << 40  # of every limit
_LEAST_PRIORITY, _MOST_PRIORITY = -(1 << 31), (1 << 31) - 1


class Access(StrEnum):
    """A right that a key can have. `ADMIN` includes the others."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


ALL_ACCESS = frozenset(Access)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a key. 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and outputs
    max_concurrency: int = 0  # requests at once
    max_sequences: int = 0  # prompts x n of one request
    max_buffered_bytes: int = 0  # of bodies being received, and of tokens that clients have not read

    def __post_init__(self) -> None:
        for item in fields(self):
            _require(0 <= getattr(self, item.name) <= _MOST, f"{item.name} must be from 0 to {_MOST}")


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call. Without a tenant it is the operator, or any client of a cluster without keys."""

    tenant: str = ""
    key_id: str = ""
    access: frozenset[Access] = frozenset()
    limits: Limits = NO_LIMITS
    weight: int = 1  # the tenant's share of a full cluster, relative to those of other tenants
    max_priority: int = _LEAST_PRIORITY  # the most urgent `priority` of a request; lower numbers are more urgent

    @property
    def is_counted(self) -> bool:
        """Return whether the caller's use is counted and limited: only with a key. The use of others is not given to
        `TenantLimits` and `UsageMeter`."""
        return bool(self.key_id)

    def may(self, access: Access) -> bool:
        return access in self.access or Access.ADMIN in self.access


@dataclass(frozen=True, slots=True)
class KeyRecord:
    key_id: str
    digest: str  # hex SHA-256 of the key
    caller: Caller

    def __post_init__(self) -> None:
        caller = self.caller
        is_name = caller.tenant.isascii() and caller.tenant.isprintable() and caller.tenant == caller.tenant.strip()
        _require(
            0 < len(caller.tenant) <= MAX_NAME_CHARACTERS and is_name,
            f"a tenant's name must have 1 to {MAX_NAME_CHARACTERS} printable ASCII characters",
        )
        _require(bool(caller.access), f"a key must allow at least one of {', '.join(Access)}")
        _require(1 <= caller.weight <= MAX_WEIGHT, f"weight must be from 1 to {MAX_WEIGHT}, not {caller.weight}")
        _require(
            _LEAST_PRIORITY <= caller.max_priority <= _MOST_PRIORITY,
            f"max_priority must fit 32 bits with sign, not {caller.max_priority}",
        )


@dataclass(frozen=True, slots=True)
class KeySet:
    """All records of a cluster. Every change makes a set with the next version."""

    version: int = 0
    records: tuple[KeyRecord, ...] = ()

    def with_record(self, record: KeyRecord) -> "KeySet":
        """Return the set with one more record. Raises InvalidRequest if it would exceed the maximum."""
        _require(len(self.records) < MAX_KEYS, f"there are {MAX_KEYS} keys, the most; revoke one first")
        return KeySet(self.version + 1, (*self.records, record))

    def without(self, key_id: str) -> "KeySet":
        """Return the set without the record of this key. Raises NotFound."""
        left = tuple(record for record in self.records if record.key_id != key_id)
        if len(left) == len(self.records):
            raise NotFound(f"no API key has the id {key_id!r}; `tandem keys list` shows the ids")
        return KeySet(self.version + 1, left)

    def signed(self, keys: ClusterKeys) -> str:
        """Return the document that a store keeps: ASCII."""
        body = json.dumps({"version": self.version, "records": [_to_json(record) for record in self.records]})
        return json.dumps({"body": body, "signature": keys.sign(Purpose.KEY_RECORDS, body.encode()).hex()})

    @staticmethod
    def parse(document: str, keys: ClusterKeys) -> "KeySet":
        """Read a document. Raises ConfigError for a document that this cluster did not sign, or of another format
        version.
        """
        try:
            signed = json.loads(document)
            body, signature = str(signed["body"]), bytes.fromhex(signed["signature"])
            is_ours = keys.verify(Purpose.KEY_RECORDS, body.encode(), signature)
            read = json.loads(body) if is_ours else None
        except (ValueError, KeyError, TypeError, RecursionError):
            read = None
        if read is None:
            raise ConfigError("the records of API keys are not signed with this cluster's key, or were changed")
        try:
            return KeySet(int(read["version"]), tuple(map(_from_json, read["records"])))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, InvalidRequest) as error:
            raise ConfigError(f"the records of API keys are of another version: {str(error)[:200]}") from error


def is_signed_now(document: str, keys: ClusterKeys) -> bool:
    """Return whether the current secret signed this valid document; else it must be signed again before that secret
    is dropped."""
    current = keys.sign(Purpose.KEY_RECORDS, b"")[:KEY_ID_BYTES]
    return bool(json.loads(document)["signature"].startswith(current.hex()))


def new_key(caller: Caller) -> tuple[str, KeyRecord]:
    """Make a key for this caller. Return the key, which is stored nowhere, and its record. Raises InvalidRequest."""
    key = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    key_id = secrets.token_hex(_ID_BYTES)
    named = Caller(caller.tenant, key_id, caller.access, caller.limits, caller.weight, caller.max_priority)
    return key, KeyRecord(key_id, key_digest(key).hex(), named)


def new_secret() -> str:
    """Return 256 random bits as text."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of a key. A plain hash is enough: 256 random bits cannot be guessed, however fast it is."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def tenant_salt(salt_key: bytes, tenant: str, cache_salt: str) -> str:
    """Return the cache salt of a request, which no request of another tenant can have. Without a tenant it is
    `cache_salt` itself.
    """
    if not tenant:
        return cache_salt
    named = tenant.encode()
    message = len(named).to_bytes(4, "big") + named + cache_salt.encode("utf-8", "surrogatepass")
    return hmac.digest(salt_key, message, "sha256").hex()


def tenant_share(salt_key: bytes, caller: Caller) -> TenantShare:
    """Return the identity of a request's tenant that workers receive. All routers give it the same label, from which
    its name cannot be found without the key."""
    if not caller.tenant:
        return NO_TENANT
    label = hmac.digest(salt_key, b"tenant label\0" + caller.tenant.encode(), "sha256").hex()
    return TenantShare(label[:TENANT_LABEL_CHARACTERS], caller.weight)


def _to_json(record: KeyRecord) -> dict[str, Any]:
    caller = record.caller
    return {
        "id": record.key_id,
        "digest": record.digest,
        "tenant": caller.tenant,
        "allow": sorted(caller.access),
        "limits": asdict(caller.limits),
        "weight": caller.weight,
        "max_priority": caller.max_priority,
    }


def _from_json(item: Mapping[str, Any]) -> KeyRecord:
    caller = Caller(
        tenant=item["tenant"],
        key_id=item["id"],
        access=frozenset(map(Access, item["allow"])),
        limits=Limits(**item["limits"]),
        weight=item["weight"],
        max_priority=item["max_priority"],
    )
    return KeyRecord(str(item["id"]), bytes.fromhex(item["digest"]).hex(), caller)


_BEARER = "bearer"
OPERATOR_KEY, CLIENT_KEY, SCRAPE_KEY = "admin-key", "api-key", "metrics-key"  # ids of the keys of flags
_OPEN = Caller(access=ALL_ACCESS)
_CLIENTS_OPEN = Caller(access=frozenset({Access.INFERENCE, Access.METRICS}))
_CLOSED = Caller()


class Gate:
    def __init__(
        self, *, api_key: str = "", admin_key: str = "", metrics_key: str = "", has_records: bool = False
    ) -> None:
        """Start with the configured keys. `api_key`: allows inference. `admin_key`: allows everything. `metrics_key`:
        allows metrics, which then need a key. `has_records`: keys are also recorded in a store, whose set is given to
        `replace`; until then no recorded key is valid.
        """
        self._metrics_need_key = bool(metrics_key)
        self.asks_for_keys = bool(api_key) or has_records
        self._anonymous = _CLOSED if self.asks_for_keys else _CLIENTS_OPEN if admin_key else _OPEN
        self._configured = {
            key_digest(key): Caller(key_id=name, access=access)
            for key, name, access in (
                (api_key, CLIENT_KEY, frozenset({Access.INFERENCE})),
                (admin_key, OPERATOR_KEY, ALL_ACCESS),
                (metrics_key, SCRAPE_KEY, frozenset({Access.METRICS})),
            )
            if key
        }
        self._callers = self._configured
        self.keys = KeySet()

    def replace(self, keys: KeySet) -> bool:
        """Use this set from now on, unless it is older than the present one. Return whether it is used."""
        if keys.version < self.keys.version:
            return False
        self.keys = keys
        recorded = {bytes.fromhex(record.digest): record.caller for record in keys.records}
        self._callers = recorded | self._configured
        return True

    def caller(self, authorization: str) -> Caller:
        """Return the caller with this `Authorization` header. An unknown key counts as no key."""
        # Found by its digest: the time of the look-up says nothing about a key.
        key = _key(authorization)
        return self._callers.get(key_digest(key), self._anonymous) if key else self._anonymous

    def admit(self, authorization: str, access: Access | None) -> Caller:
        """Return the caller if it may make a call that needs `access`; None: any key will do.

        Raises Unauthenticated, PermissionDenied.
        """
        caller = self.caller(authorization)
        is_missing = access is Access.METRICS and self._metrics_need_key and not caller.key_id
        if caller.access and not is_missing and (access is None or caller.may(access)):
            return caller
        if not caller.key_id:
            which = "an API key of this router"
            if access in (Access.ADMIN, Access.METRICS):
                which = f"an API key that allows {access}"
            problem = "the API key that was sent is unknown here; " if _key(authorization) else ""
            raise Unauthenticated(f"{problem}send {which} as `authorization: Bearer KEY`")
        raise PermissionDenied(
            f"the API key {caller.key_id} does not allow {access}; it allows {', '.join(sorted(caller.access))}"
        )


def _key(authorization: str) -> str:
    """Return the key of an `Authorization` header; empty if it has none. The scheme may have any case and be followed
    by any number of spaces (RFC 9110, section 11.4)."""
    scheme, _, key = authorization.partition(" ")
    return key.lstrip(" ") if scheme.lower() == _BEARER else ""
