"""The example package of docs/examples, installed as somebody else's: its plugins are found and run, its tests pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

SOURCE = Path(__file__).parents[2] / "docs/examples/kvproof-example"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since building leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("project") / SOURCE.name
    return shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))


@pytest.fixture(scope="module")
def site(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it, built with what is here so that nothing is fetched."""
    site = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(site), str(project)], check=True)
    return site


def run(site: Path, *command: str, cwd: Path) -> str:
    """What a Python process prints in which the package is installed."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kvproof(site: Path, *arguments: str) -> str:
    return run(site, "-c", "import sys; from kvproof.cli import main; sys.exit(main())", *arguments, cwd=site)


def test_its_own_tests_pass(project: Path, site: Path, tmp_path: Path) -> None:
    tests = shutil.copytree(project / "tests", tmp_path / "tests")  # away from the sources: the installed one is tested
    report = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), cwd=tmp_path)
    assert report.splitlines()[-1].startswith("19 passed")


def test_its_plugins_are_listed(site: Path) -> None:
    rows = json.loads(kvproof(site, "backends", "--json"))
    ours = {row["name"]: (row["kind"], row["available"]) for row in rows if row["origin"] == "kvproof-example 0.1.0"}
    kinds = {"rows": "attention backend", "gpt2": "model runner", "slru": "eviction policy"}
    assert ours == {name: (kind, True) for name, kind in kinds.items()}


def test_its_plugins_run(site: Path, tmp_path: Path) -> None:
    """All three in one engine give the words that transformers' model of the same weights gives."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=41, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5, eos_token_id=0)
    )
    model.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(41)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    argv = ("--prompt", "w1 w2 w3 w4", "--max-tokens", "8", "--backend", "rows", "--policy", "slru")
    report = json.loads(kvproof(site, "generate", "--model", str(tmp_path), "--json", *argv))
    expected = model.train(False).generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=8, do_sample=False)
    assert report["outputs"][0]["token_ids"] == expected[0, 4:].tolist()
    assert report["stats"]["backend"] == "rows"


def test_its_policy_is_measured(site: Path, tmp_path: Path) -> None:
    """A prompt that comes after every four others that come once: LRU has forgotten it, segmented LRU has not."""
    again = list(range(4))
    prompts = [again, again]
    for i in range(100, 1000, 100):
        prompts += [*([i + 10 * j + k for k in range(5)] for j in range(4)), again]
    lines = [
        json.dumps({"timestamp": i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
        for i, ids in enumerate(prompts)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    report = json.loads(kvproof(site, "replay", str(trace), "--policy", "lru", "slru", "--num-blocks", "20", "--json"))
    hits = {row["policy"]: row["hit_tokens"] // 512 for row in report["results"]}
    assert hits == {"lru": 3, "slru": 21}
