"""`tandem scale` and `tandem drain` on a cluster that `tandem up` runs, with streams on it; its clients' other router.

The cluster is one prefill worker, one decode worker and two routers; each test leaves it as that.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from cli.__main__ import main
from tandem.client import AsyncClient, AsyncGeneration
from tandem.results import Result
from tests.polling import until
from tests.system.rigs.processes.up_command import DEADLINE_S, Up

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_TOKENS = 500
NUM_STREAMS = 3
Command = Callable[..., Coroutine[None, None, tuple[int, str]]]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("up"), "--dtype", "float32", "--routers", "2", "--placement", "least-loaded")
    try:
        started.until("ready http=")
        yield started
    finally:
        assert started.end() == 0


@pytest.fixture
def tandem(up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a client command on that cluster without blocking this loop, and return its status and output."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", up.environment["XDG_RUNTIME_DIR"])

    async def command(*arguments: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, arguments)
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return command


def first_address(up: Up) -> str:
    return up.until("ready http=").split("grpc=")[1].strip()


def started(client: AsyncClient, number: int, max_tokens: int = MAX_TOKENS) -> AsyncGeneration:
    """Start greedy and sampled requests in turn."""
    return client.generate(
        token_ids=range(30, 50 + number),
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=float(number % 2),
        seed=number,
        timeout_s=DEADLINE_S,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(up: Up) -> list[tuple[int, ...]]:
    """The answers of `NUM_STREAMS` requests while nothing changes."""
    async with AsyncClient(first_address(up)) as client:
        return tokens(await asyncio.gather(*(started(client, number).result() for number in range(NUM_STREAMS))))


def tokens(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@asynccontextmanager
async def streams(client: AsyncClient, count: int) -> AsyncIterator[list["asyncio.Task[Result]"]]:
    """Yield streams that are all past their first tokens."""
    generations = [started(client, number) for number in range(count)]
    for generation in generations:
        while (await anext(generation)).first_index < 4:
            pass
    tasks = [asyncio.create_task(generation.result()) for generation in generations]
    try:
        yield tasks
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_connected(tandem: Command, *names: str) -> None:
    """Wait until the routers may place requests there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            _, output = await tandem("status", "--json")
            members = {member["member"]: member for member in json.loads(output)["members"]}
            if all(members.get(name, {}).get("figures") and members[name]["state"] == "ready" for name in names):
                return


@pytest.mark.slow
async def test_streams_lose_no_token_while_workers_join_and_leave(
    up: Up, tandem: Command, undisturbed: list[tuple[int, ...]]
) -> None:
    async with AsyncClient(first_address(up)) as client:
        status, output = await tandem("scale", "colocated=1")
        assert (status, output.splitlines()[-1]) == (0, "target reached: 1 prefill, 1 decode, 1 colocated")
        assert "colocated-0 is ready" in output
        await until_connected(tandem, "decode-0", "colocated-0")

        async with streams(client, NUM_STREAMS) as drained:
            status, output = await tandem("drain", "decode-0", "--wait", "--json")
        assert (status, json.loads(output)["outcome"]) == (0, "drained")
        assert "decode-0 was drained; starting it again" in up.until("decode-0 was drained")
        up.until("decode-0 is back")
        assert tokens([task.result() for task in drained]) == undisturbed

        await until_connected(tandem, "decode-0", "colocated-0")
        async with streams(client, NUM_STREAMS) as scaled:
            status, output = await tandem("scale", "colocated=0")
        assert (status, output.splitlines()[-1]) == (0, "target reached: 1 prefill, 1 decode")
        results = [task.result() for task in scaled]
        assert tokens(results) == undisturbed
        served = {member.partition("@")[0] for result in results for member in result.ledger.members}
        assert {"decode-0", "colocated-0"} <= served, "the one that left had streams"


async def test_the_target_moves_with_a_role_and_a_killed_worker_comes_back_in_it(up: Up, tandem: Command) -> None:
    async def changed_worker() -> dict[str, Any]:
        _, output = await tandem("status", "--json")
        return next((member for member in json.loads(output)["members"] if member["member"] == "decode-1"), {})

    async def sizes() -> tuple[int, int]:
        target = json.loads((await tandem("status", "--json"))[1])["target"]
        assert target["counts_roles"]
        return target["prefill"], target["decode"]

    status, output = await tandem("scale", "decode=2")
    assert (status, output.splitlines()[-1]) == (0, "target reached: 1 prefill, 2 decode")
    await until_connected(tandem, "decode-0", "decode-1")
    before = up.members()

    status, output = await tandem("role", "decode-1", "prefill")
    assert status == 0 and output.splitlines()[-1].startswith("the scale target is ")
    up.until("decode-1 has the role prefill now: the target is 2 prefill, 1 decode")
    status, output = await tandem("scale", "prefill=2", "decode=1")
    assert (status, output.splitlines()[-1]) == (0, "target reached: 2 prefill, 1 decode")
    assert up.members() == before, "no worker started or left"

    former = (await changed_worker())["incarnation"]
    async with AsyncClient(first_address(up)) as client, streams(client, 1) as (task,):
        os.kill(before["decode-1"], signal.SIGKILL)
        await asyncio.to_thread(up.until, "decode-1 is back")
        assert len((await task).token_ids) == MAX_TOKENS
    back = await until(
        changed_worker,
        lambda seen: seen.get("incarnation", former) != former and seen["state"] == "ready",
        what="the router has read that decode-1 is ready again",
    )
    assert back["role"] == "prefill"
    assert set(up.members()) == set(before)

    status, output = await tandem("role", "decode-1", "decode", "--json")
    assert status == 0 and json.loads(output)["target"]["counts_roles"]
    await until(sizes, lambda seen: seen == (1, 2), what="the target has moved back")
    status, output = await tandem("scale", "decode=1")
    assert (status, output.splitlines()[-1]) == (0, "target reached: 1 prefill, 1 decode")
    assert set(before) - set(up.members()) == {"decode-1"}


async def test_a_client_of_one_address_resumes_at_a_router_named_by_the_first(
    up: Up, undisturbed: list[tuple[int, ...]]
) -> None:
    address = first_address(up)
    async with AsyncClient(address) as client:
        async with streams(client, NUM_STREAMS) as cut:
            os.kill(up.members()["router-0"], signal.SIGKILL)
        results = [task.result() for task in cut]
    assert tokens(results) == undisturbed
    assert [result.ledger.reasons[:1] for result in results] == [("resumed",)] * NUM_STREAMS
    up.until("router-0 is back")
    async with AsyncClient(address) as client:
        assert (await started(client, 0, max_tokens=20).result()).token_ids == undisturbed[0][:20]


async def test_any_router_lists_its_requests_and_drains_the_other_router(up: Up, tandem: Command) -> None:
    async with AsyncClient(first_address(up), discover=False) as client:
        async with streams(client, 1) as (task,):
            _, output = await tandem("requests", "--json")
            (listed,) = json.loads(output)["requests"]
            result = await task
        assert (listed["request_id"], listed["phase"]) == (result.request_id, "decode")
        assert listed["decode"].startswith("decode-") and listed["num_tokens"] > 4
    status, output = await tandem("drain", "router-1", "--wait")
    assert status == 0 and "router-1@" in output and "all its work was finished or moved" in output
    assert "router-1 was drained; starting it again" in up.until("router-1 was drained")
    up.until("router-1 is back")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("drain", "nobody"), 1, ", prefill-0, router-0, router-1"),
        (("scale", "decode=0"), 1, "every request ends on a worker that decodes"),
        (("scale", "decode=2", "decode=3"), 2, "given twice"),
        (("scale", "router=2"), 2, "prefill=N, decode=N or colocated=N"),
        (("scale", "decode=-1"), 2, "prefill=N, decode=N or colocated=N"),
        (("scale", "decode=9999"), 1, "decode must be from 0 to 256, not 9999"),
        (("drain", "decode-0", "--wait", "--timeout-s", "0"), 2, "--timeout-s must be positive"),
    ],
)
async def test_an_impossible_target_is_refused_in_one_line_with_the_possible_ones(
    tandem: Command, words: tuple[str, ...], status: int, said: str
) -> None:
    found, output = await tandem(*words)
    assert (found, len(output.splitlines())) == (status, 1)
    assert said in output
