"""A SequenceScheduler under the simulated clock: the requested sequences and the outcome of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.messages import NO_TENANT, DecodeJob, MemberId, Sampling, SequenceStart, TenantShare, TokenStops
from cluster.protocol.hashing import nameless_chains
from cluster.service_times import ServiceTimes
from engine.scheduling.commands import AdmitLocal, Command, Event, Failed, Inspect, Inspected, StepTokens
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import Policy
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import DrawnToken, Runner, Sample, Scheduler, StepPlan, StepResult
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner, next_token
from tests.unit.engine.scheduling.policies.simulation import SameToken, Simulation, Step, StepCost

_ROUTER = MemberId("router", "1")
BLOCK_SIZE = 16
_END = 10**6  # the token with which a sequence ends by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt with one continuation of `num_output` tokens."""

    arrives_s: float = 0.0
    num_prompt: int
    num_output: int
    max_tokens: int = 0  # 0: num_output
    priority: int = 0
    is_batch: bool = False
    timeout_s: float = 1e9
    tenant: str = ""
    share: TenantShare = NO_TENANT

    def job(self, handle: int) -> DecodeJob:
        """Return the job. No two prompts have equal first tokens."""
        prompt = tuple(range(handle, handle + self.num_prompt))
        start = SequenceStart(handle, seed=handle)
        stops = TokenStops(self.max_tokens or self.num_output, stop_token_ids=frozenset({_END}))
        return DecodeJob(
            f"request {handle}",
            0,
            _ROUTER,
            prompt,
            Sampling(),
            stops,
            (start,),
            None,
            self.timeout_s,
            cache_salt=self.tenant,
            priority=self.priority,
            is_batch=self.is_batch,
            tenant=self.share,
        )


@dataclass
class Answered:
    asked: Asked
    job: DecodeJob
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)

    @property
    def completion_s(self) -> float:
        return self.token_times_s[-1] - self.asked.arrives_s

    @property
    def longest_gap_s(self) -> float:
        """Return the longest time between two tokens, or from the arrival to the first token."""
        times = [self.asked.arrives_s, *self.token_times_s]
        return max(after - before for before, after in pairwise(times))


@dataclass
class Decoded:
    """The record of a run of `decode`."""

    scheduler: Scheduler[Command, Event]
    answers: list[Answered]
    steps: list[Step]

    @property
    def output_rate(self) -> float:
        """Return the tokens per second, from the first step to the last."""
        return sum(len(answer.token_ids) for answer in self.answers) / (self.steps[-1].ended_s - self.steps[0].began_s)

    def assert_exact(self) -> None:
        """Assert that every client received the tokens of a serial run exactly once, and that all blocks are free."""
        for answer in self.answers:
            assert answer.token_ids == _serial(answer), f"{answer.asked} was told something else"
        inspected = self.inspected
        assert inspected.violation == ""
        assert inspected.blocks["free"] == sum(inspected.blocks.values()), inspected.blocks

    @property
    def inspected(self) -> Inspected:
        (inspected,) = self.scheduler.apply(Inspect(1), self.steps[-1].ended_s)
        assert isinstance(inspected, Inspected)
        return inspected


def decode(
    asked: Sequence[Asked], scheduler: Scheduler[Command, Event], cost: StepCost, num_blocks: int = 0
) -> Decoded:
    """Decode `asked`, in order of arrival. With `num_blocks` (of the pool), every token depends on the content of its
    block table; without, tokens are only counted.
    """
    answers = [Answered(one, one.job(handle)) for handle, one in enumerate(asked)]
    last_positions = {
        handle: len(answer.job.prompt_token_ids) + answer.asked.num_output - 1 for handle, answer in enumerate(answers)
    }
    source = FakePagedRunner(num_blocks, BLOCK_SIZE) if num_blocks else SameToken()
    simulation = Simulation[Command, Event](scheduler, cost, _Ending(source, last_positions))
    simulation.run([(answer.asked.arrives_s, AdmitLocal(answer.job)) for answer in answers])
    for now_s, event in simulation.events:
        assert not isinstance(event, Failed), f"{event} at {now_s} s"
        if isinstance(event, StepTokens):
            for told in event.tokens:
                answer = answers[told.handle]
                assert told.index == len(answer.token_ids), "repeated or missing token"
                answer.token_ids.append(told.token.token_id)
                answer.token_times_s.append(now_s)
    for answer in answers:
        assert len(answer.token_ids) == answer.asked.num_output, f"{answer.asked} got {len(answer.token_ids)} tokens"
    return Decoded(scheduler, answers, simulation.steps)


class _Ending:
    """A runner around another one that ends each sequence at its planned length. A seed identifies its sequence."""

    def __init__(self, runner: Runner, last_positions: Mapping[int, int]) -> None:
        self._runner = runner
        self._last_positions = last_positions

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        return StepResult(
            tuple(
                tuple(
                    DrawnToken(_END) if sample.position == self._last_positions[sample.seed] else token
                    for sample, token in zip(chunk.samples, drawn, strict=True)
                )
                for chunk, drawn in zip(plan.chunks, result.tokens, strict=True)
            )
        )


def _serial(answer: Answered) -> list[int]:
    prompt, seed = answer.job.prompt_token_ids, answer.job.sequences[0].seed
    output: tuple[int, ...] = ()
    for index in range(answer.asked.num_output - 1):
        output += (next_token(prompt + output, Sample(seed, len(prompt) + index, Sampling())),)
    return [*output, _END]


def limits(**changed: int | float) -> SchedulerLimits:
    values: dict[str, int | float] = {
        "num_blocks": 1 << 20,
        "block_size": BLOCK_SIZE,
        "max_model_len": 1 << 20,
        "max_num_seqs": 8,
        "max_prefill_tokens": 512,
        "max_queue": 1 << 20,
        "watermark": 0.0,
    }
    return SchedulerLimits(**(values | changed))  # type: ignore[arg-type]


def scheduler(
    decode_limits: SchedulerLimits,
    policy: Policy | None = None,
    lengths: LengthPredictor | None = None,
    times: ServiceTimes | None = None,
) -> SequenceScheduler:
    return SequenceScheduler(
        decode_limits, new_chain=nameless_chains(), policy=policy, lengths=lengths, times=lambda: times
    )
