"""The manager under the state machine, and the machine's own model where an answer can be worked out by hand."""

from __future__ import annotations

import pytest

from kvproof.fuzz.machines.manager import ManagerMachine
from kvproof.fuzz.model import ModelManager, ModelSequence

TestManagerMachine = ManagerMachine.TestCase


def computed(model: ModelManager, tokens: list[int], namespace: str = "") -> ModelSequence:
    seq = ModelSequence(namespace, tokens)
    assert model.admit(seq) == "now"
    assert model.commit(seq, len(tokens) - seq.computed) == []
    return seq


def test_the_model_finds_whole_blocks_short_of_the_last_token() -> None:
    model = ModelManager(8, 2)
    computed(model, [1, 2, 3, 4, 5])
    hits = {
        tokens: model.hits(ModelSequence("", list(tokens)))
        for tokens in [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 4, 4, 5), (3, 4, 5)]
    }
    assert list(hits.values()) == [[], [0], [0], [0, 1], [0], []]
    assert model.hits(ModelSequence("other", [1, 2, 3, 4, 5])) == []


def test_the_model_takes_empty_blocks_then_the_oldest_tail() -> None:
    model = ModelManager(5, 1)
    old, new = computed(model, [1, 2]), computed(model, [3, 4])
    model.release(old)
    model.release(new)
    assert (model.empty, model.cached) == ([4], [1, 0, 3, 2])
    assert [model.take() for _ in range(4)] == [4, 1, 0, 3]
    assert model.holds == {2: ("", (3,), ())}


def test_the_model_lets_no_child_outlive_its_parent() -> None:
    model = ModelManager(3, 1, policy="newest first")
    model.release(computed(model, [1, 2, 3]))
    assert model.cached == [2, 1, 0]
    # Block 0 heads the prefix; what hung on it lies on top of it when it is handed out, so block 2 goes first.
    assert model.take() == 2
    assert (model.holds, model.empty, model.cached) == ({}, [0, 1], [])


@pytest.mark.parametrize("merge", [True, False])
def test_the_model_on_duplicates(merge: bool) -> None:
    model = ModelManager(4, 2, merge=merge)
    first, second = ModelSequence("", [1, 2]), ModelSequence("", [1, 2])
    model.admit(first)
    model.admit(second)
    model.commit(first, 2)
    assert model.commit(second, 2) == ([(0, 1, 0)] if merge else [])
    assert second.table == ([0] if merge else [1])
    assert model.refs == ([2, 0, 0, 0] if merge else [1, 1, 0, 0])
    model.release(first)
    assert model.hits(ModelSequence("", [1, 2, 3])) == ([0] if merge else [1])  # the copy in use, not the free one


@pytest.mark.parametrize(
    ("length", "max_length", "answer"),
    [(5, None, "later"), (4, None, "now"), (8, None, "later"), (9, None, "never"), (1, 8, "now"), (1, 9, "never")],
)
def test_the_model_answers(length: int, max_length: int | None, answer: str) -> None:
    """Four blocks of two tokens, one of them cached and hit, two taken."""
    model = ModelManager(4, 2)
    model.release(computed(model, [0, 0]))
    computed(model, [9, 9, 9])
    seq = ModelSequence("", [0] * length, max_length)
    assert model.admit(seq) == answer
    assert (len(seq.table), seq.computed) == ({1: (1, 0), 4: (2, 2)}[length] if answer == "now" else (0, 0))
