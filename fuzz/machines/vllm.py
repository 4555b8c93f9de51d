"""State machines for the vLLM integration: vLLM's schedulers on our manager, and on our pool, beside vLLM's own.

All get the same requests and run the same schedules. Each has a worker that follows the scheduler's orders as the model
runner does, and notices any slot that is read and does not hold what its reader computed (`vllm_engine`). Runs where
vLLM is installed:

    python -m kvproof.fuzz.machines.vllm [--examples N]             the machines and the cases of vllm_scenarios
    python -m kvproof.fuzz.machines.vllm [--examples N] --faults    what notices each planted fault
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler

from kvproof.backend.integrations.vllm import AsyncPoolScheduler, AsyncScheduler, PoolScheduler, Scheduler
from kvproof.backend.integrations.vllm.manager import KVCacheManager
from kvproof.fuzz.adapters import machine_for
from kvproof.fuzz.machines.vllm_engine import VOCABULARY, Ask, Engine, Shape
from kvproof.fuzz.machines.vllm_faults import FAULTS
from kvproof.fuzz.machines.vllm_scenarios import SCENARIOS

WHICH = st.integers(0, 31)
NAMESPACES = st.sampled_from(((None, None),) * 6 + (("x", None), (None, "y")))
MEDIA = st.sampled_from(((),) * 6 + ((("cat", 1, 3),), (("dog", 1, 3),), (("cat", 2, 3),)))


class Side(RuleBasedStateMachine):
    """Our side of the comparison, and vLLM's. Subclasses say which schedulers of ours, and what they may differ in."""

    ours: tuple[Callable[..., Any], Callable[..., Any]]
    shapes: st.SearchStrategy[dict[str, Any]]
    sound = False
    publishes_alike = True

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        drawn = data.draw(self.shapes)
        capacity = (drawn["num_blocks"] - 1) * drawn["block_size"]
        shape = self.shape = Shape(**drawn, max_model_len=min(capacity // len(drawn.get("windows", (None,))), 48))
        stock = StockAsyncScheduler if shape.asynchronous else StockScheduler
        self.engines = [Engine(stock, shape), Engine(self.ours[shape.asynchronous], shape)]
        self.beside = self.sound = True
        self.was_reset = False
        self.was_preempted = False
        self.names: list[str] = []
        self.prompts: list[tuple[int, ...]] = [(0,)]
        self.started()

    @rule(
        base=WHICH,
        keep=st.none() | st.integers(0, 12),
        suffix=st.lists(st.integers(0, VOCABULARY - 1), max_size=10),
        max_tokens=st.integers(1, 8),
        namespace=NAMESPACES,
        media=MEDIA,
        reads_cache=st.sampled_from((True,) * 5 + (False,)),
        priority=st.integers(0, 2),
    )
    def add(
        self,
        base: int,
        keep: int | None,
        suffix: list[int],
        max_tokens: int,
        namespace: tuple[str | None, str | None],
        media: tuple[tuple[str, int, int], ...],
        reads_cache: bool,
        priority: int,
    ) -> None:
        """A request, whose prompt usually begins like one that was seen before."""
        prompt = self.prompts[-1 - base % len(self.prompts)][:keep] + tuple(suffix)
        prompt = prompt[: self.shape.max_model_len - 1] or (0,)
        name = str(len(self.names))
        salt, adapter = namespace
        ask = Ask(name, prompt, max_tokens, salt, adapter, media, reads_cache, priority)
        self.names.append(name)
        self.prompts.append(prompt)
        for engine in self.engines:
            engine.add(ask)

    @rule(n=st.integers(1, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        if self.names:
            for engine in self.engines:
                engine.abort(self.names[which % len(self.names)])

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        """The weights have changed. Without `running`, it is refused while blocks are in use."""
        answers = [engine.scheduler.reset_prefix_cache(reset_running_requests=running) for engine in self.engines]
        self.was_reset |= answers[1]
        if self.beside:
            assert answers[0] == answers[1]

    def step(self) -> None:
        self.sound = False
        stock, ours = (engine.step() for engine in self.engines)
        self.check()
        self.sound = True
        self.was_preempted |= bool(ours["preempted"])
        if self.beside and stock != ours:
            self.beside = False
            self.differ(stock, ours)
        for name, output in self.engines[1].outputs.items():
            if len(output) == 3:  # the next turn of a conversation begins like this
                self.prompts.append(self.engines[1].worker.asks[name].prompt + tuple(output))

    def differ(self, stock: dict[str, Any], ours: dict[str, Any]) -> None:
        raise AssertionError(f"vLLM's own: {stock}, ours: {ours}")

    def started(self) -> None:
        """The engines are there."""

    def check(self) -> None:
        """Ours is sound."""
        raise NotImplementedError

    def teardown(self) -> None:
        if not self.sound:  # the failure is told already
            return
        for _ in range(300):
            if not any(engine.scheduler.has_unfinished_requests() for engine in self.engines):
                break
            self.step()
        for engine in self.engines:
            engine.run_dry()
            assert engine.scheduler.kv_cache_manager.usage == 0, "blocks are in use, and nobody uses them"
        self.check()
        stock, ours = self.engines
        assert {name: out for name, out in ours.outputs.items() if len(out) == len(stock.outputs[name])} == {
            name: out for name, out in stock.outputs.items() if len(out) == len(ours.outputs[name])
        }
        if self.beside:
            event("beside to the end")
            assert stock.outputs == ours.outputs
            assert not self.publishes_alike or stock.prefills == ours.prefills
            assert [stats.prefix_cache_stats for stats in stock.stats] == [
                stats.prefix_cache_stats for stats in ours.stats
            ]


def shapes(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "num_blocks": st.integers(4, 16),
        "block_size": st.sampled_from((1, 2, 3, 4)),
        "max_batched_tokens": st.sampled_from((8, 16, 32)),
        "max_seqs": st.sampled_from((1, 3, 8)),
        "caching": st.sampled_from((True, True, True, False)),
        "whole_prompt_must_fit": st.booleans(),
        "watermark": st.sampled_from((0.0, 0.0, 0.2)),
        "policy": st.sampled_from(("fcfs", "fcfs", "priority")),
        "long_prefill": st.sampled_from((0, 0, 3)),
        "num_drafts": st.sampled_from((0, 0, 2)),
        "eagle": st.booleans(),
        "asynchronous": st.booleans(),
        "events": st.sampled_from((False, False, True)),
    }
    return st.fixed_dictionaries(drawn | more).map(_consistent)


def _consistent(drawn: dict[str, Any]) -> dict[str, Any]:
    """Drafts are for synchronous scheduling here: with the other, vLLM's workers make them up themselves."""
    if drawn["asynchronous"] or not drawn["num_drafts"]:
        drawn |= {"num_drafts": 0, "eagle": False}
    return drawn


class VllmManagerMachine(Side):
    """Our block manager. It may be ahead of vLLM's, and then goes its own way.

    Ahead, because of two equal blocks it takes the one that is in use anyway, while vLLM takes the older one, which may
    cost a free block. And behind in one case: what was preempted in the same scheduling that gave it blocks, which only
    the policy "priority" does, was never written, and vLLM finds it all the same.
    """

    ours = (Scheduler, AsyncScheduler)
    shapes = shapes()
    twins = False

    def started(self) -> None:
        blocks = self.engines[1].scheduler.kv_cache_manager.blocks
        publish = blocks._prefixes.publish_duplicate

        def publish_duplicate(block: int, node: int) -> None:
            self.twins = True
            publish(block, node)

        blocks._prefixes.publish_duplicate = publish_duplicate

    def step(self) -> None:
        index = self.engines[1].scheduler.kv_cache_manager.blocks.index
        self.twins = any(len(node.blocks) > 1 for node in index.nodes())
        super().step()

    def differ(self, stock: dict[str, Any], ours: dict[str, Any]) -> None:
        ahead = len(ours["scheduled"]) > len(stock["scheduled"]) or ours["usage"] < stock["usage"]
        if self.twins and ahead and stock["scheduled"].items() <= ours["scheduled"].items():
            event("ahead")
        elif self.shape.policy == "priority" and self.was_preempted:
            event("what was preempted before it ran is not found")
        else:
            super().differ(stock, ours)

    def check(self) -> None:
        manager: KVCacheManager = self.engines[1].scheduler.kv_cache_manager
        manager.blocks.check()
        if self.shape.events:
            self.check_events(manager)

    def check_events(self, manager: KVCacheManager) -> None:
        """Replayed, the events give what is findable."""
        engine = self.engines[1]
        engine.events += manager.take_events()
        live: dict[Any, Any] = {}
        for told in engine.events:
            name = type(told).__name__
            if name == "BlockStored":
                parent = told.parent_block_hash
                assert parent is None or parent in live, "a block was stored below one that is not there"
                assert len(told.token_ids) == len(told.block_hashes) * self.shape.block_size
                for block in told.block_hashes:
                    assert block not in live, "stored twice"
                    live[block] = parent
                    parent = block
            elif name == "BlockRemoved":
                for block in told.block_hashes:
                    del live[block]
            else:
                live.clear()
        assert len(live) == len(list(manager.blocks.index.nodes()))


class VllmWindowMachine(VllmManagerMachine):
    """A model of sliding windows only, through pools that may be smaller than a sequence.

    vLLM finds the last window of a prefix whatever became of the rest, and publishes only what such a hit needs. Ours
    finds a block by its whole prefix. So the two go their own ways; outputs and soundness are compared.
    """

    publishes_alike = False

    shapes = shapes(
        windows=st.sampled_from((1, 2, 3, 5, 8)).map(lambda window: (window,)), eagle=st.just(False),
        num_blocks=st.integers(10, 16),
    )  # fmt: skip

    def differ(self, stock: dict[str, Any], ours: dict[str, Any]) -> None:
        event("on its own way")


class VllmPoolMachine(Side):
    """Our pool below vLLM's own manager, with hybrid groups: the same to the last block.

    Until a reset, which leaves the free blocks in another order.
    """

    ours = (PoolScheduler, AsyncPoolScheduler)
    shapes = shapes(
        windows=st.sampled_from(((None,), (None,), (4,), (None, 3), (2, None, 5))), num_blocks=st.integers(12, 40),
        eagle=st.just(False),
    )  # fmt: skip

    def check(self) -> None:
        stock, ours = (engine.scheduler.kv_cache_manager.block_pool for engine in self.engines)
        ours.check()
        if self.beside:
            queues = [[b.block_id for b in pool.free_block_queue.get_all_free_blocks()] for pool in (stock, ours)]
            assert len(queues[0]) == len(queues[1])
            assert self.was_reset or queues[0] == queues[1]
            assert len(stock.cached_block_hash_to_block) == len(ours.cached_block_hash_to_block)


MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    machine.__name__: machine
    for machine in (
        VllmManagerMachine,
        VllmWindowMachine,
        VllmPoolMachine,
        machine_for("kvproof.backend.integrations.vllm.pool:BlockPool"),
    )
}


def finders(examples: int) -> dict[str, Callable[[], None]]:
    """The scenarios, which are quick, and the machines; what fails, raises."""
    machines = {name: partial(_run, machine, examples) for name, machine in MACHINES.items()}
    return {scenario.__name__: scenario for scenario in SCENARIOS} | machines


def hunt(examples: int) -> Iterator[tuple[str, str | None]]:
    """Each fault, and what noticed it."""
    for fault in FAULTS:
        with fault.planted():
            told = ((name, _told(run)) for name, run in finders(examples).items())
            yield fault.name, next((f"{name}: {failure}" for name, failure in told if failure), None)


def _run(machine: type[RuleBasedStateMachine], examples: int) -> None:
    quiet = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=quiet)


def _told(run: Callable[[], None]) -> str | None:
    try:
        run()
    except Exception as error:  # whatever it is, it was noticed
        return f"{type(error).__name__}: {error}"[:900]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Run vLLM's schedulers on our manager and pool beside vLLM's own.")
    parser.add_argument("--examples", type=int, default=100, help="for each machine (default 100)")
    parser.add_argument("--faults", action="store_true", help="plant each fault; all must be noticed")
    args = parser.parse_args()
    found = (
        dict(hunt(args.examples)) if args.faults else {name: _told(run) for name, run in finders(args.examples).items()}
    )
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if any((told is None) == args.faults for told in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
