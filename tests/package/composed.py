"""The members of the compose file as processes, each with an address of its own in 127.0.0.0/8 instead of a container.

Commands, variables and the files of make_secrets.py are those of the file; only the paths of its volumes and the names
of its hosts are replaced. The ports are those of the file, since no two processes share an address.
"""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cluster.process import die_with_parent
from cluster.registry.redis_server import redis_program
from tests.package.installed import ROOT

FOLDER = ROOT / "deploy" / "compose"
_END_S = 90.0


class ComposedMembers:
    """The services of one choice of profiles. `keys`: what is mounted at /keys."""

    def __init__(self, folder: Path, profiles: str) -> None:
        self.keys = folder / "keys"
        self.services = services(profiles)
        self._network = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
        self._folder = folder
        for made in (self.keys, folder / "data"):
            made.mkdir(mode=0o700, exist_ok=True)

    def host(self, service: str) -> str:
        return f"{self._network}.{sorted(self.services).index(service) + 1}"

    def make_secrets(self) -> None:
        status, said = self.run_script("secrets")
        assert status == 0, said
        settings = self.keys / "tandem.yaml"
        settings.write_text(settings.read_text().replace("@redis:", f"@{self.host('redis')}:"))

    def run_script(self, service: str) -> tuple[int, str]:
        """Run make_secrets.py as a service does. Return its exit status and what it wrote to stderr."""
        arguments = [_replaced(word, {"/keys": str(self.keys)}) for word in self.services[service]["command"][2:]]
        command = (sys.executable, str(FOLDER / "make_secrets.py"), *arguments)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=_END_S)
        return ended.returncode, ended.stderr

    def environment(self, service: str) -> dict[str, str]:
        """Return the variables of a member, and of commands in its container."""
        places = {"/keys": str(self.keys), "/models": str(ROOT / "examples"), "0.0.0.0": self.host(service)}
        places["127.0.0.1"] = self.host(service)
        given = self.services[service]["environment"]
        return os.environ | {name: _replaced(str(value), places) for name, value in given.items()}

    @contextmanager
    def running(self, *names: str) -> Iterator[Mapping[str, "subprocess.Popen[str]"]]:
        """Run Redis and these members; their output goes to files NAME.log. Processes that still run are killed at the
        end."""
        programs = {"redis": self._redis_command()}
        programs |= {name: (self.tandem, *self.services[name]["command"][1:]) for name in names}
        running = {name: self._start(name, command) for name, command in programs.items()}
        try:
            yield running
        finally:
            for process in running.values():
                process.kill()
                process.wait(_END_S)

    @property
    def tandem(self) -> str:
        return str(Path(sys.executable).with_name("tandem"))

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _redis_command(self) -> tuple[str, ...]:
        places = {"/secrets": str(self.keys / "redis"), "/data": str(self._folder / "data")}
        arguments = (_replaced(word, places) for word in self.services["redis"]["command"][1:])
        return (redis_program(), *arguments, "--bind", self.host("redis"))

    def _start(self, name: str, command: tuple[str, ...]) -> "subprocess.Popen[str]":
        environment = self.environment(name) if name != "redis" else dict(os.environ)
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, text=True, preexec_fn=die_with_parent
            )


def services(profiles: str) -> dict[str, dict[str, Any]]:
    """Return the services of the compose file, with its variables replaced as docker compose replaces them."""
    given = {"COMPOSE_PROFILES": profiles}

    def value(found: re.Match[str]) -> str:
        return given.get(found[1], found[2] or "")

    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, (FOLDER / "compose.yaml").read_text())
    return dict(yaml.safe_load(text)["services"])


def _replaced(text: str, places: Mapping[str, str]) -> str:
    for there, here in places.items():
        text = text.replace(there, here)
    return text
