"""What a run is asked for, as `kvproof bench` tells it to the benchmarks, and where a peer of ours may be found.

KVPROOF_BENCH_QUICK=1  fewer and smaller benchmarks
KVPROOF_BENCH_PEERS=0  no peers
KVPROOF_VLLM_PYTHON    an interpreter that has vLLM
KVPROOF_TRACES         the folder of the public traces
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

QUICK = os.environ.get("KVPROOF_BENCH_QUICK") == "1"
PEERS = os.environ.get("KVPROOF_BENCH_PEERS", "1") == "1"
NOT_ASKED_FOR = "peers were not asked for (--peers)"
VLLM_PYTHON = os.environ.get("KVPROOF_VLLM_PYTHON") if PEERS else None
NO_VLLM = "KVPROOF_VLLM_PYTHON names no interpreter" if PEERS else NOT_ASKED_FOR
TRACES = Path(os.environ.get("KVPROOF_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")
NO_VLLM_ENGINE = "its engine takes a minute to start (not with --quick)" if PEERS and QUICK else NO_VLLM

full_run = pytest.mark.skipif(QUICK, reason="not with --quick")
