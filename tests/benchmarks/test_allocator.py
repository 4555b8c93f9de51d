"""Our allocator beside nano-vllm's BlockManager and vLLM's KVCacheManager: the same work, in turns, in one run.

All three get the same lists of token ids and do the same with them (`workload.drive`), in the order of their own
schedulers. What is timed:

admission    ours: sequence, admit, commit of the prompt, append of the first output token; in a batch also `add`
             nano-vllm: Sequence, can_allocate, allocate, append_token
             vLLM: Request, which hashes the prompt, get_computed_blocks, allocate_slots, append_output_token_ids
append       for each running sequence, once a step: a slot for its newest token, that token counted as written, its
             block published if it is full, and the next token stored
             ours: reserve, commit, append; in a batch one `reserve` and one `commit` for all
             nano-vllm: can_append, may_append, append_token
             vLLM: allocate_slots, num_computed_tokens, append_output_token_ids
release      release; deallocate; free

Nobody computes anything between the calls, and nobody schedules. nano-vllm's fork forgets a prefix when its last
sequence ends, so it finds less than the others, and its caching costs it less.

A peer that is absent is named in the output, and the rest is measured without it (`mode.py`).
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from random import getrandbits
from time import perf_counter
from typing import Any

import pytest
import workload
from mode import NO_VLLM, NOT_ASKED_FOR, PEERS, QUICK, TRACES, VLLM_PYTHON, full_run
from peers import nano_vllm, ours
from peers.vllm_process import VllmProcess
from pytest_benchmark.fixture import BenchmarkFixture
from xxhash import xxh3_64_intdigest

from kvproof.allocator import BlockManager
from kvproof.allocator.hashing import SHARED, xxh3_chained
from kvproof.cli.bench_figures import Figures

CONVERSATION = TRACES / "mooncake" / "conversation_trace.jsonl"
CONVERSATION_HITS = 111_104
"""Tokens that the first 200 requests find in 100,000 blocks under LRU; vLLM finds the same, request by request."""

BLOCK_SIZE = 16
ROUNDS = 3


class Stopwatch:
    """The clock that pytest-benchmark reads: it stands still outside of what a test is about."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def read(self) -> float:
        return self.seconds


CLOCK = Stopwatch()


class Vllm(VllmProcess):
    """vLLM in its own interpreter, idle except while it does a job."""

    name = "vllm"

    def __init__(self, python: str) -> None:
        super().__init__(python, "vllm_kv.py")
        self.version = self.about

    def do(self, job: str, work: Any) -> Any:
        return self.converse({"job": job, "workload": work})


class NanoVllm:
    """nano-vllm, in this process."""

    name = "nano_vllm"

    def __init__(self) -> None:
        nano_vllm.load()
        self.version = nano_vllm.version()

    def do(self, job: str, work: Any) -> Any:
        make = partial(nano_vllm.NanoVllm, work["num_blocks"], work["block_size"])
        if job == "drive":
            return workload.drive(make(), work)
        if job == "memory":
            return workload.bytes_per_block(make, work)
        assert job == "hash"
        prompts, allocator = [request["prompt"] for request in work["requests"]], make()
        return workload.seconds_each(lambda: [allocator.hash_prompt(prompt) for prompt in prompts])


class Peers:
    """The peers that are here, and why the others are not."""

    def __init__(self, present: list[Vllm | NanoVllm], absent: dict[str, str]) -> None:
        self.present = present
        self.absent = absent

    def do(self, job: str, work: Any) -> dict[str, Any]:
        return {peer.name: peer.do(job, work) for peer in self.present}


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    present: list[Vllm | NanoVllm] = []
    absent = {}
    try:
        if not PEERS:
            raise nano_vllm.Unavailable(NOT_ASKED_FOR)
        present.append(NanoVllm())
    except nano_vllm.Unavailable as error:
        absent["nano_vllm"] = str(error)
    if VLLM_PYTHON:
        present.append(Vllm(VLLM_PYTHON))
    else:
        absent["vllm"] = NO_VLLM
    yield Peers(present, absent)
    for peer in present:
        if isinstance(peer, Vllm):
            peer.close()


@pytest.fixture(scope="module")
def conversation() -> Any:
    if not CONVERSATION.exists():
        pytest.skip(f"no {CONVERSATION} (set KVPROOF_TRACES to the folder of the public traces)")
    return workload.conversation(CONVERSATION, 200, num_blocks=100_000, block_size=BLOCK_SIZE, max_running=64)


def make_ours(path: str, work: Any) -> Any:
    if path == "batched":
        return ours.Batched(work["num_blocks"], work["block_size"], work["max_running"])
    return ours.PerSequence(work["num_blocks"], work["block_size"])


def compare(
    benchmark: BenchmarkFixture, path: str, work: Any, peers: Peers, phase: str, per: str, **aims: float
) -> dict[str, list[Any]]:
    """Measure a phase of ours; before each round, every peer has its turn. Returns all results, by name."""
    results: dict[str, list[Any]] = {"ours": [], **{peer.name: [] for peer in peers.present}}

    def peers_turn() -> None:
        for name, result in peers.do("drive", work).items():
            results[name].append(result)

    def our_turn() -> None:
        result = workload.drive(make_ours(path, work), work)
        results["ours"].append(result)
        CLOCK.seconds += result["seconds"][phase]

    benchmark.pedantic(our_turn, setup=peers_turn, rounds=ROUNDS)
    counts = results["ours"][0]["counts"]
    assert all(result["counts"] == counts for turns in results.values() for result in turns)
    each = {name: us_each(turns, phase, per) for name, turns in results.items()}
    figures = Figures(benchmark)
    figures.note(path=path, **counts)
    beside(figures, each, f"us_per_{per[:-1]}", peers, **aims)
    return results


def us_each(turns: list[Any], phase: str, per: str) -> list[float]:
    return [result["seconds"][phase] / result["counts"][per] * 1e6 for result in turns]


def beside(figures: Figures, times: dict[str, list[float]], unit: str, peers: Peers, **aims: float) -> None:
    """Medians, and how many times as long as ours each peer took, paired by turn."""
    figures.note(**{f"{name}_{unit}": round(statistics.median(turns), 3) for name, turns in times.items()})
    for peer in peers.present:
        figures.times(peer.name, times[peer.name], times["ours"], aim=aims.get(peer.name))
        figures.note(**{f"{peer.name}_version": peer.version})
    without(figures, peers)


def without(figures: Figures, peers: Peers) -> None:
    for name, reason in peers.absent.items():
        figures.absent(name, reason)


def report(benchmark: BenchmarkFixture, **further: Any) -> None:
    figures = Figures(benchmark)
    figures.note(**further)
    figures.show()


def assert_hits(results: dict[str, list[Any]]) -> dict[str, int]:
    assert {sum(result["hits"]) for result in results["ours"]} == {CONVERSATION_HITS}
    assert all(result["hits"] == results["ours"][0]["hits"] for result in results.get("vllm", []))
    return {f"{name}_hit_tokens": sum(turns[0]["hits"]) for name, turns in results.items()}


@full_run
@pytest.mark.benchmark(group="admission, conversation trace, 100,000 blocks of 16, 64 running", timer=CLOCK.read)
def test_admission(benchmark: BenchmarkFixture, conversation: Any, peers: Peers) -> None:
    results = compare(benchmark, "per sequence", conversation, peers, "admission", "requests", nano_vllm=4)
    further: dict[str, float] = {}
    for name, turns in results.items():
        further[f"{name}_us_per_block"] = round(statistics.median(us_each(turns, "admission", "blocks")), 3)
        further[f"{name}_release_us_per_block"] = round(statistics.median(us_each(turns, "release", "blocks")), 3)
    if "vllm" in results:
        seconds = statistics.median(result["request_seconds"] for result in results["vllm"])
        further["vllm_of_which_request_us_per_block"] = round(seconds / benchmark.extra_info["blocks"] * 1e6, 3)
    report(benchmark, **further, **assert_hits(results))


@full_run
@pytest.mark.parametrize("path", ["per sequence", "batched"])
@pytest.mark.benchmark(group="append, conversation trace, 100,000 blocks of 16, 64 running", timer=CLOCK.read)
def test_append(benchmark: BenchmarkFixture, conversation: Any, peers: Peers, path: str) -> None:
    aims = {"nano_vllm": 4, "vllm": 25} if path == "batched" else {}
    results = compare(benchmark, path, conversation, peers, "append", "tokens", **aims)
    report(benchmark, **assert_hits(results))


@pytest.mark.parametrize("path", ["per sequence", "batched"])
@pytest.mark.benchmark(group="401 decode steps of 256 sequences, 500-1000 tokens of prompt, block 16", timer=CLOCK.read)
def test_decode_step(benchmark: BenchmarkFixture, peers: Peers, path: str) -> None:
    """The sequences are at any phase of their blocks: in a mean step, one in sixteen crosses into a new one."""
    work = workload.unrelated(256, (500, 1000), 402, num_blocks=100_000, block_size=BLOCK_SIZE, max_running=256)
    aims = {"vllm": 50} if path == "batched" else {}
    results = compare(benchmark, path, work, peers, "append", "steps", **aims)
    counts = results["ours"][0]["counts"]
    assert (counts["steps"], counts["tokens"]) == (401, 256 * 401)
    assert all(set(result["hits"]) == {0} for turns in results.values() for result in turns)
    report(benchmark)


@pytest.mark.benchmark(group="pool sizes, every block cached, block 16", timer=CLOCK.read)
def test_pool_sizes(benchmark: BenchmarkFixture) -> None:
    """Each new block evicts the content of another. nano-vllm caches nothing that is not in use, so it is not here.

    Beside it, what no cache can do without: a dict of as many blocks, in which each new one takes the oldest's place.
    How much longer that takes in a larger dict is what waiting for memory costs.
    """
    sizes = [1_000, 10_000, 100_000] if QUICK else [1_000, 10_000, 100_000, 1_000_000]
    pools = {size: ours.PerSequence(size, BLOCK_SIZE) for size in sizes}
    for pool in pools.values():
        pool.fill()
    dicts = {size: OrderedDict.fromkeys(getrandbits(63) for _ in range(size)) for size in sizes}
    times: dict[str, dict[int, list[float]]] = {
        unit: {size: [] for size in sizes} for unit in ("block", "token", "key")
    }

    def all_sizes() -> None:
        work = workload.unrelated(
            200, (100, 500), 33, num_blocks=0, block_size=BLOCK_SIZE, max_running=16, seed=len(times["token"][1_000])
        )
        for size, pool in pools.items():
            evictions = pool.manager.stats().evictions
            result = workload.drive(pool, work)
            assert set(result["hits"]) == {0}
            assert pool.manager.stats().evictions - evictions >= result["counts"]["blocks"] - 200
            seconds, counts = result["seconds"], result["counts"]
            times["block"][size].append((seconds["admission"] + seconds["release"]) / counts["blocks"] * 1e6)
            times["token"][size].append(seconds["append"] / counts["tokens"] * 1e6)
            times["key"][size].append(replace_oldest(dicts[size], counts["blocks"]) * 1e6)
        CLOCK.seconds += sum(seconds.values())  # of the largest

    benchmark.pedantic(all_sizes, rounds=ROUNDS)
    figures = Figures(benchmark)
    for operation, unit in (("admit and release", "block"), ("append", "token"), ("an LRU dict", "key")):
        by_size = times[unit]
        medians = {size: statistics.median(by_size[size]) for size in sizes}
        if unit != "key":  # the dict is in the plot, to be seen beside: it is not ours to get better or worse
            figures.over(f"1,000 blocks, {operation}", by_size[sizes[-1]], by_size[sizes[0]], aim=1.25)
        figures.curve(
            "Latency against pool size, every block cached", f"{operation}, a {unit}", medians, x="blocks", y="us"
        )
        figures.note(**{f"{operation}, us a {unit}": {size: round(value, 3) for size, value in medians.items()}})
    figures.show()


def replace_oldest(cached: OrderedDict[int, None], count: int) -> float:
    """Seconds for each of `count` new entries."""
    new = [getrandbits(63) for _ in range(count)]
    started = perf_counter()
    for key in new:
        cached.popitem(last=False)
        cached[key] = None
    return (perf_counter() - started) / count


@pytest.mark.benchmark(group="memory of a pool of 20,000 blocks of 16; the time is what making it takes")
def test_memory(benchmark: BenchmarkFixture, peers: Peers) -> None:
    """Bytes of Python objects for each block: of a pool just made, and of one whose blocks have all been used."""
    work = workload.unrelated(80, (4500, 5500), 2, num_blocks=20_000, block_size=BLOCK_SIZE, max_running=4)
    make = partial(make_ours, "per sequence", work)
    results = {"ours": workload.bytes_per_block(make, work), **peers.do("memory", work)}
    benchmark.pedantic(make, rounds=ROUNDS)
    for name, figures in results.items():
        assert 0 < figures["new"] < figures["used"]
        benchmark.extra_info |= {f"{name}_bytes_per_block_{when}": round(value, 1) for when, value in figures.items()}
    figures = Figures(benchmark)
    for peer in peers.present:
        for when in ("new", "used"):  # bytes instead of seconds: so many times as small
            theirs, mine, aim = results[peer.name][when], results["ours"][when], 1 if peer.name == "vllm" else None
            figures.times(f"{peer.name} in memory, {when}", [theirs], [mine], aim=aim)
    without(figures, peers)
    report(benchmark, blocks=20_000)


@pytest.mark.benchmark(group="prefix hashing, 100 prompts of 1,600 tokens, block 16", timer=CLOCK.read)
def test_hashing(benchmark: BenchmarkFixture, peers: Peers) -> None:
    """Hashing a prompt's blocks as the prefix cache does, beside the bare hash function on bytes that are there."""
    work = workload.unrelated(100, (1600, 1600), 2, num_blocks=100, block_size=BLOCK_SIZE, max_running=1)
    manager = BlockManager(100, BLOCK_SIZE)
    prompts = [request["prompt"] for request in work["requests"]]
    keys = [[manager.sequence(prompt).key(i, BLOCK_SIZE) for i in range(100)] for prompt in prompts]
    root = SHARED.root_hash(xxh3_chained)
    hashed: list[int] = []

    def hash_block(tokens: bytes, parent_hash: int) -> int:
        hashed.append(xxh3_chained(tokens, parent_hash))
        return hashed[-1]

    times: dict[str, list[float]] = {"ours": [], "bare": [], **{peer.name: [] for peer in peers.present}}

    def bare() -> list[int]:
        hashes = []
        for prompt in keys:
            chained = root
            for key in prompt:
                chained = xxh3_64_intdigest(key, seed=chained)
            hashes.append(chained)
        return hashes

    def per_block(seconds: float) -> float:
        return seconds / 10_000 * 1e6

    def others_turn() -> None:
        times["bare"].append(per_block(workload.seconds_each(bare)))
        for name, seconds in peers.do("hash", work).items():
            times[name].append(per_block(seconds))

    def our_turn() -> list[int]:
        seqs = [manager.sequence(prompt) for prompt in prompts]
        started = perf_counter()
        hashes = [manager._prefixes._hashes(seq, 100)[-1] for seq in seqs]
        seconds = perf_counter() - started
        CLOCK.seconds += seconds
        times["ours"].append(per_block(seconds))
        return hashes

    # The manager itself computes these hashes, each once, on top of the namespace's.
    ours.PerSequence(101, BLOCK_SIZE, hash_block=hash_block).admit(prompts[0], 0)
    assert len(hashed) == 1 + 100
    assert hashed[-1] == bare()[0]
    assert benchmark.pedantic(our_turn, setup=others_turn, rounds=ROUNDS) == bare()
    figures = Figures(benchmark)
    figures.over("the bare hash function", times["ours"], times["bare"])
    beside(figures, times, "us_per_block", peers)
    figures.show()
