"""A cluster on this machine, for notebooks, scripts and tests:

    with LocalCluster(model="/models/x", prefill=1, decode=2) as cluster, cluster.client() as client:
        print(client.generate("def fibonacci(n):", max_tokens=64).result().text)

It runs `tandem up`, which must be installed in the environment of this Python.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from threading import Thread
from types import TracebackType
from typing import IO, Self

from tandem.client import AsyncClient, Client
from tandem.errors import Unavailable

_READY = "ready "
_LAST_LINES = 5


class LocalCluster:
    """A running cluster. It is ready when the constructor returns; `close` or the end of its `with` block stops it.

    `grpc` and `http` are the first router's addresses, host:port and a URL.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        colocated: int | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        """`model`: a local folder or a hub name; default: the demo model. `prefill`, `decode`, `colocated`: the sizes
        of the pools, as of `tandem up`. `flags`: further flags of that command, such as "--dtype=float32".
        `environment`: of the processes; default: this one's. Raises Unavailable, with the last lines of the cluster's
        log, if the cluster is not ready after `start_timeout_s` seconds."""
        sizes = {"model": model, "prefill": prefill, "decode": decode, "colocated": colocated}
        given = [f"--{name}={value}" for name, value in sizes.items() if value is not None]
        given.append(f"--start-timeout-s={start_timeout_s:g}")
        self._log = tempfile.TemporaryFile(mode="w+", prefix="tandem-")  # noqa: SIM115 -- closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem_serving", "up", "--port=0", "--grpc-port=0", *given, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            ready = self._ready_line(start_timeout_s)
        except BaseException:
            self.close()
            raise
        fields = dict(word.partition("=")[::2] for word in ready.removeprefix(_READY).split())
        self.grpc, self.http = fields["grpc"], fields["http"]

    def client(self) -> Client:
        return Client(self.grpc)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.grpc)

    def close(self) -> None:
        """Let running requests finish, stop every process, and return when none is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._output.close()
        self._log.close()

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _ready_line(self, timeout_s: float) -> str:
        lines: list[str] = []
        reader = Thread(target=lambda: lines.append(self._output.readline()), daemon=True)
        reader.start()
        reader.join(timeout_s)
        if lines and lines[0].startswith(_READY):
            return lines[0]
        ended = "the cluster ended before it was ready" if lines else f"the cluster is not ready after {timeout_s:g} s"
        self._log.seek(0)
        last_lines = "".join(self._log.readlines()[-_LAST_LINES:]).strip()
        raise Unavailable(f"{ended}: {last_lines}", reason="unavailable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()
