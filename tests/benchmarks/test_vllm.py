"""The allocator's share of a vLLM scheduler step: vLLM's own KV-cache manager, ours, and our pool below vLLM's manager.

All run in one process of the interpreter that KVPROOF_VLLM_PYTHON names, in turns, without a model: 256 requests with
prompts of about 128 tokens, in blocks of 16, prefix caching on. A manager that does nothing is measured with them, and
what the others take beyond it is their share (`peers/vllm_scheduler.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mode import NO_VLLM, VLLM_PYTHON, full_run
from pytest_benchmark.fixture import BenchmarkFixture

from kvproof.cli.bench_figures import Figures

PEER = Path(__file__).resolve().parent / "peers" / "vllm_scheduler.py"
JOB = {"prompt": 128, "steps": 256}
ROUNDS = 5


@pytest.fixture
def schedulers() -> Iterator[subprocess.Popen[str]]:
    if VLLM_PYTHON is None:
        pytest.skip(NO_VLLM)
    process = subprocess.Popen(
        [VLLM_PYTHON, str(PEER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_CONFIGURE_LOGGING": "0", "OMP_NUM_THREADS": "1"},
    )
    yield process
    process.kill()
    process.communicate()


@full_run
@pytest.mark.benchmark(group="vLLM's scheduler steps, 256 requests, no model; the time is that of all managers")
def test_scheduler_step(benchmark: BenchmarkFixture, schedulers: subprocess.Popen[str]) -> None:
    def answer() -> Any:
        assert schedulers.stdout is not None
        line = schedulers.stdout.readline()
        assert line, "vLLM's process ended; its message is on standard error"
        return json.loads(line)

    def round_() -> None:
        assert schedulers.stdin is not None
        schedulers.stdin.write(json.dumps(JOB) + "\n")
        schedulers.stdin.flush()
        rounds.append(answer())

    rounds: list[dict[str, dict[str, float]]] = []
    version = answer()
    benchmark.pedantic(round_, rounds=ROUNDS, warmup_rounds=1)
    rounds = rounds[1:]
    figures = Figures(benchmark)
    figures.note(vllm_version=version)
    per = {"admit": 256, "decode": 256 * JOB["steps"], "finish": 256}
    for phase, n in per.items():
        shares = {
            name: [turn[name][phase] - turn["nothing"][phase] for turn in rounds]
            for name in ("ours", "our_pool", "vllm")
        }
        for name, share in shares.items():
            figures.note(**{f"{phase}_{name}_us_per_request": round(statistics.median(share) / n * 1e6, 3)})
        figures.times(f"vllm's manager, {phase}", shares["vllm"], shares["ours"], aim=5 if phase == "decode" else None)
        figures.times(f"vllm's manager on our pool, {phase}", shares["vllm"], shares["our_pool"])
    figures.show()
