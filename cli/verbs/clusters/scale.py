"""`tandem scale`: set the number of workers of each pool. The process that runs the workers starts and drains them."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping

import grpc

from cli import connection
from cli.argument_types import seconds
from cli.verbs.observation.status import target_object
from cluster.errors import ConfigError
from cluster.process import ExitStatus
from cluster.registry.scale_target import POOLS, sizes_text
from tandem.enum_words import MEMBER_STATES
from tandem.errors import DeadlineExceeded, Unavailable
from tandem.v1 import admin_pb2, admin_pb2_grpc

HELP = "set the number of workers of each pool and wait until it is reached: prefill=2 decode=3 colocated=1"
_ASK_TIMEOUT_S = 30.0
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("pools", nargs="+", metavar="POOL=N", help="prefill=N, decode=N, colocated=N")
    parser.add_argument(
        "--no-wait",
        dest="wait",
        action="store_false",
        help="return once the target is set, without waiting until it is reached",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="X",
        default=_TIMEOUT_S,
        help=f"maximum seconds to wait (default: {_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of lines as they come"
    )


def run(arguments: argparse.Namespace) -> int:
    sizes = sizes_from(arguments.pools)
    scaling = _Scaling(sizes, arguments)
    try:
        target = connection.ask(arguments, scaling.run)
    except KeyboardInterrupt:
        if scaling.is_set:
            sys.stderr.write("tandem: no longer waiting; the target stays set\n")
        raise
    is_superseded = target.version > scaling.version
    if arguments.json:
        print(json.dumps(target_object(target) | {"changes": scaling.changes}))
    elif is_superseded:
        print(f"another command has changed the target since: {_sizes_text(target)}")
    else:
        print(f"target {'reached' if arguments.wait else 'set'}: {_sizes_text(target)}")
    return ExitStatus.CRASHED if is_superseded else ExitStatus.OK


def sizes_from(words: list[str]) -> dict[str, int]:
    """Return the pool sizes given as `prefill=N`, `decode=N` and `colocated=N`, by pool. Raises ConfigError."""
    found: dict[str, int] = {}
    for word in words:
        pool, _, number = word.partition("=")
        if pool not in POOLS or not number.isascii() or not number.isdigit():
            raise ConfigError(f"write prefill=N, decode=N or colocated=N with a whole number N, not {word!r}")
        if pool in found:
            raise ConfigError(f"{pool} is given twice")
        found[pool] = int(number)
    if max(found.values()) >= 1 << 16:
        raise ConfigError(f"a pool cannot have {max(found.values())} workers; the maximum is 65535")
    return found


def changes_between(before: admin_pb2.StatusResponse, after: admin_pb2.StatusResponse) -> Iterator[str]:
    """Return one line per worker that joined, left or changed its state."""
    states_before, states_after = _states(before), _states(after)
    for member in sorted(states_after):
        if states_before.get(member) != states_after[member]:
            yield f"{member.partition('@')[0]} is {states_after[member]}"
    for member in sorted(states_before.keys() - states_after.keys()):
        yield f"{member.partition('@')[0]} has left"


class _Scaling:
    """An execution of `tandem scale`, at the first router that answers."""

    def __init__(self, sizes: Mapping[str, int], arguments: argparse.Namespace) -> None:
        self._sizes = sizes
        self._wait = arguments.wait
        self._timeout_s = arguments.timeout_s
        self._is_quiet = arguments.json
        self._problem = ""
        self._follower = ""
        self.changes: list[str] = []
        self.version = 0
        self.is_set = False

    def run(self, admin: admin_pb2_grpc.AdminStub, metadata: connection.Metadata) -> admin_pb2.ScaleTarget:
        """Set the target and wait until it is reached. Raises grpc.RpcError and the client library's errors."""
        news = admin.Follow(admin_pb2.FollowRequest(), timeout=self._timeout_s, metadata=metadata)
        try:
            status = next(news)
            target = status.target
            if not self.is_set:  # otherwise a router that was lost since has set it
                request = admin_pb2.ScaleRequest(**self._sizes)
                target = admin.Scale(request, timeout=_ASK_TIMEOUT_S, metadata=metadata).target
                self.version, self._follower, self.is_set = target.version, target.follower, True
            while self._wait and not self._is_over(target):
                before, status = status, next(news)
                target = status.target
                self._tell(before, status)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._too_late() from error
            raise
        finally:
            news.cancel()
        result: admin_pb2.ScaleTarget = target
        return result

    def _is_over(self, target: admin_pb2.ScaleTarget) -> bool:
        """Return whether waiting is over. Raises Unavailable when the target's follower is gone."""
        if target.follower != self._follower:
            raise Unavailable(
                "the process that ran the workers has ended, so no process follows the target; start the cluster again",
                reason="unavailable",
            )
        return target.reached >= self.version or target.version > self.version

    def _tell(self, before: admin_pb2.StatusResponse, after: admin_pb2.StatusResponse) -> None:
        for change in changes_between(before, after):
            self.changes.append(change)
            if not self._is_quiet:
                print(change, flush=True)
        if after.target.problem != self._problem:
            self._problem = after.target.problem
            if self._problem:
                sys.stderr.write(f"tandem: {self._problem}; retrying\n")

    def _too_late(self) -> DeadlineExceeded:
        why = f": {self._problem}" if self._problem else ""
        stands = "the target is set but not reached" if self.is_set else "the target is not set"
        return DeadlineExceeded(f"after {self._timeout_s:g} s {stands}{why}", reason="deadline_exceeded")


def _states(status: admin_pb2.StatusResponse) -> dict[str, str]:
    return {
        f"{member.member_id}@{member.incarnation}": MEMBER_STATES.label(member.state)
        for member in status.members
        if member.role != admin_pb2.MEMBER_ROLE_ROUTER
    }


def _sizes_text(target: admin_pb2.ScaleTarget) -> str:
    return sizes_text(target.prefill, target.decode, target.colocated)
