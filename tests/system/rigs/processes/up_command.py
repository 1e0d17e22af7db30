"""Runs `tandem up` in a separate process for tests."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from cluster.process import die_with_parent

DEADLINE_S = 120.0
ROOT = Path(__file__).parents[4]


class Up:
    """A running `tandem up` whose output is read to the last line."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: Sequence[str] = (sys.executable, "-m", "cli"),
        directory: Path = ROOT,
    ) -> None:
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        self.environment["XDG_RUNTIME_DIR"] = str(folder)
        ports = () if "--port" in arguments else ("--port", "0", "--grpc-port", "0")
        self.process = subprocess.Popen(
            [*program, "up", *ports, "--cluster-key-file", str(folder / "key"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=self.environment,
            preexec_fn=die_with_parent,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(stream,)) for stream in self._streams()]
        for reader in self._readers:
            reader.start()

    def until(self, part: str) -> str:
        """Return the first line that contains the text, present or future."""

        def found() -> str | None:
            return next((line for line in self.lines if part in line), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not self._is_heard(), DEADLINE_S)
            line = found()
        assert line is not None, f"no line with {part!r} in:\n" + "".join(self.lines)
        return line

    def children(self) -> dict[str, int]:
        """Return process ids by module or program name."""
        return {name: pid for name, _, pid in self._children()}

    def pids(self) -> list[int]:
        """Return the process ids of all children."""
        return [pid for _, _, pid in self._children()]

    def members(self) -> dict[str, int]:
        """Return process ids by the name under which each was started."""
        return {member: pid for _, member, pid in self._children() if member}

    def end(self) -> int:
        """End the command and all its processes in any state."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join(DEADLINE_S)
            for stream in self._streams():
                stream.close()

    def _children(self) -> Iterator[tuple[str, str, int]]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in path.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            named = next((word for word in words if word.startswith("--member-id=")), "")
            yield "redis-server" if "redis-server" in words[0] else words[2], named.partition("=")[2], int(pid)

    def _is_heard(self) -> bool:
        return any(reader.is_alive() for reader in self._readers)

    def _streams(self) -> list[IO[str]]:
        assert self.process.stdout is not None and self.process.stderr is not None
        return [self.process.stdout, self.process.stderr]

    def _read(self, stream: Iterable[str]) -> None:
        for line in stream:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
