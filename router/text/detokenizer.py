"""Token ids to text, a token at a time, exactly as decoding all of them at once would give it.

Owns the chain of a model's decoders as steps (decoder_steps.py), each of which holds back what a later token could
still change, and nothing else. Every token costs the same however long the text has become. Never looks at stop
strings; never shows a special token.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, decoders

from cluster.errors import ConfigError
from router.text.decoder_steps import (
    BYTE_TOKEN,
    SETTLED_TOKEN,
    ByteRuns,
    Joined,
    PerToken,
    Step,
    StripFront,
    WordEnds,
    byte_level_alphabet,
)

# Decoders that treat each token by itself, but for a different rule for the first one.
_PER_TOKEN = frozenset({"Replace", "Strip", "Metaspace", "WordPiece"})


class Vocabulary:
    """What each id stands for, and the decoder chain that makes text of them. Shared; only its caches change."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a decoder whose text cannot be given before the last token is known."""
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in vocabulary.items() if token not in special}
        self._tokens.update({i: token.content for i, token in added.items() if token.content not in special})
        self._specials = {i: token.content for i, token in added.items() if token.content in special}
        self._specs = _flatten(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None)
        self.is_byte_level = any(spec["type"] == "ByteLevel" for spec in self._specs)
        self._settled: dict[tuple[int, str], str] = {}
        self._bytes: dict[int, bytes] = {}
        self._check_chain()

    def visible_token(self, token_id: int) -> str | None:
        """The vocabulary's string; None for special tokens and for ids that it does not know."""
        return self._tokens.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text when it is not its first; of a special token, its name's."""
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
        """A byte-level token's bytes: its letters stand for bytes, unless one of them is not in that alphabet."""
        known = self._bytes.get(token_id)
        if known is None:
            letters = self._byte_of_letter
            known = bytes(letters[c] for c in token) if all(c in letters for c in token) else token.encode()
            self._bytes[token_id] = known
        return known

    def new_steps(self) -> list[Step]:
        """A fresh chain for one text."""
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
    """One text in the making. Owned by one stream; `push` and `end` give the text that no later token can change."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if vocabulary.is_byte_level else None
        self._steps = [] if vocabulary.is_byte_level else vocabulary.new_steps()

    def push(self, token_id: int) -> str:
        token = self._vocabulary.visible_token(token_id)
        if token is None:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._vocabulary.byte_level_bytes(token_id, token))
        return "".join(_run(self._steps, token))

    def end(self) -> str:
        """What was held back; the text is complete then."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return "".join(_end(self._steps))


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
    """The decoder of a tokenizer.json as a flat list; empty where there is none."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [item for part in spec["decoders"] for item in _flatten(part)]
    return [spec]


def _component(spec: dict[str, Any]) -> decoders.Decoder:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return decoder
