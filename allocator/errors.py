"""The exception hierarchy's root and the allocator's own branch of it.

Every public operation is atomic: when one of these is raised, nothing has changed. Running out of blocks
is not here, because it is a normal answer (`False`, or `Admission.LATER`) and not an error.
"""


class KvproofError(Exception):
    """Root of every exception that kvproof raises on purpose."""


class InvalidArgument(KvproofError, ValueError):
    """A value outside its documented range; the message names the value and the limit."""


class SequenceStateError(KvproofError, RuntimeError):
    """An operation on a sequence that its state does not allow: a second release, a commit before a reserve,
    a sequence of another manager."""


class IllegalTransition(KvproofError, RuntimeError):
    """A block was asked to make a transition that its state does not have, such as a release at zero references."""


class ConcurrencyError(KvproofError, RuntimeError):
    """A manager in debug mode was used by a second thread, or called by a callback of its own call."""


class InvariantViolation(KvproofError, AssertionError):
    """`check()` found the allocator's own state broken. Always a bug in kvproof or in an eviction policy.

    `invariant` is its name in the specification, such as `"I2"`.
    """

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


def require_int(name: str, value: int, low: int, high: int) -> None:
    """Raise `InvalidArgument` unless `value` is an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {shown(value)}, must be an integer from {low} to {high}")


def shown(value: object) -> str:
    """`repr` for a message, also for integers so long that Python refuses to write them out."""
    try:
        return repr(value)
    except ValueError:
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{size}>"
