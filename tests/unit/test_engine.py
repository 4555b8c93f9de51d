"""The engine on a toy model: scheduling, stopping, refusal and preemption, each with the value worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvproof.allocator import InvalidArgument, Sequence
from kvproof.backend import (
    Chunk,
    Engine,
    EngineBackend,
    EngineStalled,
    FinishReason,
    Request,
    RequestRefused,
    SamplingParams,
)
from kvproof.fuzz.machines.engine import RUNNER as TOY
from kvproof.fuzz.machines.engine import EngineMachine, alone
from kvproof.fuzz.toy import ToyRunner

pytestmark = pytest.mark.usefixtures("one_thread")


ENDLESS = ToyRunner(max_length=24)  # has no end-of-sequence token


def engine(runner: ToyRunner = ENDLESS, **options: object) -> Engine:
    return Engine(runner, **{"num_blocks": 32, "block_size": 2, **options})


def finish(engine: Engine) -> None:
    for _ in engine.run():
        engine.manager.check()
    assert engine.manager.num_used == 0


def params(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


@pytest.mark.parametrize("attention", ["torch", "reference"])
def test_every_request_gets_what_it_gets_alone(attention: str) -> None:
    class Machine(EngineMachine):
        pass

    Machine.attention = attention
    examples = 100 if attention == "torch" else 20
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=examples, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


def test_prefill_is_chunked_to_the_token_budget() -> None:
    """Ten prompt tokens at four a step: the token comes with the third step, and decodes go on beside it."""
    it = engine(max_num_seqs=2, max_num_batched_tokens=4)
    first = it.add([1, 2], params(8))
    assert it.step() == [first]
    second = it.add(list(range(10)), params(2))
    computed = []
    while second.num_output_tokens == 0:
        assert first in it.step()
        computed.append(second.seq.num_computed)
    assert computed == [3, 6, 9, 10]  # one token of each step's four decodes the first request


PREFIX = [1, 2, 3, 4, 5, 6]  # three blocks


def test_a_burst_of_requests_computes_its_prefix_once() -> None:
    it = engine(max_num_seqs=4, max_num_batched_tokens=64)
    requests = [it.add([*PREFIX, i], params(2)) for i in range(3)]
    assert it.step() == requests[:1]
    assert it.step() == requests
    assert [request.num_cached_tokens for request in requests] == [0, 6, 6]
    finish(it)
    for i, request in enumerate(requests):
        assert request.output_token_ids == alone_on(ENDLESS, [*PREFIX, i], 2)


def test_who_shares_nothing_goes_before_those_that_wait_for_a_prefix() -> None:
    it = engine(max_num_seqs=4, max_num_batched_tokens=64)
    first, second, other = (it.add(prompt, params(2)) for prompt in ([*PREFIX, 7], [*PREFIX, 8], [9, 9, 9]))
    assert it.step() == [first, other]
    assert second in it.step()


def test_nobody_takes_the_seat_of_one_that_waits_for_a_prefix() -> None:
    it = engine(max_num_seqs=2, max_num_batched_tokens=64)
    first, second, other = (it.add(prompt, params(2)) for prompt in ([*PREFIX, 7], [*PREFIX, 8], [9, 9, 9]))
    assert it.step() == [first]
    assert it.step() == [first, second]
    finish(it)
    assert other.num_output_tokens == 2


def test_a_prefix_that_is_computed_by_the_chunk_is_found_by_the_chunk() -> None:
    """Ten tokens at four a step. The second request goes on where the first is, rather than starting beside it."""
    it = engine(max_num_seqs=2, max_num_batched_tokens=4)
    first, second = (it.add([*PREFIX, 7, 8, 9, i], params(2)) for i in range(2))
    it.step()
    it.step()
    assert (first.seq.num_computed, second.seq.num_computed) == (8, 0)
    it.step()
    assert (first.seq.num_computed, second.seq.num_computed, second.num_cached_tokens) == (10, 10, 8)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"prefix_caching": False}, [*PREFIX, 7]),  # there will be nothing to find
        ({}, PREFIX[:2]),  # its last block: one token at least is computed, so the block is no hit
        ({"block_size": 16}, [*PREFIX, 7]),  # fills no block
    ],
)
def test_nobody_waits_for_a_block_that_it_could_not_find(options: dict[str, object], prompt: list[int]) -> None:
    it = engine(max_num_seqs=2, max_num_batched_tokens=64, **options)
    requests = [it.add(prompt, params(2)) for _ in range(2)]
    assert it.step() == requests


def test_nobody_waits_for_one_that_comes_after_it() -> None:
    """It could be preempted for those before it, and wait in turn."""
    it = engine(max_num_seqs=2, max_num_batched_tokens=4)
    late = it.add([*PREFIX, 7], params(2), priority=1)
    it.step()
    urgent = it.add([*PREFIX, 8], params(2), priority=-1)
    it.step()
    assert (late.seq.num_computed, urgent.num_cached_tokens) == (7, 4)


def test_decodes_are_not_held_up_by_an_older_prompt() -> None:
    it = engine(max_num_seqs=2, max_num_batched_tokens=2)
    old = it.add(list(range(12)), params(1), priority=-1)
    it.step()
    young = it.add([5], params(9))
    it.step()
    assert (old.seq.num_computed, young.num_output_tokens) == (4, 0)
    while old.finish_reason is None:
        it.step()
    finish(it)
    assert young.output_token_ids == alone_on(ENDLESS, [5], 9)


def alone_on(runner: ToyRunner, prompt: list[int], max_tokens: int) -> list[int]:
    it = Engine(runner, num_blocks=64, block_size=1, max_num_seqs=1, max_num_batched_tokens=64, attention="reference")
    request = it.add(prompt, params(max_tokens))
    finish(it)
    return request.output_token_ids


def test_a_preempted_request_is_computed_again_and_ends_the_same() -> None:
    """Two requests of 6 + 9 slots in a pool of 20: one has to give way."""
    it = engine(num_blocks=10, prefix_caching=False)
    requests = [it.add([i] * 6, params(10)) for i in (1, 2)]
    finish(it)
    assert [r.num_preemptions for r in requests] == [0, 1]
    assert it.stats.num_preemptions == 1
    for i, request in zip((1, 2), requests, strict=True):
        assert request.output_token_ids == alone_on(ENDLESS, [i] * 6, 10)


def test_the_less_urgent_request_gives_way() -> None:
    it = engine(num_blocks=10)
    late_but_urgent = [it.add([1] * 6, params(10), priority=5), it.add([2] * 6, params(10), priority=-5)]
    finish(it)
    assert [r.num_preemptions for r in late_but_urgent] == [1, 0]


def test_two_half_prefilled_prompts_cannot_block_each_other() -> None:
    """vllm#44560: each holds what the other needs. Here a prompt gets all its blocks or waits."""
    it = engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=2)
    requests = [it.add([i] * 12, params(4)) for i in (1, 2)]
    it.step()
    assert [r.seq.num_reserved for r in requests] == [12, 0]
    finish(it)
    assert [r.num_output_tokens for r in requests] == [4, 4]


def test_the_exact_fit_runs_and_one_more_is_refused() -> None:
    """The last sampled token is never computed, so 7 + 10 tokens need 16 slots."""
    it = engine(num_blocks=8)
    it.add([1] * 7, params(10))
    finish(it)
    assert it.stats.peak_used_blocks == 8
    with pytest.raises(RequestRefused, match=r"7 prompt tokens and up to 11 new ones need 17 token slots, .* has 16"):
        it.add([1] * 7, params(11))
    assert not it.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 24, "24 tokens, the model takes 24 with at least one new"),
        ([1, 13], "token id 13 is not in the vocabulary, 0 to 12"),
        ([-1], "token id -1"),
    ],
)
def test_refused_prompts_stop_nobody(prompt: list[int], message: str) -> None:
    it = engine()
    other = it.add([1, 2, 3], params(3))
    with pytest.raises(RequestRefused, match=message):
        it.add(prompt)
    finish(it)
    assert other.output_token_ids == alone_on(ENDLESS, [1, 2, 3], 3)


def test_output_ends_at_the_models_longest_sequence() -> None:
    it = engine()
    request = it.add([1] * 20, params(50))
    finish(it)
    assert (request.num_output_tokens, request.finish_reason) == (4, FinishReason.LENGTH)


def test_end_of_sequence_and_stop_tokens() -> None:
    output = alone_on(ENDLESS, [2, 4], 12)
    third = output[2]
    assert third not in output[:2]
    expected = output[:3]

    it = engine()
    by_token = it.add([2, 4], params(12, stop_token_ids=(third,)))
    finish(it)
    assert (by_token.output_token_ids, by_token.finish_reason) == (expected, FinishReason.STOP)

    it = engine(ToyRunner(max_length=24, eos_token_ids=(third,)))
    by_model, ignoring = it.add([2, 4], params(12)), it.add([2, 4], params(12, ignore_eos=True))
    finish(it)
    assert (by_model.output_token_ids, by_model.finish_reason) == (expected, FinishReason.STOP)
    assert (ignoring.output_token_ids, ignoring.finish_reason) == (output, FinishReason.LENGTH)


def test_a_stop_text_may_span_tokens() -> None:
    output = alone_on(ENDLESS, [3, 1], 12)

    def text(tokens: list[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    it = engine(detokenize=text)
    stop = text(output[3:5])[1:-1]
    request = it.add([3, 1], params(12, stop=(stop,)))
    finish(it)
    assert (request.output_token_ids, request.finish_reason) == (output[:5], FinishReason.STOP)
    with pytest.raises(RequestRefused, match="detokenizer"):
        engine().add([1], params(2, stop=("x",)))


def test_abort_releases_waiting_and_running_requests_once() -> None:
    it = engine(max_num_seqs=1)
    running, waiting = it.add([1, 2], params(9)), it.add([3, 4], params(9))
    it.step()
    for request in (running, waiting, running):
        it.abort(request)
    assert not it.has_unfinished
    assert it.manager.num_used == 0
    assert [r.finish_reason for r in (running, waiting)] == [FinishReason.ABORT] * 2
    assert it.step() == []


def test_the_second_of_two_equal_prompts_hits_and_is_counted_once() -> None:
    """Eight tokens in blocks of two: all but the last block can be found, preempted or not."""
    it = engine(num_blocks=10)
    first = it.add(list(range(8)), params(1))
    finish(it)
    second = [it.add(list(range(8)), params(10)), it.add([9] * 6, params(10))]
    finish(it)
    assert it.stats.num_preemptions > 0
    assert [r.num_cached_tokens for r in (first, *second)] == [0, 6, 0]
    assert (it.stats.num_prompt_tokens, it.stats.num_prefix_hit_tokens) == (22, 6)


def sampled(seed: int, request_seed: int | None = None, **options: object) -> list[list[int]]:
    it = engine(seed=seed, **options)
    requests: list[Request] = [it.add([1, i], params(8, temperature=5.0, seed=request_seed)) for i in range(3)]
    finish(it)
    return [r.output_token_ids for r in requests]


def test_seeds_decide_and_batching_does_not() -> None:
    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(1) == sampled(1, num_blocks=5, max_num_seqs=2, max_num_batched_tokens=2)
    assert sampled(1, request_seed=7) == sampled(2, request_seed=7)


def test_a_failing_runner_leaves_an_engine_that_goes_on() -> None:
    class Failing(ToyRunner):
        fail = False

        def forward(self, step: object) -> object:
            if self.fail:
                raise RuntimeError("out of memory")
            return super().forward(step)

    runner = Failing(max_length=24)
    it = engine(runner)
    request = it.add([1, 2, 3], params(4))
    it.step()
    runner.fail = True
    with pytest.raises(RuntimeError, match="out of memory"):
        it.step()
    it.manager.check()
    runner.fail = False
    finish(it)
    assert request.output_token_ids == alone_on(ENDLESS, [1, 2, 3], 4)


def test_blocks_held_by_a_stranger_stall_loudly() -> None:
    it = engine(num_blocks=2)
    stranger = it.manager.sequence([1, 2, 3])
    it.manager.admit(stranger)
    it.add([1, 2], params(1))
    with pytest.raises(EngineStalled, match="1 requests wait"):
        list(it.run())
    it.manager.release(stranger)
    finish(it)


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 0}, {"max_num_seqs": 8, "max_num_batched_tokens": 7}, {"num_blocks": 0}, {"block_size": 0}],
)
def test_bad_options_are_named(options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=list(options)[-1]):
        engine(**options)


def test_the_oracle_of_the_machine_agrees_with_a_lone_engine() -> None:
    it = engine(TOY, attention="reference", block_size=1)
    request = it.add([1, 2, 3], params(12))
    finish(it)
    assert (request.output_token_ids, request.finish_reason) == alone((1, 2, 3), 12)


def test_forks_copy_before_they_write() -> None:
    """Parallel sampling by hand on an `EngineBackend`: each branch goes on as it would alone."""
    backend = EngineBackend(ENDLESS.spec.cache_spec(num_blocks=16, block_size=4))
    manager = backend.manager

    def compute(*seqs: Sequence) -> list[int]:
        for seq in seqs:
            assert manager.reserve(seq, len(seq) - seq.num_computed)
        chunks = [Chunk(seq, len(seq) - seq.num_computed) for seq in seqs]
        tokens = ENDLESS.forward(backend.begin(chunks)).argmax(-1).tolist()
        backend.end(chunks)
        return tokens

    first = manager.sequence([1, 2, 3, 4, 5, 6])
    manager.admit(first)
    compute(first)
    second = manager.fork(first)
    first.append(7)
    second.append(8)
    assert compute(first, second) == [next_alone([1, 2, 3, 4, 5, 6, token]) for token in (7, 8)]
    manager.check()


def next_alone(prompt: list[int]) -> int:
    return alone_on(ENDLESS, prompt, 1)[0]


def test_a_step_that_fails_in_sampling_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine()
    request = it.add([1, 2, 3], params(4))
    with monkeypatch.context() as patch:
        patch.setattr("kvproof.backend.engine.sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.step()
    finish(it)
    assert request.output_token_ids == alone_on(ENDLESS, [1, 2, 3], 4)
