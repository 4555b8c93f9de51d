"""The process that vLLM's engine runs in, stopped whenever it is not its turn: its idle workers spin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

PEER = Path(__file__).resolve().with_name("vllm_engine.py")


class VllmEngine:
    """Its threads are as many as torch has here, bound to the first cores that this process may use."""

    def __init__(self, python: str, model: Path) -> None:
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        environment = os.environ | {
            "PYTHONPATH": str(PEER.parents[1]),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        # A process group of its own, so that a signal reaches its workers too.
        self._process = subprocess.Popen(
            [python, str(PEER), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def converse(self, work: Any) -> Any:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """It ends when there is nothing more to read, and is killed when it does not."""
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=20)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"vLLM's process ended with {self._process.wait()}; its message is on standard error"
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, number)
