"""Text to token ids and back, and chat messages to text."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers

from kvproof.allocator import InvalidArgument
from kvproof.backend.errors import CheckpointError
from kvproof.backend.models.chat_template import compile_chat_template
from kvproof.backend.models.config import Metadata, ModelConfig
from kvproof.backend.models.gguf_tokenizer import byte_level_bpe

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The names under which chat templates know them."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Immutable, so threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: Path,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        self._source = source
        self._special_tokens = special_tokens
        self._chat_template = chat_template

    @classmethod
    def from_folder(cls, path: Path) -> Self:
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
            backend = byte_level_bpe(metadata, tokens, named.get("bos_token"))
        except CheckpointError:
            raise
        except Exception as error:  # the package raises no narrower one
            raise CheckpointError(f"{metadata.source}: unusable tokenizer: {error}") from error
        return cls(
            backend,
            source=metadata.source,
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
            reason = " ".join(str(error).splitlines())
            raise InvalidArgument(f"the chat template refuses these messages: {reason}") from error

    @cached_property
    def _blind_backend(self) -> tokenizers.Tokenizer:
        blind = copy.deepcopy(self._backend)
        blind.encode_special_tokens = True  # sic: encodes their text
        return blind

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise CheckpointError(f"{self._source}: has no chat template")
        try:
            return compile_chat_template(self._chat_template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{self._source}: unusable chat template: {error}") from error


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
