"""Both ends of the hand-offs that `benchmarks.overlap` times: a prefill worker's process, and an importer in this one.

The model has the shape of SmolLM2-135M and equal random weights on both sides. The importer is the decode worker's,
over its own pool; this process computes nothing while prefill is timed.
"""

import asyncio
import json
import secrets
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overlap.paced_link import PacedLink
from cluster.auth.key_file import load_keys
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import open_member_channel
from cluster.clock import MonotonicClock
from cluster.errors import HandOffReason
from cluster.messages import Epoch, MemberId, PrefillJob, Sampling, TokenStops
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.protocol.hashing import hash_prompt
from cluster.registry.redis_server import RedisServer
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from cluster.settings.worker_settings import TransferSettings
from engine.build import Engine, build_engine
from engine.kv.block_pool import BlockPool
from kvtransfer.counters import TransferCounters
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks, Importer
from kvtransfer.memory import Reservation
from kvtransfer.transports.base import Channel, ImporterTransport, TransportSetup
from kvtransfer.transports.proven_connections import ConnectionProofs
from kvtransfer.transports.shm import transport as shm
from kvtransfer.transports.tcp import transport as tcp
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from kvtransfer.wire.wire_format import NativeFormat
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc, worker_pb2_grpc

CHUNK_TOKENS = 512
BLOCK_SIZE = 16
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120.0
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
_FLAGS = ("--dtype=bfloat16", "--load-format=dummy", "--max-model-len=4352", "--kv-cache-memory=256MiB")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """One prompt that the other process prefilled and this one imported."""

    prefill_s: float
    imported: ImportedBlocks


class _Blocks:
    """A BlockSource over its own pool."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._granted: dict[int, tuple[int, ...]] = {}

    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        block_ids = self._pool.reserve(num_blocks)
        assert block_ids is not None, "one hand-off at a time, and each fits"
        self._granted[handoff_id] = block_ids
        return Reservation(block_ids)

    def announce(self, handoff_id: int) -> None:
        pass

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        assert not quarantined, "a read was broken off"
        self._pool.drop_references(self._granted.pop(handoff_id))

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        raise AssertionError(f"nothing was in quarantine: {block_ids}")


class _Linked:
    """TCP, through a link of limited bandwidth if one is given."""

    def __init__(self, inner: ImporterTransport) -> None:
        self._inner = inner
        self.name, self.endpoint = inner.name, inner.endpoint
        self._links: list[PacedLink] = []
        self.bytes_per_s: float | None = None

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> Channel:
        if self.bytes_per_s is None:
            return await self._inner.open_channel(epoch, exporter_endpoint)
        (port,) = struct.unpack_from("<H", exporter_endpoint, 16)  # after the token
        link = PacedLink((exporter_endpoint[18:].decode(), port), self.bytes_per_s)
        self._links.append(link)
        host, near_port = link.address
        return await self._inner.open_channel(
            epoch, exporter_endpoint[:16] + struct.pack("<H", near_port) + host.encode()
        )

    async def close(self) -> None:
        await self._inner.close()
        for link in self._links:
            link.close()


class Pair:
    """The prefill worker and its importer."""

    def __init__(self, engine: Engine, address: str, keys: ClusterKeys) -> None:
        self.engine = engine
        self._keys = keys
        self._member = MemberId("benchmark", secrets.token_hex(4))
        proofs = ConnectionProofs(keys, self._member, Telemetry())
        means = TransportSetup(self._member, proofs, engine.pool, "127.0.0.1", "127.0.0.1", timeout_s=_TIMEOUT_S)
        self.tcp = _Linked(tcp.importer(means))
        transports: dict[str, ImporterTransport] = {"shm": shm.importer(means), "tcp": self.tcp}
        self._importers = {name: self._importer([transport]) for name, transport in transports.items()}
        self._blocks = _Blocks(engine.pool.num_blocks)
        self._channel = open_member_channel(address, keys=keys, caller=str(self._member))
        self._prefills = worker_pb2_grpc.PrefillWorkerStub(self._channel)
        self._handoffs = kv_pb2_grpc.KvTransferStub(self._channel)
        self._number = 0

    def _importer(self, transports: list[ImporterTransport]) -> Importer:
        return Importer(
            member=self._member,
            wire=NativeFormat(self.engine.pool),
            layout=self.engine.fingerprint,
            block_size=BLOCK_SIZE,
            keys=self._keys,
            settings=TransferSettings(),
            transports=transports,
            clock=MonotonicClock(),
            counters=TransferCounters(Telemetry()),
        )

    async def hand_over(self, transport: str, num_tokens: int, *, is_prefilled: bool = False) -> HandedOver:
        """Hand over one prompt. `is_prefilled`: start the import only after prefill has ended."""
        self._number += 1
        token_ids = tuple((self._number * 7919 + 31 * place) % 49000 for place in range(num_tokens))
        job = PrefillJob(
            request_id=f"benchmark-{self._number}",
            attempt=1,
            token_ids=token_ids,
            sampling=Sampling(temperature=0.0),
            stops=TokenStops(max_tokens=4, min_tokens=0, stop_token_ids=frozenset()),
            seeds=(1,),
            num_committed=0,
            importer=self._member,
            timeout_s=_TIMEOUT_S,
        )
        events = self._prefills.Prefill(wire.prefill_job_to_wire(job))
        ticket = (await events.read()).accepted.ticket
        if is_prefilled:
            first_tokens = (await events.read()).first_tokens
        importing = asyncio.create_task(
            self._importers[transport].import_blocks(
                handoff_id=self._number,
                signed_ticket=ticket,
                expected=ExpectedPrompt(num_tokens, hash_prompt(self._keys.hash_key, token_ids), 1),
                blocks=self._blocks,
            )
        )
        if not is_prefilled:
            first_tokens = (await events.read()).first_tokens
        imported = await importing
        self._blocks.discard(self._number, frozenset())
        return HandedOver(first_tokens.prefill_s, imported)

    async def round_trip_s(self) -> float:
        """Return the seconds of one control message and its answer on a separate stream."""
        began_s = time.perf_counter()
        call = self._handoffs.HandOff(metadata=((IMPORTER_METADATA, str(self._member)),))
        await call.write(kv_pb2.ImporterMessage(attach=kv_pb2.Attach()))
        answer = await call.read()
        took_s = time.perf_counter() - began_s
        assert isinstance(answer, kv_pb2.ExporterMessage) and answer.refused.reason == HandOffReason.MALFORMED_MESSAGE
        await call.done_writing()
        return took_s

    async def close(self) -> None:
        for importer in self._importers.values():
            await importer.close()
        await self._channel.close()


@asynccontextmanager
async def pair(report: Callable[[str], None]) -> AsyncIterator[Pair]:
    """Start a prefill worker in another process, ready and warm."""
    redis = await RedisServer.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(_MODEL))
            key_file = Path(folder) / "cluster.key"
            keys = load_keys(key_file)
            report("starting a prefill worker, and the same engine here")
            worker = await _start_worker(redis.url, model, key_file)
            try:
                config = parse_arguments(WorkerConfig, "prefill_worker", ["--model", str(model), *_FLAGS])
                engine = await asyncio.to_thread(build_engine, config)
                async with asyncio.timeout(_TIMEOUT_S):
                    address = await _ready(worker)
                parties = Pair(engine, address, keys)
                try:
                    yield parties
                finally:
                    await parties.close()
            finally:
                worker.terminate()
                await worker.wait()
    finally:
        await redis.stop()


async def _start_worker(redis_url: str, model: Path, key_file: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prefill_worker", "--redis", redis_url, "--model", str(model)),
        *("--cluster-key-file", str(key_file), "--max-prefill-tokens", str(CHUNK_TOKENS), "--prefix-caching", "off"),
        *("--kv-transports", "shm,tcp", *_FLAGS),
        cwd=_ROOT,
        stdout=asyncio.subprocess.PIPE,
    )


async def _ready(worker: asyncio.subprocess.Process) -> str:
    assert worker.stdout is not None
    async for line in worker.stdout:
        fields = dict(field.partition("=")[::2] for field in line.decode().split())
        if "grpc" in fields:
            return fields["grpc"]
    raise RuntimeError("the prefill worker did not start")
