"""Names of everything that may hold blocks of a worker's pool. Pure.

A scheduler reports by these names who holds blocks, and the event loop which of them are alive: a block that is held by
a name that is not alive would never be released. No name is used for two holders in one process.
"""

from cluster.messages import MemberId


def hand_off(handoff_id: int) -> str:
    """It has reserved blocks, waits for them, or has left some in quarantine: an import, a pulled prefix, a fetch from
    a tier, a probe."""
    return f"hand-off {handoff_id}"


def ticket(ticket_id: bytes) -> str:
    """It has leases, or its prompt is computed here."""
    return f"ticket {ticket_id.hex()}"


def sequence(router: MemberId, handle: int) -> str:
    return f"sequence {handle} of {router}"
