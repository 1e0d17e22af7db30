"""The harness's end of `held_worker`: the held reads of each worker, by exporter, and the worker with a hanging
step.
"""

import asyncio
from collections import Counter
from pathlib import Path

_ANSWER_S = 5.0


class HeldWorker:
    """A connected worker. `reading`: how many of its reads are held, by exporter."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._answers: asyncio.Queue[str] = asyncio.Queue(64)
        self.reading: Counter[str] = Counter()
        self.num_held = 0  # ever
        self.hangs = asyncio.Event()

    async def ask(self, word: str) -> None:
        """Send `hold`, `step` or `go`, and wait for the answer. Raises TimeoutError if the worker is stopped or
        gone."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self.tell(word)
        async with asyncio.timeout(_ANSWER_S):
            while await self._answers.get() != word:
                pass

    def tell(self, word: str) -> None:
        """Send an order without waiting. A stopped worker receives it when it is woken."""
        if not self._writer.is_closing():
            self._writer.write(f"{word}\n".encode())

    async def hang(self) -> None:
        """Make the worker's next step hang before it begins. Raises TimeoutError if there is no step."""
        self.hangs.clear()
        self.tell("hang")
        async with asyncio.timeout(_ANSWER_S):
            await self.hangs.wait()

    async def listen(self, reader: asyncio.StreamReader) -> None:
        while line := (await reader.readline()).decode().split():
            word, about = line
            if word == "did":
                if not self._answers.full():  # no caller waits for the answer to `tell`
                    self._answers.put_nowait(about)
            elif word == "hung":
                self.hangs.set()
            else:
                self.reading[about] += 1 if word == "hold" else -1
                self.num_held += word == "hold"


class Holds:
    """Listens at `path`. A restarted worker replaces its predecessor."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "holds"
        self.workers: dict[str, HeldWorker] = {}
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self.path))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for conversation in self._conversations:
            conversation.cancel()

    def let_go(self) -> None:
        """Release every held read. Stopped workers release theirs when they are woken."""
        for worker in self.workers.values():
            worker.tell("go")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        name = (await reader.readline()).decode().split()[1]
        worker = self.workers[name] = HeldWorker(writer)
        try:
            await worker.listen(reader)
        except ConnectionError:
            pass
        finally:
            writer.close()
