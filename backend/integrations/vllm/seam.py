"""All that the integration takes from vLLM: the names of `surface.NAMES`, each imported when it is first asked for.

Not before, because a worker needs no scheduler, and a plugin is called when vLLM's models can't be imported yet. Raises
`UnsupportedVllm` where the installed version is not among those that `contract` has on record.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm.version import __version__

from kvproof.backend.integrations.vllm.contract import require_known
from kvproof.backend.integrations.vllm.surface import NAMES

require_known(__version__)

MODULES = {name: module for module, names in NAMES.items() for name in names}


def _as_they_are(extra_keys: list[Any]) -> list[Any] | None:
    return extra_keys or None


STAND_INS = {"to_event_extra_keys": _as_they_are}
"""For what a version has not got: extra keys as events carry them are, until 0.30, those of the block hash."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"{name} is not among what we take from vLLM, which surface.NAMES lists")
    module = import_module(MODULES[name])
    value = globals()[name] = getattr(module, name, STAND_INS[name]) if name in STAND_INS else getattr(module, name)
    return value
