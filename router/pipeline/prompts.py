"""Tokenizes what a request sends as text: its prompt and its bad words. Long texts are tokenized off the event loop."""

from functools import partial

from cluster.errors import InvalidRequest
from router.request.validation import prompt_field
from router.requests import ChatPrompt, GenerateRequest, TextPrompt, TokenPrompt
from router.text.tokenization import Tokenization, TokenizerThreads

_INLINE_CHARACTERS = 2048  # a longer text is tokenized off the event loop


class Prompts:
    def __init__(self, tokenization: Tokenization, threads: TokenizerThreads) -> None:
        self._tokenization = tokenization
        self._threads = threads

    async def token_ids(self, request: GenerateRequest, rendered_at_us: int) -> tuple[int, ...]:
        """Return the tokens of the prompt that the request keeps. `rendered_at_us`: the time that a chat template
        reads, in microseconds since 1970. Raises InvalidRequest or a subclass, Overloaded.
        """
        try:
            token_ids = await self._whole(request, rendered_at_us)
        except InvalidRequest as error:
            error.param = error.param or prompt_field(request)
            raise
        return truncated(request, token_ids, self._tokenization.model_info.max_model_len)

    async def bad_words(self, request: GenerateRequest) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of its bad words. Raises InvalidRequest, Overloaded."""
        texts = request.sampling.bad_words
        return await self._threads.run(self._tokenization.encode_bad_words, texts) if texts else ()

    async def _whole(self, request: GenerateRequest, rendered_at_us: int) -> tuple[int, ...]:
        is_whole = request.truncate_prompt_tokens is not None  # however long the text is, its end is needed
        match request.prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                if len(text) <= _INLINE_CHARACTERS:
                    return self._tokenization.encode(text)
                encode_text = self._tokenization.encode if is_whole else self._tokenization.encode_prompt
                return await self._threads.run(encode_text, text)
            case ChatPrompt(messages, options):
                encode = partial(
                    self._tokenization.encode_chat, rendered_at_us=rendered_at_us, options=options, is_whole=is_whole
                )
                return await self._threads.run(encode, messages)


def truncated(request: GenerateRequest, prompt_token_ids: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
    """Return the last tokens of a prompt, as many as `truncate_prompt_tokens` keeps."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return prompt_token_ids
    if num_kept == -1:
        num_kept = max(1, max_model_len - (request.stop.max_tokens or 1))
    return prompt_token_ids[-num_kept:]
