"""Converts prompts and chats to token ids as the model's files define.

Owns the tokenizer and the threads that encode long texts off the event loop. Every method of
`Tokenization` is a pure function and safe to call from several threads. The library holds the GIL while it encodes one
text and releases it for a list of texts, so every text is encoded as a list of one.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tokenizers import Tokenizer

from cluster.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    NoChatTemplate,
    NoTokenizer,
    Overloaded,
)
from cluster.grammar.tokenizer_files import locate, read_json, read_tokenizer, tokenizer_digest
from cluster.request_size import NO_LIMITS, LengthLimits
from router.requests import (
    NO_CHAT_OPTIONS,
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    GenerateRequest,
    TextPrompt,
    TokenPrompt,
)
from router.text.chat_template import ChatTemplate, read_chat_template, special_tokens
from router.text.detokenizer import Detokenizer, Vocabulary
from router.text.model_files import ModelInfo, model_info
from router.text.text_stream import TextStream

_HEAD_CHARACTERS = 16  # per token of the context: a prompt that is longer is judged by its beginning first
_HEAD_MARGIN = 2  # a cut changes adjacent tokens, but fewer than the context has
_INLINE_CHARACTERS = 2048  # a longer text is tokenized off the event loop


class Tokenization:
    """The tokenization of one model. A model without a `tokenizer.json` is served in token ids, without text."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        markers: Collection[str] = (),
    ) -> None:
        """`special_tokens`: by the names that chat templates have for them. `markers`: tokens that are text even where
        the tokenizer counts them as special."""
        self.model_info = info
        self._special_tokens = dict(special_tokens or {})
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.marker_token_ids = _marker_token_ids(tokenizer, markers) if tokenizer is not None else {}
        self._vocabulary = Vocabulary(tokenizer, markers) if tokenizer is not None else None

    @staticmethod
    def load(
        model: str,
        *,
        revision: str = "",
        served_model_name: str = "",
        max_model_len: int = 0,
        lengths: LengthLimits = NO_LIMITS,
        markers: Collection[str] = (),
    ) -> "Tokenization":
        """Load from a local folder or a hub name, whose small files are downloaded. Raises ConfigError."""
        folder = locate(model, revision)
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        tokenizer = read_tokenizer(folder)
        chat_template = read_chat_template(folder, tokenizer_config) if tokenizer is not None else None
        info = model_info(
            model,
            folder,
            served_model_name=served_model_name,
            max_model_len=max_model_len,
            has_chat_template=chat_template is not None,
        )
        info = replace(info, lengths=lengths, tokenizer_digest=_text_digest(tokenizer_digest(folder), markers))
        named = special_tokens(tokenizer_config)
        return Tokenization(info, tokenizer, chat_template, special_tokens=named, markers=markers)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a text, by default with the special tokens that the tokenizer's post-processor adds. Raises
        NoTokenizer, InvalidRequest."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode as `encode` does. Of a text that is far too long, only the beginning is encoded. Raises
        ContextLengthExceeded too."""
        self._check_head(text)
        return self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        rendered_at_us: int,
        options: ChatOptions = NO_CHAT_OPTIONS,
        *,
        is_whole: bool = False,
    ) -> tuple[int, ...]:
        """Render a conversation, up to the start of the assistant's turn, and encode it. Only the template adds special
        tokens. `rendered_at_us`: the present for the template, in microseconds since 1970. `is_whole`: a text that is
        far too long is encoded too.

        Raises NoTokenizer, NoChatTemplate, InvalidRequest, ContextLengthExceeded.
        """
        self._need_tokenizer()
        template = self._template(options)
        if template is None:
            name = self.model_info.name
            raise NoChatTemplate(f"the model {name} has no chat template: send a prompt instead of messages")
        if not messages:
            raise InvalidRequest("messages must not be empty")
        text = template.render(messages, rendered_at_us, options)
        if not is_whole:
            self._check_head(text)
        return self._encode(text, add_special_tokens=False)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, once at the beginning of a text and once behind a space. Raises NoTokenizer,
        InvalidRequest.
        """
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        return tuple(dict.fromkeys(self._encode(text, add_special_tokens=False) for text in texts))

    def prompt_end(self, chat: ChatPrompt) -> str:
        """Return the end of the prompt that a conversation gives: what the template writes before the assistant's
        answer, or the message that is continued. Raises InvalidRequest."""
        if chat.options.continue_final_message:
            return chat.messages[-1].content
        template = self._template(chat.options)
        return template.generation_prompt(chat.options) if template is not None else ""

    def _template(self, options: ChatOptions) -> ChatTemplate | None:
        if options.template is None:
            return self._chat_template
        try:
            return ChatTemplate(options.template, self._special_tokens)
        except ConfigError as error:
            raise InvalidRequest(f"chat_template: {error.message}", param="chat_template") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, without special tokens. Raises NoTokenizer, InvalidRequest."""
        if any(not 0 <= token_id < self.model_info.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be from 0 to {self.model_info.vocab_size - 1}")
        return self._need_tokenizer().decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text. A special token gives its name. Empty without a tokenizer."""
        return self._vocabulary.token_bytes(token_id) if self._vocabulary is not None else b""

    def token_name(self, token_id: int, *, as_id: bool = False) -> str:
        """Return the token's text. Bytes that are no valid text alone give `bytes:\\xe2`. With `as_id`, and for models
        without a tokenizer, return `token_id:7`."""
        if as_id or not self.model_info.has_tokenizer:
            return f"token_id:{token_id}"
        as_bytes = self.token_bytes(token_id)
        try:
            return as_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in as_bytes)

    def text_stream(
        self,
        stop: tuple[str, ...],
        min_tokens: int,
        *,
        includes_stop: bool = False,
        skips_special_tokens: bool = True,
    ) -> TextStream:
        """Return the text stream of one choice, cut before a stop string or, with `includes_stop`, after it. Raises
        NoTokenizer for stop strings without a tokenizer."""
        if stop:
            self._need_tokenizer()
        vocabulary = self._vocabulary
        detokenizer = Detokenizer(vocabulary, skips_special_tokens=skips_special_tokens) if vocabulary else None
        return TextStream(detokenizer, stop, min_tokens, includes_stop=includes_stop)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        tokenizer = self._need_tokenizer()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text has half of a surrogate pair at character {error.start}") from error
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _check_head(self, text: str) -> None:
        """Refuse a text whose beginning alone far exceeds the model's context. Raises
        ContextLengthExceeded, with an estimate of the tokens."""
        max_model_len = self.model_info.max_model_len
        num_characters = _HEAD_CHARACTERS * max_model_len
        if len(text) <= num_characters:
            return
        num_tokens = len(self._encode(text[:num_characters], add_special_tokens=False))
        if num_tokens > _HEAD_MARGIN * max_model_len:
            raise ContextLengthExceeded(
                f"the first {num_characters} of the prompt's {len(text)} characters are {num_tokens} tokens;"
                f" this model's maximum context length is {max_model_len} tokens",
                num_prompt=num_tokens * len(text) // num_characters,
                most=max_model_len - 1,
            )

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            name = self.model_info.name
            raise NoTokenizer(f"the model {name} has no tokenizer: send token ids, not text, and no stop strings")
        return self._tokenizer


def _marker_token_ids(tokenizer: Tokenizer, markers: Collection[str]) -> dict[str, int]:
    """Return the markers that grammars take for tokens of their own: special tokens, and added ones between angle
    brackets. No other text of a grammar holds them."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        token.content: token_id
        for token_id, token in added
        if token.content in markers and (token.special or (token.content[0], token.content[-1]) == ("<", ">"))
    }


def _text_digest(digest: str, markers: Collection[str]) -> str:
    """Return a digest that is equal on routers that make the same text of the same tokens."""
    return hashlib.sha256((digest + "".join(sorted(markers))).encode()).hexdigest() if digest and markers else digest


_NUM_THREADS = 2
_MAX_WAITING = 4096  # callers; those of generations are bounded by --max-live-requests
_RETRY_AFTER_S = 1.0

Given = TypeVar("Given")
Made = TypeVar("Made")


class TokenizerThreads:
    """A few threads that tokenize texts. A text waits for a thread on the event loop, where its caller can be
    cancelled."""

    def __init__(self, num_threads: int = _NUM_THREADS, *, max_waiting: int = _MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "tokenize")
        self._free = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def run(self, call: Callable[[Given], Made], given: Given) -> Made:
        """Run `call(given)` on a thread. Raises Overloaded, and the error of the call. A cancelled caller leaves the
        thread busy until the call has ended."""
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting} texts wait to be tokenized; try again", retry_after_s=_RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, call, given)
        working.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(working)


class Prompts:
    """Tokenizes what a request sends as text: its prompt and its bad words."""

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
            error.param = error.param or request.prompt_field
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
