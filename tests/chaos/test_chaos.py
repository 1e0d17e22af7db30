"""Three fixed rounds of `make chaos`: real processes end under load, and nothing is lost or leaked."""

from dataclasses import replace

import pytest

from tests.chaos.__main__ import run_plan
from tests.chaos.members import forked_cluster
from tests.chaos.plan import Fault, Kind, Phase, Round
from tests.chaos.questions import make_questions

_FAULTS = (
    Fault(Kind.SIGKILL, "decode", Phase.DECODING),
    Fault(Kind.SIGKILL, "router", Phase.FIRST_TOKEN),
    Fault(Kind.SIGKILL, "prefill", Phase.SETTLING),
)
_NUM_DECODED = 150  # long enough to be met while it is decoded


@pytest.mark.slow
async def test_members_that_end_at_the_worst_moments_lose_no_token() -> None:
    plan = [Round(number, number, fault, victim=0, for_s=0.5, jump_s=0.0) for number, fault in enumerate(_FAULTS)]
    every = make_questions(num_mixed=6)
    # Long prompts are of other phases. Of the others one each is enough: they are asked under a salt of their own.
    decoding = replace(every.long_answers[0], max_tokens=_NUM_DECODED)
    few = replace(every, long_prompts=(), long_answers=(decoding,), middling=every.middling[:1])
    run = await run_plan(plan, seed=0, cluster=forked_cluster, questions=few, num_clients=2)
    told = [f"{result.fault}: {what}" for result in run.results for what in result.wrong]
    assert not told and not run.broken, "\n".join([*told, run.broken])
    assert [result.fault for result in run.covered] == [fault.name for fault in _FAULTS], "a victim was not met"
    assert set(run.exits.values()) == {0}
