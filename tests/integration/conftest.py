"""What several integration tests run on: SmolLM2 as other engines read it, and a real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from kvproof.backend.models.checkpoint import open_checkpoint

TIMEOUT = 1200  # seconds; an engine whose blocks have leaked waits for ever


def smollm2_of_transformers() -> LlamaForCausalLM:
    """In float32, with the weights that our own runner has."""
    checkpoint = open_checkpoint("smollm2")
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_size,
            num_key_value_heads=config.num_kv_heads, max_position_embeddings=config.max_length, eos_token_id=2,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, tie_word_embeddings=True,
            rms_norm_eps=config.rms_norm_eps, bos_token_id=1, attn_implementation="eager",
        )
    )  # fmt: skip
    assert model.load_state_dict(dict(checkpoint.tensors()), strict=False).missing_keys == ["lm_head.weight"]  # tied
    return model


@pytest.fixture
def smollm2() -> LlamaForCausalLM:
    return smollm2_of_transformers()


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a folder, for vLLM, which takes no GGUF file."""
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2_of_transformers().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("KVPROOF_VLLM_PYTHON")
    if not python:
        pytest.skip("KVPROOF_VLLM_PYTHON names no interpreter that has vLLM")
    return python


@pytest.fixture(scope="session")
def vllm_answers(
    vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """`vllm_answers(jobs, **environment)`: what each job gave, see `vllm_generate.py`, and vLLM's log."""

    def run(jobs: list[dict[str, Any]], **environment: str) -> tuple[list[dict[str, Any]], str]:
        script, file = Path(__file__).with_name("vllm_generate.py"), tmp_path_factory.mktemp("jobs") / "jobs.json"
        file.write_text(json.dumps(jobs), encoding="utf-8")
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [vllm_python, str(script), str(file)],
            env=os.environ | settings | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = done.stdout.splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"token_ids"')], done.stdout + done.stderr

    return run
