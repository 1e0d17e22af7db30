"""The committed stubs are what the .proto files say."""

import importlib.metadata
import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "tandem" / "v1").glob("*.proto"))


def test_the_stubs_are_those_that_the_contract_generates(tmp_path: Path) -> None:
    assert importlib.metadata.version("grpcio-tools") == "1.76.0"  # stubs refuse a grpcio older than what made them
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")),
            *map(str, PROTOS),
        ],
        check=True,
        timeout=60,
    )
    generated = {path.name: path.read_text() for path in (tmp_path / "tandem" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "tandem" / "v1").glob("*_pb2*.py*")}
    assert sorted(generated) == sorted(committed)
    assert [name for name in generated if generated[name] != committed[name]] == [], "run `make proto`"


def test_every_message_field_is_explained_or_named_by_its_unit() -> None:
    """A .proto without comments is half a contract: each file opens with one, each service and method has one."""
    for path in PROTOS:
        lines = path.read_text().splitlines()
        assert lines[0].startswith("// "), path.name
        for before, line in itertools.pairwise(lines):
            if line.startswith("service ") or line.lstrip().startswith("rpc "):
                assert before.lstrip().startswith("//"), f"{path.name}: {line}"
