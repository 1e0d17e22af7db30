"""The client's side of vllm_server.py: one connection per request.

The client sends one line {"token_ids", "max_tokens"}; the server answers each of the engine's outputs by a line with
the number of its tokens, and closes the connection at the end. A line that is no number is an error's name.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from cli.load import Arrival, RequestFailed


@dataclass(frozen=True, slots=True)
class Sender:
    """`prompts` are the token ids by the request's number."""

    address: str  # host:port
    prompts: Sequence[Sequence[int]]
    timeout_s: float  # of one request

    async def send(self, number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        """Send a request and yield the number of tokens of each line of the answer. Raises RequestFailed."""
        request = {"token_ids": list(self.prompts[number]), "max_tokens": arrival.output_tokens}
        host, _, port = self.address.rpartition(":")
        missing = arrival.output_tokens
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write((json.dumps(request) + "\n").encode())
                    async for line in reader:
                        count = _count(line)
                        missing -= count
                        yield count
                finally:
                    writer.close()
        except TimeoutError as error:
            raise RequestFailed("deadline_exceeded") from error
        except OSError as error:
            raise RequestFailed("unavailable") from error
        if missing:
            raise RequestFailed("too_few_tokens")


def _count(line: bytes) -> int:
    text = line.decode().strip()
    if not text.isdigit():
        raise RequestFailed(text)
    return int(text)
