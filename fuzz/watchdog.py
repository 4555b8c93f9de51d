"""An example that never ends is a failure too, and a campaign that waits for it finds no other."""

from __future__ import annotations

import signal
import threading
from types import FrameType

LIMIT = 30.0
"""Seconds an example may take. They take milliseconds, the slowest a second or two on a busy machine."""
AGAIN = 5.0
"""Seconds after which it is told again: what cleans up may hang as well."""


class NeverEnds(Exception):
    """The example that runs has taken longer than `LIMIT`."""


_is_watching = False


def start() -> None:
    """From now on `NeverEnds` is raised when the time is up: in the main thread, and where there are such signals.

    It interrupts Python, not what is compiled; and code that catches every exception may take it for one of its own.
    """
    global _is_watching
    if _can_watch():
        _is_watching = True
        signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, LIMIT, AGAIN)


def stop() -> None:
    global _is_watching
    _is_watching = False  # from here on a signal that is under way means nothing
    if _can_watch():
        signal.setitimer(signal.ITIMER_REAL, 0)


def _can_watch() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _ring(number: int, frame: FrameType | None) -> None:
    if _is_watching:
        raise NeverEnds(f"the example has not ended after {LIMIT:g} s; its last step is still running")
