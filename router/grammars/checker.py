"""Checks the grammars of requests: compiled once per grammar, in a process of its own, within bounds.

Owns the process, which is started with the first grammar, and the bounded cache of results. No client's grammar is
compiled in the router itself.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Protocol

from cluster.errors import InvalidGrammar, Overloaded, Unavailable, UnsupportedField
from cluster.grammar.engine import grammar_engine_id
from cluster.grammar.tokenizer_files import locate
from cluster.messages import MAX_GRAMMAR_BYTES, Grammar
from router.requests import GenerateRequest

_LOG = logging.getLogger("tandem.router.grammars")
_AT_ONCE = 2  # grammars that are compiled at the same time
_MAX_WAITING = 256
_MAX_REMEMBERED = 4096
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 10.0  # far beyond the process's own bounds
_RETRY_AFTER_S = 1.0
_LINE_BYTES = 1 << 16  # of an answer


class GrammarCheck(Protocol):
    """Checks grammars for the pipeline."""

    @property
    def engine_id(self) -> str:
        """Return the id of the engine and tokens that workers must share with this router; empty: this router accepts
        no grammars.
        """
        ...

    async def check(self, grammar: Grammar) -> None:
        """Check a grammar. Raises InvalidGrammar, UnsupportedField, Overloaded, Unavailable."""
        ...


async def check_grammar_of(request: GenerateRequest, grammars: GrammarCheck) -> None:
    """Check the grammar of a new request, if it has one; that of a resumed one was checked before it was accepted.
    Raises InvalidGrammar with the client's field, and the other errors of GrammarCheck."""
    if request.grammar is None:
        return
    try:
        await grammars.check(request.grammar)
    except InvalidGrammar as error:
        field = request.grammar_field
        raise InvalidGrammar(f"{field}: {error.message}", param=field) from error


def grammar_checker(model: str, revision: str = "") -> "GrammarChecker":
    """Return the checker of a router that serves this model. Raises ConfigError."""
    folder = locate(model, revision)
    return GrammarChecker(folder, grammar_engine_id(folder))


class GrammarChecker:
    """Implements GrammarCheck with a compile process (process.py)."""

    def __init__(self, folder: Path, engine_id: str, *, memory_bytes: int | None = None) -> None:
        """`folder`: of the model's small files. `memory_bytes` None: the process's default."""
        self.engine_id = engine_id
        self._arguments = [str(folder), *([str(memory_bytes)] if memory_bytes is not None else [])]
        self._checked: OrderedDict[bytes, str] = OrderedDict()  # why it is refused, by digest; empty: it is not
        self._checking: dict[bytes, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: _Compiling | None = None

    async def check(self, grammar: Grammar) -> None:
        if not self.engine_id:
            raise UnsupportedField(
                "this router applies no grammars: llguidance is not installed here, or the model has no tokenizer or no"
                " end-of-sequence token"
            )
        num_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"it has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are read")
        digest = grammar.digest
        if digest not in self._checked:
            await self._compiled(digest, grammar)
        self._checked.move_to_end(digest)
        if refusal := self._checked[digest]:
            raise InvalidGrammar(refusal)

    async def close(self) -> None:
        """End the process."""
        for task in self._checking.values():
            task.cancel()
        if self._process is not None:
            await self._process.end()

    async def _compiled(self, digest: bytes, grammar: Grammar) -> None:
        """Compile a grammar, once for all concurrent callers."""
        if digest not in self._checking:
            if len(self._checking) >= _MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled; try again", retry_after_s=_RETRY_AFTER_S)
            task = asyncio.create_task(self._compile(digest, grammar), name="compile a grammar")
            self._checking[digest] = task
            task.add_done_callback(partial(self._on_compiled, digest))
        await asyncio.shield(self._checking[digest])

    def _on_compiled(self, digest: bytes, task: "asyncio.Task[None]") -> None:
        del self._checking[digest]
        if not task.cancelled():
            task.exception()  # retrieved: those who wait receive it, if any do

    async def _compile(self, digest: bytes, grammar: Grammar) -> None:
        async with self._slots:
            refusal, is_final = await (await self._running()).compile(grammar)
        if not is_final:  # another try may fit the bounds
            raise InvalidGrammar(refusal)
        self._checked[digest] = refusal
        while len(self._checked) > _MAX_REMEMBERED:
            self._checked.popitem(last=False)

    async def _running(self) -> "_Compiling":
        async with self._starting:
            if self._process is None or self._process.has_ended:
                self._process = await _Compiling.start(self._arguments)
            return self._process


class _Compiling:
    """The running process and the requests that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[str, bool]]] = {}
        self._reader = asyncio.create_task(self._read(), name="read from the compile process")

    @staticmethod
    async def start(arguments: list[str]) -> "_Compiling":
        """Start a process and wait until it has loaded the tokens. Raises Unavailable."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.grammars.process", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await process.stdout.readline()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if not ready:
            raise Unavailable("the process that compiles grammars does not start; this router's log says why")
        _LOG.info("compiles grammars", extra={"pid": process.pid})
        return _Compiling(process)

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def compile(self, grammar: Grammar) -> tuple[str, bool]:
        """Return the reason of a refusal, empty if there is none, and whether every later check would be refused too.
        Raises Unavailable.
        """
        assert self._process.stdin is not None
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        request = {"number": number, "kind": grammar.kind, "text": grammar.text}
        self._waiting[number] = answer
        try:
            if self.has_ended:
                raise Unavailable("the process that compiles grammars has ended; try again")
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._process.stdin.drain()
                refusal, is_final = await answer
        except (TimeoutError, ConnectionError) as error:
            await self.end()
            raise Unavailable("the process that compiles grammars does not answer; try again") from error
        finally:
            del self._waiting[number]
        return refusal, is_final

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                if (waiting := self._waiting.get(answer["number"])) is not None and not waiting.done():
                    waiting.set_result((answer["error"], answer["is_final"]))
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unavailable("the process that compiles grammars has ended; try again"))
