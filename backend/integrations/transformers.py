"""Any Hugging Face causal language model on our cache, its code unchanged.

    runner = TransformersRunner(AutoModelForCausalLM.from_pretrained(...))
    engine = Engine(runner, num_blocks=1024)

A step goes through the model as one row of tokens with their positions, without a cache of Hugging Face's. What a model
needs is found out by running it (`transformers_probe`, `_rehearse`), and refused at once where it isn't there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from kvproof.attention import DType
from kvproof.backend.engine_backend import Chunk, EngineBackend
from kvproof.backend.errors import CheckpointError, UnsupportedModel
from kvproof.backend.integrations.transformers_interface import RUN, attending
from kvproof.backend.integrations.transformers_probe import LayerAttention, ask
from kvproof.backend.models.checkpoint import Checkpoint
from kvproof.backend.runner import ModelRunner, ModelSpec, Step


class TransformersRunner:
    """Implements `ModelRunner` with a causal model of transformers, which belongs to the runner from then on."""

    architectures = None  # whatever `load` does not refuse

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: DType = "float32",
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """The model in a Hugging Face folder. Nothing is fetched, and no code that comes with it is run.

        Raises `UnsupportedModel`, or `CheckpointError` where a file is damaged or weights are missing.
        """
        path = checkpoint.path
        if not path.is_dir():
            raise UnsupportedModel(f"{path}: the transformers runner takes Hugging Face folders only")
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(path, **local)
            if config.is_encoder_decoder:
                raise _refusal(config, "encoder-decoder models")
            with _no_progress_bars():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path, config=config, dtype=getattr(torch, dtype), output_loading_info=True, **local
                )
        except CheckpointError:
            raise
        except Exception as error:  # whatever its many loaders raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"{path}: transformers can't load it: {reason}") from error
        model, found = loaded
        # transformers would start them at random.
        if absent := sorted(found["missing_keys"]) or [name for name, *_ in found["mismatched_keys"]]:
            raise CheckpointError(f"{path}: tensor {absent[0]!r} is missing or of another shape")
        if progress is not None:
            progress(1, 1)
        return cls(model.to(device))

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModel`, naming what the model needs that isn't there. Computes some twenty tokens."""
        self._model: Any = model.train(False)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        try:
            self.spec = _model_spec(model)
            model.set_attn_implementation(RUN)
            _rehearse(self)
        except UnsupportedModel as error:
            raise _refusal(model.config, error) from error

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Logits [R, vocab_size] of `step.logits_rows`."""

        def attend(module: Module, q: Tensor, k: Tensor, v: Tensor, _mask: Any, _options: dict[str, Any]) -> Tensor:
            layer: Any = module.layer_idx
            return step.attention(layer, *(x[0].transpose(0, 1) for x in (q, k, v)))[None]

        rows = {"logits_to_keep": step.logits_rows} if self._keeps_rows else {}
        with attending(attend):
            output = self._model(
                input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False, **rows
            )
        logits: Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[step.logits_rows]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The callers of `load` have their own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refusal(config: PreTrainedConfig, feature: object) -> UnsupportedModel:
    return UnsupportedModel(f"{config.model_type}: the transformers runner does not support {feature}")


def _model_spec(model: PreTrainedModel) -> ModelSpec:
    config = model.config.get_text_config()
    if model._is_stateful:
        raise UnsupportedModel("layers with a recurrent state (Mamba, linear attention)")
    if not model._can_set_attn_implementation():
        alibi = " (ALiBi)" if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt") else ""
        raise UnsupportedModel(f"attention that does not go through transformers' interface{alibi}")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel("latent attention (MLA)")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel("layers that share keys and values")
    max_length = _max_length(config)
    layers = ask(model, max_length)
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModel(f"a model of {config.num_hidden_layers} layers with attention in {len(layers)}")
    layer = _one_for_all(layers)
    windows = tuple(layer.window for layer in layers)
    alike = len(set(windows)) == 1
    eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    return ModelSpec(
        architecture=config.model_type,
        num_layers=len(layers),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        vocab_size=config.vocab_size,
        max_length=max_length,
        dtype=cast(DType, str(model.dtype).removeprefix("torch.")),
        device=str(model.device),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
        window=windows[0] if alike else None,
        layer_windows=() if alike else windows,
        scale=layer.scale,
        soft_cap=layer.soft_cap,
    )


def _max_length(config: PreTrainedConfig) -> int:
    """The longest sequence whose tokens are computed alike whatever else is in their batch."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedModel("a model that has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this, one long sequence has all the others rotated otherwise
        return min(length, rope.get("original_max_position_embeddings") or length)
    return length


def _one_for_all(layers: list[LayerAttention]) -> LayerAttention:
    """A layer that stands for all but in its window. Raises `UnsupportedModel` where there is none."""
    first = layers[0]
    for number, layer in enumerate(layers):
        for field in ("num_heads", "num_kv_heads", "head_size", "scale", "soft_cap"):
            here, there = getattr(layer, field), getattr(first, field)
            if here != there:
                raise UnsupportedModel(f"layers of different {field} ({there} in layer 0, {here} in layer {number})")
    return first


def _rehearse(runner: ModelRunner) -> None:
    """Compute a sequence whole, and again in two steps, the second beside another one: the logits must be the same.

    They are not where a model finds positions for itself, mixes neighbouring tokens outside attention, or keeps state.
    """
    spec, tolerance = runner.spec, max(1e-3, 16 * torch.finfo(getattr(torch, runner.spec.dtype)).eps)
    backend = EngineBackend(
        spec.cache_spec(num_blocks=16, block_size=4),
        attention="reference",
        layer_windows=spec.layer_windows,
        prefix_caching=False,
    )
    tokens = [7 * i % spec.vocab_size for i in range(1, 7)]
    whole, parts, other = (backend.manager.sequence(text) for text in (tokens, tokens, tokens[::-1]))
    logits = []
    for chunks in ([Chunk(whole, 6)], [Chunk(parts, 3)], [Chunk(parts, 3), Chunk(other, 6)]):
        for seq, _ in chunks:
            if not seq.num_computed:
                backend.manager.admit(seq)
        logits.append(runner.forward(backend.begin(chunks)))
        backend.end(chunks)
    right, got = logits[0][0].double(), logits[2][0].double()
    error, largest = float((got - right).abs().max()), float(right.abs().max())
    if not error <= tolerance * largest:
        raise UnsupportedModel(
            f"logits that depend on how a step is put together (of up to {largest:.3g}, they are off by {error:.3g})"
        )
