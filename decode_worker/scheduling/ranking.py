"""The order among sequences and hand-offs: what the policy sees of them, and what it says. Pure. Owned by the batch."""

from collections.abc import Iterable
from dataclasses import replace

from decode_worker.scheduling.reservations import Claim
from decode_worker.scheduling.sequences import ByRank, Sequence
from engine.scheduling.policies import FirstCome, Policy, Rank, Work, displaces, full_rank


class Ranking:
    """`now_s`: time of what is being decided."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now_s = 0.0
        # Where ranks never change there is nothing to do in a step, however many wait.
        self._is_fixed = policy.is_static or isinstance(policy, FirstCome)

    def rank(self, sequence: Sequence) -> Rank:
        """Choices of one group by their index."""
        return (*full_rank(self.policy, self._work(sequence), self.now_s), sequence.choices[0][0])

    def claim_rank(self, claim: Claim) -> Rank:
        return full_rank(self.policy, self._claim_work(claim), self.now_s)

    def sort(self, places: Iterable[ByRank]) -> None:
        if not self._is_fixed:
            for place in places:
                place.sort(self.rank)

    def may_displace(self, running: Sequence) -> bool:
        """Whether there may be somebody who takes its place."""
        return self.policy.is_preemptive or running.group.job.is_batch

    def displaces(self, waiting: Sequence | Claim, running: Sequence) -> bool:
        work = self._work(waiting) if isinstance(waiting, Sequence) else self._claim_work(waiting)
        return displaces(self.policy, work, self._work(running), self.now_s)

    def _work(self, sequence: Sequence) -> Work:
        group = sequence.group
        waits = sequence.waits_since_s is not None
        return Work(
            arrival=group.number,
            arrived_s=group.admitted_s - group.job.age_s,
            deadline_s=group.admitted_s + group.job.timeout_s,
            num_prompt=len(group.job.prompt_token_ids),
            num_done=sequence.num_done,
            predicted_tokens=sequence.predicted_tokens,
            priority=group.job.priority,
            is_batch=group.job.is_batch,
            is_resumed=group.job.is_interrupted,
            waited_s=sequence.waited_s if sequence.waits_since_s is None else self.now_s - sequence.waits_since_s,
            num_since_wait=0 if waits else sequence.num_done - sequence.num_done_waiting,
        )

    def _claim_work(self, claim: Claim) -> Work:
        return replace(claim.work, waited_s=self.now_s - claim.since_s)
