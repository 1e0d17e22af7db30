"""Canary generations of a prefill worker: a prompt without an importer, which ends with its first token."""

import asyncio
import secrets
from collections.abc import Callable, Iterator

from cluster import holders
from cluster.messages import PrefillJob, Sampling, TokenStops
from engine.scheduling import commands
from worker.canary import prompt_of


class PrefillCanary:
    """A worker.canary.CanaryRunner. `take` removes its events before the service gets those of the step thread."""

    def __init__(self, post: Callable[[commands.Command], None], *, vocab_size: int, timeout_s: float) -> None:
        self._post = post
        self._prompt = prompt_of(vocab_size)
        self._timeout_s = timeout_s
        self._salt = secrets.token_hex(8)  # no client's prompt begins like it
        self._own: dict[bytes, asyncio.Future[tuple[int, ...]] | None] = {}  # by ticket, until the step thread is done
        self._ticket_id = b""
        self.was_alone = True

    def begin(self, number: int) -> asyncio.Future[tuple[int, ...]]:
        self._ticket_id, self.was_alone = secrets.token_bytes(16), True
        answer = self._own[self._ticket_id] = asyncio.get_running_loop().create_future()
        job = PrefillJob(
            request_id=f"canary-{number}",
            attempt=0,
            token_ids=self._prompt,
            sampling=Sampling(),
            stops=TokenStops(max_tokens=1),
            seeds=(0,),
            num_committed=0,
            importer=None,
            timeout_s=self._timeout_s,
            cache_salt=self._salt,
            is_batch=True,
        )
        self._post(commands.AdmitExport(self._ticket_id, job))
        return answer

    def end(self, number: int) -> None:
        if self._ticket_id in self._own:
            self._own[self._ticket_id] = None
            self._post(commands.CancelExport(self._ticket_id))

    def owners(self) -> Iterator[str]:
        """Yield the running canary, as a holder of blocks."""
        return map(holders.ticket, self._own)

    def take(self, events: tuple[commands.Event, ...]) -> tuple[commands.Event, ...]:
        """Return the events that do not belong to a canary."""
        return tuple(event for event in events if not self._is_own(event))

    def _is_own(self, event: commands.Event) -> bool:
        match event:
            case commands.ExportAccepted(ticket_id=ticket_id):
                return self._knows(ticket_id)
            case commands.ExportRefused(ticket_id=ticket_id) | commands.ExportFailed(ticket_id=ticket_id):
                is_own = self._knows(ticket_id)
                self._own.pop(ticket_id, None)
                return is_own
            case commands.ExportFinished(ticket_id=ticket_id, tokens=tokens) if self._knows(ticket_id):
                answer = self._own.pop(ticket_id)
                if answer is not None and not answer.done():
                    answer.set_result(tuple(token.token_id for token in tokens))
                return True
            case commands.Sealed() | commands.ExportFinished():
                self.was_alone = False
        return False

    def _knows(self, ticket_id: bytes) -> bool:
        """Remove the event of a canary. Any other event means work that may share the canary's steps."""
        is_own = ticket_id in self._own
        self.was_alone &= is_own
        return is_own
