"""The log-probabilities of prompts, as vLLM's field `prompt_logprobs` has them."""

from itertools import chain
from typing import Any

from router.requests import PromptToken, ScoredPrompt
from router.text.tokenization import Tokenization

Json = dict[str, Any]


class ScoredPrompts:
    """The scored prompts of one response. Prompt i belongs to the choices i * n to i * n + n - 1."""

    def __init__(
        self, tokenization: Tokenization, num_top: int | None, *, n: int, as_ids: bool, is_of_body: bool
    ) -> None:
        """`num_top`: the request's `prompt_logprobs`; None: no field is made. `as_ids`: tokens are named by their ids.
        `is_of_body`: the field stands beside the choices, else in each choice."""
        self._tokenization = tokenization
        self._num_top = num_top
        self._n = max(1, n)
        self._as_ids = as_ids
        self._is_of_body = is_of_body
        self._is_begun = False
        self._prompts: dict[int, ScoredPrompt] = {}

    def add(self, choice: int, prompt: ScoredPrompt) -> None:
        """Add the prompt of a choice."""
        self._prompts[choice // self._n] = prompt

    def of(self, choice: int) -> ScoredPrompt | None:
        return self._prompts.get(choice // self._n)

    def in_choice(self, choice: int) -> Json:
        """Return the field of the first chunk of a choice, or of a whole one."""
        return {} if self._is_of_body else self._field(choice)

    def in_body(self) -> Json:
        """Return the field of the body, once: of the first chunk, or of the whole response."""
        if self._is_begun or not self._is_of_body:
            return {}
        field = self._field(0)
        self._is_begun = bool(field)
        return field

    def _field(self, choice: int) -> Json:
        prompt = self.of(choice)
        if prompt is None or self._num_top is None:
            return {}
        return {"prompt_logprobs": [None, *map(self._position, prompt.tokens())]}

    def _position(self, token: PromptToken) -> Json:
        """Return the token and the most likely ones, by their ids."""
        top = enumerate(token.top[: self._num_top], start=1)
        others = ((token_id, logprob, rank) for rank, (token_id, logprob) in top if token_id != token.token_id)
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self._tokenization.token_name(token_id, as_id=self._as_ids),
            }
            for token_id, logprob, rank in chain([(token.token_id, token.logprob, token.rank)], others)
        }
