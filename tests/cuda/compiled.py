"""Compiles, without a GPU, what a first run on one will launch: each variant of each kernel that steps of the golden
families and of larger models' shapes ask for, as their own code asks for it.

    python -m tests.cuda.compiled --output benchmarks/results/gpu/compiled_kernels.md

Needs Triton. The steps are computed on the CPU with kernels that do nothing but note how they were called.
"""

import argparse
import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from cluster.settings.worker_settings import EngineSettings
from engine.attention import triton_paged
from engine.attention.interface import register
from engine.batch import pack
from engine.cuda import triton_ops
from engine.cuda.fused_forward import FusedDecoder, FusedForward
from engine.decoders.layer_parts import NotCompiled
from engine.decoders.recognise import recognise
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from engine.scheduling.step import Chunk
from engine.steps.forward import Forward, PlainForward
from kvtransfer import digest_kernel
from kvtransfer.transports.cuda import copies as cuda_copy
from tests.cuda.engines import WIDE
from tests.golden.families import BLOCK_SIZE, FAMILIES, Family

SHARED_BYTES = 227 << 10  # that one program may have on an H200
LONG = 4_096  # tokens of a context that is cut into parts
KERNELS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (triton_paged, ("attend_tile", "merge_parts")),
    (triton_ops, ("_norm_rows", "_rotate_heads", "_gate_rows")),
    (digest_kernel, ("_sum_pieces",)),
    (cuda_copy, ("_copy_words",)),
)


def _shape(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, object]:
    return {
        "vocab_size": 128,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8_192,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }


def _llama(*sizes: int) -> Family:
    return Family("llama", transformers.LlamaConfig, _shape(*sizes), std=0.02)


_MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = Family("gemma2", transformers.Gemma2Config, _shape(3584, 4096, 16, 8, 256) | _MIXED, std=0.02)
_GPT_OSS = Family(
    "gpt_oss",
    transformers.GptOssConfig,
    _shape(2880, 2880, 64, 8, 64) | _MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128},
    std=0.02,
)


# (what it is, the model, its dtype, the pool's, tokens a block)
MODELS: tuple[tuple[str, Family, str, str, int], ...] = (
    *((f"{name}, golden", family, "float32", "auto", BLOCK_SIZE) for name, family in FAMILIES.items()),
    ("wide llama, golden", WIDE, "bfloat16", "auto", BLOCK_SIZE),
    ("wide llama, golden", WIDE, "float16", "auto", BLOCK_SIZE),
    ("Llama 8B", _llama(4096, 14_336, 32, 8, 128), "bfloat16", "auto", 16),
    ("Llama 8B", _llama(4096, 14_336, 32, 8, 128), "bfloat16", "int8", 16),
    ("Llama 8B", _llama(4096, 14_336, 32, 8, 128), "bfloat16", "fp8", 16),
    ("Llama 8B", _llama(4096, 14_336, 32, 8, 128), "float32", "auto", 16),
    ("Llama 1B", _llama(2048, 8192, 32, 8, 64), "bfloat16", "auto", 16),
    ("Gemma 2 9B", _GEMMA, "bfloat16", "auto", 16),
    ("gpt-oss 20B", _GPT_OSS, "bfloat16", "auto", 16),
    ("gpt-oss 20B", _GPT_OSS, "bfloat16", "fp8", 16),
    ("gpt-oss 20B", _GPT_OSS, "float32", "auto", 16),
)


@dataclass(frozen=True, slots=True)
class Noted:
    """A signature with which a kernel was called, and for which it is compiled."""

    kernel: Any
    called_for: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


class _Noting:
    """Replaces a kernel and records its calls."""

    def __init__(self, kernel: Any, target: GPUTarget, note: Callable[[Any, str, Any], None]) -> None:
        self._kernel = kernel
        self._backend = make_backend(target)
        self._bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        self._note = note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            bound, specialised, left = self._bind(*given, **named)
            key = f"{specialised}{left}"
            self._note(self._kernel, key, self._kernel._pack_args(self._backend, named, bound, specialised, left))

        return launch


@contextlib.contextmanager
def noting(target: GPUTarget, called_for: list[str], found: dict[tuple[str, str], Noted]) -> Iterator[None]:
    """Record launches inside the `with` block instead of computing them. `called_for`: its only item names their
    purpose.
    """

    def note(kernel: Any, key: str, packed: Any) -> None:
        options, signature, constants, attributes = packed
        noted = Noted(kernel, called_for[0], signature, constants, attributes, dict(options.__dict__))
        found.setdefault((kernel.__name__, key), noted)

    kept = [(module, name, getattr(module, name)) for module, names in KERNELS for name in names]
    try:
        for module, name, kernel in kept:
            setattr(module, name, _Noting(kernel, target, note))
        yield
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def steps(num_kv_tokens: int, block_size: int) -> Iterator[tuple[str, list[Chunk]]]:
    """Return steps with decodes of one part, of several parts, and with a chunk. Blocks may repeat, because nothing is
    computed.
    """
    width = -(-num_kv_tokens // block_size)
    yield "decodes", [Chunk(0, (1,), 2, (0,)), Chunk(1, (1,), 5, (1,))]
    yield "a decode", [Chunk(0, (1,), 2, (0,))]
    yield "long decodes", [Chunk(0, (1,), num_kv_tokens - 1, (0,) * width), Chunk(1, (1,), 5, (1,) * width)]
    yield "chunks", [Chunk(0, (1,) * 7, 0, (0,) * 2)]


def forwards(loaded: LoadedModel, pool: KvPool) -> Iterator[tuple[str, Forward]]:
    yield "plain", PlainForward(loaded.model, pool, triton_paged.TritonBackend())
    if loaded.info.dtype == loaded.layout.dtype == "bfloat16":
        with contextlib.suppress(NotCompiled):
            decoder = FusedDecoder(recognise(loaded.model), LONG)
            yield "fused", FusedForward(decoder, pool, triton_paged.TritonBackend(), triton_ops.TritonOps())


def note_model(what: str, family: Family, dtype: str, kv_dtype: str, block_size: int, called_for: list[str]) -> None:
    given = {"dtype": dtype, "device": "cpu", "kv_cache_dtype": kv_dtype, "block_size": block_size, "num_blocks": 64}
    with tempfile.TemporaryDirectory() as folder:
        family.save(Path(folder))
        loaded = load(EngineSettings(model=folder, max_model_len=64, **given))  # type: ignore[arg-type]
    longest = min(LONG, loaded.model.config.max_position_embeddings)
    kv = "" if kv_dtype == "auto" else f", KV in {kv_dtype}"
    pool = KvPool(loaded.layout, 8)
    with torch.inference_mode():
        for kind, forward in forwards(loaded, pool):
            for step, chunks in steps(longest, block_size):
                called_for[0] = f"{what}, {dtype}{kv}: {step}, {kind}"
                forward(pack(chunks, block_size, torch.device("cpu")))
    pool.close()


def note_hand_offs(called_for: list[str]) -> None:
    """Record digests and copies of blocks of an 8B Llama (2 MiB), and of one with an odd size."""
    coefficients = torch.zeros(16, 8_192, dtype=torch.int8)
    for block_bytes in (2 << 20, 100_003):
        blocks = torch.zeros(2, block_bytes, dtype=torch.uint8)
        ids = torch.zeros(3, dtype=torch.int64)
        called_for[0] = f"blocks of {block_bytes:,} bytes"
        sums = digest_kernel.piece_sums(blocks, ids, coefficients)
        digest_kernel.copied_piece_sums(digest_kernel.Source.of(blocks, ids), blocks.clone(), ids, coefficients)
        digest_kernel.piece_sums(sums.flatten(1).view(torch.uint8), ids, coefficients)  # and their fold
        cuda_copy.copy_blocks(blocks.data_ptr(), ids, blocks, ids)


def noted(target: GPUTarget, models: Sequence[tuple[str, Family, str, str, int]] = MODELS) -> list[Noted]:
    register()
    called_for, found = [""], dict[tuple[str, str], Noted]()
    with noting(target, called_for, found):
        for model in models:
            note_model(*model, called_for)
        note_hand_offs(called_for)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Compiled:
    noted: Noted
    shared_bytes: int
    registers: int
    spilt_bytes: int  # of each thread's stack
    has_wgmma: bool

    def row(self) -> str:
        name = self.noted.kernel.__name__.strip("_")
        return (
            f"| {name} | {self.noted.called_for} | {self.noted.options['num_warps']} | {self.shared_bytes / 1024:.1f} "
            f"| {self.registers} | {self.spilt_bytes} | {'wgmma' if self.has_wgmma else ''} |"
        )


def compiled(each: Noted, target: GPUTarget) -> Compiled:
    source = ASTSource(each.kernel, each.signature, each.constants, each.attributes)
    made = triton.compile(source, target=target, options=each.options)
    usage = _usage(made.asm["cubin"])
    return Compiled(
        each,
        made.metadata.shared,
        usage["REG"],
        usage["STACK"],
        "wgmma" in made.asm["ptx"],
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """Return the output of Triton's own cuobjdump for its one kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    words = [word.partition(":") for word in told.stdout.split() if ":" in word]
    return {name: int(number) for name, _, number in words if number.isdigit()}


HEAD = """\
# What a first run launches, compiled for sm_{arch}

By `python -m tests.cuda.compiled`, with Triton {triton} and torch {torch}, without a GPU. {count} variants of {kernels}
kernels, by the calls that ask for them first. Shared memory in KiB of one program (an H200 has 227), registers of a
thread (at most 255), bytes of its stack (what is spilt).

| kernel | first asked for by | warps | shared | registers | stack | |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="of models whose name holds this")
    given = parser.parse_args()
    target = GPUTarget("cuda", given.arch, 32)
    all_noted = noted(target, [model for model in MODELS if given.only in model[0]])
    names = {each.kernel.__name__ for each in all_noted}
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    text = HEAD.format(arch=given.arch, count=len(all_noted), kernels=len(names), **versions)
    print(text, end="", flush=True)
    for each in all_noted:
        row = compiled(each, target).row()
        print(row, flush=True)
        text += row + "\n"
        if given.output:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(text)


if __name__ == "__main__":
    main()
