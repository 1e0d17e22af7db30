"""Two network namespaces joined by one cable, for tests that cut it. Root and the `ip` command are needed."""

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

INTERFACE = "kv0"  # its name on both sides


@dataclass(frozen=True, slots=True)
class Side:
    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs this command inside the namespace."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@dataclass(frozen=True, slots=True)
class Cable:
    first: Side
    second: Side

    def cut(self) -> None:
        """Drop everything that either side sends, without an error."""
        _ip("-n", self.second.namespace, "link", "set", INTERFACE, "down")

    def heal(self) -> None:
        """Restore the link. Returns when both sides have it again."""
        _ip("-n", self.second.namespace, "link", "set", INTERFACE, "up")
        for side in (self.first, self.second):
            while "state UP" not in _ip("-n", side.namespace, "link", "show", INTERFACE):
                pass


@contextmanager
def joined_namespaces() -> Iterator[Cable]:
    """Yield two joined namespaces. Skips the test, with the reason, where namespaces may not be created."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command here")
    name = f"tandem-{secrets.token_hex(4)}"
    cable = Cable(Side(f"{name}-1", "10.231.7.1"), Side(f"{name}-2", "10.231.7.2"))
    made = []
    try:
        for side in (cable.first, cable.second):
            try:
                _ip("netns", "add", side.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(side)
        _join(cable)
        yield cable
    finally:
        for side in made:
            _ip("netns", "del", side.namespace)


@dataclass(frozen=True, slots=True)
class FarHost:
    """A namespace that is joined to this machine by one cable only, like another host."""

    near_address: str  # ours, as the far side sees it
    side: Side
    near_interface: str

    def cut(self) -> None:
        """Drop everything that either side sends, without an error."""
        _ip("-n", self.side.namespace, "link", "set", INTERFACE, "down")

    def heal(self) -> None:
        """Restore the link. Returns when this side has it again."""
        _ip("-n", self.side.namespace, "link", "set", INTERFACE, "up")
        while "state UP" not in _ip("link", "show", self.near_interface):
            pass


@contextmanager
def far_host() -> Iterator[FarHost]:
    """Yield a far host. Skips the test, with the reason, where namespaces may not be created."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command here")
    name = secrets.token_hex(4)
    network = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
    host = FarHost(f"{network}.1", Side(f"tandem-{name}", f"{network}.2"), f"kv{name}")
    namespace = host.side.namespace
    try:
        _ip("netns", "add", namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        _ip("link", "add", INTERFACE, "netns", namespace, "type", "veth", "peer", "name", host.near_interface)
        _ip("address", "add", f"{host.near_address}/24", "dev", host.near_interface)
        _ip("-n", namespace, "address", "add", f"{host.side.address}/24", "dev", INTERFACE)
        _ip("link", "set", host.near_interface, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        host.heal()
        yield host
    finally:
        _ip("netns", "del", namespace)  # the cable goes with it


def _join(cable: Cable) -> None:
    first, second = cable.first, cable.second
    ends = ("type", "veth", "peer", "name", INTERFACE, "netns", second.namespace)
    _ip("link", "add", INTERFACE, "netns", first.namespace, *ends)
    for side in (first, second):
        _ip("-n", side.namespace, "address", "add", f"{side.address}/24", "dev", INTERFACE)
        _ip("-n", side.namespace, "link", "set", INTERFACE, "up")
        _ip("-n", side.namespace, "link", "set", "lo", "up")
    cable.heal()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
