"""Lists, for each guard of the hand-off, the smallest scenario in which its removal breaks a promise."""

from dataclasses import dataclass, replace

from kvtransfer.protocol.handoff import GUARDS, Guards
from kvtransfer.protocol.leases import LEASE_GUARDS, LeasePhase
from tests.unit.kvtransfer.handoff_model.scenario import Scenario


@dataclass(frozen=True)
class Removal:
    guard: str  # its name in Guards, or in LeaseGuards
    guards: Guards  # the others
    scenario: Scenario


def _without(guard: str, permissive: object, **scenario: object) -> Removal:
    settings = {"faults": 1, "duplicates": False, "kinds": frozenset(), **scenario}
    if hasattr(LEASE_GUARDS, guard):
        guards = replace(GUARDS, leases=replace(LEASE_GUARDS, **{guard: permissive}))  # type: ignore[arg-type]
    else:
        guards = replace(GUARDS, **{guard: permissive})  # type: ignore[arg-type]
    return Removal(guard, guards, Scenario(f"without {guard}", **settings))  # type: ignore[arg-type]


def _only(kind: str) -> frozenset[str]:
    return frozenset({kind})


REMOVALS = (
    _without("same_epoch", lambda ours, theirs: True, blocks=(1,), kinds=_only("expiry")),
    _without("whole_reservation", lambda num_blocks, offered: offered, blocks=(2, 2), prefill_pool=4, decode_pool=3),
    _without("exempt_as_drawn", lambda is_unverified: True, kinds=_only("corrupt")),
    _without("provenance_accepted", lambda is_unverified, verifies: True, wrong="provenance"),
    _without("same_digest", lambda announced, found: True, kinds=_only("corrupt")),
    _without("same_count", lambda expected, found: True, wrong="count"),
    _without("same_prompt", lambda expected, found: True, wrong="prompt"),
    _without("pulled_again_once", lambda num_times: True, wrong="digest"),
    _without("all_complete", lambda num_complete, num_blocks: True),
    _without("cached_left_alone", lambda num_cached: 0, blocks=(2, 2), prefill_pool=4, cached=True),
    _without("tail_needed", lambda has_ended: False),
    _without("delivered_when_valid", lambda valid: True, kinds=_only("expiry")),
    _without("settled_when_quiet", lambda is_reading: True, kinds=_only("cancel")),
    _without("quarantined_in_flight", lambda destinations: frozenset(), kinds=_only("cancel")),
    _without("proof_of_quiet", lambda completed: True, kinds=_only("death")),
    _without("quiet_before_fallback", lambda destroyed: True, kinds=_only("report"), alternatives=1),
    _without("waits_have_deadlines", lambda deadline_s, now_s: False, kinds=_only("loss")),
    _without(
        "pinned_while_leased",
        lambda leases: all(lease.is_live for lease in leases.leases),  # one end unpins for all
        blocks=(1,),
        workers=(1, 2),
        kinds=_only("stop"),
    ),
    _without("reissued_while_pinned", lambda leases: True, blocks=(1,), workers=(1, 2), kinds=_only("death")),
    _without("attached_once", lambda lease: True, duplicates=True),
    _without("lapses_at_deadline", lambda lease, now_s: False, kinds=_only("loss")),
    _without("vacant_for_a_while", lambda leases, now_s: False, blocks=(1,), workers=(1, 2), kinds=_only("death")),
    _without("renewed_while_running", lambda lease, now_s: True, kinds=_only("expiry"), renewals=True, blocks=(1,)),
    _without("renewed_up_to_maximum", lambda asked_s, latest_s: asked_s, renewals=True),
    _without("valid_at_settle", lambda lease, now_s: lease.phase is LeasePhase.RUNNING, kinds=_only("expiry")),
)
