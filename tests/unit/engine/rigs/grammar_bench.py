"""The demo model's engine behind a scheduler, for sequences whose answers must match a grammar."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import TandemError
from cluster.messages import DecodeJob, FinishReason, Grammar, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from engine.build import Engine
from engine.scheduling.batching.chunks import NewDrafter
from engine.scheduling.commands import AdmitLocal, Event, Failed, StepTokens
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan

BLOCK_SIZE = 8
EOS = 0
ROUTER = MemberId("router", "1")
HOT = Sampling(temperature=1.2)


@dataclass
class Answers:
    """The output tokens, and how each sequence ended, by handle."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason | TandemError] = field(default_factory=dict)


class GrammarBench:
    def __init__(self, engine: Engine, new_drafter: NewDrafter | None = None) -> None:
        self.engine = engine
        limits = SchedulerLimits(
            num_blocks=engine.pool.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            max_num_seqs=32,
            max_prefill_tokens=256,
            max_queue=100,
        )
        chains = nameless_chains()
        self.scheduler = SequenceScheduler(limits, new_chain=chains, new_drafter=new_drafter)
        self.answers = Answers()
        self.plans: list[StepPlan] = []
        self._handles = itertools.count(1)
        self._dice = random.Random(5)

    def admit(
        self,
        grammar: Grammar | None,
        prompt: Sequence[int] = (5, 6, 7),
        committed: Sequence[int] = (),
        *,
        seeds: Sequence[int] = (11,),
        sampling: Sampling = HOT,
        max_tokens: int = 200,
    ) -> list[int]:
        """Admit a job with one choice per seed, and return their handles."""
        handles = [next(self._handles) for _ in seeds]
        job = DecodeJob(
            request_id=f"r{handles[0]}",
            attempt=1,
            router=ROUTER,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            stops=TokenStops(max_tokens, stop_token_ids=frozenset({EOS})),
            sequences=tuple(SequenceStart(h, seed, tuple(committed)) for h, seed in zip(handles, seeds, strict=True)),
            signed_ticket=None,
            timeout_s=1e6,
            grammar=grammar,
        )
        for handle in handles:
            self.answers.tokens[handle] = list(committed)
        self._note(self.scheduler.apply(AdmitLocal(job), 0.0))
        return handles

    def step(self) -> bool:
        """Run one step. Returns False if there is nothing to compute."""
        events, plan = self.scheduler.plan(0.0)
        self._note(events)
        if plan is None:
            return False
        self.plans.append(plan)
        self._note(self.scheduler.complete(plan, self.engine.runner.run(plan), 0.0))
        return True

    def run(self) -> Answers:
        while self.step():
            pass
        self.scheduler.check()
        assert self.answers.ends.keys() == self.answers.tokens.keys()
        return self.answers

    def _note(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Failed):
                self.answers.ends |= dict.fromkeys(event.handles, event.error)
            if isinstance(event, StepTokens):
                for token in event.tokens:
                    assert token.index == len(self.answers.tokens[token.handle])
                    self.answers.tokens[token.handle].append(token.token.token_id)
                    if token.token.finish_reason is not None:
                        self.answers.ends[token.handle] = token.token.finish_reason
