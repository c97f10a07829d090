"""Scripts are read as a shell or Python would, and never run; what only running shows is unknown."""

from typing import Any

import pytest

from foreign_options import Counterpart, Unknown, compute, read_script, read_shell, translated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=3\nrun a.b=$x", 3),
        ("x=3; run a.b=${x}", 3),
        ("run a.b=${nobody:-4}", 4),
        ('y=2\nrun a.b="${nobody:-${y}}"', 2),
        ("x=2\nrun a.b=$((x * (3 + 1) - 1))", 7),
        ("x=2\nrun a.b=$(( ((x + 1) * 2) * 2 ))", 12),
        ("run a.b=$((7 / 2))", 3),
        ("run a.b=1e-6", 1e-6),
        ('run a.b=\'["console","wandb"]\'', ["console", "wandb"]),
        ("run a.b=['x','y']", ["x", "y"]),
        ("run a.b=True", True),
        ("run a.b=null", None),
        ("run ++a.b=5 # a.b=6", 5),
        ("run \\\n  c.d=1 \\\n  # c.d=2 \\\n  a.b=5", 5),
        ('ARGS=(\n  a.b=5\n  c.d=6 # no\n)\nrun "${ARGS[@]}"', 5),
        ("ARGS=(c.d=1)\nARGS+=(a.b=5)\nrun ${ARGS[@]}", 5),
        ("export HOME_OF=/x\nrun a.b=$HOME_OF/y", "/x/y"),
        ("run a.b=$FROM_OUTSIDE", "here"),
        ("run a.b=$(date +%s)", Unknown("$(date+%s)")),
        ("run a.b=$nobody", Unknown("$nobody")),
        ("run a.b=$((9 ** 9 ** 9))", Unknown("$((9 ** 9 ** 9))")),
    ],
)
def test_a_shell_script(text: str, value: Any):
    assert read_shell(text, {"FROM_OUTSIDE": "here"})[-1].options["a.b"] == value


def test_positional_and_unpacked_arguments_of_a_python_script_are_read():
    text = """
data = load_dataset("x/y")
GRPOTrainer("m", judge, GRPOConfig("out", max_steps=3, **options), data["test"], data).train()
"""
    assert read_script(text, "mine").options == {
        "model": "m",
        "reward_funcs": Unknown("judge"),
        "output_dir": "out",
        "max_steps": 3,
        "train_dataset": "hub:x/y:test",
        "eval_dataset": "hub:x/y:train",
    }


def test_a_python_script():
    text = """
from rewards import good as right
N = 2 * 4
base = dict(a=1)
def own(completions): raise SystemExit
args = trl.GRPOConfig(num_generations=N, seed=base["a"], output_dir=f"{N}", per_device_train_batch_size=-N // 3)
trainer = GRPOTrainer(args=args, model=AutoModel.from_pretrained("m"), reward_funcs=[right, own],
    train_dataset=datasets.load_dataset("x/y", split="all"),
    eval_dataset=load_dataset("json", data_files="e.jsonl")["train"])
"""
    assert read_script(text, "mine").options == {
        "num_generations": 8,
        "seed": 1,
        "output_dir": "8",
        "per_device_train_batch_size": -3,
        "model": "m",
        "reward_funcs": ["rewards:good", "mine:own"],
        "train_dataset": "hub:x/y:all",
        "eval_dataset": "e.jsonl",
    }


@pytest.mark.parametrize(
    "formula", ["9 ** 9 ** 9 ** 9", "'a' * 10 ** 9", "__import__('os')", "a.b", "1 / 0", "(", "x[0]"]
)
def test_what_has_no_value_or_none_of_bounded_size_is_refused(formula: str):
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        compute(formula, {})


def test_formulas_use_defaults_that_are_formulas():
    names = {"batch": "= devices * 8", "devices": 4, "a.b": 3}
    assert compute("batch / 2 if a.b > 2 and devices else 0", names) == 16
    assert compute("[max(a.b, 5), ceil(a.b / 2)]", names) == [5, 2]


def test_the_row_of_a_value_holds_before_that_of_the_option():
    rows = [
        Counterpart("mode=Fast", ("speed=on", "level=2"), "", converted=False, formula=""),
        Counterpart("mode", ("name",), "", converted=False, formula=""),
    ]
    assert translated(rows, "fast", {}) == (rows[0], {"speed": "on", "level": 2})
    assert translated(rows, "slow", {}) == (rows[1], {"name": "slow"})
    assert translated(rows[:1], "slow", {}) == (None, {})
