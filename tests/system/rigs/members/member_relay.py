"""A program that stands for a member where its parent must start a program: the test forks the member instead.

    python tests/system/rigs/members/member_relay.py SOCKET MODULE ARGUMENT...

An actor of Ray starts its worker as a program, which would import torch again. This program sends module, arguments and
environment to the test's `fork_relay` at SOCKET, prints what the member prints, passes SIGTERM on, and ends with its
status. The member is killed when this program is.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


def main(path: str, module: str, *arguments: str) -> int:
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(path)
        signal.signal(signal.SIGTERM, lambda number, frame: test.sendall(b"terminate\n"))
        order = {"module": module, "arguments": arguments, "environment": dict(os.environ)}
        test.sendall(json.dumps(order).encode() + b"\n")
        with test.makefile("r") as answers:
            for answer in map(json.loads, answers):
                if isinstance(answer, int):
                    return answer if answer >= 0 else 128 - answer
                print(answer, end="", flush=True)
    return 1  # the test has ended


@asynccontextmanager
async def fork_relay(folder: Path) -> AsyncIterator[str]:
    """Serve the programs above; yield their SOCKET."""

    from tests.system.rigs.processes.fork_server import worker_forks  # the program is without the checkout's modules

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order = json.loads(await reader.readline())
        member = await worker_forks().spawn(order["module"], order["arguments"], order["environment"])

        async def pass_signals_on() -> None:
            while await reader.readline():
                member.send_signal(signal.SIGTERM)
            member.kill()

        signals = asyncio.create_task(pass_signals_on())
        async for line in member.stdout:
            writer.write(json.dumps(line.decode()).encode() + b"\n")
        writer.write(json.dumps(await member.wait()).encode() + b"\n")
        writer.close()
        await signals

    path = str(folder / "relay")
    server = await asyncio.start_unix_server(serve, path, limit=1 << 20)
    try:
        yield path
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
