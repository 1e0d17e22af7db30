"""Running sequences move between two real decode workers, KV and all, while they stream: no token differs."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from functools import partial

import pytest

from cli.__main__ import main
from tandem.v1 import inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import GREEDY, Answer, ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_WARM = inference_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=11)
_REQUESTS = [
    question(
        range(30, 47 + 9 * i),
        max_tokens=240,
        n=3 if i == 5 else 1,
        ignore_eos=True,
        logprobs=2,
        sampling=_WARM if i % 2 else GREEDY,
    )
    for i in range(8)
]
_NUM_SEQUENCES = 10


async def _nothing_is_left(cluster: LocalCluster) -> None:
    await cluster.until_free()
    figures = await cluster.figures("decode")
    left = {
        name: figures[name] for name in ("frozen", "leased_tickets", "live_tickets", "imports", "running", "waiting")
    }
    assert not any(left.values()), left


def _assert_same(answer: Answer, undisturbed: Answer) -> None:
    assert answer.choices == undisturbed.choices
    assert answer.texts == undisturbed.texts
    assert answer.finish_reasons == undisturbed.finish_reasons
    assert [p.chosen.token_id for p in answer.logprobs] == [p.chosen.token_id for p in undisturbed.logprobs]
    ours, theirs = ([p.chosen.logprob for p in one.logprobs] for one in (answer, undisturbed))
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
async def test_eight_requests_move_there_and_back_while_they_stream(cluster: LocalCluster) -> None:
    undisturbed = await asyncio.gather(*(ask(cluster, request) for request in _REQUESTS))
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(asked(cluster, request)) for request in _REQUESTS]
        await asyncio.gather(*(stream.until(10) for stream in streams))
        answering = [asyncio.create_task(stream.end()) for stream in streams]
        emptied = await cluster.migrate("decode0", "decode1")
        there = await cluster.inspect("decode1")
        back = await cluster.migrate("decode1")  # placement's choice: there is one
        again = await cluster.migrate("decode0", "decode1")
        assert not all(task.done() for task in answering), "the streams were over before they moved"
        answers = await asyncio.gather(*answering)
    for answer, expected in zip(answers, undisturbed, strict=True):
        _assert_same(answer, expected)
        assert not answer.ledger.reasons, "moved, not failed over"
        spent_s = sum(phase.duration_s for phase in answer.ledger.phases)
        assert spent_s == pytest.approx(answer.ledger.wall_s, rel=0.02)
    assert emptied.num_kept == back.num_kept == again.num_kept == 0
    assert there.figures["running"] + there.figures["waiting"] == _NUM_SEQUENCES
    assert back.num_moved == again.num_moved == _NUM_SEQUENCES
    assert all(_decoders(answer) == {"decode0", "decode1"} for answer in answers)
    await _nothing_is_left(cluster)


async def test_migrate_moves_at_most_the_given_number(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> tuple[int, str]:
        status = main(["migrate", *words, "--address", cluster.members["router0"].grpc_address])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    request = question(range(30, 70), max_tokens=400, n=3, ignore_eos=True)
    async with asked(cluster, request) as answer:
        await answer.until(5)
        home = await _busy(cluster)
        away = next(name for name in cluster.workers("decode") if name != home)
        status, output = await asyncio.to_thread(command, home, "--to", away, "--max", "2", "--json")
        assert (status, json.loads(output)) == (0, {"moved": 2, "kept": 0})
        status, output = await asyncio.to_thread(command, home)
        assert (status, output) == (0, "1 sequence(s) moved, 0 stayed or were prefilled again\n")
        status, output = await asyncio.to_thread(command, home, "--to", home)
        assert (status, "source and target" in output) == (1, True)
        status, output = await asyncio.to_thread(command, "prefill0")
        assert (status, "not_found: no decode worker 'prefill0'" in output) == (1, True)
        answer.go_away()
    await _nothing_is_left(cluster)


@pytest.mark.parametrize("victim", [pytest.param("source", marks=pytest.mark.slow), "target"])
async def test_a_worker_killed_during_migrations_loses_no_token(cluster: LocalCluster, victim: str) -> None:
    """At the kill, each sequence may be at any point of its move."""
    requests = [question(range(30, 90 + i), max_tokens=150, ignore_eos=True, n=2) for i in range(6)]
    undisturbed = await asyncio.gather(*(ask(cluster, request) for request in requests))
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(asked(cluster, request)) for request in requests]
        await asyncio.gather(*(stream.until(5) for stream in streams))
        answering = [asyncio.create_task(stream.end()) for stream in streams]
        source = await _busy(cluster)
        target = next(name for name in cluster.workers("decode") if name != source)
        dying = cluster.members[{"source": source, "target": target}[victim]]
        before = (await cluster.inspect(target)).figures["running"]
        moving = asyncio.create_task(cluster.migrate(source, target))
        inspect = partial(cluster.inspect, target)
        await until(inspect, lambda seen: seen.figures["running"] != before, what=f"a sequence joins at {target}")
        dying.send_signal(signal.SIGKILL)
        assert await dying.exit_code() == -signal.SIGKILL
        answers = await asyncio.gather(*answering)
        await moving
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.choices == expected.choices
    await _nothing_is_left(cluster)


async def _busy(cluster: LocalCluster) -> str:
    """Return the decode worker that runs the most sequences."""
    reports = {name: await cluster.inspect(name) for name in cluster.workers("decode")}
    return max(reports, key=lambda name: reports[name].figures["running"])


def _decoders(answer: Answer) -> set[str]:
    return {member.partition("@")[0] for member in answer.ledger.members if member.startswith("decode")}
