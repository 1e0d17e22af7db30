"""The requests of a measurement: one length of prompt and output, or conversations of several turns.

Pure; randomness is an argument. Arrival times come from `cli/load.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cli.load import Arrival, poisson

_NUM_USERS = 16  # conversations that run at the same time


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens. With `num_turns` above 1 each turn adds `prompt_tokens` to the prompt of the turn before."""

    prompt_tokens: int
    output_tokens: int
    num_turns: int = 1

    @property
    def name(self) -> str:
        lengths = f"{self.prompt_tokens}/{self.output_tokens}"
        return lengths if self.num_turns == 1 else f"{self.num_turns} turns of {lengths}"

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt and its output."""
        return self.prompt_tokens * self.num_turns + self.output_tokens


def poisson_arrivals(workload: Workload, rate_rps: float, count: int, random: Random) -> list[Arrival]:
    return _with_turns(workload, poisson(rate_rps, count, workload.prompt_tokens, workload.output_tokens, random))


def even_arrivals(workload: Workload, rate_rps: float, count: int) -> list[Arrival]:
    """Return arrivals at equal distances, the first one at time 0."""
    lengths = workload.prompt_tokens, workload.output_tokens
    return _with_turns(workload, [Arrival(number / rate_rps, *lengths) for number in range(count)])


def sequential_arrivals(workload: Workload, count: int) -> list[Arrival]:
    """Return requests to send one by one: the turns of a conversation in their order, then those of the next one."""
    turns = [_turn(workload, conversation=i // workload.num_turns, turn=i % workload.num_turns) for i in range(count)]
    return [Arrival(0.0, *each) for each in turns]


def _with_turns(workload: Workload, arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Make the arrivals turns of conversations. The users take turns, so that the rate and the mix of turns are the
    same at all times and a turn arrives `_NUM_USERS` arrivals after the one before."""
    if workload.num_turns == 1:
        return list(arrivals)
    turns = []
    for number, arrival in enumerate(arrivals):
        user = number % _NUM_USERS
        position = user + number // _NUM_USERS  # users begin at different turns
        conversation = user + _NUM_USERS * (position // workload.num_turns)
        turns.append(Arrival(arrival.at_s, *_turn(workload, conversation, position % workload.num_turns)))
    return turns


def _turn(workload: Workload, conversation: int, turn: int) -> tuple[int, int, tuple[int, ...], int]:
    """Return an arrival's fields after the time. The new tokens of a turn stand for the answer to the turn before and
    the next question."""
    if workload.num_turns == 1:
        return workload.prompt_tokens, workload.output_tokens, (), workload.prompt_tokens
    blocks = tuple(conversation * workload.num_turns + index for index in range(turn + 1))
    return workload.prompt_tokens * (turn + 1), workload.output_tokens, blocks, workload.prompt_tokens
