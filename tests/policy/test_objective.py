"""Each surrogate has one place: a change there moves the gradient that trains and the logged metrics together."""

import importlib
import inspect
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from dapo.config import LossConfig

MODULES = ("dapo.algo.loss", "dapo.algo.surrogates", "dapo.policy.objective")
LOG_RATIOS = torch.tensor([0.5, 0.1, -0.5, 0.5, 0.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -2.0, 1.0], dtype=torch.float64)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}


@pytest.fixture
def mutated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the objective with one line of `algo` changed."""

    def load(file: str = "", old: str = "", new: str = "") -> ModuleType:
        found = False
        for name in MODULES:
            source, module = inspect.getsource(importlib.import_module(name)), ModuleType(name)
            if name == f"dapo.algo.{file}":
                assert source.count(old) == 1, "there is one place"
                source, found = source.replace(old, new), True
            exec(compile(source, name, "exec"), vars(module))
            monkeypatch.setitem(sys.modules, name, module)
        assert found or not file
        monkeypatch.undo()
        return module

    return load


def results(objective: ModuleType, surrogate: str) -> tuple[list[float], float, dict[str, float]]:
    """The gradient that trains, the logged loss, and the counts of clipped tokens; each token is a response."""
    bounds = BOUNDS if surrogate == "clip" else {name: BOUNDS[name] for name in ("clip_low", "clip_high")}
    config = LossConfig(surrogate=surrogate, **bounds)
    old = torch.full_like(LOG_RATIOS, -1.0)
    tokens = {
        "old": old,
        "advantages": ADVANTAGES,
        "mask": torch.ones(5, dtype=torch.bool),
        "weights": torch.full_like(old, 0.2),
        "responses": torch.arange(5),
    }
    logprobs = old + LOG_RATIOS
    gradient, _ = objective.objective_gradient(logprobs, objective.gradient_terms(tokens, config), config)
    sums = objective.objective_sums(logprobs, torch.zeros_like(old), tokens, config)
    counts = {name.removeprefix("clipped_"): float(sums[name]) for name in sums if name.startswith("clipped_")}
    return gradient.tolist(), float(sums["loss"]), {name: counts[name] for name in counts if "prob" not in name}


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
    assert unclipped == pytest.approx((-0.2 * ADVANTAGES * LOG_RATIOS.exp()).tolist())  # w A r of every token
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
def test_another_bound_moves_gradient_loss_and_count_together(mutated: Any, surrogate: str, mutation: Any) -> None:
    gradient, loss, counts = results(mutated(), surrogate)
    wider, other_loss, fewer = results(mutated(*mutation), surrogate)
    assert wider[0] == pytest.approx(-0.2 * math.exp(0.5))
    assert wider[0] != gradient[0]
    assert not math.isclose(loss, other_loss, rel_tol=0.01)
    assert fewer["high"] == 0 < counts["high"]


def test_another_gate_of_sapo_moves_gradient_and_loss_together(mutated: Any) -> None:
    gradient, loss, counts = results(mutated(), "sapo")
    steeper, other_loss, _ = results(mutated("surrogates", "gate = 4 / tau", "gate = 8 / tau"), "sapo")
    assert steeper == pytest.approx([2 * value for value in gradient])
    assert other_loss == pytest.approx(2 * loss)
    assert counts == {}  # nothing is clipped
