"""Slow links, slow workers and full KV pools are named, and differences that are usual are not."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.messages import LinkSpeed, MemberId, Role
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepWork, TimedStep
from router.overview.slowness import full_pools, link_slowdowns, slowdowns

_PREFILL = MemberId("prefill-0", "a")
_DECODES = [MemberId(f"decode-{number}", "a") for number in range(4)]


def _times(factor: float, *, batch: int = 4, step: float | None = None, is_measured: bool = True) -> ServiceTimes:
    """Return the times of a worker that takes `factor` times as long as others, by its fits and by the mean of its
    measured steps. `step`: the factor of the steps alone."""
    fits = ServiceTimes(PrefillTimes(0.01 * factor, 1e-4 * factor, 0.0, 0.0), DecodeTimes(0.01 * factor, 0.0, 0.0, 0.0))
    if not is_measured:
        return fits
    prefill, decode = StepWork(num_new=100, attended=5050.0), StepWork(batch=batch, context=100 * batch)
    ratio = 1.0 if step is None else step / factor
    return replace(
        fits,
        typical_prefill=TimedStep(prefill, ratio * fits.seconds(prefill)),
        typical_decode=TimedStep(decode, ratio * fits.seconds(decode)),
    )


def _links(*bytes_per_s: float) -> dict[MemberId, list[LinkSpeed]]:
    pairs = zip(_DECODES, bytes_per_s, strict=False)
    return {importer: [LinkSpeed(_PREFILL, "tcp", speed, 1e-4)] for importer, speed in pairs}


def _slow_links(links: Mapping[MemberId, Sequence[LinkSpeed]]) -> list[str]:
    return [str(each) for each in link_slowdowns(links) if each.is_fault]


def test_a_link_that_takes_ten_times_as_long_is_named_with_both_ends_and_its_transport() -> None:
    [slow] = _slow_links(_links(1e9, 1e8, 1e9))
    assert slow == "decode-1 reads KV from prefill-0 by tcp 9.2 times slower than usual"


def test_twice_the_time_of_other_links_is_usual_and_two_links_are_too_few_to_compare() -> None:
    assert not _slow_links(_links(1e9, 5e8, 1e9))
    assert not _slow_links(_links(1e9, 1e7))


def test_the_only_link_is_named_when_it_takes_much_longer_than_at_its_fastest() -> None:
    speed = LinkSpeed(_PREFILL, "shm", 1e9, 1e-4)
    assert not _slow_links({_DECODES[0]: [replace(speed, slowdown=3.0)]})
    [slow] = _slow_links({_DECODES[0]: [replace(speed, slowdown=4.0)]})
    assert slow == "decode-0 reads KV from prefill-0 by shm 4.0 times slower than at its fastest"


def test_links_of_one_transport_are_compared_and_only_those_that_hand_offs_use() -> None:
    """`tandem doctor` measures every transport of a pair; hand-offs use the first one."""
    fast, slow = (LinkSpeed(_PREFILL, name, speed, 1e-4) for name, speed in (("shm", 1e10), ("tcp", 1e8)))
    assert not _slow_links({importer: [fast, slow] for importer in _DECODES})
    assert not _slow_links({_DECODES[0]: [fast], _DECODES[1]: [fast], _DECODES[2]: [fast], _DECODES[3]: [slow]})


def _faults(decodes: Mapping[MemberId, ServiceTimes], prefills: Mapping[MemberId, ServiceTimes]) -> list[str]:
    return [str(each) for each in slowdowns(decodes, prefills) if each.is_fault]


def _slow(*times: ServiceTimes) -> list[str]:
    return _faults(dict(zip(_DECODES, times, strict=False)), {})


def test_a_worker_with_half_its_core_is_named() -> None:
    decodes = {member: _times(factor) for member, factor in zip(_DECODES, (1.0, 2.0), strict=False)}
    [slow] = _faults(decodes, {_PREFILL: _times(9.0)})
    assert slow == "decode-1 decodes 2.0 times slower than the other workers"


def test_the_slow_prefill_worker_of_three_is_named_and_small_differences_are_not() -> None:
    prefills = {MemberId(f"prefill-{number}", "a"): _times(factor) for number, factor in enumerate((1.0, 1.2, 2.9))}
    [slow] = _faults({member: _times(1.0 + number / 10) for number, member in enumerate(_DECODES)}, prefills)
    assert slow == "prefill-2 prefills 2.4 times slower than the other workers"


def test_a_worker_is_not_compared_before_it_has_measured_enough_steps() -> None:
    assert not _slow(_times(1.0), _times(9.0, is_measured=False))
    assert not _slow(_times(1.0, is_measured=False), _times(9.0))
    [slow] = _slow(_times(1.0), _times(9.0, is_measured=False), _times(2.0))
    assert slow.startswith("decode-2 ")


def test_a_fit_that_is_far_off_where_it_is_extrapolated_names_no_worker() -> None:
    """One worker measured one sequence at a time and its fit makes a batch forty times too dear, or too cheap."""
    for per_sequence_s in (0.1, 0.0):
        alone = replace(_times(1.0, batch=1), decode=DecodeTimes(0.01 - per_sequence_s / 10, per_sequence_s, 0.0, 0.0))
        assert not _slow(alone, _times(1.0, batch=8)) and not _slow(_times(1.0, batch=8), alone)


def test_a_slow_worker_with_more_work_is_named_by_the_predictions_of_both() -> None:
    """Slow workers gather sequences, whose steps take longer, though not in proportion."""
    [slow] = _slow(_times(1.0, batch=2), _times(2.0, batch=6))
    assert slow == "decode-1 decodes 2.0 times slower than the other workers"


def test_a_slow_worker_with_less_work_is_named_by_its_steps_before_its_fit_has_followed() -> None:
    [slow] = _slow(_times(1.0, batch=6), _times(1.0, batch=2, step=2.5))
    assert slow == "decode-1 decodes 2.5 times slower than the other workers"
    assert not _slow(_times(1.0, batch=2), _times(1.0, batch=6, step=2.5)), "the work may explain it"


def test_predictions_that_the_measured_steps_contradict_name_no_worker() -> None:
    """Fits follow the last steps, of which a few may have been slow. The same work took the same time."""
    one, other = _times(1.0), replace(_times(1.0), decode=DecodeTimes(0.03, 0.0, 0.0, 0.0))
    assert not _slow(replace(one, decode=DecodeTimes(0.004, 0.0, 0.0, 0.0)), other)


def test_slow_workers_are_found_beside_another_slow_one() -> None:
    slow = _slow(_times(1.0), _times(2.0), _times(3.0), _times(1.0))
    assert [text.split(" ")[0] for text in slow] == ["decode-1", "decode-2"]


def test_the_slow_workers_of_a_large_pool_are_found_by_a_few_comparisons_of_each() -> None:
    slow = {0, 7, 31, 63}
    decodes = {MemberId(f"d{number}", "a"): _times(2.0 if number in slow else 1.0) for number in range(64)}
    assert [text.split(" ")[0] for text in _faults(decodes, {})] == [f"d{number}" for number in sorted(slow)]


def _pool(role: Role = Role.DECODE, used: float = 80.0, leased: float = 0.0, **figures: float) -> list[str]:
    blocks = {"blocks_held": used - leased, "blocks_leased": leased, "blocks_cached": 10.0, "blocks_free": 90.0 - used}
    return list(full_pools([("w", role, figures | blocks)]))


def test_a_full_pool_is_named_by_its_preemptions_and_waiting_hand_offs_though_blocks_are_free() -> None:
    [full] = _pool(preemptions_last_minute=37.0, handoffs_waiting=2.0)
    assert full == "the KV pool of w is full (37 preemptions a minute, 2 hand-offs wait): add decode workers"
    assert _pool(handoffs_waiting=1.0) == ["the KV pool of w is full (1 hand-offs wait): add decode workers"]
    assert not _pool(preemptions_last_minute=2.0)


def test_a_pool_without_free_blocks_is_named_and_cached_ones_count_as_free() -> None:
    assert _pool(Role.BOTH, used=98.0) == ["the KV pool of w is full (98 blocks in use): add workers"]
    assert not _pool(used=90.0)


def test_of_a_prefill_worker_whose_blocks_are_leased_the_decode_workers_are_named() -> None:
    [full] = _pool(Role.PREFILL, used=98.0, leased=70.0)
    assert full.endswith("leased until decode workers have read it; look at them")
