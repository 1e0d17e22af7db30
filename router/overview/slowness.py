"""Which links and workers are much slower than the others, and which KV pools are full, by what workers report. Pure.

A comparison needs others: three links, or two workers of one leg. What all have in common is not found here.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median_low

from cluster.messages import LinkSpeed, MemberId, Role
from cluster.service_times import ServiceTimes

SLOW_LINK, SLOW_WORKER = 3.0, 1.7  # times the median
_LEAST_LINKS, _LEAST_WORKERS = 3, 2
_FULL = 0.95  # of a KV pool's blocks
_PREEMPTIONS = 3  # a minute; deploy/observability/alerts.py has the same bound
_IDLE = ("blocks_free", "blocks_cached")
_READ_BYTES = 1 << 20
# Of the steps whose predicted times are compared. They are small: fits to short contexts, extrapolated to long ones,
# would differ for workers that are equally fast.
_NUM_SEQUENCES, _CONTEXT, _PROMPT = 8, 256, 512


def slow_links(links: Mapping[MemberId, Iterable[LinkSpeed]]) -> Iterator[str]:
    """Describe each link on which a read takes much longer than on the others. `links`: by importer."""
    seconds = {
        (importer, speed.exporter, speed.transport): speed.transfer_s(_READ_BYTES)
        for importer, speeds in links.items()
        for speed in speeds
    }
    if len(seconds) < _LEAST_LINKS:
        return
    usual_s = median_low(seconds.values())
    for (importer, exporter, transport), taken_s in seconds.items():
        if taken_s > SLOW_LINK * usual_s:
            times = taken_s / usual_s
            yield f"{importer.id} reads KV from {exporter.id} by {transport} {times:.1f} times slower than usual"


def slow_workers(decodes: Mapping[MemberId, ServiceTimes], prefills: Mapping[MemberId, ServiceTimes]) -> Iterator[str]:
    """Describe each worker that computes much more slowly than the others of its leg."""
    decode_s = {
        member: times.decode.seconds(_NUM_SEQUENCES, _NUM_SEQUENCES * _CONTEXT) for member, times in decodes.items()
    }
    prefill_s = {member: times.prefill_s(_PROMPT) for member, times in prefills.items()}
    for what, seconds in (("decodes", decode_s), ("prefills", prefill_s)):
        if len(seconds) < _LEAST_WORKERS:
            continue
        usual_s = median_low(seconds.values())
        for member, taken_s in seconds.items():
            if taken_s > SLOW_WORKER * usual_s:
                yield f"{member.id} {what} {taken_s / usual_s:.1f} times slower than the other workers"


def full_pools(workers: Iterable[tuple[str, Role, Mapping[str, float]]]) -> Iterator[str]:
    """Describe each KV pool that is full, what it causes, and what to do. `workers`: id, role and figures of each.

    Preemption and the watermark of hand-offs keep blocks free, so a pool whose blocks do not suffice shows it by
    preemptions and waiting hand-offs, whatever part of it is in use."""
    for name, role, figures in workers:
        blocks = {state: number for state, number in figures.items() if state.startswith("blocks_")}
        num_used = sum(blocks.values()) - sum(blocks.get(state, 0.0) for state in _IDLE)
        counts = {
            "preemptions a minute": figures.get("preemptions_last_minute", 0.0),
            "hand-offs wait": figures.get("handoffs_waiting", 0.0),
        }
        preempted, waiting = counts.values()
        if preempted >= _PREEMPTIONS or waiting or num_used > _FULL * sum(blocks.values()):
            found = ", ".join(f"{number:.0f} {what}" for what, number in counts.items() if number)
            advice = _advice(role, is_leased=2 * blocks.get("blocks_leased", 0.0) > num_used)
            yield f"the KV pool of {name} is full ({found or f'{num_used:.0f} blocks in use'}): {advice}"


def _advice(role: Role, *, is_leased: bool) -> str:
    if is_leased:
        return "most of it is leased until decode workers have read it; look at them"
    return "add workers" if role is Role.BOTH else f"add {role} workers"
