"""A session of `tandem top`: the screen, its keys, and the thread that queries the routers of the cluster."""

import argparse
import json
import os
import select
import sys
import termios
import textwrap
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cli import connection
from cli.terminal import restored_at_end
from cli.top.screen import (
    MEMBER_ORDERS,
    REQUEST_ORDERS,
    View,
    chosen_member,
    chosen_request,
    draw,
    members_shown,
    printable,
    requests_shown,
)
from cli.top.watch import Watch, full_name
from cli.verbs.observation.explain import explained_text
from tandem.enum_words import plain_object
from tandem.errors import TandemError
from tandem.routers import addresses, is_reachable
from tandem.v1 import admin_pb2

_ONCE_SIZE = (100, 40)
_TIMEOUT_S = 10.0


class Cluster:
    """The routers of the cluster: the given ones, and those that answers name."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._given = addresses(connection.find_address(arguments.address))
        self._known = self._given
        self._by_member: dict[str, str] = {}

    def overview(self, seen: dict[str, admin_pb2.OverviewPosition]) -> admin_pb2.OverviewResponse:
        """Ask the first router that can be reached. Raises the client library's errors."""
        request = admin_pb2.OverviewRequest(seen=seen)
        answer: admin_pb2.OverviewResponse = self._first(
            lambda admin, metadata: admin.Overview(request, timeout=_TIMEOUT_S, metadata=metadata)
        )
        found = [member for member in answer.members if member.role == admin_pb2.MEMBER_ROLE_ROUTER]
        self._by_member = {full_name(member): member.address for member in found}
        if self._arguments.discover:
            others = (member.address for member in found if is_reachable(member.address, self._given[0]))
            self._known = tuple(dict.fromkeys([*self._given, *others]))
        return answer

    def explain(self, router: str, request_id: str) -> admin_pb2.ExplainResponse:
        request = admin_pb2.ExplainRequest(request=request_id)
        address = self._by_member.get(router, self._known[0])
        found: admin_pb2.ExplainResponse = connection.ask_one(
            self._arguments,
            address,
            lambda admin, metadata: admin.Explain(request, timeout=_TIMEOUT_S, metadata=metadata),
        )
        return found

    def drain(self, member: str) -> admin_pb2.DrainResponse:
        request = admin_pb2.DrainRequest(member_id=member)
        answer: admin_pb2.DrainResponse = self._first(
            lambda admin, metadata: admin.Drain(request, timeout=_TIMEOUT_S, metadata=metadata)
        )
        return answer

    def _first(self, call: connection.Call[connection.Answer]) -> connection.Answer:
        return connection.ask_first(self._arguments, self._known, call)


def print_once(answer: admin_pb2.OverviewResponse, *, as_json: bool) -> None:
    if as_json:
        json.dump(plain_object(answer), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    watch, console = Watch(), Console()
    watch.update(answer)
    width = console.width if console.is_terminal else _ONCE_SIZE[0]
    shown = draw(watch, View(question=" ", in_members=True), width, _ONCE_SIZE[1])
    shown.rstrip()
    console.print(shown, soft_wrap=True)


class Session:
    """The screen, its keys, and the thread that queries the cluster."""

    def __init__(self, cluster: Cluster, interval_s: float) -> None:
        self._cluster, self._interval_s = cluster, interval_s
        self._watch, self._view = Watch(), View()
        self._lock = threading.Lock()  # of both
        self._wake_read, self._wake_write = os.pipe()
        self._ended = threading.Event()
        self._text = ""  # shown in place of the screen
        self._confirmed: Callable[[], str] | None = None  # the action that `y` starts
        self._first_error: TandemError | None = None

    def run(self) -> None:
        """Show the screen until the operator quits. Raises the error of the first query."""
        self._ask()
        if self._first_error is not None:
            raise self._first_error
        asking = threading.Thread(target=self._keep_asking, daemon=True)
        asking.start()
        console = Console()
        try:
            with (
                restored_at_end(),
                raw_keys(sys.stdin.fileno()),
                Live(console=console, screen=True, auto_refresh=False) as live,
            ):
                while not self._ended.is_set():
                    live.update(self._screen(console), refresh=True)
                    for key in next_keys(sys.stdin.fileno(), self._wake_read, self._interval_s):
                        self._on_key(key)
        finally:
            self._ended.set()

    def _keep_asking(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._ask()
            os.write(self._wake_write, b".")

    def _ask(self) -> None:
        try:
            answer = self._cluster.overview(self._watch.positions)
        except TandemError as error:
            with self._lock:
                self._view.problem = f"no router answers: {error.message}"
            self._first_error = error
            return
        with self._lock:
            self._view.problem = ""
            self._watch.update(answer)

    def _screen(self, console: Console) -> Text:
        width, height = console.size
        if self._text:
            lines = [part for line in self._text.splitlines() for part in _wrapped(printable(line), width)]
            lines = [*lines, *[""] * height][: height - 1]
            return Text("\n".join([*lines, "any key: back"]))
        with self._lock:
            return draw(self._watch, self._view, width, height)

    def _on_key(self, key: str) -> None:
        view = self._view
        with self._lock:
            if self._text:
                self._text = ""
            elif self._confirmed is not None:
                confirmed, self._confirmed = self._confirmed, None
                view.question = confirmed() if key == "y" else ""
            elif key in ("q", ""):
                self._ended.set()
            else:
                view.question = ""
                self._choose(key)

    def _choose(self, key: str) -> None:
        view = self._view
        match key:
            case "tab":
                view.in_members = not view.in_members
            case "up" | "down":
                self._move(1 if key == "down" else -1)
            case "s" if view.in_members:
                view.member_order = (view.member_order + 1) % len(MEMBER_ORDERS)
            case "s":
                view.request_order = (view.request_order + 1) % len(REQUEST_ORDERS)
            case "e":
                self._explain()
            case "d":
                self._ask_to_drain()

    def _move(self, step: int) -> None:
        view = self._view
        if view.in_members:
            members = members_shown(self._watch, view)
            row = chosen_member(members, view) + step
            view.member = full_name(members[max(0, min(len(members) - 1, row))]) if members else ""
        else:
            requests = requests_shown(self._watch, view)
            row = chosen_request(requests, view) + step
            view.request = requests[max(0, min(len(requests) - 1, row))].key if requests else None

    def _explain(self) -> None:
        shown = requests_shown(self._watch, self._view)
        if self._view.in_members or not shown:
            self._view.question = "choose a request first: tab, then the arrow keys"
            return
        chosen = shown[chosen_request(shown, self._view)]
        try:
            found = self._cluster.explain(chosen.router, chosen.timeline.request_id)
        except TandemError as error:
            self._text = error.message
            return
        self._text = "\n\n".join(map(explained_text, found.requests))

    def _ask_to_drain(self) -> None:
        shown = members_shown(self._watch, self._view)
        if not self._view.in_members or not shown:
            self._view.question = "choose a member first: tab, then the arrow keys"
            return
        member = full_name(shown[chosen_member(shown, self._view)])
        self._view.question = f"drain {member.partition('@')[0]}? y: yes, any other key: no"
        self._confirmed = partial(self._drain, member)

    def _drain(self, member: str) -> str:
        """Drain the chosen member. Return the result as text."""
        try:
            return f"{self._cluster.drain(member).member} is draining"
        except TandemError as error:
            return f"{member.partition('@')[0]} was not drained: {error.message}"


def _wrapped(line: str, width: int) -> list[str]:
    """Return the line in parts that fit. A row of a table is cut instead."""
    is_row = "  " in line.strip()
    return [line[:width]] if is_row else textwrap.wrap(line, width) or [""]


_NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\t": "tab", b"\x1b": "escape"}
_MAX_BYTES = 64


@contextmanager
def raw_keys(descriptor: int) -> Iterator[None]:
    """Deliver each key at once and show none of them, until the block is left. Ctrl-C still interrupts."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def next_keys(descriptor: int, wake: int, timeout_s: float) -> list[str]:
    """Wait for keys, for a byte at `wake`, or for `timeout_s`. Return the names of the keys: up, down, tab, escape, or
    the character. An empty string is the end of the input."""
    readable, _, _ = select.select([descriptor, wake], [], [], timeout_s)
    if wake in readable:
        os.read(wake, _MAX_BYTES)
    if descriptor not in readable:
        return []
    read = os.read(descriptor, _MAX_BYTES)
    return _named(read) if read else [""]


def _named(read: bytes) -> list[str]:
    keys = []
    while read:
        known = next((code for code in _NAMES if read.startswith(code)), None)
        size = len(known) if known is not None else 1
        keys.append(_NAMES[known] if known is not None else read[:1].decode("latin-1"))
        read = read[size:]
    return keys
