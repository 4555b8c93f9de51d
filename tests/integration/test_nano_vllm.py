"""nano-vllm's own scheduler and sequences run on our block manager, which stands where its block manager stood.

nano-vllm's package imports CUDA kernels, so its modules are loaded one by one, from their files. The model is a shadow
memory: the KV of a token is derived from what is read back, through the block table, of all tokens before it, and the
next token from that. A block that is shared wrongly, written twice or not written changes the output.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.allocator import compat

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/nano-vllm.md").read_text(encoding="utf-8")
HELPERS = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)[-1]
FAULTS = [
    (re.findall(r"`(.+?)`", code), result)
    for code, result in re.findall(r"^\|[^|]*\| (`[^|]*`) \| `([^|]*)` \|", DOCUMENT, flags=re.MULTILINE)
]
VOCABULARY = 50
EOS = 0


PACKAGE = importlib.util.find_spec("nanovllm")
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="nano-vllm is not installed (pip install --no-deps nano-vllm-fork)"
)


def load(name: str) -> ModuleType:
    assert PACKAGE is not None
    assert PACKAGE.submodule_search_locations is not None
    path = Path(PACKAGE.submodule_search_locations[0], *name.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nano(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """nano-vllm's modules, with ours as `nanovllm.engine.block_manager`: the one import that changes."""
    config = ModuleType("nanovllm.config")
    config.Config = object  # type: ignore[attr-defined]
    for name in ("", ".config", ".engine", ".sampling_params", ".engine.sequence", ".engine.scheduler"):
        monkeypatch.setitem(sys.modules, f"nanovllm{name}", config)  # whatever is loaded below goes with these
    monkeypatch.setitem(sys.modules, "nanovllm.engine.block_manager", compat)
    params = load("nanovllm.sampling_params").SamplingParams
    sequence = load("nanovllm.engine.sequence").Sequence
    scheduler = load("nanovllm.engine.scheduler")
    if "hash_blocks" in inspect.getsource(scheduler):
        pytest.skip("this nano-vllm has the interface of April 2026 and later, with hash_blocks")
    assert scheduler.BlockManager is compat.BlockManager
    return SimpleNamespace(Params=params, Sequence=sequence, Scheduler=scheduler.Scheduler)


class Model:
    """The part of nano-vllm's model runner that computes slots, over a dictionary."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kv: dict[int, int] = {}
        self.num_computed = 0

    def run(self, seqs: list[Any], is_prefill: bool) -> list[int]:
        for seq in seqs:
            if is_prefill:
                for i in range(seq.num_cached_tokens, len(seq)):
                    self.write(seq, i, seq.block_table[i // self.block_size] * self.block_size + i % self.block_size)
            else:
                slot = seq.block_table[-1] * self.block_size + seq.last_block_num_tokens - 1
                self.write(seq, len(seq) - 1, slot)
        return [self.read(seq, len(seq))[-1] % VOCABULARY for seq in seqs]

    def write(self, seq: Any, i: int, slot: int) -> None:
        self.num_computed += 1
        self.kv[slot] = next_kv(self.read(seq, i), seq[i])

    def read(self, seq: Any, length: int) -> list[int]:
        slots = (seq.block_table[i // self.block_size] * self.block_size + i % self.block_size for i in range(length))
        return [self.kv[slot] for slot in slots]


def next_kv(before: list[int], token: int) -> int:
    return hash((tuple(before), token))


def run_alone(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request gives by itself, without a cache, blocks or a scheduler."""
    kv: list[int] = []
    output: list[int] = []
    for token in prompt:
        kv.append(next_kv(kv, token))
    while True:
        output.append(kv[-1] % VOCABULARY)
        if output[-1] == EOS or len(output) == max_tokens:
            return output
        kv.append(next_kv(kv, output[-1]))


def serve(scheduler: Any, model: Model, arriving: Iterable[list[Any]], at_once: int) -> None:
    """Runs until all is served. Sequences arrive in groups, while fewer than `at_once` groups are in the system."""
    manager, arrivals, groups = scheduler.block_manager, iter(arriving), list[list[Any]]()
    for _ in range(5000):
        groups = [group for group in groups if not group[0].is_finished]
        for group in itertools.islice(arrivals, at_once - len(groups)):
            groups.append(group)
            for seq in group:
                scheduler.add(seq)
        if not groups:
            break
        seqs, is_prefill = scheduler.schedule()
        scheduler.postprocess(seqs, model.run(seqs, is_prefill))
        manager.manager.check()
    assert scheduler.is_finished()
    assert len(manager.free_block_ids) == len(manager.blocks)


def requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts that mostly begin like another one, and how many tokens each may generate."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (3, 8, 8, 11)]
    return [
        (rng.choice(prefixes) + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 5))], rng.randrange(1, 13))
        for _ in range(count)
    ]


def config(num_blocks: int, block_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        max_num_seqs=8, max_num_batched_tokens=64, eos=EOS, num_kvcache_blocks=num_blocks, kvcache_block_size=block_size
    )


def serve_plain(nano: SimpleNamespace, scheduler: Any, block_size: int, at_once: int) -> tuple[int, int]:
    """Serve a hundred requests and compare them with those run alone. Returns the tokens computed, and the least
    number of them without a prefix cache."""
    model, work = Model(block_size), requests(100, seed=block_size)
    seqs = [nano.Sequence(prompt, nano.Params(max_tokens=max_tokens)) for prompt, max_tokens in work]
    serve(scheduler, model, ([seq] for seq in seqs), at_once)
    assert [seq.completion_token_ids for seq in seqs] == [run_alone(*request) for request in work]
    return model.num_computed, sum(len(seq) - 1 for seq in seqs)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(224, 1), (56, 4), (16, 16)])
def test_the_scheduler_unchanged(
    nano: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, num_blocks: int, block_size: int
) -> None:
    """Room for eight of the longest requests."""
    monkeypatch.setattr(nano.Sequence, "block_size", block_size)
    computed, known = serve_plain(nano, nano.Scheduler(config(num_blocks, block_size)), block_size, at_once=8)
    assert computed < 0.8 * known if block_size < 16 else computed == known  # a shared prefix is 11 tokens at most


def test_guided_pairs(nano: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork's classifier-free guidance: it reads `free_block_ids` and allocates two sequences for one answer."""
    monkeypatch.setattr(nano.Sequence, "block_size", 4)
    scheduler, model = nano.Scheduler(config(56, 4)), Model(4)
    work = requests(40, seed=1)
    pairs = []
    for prompt, max_tokens in work:
        params = nano.Params(max_tokens=max_tokens, cfg_scale=2.0)
        plain = nano.Sequence(prompt[-1:], params, is_unconditional=True)
        guided = nano.Sequence(prompt, params, conditional_seq=plain)
        plain.paired_seq = guided
        pairs.append([guided, plain])
    serve(scheduler, model, pairs, at_once=4)
    for (guided, plain), request in zip(pairs, work, strict=True):
        assert guided.completion_token_ids == plain.completion_token_ids == run_alone(*request)


def preempting(scheduler: type) -> Any:
    """The fork's scheduler leaves a preempted sequence among the running ones, and fails on any block manager, its own
    too; upstream's takes it off, and so does this one."""

    class Scheduler(scheduler):  # type: ignore[misc, valid-type]
        num_preempted = 0

        def preempt(self, seq: Any) -> None:
            self.num_preempted += 1
            super().preempt(seq)
            if seq in self.running:
                self.running.remove(seq)

    return Scheduler


@pytest.mark.parametrize(("num_blocks", "block_size"), [(30, 1), (9, 4), (4, 16)])
def test_preemption(nano: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, num_blocks: int, block_size: int) -> None:
    """A pool that is little more than the longest request."""
    monkeypatch.setattr(nano.Sequence, "block_size", block_size)
    scheduler = preempting(nano.Scheduler)(config(num_blocks, block_size))
    serve_plain(nano, scheduler, block_size, at_once=100)
    assert scheduler.num_preempted > 10


def test_random_schedules(nano: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block size, pool, requests and order of arrival. Every output is that of the request alone."""
    num_preempted = num_saved = 0
    token = st.integers(1, 3)  # so few that prompts begin alike

    @settings(max_examples=100, deadline=None)
    @given(
        block_size=st.integers(1, 5),
        spare=st.integers(0, 12),
        work=st.lists(st.tuples(st.lists(token, min_size=1, max_size=14), st.integers(1, 10)), min_size=1, max_size=12),
        at_once=st.integers(1, 12),
    )
    def serve_any(block_size: int, spare: int, work: list[tuple[list[int], int]], at_once: int) -> None:
        nonlocal num_preempted, num_saved
        monkeypatch.setattr(nano.Sequence, "block_size", block_size)
        longest = max(len(prompt) + max_tokens for prompt, max_tokens in work)
        model, num_blocks = Model(block_size), -(-longest // block_size) + spare
        scheduler = preempting(nano.Scheduler)(config(num_blocks, block_size))
        seqs = [nano.Sequence(prompt, nano.Params(max_tokens=max_tokens)) for prompt, max_tokens in work]
        serve(scheduler, model, ([seq] for seq in seqs), at_once)
        assert [seq.completion_token_ids for seq in seqs] == [run_alone(*request) for request in work]
        num_preempted += scheduler.num_preempted
        num_saved += sum(len(seq) - 1 for seq in seqs) > model.num_computed

    serve_any()
    assert min(num_preempted, num_saved) > 3


@pytest.fixture
def original(nano: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """nano-vllm's own block manager, back in its place."""
    pytest.importorskip("numpy", reason="the original's block manager needs numpy")
    monkeypatch.setattr(nano.Sequence, "block_size", nano.Sequence.block_size)  # put back afterwards
    return load("nanovllm.engine.block_manager").BlockManager


def test_the_interface_is_that_of_the_original(original: Any) -> None:
    names = [name for name in vars(original) if name == "__init__" or not name.startswith("_")]
    assert len(names) == 7
    for name in names:
        theirs, ours = (inspect.signature(getattr(cls, name)) for cls in (original, compat.BlockManager))
        described = [[(p.name, p.kind, p.default) for p in s.parameters.values()] for s in (theirs, ours)]
        assert described[0] == described[1], name
    assert set(vars(original(1, 1))) <= set(dir(compat.BlockManager(1, 1)))
    assert set(vars(original(1, 1).blocks[0])) <= set(dir(compat.BlockManager(1, 1).blocks[0]))


@pytest.mark.parametrize(("lines", "result"), FAULTS, ids=[result for _, result in FAULTS])
def test_the_original_has_the_fault(original: Any, lines: list[str], result: str) -> None:
    """What docs/nano-vllm.md says of it is true, and the test that it names exists."""
    scope: dict[str, Any] = {}
    exec(HELPERS, scope)
    assert scope["BlockManager"] is original
    *statements, expression = "; ".join(lines).split("; ")
    exec("\n".join(statements), scope)
    assert repr(eval(expression, scope)) == result


def test_the_faults_are_tested() -> None:
    unit_tests = (ROOT / "tests/unit/test_compat.py").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", DOCUMENT)
    assert len(named) == len(FAULTS) + 2 == 16
    assert not [name for name in named if f"def {name}(" not in unit_tests]
