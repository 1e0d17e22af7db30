"""`tandem estimate`: the memory that a model's KV needs, from its configuration alone."""

import argparse
import json
import sys
from pathlib import Path

from cli.table import bytes_text, table
from cli.verbs.clusters.up import DEMO_MODEL
from cluster.errors import ConfigError
from cluster.settings.worker_settings import KV_CACHE_DTYPES, parse_bytes
from engine.kv.capacity import estimate

HELP = "compute the KV memory per token and per request, and how many sequences fit a budget"
_DEFAULT_TOKENS = (256, 1024, 4096, 16384)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder or hub name (default: the demo model)")
    parser.add_argument(
        "--dtype", default="auto", help="dtype of the computation: float32, bfloat16, ...; auto: the checkpoint's"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="dtype of the KV in the pool (default: auto, which is --dtype)",
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    parser.add_argument(
        "--kv-cache-memory", default="256MiB", metavar="SIZE", help="the pool's budget (default: 256MiB)"
    )
    parser.add_argument(
        "--tokens", type=int, action="append", metavar="N", help="length of a sequence; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.block_size < 1 or min(arguments.tokens or (1,)) < 1:
        raise ConfigError("--block-size and --tokens must be at least 1")
    found = estimate(read_config(arguments.model), arguments.dtype, arguments.kv_cache_dtype)
    lengths = arguments.tokens or _lengths(found.max_tokens)
    memory_bytes = parse_bytes(arguments.kv_cache_memory, "--kv-cache-memory")
    sequences = [
        {
            "tokens": length,
            "request_bytes": found.request_bytes(length, arguments.block_size),
            "sequences": found.num_sequences(memory_bytes, length, arguments.block_size),
        }
        for length in lengths
    ]
    if arguments.json:
        figures = {
            "model": arguments.model,
            "dtype": found.dtype,
            "num_layers": found.num_layers,
            "num_kv_heads": found.layer.num_kv_heads,
            "bytes_per_token": found.bytes_per_token,
            "block_size": arguments.block_size,
            "memory_bytes": memory_bytes,
            "lengths": sequences,
        }
        json.dump(figures, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    print(
        f"{arguments.model}: {found.num_layers} layers, {found.layer.num_kv_heads} KV heads, {found.dtype}: "
        f"{found.bytes_per_token:,} bytes per token\n"
    )
    rows = [(f"{row['tokens']:,}", bytes_text(row["request_bytes"]), f"{row['sequences']:,}") for row in sequences]
    heading = ("tokens", f"KV in blocks of {arguments.block_size}", f"sequences in {arguments.kv_cache_memory}")
    print(table(heading, rows))
    return 0


def _lengths(max_tokens: int | None) -> list[int]:
    """Return the lengths to show by default: none beyond the model's longest sequence, which is the last one."""
    if max_tokens is None:
        return list(_DEFAULT_TOKENS)
    return [length for length in _DEFAULT_TOKENS if length < max_tokens] + [max_tokens]


def read_config(model: str) -> dict[str, object]:
    """Return the config.json of a local folder or hub name. Raises ConfigError."""
    path = Path(model) / "config.json"
    if not path.is_file():
        if Path(model).exists():
            raise ConfigError(f"--model {model}: the folder holds no config.json; name one that holds a model")
        if model.startswith((".", "/", "~")):
            raise ConfigError(f"--model {model}: there is no such folder; name one that this process sees")
        path = _from_hub(model)
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    return content


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # comes with transformers, and without torch
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"--model {model}: no such folder, and the hub has no config.json for it; correct the name"
        ) from error
