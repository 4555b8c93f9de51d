"""The command line: what it prints, and that bad input is one line and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof.cli import main


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as leave:
        code = int(leave.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


GENERATE = ("generate", "--model", "smollm2")
ONE = ("--prompt", "Hello", "--max-tokens", "2")


BACKENDS = (
    "unknown attention backend 'nope', known are: flashinfer, flashinfer-fa3, flashinfer-persistent, reference, torch"
)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ((), 2, "COMMAND"),
        (("generate", "--prompt", "x"), 2, "--model"),
        (GENERATE, 1, "no prompt"),
        ((*GENERATE, "--prompt", ""), 1, "the prompt is empty"),
        ((*GENERATE, "--prompts-file", "/no/such/file"), 1, "/no/such/file"),
        ((*GENERATE, *ONE, "--system", "Be brief."), 1, "--system needs --chat"),
        ((*GENERATE, *ONE, "--num-blocks", "0"), 2, "--num-blocks: 0 must be at least 1"),
        ((*GENERATE, *ONE, "--block-size", "0"), 2, "--block-size: 0 must be at least 1"),
        ((*GENERATE, *ONE, "--block-size", "-3"), 2, "--block-size: -3 must be at least 1"),
        ((*GENERATE, *ONE, "--num-blocks", "many"), 2, "--num-blocks: invalid integer value: 'many'"),
        ((*GENERATE, *ONE, "--max-tokens", "0"), 2, "--max-tokens: 0 must be at least 1"),
        ((*GENERATE, *ONE, "--temperature", "-1"), 1, "temperature"),
        ((*GENERATE, *ONE, "--top-p", "0"), 1, "top_p"),
        ((*GENERATE, *ONE, "--stop", ""), 1, "stop"),
        ((*GENERATE, *ONE, "--num-blocks", "100000000"), 1, "100000000 blocks"),
        (("generate", "--model", "x" * 300, *ONE), 1, "File name too long"),
        ((*GENERATE, "--prompt", "\udcff"), 1, "is not Unicode text"),
        ((*GENERATE, *ONE, "--dtype", "int8"), 2, "--dtype: invalid choice: 'int8'"),
        ((*GENERATE, *ONE, "--backend", "torch", "--dtype", "float64"), 1, "support this cache: reference"),
        ((*GENERATE, *ONE, "--backend", "nope"), 1, BACKENDS),
        ((*GENERATE, *ONE, "--max-num-batched-tokens", "8"), 1, "max_num_batched_tokens is 8"),
        (("generate", "--model", "/no/such/model.gguf", *ONE), 1, "/no/such/model.gguf"),
        ((*GENERATE, "--prompt", "one " * 9000), 1, "9001 tokens, the model takes 8192"),
        ((*GENERATE, *ONE, "--num-blocks", "1", "--max-tokens", "99"), 1, "the whole pool has 16 (1 blocks of 16)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int, message: str
) -> None:
    got, _, err = call(capsys, *argv)
    assert (got, err.count("\n")) == (code, 1)
    assert message in err
    assert err.startswith("kvproof")


def test_a_corrupt_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "corrupt.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    code, _, err = call(capsys, "generate", "--model", str(file), *ONE)
    assert (code, err.count("\n")) == (1, 1)
    assert "corrupt.gguf" in err


def test_generate_reports_outputs_and_stats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital of France is\n\nThe capital of Italy is\n")
    code, out, err = call(
        capsys, *GENERATE, "--prompt", "The capital of France is", "--prompts-file", str(prompts), "--max-tokens", "6",
        "--block-size", "3", "--num-blocks", "20", "--repeat", "2", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [o["round"] for o in report["outputs"]] == [1, 1, 1, 2, 2, 2]
    first, again, italy = report["outputs"][:3]
    assert "Paris" in first["text"]
    assert first["token_ids"] == again["token_ids"]
    assert "Rome" in italy["text"]
    assert [o["token_ids"] for o in report["outputs"][:3]] == [o["token_ids"] for o in report["outputs"][3:]]
    assert {o["finish_reason"] for o in report["outputs"]} == {"length"}
    assert all(o["cached_tokens"] == 3 for o in report["outputs"][3:])  # five tokens: one block of three, one left
    stats = report["stats"]
    assert stats["blocks"]["total"] == stats["blocks"]["free"] == 20
    assert 0 < stats["blocks"]["peak_used"] <= 20
    assert stats["prompt_tokens"] == 30
    assert stats["prefix_hit_tokens"] == sum(o["cached_tokens"] for o in report["outputs"])
    assert stats["output_tokens"] == 36


def test_a_refused_prompt_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*GENERATE, "--prompt", "The capital of France is", "one " * 200, "--max-tokens", "3", "--num-blocks", "4")
    code, out, err = call(capsys, *argv, "--json")
    assert (code, err.count("\n")) == (1, 1)
    served, refused = json.loads(out)["outputs"]
    assert "Paris" in served["text"]
    assert (refused["finish_reason"], refused["token_ids"]) == ("refused", [])
    assert "the whole pool has 64" in refused["error"]


def test_text_output_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--chat", "--system", "Answer briefly.", "--prompt", "Say hello.", "--repeat", "2", "--max-tokens", "12")
    code, out, _ = call(capsys, *GENERATE, *argv)
    assert code == 0
    assert "[2] Say hello." in out
    assert "every invariant holds" in out


def test_backends_lists_what_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "backends", "--json")
    assert code == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(out)}
    assert rows["attention backend", "torch"]["auto"]
    assert not rows["attention backend", "reference"]["auto"]
    assert rows["attention backend", "torch"]["capabilities"]["dtypes"]
    assert {("model runner", "llama"), ("eviction policy", "lru")} <= rows.keys()
    code, out, _ = call(capsys, "backends")
    assert code == 0
    assert "reference" in out


@pytest.mark.parametrize("command", [(), ("generate",), ("backends",)])
def test_help_is_quick_and_has_an_example(command: tuple[str, ...]) -> None:
    """Help must work before torch is installed, so it may not import it."""
    script = (
        "import sys; from kvproof.cli import main\n"
        f"try: main({[*command, '--help']!r})\n"
        "finally: assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "example:" in run.stdout or not command
