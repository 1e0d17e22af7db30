"""A SequenceScheduler under the simulated clock: prompts, and when each was done."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cluster.messages import NO_TENANT, PrefillJob, Sampling, TenantShare, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.scheduling.commands import AdmitExport, Command, Event, ExportFinished
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import Policy
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import Sample
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner, next_token
from tests.unit.engine.scheduling.policies.simulation import SameToken, Simulation, Step, StepCost

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    arrives_s: float = 0.0
    num_tokens: int
    priority: int = 0
    is_batch: bool = False
    timeout_s: float = 1e9
    tenant: TenantShare = NO_TENANT

    def job(self, number: int) -> PrefillJob:
        """Return the job. No two prompts have equal first tokens."""
        return PrefillJob(
            request_id=f"request {number}",
            attempt=0,
            token_ids=tuple(range(number, number + self.num_tokens)),
            sampling=Sampling(),
            stops=TokenStops(9),
            seeds=(number,),
            num_committed=0,
            importer=None,
            timeout_s=self.timeout_s,
            priority=self.priority,
            is_batch=self.is_batch,
            tenant=self.tenant,
        )


@dataclass
class Prefilled:
    done_s: list[float]  # by prompt; infinite for those whose deadline passed
    steps: list[Step]

    def completion_s(self, prompts: Sequence[Prompt]) -> list[float]:
        return [done_s - prompt.arrives_s for done_s, prompt in zip(self.done_s, prompts, strict=True)]


def prefill(
    prompts: Sequence[Prompt], policy: Policy, cost: StepCost, *, max_prefill_tokens: int = 512, num_blocks: int = 0
) -> Prefilled:
    """Compute `prompts`, in order of arrival. With `num_blocks`, every first token depends on the content of its block
    table.
    """
    scheduler = SequenceScheduler(
        SchedulerLimits(
            num_blocks=num_blocks or 1 << 16,
            max_model_len=1 << 20,
            block_size=_BLOCK_SIZE,
            max_prefill_tokens=max_prefill_tokens,
            max_num_seqs=64,
            max_queue=1 << 20,
        ),
        new_chain=nameless_chains(),
        policy=policy,
    )
    runner = FakePagedRunner(num_blocks, _BLOCK_SIZE) if num_blocks else SameToken()
    simulation = Simulation[Command, Event](scheduler, cost, runner)
    jobs = [prompt.job(number) for number, prompt in enumerate(prompts)]
    simulation.run(
        (prompt.arrives_s, AdmitExport(_ticket(number), job))
        for number, (prompt, job) in enumerate(zip(prompts, jobs, strict=True))
    )
    scheduler.check()
    done = {event.ticket_id: (now_s, event) for now_s, event in simulation.events if isinstance(event, ExportFinished)}
    for number, job in enumerate(jobs):
        if num_blocks and _ticket(number) in done:
            (token,) = done[_ticket(number)][1].tokens
            expected = next_token(job.token_ids, Sample(number, len(job.token_ids), Sampling()))
            assert token.token_id == expected, f"prompt {number} was answered by something else"
    done_s = [done[_ticket(number)][0] if _ticket(number) in done else inf for number in range(len(prompts))]
    return Prefilled(done_s, simulation.steps)


def _ticket(number: int) -> bytes:
    return number.to_bytes(4, "big")
