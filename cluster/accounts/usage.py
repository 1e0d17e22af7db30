"""The usage of each tenant and key: requests, prompt tokens, cached prompt tokens and output tokens. Pure.

A request counts once, at its end. One that is resumed at another router counts there only for the tokens that its
client receives there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_SEPARATOR = "|"  # no key id has one


@dataclass(frozen=True, slots=True)
class Usage:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts' tokens
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))


@dataclass(frozen=True, slots=True)
class KeyUsage:
    tenant: str
    key_id: str
    usage: Usage


class UsageMeter:
    """The use that this router has not stored yet."""

    def __init__(self) -> None:
        self._new: dict[tuple[str, str], Usage] = {}
        self._batch: dict[tuple[str, str], Usage] = {}  # is being stored
        self._number = 0

    def record(self, tenant: str, key_id: str, usage: Usage) -> None:
        self._new[tenant, key_id] = self._new.get((tenant, key_id), Usage()) + usage

    def batch(self) -> tuple[int, dict[str, int]]:
        """Return what to store, by field, and the number of this batch. Returns the same batch until `stored` is
        called, so that a store can ignore a batch that it has already.
        """
        if not self._batch:
            self._batch, self._new = self._new, {}
            self._number += 1
        fields = {
            _SEPARATOR.join((kind, key_id, tenant)): getattr(usage, kind)
            for (tenant, key_id), usage in self._batch.items()
            for kind in KINDS
            if getattr(usage, kind)
        }
        return self._number, fields

    def stored(self, number: int) -> None:
        if number == self._number:
            self._batch = {}


def read_usage(fields: Mapping[str, str]) -> list[KeyUsage]:
    """Return the usage of every key from what batches have added up to. Unknown fields are left out."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for field, amount in fields.items():
        kind, _, rest = field.partition(_SEPARATOR)
        key_id, _, tenant = rest.partition(_SEPARATOR)
        if kind in KINDS and amount.lstrip("-").isdecimal():
            found.setdefault((tenant, key_id), {})[kind] = int(amount)
    return [KeyUsage(*name, Usage(**kinds)) for name, kinds in sorted(found.items())]
