"""Checks the grammars of requests: compiled once per grammar, in a process of its own, within bounds.

Owns the process, which is started with the first grammar, the bounded cache of results, and the turns of those whose
grammars wait (compile_turns.py). No client's grammar is compiled in the router itself.
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
from typing import NamedTuple, Protocol

from cluster.errors import InvalidGrammar, Unavailable, UnsupportedField
from cluster.grammar.engine import grammar_engine_id
from cluster.grammar.tokenizer_files import locate
from cluster.messages import MAX_GRAMMAR_BYTES, Grammar
from router.grammars.compile_turns import CompileTurns, source_of
from router.grammars.process import CPU_S
from router.requests import GenerateRequest

_LOG = logging.getLogger("tandem.router.grammars")
_AT_ONCE = 2  # grammars that are compiled at the same time
_MAX_REMEMBERED = 4096
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 10.0  # far beyond the process's own bounds
_LINE_BYTES = 1 << 16  # of an answer


class GrammarCheck(Protocol):
    """Checks grammars for the pipeline."""

    @property
    def engine_id(self) -> str:
        """Return the id of the engine and tokens that workers must share with this router; empty: this router accepts
        no grammars.
        """
        ...

    async def check(self, grammar: Grammar, source: str) -> None:
        """Check a grammar, whose compile time `source` has to pay (`source_of`). Raises InvalidGrammar,
        UnsupportedField, LimitReached, Overloaded, Unavailable.
        """
        ...


async def check_grammar_of(request: GenerateRequest, grammar: Grammar, grammars: GrammarCheck) -> None:
    """Check the grammar of a new request; that of a resumed one was checked before it was accepted. Raises
    InvalidGrammar with the client's field, and the other errors of GrammarCheck."""
    try:
        await grammars.check(grammar, source_of(request.caller, request.address))
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
        self._checking: dict[tuple[str, bytes], asyncio.Task[None]] = {}  # by source and digest
        self._turns = CompileTurns[asyncio.Future[None]](_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: _Compiling | None = None

    async def check(self, grammar: Grammar, source: str) -> None:
        if not self.engine_id:
            raise UnsupportedField(
                "this router applies no grammars: llguidance is not installed here, or the model has no tokenizer or no"
                " end-of-sequence token"
            )
        if not grammar.text:
            raise InvalidGrammar("it is empty")
        num_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"it has {num_bytes} bytes; the maximum is {MAX_GRAMMAR_BYTES}")
        digest = grammar.digest
        if digest not in self._checked:
            await self._compiled(digest, grammar, source)
        self._checked.move_to_end(digest)
        if refusal := self._checked[digest]:
            raise InvalidGrammar(refusal)

    async def close(self) -> None:
        """End the process."""
        for task in self._checking.values():
            task.cancel()
        if self._process is not None:
            await self._process.end()

    async def _compiled(self, digest: bytes, grammar: Grammar, source: str) -> None:
        """Compile a grammar, once for all concurrent callers of one source: none is refused for another source."""
        if (source, digest) not in self._checking:
            turn = asyncio.get_running_loop().create_future()
            self._turns.ask(source, turn, _now_s())
            task = asyncio.create_task(self._compile(digest, grammar, source, turn), name="compile a grammar")
            self._checking[source, digest] = task
            task.add_done_callback(partial(self._on_compiled, source, digest))
            self._begin_turns()
        await asyncio.shield(self._checking[source, digest])

    def _on_compiled(self, source: str, digest: bytes, task: "asyncio.Task[None]") -> None:
        del self._checking[source, digest]
        if not task.cancelled():
            task.exception()  # retrieved: those who wait receive it, if any do

    async def _compile(self, digest: bytes, grammar: Grammar, source: str, turn: "asyncio.Future[None]") -> None:
        await turn
        cpu_s = 0.0
        try:
            if digest in self._checked:  # compiled for another source in the meantime
                return
            process = await self._running()
            cpu_s = CPU_S  # if there is no answer
            refusal, is_final, cpu_s = await process.compile(grammar)
        finally:
            self._end_turn(source, cpu_s)
        if not is_final:  # another try may fit the bounds
            raise InvalidGrammar(refusal)
        self._checked[digest] = refusal
        while len(self._checked) > _MAX_REMEMBERED:
            self._checked.popitem(last=False)

    def _begin_turns(self) -> None:
        while (turn := self._turns.start(_now_s())) is not None:
            turn.set_result(None)

    def _end_turn(self, source: str, cpu_s: float) -> None:
        now_s = _now_s()
        for turn in self._turns.end(source, cpu_s, now_s):
            turn.set_exception(self._turns.refusal(source, now_s))
        self._begin_turns()

    async def _running(self) -> "_Compiling":
        async with self._starting:
            if self._process is None or self._process.has_ended:
                self._process = await _Compiling.start(self._arguments)
            return self._process


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class _Compiled(NamedTuple):
    """The answer to one grammar."""

    refusal: str  # why it cannot be applied; empty: it can
    is_final: bool  # every later check would have the same answer
    cpu_s: float


class _Compiling:
    """The running process and the requests that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[_Compiled]] = {}
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
        _LOG.info("the process that compiles grammars has started", extra={"pid": process.pid})
        return _Compiling(process)

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def compile(self, grammar: Grammar) -> _Compiled:
        """Compile a grammar. Raises Unavailable."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        answer: asyncio.Future[_Compiled] = asyncio.get_running_loop().create_future()
        request = {"number": number, "kind": grammar.kind, "text": grammar.text}
        self._waiting[number] = answer
        try:
            if self.has_ended:
                raise Unavailable("the process that compiles grammars has ended; try again")
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._process.stdin.drain()
                return await answer
        except (TimeoutError, ConnectionError) as error:
            await self.end()
            raise Unavailable("the process that compiles grammars does not answer; try again") from error
        finally:
            del self._waiting[number]

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
                    waiting.set_result(_Compiled(answer["error"], answer["is_final"], answer["cpu_s"]))
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unavailable("the process that compiles grammars has ended; try again"))
