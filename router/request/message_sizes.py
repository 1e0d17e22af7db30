"""Whether an admitted request still fits one message when all its tokens travel with it. Pure.

A request grows: its client resumes it with the tokens of all choices in one message, and routers give workers the
tokens that are committed. A request is admitted only if the largest of these messages stays within its receiver's
limit.
"""

from dataclasses import dataclass

from cluster.errors import RequestTooLarge

_TOKEN_BYTES = 4
_CHOICE_BYTES = 48  # of a choice without its tokens: tags and lengths, handle, seed, characters, reason of its end
# What a resumed message has more than the first, beside the tokens: sampling, max_tokens, acceptance, resume number.
_ACCEPTED_BYTES = 288
# What a message to a worker has beside tokens: ids, addresses, stop token ids, salt, ticket, holders of prefixes.
_JOB_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class MessageLimits:
    client_bytes: int  # `--max-message-bytes`: the largest message that routers take from a client
    worker_bytes: int  # the largest that workers take from a router

    def most_output(self, num_request_bytes: int, num_prompt: int, num_choices: int) -> int:
        """The largest max_tokens of each choice with which such a request fits; less than 1: none does.

        `num_request_bytes`: of the client's message, without what it resumes from; 0: its client cannot resume it.
        """
        to_worker = self.worker_bytes - _JOB_BYTES - _TOKEN_BYTES * num_prompt
        rooms = [to_worker]
        if num_request_bytes:
            rooms.append(self.client_bytes - _ACCEPTED_BYTES - num_request_bytes)
        return (min(rooms) // num_choices - _CHOICE_BYTES) // _TOKEN_BYTES

    def check(self, num_request_bytes: int, num_prompt: int, num_choices: int, max_tokens: int) -> None:
        """Raises RequestTooLarge."""
        most = self.most_output(num_request_bytes, num_prompt, num_choices)
        if max_tokens <= most:
            return
        change = f"ask for max_tokens of at most {most}, or a smaller n" if most > 0 else "ask for a smaller n"
        raise RequestTooLarge(
            f"with all tokens of {num_choices} x {max_tokens} the request would not fit one message when it is resumed:"
            f" {change}, shorten the prompt, or have the routers started with a larger --max-message-bytes"
            f" ({self.client_bytes} here; workers take {self.worker_bytes})"
        )
