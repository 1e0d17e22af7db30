"""The process in which a router compiles the grammars of clients: `python -m router.grammars.process FOLDER`.

It loads the model's tokens once and forks a child for each grammar. A child has its own bounds of memory, CPU time and
wall time and is killed at them, so a hostile grammar costs one child. Requests come on stdin and answers go to stdout,
one JSON object per line; at the end of stdin the process kills its children and ends.
"""

import json
import os
import resource
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import InvalidGrammar
from cluster.grammar.engine import GrammarEngine
from cluster.messages import Grammar, GrammarKind
from cluster.process import die_with_parent

CPU_S = 0.4
WALL_S = 5.0  # a child may wait for a processor: a busy machine refuses no grammar that CPU_S allows
MEMORY_BYTES = 256 << 20  # beyond what the process has when it forks
_READ_BYTES = 1 << 18


@dataclass(slots=True)
class _Child:
    number: int  # of the request
    pid: int
    deadline_s: float
    fork_cpu_s: float  # what the fork cost the process
    answer: bytes = b""


@dataclass(slots=True)
class CompileProcess:
    engine: GrammarEngine
    memory_bytes: int = MEMORY_BYTES
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _children: dict[int, _Child] = field(default_factory=dict)  # by the file descriptor of its answer

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        self._selector.register(0, selectors.EVENT_READ)
        _write({"ready": True})
        unread = b""
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fd:
                    self._read_answer(key.fd)
                    continue
                data = os.read(0, _READ_BYTES)
                if not data:
                    return self._kill_all()
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._fork(json.loads(line))
            self._end_overdue()

    def _fork(self, request: dict[str, object]) -> None:
        receiving, sending = os.pipe()
        began_s = time.process_time()
        pid = os.fork()
        if pid == 0:
            _run_child(self.engine, request, sending, self.memory_bytes)
        os.close(sending)
        deadline_s, fork_cpu_s = time.monotonic() + WALL_S, time.process_time() - began_s
        self._children[receiving] = _Child(int(str(request["number"])), pid, deadline_s, fork_cpu_s)
        self._selector.register(receiving, selectors.EVENT_READ)

    def _wait_s(self) -> float | None:
        deadlines = [child.deadline_s for child in self._children.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _read_answer(self, receiving: int) -> None:
        data = os.read(receiving, _READ_BYTES)
        self._children[receiving].answer += data
        if not data:
            self._end(receiving)

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for receiving in [fd for fd, child in self._children.items() if child.deadline_s <= now_s]:
            os.kill(self._children[receiving].pid, signal.SIGKILL)
            self._end(receiving)

    def _end(self, receiving: int) -> None:
        """Write the answer of a child that has ended or was killed."""
        child = self._children.pop(receiving)
        self._selector.unregister(receiving)
        os.close(receiving)
        _, status, used = os.wait4(child.pid, 0)
        cpu_s = child.fork_cpu_s + used.ru_utime + used.ru_stime
        answer: dict[str, object] = {"number": child.number, "is_final": status == 0, "cpu_s": cpu_s}
        if status == 0:
            answer["error"] = child.answer.decode("utf-8", "replace")
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            answer["error"] = f"compiling it takes longer than {CPU_S:g} s of CPU time: make it smaller"
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            answer["error"] = f"compiling it takes longer than {WALL_S:g} s: try again, or make it smaller"
        else:
            answer["error"] = f"compiling it needs more than {self.memory_bytes >> 20} MiB, or fails: make it smaller"
        _write(answer)

    def _kill_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _run_child(engine: GrammarEngine, request: dict[str, object], sending: int, memory_bytes: int) -> None:
    """Compile the grammar within the bounds, write why it is refused, or nothing, and end this process."""
    status = 1
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # the library's own panics
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends the process
        grammar = Grammar(GrammarKind(str(request["kind"])), str(request["text"]))
        os.write(sending, refusal(engine, grammar).encode("utf-8", "replace"))
        status = 0
    finally:
        os._exit(status)


def refusal(engine: GrammarEngine, grammar: Grammar) -> str:
    """Return why the grammar cannot be applied; empty if it can."""
    try:
        matcher = engine.matcher(grammar)
    except InvalidGrammar as error:
        return error.message
    is_empty = not any(matcher.mask())
    return matcher.error or ("no text matches it" if is_empty else "")


def _write(answer: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its router ends it
    memory_bytes = int(sys.argv[2]) if len(sys.argv) > 2 else MEMORY_BYTES
    CompileProcess(GrammarEngine.load(Path(sys.argv[1])), memory_bytes).serve()
