"""Whether the workers should keep their roles, help each other, or each serve whole requests. Pure.

A placement that looks at one request at a time cannot see that another arrangement of all workers would serve the
present traffic better. So the recent requests are replayed over the workers' own service times: once with prompts and
decoding on workers of their roles, and once with every worker alone. Where one of the two keeps clearly more latency
targets, it is the arrangement; between them workers help each other where a request gains enough (router/policies/
slo_aware.py).

Sequences that run disturb each other for seconds after a request was placed wrongly. So the arrangement is chosen
before the first request is placed, from its lengths and targets: such requests are replayed at random times, as often
as the workers are expected to manage. From the 16th request on the real times count. Two loads are replayed: at the
present one both arrangements may keep all targets, or none, and then a higher or a lower one shows which of them would
be the first to fail.

A replay takes a few hundred to some thousand steps of arithmetic. Those before the first request are taken at once,
when its router serves no stream that they could delay. Later ones are taken in parts, some with each placement, and
take at most 0.5 % of the time. Of a large cluster a few workers of each role are replayed with their share of the
requests, so it learns as soon as a small one.

Workers of both roles get a role here unless workers alone keep more targets: about as many as the recent prompts need
compute prompts, the others decode. It is a preference as that of an operator, and each router draws the same line
between the workers, in the order of their ids.
"""

import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress
from operator import attrgetter
from statistics import fmean

from cluster.messages import MemberId, Role
from cluster.service_times import TARGET_SHARE
from router.policies.candidates import WorkerLoad
from router.policies.prediction.forecast import LEAST_STEP_S
from router.policies.replay import PastRequest, Traffic, kept_alone, kept_by_role, random_traffic, traffic

_NUM_REPLAYED = 8  # workers of a larger cluster that are replayed, if that leaves one of each role
_NUM_PAST = 128  # requests that are replayed, for up to four workers
_NUM_PAST_PER_WORKER = 32
_LEAST_PAST = 16  # requests that show the present load; the lengths of fewer are replayed at loads that are assumed
_LEAST_ASSUMED, _ASSUMED_PER_WORKER = 32, 8  # requests of such a replay
_LEAST_PER_WORKER = 16  # requests that are replayed at the present load; fewer past ones are repeated
_NUM_LOADS = 2
_LESS, _MORE = 0.7, 1.5  # the other load of a replay, where both keep few or most targets at the present one
# Steps of replays, about 5 us each: the most with a placement, in a second, and at once after a pause or at first.
_STEPS_PER_PLACEMENT, _STEPS_PER_S, _MOST_SAVED_STEPS = 256, 1000.0, 4096.0
_STEPS_KEPT = 3072.0  # until the load is known, for the replay that then begins


class Arrangement(StrEnum):
    BY_ROLE = "by_role"  # prompts and decoding on workers of their roles
    MIXED = "mixed"  # by role, and workers help where a request gains enough
    ALONE = "alone"  # every worker serves whole requests


# Differences of the shares of requests that keep their targets, from which one arrangement is clearly better: strict
# roles only where they are worth more at the present load than the help that workers give each other.
_CLEAR = {Arrangement.BY_ROLE: 0.3, Arrangement.ALONE: 0.15}
# From this lead for each worker above so many, and up to `_NUM_REPLAYED`, those of both roles share the work by roles;
# this and an arrangement last while it leads. A replay leaves out the help which workers give each other: two workers
# keep more targets with it than in either arrangement, but of many the few that compute all prompts are soon busy.
_LEAD_PER_WORKER, _FEW_WORKERS = 0.06, 4
_BETTER_SPLIT = 0.03  # from which another number of them computes prompts


class Arrangements:
    """Learns the arrangement from the requests that are placed."""

    def __init__(self) -> None:
        self.current = Arrangement.MIXED
        self._past: deque[PastRequest] = deque(maxlen=_NUM_PAST)
        self._own, self._others = 0.0, 0.0  # sequences at the workers, summed over recent placements
        self._replay: Generator[None, None, None] | None = None
        self._num_steps = _MOST_SAVED_STEPS  # that may be taken
        self._roles: Mapping[MemberId, Role] = {}  # of workers whose role is both, while they divide the work by role
        self._shares_by_role = False
        self._has_begun = False
        self._was_assumed = True  # the latest choice was made at an assumed load
        self._reported = self.current  # by `placed`

    def begin(self, request: PastRequest, workers: Sequence[WorkerLoad]) -> None:
        """Choose before the first request is placed. It takes some milliseconds, once."""
        if not self._has_begun:
            self._has_begun = True
            self._past.append(request)
            deque(self._compare(workers, is_assumed=True), maxlen=0)
            self._past.clear()

    def placed(self, request: PastRequest, workers: Sequence[WorkerLoad]) -> bool:
        """Record a request, and go on with the replay. `workers`: all that may be chosen; their speeds are known.
        Returns whether the arrangement has changed since the call before."""
        elapsed_s = request.placed_s - self._past[-1].placed_s if self._past else 0.0
        self._num_steps = min(_MOST_SAVED_STEPS, self._num_steps + _STEPS_PER_S * elapsed_s)
        self._past.append(request)
        size = self._past.maxlen or 1
        self._own += request.num_choices + sum(load.assigned for load in workers) - self._own / size
        self._others += sum(load.others for load in workers) - self._others / size
        is_assumed = len(self._past) < _LEAST_PAST
        if self._replay is None and self._num_steps >= is_assumed * _STEPS_KEPT:
            self._replay = self._compare(workers, is_assumed=is_assumed)
        left = min(_STEPS_PER_PLACEMENT, int(self._num_steps))
        while self._replay is not None and left:
            left, self._num_steps = left - 1, self._num_steps - 1
            if next(self._replay, self) is self:
                self._replay = None
        before, self._reported = self._reported, self.current
        return self.current is not before

    def role_of(self, load: WorkerLoad) -> Role | None:
        """Return the worker's role: whether a worker of both roles has only one of them is decided here."""
        is_shared = self._shares_by_role and load.role is Role.BOTH
        return self._roles.get(load.member, load.role) if is_shared else load.role

    @property
    def _share(self) -> float:
        """Return the share of this router in the work of all routers."""
        return self._own / (self._own + self._others)

    @property
    def _past_s(self) -> float:
        """Return the time within which as many requests of all routers came as are known here."""
        return max(LEAST_STEP_S, self._share * (self._past[-1].placed_s - self._past[0].placed_s))

    def _compare(self, workers: Sequence[WorkerLoad], *, is_assumed: bool) -> Generator[None, None, None]:
        """Replay the requests with both arrangements at two loads and choose. Yields after each step. `is_assumed`: the
        load is that which the workers are expected to manage, not the present one."""
        splits = self._splits(workers, is_assumed=is_assumed)
        if not splits:
            self.current, self._shares_by_role = Arrangement.MIXED, False
            return
        num_past = splits[0].scale * max(_NUM_PAST, _NUM_PAST_PER_WORKER * splits[0].num_workers)
        self._past = deque(self._past, maxlen=math.ceil(num_past))
        everyone = [*splits[0].prefills, *splits[0].decodes]
        replayed = self._assumed_traffic if is_assumed else self._traffic
        all_leads, load = [list[float]() for _ in splits], 1.0  # of roles over workers alone; by split and load
        for _ in range(_NUM_LOADS):
            alone_kept, most_kept = (yield from kept_alone(replayed(splits[0], load), everyone)), 0.0
            for split, leads in zip(splits, all_leads, strict=True):
                kept = yield from kept_by_role(replayed(split, load), split.prefills, split.decodes)
                leads.append(kept - alone_kept)
                most_kept = max(most_kept, kept)
            load = _MORE if most_kept + alone_kept > 1 else _LESS
        means = list(map(fmean, all_leads))
        best = max(range(len(splits)), key=lambda i: means[i] + _BETTER_SPLIT * (splits[i] is splits[0]))
        self._roles, lead = splits[best].roles, means[best]
        present_lead = min(all_leads[best]) if is_assumed else all_leads[best][0]
        self.current = _better(present_lead, lead, Arrangement.MIXED if self._was_assumed else self.current)
        self._was_assumed = is_assumed
        needed = _LEAD_PER_WORKER * (min(len(workers), _NUM_REPLAYED) - _FEW_WORKERS)
        self._shares_by_role = lead >= (min(0.0, needed) if self._shares_by_role else needed)

    def _splits(self, workers: Sequence[WorkerLoad], *, is_assumed: bool) -> Sequence["_Split"]:
        """Return the ways to share the roles that are compared, the present one first; none if a role has no worker. Of
        workers of both roles the first ones in the order of their ids compute prompts."""
        both = sorted((load.member for load in workers if load.role is Role.BOTH), key=attrgetter("id", "incarnation"))
        num_fixed = sum(load.role is Role.PREFILL for load in workers)
        least, most = max(1, num_fixed), min(len(workers) - 1, num_fixed + len(both))
        numbers = {num_fixed}
        if both and least <= most:
            needs = _needs(self._past, workers)
            seconds = sum(needs) / len(workers) if is_assumed else self._past_s
            wanted = math.floor(_num_for_prompts(*needs, seconds, len(workers)))
            numbers = {min(max(least, number), most) for number in (wanted, wanted + 1)}
        computing = [both[: number - num_fixed] for number in numbers]
        all_roles = [dict.fromkeys(both, Role.DECODE) | dict.fromkeys(each, Role.PREFILL) for each in computing]
        splits = [_Split.of(workers, roles) for roles in sorted(all_roles, key=lambda roles: roles != self._roles)]
        return [split for split in splits if split is not None]

    def _traffic(self, split: "_Split", load: float) -> Traffic:
        """Return the requests of a replay at this multiple of the present load."""
        least = _LEAST_PER_WORKER * split.num_workers
        return traffic(self._past, split.scale, self._share / load, max(least, round(len(self._past) / split.scale)))

    def _assumed_traffic(self, split: "_Split", load: float) -> Traffic:
        """Return the requests of a replay at this multiple of the load that the workers are expected to manage."""
        needs = _needs(self._past, [*split.prefills, *split.decodes])
        every_s = sum(needs) / len(self._past) / split.num_workers / load
        return random_traffic(self._past, every_s, max(_LEAST_ASSUMED, _ASSUMED_PER_WORKER * split.num_workers))


@dataclass(frozen=True, slots=True)
class _Split:
    """Workers that compute prompts, and workers that decode."""

    roles: Mapping[MemberId, Role]  # of workers of both roles
    prefills: Sequence[WorkerLoad]  # those that are replayed
    decodes: Sequence[WorkerLoad]
    scale: float  # how many workers one of these stands for

    @property
    def num_workers(self) -> int:
        return len(self.prefills) + len(self.decodes)

    @staticmethod
    def of(workers: Sequence[WorkerLoad], roles: Mapping[MemberId, Role]) -> "_Split | None":
        """Return the workers with these roles; None if one has no single role, or no worker has one of them."""
        all_roles = [roles.get(load.member, load.role) for load in workers]
        pools = [[*compress(workers, [each is role for each in all_roles])] for role in (Role.PREFILL, Role.DECODE)]
        if not all(pools) or sum(map(len, pools)) < len(workers):
            return None
        scale = _scale(*map(len, pools))
        prefills, decodes = (_every(scale, pool) for pool in pools)
        return _Split(roles, prefills, decodes, scale)


def _scale(num_prefills: int, num_decodes: int) -> float:
    """Return how many workers one of a replay stands for."""
    fewest, number = min(num_prefills, num_decodes), num_prefills + num_decodes
    return max(1.0, fewest / max(1, _NUM_REPLAYED * fewest // number))


def _every(scale: float, workers: Sequence[WorkerLoad]) -> Sequence[WorkerLoad]:
    """Return one worker out of `scale`, evenly from the fastest to the slowest."""
    if scale <= 1:
        return workers
    ordered = sorted(workers, key=_prompt_s)
    number = round(len(workers) / scale)
    return [ordered[int((i + 0.5) * len(ordered) / number)] for i in range(number)]


def _prompt_s(load: WorkerLoad) -> float:
    assert load.work is not None, "workers without speeds cannot be compared"
    return load.work.times.prefill_s(load.work.max_chunk)


def _needs(past: Sequence[PastRequest], workers: Sequence[WorkerLoad]) -> tuple[float, float]:
    """Return for how many seconds the requests need one of these workers to compute their prompts, and to decode, if a
    worker that computes prompts may be busy for `TARGET_SHARE` of the time, and one that decodes has batches as large
    as that share of the target for the time between tokens allows."""
    median = sorted(workers, key=_prompt_s)[len(workers) // 2]
    assert median.work is not None, "workers without speeds cannot be compared"
    times, max_running = median.work.times, median.work.max_running
    tokens = sum(one.num_choices * max(0.0, one.num_output - 1) for one in past)
    length = fmean(one.num_prompt_tokens + one.num_output / 2 for one in past)
    target_s = fmean(one.targets.itl_s for one in past)
    added_s = max(times.decode.per_sequence_s + times.decode.per_context_token_s * length, LEAST_STEP_S)
    batch = max(1.0, min(max_running, (TARGET_SHARE * target_s - times.decode.step_s) / added_s))
    computing_s = sum(times.prefill.seconds(math.ceil(one.prompt.num_new), one.prompt.attended) for one in past)
    return max(computing_s, LEAST_STEP_S) / TARGET_SHARE, tokens * (times.decode.step_s / batch + added_s)


def _num_for_prompts(computing_s: float, decoding_s: float, seconds: float, num_workers: int) -> float:
    """Return how many workers should compute the prompts of requests that arrive within `seconds`. Workers that are not
    needed are shared by the roots of the needs (square-root staffing): the smaller a pool is, the larger is the part of
    it that it needs for requests that come together."""
    computing, decoding = computing_s / seconds, decoding_s / seconds
    if (spare := num_workers - computing - decoding) <= 0:
        return num_workers * computing / (computing + decoding)
    return computing + spare * math.sqrt(computing) / (math.sqrt(computing) + math.sqrt(decoding))


def _better(present_lead: float, lead: float, current: Arrangement) -> Arrangement:
    """Return the arrangement for these leads: by how much larger a share of the requests meets its targets with roles
    than with single workers, at the present load and on average over all loads. A small lead keeps the current
    arrangement."""
    for arrangement, gain in ((Arrangement.BY_ROLE, present_lead), (Arrangement.ALONE, -lead)):
        if (lead >= 0) is (arrangement is Arrangement.BY_ROLE) and gain >= _CLEAR[arrangement]:
            return arrangement
    still_leads = lead >= 0 if current is Arrangement.BY_ROLE else lead <= 0
    return current if still_leads else Arrangement.MIXED
