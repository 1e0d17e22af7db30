"""How many workers each pool is to have. Pure; cluster/registry/scale_registry.py keeps it in the registry."""

from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.messages import Role

_MOST = 256  # of one pool: what is beyond is a slip of the pen


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """`reached`: the newest version at which the follower's pools stood; `problem`: why they stand at no newer one."""

    prefill: int
    decode: int
    version: int = 1
    follower: str = ""
    reached: int = 0
    problem: str = ""

    def size(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


def check_sizes(prefill: int | None, decode: int | None) -> None:
    """Raises InvalidRequest."""
    if prefill is None and decode is None:
        raise InvalidRequest("say which pool is to have how many workers: prefill, decode or both")
    if decode == 0:
        raise InvalidRequest("decode cannot be 0: every request ends on a decode worker; the least is 1")
    for name, size in (("prefill", prefill), ("decode", decode)):
        if size is not None and not 0 <= size <= _MOST:
            raise InvalidRequest(f"{name} must be from {int(name == 'decode')} to {_MOST}, not {size}")
