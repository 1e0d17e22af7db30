"""The demo model's text and its tokenizer. The text is the running interpreter's standard library, split by file.

Owns which files are read, which are held out, and how they become one stream of token ids. Never trains a model.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCAB_SIZE = 1024
CONTEXT = 1024

# Left out: test suites (half of the bytes, mostly assertion tables and deliberately broken sources),
# generated character tables, and what is installed beside the library rather than part of it.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "encodings", "pydoc_data", "idle_test", "__pycache__"})
_HELD_OUT_ONE_IN = 20

# A newline takes the whole indentation after it, so a prompt ending in an indent is cut exactly as in
# training; snake_case falls apart at its underscores, so unseen names are made of pieces that were seen.
_SPLIT = r"\n[\n ]*| ?_*\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Messages become Python comments: the model has read nothing else, and this way it has read everything here.
CHAT_TEMPLATE = (
    "{{ '" + END_OF_TEXT + "' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '# assistant:\\n' + message['content'] + '\\n' }}"
    "{% else %}{{ '# ' + message['role'] + ': ' + message['content'].replace('\\n', '\\n# ') + '\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Corpus:
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def read_corpus() -> Corpus:
    """Return the standard library's sources. One file in twenty, chosen by its path's hash, is held out as a whole."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of sources declare an older encoding
        (held_out if _is_held_out(name.as_posix()) else train).append(text)
    return Corpus(train=tuple(train), held_out=tuple(held_out))


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: decoding returns any text unchanged, and no special tokens are added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return all texts in one stream `[tokens]`, with the end-of-text id before each and after the last."""
    ids = [END_OF_TEXT_ID]
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(END_OF_TEXT_ID)
    return np.asarray(ids, dtype=np.int64)


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_ONE_IN == 0
