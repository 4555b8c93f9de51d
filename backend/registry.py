"""Plugins: attention backends, model runners and eviction policies, found by entry point and loaded when asked for.

A distribution registers one by declaring an entry point in the group of its kind:

    [project.entry-points."kvproof.attention_backends"]
    mine = "my_package.attention:MyAttention"

Listing plugins imports none of them. A broken one is reported under its name and stops nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvproof.allocator import KvproofError


class Group(StrEnum):
    """The entry-point groups."""

    ATTENTION = "kvproof.attention_backends"
    RUNNER = "kvproof.model_runners"
    POLICY = "kvproof.eviction_policies"

    @property
    def noun(self) -> str:
        """What one plugin of the group is called."""
        return {"ATTENTION": "attention backend", "RUNNER": "model runner", "POLICY": "eviction policy"}[self.name]


class UnknownPlugin(KvproofError, LookupError):
    """No plugin of that name; the message lists those there are."""


class BrokenPlugin(KvproofError):
    """A plugin could not be imported, is not what its group holds, or shares its name with another."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered name, not loaded yet."""

    group: Group
    name: str
    entries: tuple[EntryPoint, ...]

    @property
    def origin(self) -> str:
        """The distribution that registered it, with its version."""
        return ", ".join(f"{e.dist.name} {e.dist.version}" if e.dist else "unknown" for e in self.entries)

    def load(self) -> Any:
        """The registered object. Raises `BrokenPlugin`, whatever the plugin's own module raised."""
        entry, *others = self.entries
        if others:
            raise BrokenPlugin(f"{self.group.noun} {self.name!r} is registered by more than one package: {self.origin}")
        try:
            return entry.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise BrokenPlugin(
                f"{self.group.noun} {self.name!r} from {self.origin} can't be loaded: {reason}"
            ) from error


def plugins(group: Group) -> dict[str, Plugin]:
    """All plugins of a group by name, in alphabetical order."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return {name: Plugin(group, name, tuple(found[name])) for name in sorted(found)}


def load(group: Group, name: str) -> Any:
    """The object registered as `name`. Raises `UnknownPlugin` or `BrokenPlugin`."""
    known = plugins(group)
    if name not in known:
        raise UnknownPlugin(f"unknown {group.noun} {name!r}, known are: {', '.join(known) or 'none'}")
    return known[name].load()
