"""How long a request may be by the operator's word: asked by routers at admission, and by workers again. Pure."""

from dataclasses import dataclass

from cluster.errors import InvalidRequest, PromptTooLong


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """`--max-input-length` and `--max-output-length`; 0: no limit of its own beside `--max-model-len`."""

    max_input_length: int = 0
    max_output_length: int = 0

    def most_output(self, room: int) -> int:
        """Of the tokens that the context has room for, those that may be generated."""
        return min(room, self.max_output_length or room)

    def refusal(self, num_input: int, max_tokens: int) -> InvalidRequest | None:
        if 0 < self.max_input_length < num_input:
            return PromptTooLong(f"the prompt has {num_input} tokens; at most {self.max_input_length} are taken here")
        if 0 < self.max_output_length < max_tokens:
            return InvalidRequest(
                f"max_tokens is {max_tokens}; at most {self.max_output_length} tokens are generated here"
            )
        return None


NO_LIMITS = LengthLimits()
