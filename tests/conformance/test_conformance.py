"""The conformance set on dapo's functions, and through updates of a policy."""

import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo.algo.advantages import group_advantages
from dapo.algo.estimator_table import ESTIMATORS
from dapo.algo.gae import generalized_advantages, value_loss, whiten
from dapo.algo.kl import kl_gradient, kl_penalty, token_kl
from dapo.algo.loss import (
    Responses,
    aggregation_weights,
    clip_bounds,
    clipped_gradient,
    engine_weights,
    policy_loss,
)
from dapo.algo.overlong import overlong_penalty
from dapo.algo.sampling import is_informative
from dapo.algo.surrogates import cispo_loss, gspo_loss, sapo_loss
from dapo.config import Config, LossConfig, build_config
from dapo.evaluation.scores import pass_at_k
from dapo.policy.objective import gradient_terms, objective_gradient
from dapo.sampling.samples import shaped_reward, with_advantages
from dapo.types import Generation, Group, Problem, Verdict
from helpers.paths import ROOT
from helpers.tiny_policies import (
    assert_close,
    float64_model,
    gradient_of,
    ids,
    loaded,
    make_policy,
    plain_scores,
    sample,
)

Case = dict[str, Any]
Found = Mapping[str, Any]
FOLDER = Path(__file__).parent
FAMILIES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="ascii"))
    for path in sorted(FOLDER.glob("*.json"))
}
CASES = [(family, case) for family, content in FAMILIES.items() for case in content["cases"]]


# --- dapo's functions by family ---------------------------------------------------------------------------------------


def numbers(values: list[float | None]) -> Tensor:
    return torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float64
    )


def rows_of(flat: Tensor, like: list[list[Any]]) -> list[list[float]]:
    return [row.tolist() for row in flat.split([len(row) for row in like])]


def packed(inputs: Case, *names: str) -> Iterator[Tensor]:
    """The `[i][t]` lists as packed tokens, and the `[i]` lists with a number for each token."""
    mask = inputs["mask"]
    for name in names:
        if name == "mask":
            yield torch.tensor([token for row in mask for token in row])
        elif isinstance(inputs[name][0], list):
            yield numbers([token for row in inputs[name] for token in row])
        else:
            yield numbers([inputs[name][i] for i, row in enumerate(mask) for _ in row])


def responses_of(inputs: Case) -> Responses:
    lengths = torch.tensor([len(row) for row in inputs["mask"]])
    return Responses.of(torch.arange(len(lengths)).repeat_interleave(lengths))


def padded(values: list[list[Any]], filling: Any) -> Tensor:
    longest = max(len(row) for row in values)
    rows = [
        [filling if value is None else value for value in row] + [filling] * (longest - len(row))
        for row in values
    ]
    return torch.tensor(rows, dtype=torch.bool if isinstance(filling, bool) else torch.float64)


LOSS = ("logprobs", "old_logprobs", "advantages", "mask", "weights")


def of_policy_loss(inputs: Case, parameters: Case) -> Found:
    """Padded with NaN, then packed; the gradient by autograd and by the formula that the policy
    uses.
    """
    logprobs = padded(inputs["logprobs"], math.nan).requires_grad_()
    loss, sums = policy_loss(
        logprobs,
        padded(inputs["old_logprobs"], math.nan),
        numbers(inputs["advantages"]),
        padded(inputs["mask"], False),
        numbers(inputs["weights"]),
        **parameters,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    now, old, advantages, mask, weights = packed(inputs, *LOSS)
    again, _ = policy_loss(now, old, advantages, mask, weights, **parameters)
    torch.testing.assert_close(again, loss.detach(), rtol=1e-12, atol=1e-12)
    assert int(sums["tokens"]) == int(mask.sum())
    low, high = clip_bounds(advantages, **parameters)
    formula = clipped_gradient(now - old, torch.where(mask, -weights * advantages, 0.0), low, high)
    lengths = [len(row) for row in inputs["mask"]]
    by_autograd = torch.cat([row[:length] for row, length in zip(gradient, lengths, strict=True)])
    torch.testing.assert_close(torch.where(mask, formula, 0.0), by_autograd, rtol=1e-12, atol=1e-12)
    return {"loss": loss.item(), "gradient": rows_of(by_autograd, inputs["mask"])}


def of_surrogates(inputs: Case, parameters: Case) -> Found:
    bounds = {name: value for name, value in parameters.items() if name != "surrogate"}
    now, *rest = packed(inputs, *LOSS)
    now.requires_grad_()
    if parameters["surrogate"] == "gspo":
        loss, _ = gspo_loss(now, *rest, responses_of(inputs), **bounds)
    else:
        loss, _ = {"cispo": cispo_loss, "sapo": sapo_loss}[parameters["surrogate"]](
            now, *rest, **bounds
        )
    (gradient,) = torch.autograd.grad(loss, now)
    return {"loss": loss.item(), "gradient": rows_of(gradient, inputs["mask"])}


def of_corrected_loss(inputs: Case, parameters: Case) -> Found:
    """By the function that trains; its temperatures of SAPO are constants."""
    bounds = {name: parameters[name] for name in ("clip_low", "clip_high") if name in parameters}
    config = LossConfig(
        surrogate=parameters["surrogate"],
        engine_correction=parameters["cap"],
        engine_ratio=parameters["ratio"],
        engine_over_cap=parameters["over_cap"],
        kl_coef=parameters["kl_coef"],
        **bounds,
    )
    names = (*LOSS, "engine_logprobs", *(["reference_logprobs"] if config.has_kl_term else []))
    tokens = {
        name.removesuffix("_logprobs"): of
        for name, of in zip(names, packed(inputs, *names), strict=True)
    }
    logprobs = tokens.pop("logprobs")
    terms = gradient_terms(tokens, config, responses_of(inputs), logprobs)
    gradient = objective_gradient(logprobs, terms, config).by_logprob
    assert not gradient[~tokens["mask"]].any()
    return {"gradient": rows_of(gradient, inputs["mask"])}


def of_kl(inputs: Case, parameters: Case) -> Found:
    now, reference, mask, weights = packed(
        inputs, "logprobs", "reference_logprobs", "mask", "weights"
    )
    now.requires_grad_()
    each = token_kl(now, reference, mask, **parameters)
    loss = kl_penalty(now, reference, mask, weights, **parameters)
    (gradient,) = torch.autograd.grad(loss, now)
    formula = kl_gradient(now.detach(), reference, mask, weights, **parameters)
    torch.testing.assert_close(formula, gradient, rtol=1e-12, atol=1e-12)
    return {
        "loss": loss.item(),
        "estimates": rows_of(each.detach(), inputs["mask"]),
        "gradient": rows_of(gradient, inputs["mask"]),
    }


def of_minibatch(inputs: Case, parameters: Case) -> Found:
    """Weights of the whole minibatch; then every cut of it into microbatches, whose sums must
    agree.
    """
    clip = {name: parameters[name] for name in ("clip_low", "clip_high")}
    weights = aggregation_weights(
        torch.tensor([sum(row) for row in inputs["mask"]]),
        torch.tensor(inputs["groups"]),
        aggregate=parameters["aggregate"],
        max_length=parameters["max_length"],
    ).tolist()
    results = []
    for cut in inputs["cuts"]:
        loss = 0.0
        gradient = [[0.0]] * len(weights)
        for part in cut:
            names = ("logprobs", "old_logprobs", "mask", "advantages")
            of_part = {name: [inputs[name][i] for i in part] for name in names}
            found = of_policy_loss({**of_part, "weights": [weights[i] for i in part]}, clip)
            loss += found["loss"]
            for i, row in zip(part, found["gradient"], strict=True):
                gradient[i] = row
        results.append({"loss": loss, "gradient": gradient})
    for other in results[1:]:
        assert_equal(other, results[0], 1e-12)
    return results[0]


def step_config(parameters: Case) -> Config:
    overlong = {"mode": parameters["overlong"]}
    if parameters["overlong"] == "soft":
        overlong |= {"buffer_tokens": parameters["buffer"], "penalty": parameters["factor"]}
    return build_config(
        {
            "model": "tiny-random",
            "data": {"train": "builtin:sums"},
            "rollout": {"max_response_tokens": parameters["max_length"], "group_size": 3},
            "overlong": overlong,
            "advantage": {"scale": parameters["scale"]},
            "loss": {"aggregate": parameters["aggregate"]},
        }
    )


def of_step(inputs: Case, parameters: Case) -> Found:
    config = step_config(parameters)
    groups = []
    for g, correct in enumerate(inputs["correct"]):
        described = zip(inputs["lengths"][g], inputs["finish"][g], strict=True)
        generations = tuple(
            Generation("", (3,) * n, (-1.0,) * n, finish, 0) for n, finish in described
        )
        verdicts = tuple(Verdict(right, 1.0 if right else -1.0) for right in correct)
        rewards = tuple(
            shaped_reward(*pair, config) for pair in zip(generations, verdicts, strict=True)
        )
        groups.append(
            Group(Problem("", "", ""), (1,), generations, verdicts, id=g, rewards=rewards)
        )
    kept = [group for group in groups if group.is_informative]
    samples = with_advantages(kept, config)
    minibatch = {
        "logprobs": inputs["logprobs"],
        "old_logprobs": inputs["old_logprobs"],
        "mask": [[bool(trains) for trains in row.mask] for row in samples],
        "advantages": [row.advantage for row in samples],
        "groups": [row.group_id for row in samples],
        "cuts": [[list(range(len(samples)))]],
    }
    weights = aggregation_weights(
        torch.tensor([row.num_trained_tokens for row in samples]),
        torch.tensor(minibatch["groups"]),
        aggregate=parameters["aggregate"],
        max_length=parameters["max_length"],
    )
    return {
        "kept": [group.id for group in kept],
        "rewards": [row.reward for row in samples],
        "advantages": minibatch["advantages"],
        "weights": weights.tolist(),
        **of_minibatch(minibatch, parameters),
    }


def of_group_advantages(inputs: Case, parameters: Case) -> Found:
    return {"advantages": group_advantages(numbers(inputs["rewards"]), **parameters).tolist()}


def of_other_advantages(inputs: Case, parameters: Case) -> Found:
    ids = [torch.tensor(inputs["group_ids"])] if "group_ids" in inputs else []
    return {
        "advantages": (
            ESTIMATORS[parameters["estimator"]].load()(numbers(inputs["rewards"]), *ids).tolist()
        )
    }


def of_informative_groups(inputs: Case, parameters: Case) -> Found:
    pairs = zip(inputs["correct"], inputs["scores"], strict=True)
    verdicts = [
        Verdict(None, 0.0, "timed out") if score is None else Verdict(c, score)
        for c, score in pairs
    ]
    return {"informative": is_informative(verdicts)}


def of_gae(inputs: Case, parameters: Case) -> Found:
    lengths = torch.tensor([len(row) for row in inputs["values"]])
    rewards = padded(inputs["rewards"], math.nan)
    values = padded(inputs["values"], math.nan)
    found = generalized_advantages(rewards, values, lengths, **parameters)
    rows = [[row[:n].tolist() for row, n in zip(tensor, lengths, strict=True)] for tensor in found]
    return dict(zip(("advantages", "targets"), rows, strict=True))


def of_token_whitening(inputs: Case, parameters: Case) -> Found:
    return {"advantages": rows_of(whiten(*packed(inputs, "advantages", "mask")), inputs["mask"])}


def of_value_loss(inputs: Case, parameters: Case) -> Found:
    values = numbers(inputs["values"]).requires_grad_()
    rest = [numbers(inputs[name]) for name in ("old_values", "targets")]
    mask = torch.ones(len(values), dtype=torch.bool)
    loss, _ = value_loss(values, *rest, mask, numbers(inputs["weights"]), **parameters)
    (gradient,) = torch.autograd.grad(loss, values)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def of_overlong_penalty(inputs: Case, parameters: Case) -> Found:
    return {"penalties": [overlong_penalty(length, **parameters) for length in inputs["lengths"]]}


def of_choice_speed(inputs: Case, parameters: Case) -> Found:
    """Minus the derivative of the loss by the logit, by autograd."""
    is_b, groups, rewards = (
        torch.tensor(inputs[name]) for name in ("chooses_b", "groups", "rewards")
    )
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    for group in groups.unique():
        advantages[groups == group] = group_advantages(rewards[groups == group].double())
    trains = ~(torch.tensor(inputs["truncated"]) & parameters["filter_truncated"])
    weights = aggregation_weights(
        torch.tensor(inputs["lengths"]) * trains, groups, aggregate=parameters["aggregate"]
    )
    sign = torch.where(is_b, 1.0, -1.0).double()
    z, old = (
        torch.tensor(inputs[name], dtype=torch.float64).logit().requires_grad_()
        for name in ("p", "p_old")
    )
    now, before = (
        torch.nn.functional.logsigmoid(sign * each)[:, None] for each in (z, old.detach())
    )
    clips = {name: parameters[name] for name in ("clip_low", "clip_high")}
    loss, _ = policy_loss(now, before, advantages, trains[:, None], weights, **clips)
    return {"speed": -torch.autograd.grad(loss, z)[0].item()}


def of_aggregation_weights(inputs: Case, parameters: Case) -> Found:
    lengths = torch.tensor(inputs["lengths"])
    groups = torch.tensor(inputs["groups"])
    return {"weights": aggregation_weights(lengths, groups, **parameters).tolist()}


def of_importance_weights(inputs: Case, parameters: Case) -> Found:
    old, engine, mask = packed(inputs, "old_logprobs", "engine_logprobs", "mask")
    found = engine_weights(
        old,
        engine,
        mask,
        cap=parameters["cap"],
        over_cap=parameters["over_cap"],
        responses=responses_of(inputs) if parameters["ratio"] == "sequence" else None,
    )
    return {"weights": rows_of(found, inputs["mask"])}


def of_pass_at_k(inputs: Case, parameters: Case) -> Found:
    return {"pass_at_k": pass_at_k(**inputs, **parameters)}


DAPO: dict[str, Callable[[Case, Case], Found]] = {
    name.removeprefix("of_"): function
    for name, function in list(globals().items())
    if name.startswith("of_")
}


def assert_equal(found: Any, expected: Any, tolerance: float, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, tolerance, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, tolerance, f"{where}[{i}]")
    elif isinstance(expected, bool):
        assert found is expected, where
    else:
        assert abs(found - expected) <= tolerance * max(1.0, abs(expected)), (
            f"{where}: {found}, not {expected}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_dapo_gives_the_expected_numbers_of_every_case_of(family: str):
    for case in FAMILIES[family]["cases"]:
        inputs = case["inputs"]
        parameters = case["parameters"]
        if case["expected"] == {"refused": True}:
            with pytest.raises(ValueError):
                DAPO[family](inputs, parameters)
        else:
            assert_equal(
                DAPO[family](inputs, parameters), case["expected"], case["tolerance"], case["name"]
            )


# --- through a policy -------------------------------------------------------------------------------------------------

UPDATES = [
    ("minibatch", "token, every token"),
    ("minibatch", "group, a truncated response masked"),
    ("surrogates", "gspo: masked tokens"),
    ("surrogates", "cispo: ragged"),
    ("surrogates", "sapo: ragged"),
]


@pytest.mark.parametrize(("family", "name"), UPDATES, ids=lambda value: value.replace(" ", "-"))
def test_the_gradient_of_an_update_is_the_cases_gradient_through_the_model(
    family: str, name: str, tmp_path: Path
):
    case = next(case for case in FAMILIES[family]["cases"] if case["name"] == name)
    inputs = case["inputs"]
    parameters = case["parameters"]
    groups = inputs.get("groups", list(range(len(inputs["mask"]))))
    samples = [
        sample(
            g,
            ids(4, "prompt", g),
            ids(len(mask), "response", i),
            inputs["advantages"][i],
            mask=tuple(mask),
        )
        for i, (g, mask) in enumerate(zip(groups, inputs["mask"], strict=True))
    ]
    model = float64_model()
    now = [logprobs for logprobs, _ in plain_scores(model, samples)]
    for i, row in enumerate(samples):  # pi_old such that each token's ratio is the case's
        log_ratios = (
            padded([inputs["logprobs"][i]], 0.0)[0] - padded([inputs["old_logprobs"][i]], 0.0)[0]
        )
        samples[i] = replace(row, old_logprobs=tuple((now[i].detach() - log_ratios).tolist()))
    through = sum(
        (numbers(row) * logprobs).sum()
        for row, logprobs in zip(case["expected"]["gradient"], now, strict=True)
    )
    weights = dict(model.named_parameters())
    expected = dict(zip(weights, torch.autograd.grad(through, list(weights.values())), strict=True))
    options = {"aggregate": "token"} | {
        k: v for k, v in parameters.items() if k in ("aggregate", "surrogate")
    }
    options |= {k: v for k, v in parameters.items() if k.startswith("clip_")}
    policy = make_policy(loaded(float64_model()), loss=options, microbatch_tokens=24)
    found = gradient_of(policy, samples, tmp_path / "update")
    assert_close(found, {weight: expected[weight] for weight in found}, relative=1e-10)


# --- the set itself ---------------------------------------------------------------------------------------------------


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_files_are_what_the_scripts_write_byte_by_byte(tmp_path: Path):
    output_of("make.py", str(tmp_path))
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
    assert len(written) >= 14


def test_the_scripts_import_neither_the_package_nor_anything_installed():
    own = {path.stem for path in FOLDER.glob("*.py")}
    for path in FOLDER.glob("*.py"):
        if path.name == Path(__file__).name:
            continue
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
        assert imported <= own | {
            "collections",
            "decimal",
            "json",
            "math",
            "pathlib",
            "sys",
            "typing",
        }, path.name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_case_is_described_in_its_file(family: str):
    content = FAMILIES[family]
    names = [case["name"] for case in content["cases"]]
    assert content["family"] == family
    assert content["schema"] == 1
    assert len(set(names)) == len(names) >= 2
    for part in ("inputs", "parameters", "expected"):
        used = {key for case in content["cases"] for key in case[part]} - {"refused"}
        assert used == content[part].keys(), part
        assert all(content[part].values()), part
    assert all(
        case["why"] and case["source"] and 0 < case["tolerance"] <= 1e-12
        for case in content["cases"]
    )


def test_the_table_of_the_page_is_what_the_script_prints_and_each_row_is_a_difference():
    page = (ROOT / "docs" / "lab" / "conformance.md").read_text(encoding="utf-8")
    table = output_of("differences.py").strip()
    assert table in page
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 15
    for row in rows:
        family, _, name = row[0].strip("| `").partition(": ")
        assert name in [case["name"] for case in FAMILIES[family]["cases"]], row[0]
        assert row[2] != row[3], row


def test_the_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    exec(re.search(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[1], {})
    assert all(f"`{name}.json`" in text for name in FAMILIES)
