"""CUDA graphs around a model: a step whose tensors all stay where they are is captured once, and then replayed.

    attention = WithGraphs(spec)                       # an attention backend with `graph_sizes`
    engine = Engine(GraphRunner(runner), attention=attention, ...)

Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvproof.backend.runner import ModelRunner, ModelSpec, Step


@dataclass(frozen=True, slots=True)
class FixedStep(Step):
    """A step of decodes whose tensors, and what `attention` reads, lie where they lay in the last one of its size.

    All but `logits_rows`, which names live rows; the others are padding.
    """


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


class GraphRunner:
    """A `ModelRunner` that replays another one's forward pass in every `FixedStep`, and calls it in others.

    Its logits are valid until the next step. The runner's `forward` must not read numbers from the device.
    """

    def __init__(self, runner: ModelRunner, graph: Callable[[], Graph] = CudaGraph) -> None:
        self._runner = runner
        self._graph = graph
        # With the step, because the graph reads its tensors. Their address tells one cache's steps from another's.
        self._captured: dict[tuple[int, int], tuple[Graph, Tensor, Step]] = {}

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    def forward(self, step: Step) -> Tensor:
        if not isinstance(step, FixedStep):
            return self._runner.forward(step)
        key = step.token_ids.data_ptr(), step.token_ids.numel()
        if key not in self._captured:
            every_row = torch.arange(step.token_ids.numel(), device=step.token_ids.device)
            whole = replace(step, logits_rows=every_row)
            graph = self._graph()
            self._captured[key] = graph, graph.capture(lambda: self._runner.forward(whole)), whole
        graph, logits, _ = self._captured[key]
        graph.replay()
        return logits[step.logits_rows]
