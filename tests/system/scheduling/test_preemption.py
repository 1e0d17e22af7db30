"""Real processes with a decode pool too small for its load: sequences are swapped or recomputed, also with draft
tokens, and every answer equals that of the request alone.
"""

import asyncio

import pytest

from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

_PROMPT = tuple(range(100, 140))
_SMALL = ("--dtype", "float32", "--num-blocks", "40", "--prefix-caching", "off", "--speculation", "prompt")


@pytest.mark.parametrize(("swap_space", "way"), [("64MiB", "swapped_in"), ("0", "recomputed")])
async def test_a_preempted_sequence_has_the_tokens_of_an_undisturbed_one(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory, swap_space: str, way: str
) -> None:
    flags = (*_SMALL, "--swap-space", swap_space)
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("preemption"), flags=flags)
    try:
        await cluster.start(prefill=1, decode=1)
        requests = [question((*_PROMPT, number + 200), max_tokens=250, ignore_eos=True) for number in range(5)]

        together = await asyncio.gather(*(ask(cluster, request) for request in requests))
        report = await cluster.inspect("decode0")
        alone = [await ask(cluster, request) for request in requests]
    finally:
        codes = await cluster.stop()

    assert set(codes.values()) == {0}, cluster.output()[-4000:]
    assert report.figures[way] > 0 and report.figures["draft_tokens_accepted"] > 0
    assert report.figures["swap_slots_used"] == 0 and report.blocks["held"] == 0
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
