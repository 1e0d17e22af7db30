"""Between text and token ids, as the model's own files say: prompts in, chats in, text out.

Owns the tokenizer, the chat template and what config.json says of the model. Everything here is a pure function of its
arguments and safe to call from several threads; a long prompt takes long, so the pipeline encodes off its event loop.
The library keeps Python's lock while it encodes one text, and gives it back for a list of texts: all are lists of one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from cluster.errors import ConfigError, InvalidRequest, NoChatTemplate, NoTokenizer, PromptTooLong
from cluster.settings.lengths import NO_LIMITS, LengthLimits
from router.requests import ChatMessage
from router.text.chat_template import ChatTemplate, read_chat_template
from router.text.detokenizer import Detokenizer, Vocabulary
from router.text.model_files import ModelInfo, locate, model_info, read_json
from router.text.text_stream import TextStream

_HEAD_CHARACTERS = 16  # per token of the context: a prompt that is longer is judged by its beginning first
_HEAD_MARGIN = 2  # a cut changes the tokens beside it, never as many as the context has


class Tokenization:
    """One model's. A model without a `tokenizer.json` has one too: it serves token ids and gives no text."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None) -> None:
        self.model_info = info
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None

    @staticmethod
    def load(
        model: str, *, served_model_name: str = "", max_model_len: int = 0, lengths: LengthLimits = NO_LIMITS
    ) -> "Tokenization":
        """Of a local folder or a hub name, whose small files are fetched. Raises ConfigError."""
        folder = locate(model)
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        tokenizer = _read_tokenizer(folder, tokenizer_config)
        chat_template = read_chat_template(folder, tokenizer_config) if tokenizer is not None else None
        info = model_info(
            model,
            folder,
            served_model_name=served_model_name,
            max_model_len=max_model_len,
            has_chat_template=chat_template is not None,
        )
        digest = _tokenizer_digest(folder, tokenizer_config) if tokenizer is not None else ""
        return Tokenization(replace(info, lengths=lengths, tokenizer_digest=digest), tokenizer, chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the tokenizer's post-processor adds. Raises NoTokenizer, InvalidRequest."""
        return self._encode(text, add_special_tokens=True)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """As `encode`. A text that is far too long costs no more than its beginning. Raises PromptTooLong too."""
        self._check_head(text)
        return self.encode(text)

    def encode_chat(self, messages: Sequence[ChatMessage], rendered_at_us: int) -> tuple[int, ...]:
        """The conversation and the opening of the assistant's turn; the special tokens are the template's alone. The
        template takes `rendered_at_us`, microseconds since 1970, for the present.

        Raises NoTokenizer, NoChatTemplate, InvalidRequest, PromptTooLong.
        """
        self._need_tokenizer()
        if self._chat_template is None:
            name = self.model_info.name
            raise NoChatTemplate(f"the model {name} has no chat template: send a prompt instead of messages")
        if not messages:
            raise InvalidRequest("messages must not be empty")
        text = self._chat_template.render(messages, rendered_at_us)
        self._check_head(text)
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens. Raises NoTokenizer, InvalidRequest."""
        if any(not 0 <= token_id < self.model_info.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be from 0 to {self.model_info.vocab_size - 1}")
        return self._need_tokenizer().decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text; a special token gives its name. Empty without a tokenizer."""
        return self._vocabulary.token_bytes(token_id) if self._vocabulary is not None else b""

    def text_stream(self, stop: tuple[str, ...], min_tokens: int) -> TextStream:
        """One choice's text from its tokens, cut at a stop string. Raises NoTokenizer for stop strings without one."""
        if stop:
            self._need_tokenizer()
        return TextStream(Detokenizer(self._vocabulary) if self._vocabulary is not None else None, stop, min_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        tokenizer = self._need_tokenizer()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text holds half of a surrogate pair at character {error.start}") from error
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _check_head(self, text: str) -> None:
        """Raises PromptTooLong where the beginning alone is far more than the model's context."""
        max_model_len = self.model_info.max_model_len
        num_characters = _HEAD_CHARACTERS * max_model_len
        if len(text) <= num_characters:
            return
        num_tokens = len(self._encode(text[:num_characters], add_special_tokens=False))
        if num_tokens > _HEAD_MARGIN * max_model_len:
            raise PromptTooLong(
                f"the first {num_characters} of the prompt's {len(text)} characters are {num_tokens} tokens;"
                f" the context is {max_model_len}"
            )

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            name = self.model_info.name
            raise NoTokenizer(f"the model {name} has no tokenizer: send token ids, not text, and no stop strings")
        return self._tokenizer


def _tokenizer_digest(folder: Path, tokenizer_config: dict[str, object]) -> str:
    """Equal on routers that make the same text of the same tokens, whatever version of the library they run."""
    added = json.dumps(tokenizer_config.get("added_tokens_decoder"), sort_keys=True)
    return hashlib.sha256((folder / "tokenizer.json").read_bytes() + added.encode()).hexdigest()


def _read_tokenizer(folder: Path, tokenizer_config: dict[str, object]) -> Tokenizer | None:
    """The tokenizer of `tokenizer.json`, with the tokens that only `tokenizer_config.json` adds."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ConfigError(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer_config.get("added_tokens_decoder")
    for token_id, token in sorted(added.items(), key=lambda item: int(item[0])) if isinstance(added, dict) else ():
        content = token["content"]
        if tokenizer.token_to_id(content) is None:
            tokenizer.add_tokens([AddedToken(**token)])
        if tokenizer.token_to_id(content) != int(token_id):
            raise ConfigError(f"{folder}: tokenizer.json and tokenizer_config.json disagree on the id of {content!r}")
    return tokenizer
