"""The desired number of workers of each pool. Pure; cluster/registry/scale_registry.py keeps it in the registry."""

from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.messages import Role

_MOST = 256  # workers of one pool; a larger number is taken for a typing error


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """`reached`: the newest version that the follower has put into effect; `problem`: why it could not go further."""

    prefill: int
    decode: int
    version: int = 1
    follower: str = ""
    reached: int = 0
    problem: str = ""

    def size(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


def check_sizes(prefill: int | None, decode: int | None) -> None:
    """Check the wanted sizes of the pools. Raises InvalidRequest."""
    if prefill is None and decode is None:
        raise InvalidRequest("give the number of workers of a pool: prefill, decode or both")
    if decode == 0:
        raise InvalidRequest("decode must be at least 1: every request ends on a decode worker")
    for name, size in (("prefill", prefill), ("decode", decode)):
        if size is not None and not 0 <= size <= _MOST:
            raise InvalidRequest(f"{name} must be from {int(name == 'decode')} to {_MOST}, not {size}")
