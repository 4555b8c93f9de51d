"""Processes in the interpreter that has vLLM, which answer each line of JSON with one of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class VllmProcess:
    """It runs the peer `script` with these arguments.

    about   the line that it began with
    """

    def __init__(self, python: str, script: str, *arguments: str, **environment: str) -> None:
        # A process group of its own, so that a signal reaches its workers too.
        self._process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "VLLM_LOGGING_LEVEL": "ERROR", **environment},
            process_group=0,
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def converse(self, work: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Killed: it has nothing to save, and vLLM takes seconds to leave."""
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"vLLM's process ended with {self._process.wait()}; its message is on standard error"
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, number)


class VllmEngine(VllmProcess):
    """vLLM's engine, stopped whenever it is not its turn: its idle workers spin.

    Its threads are as many as torch has here, bound to the first cores that this process may use.
    """

    def __init__(self, python: str, model: Path) -> None:
        import torch  # the allocator's benchmarks do without

        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        super().__init__(
            python,
            "vllm_engine.py",
            str(model),
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            HF_HUB_OFFLINE="1",
        )
        self._signal(signal.SIGSTOP)

    def converse(self, work: Any) -> Any:
        self._signal(signal.SIGCONT)
        try:
            return super().converse(work)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """It ends when there is nothing more to read, and is killed when it does not."""
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=20)
        self._signal(signal.SIGKILL)
        self._process.wait()
