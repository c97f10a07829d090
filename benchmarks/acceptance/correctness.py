"""bfloat16 on the device against float32 on the CPU by transformers' own attention, one sequence at
a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.acceptance.check import Measurement, Setting, compute_exactly, mean_and_largest_gap
from benchmarks.acceptance.models import (
    Geometry,
    as_loaded,
    compared_geometries,
    policy_config,
    ragged_samples,
    random_model,
)
from benchmarks.acceptance.references import Numbers, Reference, sketch
from dapo.policy.policy import Policy
from dapo.types import Sample

MEAN_GAP_NATS = 0.03
LARGEST_GAP_NATS = 0.5
"""Bounds for bfloat16, which gave 0.011 and 0.046 at these widths on a CPU."""
SMALL_MODEL_GAP_NATS = 0.12
"""Mean over tokens, of the builtin model's 30 layers: on a CPU vLLM gave 0.059, and the native
engine 0.060.
"""
GRADIENT_ERROR = 0.05
"""Norm of the gradient's error over the gradient's norm: bfloat16 on a CPU gave 0.019."""
POWER = 2.0
"""A mistake must show as a number this many times the bound, or passing would mean nothing."""
LONG_LENGTHS = ((100, (8092, 8092, 300)),)
"""A prompt and its responses: two sequences of 8,192 tokens."""
LONG_VOCABULARY = 512
LONG_MISTAKE = 32
"""A small vocabulary, since a CPU computes all logits; and the number of tokens after a cut that
must change.
"""
LONG_STRIDE = 16
"""Every so many tokens of a long response are compared."""
BETA = 0.9
"""AdamW's decay of the first moment: the option's default."""


def logprob_references(*, on_gpu: bool) -> list[Reference]:
    """Of each geometry: log-probabilities, and how far a mistake moves them."""
    return [
        Reference(f"logprobs, {name}", geometry, samples, partial(_logprobs, geometry, samples))
        for name, geometry in compared_geometries(on_gpu=on_gpu).items()
        for samples in [ragged_samples(geometry.vocabulary)]
    ]


def check_logprobs(setting: Setting) -> Iterator[Measurement]:
    """Log-probabilities of the policy; and the gap if a prompt's first token or a window's first
    key were wrong.
    """
    for reference in logprob_references(on_gpu=setting.on_gpu):
        name = _geometry_of(reference)
        expected, policy = _reference_and_policy(reference, setting)
        rows = [s.old_logprobs or () for s in policy.record_old_logprobs(reference.given)]
        yield from _gaps(name, [[x for row in rows for x in row]], [expected["rows"].tolist()])
        mistakes = ["a prompt's first token", "a window one key too wide"]
        for what, gap in zip(mistakes, expected["mistakes"].tolist(), strict=False):
            yield Measurement(f"{name}: gap of {what}", gap, "nats", at_least=POWER * MEAN_GAP_NATS)


def _logprobs(geometry: Geometry, samples: Sequence[Sample], model: PreTrainedModel) -> Numbers:
    """`[tokens]` log-probabilities, and `[mistakes]` mean gaps."""
    expected = _plain_rows(model, samples)
    prompted = [i for i, sample in enumerate(samples) if len(sample.prompt_ids) > 1]
    changed = _plain_rows(model, [_with_another_first_token(samples[i]) for i in prompted])
    pairs = [([expected[i][:4] for i in prompted], [row[:4] for row in changed])]
    if geometry.window is not None:
        wider = _plain_model(replace(geometry, window=geometry.window + 1))
        pairs.append((expected, _plain_rows(wider, samples)))
    return {
        "rows": torch.tensor([x for row in expected for x in row]),
        "mistakes": torch.tensor([mean_and_largest_gap(*pair)[0] for pair in pairs]),
    }


def long_references(*, on_gpu: bool) -> list[Reference]:
    """Of two geometries with few layers: some log-probabilities of long responses."""
    lengths = LONG_LENGTHS if on_gpu else ((100, (1948, 300)),)
    found = []
    for name in ("heads of 128", "windows in every layer"):
        geometry = replace(
            compared_geometries(on_gpu=on_gpu)[name], vocabulary=LONG_VOCABULARY, layers=2
        )
        samples = ragged_samples(geometry.vocabulary, lengths)
        found.append(Reference(f"long, {name}", geometry, samples, partial(_long, samples)))
    return found


def check_long(setting: Setting) -> Iterator[Measurement]:
    """Log-probabilities of sequences of 8,192 tokens that share a prompt, and the gap if their keys
    were cut off.
    """
    for reference in long_references(on_gpu=setting.on_gpu):
        name = _geometry_of(reference)
        longest = max(len(sample.response_ids) for sample in reference.given)
        expected, policy = _reference_and_policy(reference, setting, tokens=3 * longest)
        rows = [s.old_logprobs or () for s in policy.record_old_logprobs(reference.given)]
        some = [x for row in rows for x in row[::LONG_STRIDE]]
        yield from _gaps(name, [some], [expected["rows"].tolist()])
        yield Measurement(
            f"{name}: gap without earlier keys",
            float(expected["mistakes"]),
            "nats",
            at_least=POWER * MEAN_GAP_NATS,
        )


def _long(samples: Sequence[Sample], model: PreTrainedModel) -> Numbers:
    """Log-probabilities of every so many tokens, and the mean gap of those behind a cut."""
    expected = _plain_rows(model, samples)
    half = len(samples[0].response_ids) // 2
    cut = replace(
        samples[0],
        prompt_ids=samples[0].response_ids[half - 1 : half],
        response_ids=samples[0].response_ids[half:],
    )
    shorter = _plain_rows(model, [cut])[0][:LONG_MISTAKE]
    gap = mean_and_largest_gap([expected[0][half : half + LONG_MISTAKE]], [shorter])[0]
    return {
        "rows": torch.tensor([x for row in expected for x in row[::LONG_STRIDE]]),
        "mistakes": torch.tensor(gap),
    }


def gradient_references(*, on_gpu: bool) -> list[Reference]:
    """Of each geometry: the gradient of an update as sketches of each weight's."""
    return [
        Reference(f"gradients, {name}", geometry, samples, partial(_gradients, samples))
        for name, geometry in compared_geometries(on_gpu=on_gpu).items()
        for samples in [ragged_samples(geometry.vocabulary)]
    ]


def check_gradients(setting: Setting) -> Iterator[Measurement]:
    """The gradient of an update, over all weights and for the worst of them; and its error if masks
    were ignored.
    """
    for reference in gradient_references(on_gpu=setting.on_gpu):
        name = _geometry_of(reference)
        expected, policy = _reference_and_policy(reference, setting)
        policy.update(reference.given, step=1)
        gradient = _gradient_of(policy, setting.folder / name.replace(" ", "-"))
        names = [key for key, _ in policy.weights(version=1).named_tensors() if key in gradient]
        found = torch.stack([sketch(gradient[key].to(setting.device)) for key in names])
        total, worst = _sketched_errors(found, expected)
        yield Measurement(f"{name}: error of the gradient", total, at_most=GRADIENT_ERROR)
        yield Measurement(
            f"{name}: error of the worst weight's gradient",
            worst[1],
            at_most=2 * GRADIENT_ERROR,
            detail=names[worst[0]],
        )
        yield Measurement(
            f"{name}: error if masks were ignored",
            float(expected["mistakes"]),
            at_least=POWER * GRADIENT_ERROR,
        )


def _gradients(samples: Sequence[Sample], model: PreTrainedModel) -> Numbers:
    """`[weights, SKETCH]` sketches, `[weights]` norms, and the error if masks were ignored."""
    sketches, norms = _sketched_gradient(model, samples)
    expected = {"sketches": sketches, "norms": norms}
    unmasked, _ = _sketched_gradient(model, [_unmasked(sample) for sample in samples])
    return expected | {"mistakes": torch.tensor(_sketched_errors(unmasked, expected)[0])}


def _sketched_gradient(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    gradient = _plain_gradient(model, samples)
    sketches = torch.stack([sketch(each) for each in gradient.values()])
    return sketches, torch.stack([each.norm() for each in gradient.values()])


def _sketched_errors(found: Tensor, expected: Numbers) -> tuple[float, tuple[int, float]]:
    """The norm of all differences over the norm of all gradients; the worst weight with its own."""
    errors = (found - expected["sketches"]).norm(dim=1)
    own = errors / expected["norms"]
    worst = int(own.argmax())
    return float(errors.norm() / expected["norms"].norm()), (worst, float(own[worst]))


def _gaps(
    name: str, found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]
) -> Iterator[Measurement]:
    mean, largest = mean_and_largest_gap(found, expected)
    yield Measurement(f"{name}: mean gap", mean, "nats", at_most=MEAN_GAP_NATS)
    yield Measurement(f"{name}: largest gap", largest, "nats", at_most=LARGEST_GAP_NATS)


def _geometry_of(reference: Reference) -> str:
    return reference.name.partition(", ")[2]


def _reference_and_policy(
    reference: Reference, setting: Setting, tokens: int = 512
) -> tuple[Numbers, Policy]:
    """The float32 numbers of a CPU, and a policy of the same weights on the device."""
    compute_exactly()
    own = reference.model()
    expected = reference.numbers(own, setting.references)
    config = policy_config(setting.device, microbatch_tokens=tokens, max_response_tokens=tokens)
    return expected, Policy(config, as_loaded(own.to(setting.device), reference.geometry.family))


def _plain_model(geometry: Geometry) -> PreTrainedModel:
    return random_model(geometry, device="cpu", dtype=torch.bfloat16).float()


@torch.no_grad()
def _plain_rows(model: PreTrainedModel, samples: Sequence[Sample]) -> list[list[float]]:
    return [_plain_logprobs(model, sample).tolist() for sample in samples]


def _plain_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """`[response]` log-probabilities by the model's own forward over the one sequence."""
    tokens = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.log_softmax(dim=1).gather(1, tokens[0, len(sample.prompt_ids) :, None]).flatten()


def _plain_gradient(model: PreTrainedModel, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The gradient of Eq. 12 at ratio 1: minus the mean of advantage x log-probability over trained
    tokens.
    """
    model.zero_grad()
    trained = sum(sample.num_trained_tokens for sample in samples)
    for sample in samples:
        mask = torch.tensor(sample.mask, dtype=torch.float32)
        (-(mask * _plain_logprobs(model, sample)).sum() * sample.advantage / trained).backward()
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def _gradient_of(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """The gradient of the policy's first update: AdamW's first moment is a tenth of it."""
    folder.mkdir()
    policy.save(folder)
    return {
        name: moment / (1 - BETA)
        for name, moment in load_file(folder / "exp_avg.safetensors").items()
    }


def total_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of all differences over the norm of all expected numbers."""
    errors = torch.stack([(found[name] - expected[name]).norm() for name in expected])
    return float(
        errors.norm() / torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    )


def _with_another_first_token(sample: Sample) -> Sample:
    return replace(sample, prompt_ids=(2 + sample.prompt_ids[0] % 100, *sample.prompt_ids[1:]))


def _unmasked(sample: Sample) -> Sample:
    return replace(sample, mask=(True,) * len(sample.response_ids))
