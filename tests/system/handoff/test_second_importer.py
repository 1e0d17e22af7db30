"""A real decode worker dies while it pulls: another one gets the KV of the same prefill."""

import signal

import pytest

from tandem.v1 import inference_pb2
from tests.system.rigs.members.asking import ask, held_hand_off, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_LONG = tuple(20 + i % 800 for i in range(960))  # fifteen chunks
_LETTERS = inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, text="[a-z ]{40}")


@pytest.mark.parametrize("grammar", [None, _LETTERS], ids=["free", "with a grammar"])
async def test_a_decode_worker_killed_during_a_pull_causes_no_second_prefill(
    cluster: LocalCluster, grammar: inference_pb2.Grammar | None
) -> None:
    salt = f"its importer lives; {grammar}"
    request = question(_LONG, max_tokens=8, ignore_eos=grammar is None, cache_salt=salt)
    request.MergeFrom(inference_pb2.GenerateRequest(grammar=grammar))
    undisturbed = await ask(cluster, request)
    async with held_hand_off(cluster, request) as held:
        victim = cluster.members[held.importer]
        victim.send_signal(signal.SIGKILL)
        assert await victim.exit_code() == -signal.SIGKILL
        cluster.members[held.exporter].send_signal(signal.SIGCONT)
        answer = await held.answer.end()
    assert answer.token_ids == undisturbed.token_ids
    assert answer.ledger.reasons == ["decode_worker_lost", "ticket_reissued"]
    assert (await cluster.figures("prefill"))["tokens_computed"] - held.num_computed == len(_LONG)
    await cluster.mend()
    await cluster.until_free()
