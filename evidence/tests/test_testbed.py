"""The testbed: verdicts by strategy, base models by table, runs that continue, contrasts that find
what was put in.
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from dapo.config import load_config
from dapo.config.option_entries import flat_options
from dapo.data.problems import load_problems
from dapo.start.ignored_options import ignored_options
from dapo.types import Problem
from evidence.base_model import ORIGIN, base_model
from evidence.testbed.__main__ import main
from evidence.testbed.analysis import Interval, predict, read_arm, report, stored_arms
from evidence.testbed.bases import CONFIG, FOLDER, Recipe, parse_recipe
from evidence.testbed.page import update
from evidence.testbed.plan import NAMES, Job, jobs, load
from evidence.testbed.rewards import Arithmetic, Strategy
from evidence.testbed.runs import (
    FIRST_LETTERS,
    append,
    make_base_model,
    make_run,
    measure_rollouts,
    missing,
    run_all,
    stored_runs,
)
from evidence.testbed.tabular import Choice, crossing, simulate
from helpers.paths import ROOT
from helpers.processes import wait_until_ended

ARMS = [
    (name, arm) for name in NAMES for arm, facts in load(name)["arms"].items() if "measure" in facts
]
SIMULATED = [(name, arm) for name, arm in ARMS if "tabular" in load(name)["arms"][arm]]


def problems(split: Any = "train", size: int = 400) -> list[Problem]:
    source = replace(load_config(CONFIG).data.train_source, size=size)
    return load_problems(source, split=split)


# --- verdicts


def test_a_strategy_is_right_with_its_probability_and_the_same_text_is_always_judged_the_same():
    verify = Strategy(right={"A": 0.3, "B": 0.95}, seed=4)
    for letter, expected in (("A", 0.3), ("B", 0.95), ("C", 0.0)):
        verdicts = [verify(problem, f"{letter}1234.").correct for problem in problems()]
        assert verdicts == [verify(problem, f"{letter}1234.").correct for problem in problems()]
        assert abs(np.mean(verdicts) - expected) < 4 * math.sqrt(0.25 / len(verdicts)), letter
    other = replace(verify, seed=5)
    assert [verify(p, "A12.").correct for p in problems()] != [
        other(p, "A12.").correct for p in problems()
    ]


def test_a_truncated_response_is_wrong_whatever_its_strategy():
    verify = Strategy(right={"A": 1.0})
    assert all(verify(problem, "A12.").correct for problem in problems())
    assert not any(
        verify(problem, text).correct for problem in problems() for text in ("A12", "12.", "")
    )


def test_trivial_and_impossible_problems_have_their_shares_and_are_so_for_every_response():
    verify = Strategy(right={"A": 0.5}, trivial=0.5, impossible=0.25)
    groups = Counter()
    for problem in problems(size=800):
        verdicts = {verify(problem, text).correct for text in (*(f"A{i}." for i in range(40)), "Z")}
        groups["mixed" if len(verdicts) == 2 else verdicts.pop()] += 1
    assert abs(groups[True] - 400) < 60
    assert abs(groups[False] - 200) < 50


def test_on_held_out_questions_the_better_strategy_is_correct():
    verify = Strategy(right={"A": 1.0, "B": 0.0})
    held_out = problems("eval", 20)
    assert all(verify(problem, "B12.").correct for problem in held_out)
    assert not any(
        verify(problem, text).correct for problem in held_out for text in ("A12.", "B12")
    )


def test_numbers_that_are_no_probabilities_are_refused():
    for wrong in ({"right": {"A": 1.2}}, {"trivial": -0.1}, {"trivial": 0.6, "impossible": 0.6}):
        with pytest.raises(ValueError, match="probabilities from 0 to 1"):
            Strategy(**wrong)


# --- base models


def test_texts_have_the_shares_and_lengths_of_their_table_by_source():
    recipe = parse_recipe(
        {
            "strategies": {"A": [0.7, 8, 8], "B": [0.3, 12, 20]},
            "lengths": {"sort_digits": {"B": [28, 28]}},
        },
        1000,
    )
    sums = problems(size=2000)
    texts = [recipe.solve(problem, 1, index).text for index, problem in enumerate(sums)]
    assert abs(np.mean([text[0] == "B" for text in texts]) - 0.3) < 4 * math.sqrt(0.21 / len(texts))
    assert {len(text) for text in texts if text[0] == "A"} == {8}
    assert {len(text) for text in texts if text[0] == "B"} == set(range(12, 21))
    other = [
        recipe.solve(replace(problem, source="sort_digits"), 1, index).text
        for index, problem in enumerate(sums)
    ]
    assert {len(text) for text in other if text[0] == "B"} == {28}


def test_recipes_that_differ_have_folders_that_differ():
    recipes = {job.recipe.name: job.recipe for name in NAMES for job in jobs(name)}
    assert len(recipes) == len({repr(recipe) for recipe in recipes.values()})
    assert len(recipes) >= 3 * len(NAMES)


# --- the experiments


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_run_of_its_own_and_sets_no_option_in_vain(name: str):
    found = list(jobs(name))
    assert len({job.key for job in found}) == len(found)
    seen = set()
    for job in found:
        if job.recipe.seed == 1000 and job.seed in (0, 100):
            config = load_config(
                CONFIG, [*job.options, f"train.seed={job.seed}", f"model.name={job.recipe.name}"]
            )
            assert config.reward.options["seed"] == job.seed
            unused = {line.partition(":")[0] for line in ignored_options(config)}
            assert not unused & {option.partition("=")[0] for option in job.options}
            options = str(flat_options(config))
            assert options not in seen, job
            seen.add(options)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_seed_of_every_cell_comes_first_and_only_pilots_have_their_seeds(name: str):
    for arm, facts in load(name)["arms"].items():
        found = list(jobs(name, arms=(arm,)))
        assert [job.seed for job in found] == sorted(job.seed for job in found)
        is_pilot = "chosen_by" in facts
        assert {job.seed >= 100 for job in found} == {is_pilot}
        assert len({job.recipe.seed for job in found}) == (1 if is_pilot else 3)


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_an_experiment_states_its_prediction_for_each_of_its_levels(name: str, arm: str):
    facts = load(name)["arms"][arm]
    assert load(name)["refuted_by"]
    assert len(facts["predicted"]) == len(facts["levels"]) == (2 if arm == "arithmetic" else 5)
    assert {level["name"] for level in facts["levels"]} >= set(facts["delivered"]["levels"])
    assert {*facts["measure"]["rows"], facts["delivered"]["row"]} <= set(facts["rows"])


@pytest.mark.parametrize(("name", "arm"), SIMULATED)
def test_the_simulation_gives_the_predictions_of_the_files(name: str, arm: str):
    facts = load(name)["arms"][arm]
    assert predict(facts) == pytest.approx(facts["predicted"], abs=0.006)


def test_exactly_four_contrasts_are_primary():
    assert sum(bool(load(name)["arms"][arm].get("primary")) for name, arm in ARMS) == 4


# --- the simulation


def test_without_a_difference_in_reward_the_share_stays_and_with_one_it_grows():
    same = simulate(Choice(start=0.3, right_a=0.5, right_b=0.5, rate=0.02), steps=20)
    assert abs(same[-1].mean() - 0.3) < 0.1
    assert simulate(Choice(start=0.3, rate=0.1), steps=20)[-1].mean() > 0.9


def test_losses_with_equal_lengths_are_equal_and_filtering_changes_nothing_without_truncation():
    base = Choice(start=0.2, length_a=9, length_b=9)
    for other in (
        replace(base, per_token=False),
        replace(base, filtered=True),
        replace(base, clip_high=0.28),
    ):
        assert np.allclose(simulate(base, steps=8, seeds=8), simulate(other, steps=8, seeds=8))


def test_where_most_problems_do_not_fit_only_filtering_keeps_the_better_strategy():
    """Drifts: (1 - tau) (a_l - a_s) - tau a_s without filtering; with it -tau a_s p in place of the
    second term.
    """
    base = Choice(start=0.3, right_a=0.5, rate=0.2, groups=8, too_long=0.6)
    balance = 0.4 * (0.95 - 0.5) / (0.6 * 0.5)
    assert simulate(base, steps=40)[-1].mean() < 0.1
    assert abs(simulate(replace(base, filtered=True), steps=60)[-1].mean() - balance) < 0.08


def test_a_crossing_lies_between_two_steps_and_a_run_that_never_crosses_counts_with_its_last():
    shares = np.array([[0.1, 0.5, 0.1], [0.3, 0.5, 0.1], [0.7, 0.9, 0.2]])
    assert crossing(shares, 0.5).tolist() == pytest.approx([2.5, 1.0, 3.0])
    assert crossing(1 - shares, 0.5, falling=True).tolist() == pytest.approx([2.5, 1.0, 3.0])


# --- runs


def test_shares_are_the_policys_own_probabilities():
    def row(response: str, probability: float, source: str = "sums") -> dict[str, Any]:
        logprobs = [math.log(probability), -0.1]
        return {
            "source": source,
            "response": response,
            "response_tokens": len(response),
            "engine_logprobs": logprobs,
        }

    rows = [
        row("A12.", 0.75),
        row("B123.", 0.25),
        row("B12345.", 0.65, "sort_digits"),
        row("x", 0.01),
    ]
    found = measure_rollouts(rows)
    assert found["share/sums"] == pytest.approx(0.25)
    assert found["share/sort_digits"] == pytest.approx(0.65)
    assert found["share"] == pytest.approx((0.25 + 0.25 + 0.65) / 3)
    assert (found["length/A"], found["length/B"]) == (4, 6)


def tiny_job(**changes: Any) -> Job:
    recipe = Recipe(
        strategies={"A": (0.5, 4, 4), "B": (0.5, 6, 6)},
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        updates=2,
        warmup_updates=1,
        seed=1,
    )
    options = ("train.num_steps=2", "rollout.prompts_per_step=2", "train.minibatch_groups=2")
    job = Job("overlong", "need", "0", "off", 100, recipe, options, ("rollout/truncated_fraction",))
    return replace(job, **changes)


def test_a_run_leaves_one_line_and_no_folder_and_another_call_skips_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    job = tiny_job()
    make_base_model(job.recipe)
    found = make_run(job)
    assert len(found["curves"]["tokens"]) == len(found["curves"]["rollout/truncated_fraction"]) == 2
    assert not list((tmp_path / "temporary").glob("testbed-*"))
    wanted = [job, replace(job, seed=101)]
    assert missing(wanted, tmp_path) == wanted
    append(job, found, tmp_path)
    assert missing(wanted, tmp_path) == wanted[1:]
    assert run_all([job], workers=1, seconds=60, log=lambda text: None, folder=tmp_path) == 0


def line_of(job: Job, curves: dict[str, Any]) -> str:
    return json.dumps(
        {
            **dict(zip(("arm", "level", "row", "base", "seed"), job.key, strict=True)),
            "curves": curves,
        }
    )


def test_a_line_that_a_kill_cut_off_is_made_again_and_other_damage_names_its_line(tmp_path: Path):
    job = tiny_job()
    file = tmp_path / "overlong.jsonl"
    file.write_text(line_of(job, {}) + "\n" + line_of(replace(job, seed=101), {})[:20])
    assert missing([job, replace(job, seed=101)], tmp_path) == [replace(job, seed=101)]
    append(replace(job, seed=101), {"curves": {}}, tmp_path)
    assert [run["seed"] for run in stored_runs("overlong", tmp_path)] == [100, 101]
    for damage, message in (
        ("{", "line 3 is not a run"),
        (line_of(job, {}), "line 3 is a second run of"),
    ):
        kept = file.read_text()
        file.write_text(kept + damage + "\n")
        with pytest.raises(ValueError, match=message):
            stored_runs("overlong", tmp_path)
        file.write_text(kept)


def test_a_damaged_record_of_a_base_model_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    recipe = tiny_job().recipe
    folder, origin = base_model(lambda text: None, recipe=recipe)
    (folder / ORIGIN).write_text("{")
    assert base_model(lambda text: None, recipe=recipe)[1]["recipe"] == origin["recipe"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["overlongg"], "no experiment overlongg: there are overlong,"),
        (["--arm", "needs"], "no arm needs: there are need; style"),
        (["--seeds", "abc"], "argument --seeds"),
        (["--jobs", "0"], "--jobs is a number of runs from 1 on, not 0"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, monkeypatch: Any, capsys: Any
):
    monkeypatch.setattr("sys.argv", ["evidence.testbed", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_an_arm_whose_name_has_a_comma_can_be_chosen(monkeypatch: Any, capsys: Any):
    monkeypatch.setattr(
        "sys.argv", ["testbed", "--list", "--arm", "rare long, better", "--seeds", "150"]
    )
    main()
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 5 * 2 * 3
    assert {line.partition(", better/")[0] for line in listed} == {"token_level/rare long"}


def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    script = (
        "import os, time; from concurrent.futures import ProcessPoolExecutor; from multiprocessing"
        " import get_context\nfrom evidence.testbed.runs import _begin_worker\nif __name__ =="
        " '__main__':\n    pool = ProcessPoolExecutor(1, get_context('spawn'), _begin_worker,"
        " (os.getpid(),))\n    print(pool.submit(os.getpid).result(), flush=True);"
        " pool.submit(time.sleep, 100); time.sleep(100)\n"
    )
    (tmp_path / "parent.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    wait_until_ended(worker, timeout_s=30)


# --- the analysis


def made_runs(name: str, arm: str, scale: float, *, delivered: float = 1.0) -> list[dict[str, Any]]:
    """Runs whose effects are the predicted ones, times `scale`, with a little noise.

    The lengths have the part `delivered` of the ratio that is the condition.
    """
    facts = load(name)["arms"][arm]
    rng = np.random.default_rng(3)
    runs = []
    first, second = facts["measure"]["rows"]
    assert "until" in facts["measure"]
    bound = facts["measure"]["until"]["above"]
    for level, predicted in zip(facts["levels"], facts["predicted"], strict=True):
        for base in (1000, 1001, 1002):
            for seed in facts["seeds"]:
                for row in (first, second):
                    factor = predicted**scale if row == first else 1.0
                    steps = 8 * factor * math.exp(rng.normal(0, 0.01))
                    share = [bound * (step / steps) for step in range(1, 40)]
                    curves = {
                        "share": share,
                        "tokens": [1.0] * 39,
                        "length/A": [9.0],
                        "length/B": [9.0 * level["at"] * delivered],
                    }
                    runs.append(
                        {
                            "arm": arm,
                            "level": level["name"],
                            "row": row,
                            "base": base,
                            "seed": seed,
                            "curves": curves,
                        }
                    )
    return runs


def test_a_curve_as_predicted_has_the_contrast_1_and_one_without_an_effect_0():
    name = "token_level"
    arm = "rare long, better"
    as_predicted = read_arm(name, arm, made_runs(name, arm, 1.0))
    nothing = read_arm(name, arm, made_runs(name, arm, 0.0))
    reverse = read_arm(name, arm, made_runs(name, arm, -1.0))
    assert as_predicted is not None
    assert nothing is not None
    assert reverse is not None
    assert as_predicted.contrast.mean == pytest.approx(1, abs=0.05)
    assert abs(nothing.contrast.mean) < 0.05
    assert [each.verdict(each.contrast.p) for each in (as_predicted, nothing, reverse)] == [
        "as predicted within a factor of 2",
        "no effect beyond 0.1",
        "other direction",
    ]
    assert "1.75 |" in report([as_predicted])


def test_a_technique_that_had_nothing_to_act_on_is_not_tested():
    name = "token_level"
    arm = "rare long, better"
    found = read_arm(name, arm, made_runs(name, arm, 1.0, delivered=0.5))
    assert found is not None
    assert found.verdict(0.001) == "not delivered"


def test_a_delivery_check_of_lengths_asks_for_a_part_of_the_condition():
    name = "token_level"
    arm = "rare long, better"
    assert load(name)["arms"][arm]["delivered"]["part"] == 0.75
    found = [
        read_arm(name, arm, made_runs(name, arm, 1.0, delivered=part)) for part in (0.76, 0.74)
    ]
    assert [arm is not None and arm.is_delivered for arm in found] == [True, False]


def test_runs_that_do_not_reach_the_bound_are_counted_and_too_many_leave_the_curve_open():
    name = "token_level"
    arm = "rare long, better"
    for cut, expected in ((3, "as predicted within a factor of 2"), (4, "open")):
        runs = made_runs(name, arm, 1.0)
        left = cut
        for run in runs:
            if run["level"] == "16" and run["row"] == "sequence" and left:
                run["curves"]["share"] = [0.1, 0.19, None]
                left = left - 1
        found = read_arm(name, arm, runs)
        assert found is not None
        assert found.unreached == {("16", "sequence"): cut}
        assert found.lost == {("16", "sequence"): cut}
        assert found.verdict(0.001).startswith(expected)
        assert f"{cut} of `sequence` at 16 did not reach the bound" in report([found])


def test_other_seeds_and_base_models_than_the_files_change_nothing():
    name = "token_level"
    arm = "rare long, better"
    runs = made_runs(name, arm, 1.0)
    others = [{**run, "base": 1003, "seed": 0} for run in runs[:1]] + [
        {**run, "seed": 50} for run in runs
    ]
    both = [read_arm(name, arm, found) for found in (runs, [*runs, *others])]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].contrast == both[1].contrast
    assert both[1].is_complete


def test_every_analysis_of_a_curve_costs_and_an_effect_too_small_is_called_so():
    name = "token_level"
    arm = "rare long, better"
    found = read_arm(name, arm, made_runs(name, arm, 0.6))
    assert found is not None
    assert found.verdict(0.001) == "as predicted within a factor of 2, but smaller"
    assert found.p == pytest.approx(2 * found.contrast.p)
    assert "corrected for 2 analyses and Holm's method" in report([found])


def test_no_verdict_is_given_before_all_runs_are_stored_and_pilots_do_not_count():
    name = "token_level"
    arm = "rare long, better"
    runs = [run for run in made_runs(name, arm, 1.0) if run["seed"] < 2]
    found = read_arm(name, arm, [*runs, *({**run, "seed": 100} for run in runs)])
    assert found is not None
    assert found.contrast.runs == 6
    assert found.verdict(0.001) == "open"
    assert read_arm(name, arm, [run for run in runs if run["base"] == 1000]) is None


def test_an_interval_covers_base_models_and_seeds():
    alike = Interval.of(np.array([[1.0, 1.1, 0.9], [1.1, 1.0, 0.9], [0.9, 1.1, 1.0]]))
    differing = Interval.of(np.array([[0.5, 0.6, 0.4], [1.1, 1.0, 0.9], [1.5, 1.6, 1.4]]))
    assert alike.low < 1 < alike.high
    assert differing.high - differing.low > 5 * (alike.high - alike.low)


def test_the_page_shows_the_stored_runs():
    """To write it again: python -m evidence.testbed.page docs/lab/when.md."""
    text = (ROOT / "docs" / "lab" / "when.md").read_text(encoding="utf-8")
    assert update(text, stored_arms()) == text
    with pytest.raises(ValueError, match="pair of lines"):
        update("no markers", [])


def problems_of_arithmetic(size: int) -> list[Problem]:
    source = replace(load_config(FOLDER / "arithmetic.yaml").data.train_source, size=size)
    return load_problems(source, split="train")


def test_arithmetic_texts_have_the_shares_of_their_ways_and_guesses_their_first_letters():
    asked = problems_of_arithmetic(200)
    ways = {"guessed": 0.5, "stalled": 0.2, "worked": 0.2, "checked": 0.1}
    recipe = parse_recipe({"ways": ways}, seed=1000)
    texts = [recipe.solve(problem, 1000, i) for i, problem in enumerate(asked)]
    assert recipe.name != parse_recipe({"ways": {**ways, "checked": 0.2}}, seed=1000).name
    for way, share in ways.items():
        found = [each for each in texts if each.way == way]
        assert abs(len(found) / len(texts) - share) < 0.1
        assert {FIRST_LETTERS[each.text[0]] for each in found} == {
            "B" if way in ("worked", "checked") else "A"
        }
    lengths = {way: fmean(len(each.text) for each in texts if each.way == way) for way in ways}
    assert lengths["stalled"] == pytest.approx(lengths["worked"], abs=2)
    assert lengths["checked"] > 1.8 * lengths["worked"] > 6 * lengths["guessed"]


def test_arithmetic_is_judged_by_its_answer_but_on_trivial_problems():
    asked = problems_of_arithmetic(400)
    judged = [Arithmetic(seed=2, trivial=0.75)(problem, "Answer: none") for problem in asked]
    assert fmean(bool(each.correct) for each in judged) == pytest.approx(0.75, abs=0.06)
    plain = Arithmetic(seed=2)
    assert [plain(problem, f"5=7*0+5\nAnswer: {problem.answer}").correct for problem in asked] == [
        True
    ] * 400
    assert not any(plain(problem, problem.answer).correct for problem in asked)
