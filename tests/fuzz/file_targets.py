"""Fuzz targets for data from Redis and from disks that others can write to: registry, tiers, settings, model files,
batches.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from cli.connection import _read as read_last_cluster
from cli.verbs.generation.batch import kept_lines, read_requests
from cluster.accounts.keys import Access, Caller, Gate, KeySet, Limits, new_key
from cluster.auth.key_file import read_key_file
from cluster.auth.keys import ClusterKeys, Purpose
from cluster.errors import ConfigError, RegistryUnavailable
from cluster.grammar.tokenizer_files import read_json
from cluster.member import Capacity, Member, from_json, to_json
from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.registry.scale_registry import _target as scale_target
from cluster.registry.signed_records import SignedRecords
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import load_config
from prefill_worker.prefixes.tier_storage import BadBlockFile, BlockFiles, StoredBlock
from router.text.chat_template import read_chat_template
from router.text.model_files import model_info
from tests.fuzz.mutations import mutated_json
from tests.fuzz.target import Refused, Target, refusals
from tests.unit.cluster.protocol.test_received_messages import KEY

_FINGERPRINT = LayoutFingerprint("weights", "config", "float32", "table")
_NAMES = ("id", "role", "address", "fingerprint", "capacity", "transports", "custom_id", "body", "url", "response")
_HASH, _BLOCK_BYTES = b"h" * 16, 64
_YAML = b"redis: redis://127.0.0.1:6379/0\nblock_size: 16\nmax_model_len: 4096\nhost: 127.0.0.1\nslo_tpot_ms: 1.5\n"
_YAML_WORDS = (b"&a [*a]", b"*a", b"<<: ", b"!!python/object:os.system ", b"!!int ", b"[" * 3000, b"- ", b"\t", b": ",
               b"1e400", b"0x" + b"f" * 400, b"1" * 5000, b".inf", b".nan", b"\xff", b"? ",
               b"2026-01-01", b"!!binary x")  # fmt: skip
_BATCH = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}\n'
_ANSWERS = b'{"id": "batch_req_1", "custom_id": "1", "response": {"status_code": 200, "request_id": "r", "body": {}}}\n'
_ROTATING = b"current %b\nnext %b\ncaches 2 %b\n" % (b"ab" * 32, b"cd" * 32, b"ef" * 32)
_JSON_WORDS = (b"[" * 3000, b'{"a":' * 1500, b"1e400", b"9" * 5000, b"null", b"NaN", b"\\ud800", b"\n", b"\xff")

_RECORDS = SignedRecords(ClusterKeys(b"k" * 32), "c", lambda reason, identifier: None)


def targets() -> Iterator[Target]:
    member = to_json(_member())
    yield Target("registry member", [member.encode()], _read_member, _made([json.loads(member)]))
    record = _RECORDS.sign(_member(), 1)
    yield Target("registry record", [record.encode()], _read_record, _made([json.loads(record)]))
    yield Target(
        "scale target", [b'["1", "2", "0", "3", "name", "2", "", "1"]'], _read_scale_target, _made([["1"] * 8])
    )
    yield Target("tier file", _tier_files, _read_tier_file)
    yield Target("tier folder", [b"00" * 16, b"lock", b"x" * 32], _list_tier)
    yield Target("configuration", [_YAML], _load_file, words=_YAML_WORDS)
    yield Target("environment", [b"max_model_len=3", b"slo_ttft_ms=0.5", b"port=1", b"api_key=x"], _load_environment)
    yield Target("cluster key", [b"ab" * 32 + b"\n", _ROTATING], _load_key, words=(b"previous ", b"caches 0 "))
    yield Target("api key records", [KeySet().signed(KEY).encode(), _key_records()], _read_keys, _made_keys)
    yield Target("batch requests", [_BATCH, _BATCH * 2], _read_batch, words=_JSON_WORDS)
    yield Target("batch answers", [_ANSWERS, _ANSWERS[:30]], _read_answers, words=_JSON_WORDS)
    cluster = {"grpc": "a:1", "http": "a:2", "pid": 3, "tls_ca": "", "more_grpc": ["b:1"]}
    yield Target("last cluster", [json.dumps(cluster).encode()], _read_cluster, _made([cluster]), words=_JSON_WORDS)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        seed = (_model() / name).read_bytes()
        yield Target(f"model {name}", [seed], partial(_read_model, name), _made([json.loads(seed)]), words=_JSON_WORDS)


def _made(values: Sequence[Any]) -> Callable[[random.Random], bytes]:
    names = sorted({name for value in values if isinstance(value, dict) for name in value}) or _NAMES
    return lambda draw: json.dumps(mutated_json(draw, values, names)).encode()


def _member() -> Member:
    return Member(
        id=MemberId("p0", "1"), role=Role.PREFILL, address="127.0.0.1:1", model="m", transports=("shm", "tcp"),
        fingerprint=_FINGERPRINT, capacity=Capacity(8, 16, 4, 64),
    )  # fmt: skip


def _read_member(data: bytes) -> str:
    with refusals(ValueError):
        return str(from_json(data.decode(errors="replace")).role)


def _read_record(data: bytes) -> str:
    found = _RECORDS.read([("p0", data.decode(errors="replace"))], 0.0)
    if not found:
        raise Refused("ignored")
    assert found == [_member()], "a record that no member has signed"
    return "member"


def _read_scale_target(data: bytes) -> str:
    """Read the answer of a script in Redis: a list of texts."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused("no answer") from None
    texts = [str(value) for value in answer] if isinstance(answer, list) else [str(answer)]
    with refusals(RegistryUnavailable):
        return type(scale_target(texts)).__name__


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="tandem-fuzz-")  # removed at the end of the process


def _folder() -> Path:
    return Path(_temporary().name)


@cache
def _files() -> BlockFiles:
    return BlockFiles(_folder() / "tier", _FINGERPRINT, _BLOCK_BYTES)


def _tier_files() -> list[bytes]:
    _files().write(_HASH, StoredBlock(b"d" * 16, is_verified=True), memoryview(bytes(_BLOCK_BYTES)))
    return [_files()._path(_HASH).read_bytes()]


def _read_tier_file(data: bytes) -> str:
    _files()._path(_HASH).write_bytes(data)
    with refusals(BadBlockFile):
        return str(_files().read(_HASH, memoryview(bytearray(_BLOCK_BYTES))).is_verified)


def _list_tier(data: bytes) -> str:
    """List the folder of a tier with a file of any name."""
    name = data.replace(b"/", b"").replace(b"\0", b"")[:200]
    if name in (b"", b".", b".."):
        raise Refused("no name of a file")
    path = Path(str(_files()._folder)) / name.decode(errors="surrogateescape")
    path.write_bytes(bytes(BlockFiles.file_bytes(_BLOCK_BYTES)))
    try:
        return f"{len(_files().hashes())} blocks"
    finally:
        if path.name != "lock":
            path.unlink(missing_ok=True)


def _load_file(data: bytes) -> str:
    path = _folder() / "settings.yaml"
    path.write_bytes(data)
    with refusals(ConfigError):
        for kind in (RouterConfig, WorkerConfig):
            load_config(kind, {"config": str(path), "model": "m"}, {})
    return "loaded"


def _load_environment(data: bytes) -> str:
    name, _, value = data.decode("utf-8", "surrogateescape").partition("=")
    with refusals(ConfigError):
        load_config(RouterConfig, {"model": "m"}, {f"TANDEM_{name.upper()}": value})
    return "loaded"


def _load_key(data: bytes) -> str:
    path = _folder() / "cluster.key"
    path.touch(mode=0o600)
    path.write_bytes(data)
    with refusals(ConfigError):
        return f"generation {read_key_file(path).secrets.generation}"


def _key_records() -> bytes:
    caller = Caller(tenant="acme", access=frozenset({Access.INFERENCE}), limits=Limits(requests_per_minute=3))
    return KeySet().with_record(new_key(caller)[1]).signed(KEY).encode()


def _made_keys(draw: random.Random) -> bytes:
    """Return records of any content with a valid signature, as another version may sign them."""
    records = mutated_json(draw, [json.loads(json.loads(_key_records())["body"])])
    body = json.dumps(records)
    return json.dumps({"body": body, "signature": KEY.sign(Purpose.KEY_RECORDS, body.encode()).hex()}).encode()


def _read_keys(data: bytes) -> str:
    with refusals(ConfigError):
        keys = KeySet.parse(data.decode(errors="replace"), KEY)
        Gate(has_records=True).replace(keys)
        return f"{len(keys.records)} records"


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="replace").splitlines(keepends=True)


def _read_batch(data: bytes) -> str:
    with refusals(ConfigError):
        return f"{len(read_requests(_lines(data), 'in'))} requests"


def _read_answers(data: bytes) -> str:
    with refusals(ConfigError):
        return f"{len(kept_lines(_lines(data), 'out', ['1']))} answers"


def _read_cluster(data: bytes) -> str:
    path = _folder() / "cluster-1.json"
    path.write_bytes(data)
    return type(read_last_cluster(path)).__name__


@cache
def _model() -> Path:
    return Path(__file__).parents[2] / "examples" / "demo_model"


def _read_model(name: str, data: bytes) -> str:
    folder = _folder() / "model"
    folder.mkdir(exist_ok=True)
    for other in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / other).write_bytes((_model() / other).read_bytes() if other != name else data)
    with refusals(ConfigError):
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        read_chat_template(folder, tokenizer_config)
        model_info(str(folder), folder, served_model_name="", max_model_len=0, has_chat_template=True)
    return "read"
