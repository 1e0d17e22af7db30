"""A schedule: the shape of a cluster, the requests of its clients and the faults. A value made from a seed.

`DISTRIBUTION` is the version of what `make_schedule` draws. Results of different versions are never added up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from tests.chaos.simulated.schedules.mishaps import (
    OPERATIONS,
    Kind,
    Mishap,
    draw_connection_fault,
    draw_fault,
    draw_operation,
    draw_stop_while_decoding,
    num_failures,
)
from tests.chaos.simulated.schedules.mix import (
    MAX_FEW_UNREAD_BYTES,
    SEPARATE,
    Mix,
    draw_mix,
    draw_proof_faults,
    draw_roles,
    draw_rotation,
    draw_wires,
)
from tests.chaos.simulated.schedules.mutations import Mutation, draw_mutations

DISTRIBUTION = 10
MAX_MODEL_LEN = 96


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a schedule."""

    at_s: float
    router: int
    family: int  # prompts of one family have a common prefix
    num_shared: int
    num_tokens: int  # of the prompt
    max_tokens: int
    n: int = 1
    cancel_after: int | None = None  # the client cancels when it has this many tokens
    reconnect_after: int | None = None  # its connection breaks at this many tokens, and it resumes at another router
    grammar: str = ""  # the name of the grammar that its answer follows
    tenant: int = 0  # number of the tenant, if the schedule has some
    prompt_logprobs: int | None = None  # as of a request


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int  # of everything that the schedule does not fix: latencies, order, contents
    num_routers: int
    num_prefills: int
    num_decodes: int
    prefill_blocks: tuple[int, ...]  # pool sizes by number of the worker; the sizes repeat after the end
    decode_blocks: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    max_prefill_tokens: int  # per step
    swap_blocks: int  # of host memory under each decode pool
    copy_s: float  # measured duration of the swap of one block
    host_blocks: int  # of host memory under each prefill pool, for prefixes
    disk_blocks: int  # and of disk under that
    latency_s: float  # the longest latency of a message
    step_s: float  # the longest duration of a step without the time per token
    token_s: float  # per token of a step
    launches: bool  # the device computes asynchronously
    speculates: bool
    read_faults: bool
    asks: tuple[Ask, ...]
    mishaps: tuple[Mishap, ...]
    mutations: tuple[Mutation, ...]
    drain_grace_s: float
    max_attempts: int
    mix: Mix = SEPARATE
    tenants: tuple[int, ...] = ()  # their weights; none: no request has a key
    max_scored_tokens: int = 256  # of a step

    def num_blocks(self, role: str, number: int) -> int:
        sizes = self.prefill_blocks if role == "prefill" else self.decode_blocks
        return sizes[number % len(sizes)]

    @property
    def may_use_up_attempts(self) -> bool:
        """Return whether faults may end a request. A worker that cannot read fails every hand-off to it, whatever
        `max_attempts` is, and leaves one attempt: one more fault may end the request."""
        cannot_read = any(mishap.kind is Kind.UNREADABLE for mishap in self.mishaps)
        num_faults = sum(mishap.kind not in OPERATIONS for mishap in self.mishaps) + len(self.mutations)
        return cannot_read and (self.read_faults or num_faults > 1)


_DEFAULT_ATTEMPTS = 3
_WATERMARK_BLOCKS = 2  # at most, of the pools drawn here
_SMALL_SHARE = 0.3  # of schedules in which some pools are too small for some requests
_CONSTRAINED_SHARE = 0.3  # of schedules in which some requests have grammars
_GRAMMARS = ("", "schema", "call", "regex", "choice")  # as in grammars.py
_TENANTS_SHARE = 0.4  # of schedules whose requests are of several tenants
_SCORED_SHARE = 0.3  # of schedules in which some requests want the log-probabilities of their prompts
_MUTATED_SHARE = 0.2  # of schedules in which members send messages with a field out of its bounds


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed: work of two separate pools with faults, and what is mixed into it."""
    separate = _separate(seed)
    counts = separate.num_prefills, separate.num_decodes
    mix = draw_roles(Random(f"{seed} roles"), draw_mix(Random(f"{seed} mix"), *counts), *counts)
    separate = _constrained(Random(f"{seed} grammars"), separate)
    schedule = replace(_colocated(separate) if mix.is_colocated else separate, mix=mix)
    schedule = _scored(Random(f"{seed} scores"), _of_tenants(Random(f"{seed} tenants"), schedule))
    return _signed(Random(f"{seed} secrets"), _wired(Random(f"{seed} wires"), schedule))


def _signed(dice: Random, schedule: Schedule) -> Schedule:
    """Draw what happens to the cluster's secret and to the proofs of calls, from a generator of its own. A ticket that
    the dropped secret signed fails one attempt."""
    rotation = draw_rotation(dice)
    mix = replace(schedule.mix, rotation=rotation, proofs=draw_proof_faults(dice))
    return replace(schedule, mix=mix, max_attempts=schedule.max_attempts + (rotation is not None))


def _wired(dice: Random, schedule: Schedule) -> Schedule:
    """Draw the connections that carry members' calls as frames, and their faults, from a generator of its own."""
    wires = draw_wires(dice)
    if wires is None:
        return schedule
    counts = schedule.num_routers, schedule.num_prefills or 1, schedule.num_decodes
    drawn = [draw_connection_fault(dice, counts) for _ in range(dice.choice((0, 0, 1, 1, 2)))]
    faults = [fault for fault in drawn if fault.role != "prefill" or schedule.num_prefills]
    if wires.max_unread_bytes == MAX_FEW_UNREAD_BYTES:  # only a stopped process leaves as many
        faults.append(draw_stop_while_decoding(dice, "router", counts))
    return replace(
        schedule,
        mix=replace(schedule.mix, wires=wires),
        mishaps=(*schedule.mishaps, *faults),
        max_attempts=schedule.max_attempts + sum(map(num_failures, faults)),
    )


def _of_tenants(dice: Random, schedule: Schedule) -> Schedule:
    """Draw tenants with weights and the tenant of each request, from a generator of its own."""
    if dice.random() >= _TENANTS_SHARE:
        return schedule
    tenants = tuple(dice.choice((1, 1, 2, 5, 100)) for _ in range(dice.choice((2, 2, 3))))
    asks = tuple(replace(ask, tenant=dice.randrange(len(tenants))) for ask in schedule.asks)
    direct = tuple(replace(ask, tenant=dice.randrange(len(tenants))) for ask in schedule.mix.direct_asks)
    return replace(schedule, tenants=tenants, asks=asks, mix=replace(schedule.mix, direct_asks=direct))


def _scored(dice: Random, schedule: Schedule) -> Schedule:
    """Draw the requests that want the log-probabilities of their prompts, from a generator of its own."""
    if dice.random() >= _SCORED_SHARE:
        return schedule
    num_top, direct = (None, 0, 0, 1, 5), schedule.mix.direct_asks
    asks = tuple(replace(ask, prompt_logprobs=dice.choice(num_top)) for ask in schedule.asks)
    direct = tuple(replace(ask, prompt_logprobs=dice.choice(num_top) if ask.prefill else None) for ask in direct)
    most = dice.choice((1, 7, 256))
    return replace(schedule, asks=asks, mix=replace(schedule.mix, direct_asks=direct), max_scored_tokens=most)


def _constrained(dice: Random, schedule: Schedule) -> Schedule:
    """Draw the grammars of requests, from a generator of its own."""
    if dice.random() >= _CONSTRAINED_SHARE:
        return schedule
    return replace(schedule, asks=tuple(replace(ask, grammar=dice.choice(_GRAMMARS)) for ask in schedule.asks))


def _colocated(schedule: Schedule) -> Schedule:
    mishaps = tuple(mishap for mishap in schedule.mishaps if mishap.role != "prefill")
    return replace(schedule, num_prefills=0, prefill_blocks=(), mishaps=mishaps)


def _separate(seed: int) -> Schedule:
    dice = Random(seed)
    counts = num_routers, num_prefills, num_decodes = [
        dice.choice((1, 2, 2)),
        dice.choice((1, 2, 2)),
        dice.choice((1, 2, 2, 3)),
    ]
    block_size = dice.choice((1, 2, 4, 4, 8, 16))
    workload = dice.choice((_mixed, _mixed, _long, _alike, _crowd))
    asks = workload(dice, num_routers)
    faults = tuple(draw_fault(dice, counts) for _ in range(dice.choice((0, 1, 1, 1, 2, 2, 3, 4))))
    operations = tuple(each for _ in range(dice.choice((0, 0, 1, 1, 2))) for each in draw_operation(dice, counts))
    read_faults = dice.random() < 0.2
    mutations = draw_mutations(dice) if dice.random() < _MUTATED_SHARE else ()
    has_tiers = dice.random() < 0.5 or any(fault.kind is Kind.FULL for fault in faults)
    return Schedule(
        seed=seed,
        num_routers=num_routers,
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        prefill_blocks=_pools(dice, num_prefills, asks, block_size),
        decode_blocks=_pools(dice, num_decodes, asks, block_size),
        block_size=block_size,
        max_num_seqs=dice.choice((4, 8, 8)),
        max_prefill_tokens=dice.choice((8, 16, 32)),
        swap_blocks=dice.choice((0, 0, 2, 8, 64)),
        copy_s=dice.choice((0.00001, 0.001, 0.02)),
        host_blocks=dice.choice((1, 4, 16, 32)) if has_tiers else 0,
        disk_blocks=dice.choice((0, 4, 32)) if has_tiers else 0,
        latency_s=dice.choice((0.003, 0.003, 0.05)),
        step_s=dice.choice((0.004, 0.004, 0.1)),
        token_s=dice.choice((0.0005, 0.0005, 0.004)),
        launches=dice.random() < 0.3,
        speculates=dice.random() < 0.2,
        read_faults=read_faults,
        asks=asks,
        mishaps=(*faults, *operations),
        mutations=mutations,
        drain_grace_s=dice.choice((0.02, 0.2, 0.2, 2.0, 30.0)),
        max_attempts=max(
            _DEFAULT_ATTEMPTS,
            1 + sum(map(num_failures, (*faults, *operations))) + 2 * read_faults + len(mutations),
        ),
    )


def plain_schedule(seed: int) -> Schedule:
    """Return a schedule with large pools and without faults. Tests of one scenario start from it."""
    return replace(
        _separate(seed),
        prefill_blocks=(96,),
        decode_blocks=(96,),
        block_size=4,
        max_num_seqs=8,
        max_prefill_tokens=16,
        swap_blocks=0,
        host_blocks=0,
        disk_blocks=0,
        token_s=0.0005,
        read_faults=False,
        mishaps=(),
        mutations=(),
        drain_grace_s=0.2,
        max_attempts=_DEFAULT_ATTEMPTS,
    )


def holds(num_blocks: int, block_size: int, ask: Ask) -> bool:
    """Return whether a decode worker can run each choice to its end. The KV of the last token is never computed."""
    return ask.num_tokens + ask.max_tokens <= num_blocks * block_size + 1


def _pools(dice: Random, number: int, asks: Sequence[Ask], block_size: int) -> tuple[int, ...]:
    """Draw pool sizes: from one that holds a hand-off of the largest request to one that holds several. In some
    schedules some pools are too small for some requests."""
    least = max(-(-(ask.num_tokens + ask.max_tokens) // block_size) + ask.n - 1 for ask in asks) + _WATERMARK_BLOCKS
    sizes = [dice.choice((least, least + dice.randint(0, 6), 2 * least, 4 * least)) for _ in range(number)]
    if dice.random() < _SMALL_SHARE:
        sizes = [dice.randint(1, least) if dice.random() < 0.5 else size for size in sizes]
    return tuple(sizes)


def _mixed(dice: Random, num_routers: int) -> tuple[Ask, ...]:
    """Draw a few requests of all kinds."""
    asks = []
    for _ in range(dice.choice((1, 2, 3, 4, 5, 8))):
        n, num_tokens = dice.choice((1, 1, 1, 2, 3, 4)), dice.randint(1, 40)
        max_tokens = dice.choice((1, 2, dice.randint(3, 30), dice.randint(10, 50) // n))
        asks.append(_ask(dice, num_routers, num_tokens=num_tokens, max_tokens=max_tokens, n=n))
    return _by_time(asks)


def _long(dice: Random, num_routers: int) -> tuple[Ask, ...]:
    """Draw long prompts among short ones."""
    asks = []
    for _ in range(dice.choice((2, 3, 5))):
        num_tokens = dice.choice((dice.randint(1, 8), dice.randint(40, 80), dice.randint(40, 80)))
        max_tokens = min(MAX_MODEL_LEN - num_tokens, dice.randint(1, 40))
        asks.append(_ask(dice, num_routers, num_tokens=num_tokens, max_tokens=max_tokens, n=dice.choice((1, 1, 2))))
    return _by_time(asks)


def _alike(dice: Random, num_routers: int) -> tuple[Ask, ...]:
    """Draw long prompts of three families, one after the other. The pool is too small for their shared prefixes."""
    asks = [
        replace(
            _ask(dice, num_routers, num_tokens=dice.randint(50, 70), max_tokens=dice.randint(1, 12), n=1),
            at_s=dice.random() * 6,
            family=dice.randrange(3),
            num_shared=48,
        )
        for _ in range(dice.choice((5, 8, 10)))
    ]
    return _by_time(asks)


def _crowd(dice: Random, num_routers: int) -> tuple[Ask, ...]:
    """Draw many concurrent requests whose outputs together exceed the pool."""
    asks = [
        _ask(
            dice,
            num_routers,
            num_tokens=dice.randint(1, 20),
            max_tokens=dice.randint(15, 40),
            n=dice.choice((1, 1, 1, 2)),
        )
        for _ in range(dice.choice((6, 8, 10)))
    ]
    return _by_time(replace(ask, at_s=ask.at_s / 4) for ask in asks)


def _by_time(asks: Iterable[Ask]) -> tuple[Ask, ...]:
    return tuple(sorted(asks, key=lambda ask: ask.at_s))


def _ask(dice: Random, num_routers: int, *, num_tokens: int, max_tokens: int, n: int) -> Ask:
    return Ask(
        at_s=dice.choice((0.0, 0.0, dice.random(), dice.random() * 3)),
        router=dice.randrange(num_routers),
        family=dice.randrange(2),
        num_shared=dice.choice((0, 8, 17, 33)),
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        n=n,
        cancel_after=dice.choice((None,) * 7 + (dice.randint(0, 6),)),
        reconnect_after=dice.choice((None,) * 7 + (dice.randint(1, 12),)),
    )
