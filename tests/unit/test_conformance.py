"""The conformance kit: green on what is right, and each check red on the fault that it is there for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from torch import Tensor

from kvproof.allocator import FIFO, LRU, BlockManager
from kvproof.attention import AttentionBackend, BackendUnavailable, CacheSpec, Capabilities, Feature
from kvproof.attention.reference import ReferenceAttention
from kvproof.backend import Step, UnknownPlugin
from kvproof.fuzz.conformance import (
    Report,
    allocator_checks,
    attention_checks,
    check_allocator,
    check_attention_backend,
    check_eviction_policy,
    check_model_runner,
    policy_checks,
    runner_checks,
)
from kvproof.fuzz.conformance.attention import LSE, RANDOM, checks
from kvproof.fuzz.conformance.batches import BLOCK_SIZES, DTYPES, FEATURES, GROUP_SIZES, HEAD_SIZES, LAYOUTS, shapes
from kvproof.fuzz.conformance.faults import ATTENTION_FAULTS, METADATA_FAULTS, MethodFault
from kvproof.fuzz.conformance.report import Effort, Result
from kvproof.fuzz.dense import dense
from kvproof.fuzz.toy import ToyRunner

pytestmark = pytest.mark.usefixtures("one_thread")


class OutOfTree(AttentionBackend):
    """A backend of somebody else's: small, slow, and particular about what it takes."""

    name = "out-of-tree"

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float32"}),
            head_sizes=frozenset({8, 16}),
            block_sizes=frozenset({1, 4, 5}),
            layouts=frozenset({"NHD"}),
        )

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.kv(layer)
        batch, out = self.batch, torch.empty_like(q)
        for r in range(batch.num_rows):
            mine = slice(int(batch.qo_indptr[r]), int(batch.qo_indptr[r + 1]))
            table = batch.kv_indices[batch.kv_indptr[r] : batch.kv_indptr[r + 1]].long()
            k, v = (x[table].flatten(0, 1)[: batch.seq_lens[r]] for x in (keys, values))
            k, v = (x.repeat_interleave(self.spec.group_size, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[mine], k) * self.spec.softmax_scale
            hidden = torch.arange(len(k)) > batch.positions[mine][:, None]
            out[mine] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        return out


test_a_backend_of_somebody_elses = attention_checks(OutOfTree, examples=10)
test_lru = policy_checks(LRU, examples=20)
test_fifo = policy_checks(FIFO, examples=20)
test_block_manager = allocator_checks(BlockManager, examples=20)
test_toy_runner = runner_checks(ToyRunner(), examples=20)


@pytest.mark.parametrize("fault", ATTENTION_FAULTS, ids=str)
def test_a_planted_fault_is_noticed_by_its_check(fault: MethodFault) -> None:
    with fault.planted():
        result = outcome(fault.backend, fault.noticed_by.__name__.replace("_", " "), examples=3000, shrink=False)
    assert result.error is not None
    assert not isinstance(result.error, (NameError, AttributeError, TypeError))  # the fault itself does not run
    assert result.examples <= 200


def test_faults_have_names_of_their_own_and_every_check_but_three_has_one() -> None:
    """The other three compare a backend with itself, and have wrong backends of their own below."""
    assert len({fault.name for fault in ATTENTION_FAULTS}) == len(ATTENTION_FAULTS)
    assert len(METADATA_FAULTS) >= 10
    assert {check.__name__ for check in (*RANDOM, *LSE)} - {
        fault.noticed_by.__name__ for fault in ATTENTION_FAULTS
    } == {
        "physical_blocks_may_be_permuted",
        "rows_do_not_depend_on_each_other",
        "a_prefix_may_be_shared_or_copied",
    }


def failed(report: Report) -> set[str]:
    return {result.name for result in report.failures}


def outcome(backend: type[AttentionBackend], name: str, **effort: Any) -> Result:
    (check,) = (check for check in checks(backend) if check.name == name)
    return check.run(Effort(**effort))


class Ordered(OutOfTree):
    """Right as long as a table's blocks ascend."""

    def _plan(self, batch: Any) -> None:
        for r in range(batch.num_rows):
            part = slice(int(batch.kv_indptr[r]), int(batch.kv_indptr[r + 1]))
            batch.kv_indices[part] = batch.kv_indices[part].sort().values


class Neighbourly(OutOfTree):
    """The last row also hears a little of the first."""

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        out = super()._attend(layer, q)
        out[-1:] += 1e-2 * out[:1] * (self.batch.num_rows > 1)
        return out


class Copyless(OutOfTree):
    """Its copies are no copies."""

    def copy_blocks(self, orders: Any) -> None:
        before = self.cache.clone()
        super().copy_blocks(orders)
        self.cache.copy_(before)


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        (Ordered, "physical blocks may be permuted"),
        (Neighbourly, "rows do not depend on each other"),
        (Copyless, "a prefix may be shared or copied"),
    ],
)
def test_the_metamorphic_checks_need_no_right_result(backend: type[AttentionBackend], check: str) -> None:
    assert outcome(OutOfTree, check, examples=20).error is None
    assert isinstance(outcome(backend, check, examples=200, shrink=False).error, AssertionError)


def test_the_report_shows_the_smallest_failing_case() -> None:
    """Two rows of one token are enough for the second to hear the first."""
    right = str(outcome(Neighbourly, "a step is right", examples=40))
    assert right.startswith("FAIL a step is right: ")
    assert len(re.findall(r"Row\(table=\[\d+\], context=0, query_len=1\)", right.split("Draw 1")[1])) == 2


def test_a_report_has_all_checks_and_does_not_stop_at_the_first_that_fails() -> None:
    report = check_attention_backend(Neighbourly, examples=5, shrink=False)
    assert not report.passed
    assert {"a step is right", "rows do not depend on each other"} <= failed(report)
    assert [result.name for result in report.results] == [check.name for check in checks(OutOfTree)]
    assert str(report).splitlines()[-1] == f"out-of-tree: {14 - len(report.failures)} of 14 checks passed"


class Boastful(OutOfTree):
    """Declares a feature that there is not."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), features=frozenset({"windows"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", [*FEATURES, "lse"])
def test_a_feature_that_is_declared_and_untrue_is_noticed(feature: Feature) -> None:
    class Untrue(OutOfTree):
        """Does as if it had not been asked for, or raises."""

        @classmethod
        def capabilities(cls) -> Capabilities:
            return replace(super().capabilities(), features=frozenset({feature}))

        def __init__(self, spec: CacheSpec) -> None:
            super().__init__(spec)
            self.spec = spec.model_copy(update={"scale": None})

    for check in ("log sum exps are right",) if feature == "lse" else ("a step is right", "declared is supported"):
        assert outcome(Untrue, check, examples=200, shrink=False).error is not None


def test_a_feature_that_there_is_not_is_refused() -> None:
    (failure,) = check_attention_backend(Boastful, examples=2).failures
    assert failure.name == "declared is supported"
    assert str(failure.error) == (
        "there are no features ['windows']; there are custom_scale, window, soft_cap, fp8_cache, lse"
    )


def test_everything_that_is_declared_is_drawn() -> None:
    """Within the examples of a run by hand, but for the last few of head, group and block sizes in some."""
    seen: dict[str, set[Any]] = {}

    @seed(0)
    @settings(max_examples=200, database=None, phases=(Phase.generate,))
    @given(shapes(ReferenceAttention.capabilities(), "cpu"))
    def draw(shape: dict[str, Any]) -> None:
        spec = CacheSpec(**shape, num_blocks=1)
        for name in (
            "dtype",
            "layout",
            "head_size",
            "group_size",
            "block_size",
            "scale",
            "window",
            "soft_cap",
            "k_scale",
        ):
            seen.setdefault(name, set()).add(getattr(spec, name))

    draw()
    assert seen == {
        "dtype": set(DTYPES),
        "layout": set(LAYOUTS),
        "head_size": set(HEAD_SIZES),
        "group_size": set(GROUP_SIZES),
        "block_size": set(BLOCK_SIZES),
        "scale": {None, 0.7},
        "window": {None, 1, 2, 3, 5, 17},
        "soft_cap": {None, 1.5, 20.0},
        "k_scale": {1.0, 0.5, 0.25},
    }
    assert set(FEATURES) | {"lse"} == set(get_args(Feature)) == ReferenceAttention.capabilities().features


def test_the_same_seed_gives_the_same_run() -> None:
    def told(seed: int) -> tuple[int, str]:
        result = outcome(Neighbourly, "a step is right", examples=20, seed=seed, shrink=False)
        return result.examples, str(result.error)

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_a_backend_is_skipped_in_tests_and_reported_elsewhere_where_it_cannot_run(monkeypatch: Any) -> None:
    def probe() -> None:
        raise BackendUnavailable("out-of-tree", "it is switched off", "switch it on")

    monkeypatch.setattr(OutOfTree, "probe", probe)
    with pytest.raises(pytest.skip.Exception, match="it is switched off"):
        attention_checks(OutOfTree)(checks(OutOfTree)[0])
    with pytest.raises(BackendUnavailable):
        check_attention_backend(OutOfTree)
    with pytest.raises(UnknownPlugin, match="'none such'"):
        check_attention_backend("none such")


def spec_of(dtype: Any) -> CacheSpec:
    return CacheSpec(
        num_layers=1, num_heads=1, num_kv_heads=1, head_size=2, dtype=dtype, num_blocks=1, block_size=4, soft_cap=2.0
    )


def test_the_right_result_worked_out_by_hand() -> None:
    """Two keys seen by the second query: scores 2 and 0 over sqrt(2), capped at 2, weights by their exponentials."""
    one = torch.ones((1, 1, 1, 1))
    q = torch.cat((one, one), dim=-1)
    k = torch.cat((q, 0 * q), dim=1)
    v = torch.cat((q, 3 * q), dim=1)
    out, _, bound, _ = dense(spec_of("float32"), q, k, v)
    weight = 1 / (1 + torch.tensor(-2 * torch.tanh(torch.tensor(2 / 2**0.5 / 2, dtype=torch.float64)).item()).exp())
    torch.testing.assert_close(out, (weight * 1 + (1 - weight) * 3).double().expand(1, 1, 1, 2), rtol=1e-6, atol=0)
    assert bound.max() < 1e-5
    assert dense(spec_of("bfloat16"), q, k, v).out_error.max() < 0.1
    windowed = dense(CacheSpec(**(spec_of("float32").model_dump() | {"window": 1})), q, k, v)
    assert windowed.out.flatten().tolist() == [3, 3]
    assert windowed.lse.flatten().tolist() == [0]


# ---- policies


class Newest:
    """The latest released block first, parents before their children: what a policy may do at worst."""

    def __init__(self) -> None:
        self.blocks: list[int] = []  # the next victim is the last

    def insert(self, block: int, published: int) -> None:
        self.blocks.append(block)

    def remove(self, block: int) -> None:
        self.blocks.remove(block)

    def pop(self) -> int:
        return self.blocks.pop()

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return reversed(self.blocks)


class Ungrateful(Newest):
    """Keeps what is in use."""

    def remove(self, block: int) -> None:
        pass


class Unpredictable(Newest):
    """Evicts another block than it says."""

    def pop(self) -> int:
        return self.blocks.pop(0)


class Restless(Newest):
    """Thinks again each time."""

    def pop(self) -> int:
        block = self.blocks.pop()
        self.blocks.reverse()
        return block


class Forgetful(Newest):
    """Loses every fourth block."""

    def insert(self, block: int, published: int) -> None:
        if block % 4 != 3:
            super().insert(block, published)


class Greedy(Newest):
    """Evicts, and keeps the block on its list."""

    def pop(self) -> int:
        return self.blocks[-1]


test_the_worst_policy = policy_checks(Newest, examples=20)


@pytest.mark.parametrize("policy", [Ungrateful, Unpredictable, Restless, Forgetful, Greedy])
def test_a_wrong_policy_is_noticed_in_a_pool_and_in_a_manager(policy: Callable[[], Newest]) -> None:
    report = check_eviction_policy(policy, examples=200, shrink=False)
    assert failed(report) == {"a pool evicts by it", "a manager evicts by it"}


def test_a_policy_goes_by_its_registered_name() -> None:
    report = check_eviction_policy("lru", examples=3)
    assert (report.target, report.passed) == ("lru", True)


# ---- allocators and runners


class Wrapped:
    """An allocator that has the interface and is no subclass."""

    def __init__(self, *arguments: int, **options: bool) -> None:
        self._manager = BlockManager(*arguments, **options)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class Lazy(Wrapped):
    def take_copies(self) -> list[tuple[int, int]]:
        self._manager.take_copies()
        return []


class Tenantless(BlockManager):
    """Everybody shares."""

    def sequence(self, tokens: Any, **_: Any) -> Any:
        return super().sequence(tokens)


def test_an_allocator_needs_the_interface_only() -> None:
    own_history = "sequences keep their own history"
    assert [result.name for result in check_allocator(Wrapped, examples=20).results] == [own_history]
    assert check_allocator(Wrapped, examples=20).passed
    assert failed(check_allocator(Lazy, examples=200, shrink=False)) == {own_history}
    assert failed(check_allocator(Tenantless, examples=200, shrink=False)) == {
        own_history,
        "it does what the model does",
    }


class CountsFromZero(ToyRunner):
    """Takes a token's place in the step for its place in the sequence."""

    def forward(self, step: Step) -> Tensor:
        places = torch.arange(len(step.token_ids)) % self.spec.max_length
        return super().forward(Step(step.token_ids, places, step.logits_rows, step.attention))


class Talkative(ToyRunner):
    """Gives the logits of all tokens."""

    def forward(self, step: Step) -> Tensor:
        return super().forward(Step(step.token_ids, step.positions, torch.arange(len(step.token_ids)), step.attention))


def test_a_wrong_runner_is_noticed() -> None:
    batch, asked = "logits do not depend on the batch", "logits are those that were asked for"
    assert failed(check_model_runner(CountsFromZero(), examples=50, shrink=False)) == {batch}
    assert failed(check_model_runner(Talkative(), examples=50, shrink=False)) == {batch, asked}
