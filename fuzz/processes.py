"""Processes that do a campaign's work, as the campaign sees them. What runs in one is `kvproof.fuzz.worker`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from kvproof.allocator import KvproofError
from kvproof.fuzz.plan import Plan

Job = tuple[Literal["explore", "round", "check"], dict[str, Any]]


class WorkerCrashed(KvproofError):
    """A worker process came to an end, or could not run what it was given."""


class Worker:
    """A process that runs `kvproof.fuzz.worker`."""

    def __init__(self, plan: Plan, data: Path) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvproof.fuzz.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # The order of a set of strings must not change from run to run.
            env={**os.environ, "PYTHONHASHSEED": str(plan.seed % 2**32), "OMP_NUM_THREADS": "1"},
        )
        setup = {"packages": plan.packages, "machines": plan.machines, "data": str(data), "guides": plan.guides}
        self._send(setup)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the process come to its end, and write what it has measured."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def ask(
        self,
        job: Job,
        *,
        measured: bool = False,
        on_progress: Callable[[dict[str, Any]], object] = lambda told: None,
    ) -> dict[str, Any]:
        """The answer to a job; `on_progress` hears what is told before. Raises `WorkerCrashed`."""
        name, arguments = job
        self._send([name, arguments, measured])
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "done" in answer:
                done: dict[str, Any] = answer["done"]
                return done
            if "refused" in answer:
                raise KvproofError(answer["refused"])
            if "crash" in answer:
                raise WorkerCrashed(f"{name} {arguments}: {_last_line(answer['crash'])}")
            on_progress(answer["progress"])
        self._errors.seek(0)
        raise WorkerCrashed(f"the worker ended: {_last_line(self._errors.read())}")

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[::-1]), "it said nothing")
