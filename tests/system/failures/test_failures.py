"""Workers die, freeze and leave under load: no request is lost, no token repeated, missing or different."""

import asyncio
import signal
from collections.abc import Sequence

import pytest

from tandem.v1 import admin_pb2, inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import Answer, ask, asked, held_hand_off, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 60.0
_MOST_ATTEMPTS = 8
_LONG = tuple(20 + i % 800 for i in range(960))  # fifteen chunks
_STREAM = question(range(30, 70), max_tokens=200, ignore_eos=True)


async def _busiest(cluster: LocalCluster) -> str:
    """Return the decode worker with the most sequences. It has none if the answer has just ended."""
    loads = {name: (await cluster.inspect(name)).figures["running"] for name in cluster.workers("decode")}
    return max(loads, key=lambda name: loads[name])


async def _asked_of_a_busy_pool(
    cluster: LocalCluster, requests: Sequence[inference_pb2.GenerateRequest]
) -> list[asyncio.Task[Answer]]:
    """Send the requests, again if all are answered before a decode worker is seen to run one of them."""
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            answering = [asyncio.create_task(ask(cluster, request)) for request in requests]
            while not all(task.done() for task in answering):
                if (await cluster.figures("decode"))["running"]:
                    return answering


async def _kill(cluster: LocalCluster, *names: str) -> None:
    for name in names:
        cluster.members[name].send_signal(signal.SIGKILL)
    for name in names:
        assert await cluster.members[name].exit_code() == -signal.SIGKILL


async def test_a_prefill_worker_killed_during_prefill_delays_but_loses_no_request(cluster: LocalCluster) -> None:
    request = question(_LONG, max_tokens=8, ignore_eos=True, cache_salt="undisturbed")
    undisturbed = await ask(cluster, request)
    async with held_hand_off(cluster, request) as held:
        victim = held.exporter
        await _kill(cluster, victim)
        answer = await held.answer.end()
    assert answer.token_ids == undisturbed.token_ids
    assert any(reason.startswith(("prefill_", "handoff_")) for reason in answer.ledger.reasons), answer.ledger
    assert not any("local" in reason for reason in answer.ledger.reasons)
    survivor = next(name for name in cluster.workers("prefill") if name != victim)
    assert any(member.startswith(survivor) for member in answer.ledger.members)
    await cluster.until_free()


async def test_a_decode_worker_killed_mid_stream_is_a_gap_only(cluster: LocalCluster) -> None:
    undisturbed = await ask(cluster, _STREAM)
    for _ in range(_MOST_ATTEMPTS):  # an answer may end before its worker is killed
        async with asked(cluster, _STREAM) as answer:
            await answer.until(40)
            await _kill(cluster, await _busiest(cluster))
            await answer.end()
        assert answer.token_ids == undisturbed.token_ids
        await cluster.mend()
        await cluster.until_free()
        if len({member for member in answer.ledger.members if member.startswith("decode")}) == 2:
            return
    pytest.fail("no answer lost its worker")


@pytest.mark.slow
async def test_messages_of_a_woken_decode_worker_are_dropped(cluster: LocalCluster) -> None:
    undisturbed = await ask(cluster, _STREAM)
    for _ in range(_MOST_ATTEMPTS):  # an answer may end before its worker is stopped
        async with asked(cluster, _STREAM) as answer:
            await answer.until(40)
            frozen = await _busiest(cluster)
            with cluster.members[frozen].stopped():
                await answer.until(130)  # the other one continues
            await answer.end()
        assert answer.token_ids == undisturbed.token_ids
        await cluster.until_free()
        assert not (await cluster.inspect(frozen)).figures["running"]
        await cluster.mend()  # it is taken back as it is
        assert (await ask(cluster, _STREAM)).token_ids == undisturbed.token_ids
        if answer.ledger.reasons:
            return
    pytest.fail("no answer went on at the other worker")


async def test_without_a_prefill_worker_decode_prefills_and_the_ledger_names_it(cluster: LocalCluster) -> None:
    """Sampled tokens are the same too: only the path changes."""
    warm = inference_pb2.SamplingParams(temperature=0.8, seed=3)
    sampled = question(range(40, 99), max_tokens=16, n=3, sampling=warm, ignore_eos=True)
    greedy = question(range(40, 99), max_tokens=16, ignore_eos=True)
    handed_over = [await ask(cluster, sampled), await ask(cluster, greedy)]
    before = await cluster.figures("decode")
    await _kill(cluster, *cluster.workers("prefill"))
    local = [await ask(cluster, sampled)]  # the router may find out with this one
    await _until_router_knows_no_prefill(cluster)
    local.append(await ask(cluster, greedy))
    after = await cluster.figures("decode")
    await cluster.until_free()
    assert [answer.choices for answer in local] == [answer.choices for answer in handed_over]
    assert after["local_prefills"] - before["local_prefills"] == len(local)
    assert [answer.ledger.transport for answer in local] == ["local", "local"]
    assert set(local[0].ledger.reasons) <= {"prefill_worker_lost", "no_prefill_worker"}
    assert local[0].ledger.reasons
    assert local[1].ledger.reasons == ["no_prefill_worker"]


async def _until_router_knows_no_prefill(cluster: LocalCluster) -> None:
    def knows_none(status: admin_pb2.StatusResponse) -> bool:
        return not any(m.role == admin_pb2.MEMBER_ROLE_PREFILL and m.figures for m in status.members)

    await until(cluster.status, knows_none, what="the router reaches no prefill worker")


async def test_draining_workers_under_load_loses_nothing(cluster: LocalCluster) -> None:
    requests = [question(range(30, 60 + 40 * i), max_tokens=60, ignore_eos=True) for i in range(8)]
    undisturbed = [await ask(cluster, request) for request in requests]
    answering = await _asked_of_a_busy_pool(cluster, requests)
    leaving = ("prefill0", "decode0")
    for name in leaving:
        cluster.members[name].send_signal(signal.SIGTERM)
    late = asyncio.create_task(ask(cluster, requests[0]))
    answers: list[Answer] = await asyncio.gather(*answering)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
    assert (await late).token_ids == undisturbed[0].token_ids
    assert [await cluster.members[name].exit_code() for name in leaving] == [0, 0]
    for name in leaving:
        assert not any("work left" in line for line in cluster.members[name].output), cluster.output()
