"""How a fault is planted in an attention backend: round its methods, so that it outlives changes to their source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvproof.attention import AttentionBackend, BatchPlan
from kvproof.attention.torch_paged import TorchAttention

Method = Callable[..., Any]


@dataclass(frozen=True)
class MethodFault:
    """`around(original)` takes the place of `owner.method`.

    noticed_by  the function of the kit that fails, on `backend`
    """

    name: str
    owner: type
    method: str
    around: Callable[[Method], Method]
    noticed_by: Callable[..., None]
    why: str

    def __str__(self) -> str:
        return self.name

    @property
    def backend(self) -> type[AttentionBackend]:
        """The backend that has the fault; a fault of what all of them stand on shows in any."""
        return self.owner if issubclass(self.owner, AttentionBackend) else TorchAttention

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force inside the `with` block. Not for use beside other threads."""
        inherited = self.method not in vars(self.owner)
        kept = inspect.getattr_static(self.owner, self.method)
        setattr(self.owner, self.method, self.around(getattr(self.owner, self.method)))
        try:
            yield
        finally:
            if inherited:
                delattr(self.owner, self.method)
            else:
                setattr(self.owner, self.method, kept)


@contextmanager
def unvalidated() -> Iterator[None]:
    """Inside, any plan is valid."""
    kept = BatchPlan.validate
    setattr(BatchPlan, "validate", lambda *_: None)  # noqa: B010 - a method is not assignable, says mypy
    try:
        yield
    finally:
        setattr(BatchPlan, "validate", kept)  # noqa: B010
