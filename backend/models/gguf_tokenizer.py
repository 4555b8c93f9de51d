"""The tokenizer of a GGUF file: byte-level BPE, split into words first in the way that the file names."""

from __future__ import annotations

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from kvproof.backend.errors import CheckpointError
from kvproof.backend.models.config import Metadata

GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _regex_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LETTERS_AND_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPLITS = {
    "gpt-2": GPT2_SPLIT,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT]),
    "llama-bpe": _regex_split(rf"{LETTERS_AND_CONTRACTIONS}|\p{{N}}{{1,3}}|{PUNCTUATION_AND_SPACES}"),
    "qwen2": _regex_split(rf"{LETTERS_AND_CONTRACTIONS}|\p{{N}}|{PUNCTUATION_AND_SPACES}"),
}
"""How text is cut into words before byte-pair merging, by the name in `tokenizer.ggml.pre`."""


def byte_level_bpe(metadata: Metadata, tokens: list[str], bos: str | None) -> Tokenizer:
    """The tokenizer of a GGUF file's `tokenizer.ggml.*` keys, with `tokens` as its vocabulary.

    `bos` is put before every text where the file wants that. Raises `CheckpointError` if it is of another kind than
    byte-level BPE, or split in a way not known here.
    """
    kind, pre = metadata.require("tokenizer.ggml.model", str), metadata.get("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or pre not in SPLITS:
        raise CheckpointError(
            f"{metadata.source}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported, only gpt2 with "
            f"{', '.join(SPLITS)}"
        )
    metadata.refuse("tokenizer.ggml.add_space_prefix", unless=False)
    metadata.refuse("tokenizer.ggml.add_eos_token", unless=False)
    llama3 = pre == "llama-bpe"
    merges = [tuple(merge.split(" ")) for merge in metadata.require("tokenizer.ggml.merges", list)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = SPLITS[pre]
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, metadata.get("tokenizer.ggml.token_type", list, []), strict=False))
    control, defined = ([t for t, kind in typed if kind == k] for k in (TokenType.CONTROL, TokenType.USER_DEFINED))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
    if metadata.get("tokenizer.ggml.add_bos_token", bool, llama3):
        if bos is None:
            raise CheckpointError(f"{metadata.source}: texts are to begin with a token that the file doesn't name")
        backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab[bos])])
    return backend
