"""Checks whether the engine can serve a model: by its configuration, then by comparing logits."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from dapo.core.errors import EngineError
from dapo.core.model_traits import LENGTH_DEPENDENT_ROPE, UNPASSED_WINDOWS, uncomputed_traits
from dapo.core.rng import keyed_uniforms
from dapo.engines.native import attention
from dapo.engines.native.forward import Forward
from dapo.engines.native.fused_layers import fuse_prepacked_layers
from dapo.engines.native.fused_weight_layers import fuse_weight_layers
from dapo.engines.native.model_kernels import ModelKernels, model_kernels_for
from dapo.libs.cpu_kernels import is_compiled
from dapo.libs.cpu_kernels.prepacked import COMPILED, DEFAULT_KERNELS, LAYERS, prepack_linears

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
MULTIMODAL = ("vision_config", "audio_config", "text_config")
PROMPT_LENGTHS = (5, 11)
DECODE_STEPS = 4
MIN_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.02,
    torch.float16: 0.02,
}
"""Allowed differences of logits, relative to their spread; a wrong mask or scale gives 0.1 to 2."""
ROUNDING_FACTOR = 4
"""Multiple of the effect of padding and PyTorch's other attention that is allowed, too."""


def patch_model(
    model: PreTrainedModel,
    *,
    rows: int,
    kernels: Mapping[str, str] = DEFAULT_KERNELS,
    reproducible: bool = True,
    model_kernels: ModelKernels | None = None,
) -> Forward:
    """Give the model the engine's attention and layers, check its logits, and return its `Forward`.

    Args:
        model: a model in evaluation mode.
        rows: the usual number of rows of a decode step.
        kernels: the kernels of prepacked weights by shape (`rollout.native.kernels`).
        reproducible: whether attention rounds independently of the rest of the batch.
        model_kernels: replaces the kernels for the model's device and type.

    Raises:
        EngineError: the engine cannot reproduce the model's plain forward. The model's own
            attention is restored, but its layers may stay fused.
    """
    for problem in _known_problems(model):
        raise _unsupported_model_error(model, problem)
    plain = model.config._attn_implementation
    sequences = _test_sequences(model)
    samples = [_plain_logits(model, [ids])[0] for ids in sequences]
    # what the model's own other attention and padding change is no error of the engine
    model.set_attn_implementation("sdpa" if plain == "eager" else "eager")
    rounding = max(map(_relative_error, _plain_logits(model, sequences), samples))
    tolerance = max(MIN_TOLERANCE[model.dtype], ROUNDING_FACTOR * rounding)
    model.set_attn_implementation(plain)
    attention.register()
    compiled = kernels.get(LAYERS) == COMPILED
    if compiled and not is_compiled():
        raise EngineError(
            "rollout.native.kernels: the run uses compiled layers, and this installation has none"
            " for this processor; install a C++ compiler (g++), then run python -m dapo.libs.cpu_kernels"
        )
    if model_kernels is None:
        model_kernels = model_kernels_for(model, reproducible=reproducible, compiled=compiled)
    fused = []
    if model_kernels.fuses_weights:
        fused = fuse_weight_layers(model)
    else:
        fuse_prepacked_layers(model, rows=rows, kernels=kernels, compiled=compiled)
        # what remains: layers of other families, and the head
        prepack_linears(model, rows=rows, kernels=kernels)
    # layers of other families may wait for the device, as no graph can
    if model_kernels.captures and len(fused) < model.config.num_hidden_layers:
        model_kernels = replace(model_kernels, captures=False)
    forward = Forward(model, model_kernels, fused)
    model.set_attn_implementation(attention.NAME)
    difference = ""
    cause = None
    try:
        error = max(map(_relative_error, _engine_logits(model, forward), samples))
        # `not <=`: nan is an error too
        if not error <= tolerance:
            difference = (
                f"the engine's logits differ from its plain forward by {error:.2g} of their spread,"
                f" and rounding explains at most {tolerance:.2g}"
            )
    except Exception as error:  # any error is possible: the model was not written for this cache
        difference = f"it does not run on the engine's cache and attention ({error})"
        cause = error
    if difference:
        model.set_attn_implementation(plain)
        raise _unsupported_model_error(model, difference) from cause
    return forward


def _known_problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield what the engine cannot serve, as far as it can be seen."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model"
    if any(getattr(config, name, None) is not None for name in MULTIMODAL):
        yield "it is multimodal"
    if getattr(model, "_is_stateful", False):
        yield "it keeps a recurrent state instead of keys and values"
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None) is not None:
            yield f"its logits are soft-capped ({name}={getattr(config, name)})"
    layer_types = set(getattr(config, "layer_types", None) or ())
    unknown_types = sorted(layer_types - KNOWN_LAYERS)
    if unknown_types:
        yield f"it has layers of type {', '.join(unknown_types)}"
    window = getattr(config, "sliding_window", None)
    if config.model_type in UNPASSED_WINDOWS and window:
        yield f"its attention does not say its sliding_window={window}"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        yield "it has attention sinks"
    rope = getattr(config, "rope_parameters", None) or {}  # may differ between types of layers
    entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)]
    rope_types = LENGTH_DEPENDENT_ROPE & {entry.get("rope_type") for entry in entries}
    if rope_types:
        # a response would depend on the lengths of other sequences in its batch
        yield (
            f"its rotary embedding ({', '.join(sorted(rope_types))}) depends on the longest"
            " sequence in the batch"
        )
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention cannot be replaced through transformers' AttentionInterface"
    if model.get_output_embeddings() is None:
        yield "it has no language-model head"
    yield from uncomputed_traits(model)


def _test_sequences(model: PreTrainedModel) -> list[list[int]]:
    """Return fixed pseudo-random tokens: two prompts of different lengths, then those to decode."""
    size = next(model.get_input_embeddings().parameters()).shape[0]
    sequences = []
    for seed, length in enumerate(PROMPT_LENGTHS):
        uniforms = keyed_uniforms(seed, length + DECODE_STEPS)
        sequences.append([int(uniform * size) for uniform in uniforms])
    return sequences


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Return the model's own logits per sequence, `[DECODE_STEPS + 1, vocabulary]`.

    One forward computes all sequences, padded at the end.
    """
    rows = [torch.tensor(ids, device=model.device) for ids in sequences]
    batch = pad_sequence(rows, batch_first=True)
    logits = model(input_ids=batch, use_cache=False).logits
    samples = []
    for row, ids in zip(logits, sequences, strict=True):
        first = len(ids) - DECODE_STEPS - 1
        samples.append(row[first : len(ids)])
    return samples


@torch.inference_mode()
def _engine_logits(model: PreTrainedModel, forward: Forward) -> list[Tensor]:
    """Return the engine's logits: prompts together, then one token at a time."""
    sequences = _test_sequences(model)
    n = len(sequences)
    longest = max(PROMPT_LENGTHS)
    prompts = [ids[:length] for ids, length in zip(sequences, PROMPT_LENGTHS, strict=True)]
    prefilled = forward.prefill(prompts)
    cache = forward.model_kernels.new_slots()
    cache.reserve(n, longest + DECODE_STEPS, longest + DECODE_STEPS)
    cache.store(prefilled.cache, range(n), range(n), longest)
    forward.position_bytes = cache.num_bytes // (cache.rows * cache.capacity)
    steps = [prefilled.logits]
    for step in range(DECODE_STEPS):
        positions = [length + step for length in PROMPT_LENGTHS]
        tokens = [ids[at] for ids, at in zip(sequences, positions, strict=True)]
        steps.append(forward.decode(cache, tokens, positions))
    return list(torch.stack(steps, 1))


def _relative_error(logits: Tensor, reference: Tensor) -> float:
    """Return the error relative to the reference's spread, up to a constant per position.

    A constant that is added to all logits of a position does not change their distribution.
    """
    expected = reference.double() - reference.double().mean(-1, keepdim=True)
    actual = logits.double() - logits.double().mean(-1, keepdim=True)
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def _unsupported_model_error(model: PreTrainedModel, problem: str) -> EngineError:
    """Return the error of a model that the engine cannot serve, with the engine that can."""
    return EngineError(
        f"the native engine cannot serve {type(model).__name__} (model_type"
        f" {model.config.model_type!r}): {problem}; use rollout.engine=vllm"
    )
