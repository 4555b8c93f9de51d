"""A stand-in for a CUDA stream, its events and its graphs, for work that really runs on the CPU.

A lazy stream runs what is submitted only when somebody waits. A recorded graph does on `replay` what a captured one
does: the same operations on the same memory, whatever it holds by then, and no Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvproof.fuzz.flashinfer_kernel import require

Work = Callable[[], None]


class Stream:
    """Work in order of submission, as late as anybody lets it: at a `wait`, and unless lazy after every kernel."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.lazy = lazy
        self.submitted = 0
        self.captured: list[Work] | None = None
        """What was submitted since a capture began; None outside of one."""
        self._pending: deque[Work] = deque()

    def submit(self, work: Work) -> int:
        """Append `work` and return the count of submissions so far, which `wait` takes."""
        if self.captured is not None:
            self.captured.append(work)
        else:
            self._pending.append(work)
            self.submitted += 1
        return self.submitted

    @property
    def done(self) -> int:
        return self.submitted - len(self._pending)

    def wait(self, until: int | None = None) -> None:
        """Run what was submitted first, up to the `until`-th or everything."""
        require(self.captured is None, "wait-in-capture", "nothing may wait for the device while a graph is captured")
        while self._pending and (until is None or self.done < until):
            self._pending.popleft()()

    def flush(self) -> None:
        """After a kernel: nothing waits for it, but results are there at once unless the stream is lazy."""
        if not self.lazy and self.captured is None:
            self.wait()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy from the host's memory when the stream gets there. It must still hold what it does now."""
        if not source.numel():
            return
        now = source.clone()

        def copy() -> None:
            require(torch.equal(source, now), "overwritten", "memory was written between a copy's submission and it")
            to.copy_(source)

        self.submit(copy)
        self.flush()


class StreamEvent:
    """As `torch.cuda.Event`."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, 0

    def record(self) -> None:
        self._at = self._stream.submitted

    def synchronize(self) -> None:
        self._stream.wait(self._at)


class RecordedGraph:
    """As `kvproof.backend.graphs.CudaGraph`. PyTorch's operations also run while they are captured; kernels do not."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._work: list[Work] = []

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self._stream.wait()
        self._stream.captured = self._work
        try:
            with _Recorder(self._work):
                return work()
        finally:
            self._stream.captured = None

    def replay(self) -> None:
        for work in self._work:
            self._stream.submit(work)
        self._stream.flush()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends each of PyTorch's operations to `work`, in a form that can be run again into the same outputs."""

    def __init__(self, work: list[Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require(func is not torch.ops.aten._local_scalar_dense.default, "wait-in-capture", "a number was read")
        again = partial(func, *args, **(kwargs or {}))
        outputs = again()
        self._work.append(partial(_run_again, again, tree_leaves(outputs)))
        return outputs


def _run_again(again: Callable[[], Any], outputs: list[Any]) -> None:
    for output, new in zip(outputs, tree_leaves(again()), strict=True):
        if isinstance(output, Tensor) and output.data_ptr() != new.data_ptr():  # else it is a view, or was written to
            output.copy_(new)
