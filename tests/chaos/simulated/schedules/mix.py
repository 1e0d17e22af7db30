"""The work that a schedule adds to that of two separate pools: how routers place requests, latency targets, direct
requests, with which workers of either role prefill, export, import and decode side by side, workers of both roles, and
workers that change their role.

It is drawn from random number generators of its own, so the rest of a seed's schedule does not depend on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True, slots=True)
class DirectAsk:
    """One request that the harness sends to the workers that it names, whatever their roles. No router retries it."""

    at_s: float
    prefill: str  # place of the worker that exports the prompt; empty: the decoding worker computes it itself
    decode: str  # place of the worker that decodes
    family: int  # as of an `Ask`
    num_shared: int
    num_tokens: int
    max_tokens: int
    n: int = 1
    cancel_after: int | None = None
    tenant: int = 0  # as of an `Ask`, like the next one
    prompt_logprobs: int | None = None  # of the prompt that is exported


@dataclass(frozen=True, slots=True)
class Flip:
    """An operator gives one worker another role, and later its first role again."""

    at_s: float
    place: str
    role: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Wires:
    """The connections that carry members' calls as frames, and the bounds that the frame layer has on them."""

    window_bytes: int = 64 << 10  # of each direction, in both kernels
    high_water_bytes: int = 64 << 10  # that wait for the window; more of them pause their writer
    cut_share: float = 0.0  # of segments and reads that end between two random bytes
    blocked_share: float = 0.0  # of attempts to connect that are never answered
    max_unsent_bytes: int = 64 << 20
    max_unread_bytes: int = 64 << 20
    max_request_bytes: int = 64 << 10  # a larger request goes over gRPC


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of the cluster's secret: its three steps. The last one drops the old secret."""

    steps_s: tuple[float, float, float]  # since clients began
    spread_s: float  # how much later the last host gets the file of a step


@dataclass(frozen=True, slots=True)
class ProofFaults:
    """The counters of members' calls that come out of turn, and an eavesdropper."""

    out_of_turn_share: float  # of calls
    num_replays: int  # calls that the eavesdropper sends again


@dataclass(frozen=True, slots=True)
class Mix:
    placement: str = "prefix-aware"
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0  # of routers and workers
    warm_up_s: float = 0.0  # from the start of the last member until clients begin; by then routers know all speeds
    is_colocated: bool = False  # there is no prefill worker
    direct_asks: tuple[DirectAsk, ...] = ()
    of_both: tuple[str, ...] = ()  # places of workers that start with the role `both`
    flips: tuple[Flip, ...] = ()
    is_keyed: bool = False  # KV has keyed digests
    wires: Wires | None = None  # None: members' calls use gRPC, as in a cluster with TLS
    rotation: Rotation | None = None
    proofs: ProofFaults | None = None

    def first_role(self, place: str, role: str) -> str:
        """Return the role with which each process at this place starts. `role`: of its pool."""
        return "both" if place in self.of_both else role


SEPARATE = Mix()  # nothing is mixed

MAX_FEW_UNREAD_BYTES = 4096  # more than any one message has
LOOK_S = 1.0  # how often a process looks whether its key file has changed, as in cluster/auth/key_file.py
_ROTATED_SHARE = 0.2
_OUT_OF_TURN_SHARE = 0.3
_WIRED_SHARE = 0.8  # of schedules in which members' calls are frames
_COLOCATED_SHARE = 0.06
_BOTH_SHARE = 0.3  # of schedules in which some workers do the work of both roles
_FLIPPED_SHARE = 0.3  # of schedules in which workers change their role
_DIRECT_SHARE = 0.5  # of schedules with direct requests
_KEYED_SHARE = 0.3
_WARM_UP_S = 1.5  # longer than the interval of heartbeats
_PLACEMENTS = ("prefix-aware", "prefix-aware", "auto", "auto", "auto", "least-loaded", "round-robin")


def draw_roles(dice: Random, mix: Mix, num_prefills: int, num_decodes: int) -> Mix:
    """Draw which workers do the work of both roles, and which change their role while requests run."""
    roles = {"prefill": 0 if mix.is_colocated else num_prefills, "decode": num_decodes}
    places = [f"{role}{index}" for role, number in roles.items() for index in range(number)]
    has_both, has_flips = dice.random() < _BOTH_SHARE, dice.random() < _FLIPPED_SHARE
    of_both = tuple(place for place in places if dice.random() < 0.5) if has_both else ()
    flips = [
        Flip(
            at_s=dice.choice((0.0, dice.random() / 4, dice.random(), dice.random() * 3)),
            place=dice.choice(places),
            role=dice.choice(("prefill", "decode", "both")),
            for_s=dice.choice((0.01, 0.2, 1.0, 4.0)),
        )
        for _ in range(dice.choice((1, 1, 2, 4)))
    ]
    return replace(mix, of_both=of_both, flips=tuple(flips) if has_flips else ())


def draw_mix(dice: Random, num_prefills: int, num_decodes: int) -> Mix:
    is_colocated = dice.random() < _COLOCATED_SHARE
    roles = {"prefill": 0 if is_colocated else num_prefills, "decode": num_decodes}
    places = [f"{role}{index}" for role, number in roles.items() for index in range(number)]
    has_direct = dice.random() < _DIRECT_SHARE
    direct = [_direct(dice, places) for _ in range(dice.choice((1, 2, 4, 8, 12)))] if has_direct else []
    return Mix(
        placement=dice.choice(_PLACEMENTS),
        slo_ttft_ms=dice.choice((0.0, 0.0, 30.0, 300.0)),
        slo_tpot_ms=dice.choice((0.0, 0.0, 5.0, 40.0)),
        warm_up_s=dice.choice((0.0, _WARM_UP_S)),
        is_colocated=is_colocated,
        direct_asks=tuple(sorted(direct, key=lambda ask: ask.at_s)),
        is_keyed=dice.random() < _KEYED_SHARE,
    )


def draw_wires(dice: Random) -> Wires | None:
    if dice.random() >= _WIRED_SHARE:
        return None
    return Wires(
        window_bytes=dice.choice((64 << 10, 64 << 10, 4096, 600)),
        high_water_bytes=dice.choice((64 << 10, 64 << 10, 4096, 300)),
        cut_share=dice.choice((0.0, 0.0, 0.1, 0.5)),
        blocked_share=dice.choice((*(0.0,) * 6, 0.2, 1.0)),
        # As in the product, more than the largest frame: an answer with log probabilities of its prompt has some 5 KB.
        max_unsent_bytes=dice.choice((64 << 20, 64 << 20, 32 << 10, 16 << 10)),
        max_unread_bytes=dice.choice((64 << 20, 64 << 20, 16 << 10, MAX_FEW_UNREAD_BYTES)),
        max_request_bytes=dice.choice((64 << 10, 64 << 10, 400)),
    )


def draw_rotation(dice: Random) -> Rotation | None:
    """Draw a rotation as an operator makes it: every process has read the file of a step before the next one begins."""
    if dice.random() >= _ROTATED_SHARE:
        return None
    spread_s = dice.choice((0.0, 0.1, 1.0))
    pauses_s = [spread_s + LOOK_S + dice.choice((0.1, dice.random(), dice.random() * 10)) for _ in range(2)]
    first_s = dice.choice((0.0, dice.random(), dice.random() * 3))
    return Rotation((first_s, first_s + pauses_s[0], first_s + sum(pauses_s)), spread_s)


def draw_proof_faults(dice: Random) -> ProofFaults | None:
    if dice.random() >= _OUT_OF_TURN_SHARE:
        return None
    return ProofFaults(out_of_turn_share=dice.choice((0.0, 0.1, 0.5)), num_replays=dice.choice((0, 1, 4, 16)))


def _direct(dice: Random, places: Sequence[str]) -> DirectAsk:
    """Draw a request that one worker serves alone, or that another one exports to it. The usual way, from a prefill to
    a decode worker, is the rarest."""
    ways = [("", place) for place in places for _ in range(2 if place.startswith("prefill") else 1)]
    for prefill in places:
        for decode in places:
            if prefill != decode:
                ways += [(prefill, decode)] * (1 if prefill[:-1] == "prefill" and decode[:-1] == "decode" else 2)
    prefill, decode = dice.choice(ways)
    return DirectAsk(
        at_s=dice.choice((0.0, dice.random() / 4, dice.random() / 4, dice.random(), dice.random() * 3)),
        prefill=prefill,
        decode=decode,
        family=dice.randrange(2),
        num_shared=dice.choice((0, 8, 17, 33)),
        num_tokens=dice.choice((dice.randint(1, 12), dice.randint(1, 40), dice.randint(20, 60))),
        max_tokens=dice.choice((2, dice.randint(2, 30), dice.randint(10, 36))),
        n=dice.choice((1, 1, 1, 2)),
        cancel_after=dice.choice((None,) * 7 + (dice.randint(0, 6),)),
    )
