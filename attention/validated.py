"""Configuration that answers a bad value in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvproof.allocator.errors import InvalidArgument


class Validated(BaseModel):
    """A frozen model whose bad values raise `error`, naming the field, the value and the limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    error: ClassVar[type[InvalidArgument]] = InvalidArgument

    # pydantic's own error is a report of several lines. Hidden from type checkers, so that they see the fields.
    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise self.error(f"{type(self).__name__}: {_one_line(error)}") from None


def _one_line(report: ValidationError) -> str:
    first = report.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{field} is required"
    return f"{field}={first['input']!r}: {message[0].lower()}{message[1:]}"
