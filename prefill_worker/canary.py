"""Canary generations of a prefill worker: a prompt whose first token nobody waits for and whose KV nobody fetches."""

import asyncio
import secrets
from collections.abc import Callable, Iterator

from cluster import holders
from cluster.canary import prompt_of
from cluster.messages import PrefillJob, Sampling, TokenStops
from prefill_worker.scheduling import commands


class PrefillCanary:
    """A cluster.canary.Flight. `take` stands between the step thread's events and the service."""

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
        self._post(commands.Submit(self._ticket_id, job))
        return answer

    def end(self, number: int) -> None:
        if self._ticket_id in self._own:
            self._own[self._ticket_id] = None
            self._post(commands.Cancel(self._ticket_id))

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return map(holders.ticket, self._own)

    def take(self, events: tuple[commands.Event, ...]) -> tuple[commands.Event, ...]:
        """Those that are others'."""
        return tuple(event for event in events if not self._is_own(event))

    def _is_own(self, event: commands.Event) -> bool:
        match event:
            case commands.Accepted(ticket_id=ticket_id):
                return self._knows(ticket_id)
            case commands.Refused(ticket_id=ticket_id) | commands.Failed(ticket_id=ticket_id):
                is_own = self._knows(ticket_id)
                self._own.pop(ticket_id, None)
                return is_own
            case commands.Finished(ticket_id=ticket_id, tokens=tokens) if self._knows(ticket_id):
                answer = self._own.pop(ticket_id)
                if answer is not None and not answer.done():
                    answer.set_result(tuple(token.token_id for token in tokens))
                return True
            case commands.Sealed() | commands.Finished():
                self.was_alone = False
        return False

    def _knows(self, ticket_id: bytes) -> bool:
        """Anything of another one's is work that may share its steps."""
        is_own = ticket_id in self._own
        self.was_alone &= is_own
        return is_own
