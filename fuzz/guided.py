"""A round guided by coverage: libFuzzer, through the package `atheris`, mutates the bytes that examples are drawn from.

Those that reach something new in the code under test are kept, and tried first the next time. A failing example goes
where Hypothesis keeps its own, so that a replay finds it there and shrinks it like any other.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from kvproof.allocator import KvproofError
from kvproof.fuzz.counting import Tally
from kvproof.fuzz.rounds import Answer, Round, RoundJob, planted, run_round, told

MAX_BYTES = 2048
"""Of an example. A step of the manager's machine takes some 20."""


def run_guided(job: RoundJob, test: Any, tally: Tally) -> Answer:
    """A round of `test`, which adds to `tally`, up to the first failure, `job.examples` or `job.seconds`.

    Raises `KvproofError` if libFuzzer ends before.
    """
    started = perf_counter()
    with planted(job.fault), ExitStack() as stack:
        corpus = Path(job.corpus or stack.enter_context(TemporaryDirectory()), job.machine)
        answer = _in_a_fork(job, test, tally, corpus / "inputs")
    if answer["error"] is not None and job.shrink:
        shrunk = run_round(replace(job, replay=True))
        answer |= {"error": shrunk["error"] or answer["error"], "program": shrunk["program"]}
    return {**answer, "seconds": perf_counter() - started}


def _in_a_fork(job: RoundJob, test: Any, tally: Tally, inputs: Path) -> Answer:
    """libFuzzer never returns."""
    inputs.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _fuzz(job, test, tally, inputs, writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        raise KvproofError(f"atheris ended before the round of {job.machine} did")
    done: Answer = json.loads(answer)
    return done


def _fuzz(job: RoundJob, test: Any, tally: Tally, inputs: Path, writer: int) -> None:
    atheris: Any = import_module("atheris")
    os.dup2(2, 1)  # libFuzzer writes on it, and the worker's answers go there
    started, examples, invalid = perf_counter(), 0, 0

    def run_one(data: bytes) -> None:
        nonlocal examples, invalid
        examples += 1
        error = None
        try:
            invalid += test.hypothesis.fuzz_one_input(data) is None
        except Exception as raised:
            error = told(raised)
        seconds = perf_counter() - started
        if error is not None or examples == job.examples or (job.seconds is not None and seconds > job.seconds):
            done = Round(
                examples=examples,
                invalid=invalid,
                rules=dict(tally.rules),
                invariants=dict(tally.invariants),
                events={},  # Hypothesis does not tell them here
                states=list(tally.states),
                seconds=seconds,
                slowest=tally.slowest,
                error=error,
            )
            with open(writer, "w", encoding="utf-8") as pipe:
                json.dump(asdict(done), pipe)
            os._exit(0)

    options = {
        "seed": job.seed % 2**31 + 1,
        "max_len": MAX_BYTES,
        "len_control": 0,  # full length from the start: the sequences that fail are long ones
        "verbosity": 0,
        "artifact_prefix": f"{inputs.parent}/",
    }
    atheris.Setup(["kvproof", *(f"-{name}={value}" for name, value in options.items()), str(inputs)], run_one)
    atheris.Fuzz()
