"""The engine, and the interface that model runners, attention backends and other engines plug into."""

from kvproof.backend.engine import Engine, EngineStalled, EngineStats
from kvproof.backend.engine_backend import Chunk, EngineBackend
from kvproof.backend.registry import BrokenPlugin, Group, Plugin, UnknownPlugin, plugins
from kvproof.backend.request import FinishReason, Request, RequestRefused
from kvproof.backend.runner import ModelRunner, ModelSpec, Step
from kvproof.backend.sampling import SamplingParams
from kvproof.backend.scheduler import Scheduler
from kvproof.backend.selection import select, survey

__all__ = [
    "BrokenPlugin",
    "Chunk",
    "Engine",
    "EngineBackend",
    "EngineStalled",
    "EngineStats",
    "FinishReason",
    "Group",
    "ModelRunner",
    "ModelSpec",
    "Plugin",
    "Request",
    "RequestRefused",
    "SamplingParams",
    "Scheduler",
    "Step",
    "UnknownPlugin",
    "plugins",
    "select",
    "survey",
]
