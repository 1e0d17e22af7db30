"""The outstanding work of a worker by router: prompts to compute, sequences to decode. Pure.

`OutstandingWork` is the worker's own account, by router. The worker sends each router the sum over all other routers
(`OthersWork`); a router counts its own work itself, from the moment it sends it (`PromptBacklog`,
`SequenceProgress`). So nothing counts twice, even while messages are in flight: a router's own work is never in the
reports that it receives. A router sends its predictions (cached tokens, output length) with the work, so that every
router counts the same.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from cluster.messages import MemberId
from cluster.service_times import attended_tokens

_LEAST_LEFT_SHARE = 0.25  # of the expected length: the rest expected of a sequence that exceeds it


@dataclass(frozen=True, slots=True)
class PromptWork:
    """The part of a prompt that a worker computes. Sums of several prompts are of this type too."""

    num_new: float = 0  # tokens that are not cached
    attended: float = 0.0  # the sum of the tokens to which they attend

    @staticmethod
    def of(num_tokens: int, num_cached: int) -> "PromptWork":
        """Return the work of a prompt. The last token is always computed."""
        num_new = max(1, num_tokens - num_cached)
        return PromptWork(num_new, attended_tokens(num_new, num_tokens - num_new))

    def __add__(self, other: "PromptWork") -> "PromptWork":
        return PromptWork(self.num_new + other.num_new, self.attended + other.attended)

    def times(self, factor: float) -> "PromptWork":
        return PromptWork(self.num_new * factor, self.attended * factor)


NO_PROMPT = PromptWork()


def expected_left(num_output: int, num_expected: float, max_tokens: int) -> float:
    """Return how many more tokens a sequence is expected to generate. `num_expected`: the total that was predicted at
    its start.
    """
    left = max(num_expected - num_output, _LEAST_LEFT_SHARE * num_expected)
    return min(left, max(0, max_tokens - num_output))


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """The sum over sequences that a worker decodes, or will decode as soon as their prompts are there."""

    num_running: int = 0  # the worker has generated a token of them
    num_joining: int = 0  # their prompts are still being computed or moved
    context: int = 0  # the sum of the lengths of both
    left: float = 0.0  # the sum of the tokens that both are expected to generate yet

    def __add__(self, other: "SequenceWork") -> "SequenceWork":
        return SequenceWork(
            self.num_running + other.num_running,
            self.num_joining + other.num_joining,
            self.context + other.context,
            self.left + other.left,
        )


NO_SEQUENCE_WORK = SequenceWork()


@dataclass(frozen=True, slots=True)
class OthersWork:
    """The work of all routers but one at a worker, as the worker reports it to that one."""

    number: int = 0  # of the report. Of two reports of one incarnation of the worker, the higher one is newer
    prompts: PromptWork = NO_PROMPT  # the sum of their prompts that are not computed yet
    first: PromptWork = NO_PROMPT  # the prompt that the worker computes now; NO_PROMPT if it is not one of theirs
    elapsed_s: float = 0.0  # since the worker began with the prompt that it computes now, of any router
    num_exported: int = 0  # sequences of their prompts that another worker will decode
    sequences: SequenceWork = NO_SEQUENCE_WORK

    @property
    def num_sequences(self) -> int:
        return self.num_exported + self.sequences.num_running + self.sequences.num_joining


@dataclass(frozen=True, slots=True)
class SequenceOutlook:
    """The length of a sequence when it is sent to the worker, and its predicted output."""

    num_prompt: int
    max_tokens: int  # to generate in all
    num_expected: float  # of them, how many its router expects
    num_output: int = 0  # tokens that it has generated already


class OutstandingWork:
    """All work that routers have at this worker. Belongs to the worker's event loop.

    Prompts count as computed one after the other, in the order in which they came. The scheduler's policy may choose
    another order, which changes who waits and not how much there is to do.
    """

    def __init__(self, on_change: Callable[[MemberId], None] = lambda router: None) -> None:
        """`on_change` is called with a router when its prompts or the number of its sequences have changed. Tokens of
        running sequences change too little for a report of their own."""
        self._on_change = on_change
        self._prompts: dict[Hashable, _Prompt] = {}
        self._began_s = 0.0  # when the worker began with the first prompt
        self._sequences: dict[MemberId, dict[int, _Sequence]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """The prompts that are not computed and the sequences that have not ended."""
        return len(self._prompts) + sum(map(len, self._sequences.values()))

    def add_export(self, key: Hashable, router: MemberId, work: PromptWork, num_sequences: int, now_s: float) -> None:
        """Record a prompt to compute for sequences that another worker will decode."""
        self._add_prompt(key, _Prompt(router, work, num_exported=num_sequences), now_s)
        self._on_change(router)

    def remove_export(self, key: Hashable, now_s: float) -> None:
        """Record that the prompt is computed, or will not be. It has no effect on one that was removed before."""
        if key in self._prompts:
            router = self._prompts[key].router
            self._remove_prompt(key, now_s)
            self._on_change(router)

    def add_sequences(
        self, router: MemberId, outlooks: Mapping[int, SequenceOutlook], prompt: PromptWork | None, now_s: float
    ) -> None:
        """Record the sequences of one job by handle. `prompt`: the work of this worker before their first token;
        None: it imports their KV."""
        key = None if prompt is None else (router, *outlooks)
        if prompt is not None:
            self._add_prompt(key, _Prompt(router, prompt, num_waiting=len(outlooks)), now_s)
        added = {handle: _Sequence(outlook, outlook.num_output, key) for handle, outlook in outlooks.items()}
        self._sequences.setdefault(router, {}).update(added)
        self._on_change(router)

    def record_output(self, router: MemberId, handle: int, num_output: int, now_s: float) -> None:
        """Record that the worker has generated a token of a sequence: `num_output` in all, with those that it began
        with. It has no effect on a sequence that has ended."""
        sequence = self._sequences.get(router, _NO_SEQUENCES).get(handle)
        if sequence is None:
            return
        sequence.num_output = num_output
        if not sequence.is_running:
            sequence.is_running = True
            self._remove_prompt(sequence.prompt, now_s)
            self._on_change(router)

    def rename_sequence(self, router: MemberId, handle: int, new_handle: int) -> None:
        """Record that a sequence continues under another handle. It has no effect on one that has ended."""
        sequences = self._sequences.get(router, {})
        if handle in sequences:
            sequences[new_handle] = sequences.pop(handle)

    def remove_sequences(self, router: MemberId, handles: Iterable[int], now_s: float) -> None:
        """Record that sequences have ended. It has no effect on those that have ended before."""
        sequences = self._sequences.get(router, {})
        ended = [sequences.pop(handle) for handle in handles if handle in sequences]
        for sequence in ended:
            prompt = self._prompts.get(sequence.prompt)
            if prompt is not None:
                prompt.num_waiting -= 1
                if not prompt.num_waiting:
                    self._remove_prompt(sequence.prompt, now_s)
        if ended:
            if not sequences:
                del self._sequences[router]
            self._on_change(router)

    def reports(self, routers: Iterable[MemberId], now_s: float) -> dict[MemberId, OthersWork]:
        """Return a report for each of these routers."""
        number, shares = next(self._numbers), self._shares()
        computing = next(iter(self._prompts.values()), None)
        elapsed_s = now_s - self._began_s if computing is not None else 0.0
        return {router: _without(router, number, shares, computing, elapsed_s) for router in routers}

    def total(self) -> tuple[PromptWork, SequenceWork]:
        """Return the prompts that are not computed and the sequences that have not ended, of all routers."""
        shares = self._shares().values()
        return (
            sum((share.prompts for share in shares), NO_PROMPT),
            sum((share.sequences for share in shares), NO_SEQUENCE_WORK),
        )

    def _add_prompt(self, key: Hashable, prompt: "_Prompt", now_s: float) -> None:
        if not self._prompts:
            self._began_s = now_s
        self._prompts[key] = prompt

    def _remove_prompt(self, key: Hashable, now_s: float) -> None:
        if key not in self._prompts:
            return
        if key == next(iter(self._prompts)):
            self._began_s = now_s
        del self._prompts[key]

    def _shares(self) -> dict[MemberId, "_Share"]:
        """Return the sum of each router's work. Every report sums from the start, so no error accumulates."""
        shares: dict[MemberId, _Share] = {}
        for prompt in self._prompts.values():
            share = shares.setdefault(prompt.router, _Share())
            share.prompts += prompt.work
            share.num_exported += prompt.num_exported
        for router, sequences in self._sequences.items():
            shares.setdefault(router, _Share()).add(sequences.values())
        return shares


@dataclass(slots=True)
class _Prompt:
    router: MemberId
    work: PromptWork
    num_exported: int = 0
    num_waiting: int = 0  # sequences of this worker that wait for it


@dataclass(slots=True)
class _Sequence:
    outlook: SequenceOutlook
    num_output: int
    prompt: Hashable  # the key of the prompt that this worker computes for it; None: it imports the KV
    is_running: bool = False


_NO_SEQUENCES: dict[int, _Sequence] = {}


@dataclass(slots=True)
class _Share:
    """The sum of one router's work."""

    prompts: PromptWork = NO_PROMPT
    num_exported: int = 0
    sequences: SequenceWork = NO_SEQUENCE_WORK

    def add(self, sequences: Collection[_Sequence]) -> None:
        num_running, context, left = 0, 0, 0.0
        for sequence in sequences:
            outlook, num_output = sequence.outlook, sequence.num_output
            num_running += sequence.is_running
            context += outlook.num_prompt + num_output
            left += expected_left(num_output, outlook.num_expected, outlook.max_tokens)
        self.sequences += SequenceWork(num_running, len(sequences) - num_running, context, left)


def _without(
    router: MemberId, number: int, shares: Mapping[MemberId, _Share], computing: _Prompt | None, elapsed_s: float
) -> OthersWork:
    """Return the report for this router. `computing`: the prompt that the worker computes now."""
    others = [share for other, share in shares.items() if other != router]
    is_of_another = computing is not None and computing.router != router
    return OthersWork(
        number=number,
        prompts=sum((share.prompts for share in others), NO_PROMPT),
        first=computing.work if computing is not None and is_of_another else NO_PROMPT,
        elapsed_s=elapsed_s,
        num_exported=sum(share.num_exported for share in others),
        sequences=sum((share.sequences for share in others), NO_SEQUENCE_WORK),
    )
