"""The race to an accuracy: what is measured and kept, where a curve crosses its target, and how
sure that is.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import accuracy, accuracy_report, bench
from benchmarks.accuracy import (
    Design,
    Leg,
    Legs,
    held_out_problems,
    measure_accuracy,
    require_same_rates,
)
from benchmarks.crossing import HeldOut, find_crossing, first_above, smoothed, smoothing
from benchmarks.protocol import WorkerFailed
from benchmarks.worker_session import Settings
from benchmarks.workers.evaluator import common_prefix, sample
from dapo.config import load_config
from helpers.paths import ROOT
from helpers.tiny_models import tiny_model

HELD_OUT = HeldOut(
    problems={"sums": 29, "products": 19, "largest": 252},
    samples={"sums": 3, "products": 3, "largest": 1},
    shares={"sums": 0.3, "products": 0.2, "largest": 0.5},
)
MARKS = np.arange(0.0, 20_001.0, 2000.0)
BANDWIDTH = accuracy_report.BANDWIDTH * 2000.0
ABILITY_SPREAD = 1.5


def ability(tokens: Any) -> Any:
    """The ability of a simulated policy, which learns fast at first and then more slowly."""
    return -2.0 + 4.4 * (1 - np.exp(-np.asarray(tokens) / 4500))


def true_accuracy(tokens: Any) -> Any:
    """Over all problems, whose difficulties are normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    logits = np.asarray(ability(tokens))[..., None] + ABILITY_SPREAD * nodes
    return (1 / (1 + np.exp(-logits))) @ weights / weights.sum()


def simulated_rates(rng: np.random.Generator, difficulties: np.ndarray | None = None) -> np.ndarray:
    """`[marks, problems]` shares of right responses of one race; an easy problem is easy at every
    mark.
    """
    if difficulties is None:
        difficulties = ABILITY_SPREAD * rng.standard_normal(sum(HELD_OUT.problems.values()))
    chances = 1 / (1 + np.exp(-(ability(MARKS)[:, None] + difficulties)))
    asked = np.repeat(
        [HELD_OUT.samples[task] for task in HELD_OUT.problems], list(HELD_OUT.problems.values())
    )
    return rng.binomial(asked, chances) / asked


def test_an_accuracy_weighs_tasks_by_their_share_and_its_interval_adds_their_variances():
    held_out = HeldOut({"a": 4, "b": 2}, {"a": 1, "b": 3}, {"a": 0.25, "b": 0.75})
    rates = held_out.rates("110031")
    assert rates.tolist() == [1, 1, 0, 0, 1, 1 / 3]
    with pytest.raises(ValueError, match="an evaluation of 3 problems where 6 were asked"):
        held_out.rates("110")
    mean, low, high = held_out.accuracy(rates)
    assert mean == pytest.approx(0.25 * 0.5 + 0.75 * 2 / 3)
    assert rates @ held_out.weights() == pytest.approx(mean)
    # variances with divisor n - 1: 1/3 of 4 problems, and 2/9 of 2
    half = 1.959964 * math.sqrt(0.25**2 / 3 / 4 + 0.75**2 * (2 / 9) / 2)
    assert (low, high) == (pytest.approx(mean - half), pytest.approx(min(1.0, mean + half)))


def test_smoothing_is_weighted_least_squares_and_gives_a_parabola_back_exactly():
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 10, 12))
    y = rng.normal(size=12)
    at = np.array([0.0, 3.3, 9.7])
    for position, value in zip(at, smoothed(x, y, at, 4.0), strict=True):
        weights = np.clip(1 - (np.abs(x - position) / 4.0) ** 3, 0, None) ** 3
        assert value == pytest.approx(np.polyfit(x - position, y, 2, w=np.sqrt(weights))[-1])
    assert smoothed(x, x**2 - 3 * x + 1, at, 4.0) == pytest.approx(at**2 - 3 * at + 1)
    # few evaluations, or none nearby: the nearest ones, and a lower degree
    assert smoothed(
        [0.0, 1.0, 2.0], np.array([0.0, 1.0, 4.0]), np.array([3.0]), 0.1
    ) == pytest.approx(9.0)
    assert smoothed([0.0, 1.0], np.array([1.0, 3.0]), np.array([0.5]), 0.1) == pytest.approx(2.0)
    assert smoothing(np.array([0.0, 1.0, 2.0, 9.0]), np.array([5.0]), 0.1).sum() == pytest.approx(
        1.0
    )


def test_a_crossing_is_between_two_positions_and_infinite_where_there_is_none():
    at = np.array([0.0, 10.0, 20.0])
    curves = [[0.0, 0.5, 1.0], [0.9, 0.2, 0.9], [0.0, 0.1, 0.2], [0.0, 0.8, 0.1]]
    assert [first_above(at, np.array(curve), 0.75) for curve in curves] == [
        15.0,
        0.0,
        math.inf,
        9.375,
    ]


def test_simulated_crossings_are_found_within_a_step_without_bias_and_intervals_hold_them():
    grid = np.linspace(0, 20_000, 20_001)
    truth = float(grid[np.argmax(true_accuracy(grid) >= 0.75)])
    assert 6_000 < truth < 12_000
    rng = np.random.default_rng(1)
    found = [
        find_crossing(MARKS, simulated_rates(rng), HELD_OUT, target=0.75, bandwidth=BANDWIDTH)
        for _ in range(300)
    ]
    errors = np.array([crossing.at - truth for crossing in found])
    covered = np.mean([crossing.low <= truth <= crossing.high for crossing in found])
    print(
        f"true {truth:.0f}, bias {errors.mean():.0f}, root mean square"
        f" {np.sqrt((errors**2).mean()):.0f}, covered {covered:.2f}, width"
        f" {np.mean([c.high - c.low for c in found]):.0f}"
    )
    assert abs(errors.mean()) < 400
    assert np.sqrt((errors**2).mean()) < 1250
    assert covered >= 0.9


def test_on_the_same_problems_a_simulated_crossing_repeats_within_half_a_step():
    rng = np.random.default_rng(2)
    variances = []
    for _ in range(25):
        difficulties = ABILITY_SPREAD * rng.standard_normal(sum(HELD_OUT.problems.values()))
        races = [simulated_rates(rng, difficulties) for _ in range(4)]
        found = [
            find_crossing(MARKS, rates, HELD_OUT, target=0.75, bandwidth=BANDWIDTH).at
            for rates in races
        ]
        variances.append(np.var(found, ddof=1))
    deviation = float(np.sqrt(np.mean(variances)))
    print(f"standard deviation {deviation:.0f} tokens")
    assert deviation < 500  # a step of TRL's generates about 900 tokens, one of ours 1,250


STEP = {"ours": (1250, 8.5), "all_groups": (850, 6.0), "trl": (850, 42.0)}
"""Generated tokens and seconds of a simulated step."""


class FakeSession:
    """Systems that learn as `ability` says, and an evaluator that draws responses; `fails_at`: a
    step that ends it.
    """

    def __init__(
        self, folder: Path, *, fails_at: tuple[str, int] | None = None, **settings: Any
    ) -> None:
        self.settings = Settings(results=folder / "results.json", trl_microbatches=(8,), **settings)
        self.folder = folder
        self.fails_at = fails_at
        self.answers: dict[str, Any] = {}
        self.workers: dict[str, dict[str, Any]] = {}
        self.lines: list[str] = []
        self.rng = np.random.default_rng(0)

    def log(self, text: str) -> None:
        self.lines.append(text)

    def start(self, name: str, module: str) -> None:
        assert accuracy.MODULES.get(name, "evaluator") == module
        self.workers[name] = {"steps": 0}

    def close(self, *names: str) -> None:
        for name in names:
            self.workers.pop(name)

    def ask(self, name: str, do: str, **given: Any) -> dict[str, Any]:
        return getattr(self, f"do_{do}")(name, **given)

    def do_open(self, name: str, **given: Any) -> dict[str, Any]:
        if name == "evaluator":
            self.workers[name]["problems"] = given["problems"]
        config = load_config(ROOT / accuracy.CONFIG, given.get("overrides", ())).model_dump(
            mode="json"
        )
        base = self.folder / "base"
        base.mkdir(exist_ok=True)
        (base / "tokens").write_text("0")
        return {
            "config": config,
            "directory": str(base),
            "dtype": "float32",
            "versions": {name: "1"},
        }

    def do_rows(self, name: str, count: int) -> dict[str, Any]:
        return {"rows": [{"prompt": "?", "answer": "!"}] * count}

    def do_step(self, name: str) -> dict[str, Any]:
        worker = self.workers[name]
        if (name, worker["steps"]) == self.fails_at:
            raise WorkerFailed(f"{name} ended")
        worker["steps"] += 1
        tokens, seconds = STEP[name]
        rate = 2e-5 * min(1.0, worker["steps"] / 3)
        return {
            "step_s": seconds,
            "generated_tokens": tokens,
            "trained_tokens": tokens // 2,
            "lr": rate,
        }

    def do_export(self, name: str, directory: str) -> dict[str, Any]:
        Path(directory).mkdir()
        (Path(directory) / "tokens").write_text(str(self.workers[name]["steps"] * STEP[name][0]))
        return {}

    def do_evaluate(self, name: str, model: str, seed: int) -> dict[str, Any]:
        tokens = int((Path(model) / "tokens").read_text())
        samples = [accuracy.SAMPLES[row["source"]] for row in self.workers[name]["problems"]]
        right = np.random.default_rng(seed).binomial(samples, true_accuracy(tokens))
        return {"right": "".join(map(str, right)), "responses": sum(samples), "seconds": 1.0}


@pytest.fixture
def raced(tmp_path, monkeypatch):
    """Run the part in a session, with a cache folder of its own: `raced(seeds=2)`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(**settings: Any) -> tuple[dict[str, Any], FakeSession]:
        session = FakeSession(tmp_path, **settings)
        found = measure_accuracy(session, installed=lambda module: True)
        bench.write_results(session.settings.results, found, session.settings)
        return found["accuracy"], session

    return run


def test_a_race_takes_every_system_to_the_budget_and_evaluates_at_each_mark(raced):
    part, session = raced(seeds=1, systems=("ours", "all_groups", "trl"))
    assert [leg["system"] for leg in part["legs"]] == ["all_groups", "ours", "trl"]
    for leg in part["legs"]:
        tokens, seconds = STEP[leg["system"]]
        steps = -(-Design().token_budget // tokens)
        assert len(leg["steps"]) == steps
        assert [found["step"] for found in leg["evaluations"]] == [
            -(-mark // tokens)
            for mark in range(0, Design().token_budget + 1, Design().evaluate_every)
        ]
        assert leg["evaluations"][-1]["tokens"] == steps * tokens
        assert leg["evaluations"][-1]["seconds"] == steps * seconds
    assert session.workers == {}
    assert not [
        path for path in session.folder.iterdir() if path.name.startswith(("ours-", "trl-"))
    ]
    assert part["figures"][0]["values"] == [accuracy_report.curves_of(part)[0].at_crossing("s")]
    # responses that discarded groups would have cost nobody: the tokens are all generated ones
    assert part["legs"][1]["steps"][0]["tokens"] == 1250


def test_an_interrupted_race_is_run_again_and_those_before_it_are_kept(raced, tmp_path):
    with pytest.raises(WorkerFailed):
        raced(seeds=1, fails_at=("trl", 7))
    part, session = raced(seeds=2)
    assert [(leg["seed"], leg["system"]) for leg in part["legs"]] == [
        (0, "ours"),
        (0, "trl"),
        (1, "ours"),
        (1, "trl"),
    ]
    with pytest.raises(WorkerFailed):
        raced(seeds=3, fails_at=("ours", 3))
    again, session = raced(seeds=3)
    assert again["legs"][:4] == part["legs"]
    assert len(again["legs"]) == 6
    assert sum("complete already" in line for line in session.lines) == 2
    # a system that joins later runs alone, also where only the results file is left
    for path in (tmp_path / "cache").rglob("*.json"):
        path.unlink()
    joined, session = raced(seeds=1, systems=("ours", "all_groups", "trl"))
    assert [leg for leg in joined["legs"] if leg["system"] != "all_groups"] == again["legs"]
    assert joined["legs"][0]["made_with"]["together_with"] == []


def test_a_system_that_is_not_above_the_target_when_its_budget_ends_goes_on_for_half_of_it(raced):
    budget = Design().token_budget
    part, _ = raced(seeds=1)
    assert all(sum(step["tokens"] for step in leg["steps"]) < 1.1 * budget for leg in part["legs"])
    for _ in range(2):
        part, session = raced(seeds=1, target=0.99)
        for leg in part["legs"]:
            tokens = STEP[leg["system"]][0]
            assert len(leg["steps"]) == -(-1.5 * budget // tokens)
            assert leg["evaluations"][-1]["step"] == len(leg["steps"])
    assert "seed 0: complete already" in session.lines[-1], "the longer races were kept"


def test_another_design_never_joins_and_time_that_is_over_begins_no_race(raced):
    part, _ = raced(seeds=1)
    assert len(Legs(Path("nowhere"), part, Design()).by_key) == 2
    with pytest.raises(
        ValueError,
        match=r"other curves \(dtype auto, here bfloat16\): give another --name, or --again",
    ):
        raced(seeds=1, dtype="bfloat16")
    same, session = raced(seeds=2, minutes=0.0)
    assert same["legs"] == part["legs"]
    assert "the same command again goes on here" in session.lines[-1]
    forgotten, _ = raced(seeds=1, first_seed=3, again=True)
    assert {leg["seed"] for leg in forgotten["legs"]} == {3}


def test_a_step_at_another_learning_rate_makes_curves_incomparable():
    legs = [
        Leg(0, name, steps=[{"lr": 1e-5}, {"lr": rate}])
        for name, rate in (("ours", 2e-5), ("trl", 1e-5))
    ]
    with pytest.raises(ValueError, match="step 2: ours trained at rate 2e-05 and trl at 1e-05"):
        require_same_rates(legs)


def test_the_evaluated_problems_are_held_out_three_hundred_and_weighted_as_in_the_quickstart():
    held_out, rows = held_out_problems(Design())
    assert sum(held_out.problems.values()) == len(rows) >= 300
    assert [row["source"] for row in rows] == [
        task for task, count in held_out.problems.items() for _ in range(count)
    ]
    assert list(held_out.problems) == list(accuracy.SAMPLES)
    assert sum(held_out.shares.values()) == pytest.approx(1)
    # the quickstart's own held-out set has no more sums and products than these
    assert (
        held_out.shares["sums"] / held_out.shares["products"]
        == held_out.problems["sums"] / held_out.problems["products"]
    )


def test_tables_compare_race_by_race_and_a_target_out_of_reach_is_a_bound(raced):
    part, session = raced(seeds=3)
    head, *rows = accuracy_report.comparison_rows(part)
    results = json.loads(session.settings.results.read_text())
    assert head[1:] == ("ours", "TRL", "ours against TRL (95 % interval)")
    labels = [row[0] for row in rows]
    assert labels[:3] == [
        "generated tokens until 75%",
        "seconds of training until 75%",
        "steps until 75%",
    ]
    tokens, seconds, steps = (float(row[3].split(" x")[0]) for row in rows[:3])
    # the same curve against tokens: seconds differ as those of a token do
    assert tokens == pytest.approx(1, abs=0.15)
    assert seconds == pytest.approx(tokens * (8.5 / 1250) / (42.0 / 850), rel=0.05)
    assert steps == pytest.approx(tokens * 850 / 1250, rel=0.1)
    # without a spread no interval
    assert rows[labels.index("seconds a step")][1:] == ("8.5", "42", "0.20 x")
    text = accuracy_report.document(results)
    assert f"{sum(part['held_out']['problems'].values())} held-out problems" in text
    assert len(accuracy_report.race_rows(part)) == 7
    beyond = accuracy_report.comparison_rows(part | {"target": 0.99})
    assert beyond[1][1].startswith("at least ")
    assert beyond[1][1].endswith("3 of 3 not reached")
    assert beyond[1][3] == ""
    assert all(figure["unfinished"] for figure in accuracy_report.figures(part | {"target": 0.99}))


@pytest.mark.parametrize("document", ["docs/lab/performance.md"])
def test_documents_state_the_tokens_and_seconds_of_the_stored_races(document: str):
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "against.json").read_text(encoding="utf-8")
    )
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    _, tokens, seconds, *_ = accuracy_report.comparison_rows(results["parts"]["accuracy"])
    assert all(ratio in text for ratio in (*tokens[4:], *seconds[4:]))
    assert all(cell.split()[0] in text for cell in (seconds[1], seconds[3]))


def test_the_picture_is_small(raced, tmp_path):
    part, _ = raced(seeds=2)
    assert accuracy_report.plot(tmp_path / "a.png", part).stat().st_size < 200_000


@torch.inference_mode()
def test_the_evaluator_gives_what_plain_generate_gives_for_each_prompt_alone():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [3, 5]
    shared = list(range(20, 29))
    prompts = [[*shared, *rest] for rest in ([7], [8, 9], [7, 11, 30], [8, 10], [40, 41, 42], [7])]
    assert common_prefix(prompts) == 9
    found = sample(model, prompts, 0, do_sample=False, max_new_tokens=12)
    for ids, response in zip(prompts, found, strict=True):
        asked = torch.tensor([ids])
        alone = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
        assert response == alone
    assert common_prefix([[1, 2], [1, 2]]) == 1
    assert common_prefix([[1, 2], [3, 2]]) == 0
    assert (
        sample(model, [[7, 1], [8, 1]], 0, do_sample=False, max_new_tokens=3)[0]
        == (sample(model, [[7, 1]], 0, do_sample=False, max_new_tokens=3)[0])
    )


def test_a_race_at_another_rate_is_another_design():
    settings = bench.settings_of(
        bench.parse_arguments(["accuracy", "--rate", "4e-5", "--budget", "8000"])
    )
    design = Design.of(settings)
    assert design.overrides == ("optim.lr=4e-05",)
    assert (design.token_budget, design.held_out_size) == (8000, Design.held_out_size)
    assert design.name != Design.of(Settings()).name
    assert (
        load_config(ROOT / "configs" / "quickstart.yaml", list(design.overrides)).optim.lr == 4e-5
    )
    assert Design.of(Settings()) == Design()


def test_races_at_several_rates_are_one_table_and_pilots_are_in_no_ratio():
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "against.json").read_text(encoding="utf-8")
    )
    part = results["parts"]["accuracy"]
    pilots = [
        leg | {"seed": 100 + leg["seed"], "steps": [step | {"lr": 4e-5} for step in leg["steps"]]}
        for leg in part["legs"]
        if leg["system"] == "trl"
    ]
    other = {**part, "legs": pilots}
    _, rows = accuracy_report.rates_table([part, other])
    assert [(rate, system) for rate, system, *_ in rows] == [
        ("2e-05", "ours without dynamic sampling"),
        ("2e-05", "ours"),
        ("2e-05", "TRL"),
        ("4e-05", "TRL"),
    ]
    assert [bool(cell) for cell in rows[2][2:]] == [False, True]
    assert [bool(cell) for cell in rows[3][2:]] == [True, False]
    assert rows[2][3] == rows[3][2]
    assert (
        accuracy_report.rates_ratios([part, other])[1]
        == "ours at 2e-05 / TRL at 2e-05: 1.44 x (1.25 to 1.67), 5 races"
    )
    assert len(accuracy_report.rates_ratios([part, other])) == 2
