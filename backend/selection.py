"""Which attention backend runs a cache: the one that was named, or the best that can.

`auto` tries the available backends by descending `priority` and takes the first that supports the cache; a negative
priority is never chosen unasked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvproof.allocator import EvictionPolicy, KvproofError
from kvproof.attention import AttentionBackend, BackendUnavailable, CacheSpec, UnsupportedSpec
from kvproof.backend.registry import BrokenPlugin, Group, Plugin, load, plugins

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of considering one backend: `backend` when it can be used, else the `reason` why not."""

    plugin: Plugin
    backend: type[AttentionBackend] | None
    reason: str = ""

    @property
    def priority(self) -> int:
        return self.backend.priority if self.backend else 0


def survey(spec: CacheSpec | None = None) -> list[Verdict]:
    """Every registered attention backend, in the order `auto` tries them; unusable ones last, with the reason.

    Usable means that it can run on this machine and, when a `spec` is given, that it supports that cache.
    """
    verdicts = [_judge(plugin, spec) for plugin in plugins(Group.ATTENTION).values()]
    return sorted(verdicts, key=lambda v: (v.backend is None, -v.priority))


def _judge(plugin: Plugin, spec: CacheSpec | None) -> Verdict:
    try:
        backend = _checked(plugin.name, plugin.load())
        backend.probe()
        capabilities = backend.capabilities()
        if spec is not None:
            capabilities.check(spec, plugin.name)
    except KvproofError as error:
        return Verdict(plugin, None, str(error))
    except Exception as error:  # a fault of somebody else's plugin must harm no other
        return Verdict(plugin, None, f"broken: {type(error).__name__}: {error}".splitlines()[0])
    return Verdict(plugin, backend)


def require_known(name: str) -> None:
    """Raise `UnknownPlugin` or `BrokenPlugin` unless `name` is "auto" or a backend that loads."""
    if name != AUTO:
        _checked(name, load(Group.ATTENTION, name))


def select(name: str, spec: CacheSpec) -> type[AttentionBackend]:
    """The backend class called `name`, or the best one for `spec` when `name` is "auto".

    Raises `UnknownPlugin`, `BrokenPlugin`, `BackendUnavailable`, or `UnsupportedSpec` naming the backends that could.
    """
    if name != AUTO:
        backend = _checked(name, load(Group.ATTENTION, name))
        backend.probe()
        try:
            backend.capabilities().check(spec, name)
        except UnsupportedSpec as error:
            able = ", ".join(v.plugin.name for v in survey(spec) if v.backend) or "none"
            supported = f"{error.supported} (backends that support this cache: {able})"
            raise UnsupportedSpec(name, error.feature, error.value, supported) from None
        return backend
    verdicts = survey(spec)
    for verdict in verdicts:
        if verdict.backend is not None and verdict.priority >= 0:
            return verdict.backend
    reasons = "; ".join(f"{v.plugin.name}: {v.reason or 'only when named'}" for v in verdicts)
    raise BackendUnavailable(AUTO, "none can run this cache", reasons or "none is registered")


def over_cache(backend: type[AttentionBackend], spec: CacheSpec, cache: Tensor) -> AttentionBackend:
    """A `backend` for `spec` on a cache that is there already, of `spec.cache_shape`, each layer of it one piece."""
    made: AttentionBackend = type(backend.__name__, (backend,), {"create_cache": lambda self, spec: cache})(spec)
    return made


def new_policy(name: str) -> EvictionPolicy:
    """A new eviction policy of the kind called `name`. Raises `UnknownPlugin` or `BrokenPlugin`."""
    make = load(Group.POLICY, name)
    try:
        policy: EvictionPolicy = make()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BrokenPlugin(f"eviction policy {name!r} can't be made: {reason}") from error
    return policy


def _checked(name: str, loaded: object) -> type[AttentionBackend]:
    if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
        raise BrokenPlugin(f"attention backend {name!r} is {loaded!r}, not a subclass of AttentionBackend")
    if missing := getattr(loaded, "__abstractmethods__", None):
        raise BrokenPlugin(f"attention backend {name!r} lacks {', '.join(sorted(missing))}")
    return loaded
