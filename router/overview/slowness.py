"""Which links and workers are much slower than the others, by what workers report in their heartbeats. Pure.

A comparison needs others: three links, or two workers of one leg. What all have in common is not found here.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median_low

from cluster.messages import LinkSpeed, MemberId
from cluster.service_times import ServiceTimes

SLOW_LINK, SLOW_WORKER = 3.0, 1.7  # times the median
_LEAST_LINKS, _LEAST_WORKERS = 3, 2
_READ_BYTES = 1 << 20
_NUM_SEQUENCES, _CONTEXT, _PROMPT = 8, 4096, 512  # of the steps whose predicted times are compared


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
