"""Sequences that leave for another worker, or stay after all. Pure. Owned by the decode scheduler."""

from cluster.errors import DuplicateRequest, NotFound
from decode_worker.scheduling.batch import Batch
from decode_worker.scheduling.commands import Event, Freeze, FreezeRefused, Frozen, Thaw, Thawed, ThawRefused
from decode_worker.scheduling.live import LiveSequences
from decode_worker.scheduling.offers import Offers


class Departures:
    def __init__(self, batch: Batch, live: LiveSequences, offers: Offers) -> None:
        self._batch = batch
        self._live = live
        self._offers = offers

    def freeze(self, command: Freeze) -> Event:
        sequence = self._live.get(command.router, command.handle)
        if sequence is None or not self._batch.decodes(sequence):
            return FreezeRefused(command.ticket_id, NotFound(f"sequence {command.handle} does not decode here"))
        self._batch.freeze(sequence)
        sealed_ids, tail = self._offers.lease(command.ticket_id, sequence)
        return Frozen(
            ticket_id=command.ticket_id,
            request_id=sequence.group.job.request_id,
            token_ids=tuple(sequence.token_ids[: sequence.num_computed]),
            last_token_id=sequence.token_ids[-1],
            num_output=sequence.num_output,
            sealed_block_ids=sealed_ids,
            tail=tail,
            unverified=self._offers.unverified(command.ticket_id),
        )

    def thaw(self, command: Thaw) -> Event:
        router, new_handle = command.router, command.new_handle
        sequence = self._live.get(router, command.handle)
        if sequence is None or not self._batch.is_frozen(sequence):
            return ThawRefused(router, new_handle, NotFound(f"sequence {command.handle} is not frozen here"))
        if (router, new_handle) in self._live:
            return ThawRefused(router, new_handle, DuplicateRequest(f"handle {new_handle} is in use"))
        self._batch.thaw(sequence)
        self._live.rename(sequence, new_handle)
        return Thawed(router, new_handle)
