"""The whole of what kvproof asks of a plugin's tests, and that the model is GPT-2."""

from __future__ import annotations

from pathlib import Path

import torch
from kvproof_example.attention import RowAttention
from kvproof_example.policy import SegmentedLRU
from kvproof_example.runner import GPT2Runner
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel

from kvproof.backend import Step
from kvproof.backend.models.checkpoint import open_checkpoint
from kvproof.fuzz.conformance import attention_checks, policy_checks, runner_checks

torch.set_num_threads(1)  # the checks compute with tiny tensors

CONFIG = GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5)


def random_runner() -> GPT2Runner:
    weights = GPT2LMHeadModel(CONFIG).state_dict()
    return GPT2Runner(
        CONFIG.to_dict(), {name.removeprefix("transformer."): w for name, w in weights.items()}, "float32", "cpu"
    )


test_attention = attention_checks(RowAttention, examples=5)
test_policy = policy_checks(SegmentedLRU, examples=5)
test_runner = runner_checks(random_runner(), examples=5)


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence that is computed whole."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(CONFIG).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 61, (50,))
    everywhere = torch.arange(50)
    got = GPT2Runner.load(open_checkpoint(tmp_path)).forward(Step(ids, everywhere, everywhere, causal))
    torch.testing.assert_close(got, model(ids[None]).logits[0], rtol=1e-4, atol=1e-3)
