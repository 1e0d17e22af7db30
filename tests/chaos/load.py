"""Clients that send requests continuously over all three APIs and both routers.

Owns requests in flight, the connections, and the answers since the last collection. Judges by the right answers, which
it records itself while no fault is active.
"""

import asyncio
import itertools
import secrets
from collections.abc import Iterable, Sequence
from random import Random

import grpc
import openai

from tandem.channel import open_async_channel
from tandem.client import AsyncClient
from tandem.v1 import inference_pb2_grpc
from tests.chaos.asking import TIMEOUT_S, Asked, Doors, Outcome, Way, ask
from tests.chaos.questions import Question, Questions, RightAnswer

_WAYS = (Way.LIBRARY, Way.LIBRARY, Way.GRPC, Way.HTTP)
_IDLE_S = 90.0


class Load:
    def __init__(self, questions: Questions, *, num_clients: int) -> None:
        self.questions = questions
        self.right: dict[int, RightAnswer] = {}
        self.asked: dict[str, Asked] = {}  # on their way
        self.ended: list[Asked] = []
        self.open_routers: tuple[str, ...] = ()  # which clients that know one router only may go to
        self._num_clients = num_clients
        self._doors: dict[str, Doors] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._going = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._clients: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    async def open(self, routers: dict[str, tuple[str, str]]) -> None:
        """Connect to the routers. `routers`: their gRPC and HTTP addresses. Nothing is in progress yet."""
        await self._close_doors()
        names = list(routers)
        for name in names:
            grpc_address, http_address = routers[name]
            others = [routers[other][0] for other in names if other != name]
            channel = open_async_channel(grpc_address)
            self._channels.append(channel)
            http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
            self._doors[name] = Doors(
                name=name,
                library=AsyncClient([grpc_address, *others], timeout_s=TIMEOUT_S),
                grpc=inference_pb2_grpc.InferenceStub(channel),
                http=openai.AsyncOpenAI(
                    base_url=f"http://{http_address}/v1",
                    api_key="-",
                    max_retries=0,
                    timeout=TIMEOUT_S,
                    http_client=http,
                ),
            )
        self.open_routers = tuple(names)

    async def learn(self) -> None:
        """Ask each question alone, and store the right answers."""
        router = self.open_routers[0]
        for question in self.questions.all:
            asked = await self.ask(question, Way.LIBRARY, router)
            if asked.outcome is not Outcome.OK:
                raise RuntimeError(f"without any fault, question {question.number} is {asked.outcome}: {asked.told}")
            self.right[question.number] = asked.answer()
        self.ended.clear()

    def go_on(self, seed: int) -> None:
        self._going.set()
        if not self._clients:
            self._clients = [
                asyncio.create_task(self._client(Random(f"{seed}.{number}"))) for number in range(self._num_clients)
            ]

    async def rest(self) -> list[Asked]:
        """Wait until no question is in progress, and return those that have ended since the last rest."""
        self._going.clear()
        async with asyncio.timeout(_IDLE_S):
            await self._idle.wait()
        ended, self.ended = self.ended, []
        return ended

    async def stop(self) -> None:
        for task in (*self._clients, *self._asking):
            task.cancel()
        await asyncio.gather(*self._clients, *self._asking, return_exceptions=True)
        self._clients.clear()
        await self._close_doors()

    def start(self, question: Question, way: Way, router: str, salt: str = "") -> Asked:
        """Ask without waiting for the answer."""
        asked = Asked(
            request_id=f"chaos-{next(self._numbers)}-{secrets.token_hex(4)}",
            question=question,
            way=way,
            router=router,
            salt=salt,
            began_s=asyncio.get_running_loop().time(),
        )
        self.asked[asked.request_id] = asked
        self._idle.clear()
        task = asyncio.create_task(self._ask(asked), name=asked.request_id)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return asked

    async def ask(self, question: Question, way: Way, router: str, salt: str = "") -> Asked:
        asked = self.start(question, way, router, salt)
        await self.until_ended([asked])
        return asked

    def hit(self, request_ids: Iterable[str], now_s: float) -> list[Asked]:
        """Record that the work of these requests was hit at that moment, and return the requests that are in
        progress."""
        found = [self.asked[request_id] for request_id in request_ids if request_id in self.asked]
        for asked in found:
            asked.hit(now_s)
        return found

    async def until_ended(self, asked: Sequence[Asked]) -> None:
        tasks = {task.get_name(): task for task in self._asking}
        waiting = [tasks[one.request_id] for one in asked if one.request_id in tasks]
        if waiting:
            await asyncio.wait(waiting, timeout=TIMEOUT_S)

    async def _client(self, dice: Random) -> None:
        while True:
            await self._going.wait()
            way = dice.choice(_WAYS)
            question = dice.choice(self.questions.mixed)
            routers = self.open_routers
            await self.ask(question, way, dice.choice(routers))

    async def _ask(self, asked: Asked) -> None:
        try:
            await ask(asked, self._doors[asked.router], self.right.get(asked.question.number))
        finally:
            asked.note_wait(asyncio.get_running_loop().time())
            del self.asked[asked.request_id]
            self.ended.append(asked)
            if not self.asked:
                self._idle.set()

    async def _close_doors(self) -> None:
        for doors in self._doors.values():
            await doors.library.close()
            await doors.http.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))
        self._doors.clear()
        self._channels.clear()
