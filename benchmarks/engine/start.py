"""Measure the time from a process's start to its first token, with warm caches, and that of a process that only loads
the weights."""

import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig

from benchmarks.engine import parties
from benchmarks.engine.shapes import Load, ModelShape
from engine.model.loading import dummy_model

_FIRST = Load(1, 16, 1)
_LOAD = """
import sys, torch, transformers
torch.set_num_threads(1)
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of each round. `loading`: a fresh Python that imports `transformers` and loads the checkpoint."""

    model: str
    loading: list[float]
    tandem: list[float]  # `tandem up --colocated 1`, Redis and router included, to a client's first token
    vllm: list[float]

    def line(self) -> str:
        loading, ours = median(self.loading), median(self.tandem)
        theirs = f"; vLLM {median(self.vllm):.1f}" if self.vllm else ""
        return f"- {self.model}: weights {loading:.1f}, first token of Tandem {ours:.1f} ({ours / loading:.2f}){theirs}"


def measure_starts(model: ModelShape, rounds: int, vllm_python: str) -> list[Start]:
    with tempfile.TemporaryDirectory() as directory:
        folder = model.save(Path(directory) / model.name)
        config = AutoConfig.from_pretrained(folder)
        dummy_model(config, torch.bfloat16, "sdpa", torch.device("cpu")).save_pretrained(folder)
        start = Start(model.name, [], [], [])
        for turn in range(rounds + 1):
            loading, ours = _loading_s(folder), asyncio.run(_tandem_s(folder))
            theirs = asyncio.run(_vllm_s(folder, vllm_python)) if vllm_python else None
            if turn:  # the first one warms the caches
                start.loading.append(loading)
                start.tandem.append(ours)
                if theirs is not None:
                    start.vllm.append(theirs)
        return [start]


def _loading_s(folder: Path) -> float:
    began_s = time.perf_counter()
    subprocess.run((sys.executable, "-c", _LOAD, str(folder)), check=True, capture_output=True)
    return time.perf_counter() - began_s


async def _tandem_s(folder: Path) -> float:
    began_s = time.perf_counter()
    async with parties.tandem(folder, "", load_format="auto") as party:
        await party.first_token(_FIRST)
        return time.perf_counter() - began_s


async def _vllm_s(folder: Path, python: str) -> float:
    began_s = time.perf_counter()
    async with parties.vllm(folder, python, load_format="auto") as party:
        await party.first_token(_FIRST)
        return time.perf_counter() - began_s
