"""vLLM with our attention backends: its own CPU attention's outputs, token for token.

What turns vLLM's metadata and cache into ours is tested everywhere, the rest where KVPROOF_VLLM_PYTHON names an
interpreter that has vLLM.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    MistralConfig,
    PreTrainedConfig,
)

from kvproof.attention import CacheSpec, InvalidBatch
from kvproof.attention.torch_paged import TorchAttention
from kvproof.backend.integrations.vllm.attention_batch import Batch, UnsupportedAttention, paged_cache
from kvproof.backend.models.checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]


def layers(count: int, shape: tuple[int, int, int, int] = (5, 2, 4, 6)) -> list[Tensor]:
    """Views of one allocation as vLLM makes them: [blocks, kv heads, block size, 2 * head size]."""
    size = torch.Size(shape).numel()
    return [part.view(shape) for part in torch.arange(float(count * size)).view(count, size)]


def test_the_layers_caches_are_one_over_the_same_memory() -> None:
    views = layers(3)
    cache = paged_cache(views)
    assert cache.shape == (3, 5, 2, 4, 2, 3)
    assert cache[0].is_contiguous()  # as kernels take it
    cache[1, 4].fill_(-1)  # a block of a layer is all of vLLM's block, and nothing else
    assert (views[1][4] == -1).all()
    assert sum(int((view == -1).sum()) for view in views) == 2 * 4 * 6
    cache[2, 0, 1, 3, 1] = torch.tensor([1.0, 2.0, 3.0])  # the last value of the last head and slot
    assert views[2][0].flatten()[-3:].tolist() == [1, 2, 3]


FOUR = layers(4)


@pytest.mark.parametrize(
    ("views", "what"),
    [
        (sorted((layers(1)[0], layers(1)[0]), key=Tensor.data_ptr), "one allocation"),
        ([FOUR[i] for i in (0, 1, 3)], "one distance"),
        (FOUR[::-1], "one distance"),
        ([layers(1, (5, 4, 2, 6))[0].transpose(1, 2)], "with strides"),
    ],
)
def test_other_caches_are_refused(views: list[Tensor], what: str) -> None:
    with pytest.raises(UnsupportedAttention, match=what):
        paged_cache(views)


def batch(query_lens: list[int], seq_lens: list[int], table: list[list[int]], window: int | None = None) -> Batch:
    start = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch.build(
        start, torch.tensor(seq_lens, dtype=torch.int32), torch.tensor(table, dtype=torch.int32), 4, window
    )


def spec(**options: Any) -> CacheSpec:
    return CacheSpec(
        num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, dtype="float32", num_blocks=9, block_size=4, **options
    )


def test_rows_of_one_token_come_first() -> None:
    """vLLM pads tables with block 0, and steps with rows that have nothing."""
    mixed = batch([3, 1, 0, 2, 1], [5, 9, 0, 2, 1], [[1, 2, 0], [3, 4, 5], [0, 0, 0], [6, 0, 0], [7, 0, 0]])
    assert mixed.order is not None
    assert mixed.order.tolist() == [3, 6, 0, 1, 2, 4, 5]
    assert (mixed.plan.num_decodes, mixed.plan.seq_lens.tolist()) == (2, [9, 1, 5, 2])
    assert mixed.plan.kv_indices.tolist() == [3, 4, 5, 7, 1, 2, 6]
    assert mixed.plan.slot_mapping.tolist() == [20, 28, 6, 7, 8, 24, 25]
    mixed.plan.validate(spec())
    assert batch([1, 2], [4, 2], [[1, 0], [2, 0]]).order is None


def test_blocks_that_a_window_has_left_are_the_null_block() -> None:
    """vLLM's worker still has their old numbers, here that of the newest block."""
    stale = [[3, 4, 3]]
    windowed = batch([1], [11], stale, window=3)
    assert windowed.plan.kv_indices.tolist() == [0, 0, 3]
    windowed.plan.validate(spec(window=3))
    assert batch([1], [11], stale, window=4).plan.kv_indices.tolist() == [0, 4, 3]
    with pytest.raises(InvalidBatch, match="block-repeated"):
        batch([1], [11], stale).plan.validate(spec())


def test_a_prefix_may_be_read_in_the_step_that_writes_it() -> None:
    """vLLM's requests share a block before it is computed: here the first of two equal ones computes it for both."""
    shared = batch([6, 2], [6, 6], [[1, 2], [1, 3]])
    backend = TorchAttention(spec())
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 8, generator=generator)[[0, 1, 2, 3, 4, 5, 4, 5]] for heads in (2, 1, 1))
    backend.plan(shared.plan)
    out = backend.run(0, q, k, v)
    torch.testing.assert_close(out[6:], out[4:6])
    shared.plan.positions[0] = 1
    with pytest.raises(InvalidBatch, match="positions"):  # the other rules hold
        shared.plan.validate(spec())


# ---- inside vLLM

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 40
MODELS: dict[str, PreTrainedConfig] = {
    "mistral, windowed": MistralConfig(**TINY, sliding_window=WINDOW),
    "gemma2, capped, every other layer windowed": Gemma2Config(
        **TINY, query_pre_attn_scalar=50, attn_logit_softcapping=3.0, sliding_window=WINDOW
    ),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> dict[str, dict[str, Any]]:
    """Of each model: prompts with prefixes in common, in a pool that not all of them fit in."""
    jobs = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if config.model_type == "gemma2":
            model.get_input_embeddings().weight.data *= 0.03  # tied: else a token is followed by itself
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder)
        tokens = [(i * 37) % 120 + 3 for i in range(200)]
        prompts = [tokens[:3], tokens[60:190], *([*tokens[:40], 100 + i, 20 + i] for i in range(12)), tokens[:70]]
        jobs[name] = {"model": str(folder), "waves": [as_vllm_takes(prompts)], "num_gpu_blocks_override": 14}
    tokenizer = open_checkpoint("smollm2").tokenizer()
    system = "You are a helpful assistant who answers in one short sentence, and in plain words. " * 2
    texts = [f"{system}What is the {what} of {place}?" for what in QUALITIES for place in PLACES]
    waves = [as_vllm_takes([tokenizer.encode(text) for text in texts])]
    jobs["smollm2"] = {"model": str(smollm2_folder), "waves": waves, "num_gpu_blocks_override": 10}
    common = {"max_tokens": 24, "max_model_len": 256, "block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return {name: job | common for name, job in jobs.items()}


def as_vllm_takes(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


QUALITIES = ("capital", "largest city", "language", "population", "currency")
PLACES = ("France", "Japan", "Brazil", "Kenya", "Norway", "the country with the most lakes in the world")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which kvproof is installed as far as entry points go."""
    site = tmp_path_factory.mktemp("site")
    package = find_spec("kvproof")
    assert package is not None
    assert package.submodule_search_locations is not None
    (site / "kvproof").symlink_to(Path(next(iter(package.submodule_search_locations))).resolve())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups]
    info = site / "kvproof-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvproof\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site


@pytest.fixture(scope="module")
def generate(vllm_answers: Any, installed: Path) -> Any:
    return partial(vllm_answers, PYTHONPATH=str(installed), OMP_NUM_THREADS="1")


IMPL = "kvproof.backend.integrations.vllm.attention:Impl"
FAULTS = [
    [IMPL, "forward", "key[tokens], value", "key[tokens].roll(1, 0), value"],  # a token's key in its neighbour's slot
    [IMPL, "forward", "backend.run(number,", "backend.run(0,"],  # a layer in the cache of the first
]


@pytest.fixture(scope="module")
def stock(generate: Any, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """vLLM as it is: without the environment variable, the plugin changes nothing."""
    results, log = generate(list(jobs.values()), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "kvproof's" not in log
    return dict(zip(jobs, results, strict=True))


def test_outputs_are_those_of_stock_vllm(
    generate: Any, jobs: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]]
) -> None:
    """With its stock scheduler: the same tokens, the same hits, and others when our attention is broken."""
    ours = [job | ({"faults": FAULTS} if "windowed" in name else {}) for name, job in jobs.items()]
    results, log = generate(ours, VLLM_ENABLE_V1_MULTIPROCESSING="0", KVPROOF_VLLM_ATTENTION="torch")
    broken = [result.pop("broken") for result in results]
    assert results == [{key: value for key, value in right.items() if key != "broken"} for right in stock.values()]
    assert log.count("kvproof's torch backend attends") == 4  # Gemma 2's two kinds of layers have one each
    assert f"window={WINDOW} soft_cap=3.0" in log
    for result, answers in zip(results, broken, strict=True):
        assert sum(result["cached_tokens"]) > 0
        assert result["usage"] == 0.0
        assert len({tuple(tokens) for tokens in result["token_ids"]}) > len(result["token_ids"]) // 2
        assert all(answer["token_ids"] != result["token_ids"] for answer in answers)
    assert [len(answers) for answers in broken] == [2, 2, 0]
    assert stock["smollm2"]["preemptions"] > 0


@pytest.mark.parametrize(
    ("model", "scheduler", "workers"), [("smollm2", "Scheduler", 1), ("mistral, windowed", "PoolScheduler", 2)]
)
def test_manager_and_attention_together_in_processes_of_their_own(
    generate: Any,
    jobs: dict[str, dict[str, Any]],
    stock: dict[str, dict[str, Any]],
    model: str,
    scheduler: str,
    workers: int,
) -> None:
    """The plugin is loaded in each, and each of two tensor-parallel workers attends with half of the heads."""
    job = jobs[model] | {"scheduler_cls": f"kvproof.backend.integrations.vllm.{scheduler}"}
    (result,), log = generate(
        [job | {"tensor_parallel_size": workers}],
        KVPROOF_VLLM_ATTENTION="torch",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    assert result["token_ids"] == stock[model]["token_ids"]
    assert sum(result["cached_tokens"]) > 0  # how many, and preemptions, depends on when which request arrives
    assert result["preemptions"] > 0 or model != "smollm2"
    assert log.count("kvproof's torch backend attends") == workers


REFUSED = {
    "ALiBi": {"alibi_slopes": [1.0]},
    "encoder attention": {"attn_type": "encoder"},
    "a KV cache of type fp8": {"kv_cache_dtype": "fp8"},
    "layers that share a KV cache": {"kv_sharing_target_layer_name": "x"},
    "sinks": {"sinks": [1.0]},
}


def test_what_is_not_supported_is_refused_by_name(vllm_python: str, installed: Path) -> None:
    code = f"""
import os
from kvproof.backend.integrations.vllm import attention_plugin, contract
from kvproof.backend.integrations.vllm.errors import UnsupportedVllm

recorded, contract.recorded = contract.recorded, lambda: {{"0.1": {{}}}}
attention_plugin.register()  # such a vLLM is left alone
os.environ[attention_plugin.CHOICE] = "torch"
try:
    attention_plugin.register()
except UnsupportedVllm as error:
    print(error)
contract.recorded = recorded
from kvproof.backend.integrations.vllm.attention import Impl
for options in {list(REFUSED.values())}:
    try:
        Impl(1, 8, 1.0, **options)
    except NotImplementedError as error:
        print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([vllm_python, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "is not among the tested versions 0.1;" in done.stdout, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("kvproof's attention backends do not support")]
    assert len(told) == len(REFUSED)
    assert all(feature in line for feature, line in zip(REFUSED, told, strict=True))
