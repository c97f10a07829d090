"""The losses of `loss.surrogate`: a change of one moves gradient and metrics together, and all keep
the contract.
"""

import importlib
import inspect
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from dapo.algo.loss import Responses, policy_loss
from dapo.algo.surrogate_table import SURROGATES
from dapo.config import LossConfig
from dapo.policy import objective
from helpers.tables import for_each_row

MODULES = ("dapo.algo.loss", "dapo.algo.surrogates", "dapo.policy.objective")
LOG_RATIOS = torch.tensor([0.5, 0.1, -0.5, 0.5, 0.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -2.0, 1.0], dtype=torch.float64)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}


@pytest.fixture
def mutated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the objective with one line of `algo` changed."""

    sources = {name: inspect.getsource(importlib.import_module(name)) for name in MODULES}

    def load(file: str = "", old: str = "", new: str = "") -> ModuleType:
        for name, source in sources.items():
            module = ModuleType(name)
            if name == f"dapo.algo.{file}":
                assert source.count(old) == 1, "there is one place"
                source = source.replace(old, new)
            exec(compile(source, name, "exec"), vars(module))
            monkeypatch.setitem(sys.modules, name, module)
        return module

    return load


def results(objective: ModuleType, surrogate: str) -> tuple[list[float], float, dict[str, float]]:
    """The gradient that trains, the logged loss, and the counts of clipped tokens; each token is a
    response.
    """
    bounds = (
        BOUNDS
        if surrogate == "clip"
        else {name: BOUNDS[name] for name in ("clip_low", "clip_high")}
    )
    config = LossConfig(surrogate=surrogate, **bounds)
    old = torch.full_like(LOG_RATIOS, -1.0)
    tokens = {
        "old": old,
        "advantages": ADVANTAGES,
        "mask": torch.ones(5, dtype=torch.bool),
        "weights": torch.full_like(old, 0.2),
    }
    logprobs = old + LOG_RATIOS
    responses = Responses.of(torch.arange(5))
    terms = objective.gradient_terms(tokens, config, responses, logprobs)
    gradient = objective.objective_gradient(logprobs, terms, config).by_logprob
    sums = objective.objective_sums(
        logprobs, torch.zeros_like(old), terms, config, responses=responses
    )
    counts = {
        name.removeprefix("clipped_"): float(sums[name])
        for name in sums
        if name.startswith("clipped_")
    }
    return (
        gradient.tolist(),
        float(sums["loss"]),
        {name: counts[name] for name in counts if "prob" not in name},
    )


CLAMP = ("loss", "log_ratio.clamp(low, high)", "log_ratio.clamp(-20, 20)")


@pytest.mark.parametrize(
    ("surrogate", "clamp", "clipped", "lost"),
    [
        ("clip", CLAMP, {"low": 1, "high": 1, "dual": 1}, [0, 2, 3]),
        ("gspo", CLAMP, {"low": 1, "high": 1}, [0, 2]),
        ("cispo", ("surrogates", ".clamp(max=math.log1p(clip_high))", ""), {"high": 2}, []),
    ],
)
def test_without_the_clip_gradient_loss_and_counts_move_together(
    mutated: Any, surrogate: str, clamp: tuple[str, ...], clipped: dict[str, float], lost: list[int]
) -> None:
    gradient, loss, counts = results(mutated(), surrogate)
    assert counts == clipped
    assert [i for i, value in enumerate(gradient) if not value] == lost
    unclipped, other_loss, no_counts = results(mutated(*clamp), surrogate)
    # w A r of every token
    assert unclipped == pytest.approx((-0.2 * ADVANTAGES * LOG_RATIOS.exp()).tolist())
    assert no_counts == dict.fromkeys(clipped, 0)
    assert not math.isclose(loss, other_loss, rel_tol=0.01)


@pytest.mark.parametrize(
    ("surrogate", "mutation"),
    [
        ("clip", ("loss", "log(1 + clip_high)", "log(1 + 10 * clip_high)")),
        ("gspo", ("loss", "log(1 + clip_high)", "log(1 + 10 * clip_high)")),
        ("cispo", ("surrogates", "math.log1p(clip_high)", "math.log1p(10 * clip_high)")),
    ],
)
def test_another_bound_moves_gradient_loss_and_count_together(
    mutated: Any, surrogate: str, mutation: Any
) -> None:
    gradient, loss, counts = results(mutated(), surrogate)
    wider, other_loss, fewer = results(mutated(*mutation), surrogate)
    assert wider[0] == pytest.approx(-0.2 * math.exp(0.5))
    assert wider[0] != gradient[0]
    assert not math.isclose(loss, other_loss, rel_tol=0.01)
    assert fewer["high"] == 0 < counts["high"]


def test_another_gate_of_sapo_moves_gradient_and_loss_together(mutated: Any) -> None:
    gradient, loss, counts = results(mutated(), "sapo")
    steeper, other_loss, _ = results(
        mutated("surrogates", "gate = 4 / tau", "gate = 8 / tau"), "sapo"
    )
    assert steeper == pytest.approx([2 * value for value in gradient])
    assert other_loss == pytest.approx(2 * loss)
    assert counts == {}  # nothing is clipped


def packed(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Six tokens of three responses, of which the fourth token does not train."""
    mask = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool)
    tokens = {
        "logprobs": torch.tensor([-1.0, -0.5, -2.0, -1.0, -0.2, -3.0], dtype=torch.float64),
        "old": torch.tensor([-1.4, -0.5, -1.0, -1.1, -0.9, -2.9], dtype=torch.float64),
        "advantages": torch.tensor([1.0, 1.0, -0.5, -0.5, 0.7, 0.7], dtype=torch.float64),
        "mask": mask,
        "weights": torch.where(mask, 0.2, 0.0).double(),
        "responses": torch.tensor([0, 0, 1, 1, 2, 2]),
    }
    return tokens | changed


def trained(name: str, tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient that trains, and the logged sums."""
    config = LossConfig(surrogate=name)
    rest = {key: value for key, value in tokens.items() if key not in ("logprobs", "responses")}
    responses = Responses.of(tokens["responses"])
    logprobs = tokens["logprobs"]
    terms = objective.gradient_terms(rest, config, responses, logprobs)
    gradient = objective.objective_gradient(logprobs, terms, config).by_logprob
    sums = objective.objective_sums(
        logprobs, torch.zeros(len(gradient)), terms, config, responses=responses
    )
    return gradient, {key: float(value) for key, value in sums.items()}


@pytest.mark.parametrize("name", SURROGATES)
def test_loss_gradient_and_sums_of_each_loss_add_up_over_parts_of_whole_responses(
    name: str,
) -> None:
    whole = packed()
    parts = [packed(), packed()]
    for part, chosen in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        part.update({key: value[chosen] for key, value in whole.items()})
    parts[1]["responses"] = parts[1]["responses"] - 1
    gradient, sums = trained(name, whole)
    gradients, sums_of_parts = zip(*(trained(name, part) for part in parts), strict=True)
    torch.testing.assert_close(torch.cat(gradients), gradient)
    assert sums == pytest.approx({key: sum(part[key] for part in sums_of_parts) for key in sums})
    assert sums["tokens"] == 5


@for_each_row("garbage", [math.nan, math.inf])
@for_each_row("name", SURROGATES)
def test_what_a_masked_token_holds_changes_no_loss(name: str, garbage: float) -> None:
    gradient, sums = trained(name, packed())
    spoilt, same_sums = trained(
        name, packed(logprobs=torch.where(packed()["mask"], packed()["logprobs"], garbage))
    )
    assert spoilt.tolist() == gradient.tolist()
    assert gradient[3] == 0
    assert sums == same_sums


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_each_loss_has_the_gradient_of_the_policy_gradient_in_each_response(
    name: str,
) -> None:
    tokens = packed(old=packed()["logprobs"])
    gradient, _ = trained(name, tokens)
    expected = torch.where(tokens["mask"], -tokens["weights"] * tokens["advantages"], 0.0)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", SURROGATES)
def test_each_row_names_options_of_the_loss_and_what_its_function_takes(name: str) -> None:
    row = SURROGATES[name]
    keywords = set(inspect.signature(row.load()).parameters) - set(
        inspect.signature(policy_loss).parameters
    )
    assert (
        set(row.bounds)
        <= LossConfig.model_fields.keys() & inspect.signature(row.load()).parameters.keys()
    )
    assert ("responses" in keywords) == row.needs_whole_responses
    assert row.summary.format(low=0.8, high=1.28)
