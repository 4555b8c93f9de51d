"""The benchmarks' own modules by their names, and the peers that take long to start, once for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # each test file is imported on its own, as of no package

from mode import PEERS, QUICK, VLLM_PYTHON


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's engine with SmolLM2 in its own process, or None. Starting takes a minute, which --quick has not."""
    if VLLM_PYTHON is None or QUICK:
        yield None
        return
    from peers.vllm_process import VllmEngine
    from smollm2 import write_folder

    engine = VllmEngine(VLLM_PYTHON, write_folder(tmp_path_factory.mktemp("smollm2")))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """SmolLM2 in transformers, bfloat16, or None."""
    if not PEERS:
        return None
    from smollm2 import in_transformers

    return in_transformers("bfloat16")
