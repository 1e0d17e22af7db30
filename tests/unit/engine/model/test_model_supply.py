"""Tests that a model's files run no code in the process that loads them, unless its operator allows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from cluster.errors import ModelRefused
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.worker_settings import EngineSettings
from engine.model.loading import load
from tests.golden.families import Family
from tests.unit.engine.model.test_load_check import LLAMA

_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self._marker),)


def _settings(folder: Path, **more: str) -> EngineSettings:
    return EngineSettings(model=str(folder), dtype="float32", device="cpu", block_size=8, num_blocks=8, **more)  # type: ignore[arg-type]


def _saved(folder: Path) -> Path:
    Family("served", transformers.LlamaConfig, LLAMA).save(folder)
    return folder


def test_weights_in_a_pickle_are_refused_and_not_unpickled(tmp_path: Path) -> None:
    folder, marker = _saved(tmp_path / "model"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Payload(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load(_settings(folder))
    assert not marker.exists()


def test_code_of_a_model_runs_only_where_the_operator_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = _saved(tmp_path / "model"), tmp_path / "ran"
    (folder / "own.py").write_text(_CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own_llama", "auto_map": own}))

    with pytest.raises(ModelRefused, match="give --trust-remote-code"):
        load(_settings(folder))
    assert not marker.exists()
    loaded = load(_settings(folder, trust_remote_code="on"))
    assert marker.exists() and type(loaded.model).__name__ == "OwnModel"


def test_a_pinned_revision_of_a_hub_name_is_the_one_that_is_read(tmp_path: Path) -> None:
    """The hub's cache has two commits of a model; no network is used."""
    commits = {"1" * 40: "main", "2" * 40: ""}
    cache = tmp_path / "models--acme--tiny"
    for commit, branch in commits.items():
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
        if branch:
            (cache / "refs").mkdir()
            (cache / "refs" / branch).write_text(commit)
    program = (
        "import sys; from cluster.grammar.tokenizer_files import locate\n"
        "for revision in sys.argv[1:]: print(locate('acme/tiny', revision).name)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "", "2" * 40],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.split() == list(commits)


def test_routers_and_workers_pin_a_revision_and_trust_no_code_by_default() -> None:
    assert WorkerConfig(model="m").trust_remote_code == "off"
    for config_type in (RouterConfig, WorkerConfig):
        assert config_type(model="m", revision="abc").revision == "abc"
