"""Converts token ids to text one token at a time, with exactly the text that decoding all of them at once gives.

`Vocabulary` builds the chain of decoders that `tokenizer.json` names, as incremental steps. Each step holds back only
the text that a later token could still change. A token costs the same however long the text is. Stop strings are
matched elsewhere (text_stream.py). The `tokenizers` library defines what each
decoder does, and the tests compare every step with it.
"""

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

from cluster.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SETTLED_TOKEN = "x"  # stands before a token to make it any but the first


class Step(Protocol):
    """An incremental decoder of the chain. Pieces are tokens or, behind Fuse, consecutive parts of the text."""

    def push(self, piece: str) -> Sequence[str]: ...

    def end(self) -> Sequence[str]: ...


class PerToken:
    """A decoder that maps every token by itself. It asks the library once per distinct token."""

    def __init__(self, component: decoders.Decoder, index: int, settled: dict[tuple[int, str], str]) -> None:
        self._component = component
        self._index = index
        self._settled = settled
        self._first = True

    def push(self, piece: str) -> Sequence[str]:
        if self._first:
            self._first = False
            return (self._component.decode([piece]),)
        key = (self._index, piece)
        text = self._settled.get(key)
        if text is None:
            before = len(self._component.decode([SETTLED_TOKEN]))
            text = self._settled[key] = self._component.decode([SETTLED_TOKEN, piece])[before:]
        return (text,)

    def end(self) -> Sequence[str]:
        return ()


class Joined:
    """Joins tokens by spaces, for a tokenizer without a decoder."""

    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> Sequence[str]:
        text = piece if self._first else " " + piece
        self._first = False
        return (text,)

    def end(self) -> Sequence[str]:
        return ()


class ByteRuns:
    """ByteFallback. A run of byte tokens is text only if all of it is valid UTF-8, so the run is held back until it
    ends."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> Sequence[str]:
        byte = BYTE_TOKEN.fullmatch(piece)
        if byte:
            self._run.append(int(byte[1], 16))
            return ()
        return (*self.end(), piece)

    def end(self) -> Sequence[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


class WordEnds:
    """The step BPEDecoder: it replaces the suffix that ends a word by a space, except after the last token. So it holds
    each token back until the next one."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, piece: str) -> Sequence[str]:
        held, self._held = self._held, piece
        return () if held is None else (held.replace(self._suffix, " "),)

    def end(self) -> Sequence[str]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)


class StripFront:
    """Strip behind Fuse: remove up to `start` characters from the front of the whole text."""

    def __init__(self, content: str, start: int) -> None:
        self._content = content
        self._left = start

    def push(self, piece: str) -> Sequence[str]:
        while self._left and piece.startswith(self._content):
            piece = piece[1:]
            self._left -= 1
        if piece:
            self._left = 0
        return (piece,)

    def end(self) -> Sequence[str]:
        return ()


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet (Radford et al. 2019): printable bytes are their own letter, the others follow from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# Decoders that treat each token by itself, but for a different rule for the first one.
_PER_TOKEN = frozenset({"Replace", "Strip", "Metaspace", "WordPiece"})


class Vocabulary:
    """The token of each id, and the decoder chain that converts tokens to text. It is shared; only its caches
    change."""

    def __init__(self, tokenizer: Tokenizer, markers: Collection[str] = ()) -> None:
        """Prepare to stream this decoder. `markers`: tokens that are text even where they are special. Raises
        ConfigError for a decoder whose text depends on the last token."""
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special and token.content not in markers}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in vocabulary.items() if token not in special}
        self._tokens.update({i: token.content for i, token in added.items() if token.content not in special})
        self._specials = {i: token.content for i, token in added.items() if token.content in special}
        self._specs = _flatten(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None)
        self.is_byte_level = any(spec["type"] == "ByteLevel" for spec in self._specs)
        self._settled: dict[tuple[int, str], str] = {}
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}  # of byte-level tokens that are whole characters, once they were decoded
        self._check_chain()

    def visible_token(self, token_id: int) -> str | None:
        """Return the token of an id; None for special tokens and unknown ids."""
        return self._tokens.get(token_id)

    def token(self, token_id: int) -> str | None:
        """Return the token of an id; None for unknown ids."""
        return self._tokens.get(token_id, self._specials.get(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text when it is not the first token. A special token gives its
        name."""
        token = self._tokens.get(token_id)
        if token is None:
            return self._specials.get(token_id, "").encode()
        if self.is_byte_level:
            return self.byte_level_bytes(token_id, token)
        byte = BYTE_TOKEN.fullmatch(token)
        if byte and self._has("ByteFallback"):
            return bytes([int(byte[1], 16)])
        return self._text([SETTLED_TOKEN, token]).removeprefix(self._text([SETTLED_TOKEN])).encode()

    def byte_level_bytes(self, token_id: int, token: str) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary, in which each letter stands for one byte. A token
        with another letter is encoded as UTF-8."""
        known = self._bytes.get(token_id)
        if known is None:
            letters = self._byte_of_letter
            known = bytes(letters[c] for c in token) if all(c in letters for c in token) else token.encode()
            self._bytes[token_id] = known
        return known

    def new_steps(self) -> list[Step]:
        """Return a new chain for one text."""
        if not self._specs:
            return [Joined()]
        steps: list[Step] = []
        fused = False
        for index, spec in enumerate(self._specs):
            if spec["type"] == "Fuse":
                fused = True
            elif fused:
                steps.append(StripFront(spec["content"], spec["start"]))
            elif spec["type"] == "ByteFallback":
                steps.append(ByteRuns())
            elif spec["type"] == "BPEDecoder":
                steps.append(WordEnds(spec["suffix"]))
            else:
                steps.append(PerToken(self._components[index], index, self._settled))
        return steps

    def _text(self, tokens: Sequence[str]) -> str:
        steps = self.new_steps()
        return "".join([piece for token in tokens for piece in _run(steps, token)] + _end(steps))

    def _has(self, kind: str) -> bool:
        return any(spec["type"] == kind for spec in self._specs)

    def _check_chain(self) -> None:
        kinds = [spec["type"] for spec in self._specs]
        if self.is_byte_level:
            streams = set(kinds) <= {"ByteLevel", "Fuse"}
        else:
            fuse = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
            streams = set(kinds[:fuse]) <= _PER_TOKEN | {"ByteFallback", "BPEDecoder"}
            streams = streams and set(kinds[fuse:]) <= {"Fuse", "Strip"}
            # No model is known to strip its text's end, and the library's own decoder fails there on short texts.
            streams = streams and all(spec.get("stop", 0) == 0 for spec in self._specs[fuse:])
        if not streams:
            raise ConfigError(f"tokenizer.json has the decoder {' + '.join(kinds)}, whose text cannot be streamed")

    @cached_property
    def _components(self) -> list[decoders.Decoder]:
        return [_component(spec) for spec in self._specs]

    @cached_property
    def _byte_of_letter(self) -> Mapping[str, int]:
        return byte_level_alphabet()


class Detokenizer:
    """Detokenizes one text. `push` and `end` return the text that no later token can change."""

    def __init__(self, vocabulary: Vocabulary, *, skips_special_tokens: bool = True) -> None:
        """Start a text. Without `skips_special_tokens`, special tokens are in the text by their names."""
        self._vocabulary = vocabulary
        self._token = vocabulary.visible_token if skips_special_tokens else vocabulary.token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if vocabulary.is_byte_level else None
        self._is_within_character = False  # the last token began a character that it did not end
        self._steps = [] if vocabulary.is_byte_level else vocabulary.new_steps()

    def push(self, token_id: int) -> str:
        if not self._is_within_character and (text := self._vocabulary.whole_texts.get(token_id)) is not None:
            return text
        token = self._token(token_id)
        if token is None:
            return ""
        if self._utf8 is not None:
            return self._decoded(self._utf8, token_id, self._vocabulary.byte_level_bytes(token_id, token))
        return "".join(_run(self._steps, token))

    def end(self) -> str:
        """Return the text that was held back. The text is complete then."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return "".join(_end(self._steps))

    def _decoded(self, utf8: codecs.IncrementalDecoder, token_id: int, token_bytes: bytes) -> str:
        """Decode a token, and keep its text for the next time if it is whole characters: then it depends on no other
        token. Special tokens are not kept, because not every text has them."""
        text = utf8.decode(token_bytes)
        is_whole = not self._is_within_character and text.encode() == token_bytes
        if is_whole and self._vocabulary.visible_token(token_id) is not None:
            self._vocabulary.whole_texts[token_id] = text
        self._is_within_character = bool(utf8.getstate()[0])
        return text


def _run(steps: Sequence[Step], piece: str) -> list[str]:
    pieces: list[str] = [piece]
    for step in steps:
        pieces = [out for item in pieces for out in step.push(item)]
    return pieces


def _end(steps: Sequence[Step]) -> list[str]:
    pieces: list[str] = []
    for step in steps:
        pieces = [out for item in pieces for out in step.push(item)] + list(step.end())
    return pieces


def _flatten(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decoders of a tokenizer.json as a flat list; empty if it has none."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [item for part in spec["decoders"] for item in _flatten(part)]
    return [spec]


def _component(spec: dict[str, Any]) -> decoders.Decoder:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return decoder
