"""Hugging Face models on our cache: what their own eager attention generates, token for token, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    T5Config,
)
from transformers.models.llama4 import Llama4TextConfig

from kvproof.backend import Chunk, Engine, EngineBackend, ModelRunner, SamplingParams, llm, plugins
from kvproof.backend.integrations.transformers import TransformersRunner
from kvproof.backend.integrations.transformers_interface import Mask, NotInAStep
from kvproof.backend.integrations.transformers_probe import window_of
from kvproof.backend.llm import load_runner
from kvproof.backend.models.checkpoint import CheckpointError, UnsupportedModel, open_checkpoint
from kvproof.backend.models.llama import LlamaRunner
from kvproof.cli import main
from kvproof.fuzz.conformance import runner_checks

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 61
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
}
WINDOW = 11
MAX_TOKENS = 16

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "gemma": GemmaConfig(**TINY, head_dim=16),
    "gemma2, capped, windowed": Gemma2Config(
        **TINY, head_dim=16, query_pre_attn_scalar=40, attn_logit_softcapping=2.0, sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 2,
    ),
    "gemma2, capped, every other layer windowed": Gemma2Config(
        **TINY, head_dim=16, query_pre_attn_scalar=40, attn_logit_softcapping=2.0, sliding_window=WINDOW
    ),
    "gemma3, one layer windowed": Gemma3TextConfig(
        **TINY, head_dim=16, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]
    ),
    "mistral, windowed": MistralConfig(**TINY, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4, sliding_window=None),
    "phi": PhiConfig(**TINY, partial_rotary_factor=0.5),
    "gpt_neox": GPTNeoXConfig(**TINY),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5, eos_token_id=5
    ),
    "stablelm": StableLmConfig(**TINY),
}  # fmt: skip


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random in every tensor, where transformers leaves norms at one and biases at zero."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=float(name.endswith("weight")), std=0.2)
    return model.train(False)


def prompts() -> list[list[int]]:
    """From one token to four windows; most begin like another one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(6, VOCABULARY, (200,), generator=generator).tolist()
    common = tokens[:21]
    return [
        tokens[:1],
        tokens[50:52],
        *(common[:n] + tokens[100 + n : 102 + n] for n in (3, 9, 14)),
        common + tokens[60:65],
        common + tokens[65:67],
        common + tokens[60:80],
        tokens[120:165],
    ]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """What transformers' greedy search makes of it alone."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


def serve(runner: ModelRunner, prefix_caching: bool = True) -> Engine:
    """An engine in whose pool only the longest of `prompts` fits, so that little else is computed in peace."""
    longest = max(map(len, prompts())) + MAX_TOKENS
    return Engine(
        runner,
        num_blocks=-(-longest // 3)
        + (runner.spec.window is not None),  # where a window has left, there is a null block
        block_size=3,
        prefix_caching=prefix_caching,
        max_num_seqs=9,
        max_num_batched_tokens=19,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_eager_attention(family: str) -> None:
    model = random_model(FAMILIES[family])
    expected = [generated(model, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) >= 8, "too simple a model to tell prompts apart"
    engine = serve(TransformersRunner(model))
    requests = [engine.add(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts()]
    for _ in engine.run():
        pass
    assert [request.output_token_ids for request in requests] == expected
    engine.manager.check()
    assert engine.manager.num_used == 0
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hit_tokens > 0
    assert engine.backend.spec.window == (WINDOW if family.endswith(", windowed") else None)


test_a_runner_like_any_other = runner_checks(TransformersRunner(random_model(FAMILIES["gpt_neox"])), examples=10)


def test_copies_reach_the_layers_of_every_window() -> None:
    """Two sequences part ways within a block: the one that writes first gets a copy of it."""
    runner = TransformersRunner(random_model(FAMILIES["gemma3, one layer windowed"]))
    backend = EngineBackend(
        runner.spec.cache_spec(num_blocks=16, block_size=4), layer_windows=runner.spec.layer_windows
    )
    manager = backend.manager

    def step(*chunks: Chunk) -> Tensor:
        logits = runner.forward(backend.begin(chunks))
        backend.end(chunks)
        return logits

    tokens = prompts()[4][:6]
    parent, *alone = (manager.sequence(text) for text in (tokens, [*tokens, 7], [*tokens, 8]))
    for seq in (parent, *alone):
        manager.admit(seq)
    step(Chunk(parent, 6))
    child = manager.fork(parent)
    for seq, token in ((parent, 7), (child, 8)):
        seq.append(token)
        assert manager.reserve(seq)
    forked = step(Chunk(parent, 1), Chunk(child, 1))
    assert parent.block_table[0] == child.block_table[0]
    assert parent.block_table[1] != child.block_table[1]
    torch.testing.assert_close(forked, step(*(Chunk(seq, 7) for seq in alone)), rtol=1e-4, atol=1e-4)


def test_what_the_config_asks_for_is_in_the_cache() -> None:
    spec = TransformersRunner(random_model(FAMILIES["gemma2, capped, windowed"])).spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 2, 16)
    assert (spec.scale, spec.soft_cap, spec.window) == (pytest.approx(40**-0.5), 2.0, WINDOW)
    assert (spec.num_layers, spec.vocab_size, spec.max_length, spec.eos_token_ids) == (2, VOCABULARY, 128, (5,))
    both = TransformersRunner(random_model(FAMILIES["gemma3, one layer windowed"])).spec
    assert (both.window, both.layer_windows) == (None, (None, WINDOW))
    long = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig(**TINY, rope_parameters=long | {"factor": 4.0, "original_max_position_embeddings": 32})
    assert TransformersRunner(random_model(config)).spec.max_length == 32


BART = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "ALiBi": (BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), "interface (ALiBi)"),
    "Mamba": (MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2), "layers with a recurrent state"),
    "MLA": (
        DeepseekV3Config(**TINY, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
        "latent attention (MLA)",
    ),
    "sinks": (GptOssConfig(**TINY, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "attention sinks"),
    "bidirectional": (BertConfig(**TINY), "attention that is not causal"),
    "chunked": (
        Llama4TextConfig(
            **TINY, head_dim=8, attention_chunk_size=16, num_local_experts=2, layer_types=["chunked_attention"] * 2,
            intermediate_size_mlp=48,
        ),
        "chunked attention",
    ),
    "scales": (
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, scale_attn_by_inverse_layer_idx=True),
        "layers of different scale",
    ),
    "convolutions": (
        Lfm2Config(**TINY, layer_types=["conv", "full_attention"]), "a model of 2 layers with attention in 1",
    ),
    "an encoder": (
        BartConfig(**BART, is_encoder_decoder=False, is_decoder=True, max_position_embeddings=64),
        "with attention in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    config, feature = REFUSED[case]
    with pytest.raises(UnsupportedModel) as caught:
        TransformersRunner(random_model(config))
    assert str(caught.value).startswith(f"{config.model_type}: the transformers runner does not support ")
    assert feature in str(caught.value)


@pytest.mark.parametrize(
    ("sees", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), 5),
        (lambda b, h, q, k: (k <= q) & (k > q - 40), None),
        (lambda b, h, q, k: (k <= q) & (k > q - 39), 39),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), "chunked attention"),
        (lambda b, h, q, k: k <= q + 1, "attention that is not causal"),
        (lambda b, h, q, k: (k <= q) & (k % 2 == q % 2), "attention that is not causal"),
        (lambda b, h, q, k: (k <= q) & ((k > q - 5) | (k < 2)), "attention that is not causal"),
    ],
)
def test_the_window_of_a_mask(sees: Any, window: int | str | None) -> None:
    if isinstance(window, str):
        with pytest.raises(UnsupportedModel, match=window):
            window_of(Mask(sees), 40)
    else:
        assert window_of(Mask(sees), 40) == window


class Positionless(nn.Module):
    """Wraps the inner model of a causal one, and has it find positions for itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *, position_ids: Tensor, **options: Any) -> Any:
        return self.inner(**options)


class Mixing(nn.Linear):
    """A projection that also hears the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, dims=1))


@pytest.mark.parametrize("how", ["finds positions for itself", "mixes neighbours"])
def test_a_model_that_cannot_be_computed_in_steps_is_refused(how: str) -> None:
    """Nothing in what it asks of attention tells."""
    model: Any = random_model(FAMILIES["llama"])
    if how == "mixes neighbours":
        model.model.layers[0].mlp.up_proj.__class__ = Mixing
    else:
        model.model = Positionless(model.model)
    with pytest.raises(UnsupportedModel, match="logits that depend on how a step is put together"):
        TransformersRunner(model)


def test_the_model_belongs_to_the_runner() -> None:
    model = random_model(FAMILIES["llama"])
    TransformersRunner(model)
    with pytest.raises(NotInAStep, match="runs on a TransformersRunner only"):
        model(torch.tensor([[7]]))


# ---- from a folder


def write_folder(path: Path, config: PreTrainedConfig) -> Path:
    """A model with a tokenizer of words: its token 7 is "w7"."""
    random_model(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    return path


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_the_command_line_takes_any_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, FAMILIES["gpt_neox"])
    expected = generated(random_model(FAMILIES["gpt_neox"]), prompts()[4])
    argv = ["generate", "--model", str(folder), "--prompt", text(prompts()[4]), "--max-tokens", str(MAX_TOKENS)]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == expected
    assert main([*argv, "--runner", "llama"]) == 1
    assert "architecture 'gpt_neox' is not supported, only llama, qwen2, qwen3" in capsys.readouterr().err
    assert main([*argv, "--runner", "absent"]) == 1
    assert "unknown model runner 'absent', known are: llama, transformers" in capsys.readouterr().err


WINDOWED_QWEN2 = Qwen2Config(**TINY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0)


@pytest.mark.parametrize(
    ("config", "name", "kind"),
    [
        (FAMILIES["qwen2"], "auto", LlamaRunner),
        (FAMILIES["qwen2"], "transformers", TransformersRunner),
        (WINDOWED_QWEN2, "auto", TransformersRunner),
    ],
)
def test_the_native_runner_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: PreTrainedConfig, name: str, kind: type
) -> None:
    monkeypatch.setattr(llm, "plugins", lambda group: dict(reversed(plugins(group).items())))  # not by its name only
    folder = write_folder(tmp_path, config)
    assert isinstance(load_runner(open_checkpoint(folder), "float32", runner=name), kind)
    expected = generated(random_model(config), prompts()[6])
    model = llm.LLM(str(folder), runner=name, block_size=4)
    (completion,) = model.generate([text(prompts()[6])], SamplingParams(max_tokens=MAX_TOKENS))
    assert completion.token_ids == expected


def test_gguf_files_are_for_the_native_runner() -> None:
    with pytest.raises(UnsupportedModel, match=r"\.gguf: the transformers runner takes Hugging Face folders only"):
        load_runner(open_checkpoint("smollm2"), "float32", runner="transformers")


def test_every_refusal_is_told(tmp_path: Path) -> None:
    T5Config(vocab_size=VOCABULARY).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load_runner(open_checkpoint(tmp_path), "float32")
    assert "llama runs llama, qwen2, qwen3, not 't5'" in str(caught.value)
    assert "t5: the transformers runner does not support encoder-decoder models" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "transformers can't load it"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), "transformers can't load it"),
        (lambda f: rewrite(f, lambda w: w.pop("gpt_neox.layers.1.mlp.dense_4h_to_h.bias")), "dense_4h_to_h.bias' is m"),
        (lambda f: rewrite(f, lambda w: w.update({"embed_out.weight": torch.ones(9, 9)})), "can't load it"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    """transformers itself would go on with random weights where some are missing."""
    damage(write_folder(tmp_path, FAMILIES["gpt_neox"]))
    with pytest.raises(CheckpointError) as caught:
        TransformersRunner.load(open_checkpoint(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_smollm2(smollm2: LlamaForCausalLM) -> None:
    """A real model."""
    tokenizer = open_checkpoint("smollm2").tokenizer()
    question = "Answer in one short sentence: what is the "
    texts = ("The capital of France is", "1, 2, 3, 4, 5, 6,", question + "largest planet?", question + "boiling point?")
    asked = [tokenizer.encode(text) for text in texts]
    expected = [generated(smollm2, prompt) for prompt in asked]
    assert tokenizer.decode(expected[0]).startswith(" Paris")
    engine = Engine(TransformersRunner(smollm2), num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=11)
    requests = [engine.add(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in asked]
    for _ in engine.run():
        pass
    assert [request.output_token_ids for request in requests] == expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hit_tokens > 0
