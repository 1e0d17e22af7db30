"""In which order prompts get the tokens of a step, and who was passed over. Pure."""

from collections.abc import Collection, Iterator, Sequence

from engine.scheduling.policies import Policy, full_rank
from prefill_worker.scheduling.jobs import Running, Waiting


def in_order(
    policy: Policy, running: Collection[Running], queue: Collection[Waiting], now_s: float
) -> Iterator[Running | Waiting]:
    """Those that run before those that wait, unless the policy is preemptive; the batch class behind all others. Jobs
    may start or end while they are gone through."""
    for is_batch in (False, True):
        started = [job for job in running if job.job.is_batch == is_batch]
        waiting = [job for job in queue if job.job.is_batch == is_batch]
        groups: Sequence[Sequence[Running | Waiting]] = (started, waiting)
        if policy.is_preemptive:
            groups = ((*started, *waiting),)
        for jobs in groups:  # where those that run take all the tokens, the queue is not even ranked
            yield from sorted(jobs, key=lambda job: full_rank(policy, job.work(now_s), now_s))


def note_turns(running: Collection[Running], planned: Collection[int], now_s: float) -> None:
    """`planned`: numbers of those that are in the step."""
    for job in running:
        if job.number in planned:
            job.take_turn(now_s)
        else:
            job.pass_turn(now_s)
