"""Lets one other worker at a time read this worker's pool for a few seconds, to measure the link between the two.

Nothing is allocated, pinned or written for a link check: the other worker reads whatever the blocks contain and
discards it. Only members of the cluster may request one; they sign their id with the cluster's keys.
"""

import asyncio
import secrets

from cluster.auth.keys import ClusterKeys, Purpose
from cluster.errors import HandOffFailed, HandOffReason, Overloaded
from cluster.member import fingerprint_difference
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.protocol.received import checked
from cluster.protocol.tickets import TICKET_ID_BYTES
from cluster.protocol.wire import epoch_to_wire, fingerprint_from_wire, member_from_wire, pack_ids
from cluster.settings.transfer_settings import TRANSPORTS
from kvtransfer.importer.links import DOES_NOT_REACH
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.available import Available
from tandem.internal.v1 import kv_pb2

OPEN_S = 12.0
MAX_BYTES = 64 << 20


class LinkCheckAccess:
    """Owns the link check in progress and its end. Use it on the event loop."""

    def __init__(
        self,
        *,
        member: MemberId,
        address: str,  # the address under which other workers reach it
        memory: PoolMemory,  # the memory that transports serve
        layout: LayoutFingerprint,
        keys: ClusterKeys,
        transports: Available,
        open_s: float = OPEN_S,
    ) -> None:
        self._member, self._address, self._memory = member, address, memory
        self._layout, self._keys, self._transports, self._open_s = layout, keys, transports, open_s
        self._epoch: Epoch | None = None
        self._importer: MemberId | None = None
        self._end: asyncio.TimerHandle | None = None

    def start(self, request: kv_pb2.OpenLinkCheckRequest) -> kv_pb2.OpenLinkCheckResponse:
        """Start a link check. A worker's new request ends its former one; a request without transports only ends it.

        Raises HandOffFailed (BAD_SIGNATURE, LAYOUT_MISMATCH), MalformedMessage, Overloaded (another worker's is open).
        """
        importer = self._checked(checked(request))
        if self._importer not in (None, importer):
            raise Overloaded(f"{self._importer} is measuring its link to {self._member}", retry_after_s=self._left_s())
        self.close()
        if not request.transports:
            return kv_pb2.OpenLinkCheckResponse()
        epoch = Epoch(self._member, secrets.token_bytes(TICKET_ID_BYTES), 0)
        self._epoch, self._importer = epoch, importer
        self._end = asyncio.get_running_loop().call_later(self._open_s, self.close)
        num_blocks = min(self._memory.num_blocks, max(1, MAX_BYTES // self._memory.block_bytes))
        return kv_pb2.OpenLinkCheckResponse(
            epoch=epoch_to_wire(epoch),
            paths=self._paths(request, epoch),
            block_ids=pack_ids(range(num_blocks)),
            open_s=self._open_s,
        )

    def close(self) -> None:
        """End the link check in progress, if any: it starts no further reads."""
        if self._end is not None:
            self._end.cancel()
        if self._epoch is not None:
            for transport in self._transports.exporters:
                transport.revoke(self._epoch)
        self._end = self._epoch = self._importer = None

    def _checked(self, request: kv_pb2.OpenLinkCheckRequest) -> MemberId:
        signed = link_check_text(request.importer, self._member, self._address)
        if not self._keys.verify(Purpose.LINK_CHECKS, signed, request.signature):
            detail = f"the link check of {self._member} is not signed with this cluster's key"
            raise HandOffFailed(HandOffReason.BAD_SIGNATURE, detail)
        difference = fingerprint_difference(self._layout, fingerprint_from_wire(request.layout))
        if difference:
            raise HandOffFailed(HandOffReason.LAYOUT_MISMATCH, difference)
        return member_from_wire(request.importer)

    def _left_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        return max(0.0, self._end.when() - now_s) if self._end is not None else 0.0

    def _paths(self, request: kv_pb2.OpenLinkCheckRequest, epoch: Epoch) -> list[kv_pb2.LinkCheckPath]:
        """Return one entry per transport. The order has no meaning: the importer's order counts."""
        offered = {transport.name: transport for transport in self._transports.exporters}
        paths = []
        for name in dict.fromkeys([*offered, *TRANSPORTS]):
            path = kv_pb2.LinkCheckPath(transport=name)
            if name not in offered:
                path.reason = self._transports.missing.get(name, "not part of this version")
            elif name in request.transports and offered[name].reachable(request.endpoints[name]):
                path.endpoint = offered[name].grant(epoch)
            elif name in request.transports:
                path.reason = DOES_NOT_REACH
            paths.append(path)
        return paths


def link_check_text(importer: str, exporter: MemberId, address: str) -> bytes:
    """Return what an importer signs and sends with its id.

    It is valid for this exporter at this address only: an attacker who directs a worker to another address receives no
    signature that the exporter would accept.
    """
    return "\0".join((importer, str(exporter), address)).encode()
