"""Every documented command is run by a test or has a reason why it is not, every recipe of make that is documented runs
a program that exists, and the documented secrets are those that the manifests mount."""

import re
import shutil
import subprocess
from importlib.util import find_spec

import pytest
import yaml

from tests.system.operations.test_documented_commands import ELSEWHERE, GROUPS, OF_A_TEXT, documented, plain, recipe
from tests.system.rigs.processes.up_command import ROOT


def test_every_documented_command_is_run_by_a_test_or_has_a_reason() -> None:
    here = {plain(command) for commands in GROUPS.values() for command in commands}
    left = {plain(command) for command in documented()} - here
    unknown = [command for command in left if not command.startswith(tuple(ELSEWHERE))]
    assert not unknown, "\n".join(unknown)
    unused = [start for start in ELSEWHERE if not any(plain(each).startswith(start) for each in documented())]
    assert not unused, unused


def test_every_command_that_is_run_here_is_documented() -> None:
    known = {plain(command) for command in documented()} | OF_A_TEXT
    assert [c for commands in GROUPS.values() for c in commands if plain(c) not in known] == []
    files = [word for where in ELSEWHERE.values() for word in where.split() if word.startswith("tests/")]
    assert [name for name in files if not (ROOT / name.rstrip(";")).exists()] == []


@pytest.mark.parametrize("command", sorted({each for each in documented() if each.startswith("make ")}))
def test_a_documented_make_command_runs_a_program_that_exists(command: str) -> None:
    programs = [line for line in recipe(command) if "==>" not in line]
    modules = {found[1] for line in programs if (found := re.search(r"python3? -m ([\w.]+)", line))}
    assert programs
    assert not [module for module in modules - {"pip", "pytest"} if find_spec(module) is None]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine")
def test_the_documented_secrets_of_kubernetes_are_those_that_the_manifests_mount() -> None:
    page = (ROOT / "docs" / "operate" / "install.md").read_text()
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "create secret" in each]
    made = block.partition("kubectl apply")[0]
    locally = 'kubectl() { command kubectl "$@" --dry-run=client -o yaml && echo ---; }\n'
    output = subprocess.run(("sh", "-ec", locally + made), capture_output=True, text=True, check=True).stdout
    objects = [each for each in yaml.safe_load_all(output) if each]
    secrets = {each["metadata"]["name"]: set(each["data"]) for each in objects if each["kind"] == "Secret"}
    assert {each["metadata"]["name"] for each in objects if each["kind"] == "Namespace"} == {"tandem"}
    rendered = (ROOT / "deploy" / "kubernetes" / "rendered.yaml").read_text()
    assert set(secrets) == set(re.findall(r"secret(?:Name: |KeyRef:\s+key: \S+\s+name: )(\S+)", rendered))
    unused = [key for keys in secrets.values() for key in keys if not re.search(rf"[/ ]{re.escape(key)}\b", rendered)]
    assert not unused
