"""The load generator of `make bench-router`: clients that each send one streamed request after another.

    python -m benchmarks.router.load

It reads jobs as lines of JSON: it opens the connections and prints `connected`, starts at the line `go`, and prints the
result. It is a process of its own that speaks HTTP in raw asyncio protocols, so that its cost is small and apart.
"""

import asyncio
import json
import re
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.router.worker import StepTimes
from tandem.v1 import inference_pb2

_END = b"0\r\n\r\n"  # of a body in chunks
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_TOKEN_IDS = re.compile(rb'"token_ids":\[(\d[\d,]*)\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`path`: http, https or grpc. `prompt`: a text or token ids. Each of `num_clients` sends `num_requests` requests,
    one after another, for `max_tokens` tokens each."""

    path: str
    address: str
    prompt: str | list[int]
    num_clients: int
    num_requests: int
    max_tokens: int
    steps_file: str  # of the workers, see StepTimes
    measures_delay: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of an HTTP request
    ca_file: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    num_requests: int
    num_tokens: int
    wall_s: float
    cpu_s: float  # of this process
    delays_s: list[float]  # from the step that sent a token to its arrival, where they were asked for


class Delays:
    """The times of tokens from the step that sent them to their client."""

    def __init__(self, steps: StepTimes, *, wanted: bool) -> None:
        self._steps = steps
        self.wanted = wanted
        self.seconds: list[float] = []

    def record(self, token_ids: Sequence[int]) -> None:
        now_s = time.monotonic()
        self.seconds.extend(now_s - self._steps.of_token(token_id) for token_id in token_ids)


class HttpClient(asyncio.Protocol):
    """One connection that sends the same request again and again."""

    def __init__(self, job: Job, delays: Delays) -> None:
        self._job, self._delays = job, delays
        self._request = _http_request(job)
        self._received: list[bytes] = []
        self._left = job.num_requests
        self._has_first = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def begin(self) -> None:
        assert self._transport is not None
        self._received.clear()
        self._has_first = False
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        if self._delays.wanted:
            self._record(data)
        if data.endswith(_END):
            self._check(b"".join(self._received))
            self._left -= 1
            if self._left:
                self.begin()
            elif not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the router closed the connection"))

    def _record(self, data: bytes) -> None:
        found = [int(token_id) for ids in _TOKEN_IDS.findall(data) for token_id in ids.split(b",")]
        if not self._has_first and found:  # the first token comes from the prefill
            self._has_first, found = True, found[1:]
        self._delays.record(found)

    def _check(self, answer: bytes) -> None:
        usage = _USAGE.search(answer)
        if usage is None or int(usage[1]) != self._job.max_tokens:
            raise ValueError(f"an answer without {self._job.max_tokens} tokens: {answer[:500]!r} ... {answer[-300:]!r}")


def _http_request(job: Job) -> bytes:
    body = json.dumps(
        {
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": job.measures_delay,
        }
        | job.extra
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {job.address}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


class GrpcClient:
    """One channel that sends the same request again and again."""

    def __init__(self, job: Job, delays: Delays) -> None:
        self._job, self._delays = job, delays
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(job.address, options=options)
        self._generate: Any = self._channel.unary_stream("/tandem.v1.Inference/Generate")  # bytes in, bytes out
        prompt: dict[str, Any] = {"text": job.prompt}
        if not isinstance(job.prompt, str):
            prompt = {"token_ids": inference_pb2.TokenIds(ids=job.prompt)}
        stop = inference_pb2.StopConditions(max_tokens=job.max_tokens, ignore_eos=True)
        sampling = inference_pb2.SamplingParams(temperature=0.0)
        self._request = inference_pb2.GenerateRequest(stop=stop, sampling=sampling, **prompt).SerializeToString()

    async def connect(self) -> None:
        await self._channel.channel_ready()

    async def run(self) -> None:
        for _ in range(self._job.num_requests):
            message, has_first = b"", False
            async for message in self._generate(self._request):
                if self._delays.wanted:
                    has_first = self._record(message, has_first)
            num_tokens = inference_pb2.GenerateResponse.FromString(message).summary.usage.completion_tokens
            if num_tokens != self._job.max_tokens:
                raise ValueError(f"an answer of {num_tokens} tokens instead of {self._job.max_tokens}")
        await self._channel.close()

    def _record(self, message: bytes, has_first: bool) -> bool:
        deltas = inference_pb2.GenerateResponse.FromString(message).deltas
        found = [token_id for delta in deltas for token_id in delta.token_ids]
        self._delays.record(found if has_first else found[1:])
        return has_first or bool(found)


async def _run(job: Job, delays: Delays) -> tuple[float, float]:
    """Return the wall time and the CPU time of this process for the requests."""
    loop = asyncio.get_running_loop()
    if job.path == "grpc":
        callers = [GrpcClient(job, delays) for _ in range(job.num_clients)]
        for caller in callers:
            await caller.connect()
        await _go(loop)
        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.gather(*(caller.run() for caller in callers))
        return time.monotonic() - began_s, time.process_time() - cpu_s
    host, _, port = job.address.rpartition(":")
    context = ssl.create_default_context(cafile=job.ca_file) if job.path == "https" else None
    clients = []
    for _ in range(job.num_clients):
        transport, client = await loop.create_connection(lambda: HttpClient(job, delays), host, int(port), ssl=context)
        clients.append((transport, client))
    await _go(loop)
    began_s, cpu_s = time.monotonic(), time.process_time()
    for _, client in clients:
        client.begin()
    await asyncio.gather(*(client.done for _, client in clients))
    took_s = time.monotonic() - began_s, time.process_time() - cpu_s
    for transport, _ in clients:
        transport.abort()
    return took_s


async def _go(loop: asyncio.AbstractEventLoop) -> None:
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.readline)


def main() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        delays = Delays(StepTimes(Path(job.steps_file)), wanted=job.measures_delay)
        wall_s, cpu_s = asyncio.run(_run(job, delays))
        num_requests = job.num_clients * job.num_requests
        result = Result(num_requests, num_requests * job.max_tokens, wall_s, cpu_s, delays.seconds)
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
