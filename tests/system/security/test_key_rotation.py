"""`tandem keys rotate` on a cluster that serves: no request is lost, and no answer is different."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from cli.__main__ import main
from cluster.auth.key_file import read_key_file
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import open_member_channel
from cluster.auth.sessions import OpeningSession, Refusal
from cluster.errors import MemberRefused
from cluster.serving.rpc_errors import REASON
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.polling import until
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

_NUM_STREAMS = 4
_ANSWERS_PER_STEP = 3 * _NUM_STREAMS
_DEADLINE_S = 120.0
_DROPPED = "the secret behind this stream was dropped"
_FLAGS = (
    *("--dtype", "float32", "--num-blocks", "512", "--kv-transports", "tcp,shm"),
    *("--kv-verify", "keyed", "--registration-ttl-s", "3"),
)


class Streams:
    """Requests that are repeated without a pause until `stop`; each answer is compared with the undisturbed one."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.num_answers = 0
        self.reasons: Counter[str] = Counter()  # why attempts were made again

    async def start(self) -> None:
        prompts = [range(10 * number, 10 * number + 40) for number in range(1, _NUM_STREAMS + 1)]
        expected = [(await self._tokens(prompt, "undisturbed"))[0] for prompt in prompts]
        self._tasks = [
            asyncio.create_task(self._repeat(number, prompt, tokens))
            for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
        ]

    async def more(self, count: int) -> None:
        """Wait until `count` more answers have arrived. Raises the error of a stream that has failed."""
        wanted = self.num_answers + count
        while self.num_answers < wanted:
            for task in self._tasks:
                if task.done():
                    await task
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _repeat(self, number: int, prompt: range, expected: tuple[int, ...]) -> None:
        for turn in itertools.count():
            if self._is_over:
                return
            tokens, reasons = await self._tokens(prompt, f"{number} {turn}")  # never a cached prefix: KV is handed over
            assert tokens == expected, f"answer {turn} to prompt {number} is different"
            self.num_answers += 1
            self.reasons.update(reasons)

    async def _tokens(self, prompt: range, salt: str) -> tuple[tuple[int, ...], list[str]]:
        answer = await ask(self._cluster, question(prompt, max_tokens=8, ignore_eos=True, cache_salt=salt))
        return answer.token_ids, list(answer.ledger.reasons)


def _rereads(cluster: LocalCluster, name: str) -> int:
    return sum("the key file has changed" in line for line in cluster.members[name].output)


async def _all_have_read(cluster: LocalCluster, step: int) -> bool:
    await cluster.status()  # and the members' output is read meanwhile
    return all(_rereads(cluster, name) >= step for name in cluster.members)


async def _refusal(cluster: LocalCluster, secret: bytes) -> str:
    """Return why a worker refuses a session under this secret; empty if it does not."""
    async with grpc.aio.insecure_channel(cluster.members["decode0"].grpc_address) as channel:
        opening = OpeningSession(ClusterKeys(secret), "router-9@1")
        try:
            await worker_pb2_grpc.MemberAuthStub(channel).OpenSession(opening.request(), timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            is_named = (REASON, MemberRefused.reason) in tuple(error.trailing_metadata() or ())
            return str(error.details()).partition(":")[0] if is_named else "another error"
    return ""


@asynccontextmanager
async def _stream_of_a_thief(cluster: LocalCluster, secret: bytes) -> AsyncIterator["asyncio.Task[str]"]:
    """Open a router's stream to a worker under this secret, and yield the task that reads it to its end and returns why
    it ended."""
    member, opened = "router-9@1", asyncio.Event()
    async with open_member_channel(
        cluster.members["decode0"].grpc_address, keys=ClusterKeys(secret), caller=member
    ) as channel:
        call = worker_pb2_grpc.DecodeWorkerStub(channel).Connect()
        await call.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router=member, has_no_sequences=True)))

        async def read() -> str:
            try:
                async for _ in call:
                    opened.set()
            except grpc.aio.AioRpcError as error:
                return str(error.details())
            return "the worker ended it"

        reading = asyncio.create_task(read())
        opening = asyncio.create_task(opened.wait())
        await asyncio.wait((reading, opening), return_when=asyncio.FIRST_COMPLETED, timeout=_DEADLINE_S)
        assert not reading.done(), await reading
        yield reading


async def _says(cluster: LocalCluster, name: str, words: str) -> bool:
    await cluster.status()  # and the members' output is read meanwhile
    return any(words in line for line in cluster.members[name].output)


@pytest.mark.slow
async def test_a_rotation_of_the_secret_under_load_loses_no_request_and_changes_no_answer(
    redis_url: str, tmp_path: Path
) -> None:
    cluster = LocalCluster(redis_url, tmp_path, flags=_FLAGS)
    try:
        await cluster.start(prefill=1, decode=1, router_flags=("--registration-ttl-s", "3"))
        old = read_key_file(cluster.key_file).secrets.current
        undisturbed = (await ask(cluster, question(range(200, 240), max_tokens=300, ignore_eos=True))).token_ids
        streams = Streams(cluster)
        await streams.start()
        async with (
            _stream_of_a_thief(cluster, old) as stolen,
            asked(cluster, question(range(200, 240), max_tokens=300, ignore_eos=True, cache_salt="long")) as long,
        ):
            await long.until(2)
            for step in (1, 2, 3):
                await streams.more(_ANSWERS_PER_STEP)
                command = ["keys", "rotate", "--cluster-key-file", str(cluster.key_file)]
                assert await asyncio.to_thread(main, command) == 0
                what = f"every member has read the file of step {step}"
                await until(partial(_all_have_read, cluster, step), bool, what=what, deadline_s=_DEADLINE_S)
                assert await _refusal(cluster, old) == (Refusal.UNKNOWN_KEY if step == 3 else "")
            await streams.more(_ANSWERS_PER_STEP)
            assert (await long.end()).token_ids == undisturbed
            async with asyncio.timeout(_DEADLINE_S):
                assert _DROPPED in await stolen
            await until(partial(_says, cluster, "router0", _DROPPED), bool, what="the router's own stream ends too")
            await streams.more(_ANSWERS_PER_STEP)
        await streams.stop()
        assert await _refusal(cluster, read_key_file(cluster.key_file).secrets.current) == ""
        newcomer = await cluster.start_member("decode1", "decode_worker", cluster.joining_flags()[-len(_FLAGS) :])
        await cluster.until_connected()
        assert newcomer.process.returncode is None
        print(f"{streams.num_answers} answers, attempts made again: {dict(streams.reasons)}")
        await cluster.until_free()
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]
