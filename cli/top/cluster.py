"""What `tandem top` asks the routers of a cluster."""

import argparse

from cli import connection
from cli.local.last_cluster import find_address
from cli.top.watch import full_name
from tandem.errors import TandemError
from tandem.routers import addresses, is_reachable
from tandem.v1 import admin_pb2

_TIMEOUT_S = 10.0


class Cluster:
    """The routers of the cluster: the given ones, and those that answers name."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._given = addresses(find_address(arguments.address))
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
        failure: TandemError | None = None
        for address in self._known:
            try:
                return connection.ask_one(self._arguments, address, call)
            except TandemError as error:
                if not error.is_lost:
                    raise
                failure = error
        assert failure is not None
        raise failure
