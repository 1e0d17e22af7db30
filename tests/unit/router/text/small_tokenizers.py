"""Tokenizers of every family that Tandem streams, built here so that tests need no download."""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from router.text.detokenizer import byte_level_alphabet


def byte_level() -> Tokenizer:
    """Return a tokenizer like GPT-2's: every byte is a token; some merges cut characters in two; there are an added
    token and two special ones.
    """
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    words = ["hello", " world", "é", "日", "本", "\n\n"]
    vocab = {letters[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in words:
        spelled = [letters[byte] for byte in word.encode()]
        while len(spelled) > 1:
            pair = (spelled[0], spelled[1])
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
            spelled = ["".join(pair), *spelled[2:]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("naïve 日", normalized=False)])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Return a tokenizer like Llama 2's: a space is ▁, unknown characters fall back to bytes, one leading space is
    stripped.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "é", "日", "▁a", "ab", "▁ab", "▁▁", "\n", "."]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def gemma_like() -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def stripped_twice() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
        )
    )


def byte_fallback_then_metaspace() -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def metaspace() -> Tokenizer:
    """Return a tokenizer like T5's."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.0), ("a", -2.0), ("b", -2.0), ("▁▁b", -3.0), ("日", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a tokenizer like BERT's, with its clean-up of spaces before punctuation."""
    words = ["[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##s", "do", "not", "do not", ".", ",", "?", "n't", "'s", "'"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def word_ends() -> Tokenizer:
    """Return a tokenizer like the first GPT's: a word's last token has a suffix."""
    vocab = {"<unk>": 0, "lo": 1, "low</w>": 2, "er</w>": 3, "</w>": 4, "w": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    builder.__name__: builder
    for builder in (
        byte_level,
        sentencepiece,
        gemma_like,
        stripped_twice,
        byte_fallback_then_metaspace,
        metaspace,
        word_piece,
        word_ends,
        no_decoder,
    )
}
