"""The experiments on what carries over: which problems train and which are held out, as their files
say.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from dapo.analysis.ablate.experiment import Experiment, load_experiment
from dapo.config import Config
from dapo.config.data_spec import MixSource, TaskSource
from dapo.data.problems import load_problems, remove_overlap
from dapo.types import Problem
from evidence.curriculum_reward import leading_digits
from helpers.paths import ROOT

EVIDENCE = ROOT / "evidence"
OURS = (
    "generalisation",
    "generalisation_small",
    "starvation",
    "solvable",
    "curriculum",
    "curriculum_small",
    "curriculum_smollm2",
)


def experiment(name: str) -> Experiment:
    return load_experiment(EVIDENCE / f"{name}.yaml")


def configs(name: str) -> dict[str, Config]:
    """The configuration of each row, by its name, with the first seed."""
    found = experiment(name)
    return {each.variant: each.config for each in found.runs() if each.seed == found.seeds[0]}


def tasks(source: object) -> dict[str, Any]:
    """Every task of a source with its options, those of a mix's parts too."""
    parts = source.parts.values() if isinstance(source, MixSource) else [source]
    found: dict[str, Any] = {}
    for part in parts:
        assert isinstance(part, TaskSource)
        found |= part.tasks
    return found


def part(config: Config, name: str) -> TaskSource:
    source = config.data.eval_source
    assert isinstance(source, MixSource)
    found = source.parts[name]
    assert isinstance(found, TaskSource)
    return found


@pytest.mark.parametrize("name", OURS)
def test_every_row_of_an_experiment_is_a_configuration_that_can_be_read(name: str):
    rows = configs(name)
    assert len(rows) == len(experiment(name).variants)
    assert all(config.data.eval is not None for config in rows.values())


def test_held_out_tasks_are_not_trained_on_and_larger_instances_are_of_trained_tasks():
    rows = configs("generalisation")
    config = rows["three tasks"]
    trained = tasks(config.data.train_source)
    assert trained == part(config, "trained").tasks
    assert part(config, "larger").tasks.keys() == trained.keys()
    assert not part(config, "held_out").tasks.keys() & trained.keys()
    for name, sizes in part(config, "larger").tasks.items():
        # every instance is larger than the largest that is trained
        largest = {
            key.replace("max_", "min_"): most for key, most in trained[name].items() if key in sizes
        }
        assert any(sizes.get(key, 0) > most for key, most in largest.items())
    assert tasks(rows["one task"].data.train_source).items() < trained.items()


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_no_training_problem_of_reasoning_gym_is_evaluated_once_overlaps_are_removed():
    config = configs("generalisation")["three tasks"]
    held_out = load_problems(config.data.eval_source, split="eval")
    assert {problem.source for problem in held_out} == {"trained", "larger", "held_out"}
    train = load_problems(config.data.train_source, split="train")
    kept, removed = remove_overlap(train, held_out)
    assert len(kept) > 1000, f"{removed} of {len(train)} are in the evaluation"
    assert not {problem.prompt for problem in kept} & {problem.prompt for problem in held_out}


def test_on_the_small_model_each_row_trains_on_fewer_tasks_and_all_are_evaluated():
    rows = configs("generalisation_small")
    trained = [set(tasks(config.data.train_source)) for config in rows.values()]
    assert trained == [{"sums", "remainders", "sort_digits"}, {"sums", "sort_digits"}, {"sums"}]
    config = rows["all three tasks"]
    sizes = tasks(config.data.train_source)
    for name, known in (("sums", "sums"), ("sort", "sort_digits"), ("remainders", "remainders")):
        assert part(config, name).tasks == {known: sizes[known]}
        (larger,) = part(config, f"{name}_larger").tasks.values()
        assert [larger[key] > value for key, value in sizes[known].items()].count(True) == 1


@pytest.mark.parametrize("name", ["curriculum", "curriculum_small", "curriculum_smollm2"])
def test_a_curriculum_evaluates_its_hardest_part_and_mixes_it_with_easier_ones(name: str):
    rows = configs(name)
    hard = tasks(rows["hard alone"].data.train_source)
    mixed_data = [config.data for row, config in rows.items() if row.startswith("mixed")]
    assert all(data == mixed_data[0] for data in mixed_data)
    mixed = mixed_data[0].train_source
    assert isinstance(mixed, MixSource)
    assert all(tasks(config.data.eval_source) == hard for config in rows.values())
    *easier, hardest = mixed.parts.values()
    assert tasks(hardest) == hard
    assert all(tasks(each) != hard for each in easier)
    predicted = {row for row, config in rows.items() if config.dynamic_sampling.predict}
    assert predicted == (set() if name == "curriculum_smollm2" else {"mixed, predicted"})


def problems_of(numbers: range) -> Iterator[Problem]:
    for count in numbers:
        yield Problem("p", f"What is {' + '.join(map(str, range(1, count + 1)))}? Reply.", "1")


def test_the_curriculum_asks_for_a_digit_per_plus_sign():
    for problem, digits in zip(problems_of(range(2, 9)), range(1, 8), strict=True):
        assert leading_digits(problem, "1234567890"[:digits])
        assert leading_digits(problem, "1234567890"[:digits] + "x")
        assert not leading_digits(problem, "1234567890"[: digits - 1] + "x1")
        assert not leading_digits(problem, "²" * digits), "a digit of another script"
