"""The requests of the clients: a fixed set, each with one right answer, recorded while no fault was active."""

from dataclasses import dataclass
from random import Random

_NUM_MIXED = 40
_SEED = 20
_VOCABULARY = (10, 900)


@dataclass(frozen=True, slots=True)
class Question:
    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    n: int
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


RightAnswer = tuple[ChoiceAnswer, ...]


@dataclass(frozen=True, slots=True)
class Questions:
    mixed: tuple[Question, ...]
    long_prompts: tuple[Question, ...]  # many steps of a prefill worker
    long_answers: tuple[Question, ...]  # hundreds of steps of a decode worker
    middling: tuple[Question, ...]  # a few steps of either

    @property
    def all(self) -> tuple[Question, ...]:
        return (*self.mixed, *self.long_prompts, *self.long_answers, *self.middling)


def make_questions(num_mixed: int = _NUM_MIXED) -> Questions:
    dice = Random(_SEED)
    mixed = [_mixed(number, dice) for number in range(num_mixed)]
    numbers = iter(range(num_mixed, 1000))
    return Questions(
        mixed=tuple(mixed),
        long_prompts=tuple(_question(next(numbers), dice, 880, 24) for _ in range(3)),
        long_answers=tuple(_question(next(numbers), dice, 40, 320) for _ in range(3)),
        middling=tuple(_question(next(numbers), dice, 260, 40) for _ in range(3)),
    )


def _mixed(number: int, dice: Random) -> Question:
    num_tokens = dice.choice((3, 16, 17, 60, 150, 330)) + dice.randrange(6)
    question = _question(number, dice, num_tokens, dice.choice((1, 2, 12, 40, 90)))
    return Question(
        number=number,
        prompt=question.prompt,
        max_tokens=question.max_tokens,
        temperature=dice.choice((0.0, 0.0, 0.8, 1.0)),
        seed=question.seed,
        n=2 if number % 7 == 3 else 1,
        logprobs=2 if number % 5 == 1 else None,
    )


def _question(number: int, dice: Random, num_tokens: int, max_tokens: int) -> Question:
    prompt = tuple(dice.randrange(*_VOCABULARY) for _ in range(num_tokens))
    return Question(number, prompt, max_tokens, dice.choice((0.0, 1.0)), number + 1, 1, None)
