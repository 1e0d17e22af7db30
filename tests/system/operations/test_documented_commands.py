"""The commands of the documentation as they are written: here in order, each group on a cluster of its own, or by the
test that a table names. Commands that cannot run here are in the table too, with the reason.

    .venv/bin/python -m pytest -m slow tests/system/operations/test_documented_commands.py

Replaced are only addresses, the model that its reader has, and numbers that make a command long.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.system.rigs.members.router_harness import DEMO_MODEL
from tests.system.rigs.processes.up_command import DEADLINE_S, ROOT, Up
from tests.unit.project.test_docs import PAGES

_QWEN = "/models/Qwen2.5-0.5B-Instruct"
GROUPS: dict[str, tuple[str, ...]] = {
    "first steps": (
        "tandem up",
        'tandem generate "def read_file(path):"',
        'tandem generate --chat "What is a KV cache?" --ledger',
        "tandem chat",
        "tandem status",
        "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'"
        ' -d \'{"model": "demo_model", "prompt": "import os\\n", "max_tokens": 32}\'',
        "tandem explain my-label",
        "tandem bench --rate 4 --num-requests 200 --prompt-tokens 1024 --output-tokens 128"
        " --slo-ttft-s 1 --slo-itl-s 0.1",
        "tandem bench --trace conversations.csv --time-scale 2",
    ),
    "sizes and roles": (
        "tandem up",
        "tandem scale prefill=1 decode=2",
        "tandem migrate decode-0",
        "tandem migrate decode-0 --to decode-1 --max 8",
        "tandem scale prefill=2 decode=3",
        "tandem role prefill-1 decode",
        "tandem role prefill-0 both",
        "tandem drain decode-0 --wait",
    ),
    "own model": (
        f"tandem up --model {_QWEN} --dtype bfloat16 --prefill 1 --decode 1 --kv-cache-memory 2GiB"
        " --max-model-len 8192",
        'tandem generate "def read_file(path):"',
    ),
    "own model, two decode workers": (
        f"tandem up --model {_QWEN} --dtype bfloat16 --prefill 1 --decode 2 --kv-cache-memory 2GiB"
        " --max-model-len 8192",
    ),
    "keys": (
        "tandem up --keys redis",
        "tandem keys add --tenant acme --requests-per-minute 600 --tokens-per-minute 200000 --max-concurrency 32",
        "tandem keys add --tenant monitoring --allow metrics",
        "tandem keys list",
        "tandem keys revoke 1f0c9ad1b2c3",
    ),
    "TLS": (
        "tandem certs tls --host 127.0.0.1 --host node1.example",
        "tandem up --tls-cert tls/member.crt --tls-key tls/member.key --tls-ca tls/ca.crt",
        'tandem generate "def fibonacci(n):"',
        "curl --cacert tls/ca.crt https://127.0.0.1:8000/v1/models",
    ),
}
# Not in a block of commands, but in the text of a page.
OF_A_TEXT = {"tandem up --keys redis"}
# The beginning of a command, and the tests that run it. A word in capitals says why none can.
ELSEWHERE = {
    "tandem top": "tests/system/placement/test_explain.py",
    "tandem estimate": "tests/system/operations/test_tandem_up.py",
    "tandem up --ray auto": "tests/system/ray/test_ray_nodes.py tests/system/ray/test_ray.py",
    "tandem scale decode=4": "tests/system/ray/test_ray_nodes.py",
    "make demo": "tests/system/operations/test_documented_commands.py",
    "make test": "tests/unit/project/test_documented_commands.py",
    "make check": "tests/unit/project/test_documented_commands.py",
    "make chaos": "tests/chaos/test_chaos.py",
    "make chaos-simulated": "tests/chaos/simulated/schedules/test_replay.py",
    "python -m tests.chaos ": "tests/chaos/test_chaos.py",
    "python -m tests.chaos.simulated ": "tests/chaos/simulated/schedules/test_replay.py",
    "make gpu-check": "tests/unit/benchmarks/test_gpu_check.py",
    "PYTHONPATH=.:.whl/site": "GPU: it profiles a step on one",
    "make gpu-wheels": "DOWNLOADS: only the machine that a GPU machine is prepared on has an index of wheels",
    "pip install --no-deps --target .wheels": "DOWNLOADS: wheels of 2 GB",
    "PYTHONPATH=.wheels": "DOWNLOADS: needs those wheels",
    "docker build": "tests/package/test_compose.py",
    "docker compose": "tests/package/test_compose.py",
    "COMPOSE_PROFILES=": "tests/package/test_compose.py",
    "export COMPOSE_PROFILES=": "tests/package/test_compose.py",
    "cd deploy/compose": "tests/package/test_compose.py",
    "KEY=$(docker compose": "tests/package/test_compose.py",
    'curl http://127.0.0.1:8000/v1/completions -H "Authorization': "tests/package/test_compose_members.py",
    "curl --cacert ca.crt": "tests/package/test_compose.py",
    "kubectl create namespace": "tests/unit/project/test_documented_commands.py",
    "kubectl -n tandem create secret": "tests/unit/project/test_documented_commands.py",
    "P=$(openssl": "tests/unit/project/test_documented_commands.py",
    "user tandem on": "tests/unit/project/test_documented_commands.py",
    "kubectl apply -k": "tests/unit/deploy/test_kubernetes.py tests/unit/deploy/test_kubernetes_overlays.py",
    "kubectl -n tandem scale": "CONTROL PLANE: needs one; tests/system/operations/test_operator.py has a false one",
}


def documented() -> list[str]:
    """Return the commands in blocks of README.md, CONTRIBUTING.md and docs/, without comments."""
    pages = (page for page in PAGES if page.parent == ROOT or page.is_relative_to(ROOT / "docs"))
    found = []
    for page in pages:
        for kind, block in re.findall(r"```(sh|console)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                if kind == "console" and not line.startswith("$ "):
                    continue  # the output
                command = re.sub(r"\s+# .*", "", line.removeprefix("$ ")).strip()
                found += [command] if command and not command.startswith("#") else []
    return found


def plain(command: str) -> str:
    return " ".join(command.removeprefix(".venv/bin/").split())


class Shell:
    """A shell in a folder of its own, where `tandem` is this checkout's, and the clusters that are started in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "bin" / "tandem"
        program.parent.mkdir()
        python = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)}"
        program.write_text(f'#!/bin/sh\n{python} -m cli "$@"\n')
        program.chmod(0o755)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(folder),
        }
        self._program = program
        self._up: Up | None = None
        self._replaced: dict[str, str] = {_QWEN: str(DEMO_MODEL), "--max-model-len 8192": "--max-model-len 1024"}

    def run(self, command: str) -> str:
        """Run the command; `tandem up` runs until the end. Returns the output of any other one, which must succeed."""
        for old, new in self._replaced.items():
            command = command.replace(old, new)
        if command.startswith("tandem up"):
            return self._start(shlex.split(command)[2:])
        ended = subprocess.run(
            ("sh", "-c", command),
            cwd=self._folder,
            env=self._environment,
            input="hello\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=10 * DEADLINE_S,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}"
        return ended.stdout

    def replace(self, old: str, new: str) -> None:
        self._replaced[old] = new

    def end(self) -> None:
        if self._up is not None:
            assert self._up.end() == 0

    def _start(self, arguments: Sequence[str]) -> str:
        self._up = Up(self._folder, *arguments, program=(str(self._program),), directory=self._folder)
        line = self._up.until("ready http=")
        self.replace("127.0.0.1:8000", line.split("http=")[1].split()[0].partition("://")[2])
        return line


def _prepare(shell: Shell, folder: Path) -> None:
    """Make what the reader of a command has: a trace, a request with a label, short numbers."""
    rows = [f"2023-11-16 18:15:4{second}.6805900,200,8" for second in range(4)]
    (folder / "conversations.csv").write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    shell.replace("--num-requests 200", "--num-requests 8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GROUPS)
def test_documented_commands_succeed_in_order(name: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    _prepare(shell, tmp_path)
    try:
        for command in GROUPS[name]:
            if "curl " in command and shutil.which("curl") is None:
                pytest.skip("there is no curl on this machine")
            output = shell.run(command)
            if command.startswith("curl") and "completions" in command:
                assert json.loads(output[output.index("{") :])["usage"]["completion_tokens"] > 0
                _ask_with_label(shell, command)
            if command == "tandem keys list":
                shell.replace("1f0c9ad1b2c3", re.search(r"^([0-9a-f]{12}) +acme", output, re.MULTILINE)[1])  # type: ignore[index]
    finally:
        shell.end()


def _ask_with_label(shell: Shell, command: str) -> None:
    shell.run(command.replace("-H ", "-H 'x-request-id: my-label' -H ", 1))


@pytest.mark.slow
def test_the_command_of_make_demo_answers_one_prompt_and_leaves_nothing(tmp_path: Path) -> None:
    assert recipe("make demo")[-1] == ".venv/bin/tandem demo"
    output = Shell(tmp_path).run("tandem demo")
    assert "def read_file(path):" in output and "stopped; nothing is left running" in output


def recipe(command: str) -> list[str]:
    """Return the lines that make would run. The environment counts as made."""
    made = ("-o", ".venv/.base", "-o", ".venv/.test", "-o", ".venv/.made")
    ended = subprocess.run(
        ("make", "-n", *made, *shlex.split(command)[1:]), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ended.stdout.splitlines()
