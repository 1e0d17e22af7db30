"""Decides who a caller is by the API key that it shows, and whether that key allows a call. Pure.

Owns the present set of keys. A router without any key, and one with an admin key alone, lets everyone generate;
otherwise every call but a health check needs a key.
"""

from cluster.accounts.keys import ALL_ACCESS, Access, Caller, KeySet, key_digest
from cluster.errors import PermissionDenied, Unauthenticated

_BEARER = "Bearer "
OPERATOR_KEY, CLIENT_KEY, SCRAPE_KEY = "admin-key", "api-key", "metrics-key"  # ids of the keys of flags
_OPEN = Caller(access=ALL_ACCESS)
_CLIENTS_OPEN = Caller(access=frozenset({Access.INFERENCE, Access.METRICS}))
_CLOSED = Caller()


class Gate:
    def __init__(
        self, *, api_key: str = "", admin_key: str = "", metrics_key: str = "", has_records: bool = False
    ) -> None:
        """`api_key`: allows inference. `admin_key`: allows everything. `metrics_key`: allows metrics, which then need
        a key. `has_records`: keys are also recorded in a store, whose set is given to `replace`; until then no recorded
        key is valid."""
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
        """Return the caller that shows this `Authorization` header. A key that is not known is like none."""
        # Found by its digest: the time of the look-up says nothing about a key.
        key = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else ""
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
            raise Unauthenticated(f"send {which} as `authorization: Bearer KEY`")
        raise PermissionDenied(
            f"the API key {caller.key_id} does not allow {access}; it allows {', '.join(sorted(caller.access))}"
        )
