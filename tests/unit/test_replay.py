"""The capacity planner: traces are read as they are meant, and a replay finds what arithmetic says it must."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.allocator import LRU, InvalidArgument
from kvproof.allocator.replay import ReplayResult, default_pool_sizes, replay
from kvproof.allocator.traces import Request, Trace, TraceError, read_trace
from kvproof.cli import main

TRACES = Path(os.environ.get("KVPROOF_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")
CONVERSATION = TRACES / "mooncake" / "conversation_trace.jsonl"
SESSIONS = TRACES / "claude_code" / "sessions.jsonl.gz"
AZURE = TRACES / "azure2023" / "AzureLLMInferenceTrace_code.csv"
with_traces = pytest.mark.skipif(
    not all(file.exists() for file in (CONVERSATION, SESSIONS, AZURE)),
    reason=f"no public traces in {TRACES} (set KVPROOF_TRACES to their folder)",
)


def trace(*prompts: tuple[int, list[int]], block_size: int = 512) -> Trace:
    """A trace of prompts given as (length, identities of their blocks)."""
    return Trace(block_size, [Request(float(i), n, array("i", blocks)) for i, (n, blocks) in enumerate(prompts)])


def mooncake(length: int, ids: list[int], timestamp: float = 0) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": 1, "hash_ids": ids})


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    return file


A, B, D = (1024, [0, 1]), (1536, [0, 1, 2]), (512, [3])
P, Q, R = (100, [5]), (1024, [6, 7]), (1, [8])
E = (1024, [3, 4])


# What is found by hand: hits, evictions, refused, most blocks in use.
@pytest.mark.parametrize(
    ("prompts", "num_blocks", "options", "expected"),
    [
        # B finds A. A finds its first block: the second ends the prompt, and someone has to compute its last token.
        ((A, B, A), 100, {}, (0 + 2 + 1, 0, 0, 3)),
        # D evicts block 2, the tail of the least recently used. A misses its end, and evicts 1 to compute it again.
        # Then B finds 0 and 1, and evicts D's.
        ((A, B, D, A, B), 3, {}, (0 + 2 + 0 + 1 + 2, 3, 0, 3)),
        # B can't be held: it finds nothing, evicts nothing, and counts.
        ((A, B, A), 2, {}, (0 + 0 + 1, 1, 1, 2)),
        # Partial blocks take entries: 7 goes for 5, 6 for 8, 5 and 8 for 6 and 7.
        ((Q, P, R, Q), 2, {}, (0, 4, 0, 2)),
        # Token by token they are never cached: only 7 has to go, twice.
        ((Q, P, R, Q), 2, {"by_tokens": True}, (1, 1, 0, 2)),
        # Smaller blocks: 4 a prompt, of which the last is computed again.
        (((1000, [0, 1]), (1000, [0, 1])), 100, {"block_size": 256}, (3, 0, 0, 4)),
        (((1000, [0, 1]), (1000, [0, 1])), 100, {"block_size": 256, "by_tokens": True}, (3, 0, 0, 4)),
        # Two at once hold 4 blocks. Where there are 3, the first has to leave, and its tail goes.
        ((A, E), 4, {"concurrency": 2}, (0, 0, 0, 4)),
        ((A, E), 3, {"concurrency": 2}, (0, 1, 0, 2)),
        # The oldest leaves first, and one is enough.
        ((A, D, (1024, [4, 5])), 4, {"concurrency": 3}, (0, 1, 0, 3)),
        # A shares 0 with B, and has a copy of 1 until it is computed.
        ((B, A), 5, {"concurrency": 2}, (1, 0, 0, 4)),
    ],
)
def test_by_hand(
    prompts: tuple[tuple[int, list[int]], ...],
    num_blocks: int,
    options: dict[str, int],
    expected: tuple[int, int, int, int],
) -> None:
    result = replay(trace(*prompts), num_blocks, **options)
    size = options.get("block_size", 512)
    assert (result.hit_blocks, result.evictions, result.refused, result.peak_blocks) == expected
    assert (result.requests, result.num_blocks, result.block_size) == (len(prompts), num_blocks, size)
    assert result.prompt_blocks == sum(-(-length // size) for length, _ in prompts)
    assert result.hit_rate == result.hit_blocks / result.prompt_blocks
    assert result.hit_tokens == result.hit_blocks * size


def model(prompts: Iterable[array[int]], num_blocks: int) -> tuple[int, int]:
    """Hits and evictions of an LRU cache of whole blocks, where the last block of a prompt is always computed."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = evictions = 0
    for blocks in prompts:
        if len(blocks) > num_blocks:
            continue
        found = next((i for i, block in enumerate(blocks[:-1]) if block not in cached), len(blocks) - 1)
        hits += found
        for block in blocks[:found]:
            del cached[block]
        while len(cached) + len(blocks) > num_blocks:
            cached.popitem(last=False)
            evictions += 1
        for block in reversed(blocks):  # a parent is more recent than its children
            cached[block] = None
            cached.move_to_end(block)
    return hits, evictions


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts of whole blocks that are walks from the root of a binary tree, so that they share many prefixes."""
    walks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=30))
    numbers: dict[tuple[bool, ...], int] = {}
    prompts = [[numbers.setdefault(tuple(w[: i + 1]), len(numbers)) for i in range(len(w))] for w in walks]
    return trace(*((8 * len(blocks), blocks) for blocks in prompts), block_size=8)


@given(traces(), st.integers(1, 20))
def test_replay_is_the_lru_model(made: Trace, num_blocks: int) -> None:
    result = replay(made, num_blocks)
    assert (result.hit_blocks, result.evictions) == model((r.blocks for r in made.requests), num_blocks)


@given(traces(), st.integers(1, 20), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_whole_blocks_replay_alike_by_tokens(made: Trace, num_blocks: int, block_size: int, concurrency: int) -> None:
    def run(by_tokens: bool) -> ReplayResult:
        result = replay(made, num_blocks, block_size=block_size, concurrency=concurrency, by_tokens=by_tokens)
        return replace(result, seconds=0.0)

    assert run(by_tokens=True) == run(by_tokens=False)


@given(traces(), st.sampled_from([2, 8]), st.integers(1, 4))
def test_the_last_of_the_default_sizes_holds_everything(made: Trace, block_size: int, concurrency: int) -> None:
    sizes = default_pool_sizes(made, block_size=block_size, concurrency=concurrency)
    results = [replay(made, n, block_size=block_size, concurrency=concurrency) for n in sizes]
    assert results[-1].evictions == 0
    assert [result.refused for result in results] == [0] * len(sizes)
    assert sizes == sorted(set(sizes))


def test_default_sizes_are_powers_of_four_between_the_longest_prompt_and_all_blocks() -> None:
    made = trace((5 * 512, [0, 1, 2, 3, 4]), *((512, [i]) for i in range(5, 100)))
    assert default_pool_sizes(made) == [16, 64, 101]
    assert default_pool_sizes(made, block_size=256) == [16, 64, 201]
    assert default_pool_sizes(trace()) == []


def test_the_policy_decides() -> None:
    class MRU(LRU):
        def pop(self) -> int:
            newest = list(self)[-1]
            self.remove(newest)
            return newest

    one, two = (600, [0, 10]), (600, [1, 11])
    # For `two`, LRU evicts 10, and later 11 for a new 10.
    result = replay(trace(one, two, one), 3, policy=LRU())
    assert (result.hit_blocks, result.evictions) == (1, 2)
    # MRU evicts 0, and nobody can find 10 without it; later 1, and 11 with it.
    result = replay(trace(one, two, one), 3, policy=MRU())
    assert (result.hit_blocks, result.evictions) == (0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, "block_size is 24, must divide the trace's 512"),
        ({"block_size": 1024}, "block_size is 1024, must be an integer from 1 to 512"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replay(trace(A), **{"num_blocks": 4, **options})


def test_mooncake_requests_are_read_one_by_one(tmp_path: Path) -> None:
    huge = 2**80
    file = write(tmp_path, mooncake(1024, [7, huge], 500), "", mooncake(1025, [7, huge, 9], 2500), "{")
    read = read_trace(file)
    assert read.block_size == 512
    assert list(islice(read.requests, 2)) == [
        Request(0.5, 1024, array("i", [0, 1])),
        Request(2.5, 1025, array("i", [0, 1, 2])),
    ]
    with pytest.raises(TraceError, match=r"trace.jsonl:4: not JSON"):
        next(iter(read.requests))


def test_sessions_are_interleaved_and_share_nothing(tmp_path: Path) -> None:
    first = {
        "block_size": 64,
        "requests": [
            {"t": 0.5, "in": 64, "hash_ids": [1]},
            {"t": 1, "requests": [{"t": 0, "in": 128, "hash_ids": [1, 8]}, {"t": 20, "in": 64, "hash_ids": [1]}]},
            {"t": 12, "in": 130, "hash_ids": [1, 2]},  # 2 tokens more, of which nothing is known
        ],
    }
    second = {"block_size": 64, "requests": [{"t": 0, "in": 130, "hash_ids": [1, 2]}]}
    file = tmp_path / "trace.bin"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, (first, second))).encode()))
    read = read_trace(file, spacing=10)
    requests = list(read.requests)
    assert read.block_size == 64
    assert [(r.arrival, r.input_length) for r in requests] == [(0.5, 64), (1, 128), (10, 130), (12, 130), (21, 64)]
    one, agent, other, longer, late = (r.blocks.tolist() for r in requests)
    assert one == late == agent[:1] == longer[:1]
    distinct = [*agent, *longer[1:], *other]
    assert sorted(distinct) == list(range(7))


def session(**fields: object) -> str:
    return json.dumps({"block_size": 64, "requests": [{"t": 0, "in": 64, "hash_ids": [1]} | fields]})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "trace.jsonl: there is no request in it"),
        (["", "nonsense"], "trace.jsonl:2: not JSON: Expecting value at column 1"),
        (["[1]"], "trace.jsonl:1: '[1]' is not a JSON object"),
        (["9" * 5000], "trace.jsonl:1: not JSON: "),
        (["[" * 100_000], "trace.jsonl:1: not JSON: "),
        (["{}"], "trace.jsonl:1: timestamp is missing"),
        ([mooncake(0, [])], "trace.jsonl:1: input_length is 0, must be an integer from 1 to 2147483647"),
        ([mooncake(512, [1]), mooncake(True, [1])], "trace.jsonl:2: input_length is True, must be an integer from 1"),
        ([mooncake(512, [1], -1)], "trace.jsonl:1: timestamp is -1, must be a number from 0 up"),
        ([mooncake(512, [1], float("nan"))], "trace.jsonl:1: timestamp is nan, must be a number from 0 up"),
        ([mooncake(512, [1], float("inf"))], "trace.jsonl:1: timestamp is inf, must be a number from 0 up"),
        ([mooncake(1025, [1])], "trace.jsonl:1: 1 hash_ids, 1025 tokens are 2 full blocks of 512 and 1 partial"),
        ([mooncake(512, [1, 2])], "trace.jsonl:1: 2 hash_ids, 512 tokens are 1 full blocks of 512 and 0 partial"),
        ([mooncake(512, ["a"])], "trace.jsonl:1: hash_ids is not a list of integers"),
        ([mooncake(512, None)], "trace.jsonl:1: hash_ids is not a list of integers"),
        ([session(t="x")], "trace.jsonl:1: requests[1]: t is 'x', must be a number from 0 up"),
        ([session(), session(hash_ids=[])], "trace.jsonl:2: requests[1]: 0 hash_ids, 64 tokens are 1 full"),
        ([session(requests=[3])], "trace.jsonl:1: requests[1]: requests[1]: '3' is not a JSON object"),
        ([session(requests=None)], "trace.jsonl:1: requests[1]: requests is not a list"),
        (['{"requests": []}'], "trace.jsonl:1: block_size is missing"),
        ([session(), '{"requests": [], "block_size": 16}'], "trace.jsonl:2: block_size is 16, but 64 in the first"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "trace.jsonl:1: an Azure trace has lengths and no hash ids"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(read_trace(write(tmp_path, *lines)).requests)
    assert f"{tmp_path}/{message}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\n", gzip.compress(b"{}")[:-9], gzip.compress(b"")[:10] + b"\xff" * 9, None])
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "trace.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        list(read_trace(file).requests)


def call(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    try:
        code = main([str(arg) for arg in argv])
    except SystemExit as leave:
        code = int(leave.code or 0)
    return code, *capsys.readouterr()


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, plot = write(tmp_path, *(mooncake(*prompt) for prompt in (A, B, D, A, B))), tmp_path / "plot.svg"
    argv = ("replay", file, "--num-blocks", 2, 3, 100, "--plot", plot)
    code, out, err = call(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["trace_block_size"], report["by_tokens"], report["concurrency"]) == (512, False, 1)
    rows = report["results"]
    assert [(r["policy"], r["num_blocks"], r["hit_blocks"], r["evictions"], r["refused"]) for r in rows] == [
        ("lru", 2, 1, 2, 2),
        ("lru", 3, 5, 3, 0),
        ("lru", 100, 5, 0, 0),
    ]
    assert rows[1]["hit_rate"] == 5 / 11
    assert rows[1]["hit_tokens"] == 5 * 512
    shapes = [element.tag.rpartition("}")[2] for element in ET.parse(plot).iter()]
    assert (shapes.count("polyline"), shapes.count("circle")) == (1, 3)

    code, out, err = call(capsys, *argv, "--policy", "lru")
    assert (code, err) == (0, "")
    assert out.split()[10:18] == ["lru", "2", "0.0909", "512", "2", "2", "2", out.split()[17]]
    assert len(out.splitlines()) == 4

    _, out, _ = call(capsys, "replay", file, "--limit", 2, "--block-size", 256, "--json")
    rows = json.loads(out)["results"]
    assert [(r["num_blocks"], r["prompt_blocks"], r["hit_blocks"]) for r in rows] == [(7, 10, 4)]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("/no/such/file",), 1, "can't read the trace /no/such/file"),
        (("FILE", "--policy", "nope"), 1, "unknown eviction policy 'nope', known are: fifo, lru"),
        (("FILE", "--block-size", "24"), 1, "block_size is 24, must divide the trace's 512"),
        (("FILE", "--spacing", "inf"), 1, "spacing is inf"),
        (("FILE", "--num-blocks", "0"), 2, "--num-blocks: 0 must be at least 1"),
        (("FILE", "--limit", "x"), 2, "--limit: invalid integer value: 'x'"),
        (("FILE", "--plot", "plot.png"), 2, "plot.png must end in .svg"),
        (("FILE", "--plot", "/no/such/folder/plot.svg"), 1, "can't write the plot"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: tuple[str, ...], code: int, message: str
) -> None:
    file = str(write(tmp_path, mooncake(*A)))
    got, _, err = call(capsys, "replay", *(file if arg == "FILE" else arg for arg in argv))
    assert (got, err.count("\n")) == (code, 1)
    assert message in err
    assert err.startswith("kvproof replay: error: ")


def test_a_trace_without_requests_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path, '{"block_size": 64, "requests": []}')
    assert call(capsys, "replay", file) == (1, "", f"kvproof replay: error: {file}: there is no request in it\n")


def test_a_broken_policy_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvproof.eviction_policies]\nbroken = no_such_module:Policy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = call(capsys, "replay", write(tmp_path, mooncake(*A)), "--policy", "broken")
    assert (code, err.count("\n")) == (1, 1)
    assert "eviction policy 'broken' can't be loaded: ModuleNotFoundError: No module named 'no_such_module'" in err


def test_a_replay_needs_no_torch(tmp_path: Path) -> None:
    file = write(tmp_path, mooncake(*A))
    script = (
        f"from kvproof.cli import main; import sys; sys.exit(main(['replay', {str(file)!r}]) or 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def conversation() -> Trace:
    read = read_trace(CONVERSATION)
    return Trace(read.block_size, list(read.requests))


@with_traces
@pytest.mark.parametrize(
    ("num_blocks", "hit_rate"), [(1000, 0.045), (4000, 0.087), (16000, 0.263), (64000, 0.359), (200_000, 0.366)]
)
def test_published_hit_rates_of_the_conversation_trace(conversation: Trace, num_blocks: int, hit_rate: float) -> None:
    result = replay(conversation, num_blocks)
    assert (result.requests, result.prompt_blocks, result.refused) == (12_031, 288_500, 0)
    assert result.hit_rate == pytest.approx(hit_rate, abs=0.001)


@with_traces
def test_agentic_sessions_replay_as_the_lru_model_does() -> None:
    read = read_trace(SESSIONS)
    made = Trace(read.block_size, list(islice(read.requests, 100)))
    result = replay(made, 1500)
    assert (result.hit_blocks, result.evictions) == model((r.blocks for r in made.requests), 1500)
    assert 0 < result.refused < result.requests


@with_traces
def test_an_azure_trace_is_refused() -> None:
    with pytest.raises(TraceError, match=r"AzureLLMInferenceTrace_code.csv:1: an Azure trace has lengths and no hash"):
        read_trace(AZURE)
