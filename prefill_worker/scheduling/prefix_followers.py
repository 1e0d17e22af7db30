"""Who waits to hear what changes in the prefix cache. Pure. Owned by the prefill scheduler.

Each follower asks from the first event that it does not know, and is answered once: when there is one. What happens
before it asks again comes in one answer.
"""

from engine.kv.block_pool import BlockPool
from prefill_worker.scheduling.commands import FollowPrefixes, PrefixesTold


class PrefixFollowers:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._since: dict[int, int | None] = {}  # by follower

    def follow(self, command: FollowPrefixes) -> None:
        self._since[command.follower_id] = command.since

    def unfollow(self, follower_id: int) -> None:
        """Safe to call for one that is not waiting."""
        self._since.pop(follower_id, None)

    def due(self) -> tuple[PrefixesTold, ...]:
        """What those hear for whom there is something new; they do not wait any longer."""
        if not self._since:
            return ()
        number = self._pool.next_prefix_event
        due = [(follower_id, since) for follower_id, since in self._since.items() if since != number]
        for follower_id, _ in due:
            del self._since[follower_id]
        return tuple(PrefixesTold(follower_id, self._pool.prefix_news(since)) for follower_id, since in due)
