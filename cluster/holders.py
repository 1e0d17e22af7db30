"""Names of all holders of blocks of a worker's pool: hand-offs, tickets, sequences. Pure.

A scheduler reports the names of all holders, and the event loop reports the names of those that are alive. A block
whose holder is not alive has leaked. Each name is unique in its process.
"""

from cluster.messages import MemberId


def hand_off(handoff_id: int) -> str:
    """The name of an import, a pull, a fetch from a tier or a link check. It has reserved blocks, waits for blocks, or
    has blocks in quarantine."""
    return f"hand-off {handoff_id}"


def ticket(ticket_id: bytes) -> str:
    """The name of a ticket that has leases or whose prompt is being computed."""
    return f"ticket {ticket_id.hex()}"


def sequence(router: MemberId, handle: int) -> str:
    return f"sequence {handle} of {router}"
