"""CUDA graphs around a model: a step whose tensors all stay where they are is captured once, and then replayed.

    attention = WithGraphs(spec)                       # an attention backend with `graph_sizes`
    engine = Engine(GraphRunner(runner), attention=attention, ...)

Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvproof.backend.runner import ModelRunner, ModelSpec, Step


@dataclass(frozen=True, slots=True)
class FixedStep(Step):
    """A step of decodes whose tensors, and what `attention` reads, lie where they lay in the last one of its size.

    All but `logits_rows`, which names live rows; the others are padding. The memory is the `owner`'s, and a graph that
    was captured on it lives no longer.
    """

    owner: object


class Graph(Protocol):
    """Work on a device that is captured once."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Capture `work` without running it. Returns its result, which holds nothing before a `replay`."""
        ...

    def replay(self) -> None:
        """Run what was captured on what its memory holds now."""
        ...


class CudaGraph:
    """A `Graph` on the current CUDA device."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        # Kernels are compiled, loaded and tuned at their first call, which a capture does not allow. What this call
        # writes, the replay writes again.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class Captured(NamedTuple):
    """A graph, where it leaves its result, and what it reads."""

    graph: Graph
    logits: Tensor
    inputs: tuple[Tensor, ...]


class GraphRunner:
    """A `ModelRunner` that replays another one's forward pass in every `FixedStep`, and calls it in others.

    Its logits are valid until the next step. The runner's `forward` must not read numbers from the device.
    """

    def __init__(self, runner: ModelRunner, graph: Callable[[], Graph] = CudaGraph) -> None:
        self._runner = runner
        self._graph = graph
        # By owner, and by where the step's tokens lie. Nothing here may hold the owner, or its cache would live as long
        # as the runner.
        self._captured: WeakKeyDictionary[object, dict[tuple[int, int], Captured]] = WeakKeyDictionary()

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    def forward(self, step: Step) -> Tensor:
        if not isinstance(step, FixedStep):
            return self._runner.forward(step)
        captured = self._captured.setdefault(step.owner, {})
        key = step.token_ids.data_ptr(), step.token_ids.numel()
        if key not in captured:
            every_row = torch.arange(step.token_ids.numel(), device=step.token_ids.device)
            whole = replace(step, logits_rows=every_row)
            graph = self._graph()
            logits = graph.capture(lambda: self._runner.forward(whole))
            captured[key] = Captured(graph, logits, (step.token_ids, every_row))
        captured[key].graph.replay()
        return captured[key].logits[step.logits_rows]
