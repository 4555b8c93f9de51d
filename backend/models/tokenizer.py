"""Text to token ids and back, and chat messages to text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import tokenizers
from gguf.constants import TokenType
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from kvproof.allocator import InvalidArgument
from kvproof.backend.errors import CheckpointError
from kvproof.backend.models.config import Metadata, ModelConfig

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The names under which chat templates know them."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Immutable, so threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: Path,
        eos_token_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._backend = backend
        self._source = source
        self._special_tokens = special_tokens
        self._chat_template = chat_template

    @classmethod
    def from_folder(cls, path: Path, config: ModelConfig) -> Self:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja in `path`; the last two may be absent."""
        file, settings_file = path / "tokenizer.json", path / "tokenizer_config.json"
        if not file.is_file():
            raise CheckpointError(f"{path}: has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises no narrower one
            raise CheckpointError(f"{file}: unusable: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        settings = Metadata.from_json(settings_file) if settings_file.is_file() else Metadata(path, {})
        named = {name: _content(settings.values.get(name)) for name in SPECIAL_TOKENS}
        return cls(
            backend,
            source=path,
            eos_token_ids=config.eos_token_ids,
            special_tokens={name: token for name, token in named.items() if isinstance(token, str)},
            chat_template=_folder_template(path, settings),
        )

    @classmethod
    def from_gguf(cls, metadata: Metadata, config: ModelConfig) -> Self:
        """From a GGUF file's `tokenizer.*` keys."""
        tokens = metadata.require("tokenizer.ggml.tokens", list)
        ids = {
            "bos_token": config.bos_token_id,
            "eos_token": next(iter(config.eos_token_ids), None),
            "unk_token": metadata.values.get("tokenizer.ggml.unknown_token_id"),
            "pad_token": metadata.values.get("tokenizer.ggml.padding_token_id"),
        }
        named = {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
        try:
            backend = _byte_level_bpe(metadata, tokens, named.get("bos_token"))
        except CheckpointError:
            raise
        except Exception as error:  # the package raises no narrower one
            raise CheckpointError(f"{metadata.source}: unusable tokenizer: {error}") from error
        return cls(
            backend,
            source=metadata.source,
            eos_token_ids=config.eos_token_ids,
            special_tokens=named,
            chat_template=metadata.get("tokenizer.chat_template", str, "") or None,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's own may be larger, where its embedding is padded."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """The token ids of `text`.

        Special tokens such as "<|im_start|>" are recognised in it, as what `chat` renders needs; `allow_special=False`
        reads them as any other text, for text that isn't trusted. A checkpoint that wants a token of beginning gets
        one, unless `text` starts with it already, as chat templates write it. Raises `InvalidArgument` for a `str`
        that isn't Unicode text, with lone surrogates.

        Bytes that the vocabulary has no token for vanish: in SmolLM2 six control characters, and the first bytes of
        U+40000 to U+BFFFF.
        """
        backend = self._backend if allow_special else self._blind_backend
        bos = self._special_tokens.get("bos_token")
        begun = allow_special and bos is not None and text.startswith(bos)
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=not begun).ids
        except TypeError:
            raise InvalidArgument(f"{text!r:.60} is not Unicode text") from None
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that make no character become U+FFFD; ids beyond the vocabulary are skipped."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def chat(self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """`messages`, each with "role" and "content", rendered by the checkpoint's chat template.

        `add_generation_prompt` opens the assistant's turn. Raises `CheckpointError` if the checkpoint has no usable
        template, and `InvalidArgument` if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidArgument(f"the chat template refuses these messages: {error}") from error

    @cached_property
    def _blind_backend(self) -> tokenizers.Tokenizer:
        blind = copy.deepcopy(self._backend)
        blind.encode_special_tokens = True  # sic: encodes their text
        return blind

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise CheckpointError(f"{self._source}: has no chat template")
        # The environment that chat templates are written for is transformers' (utils/chat_template_utils.py).
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            return environment.from_string(self._chat_template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{self._source}: unusable chat template: {error}") from error


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


def _byte_level_bpe(metadata: Metadata, tokens: list[str], bos: str | None) -> tokenizers.Tokenizer:
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
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = SPLITS[pre]
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, metadata.get("tokenizer.ggml.token_type", list, []), strict=False))
    control, defined = ([t for t, kind in typed if kind == k] for k in (TokenType.CONTROL, TokenType.USER_DEFINED))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", bool, llama3):
        backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab[bos])])
    return backend


def _content(token: Any) -> Any:
    """A special token of tokenizer_config.json: a string, or an object that has it as its content."""
    return token.get("content") if isinstance(token, dict) else token


def _folder_template(path: Path, settings: Metadata) -> str | None:
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = settings.values.get("chat_template")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: unusable chat_template.jinja: {error}") from error
    if isinstance(template, list):  # several, each with its name
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
