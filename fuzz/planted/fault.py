"""A fault: one replacement in the source of one function, applied in memory."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

from kvproof.allocator import loops


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the source of `owner.function`."""

    name: str
    owner: type
    function: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force inside the `with` block. Not for use beside other threads."""
        original = inspect.getattr_static(self.owner, self.function)
        broken = self._broken(original)
        compiled, loops.compiled = loops.compiled, None  # they stand for code that is broken now
        setattr(self.owner, self.function, broken)
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)
            loops.compiled = compiled

    def _broken(self, original: FunctionType) -> FunctionType:
        source = textwrap.dedent(inspect.getsource(original))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {source.count(self.old)} times in {self.function}")
        scope: dict[str, FunctionType] = {}
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), original.__globals__, scope)
        return scope[self.function]
