"""`run.rollouts`: the columns of the data and the scores of several rewards are columns."""

from pathlib import Path
from typing import Any

import pytest

import dapo
from helpers.tables import for_each_row


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dapo.Run:
    rows = [
        {
            "prompt": f"{a} + 1 =",
            "answer": str(a + 1),
            "tags": ["sum", str(a)],
            "source": "mine",
            "level": a,
            "hint": "h" * 500,
            "long": "h" * 1500,
        }
        for a in range(4)
    ]

    def length(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def digits(completions: list[str], **columns: Any) -> list[float]:
        return [float(sum(c.isdigit() for c in text)) for text in completions]

    return dapo.train(
        "tiny-random",
        data=rows,
        reward=[length, digits],
        steps=2,
        prompts_per_step=2,
        group_size=4,
        max_response_tokens=6,
        run_dir=tmp_path_factory.mktemp("frames") / "run",
    )


def test_each_column_of_the_data_and_each_reward_is_a_column(run: dapo.Run):
    frame = run.rollouts
    assert {"column.tags", "column.level", "column.hint"} <= set(frame)
    assert {"fields", "components", "column.long", "column.answer"}.isdisjoint(frame)
    for _, row in frame.iterrows():
        assert row["column.tags"] == ["sum", str(row["column.level"])]
        assert row["question"] == f"{row['column.level']} + 1 ="
        assert row["score"] == row["component.length"] + row["component.digits"]


def test_the_metric_of_a_copied_function_has_its_name_alone(run: dapo.Run):
    names = [name for name in run.metrics if name.startswith("reward/component/")]
    assert names == ["reward/component/length", "reward/component/digits"]


def test_a_column_that_a_table_lacks_is_answered_with_the_nearest(run: dapo.Run):
    with pytest.raises(
        KeyError, match="there is no column 'reward/maen'; did you mean reward/mean"
    ):
        run.metrics["reward/maen"]
    with pytest.raises(KeyError, match=r"^there is no column 'responses'; did you mean response"):
        run.rollouts["responses"]
    assert len(run.rollouts[run.rollouts["step"] == 1]) > 0


def test_columns_and_steps_are_chosen_by_name(run: dapo.Run):
    part = run.read_rollouts(steps=2, columns=["column.level", "component.length", "response"])
    assert list(part) == ["column.level", "component.length", "response"]
    assert len(part) == (run.rollouts["step"] == 2).sum()
    assert list(run.read_rollouts(columns="fields")) == ["fields"]
    assert "response_ids" in run.read_rollouts(steps=[1])


@for_each_row(
    ("columns", "message"),
    [
        (["completion"], "there is no column 'completion'; did you mean response? The columns are"),
        (["rewards"], "there is no column 'rewards'; did you mean reward? The columns are step,"),
        (["xyzzy"], "there is no column 'xyzzy'; The columns are step, group_id,"),
        (["column.nope"], "no response has a column 'column.nope'; there are column.tags, column."),
    ],
)
def test_a_column_that_there_is_not_is_no_damage(run: dapo.Run, columns: Any, message: str):
    with pytest.raises(dapo.DataError) as refused:
        run.read_rollouts(columns=columns)
    assert message in str(refused.value)
    assert "damaged" not in str(refused.value)


def test_two_copied_functions_of_one_name_keep_their_modules():
    from dapo.rewards.combine import component_labels

    names = ["reward_0a1b2c3d:digits", "reward_99999999:digits", "mine:digits", "math"]
    assert component_labels(names) == {name: name for name in names}


def test_runs_without_such_columns_are_read(tmp_path: Path):
    run = dapo.train(
        "tiny-random",
        data=[{"prompt": "1 + 1 ="}, {"prompt": "2 + 1 ="}],
        reward="dapo.rewards.examples:has_digit",
        steps=1,
        prompts_per_step=2,
        group_size=4,
        max_response_tokens=6,
        run_dir=tmp_path / "run",
    )
    assert not [name for name in run.rollouts if name.startswith(("column.", "component."))]
