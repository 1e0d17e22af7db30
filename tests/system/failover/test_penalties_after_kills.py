"""Real decode workers are killed under a request with penalties."""

import signal

import pytest

from tandem.v1 import inference_pb2
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(1800)]

_PROMPT = tuple(range(30, 67))
_SAMPLING = inference_pb2.SamplingParams(
    temperature=0.8,
    seed=5,
    repetition_penalty=1.1,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    logit_bias={40: 1.5},
    bad_words=["self"],
)
_NUM_KILLS = 20
_MOST_ATTEMPTS = 20


async def test_a_decode_worker_killed_at_any_of_twenty_tokens_changes_no_token_under_penalties(
    cluster: LocalCluster,
) -> None:
    request = question(_PROMPT, max_tokens=160, n=4, sampling=_SAMPLING, ignore_eos=True)
    undisturbed = await ask(cluster, request)
    for num_tokens in range(1, _NUM_KILLS + 1):
        for _ in range(_MOST_ATTEMPTS):  # an answer may end before its worker is killed
            async with asked(cluster, request) as answer:
                await answer.until(1)
                victim = await cluster.decode_worker()  # found early, because the answer goes on meanwhile
                await answer.until(num_tokens)
                if victim is not None:
                    cluster.members[victim].send_signal(signal.SIGKILL)
                await answer.end()
            assert answer.choices == undisturbed.choices, f"killed after {num_tokens} tokens"
            assert answer.texts == undisturbed.texts
            if victim is not None:
                await cluster.members[victim].exit_code()
            await cluster.mend()
            await cluster.until_free()
            if "decode_worker_lost" in answer.ledger.reasons:
                break
        else:
            pytest.fail(f"no answer lost its worker after {num_tokens} tokens")
