"""Debug mode: a manager and its batches notice when two threads use them, or one calls them from inside a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvproof.allocator.errors import ConcurrencyError

if TYPE_CHECKING:
    from kvproof.allocator.batch import DecodeBatch
    from kvproof.allocator.manager import BlockManager

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Lets one thread in, the first that comes, and one call at a time."""

    def __init__(self) -> None:
        self._owner: dict[None, threading.Thread] = {}  # at most one: a dict sets a default atomically
        self._running: str | None = None

    def check_thread(self, name: str) -> None:
        """Raise `ConcurrencyError` in another thread than the owner's."""
        thread = threading.current_thread()
        owner = self._owner.setdefault(None, thread)
        if thread is not owner:
            raise ConcurrencyError(f"{name} is called in thread {thread.name!r}, {owner.name!r} was here first")

    def around(self, method: Callable[P, R], name: str) -> Callable[P, R]:
        @wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            self.check_thread(name)
            if self._running is not None:
                thread = threading.current_thread().name
                raise ConcurrencyError(f"{name} is called from inside {self._running}, in thread {thread!r}")
            self._running = name
            try:
                return method(*args, **kwargs)
            finally:
                self._running = None

        return guarded


def watch(watched: BlockManager | DecodeBatch, guard: Guard) -> None:
    """Put `guard` around all public methods of this one object. Others of its class cost nothing for it.

    Public methods must not call each other for this: it would look like a call from a callback.
    """
    for name in dir(watched):
        member = getattr(type(watched), name, None)
        if not name.startswith("_") and callable(member):
            setattr(watched, name, guard.around(getattr(watched, name), name))
