"""Scripts are read as a shell or Python would, and never run; what only running shows is
unknown.
"""

import sys
from typing import Any

import pytest

from dapo.libs.foreign_options import (
    Counterpart,
    Unknown,
    compute,
    read_script,
    read_shell,
    translate_value,
)


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
        ("run a.b=$(date +%s)", Unknown("$(date +%s)")),
        ("n=2\nrun a.b=$(expr $n + 3 \\* 4)", 14),
        ("run a.b=$(expr $nobody + 3)", Unknown("$(expr $nobody + 3)")),
        ("run a.b=$(basename /x/y.txt .txt)", "y"),
        ("M=org/name/\nrun a.b=$(basename $M)-$(dirname /x/y)", "name-/x"),
        (r"run 'a.b={x:1,y\{*\}:{}}'", r"{x:1,y\{*\}:{}}"),
        ("run a.b={x:1,y:[{z:2}]}", {"x": 1, "y": [{"z": 2}]}),
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
    "formula",
    ["9 ** 9 ** 9 ** 9", "'a' * 10 ** 9", "__import__('os')", "a.b", "1 / 0", "(", "x[0]"],
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
    assert translate_value(rows, "fast", {}) == (rows[0], {"speed": "on", "level": 2})
    assert translate_value(rows, "slow", {}) == (rows[1], {"name": "slow"})
    assert translate_value(rows[:1], "slow", {}) == (None, {})


TRAINED = "\nGRPOTrainer(model='m', args=args, train_dataset='d', reward_funcs='r').train()\n"


@pytest.mark.parametrize(
    "text",
    [
        "args = GRPOConfig()\nargs.beta = 0.1",
        "args = GRPOConfig(beta=0.2)\nargs.beta /= 2",
        "args = GRPOConfig()\nsetattr(args, 'be' + 'ta', 0.1)",
        (
            "args = GRPOConfig()\nfor name, value in {'beta': 0.1}.items():\n    setattr(args,"
            " name, value)"
        ),
        "args = GRPOConfig()\nvars(args).update(beta=0.1)",
        "args = dataclasses.replace(GRPOConfig(beta=5), beta=0.1)",
        "common = dict(beta=1)\ncommon |= {'beta': 0.1}\nargs = GRPOConfig(**{**common})",
        "class Mine(GRPOConfig):\n    beta: float = 0.1\nargs = Mine()",
        "from trl import GRPOConfig as C\nargs = C(beta=0.1)",
        "args = GRPOConfig(beta=float(os.environ.get('NOBODY_SETS_IT', '0.1')))",
        "def make(beta, **more): return GRPOConfig(beta=beta, **more)\nargs = make(0.1, seed=1)",
        (
            "p = argparse.ArgumentParser()\np.add_argument('--the-beta', type=float,"
            " default='0.1')\nargs = GRPOConfig(beta=p.parse_args().the_beta)"
        ),
        "(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()\nargs.beta = 0.1",
        "args = functools.partial(GRPOConfig, beta=0.1)()",
        "args = GRPOConfig(beta=0.1)\nif __name__ != '__main__':\n    args.beta = 5",
    ],
)
def test_an_option_of_a_python_script_arrives_however_it_is_set(text: str):
    found = read_script(text + TRAINED, "mine")
    assert found.options["beta"] == pytest.approx(0.1)
    assert found.unread == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "args = GRPOConfig(**yaml.safe_load(open('a')))",
            "line 1: **yaml.safe_load(open('a')) of GRPOConfig",
        ),
        (
            "args = GRPOConfig()\nargs.set_training(learning_rate=1)",
            "line 2: args.set_training(learning_rate=1)",
        ),
        (
            "args = GRPOConfig()\nsetattr(args, sys.argv[1], 3)",
            "line 2: setattr(args, sys.argv[1], 3)",
        ),
        ("args = GRPOConfig(seed=1)\ndel args.seed", "line 2: del args.seed"),
        ("args = load()", "line 2: args=args = load()"),
    ],
)
def test_a_statement_of_python_that_may_set_any_option_is_named(text: str, named: str):
    assert read_script(text + TRAINED, "mine").unread == [named]


def test_a_value_that_is_set_in_a_branch_which_may_not_be_taken_is_unknown():
    found = read_script(
        f"args = GRPOConfig(beta=1)\nif torch.cuda.is_available():\n    args.beta = 2{TRAINED}",
        "mine",
    )
    assert found.options["beta"] == Unknown("2 (line 3, in a branch)")


def test_the_cells_of_a_marimo_notebook_share_their_names():
    cells = """
app = marimo.App()

@app.cell
def _():
    args = GRPOConfig(beta=0.1)
    return (args,)

@app.cell(hide_code=True)
def _(args):
    args.seed = 3
    return
"""
    reading = read_script(cells + TRAINED, "mine")
    assert (reading.options["beta"], reading.options["seed"]) == (0.1, 3)
    assert reading.unread == []
    assert reading.assumed == []


def test_an_fstring_that_only_a_newer_python_parses_is_named_and_the_rest_is_read():
    newer = 'text = (\n    f"{row["question"]} of all"\n)\nargs = GRPOConfig(beta=0.1)'
    reading = read_script(newer + TRAINED, "mine")
    assert reading.options["beta"] == 0.1
    is_parsed = sys.version_info >= (3, 12)
    assert reading.unread == ([] if is_parsed else ['line 2: f"{row["question"]} of all"'])
    with pytest.raises(SyntaxError):
        read_script(f"{newer})", "mine")


@pytest.mark.parametrize(
    "text",
    [
        'ARGS="x.y=1 a.b=5"\nrun $ARGS',
        "ARGS=(x.y=1)\nARGS+=('a.b=5')\nrun \"${ARGS[@]}\"",
        "run x.y=1 `# a comment` \\\n `# another` a.b=5 \\",
        'B=5\necho "B=7 is only for a.b=7"\nrun a.b=$B',
        "run a.b=${NOBODY:=5} c.d=$NOBODY",
        "P=5.parquet\nrun a.b=${P%.parquet}",
        "P=/x/5\nrun a.b=${P##*/}",
        'if [ -z "$NOBODY" ]; then B=5; else B=6; fi\nrun a.b=$B',
        "case ${1:-small} in small) B=5 ;; *) B=6 ;; esac\nrun a.b=$B",
        'start() { local b=$1; run a.b=$b "${@:2}"; }\nstart 5 c.d=6',
        "declare -A B=([x]=5)\nrun a.b=${B[x]}",
        "for B in 4 5; do run a.b=$B; done",
        "CMD='run a.b=5'\neval \"$CMD\"",
        (
            "cat > c.yaml <<END\na.b=7\nEND\nray job submit --x=1 -- python3 -m main a.b=5 2>&1 |"
            " tee log"
        ),
        "B=1\nwhile [ $# -gt 0 ]; do B=$2; shift; done\nrun a.b=$((B * 5))",
        'B=5\nsrun --nodes=2 bash -c "export X=1; run a.b=$B"',
        "docker exec -it box /bin/bash -lc 'run a.b=5' 2>&1",
    ],
)
def test_an_option_of_a_shell_script_arrives_however_it_is_passed(text: str):
    found = read_shell(text, {})[-1]
    assert found.options["a.b"] == 5
    assert found.unread == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("run a.b=1 $NOBODY", "line 1: $NOBODY"),
        ('run a.b=1 "${MORE[@]}"', "line 1: ${MORE[@]}"),
        ("run a.b=1 $(cat options)", "line 1: $(cat options)"),
        ("run a.b=1 @options.txt", "line 1: @options.txt"),
        ("run a.b=1 a.$NOBODY=3", "line 1: a.$NOBODY=3"),
        ("run a.b=1 ~c.d=2", "line 1: ~c.d=2 removes an option"),
        ("run a.b=1\nc.d=2", "line 2: c.d=2 stands outside of a command"),
    ],
)
def test_a_word_of_a_command_that_may_set_any_option_is_named(text: str, named: str):
    assert read_shell(text, {})[-1].unread == [named]


def test_each_option_behind_a_line_that_ends_too_early_is_named():
    text = "run a.b=1 \\  # the blank ends the line\n  c.d=2 e.f=3 \\\n  --g.h"
    assert read_shell(text, {})[-1].unread == [
        "line 2: c.d=2 stands outside of a command",
        "line 2: e.f=3 stands outside of a command",
    ]


def test_the_home_directory_stands_at_the_begin_of_an_unquoted_word():
    text = "run --there ~/x --quoted '~/x' a.b=~/x"
    assert read_shell(text, {"HOME": "/h"})[0].options == {
        "there": "/h/x",
        "quoted": "~/x",
        "a.b": "~/x",
    }
    assert read_shell(text, {})[0].options["there"] == "~/x"


def test_a_variable_that_differs_between_branches_is_unknown_with_both_values():
    (found,) = read_shell("if nvidia-smi; then B=1; else B=2; fi\nrun a.b=$B", {})
    assert found.options["a.b"] == Unknown("$B (line 1: 1 or 2)")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.parquet", "b.parquet"], ["a", "b"]),
        (["/x/gsm8k/train.parquet", "/x/math/train.parquet"], ["gsm8k_train", "math_train"]),
        (["a.parquet", "a.parquet"], ["a_1", "a_2"]),
    ],
)
def test_several_files_are_a_mix_whose_parts_have_different_names(
    paths: list[str], names: list[str]
):
    assert compute("files(x)", {"x": paths}) == {"mix": dict(zip(names, paths, strict=True))}
