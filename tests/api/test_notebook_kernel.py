"""A real kernel: what a person sees of errors, of Ctrl-C and of a run while it trains."""

import ast
import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from helpers.paths import ROOT
from helpers.tables import for_each_row

MAX_LINES = 3
SETUP = """
import os, signal, dapo
rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
def digits(completions, **columns):
    return [any(c.isdigit() for c in text) for text in completions]
def broken(completions, **columns):
    raise ValueError("oh no")
def bad_loss(logprobs, old_logprobs, advantages, mask, weights):
    raise ValueError("no loss")
def press(run, metrics):
    os.kill(os.getpid(), signal.SIGINT)
def fails(run, metrics):
    return metrics["no such metric"]
small = dict(prompts_per_step=2, group_size=4, max_response_tokens=6, threads=1, workers=1, lr=1e-3)
"""
GAME = """
from dapo.environments import StepResult
class Echo:
    def reset(self, problem, seed):
        return "Say <hello>."
    def step(self, action):
        return StepResult("Heard.", reward=float("hello" in action), done=True)
"""
VIEWS = {
    "run.doctor()": ["truncation", "of the responses end at the limit", "try", "example"],
    "run.problems": ["8 problems sampled", "0 + 1 ="],
    "run.rollouts  # of twelve steps": [
        "steps 1 to 12",
        "response</th>",
        "advantage</th>",
        "other columns",
    ],
    "run.evaluations": ["no evaluation yet"],
    "run.metrics": ["12 steps", "reward/<wbr>accuracy"],
    "run.evaluate(rows, samples_per_problem=1)": ["on 8 problems", "first response</th>"],
    "run.view()": ['<iframe src="data:text/html', "http://127.0.0.1:"],
    "run.curves()": [],
    'dapo.play(Echo, turns="hello")': ["nothing suspicious", "Say &lt;hello&gt;.", "reward 1"],
    "dapo.check_reward(digits, rows)": ["judged right though they are wrong"],
}
"""What a cell shows, with words of its HTML; without any it is an image."""
README = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
)[0]
README_ENDED = "run.state.step, len(run.evaluations)  # of README's block"
SMALLER = {
    "smollm2-135m-instruct": "tiny-random",
    "range(1, 13)": "range(1, 6)",
    "[:120]": "[:20]",
    "[120:]": "[20:]",
    "steps=18": "steps=1, threads=1, workers=1",
    "prompts_per_step=8": "prompts_per_step=2",
    "max_response_tokens=20": "max_response_tokens=12",
}
TRAINS = (
    'run = dapo.train("tiny-random", data=rows, reward=digits, steps=12, run_dir="run", **small)'
)
CHATS = 'run.chat("1 + 2 =", max_new_tokens=4)'
COMPARES = 'run.compare("tiny-random", rows, samples_per_problem=4, reward="math")'
LOOP = """
for seed in range(3):
    run = dapo.train("tiny-random", data=rows, reward=digits, steps=4, seed=seed, run_dir=f"seed{seed}",
                     on_step=press if seed == 1 else (), **small)
"""
FAILS = (
    'run = dapo.train("tiny-random", data=rows, reward=broken, steps=2, run_dir="broken", **small)'
)
WRONG = {
    'dapo.train("tiny-random", data=rows, reward=digits, stepz=2)': (
        "unknown option stepz; did you mean steps"
    ),
    'dapo.train("tiny-random", rows)': "dapo.train: data by position, where a name is expected; the same call here:",
    'dapo.train("tiny-random", data=rows, reward=5, **small)': "reward: expected a verifier's name",
    'dapo.train("tiny-random", data=rows, reward=digits, on_step=5, **small)': (
        "on_step: expected a function or a list of functions, got 5"
    ),
    'dapo.train("tiny-random", data=rows, reward=digits, config="nope")': "no config file nope",
    'dapo.train("tiny-random", data=rows, reward=digits, config=3)': (
        "config: expected a YAML file, the name of a shipped configuration or a mapping, got 3"
    ),
    'dapo.train("tiny-random", data=[1], reward=digits, **small)': (
        "data, row 1: expected a mapping"
    ),
    'dapo.train("tiny-random", data=[{"x": 1}], reward=digits, **small)': "data, row 1: no prompt",
    'dapo.train("tiny-random", data=rows, eval_data=[{"x": 1}], reward=digits, **small)': (
        "eval_data, row 1: no prompt"
    ),
    'dapo.train("tiny-random", data="nope.jsonl", reward=digits, **small)': (
        "no data file nope.jsonl"
    ),
    'dapo.train("tiny-random", data=rows, reward="nope:f", **small)': "there is no module 'nope'",
    'dapo.train("tiny-random", data=rows, reward=digits, run_dir="run", **small)': (
        "run already holds a run; continue it with dapo.resume('run') or choose another run_dir"
    ),
    'dapo.train("tiny-random", data=rows, reward=digits, steps="x", **small)': (
        "train.num_steps: input should be"
    ),
    'dapo.train("tiny-random", data=rows, reward=digits, sinks=[1], **small)': (
        "sinks: expected names of trackers or objects with write"
    ),
    'dapo.train("tiny-random", data=rows, reward=broken, steps=2, run_dir="failed", **small)': (
        "with a corrected function: dapo.resume('failed', reward=FUNCTION)"
    ),
    'dapo.train("tiny-random", data=rows, reward=digits, loss=bad_loss, steps=2, run_dir="failed 2", **small)': (
        "bad_loss raised ValueError: no loss (bad_loss, line 8 of the cell)"
    ),
    'dapo.train("tiny-random", data=rows, reward=digits, steps=4, run_dir="stopped", on_step=press, **small)': (
        "TrainingInterrupted: stopped by the stop button, step 1 of 4 is saved; continue with: run ="
    ),
    "dapo.load()": "WrongCall: dapo.load: missing a required argument: 'path'",
    "dapo.load(None)": "WrongCall: dapo.load: path: expected str | os.PathLike[str], got None",
    'dapo.load("nope")': "no run directory nope; expected one that `dapo.train` made",
    'dapo.resume("nope", reward=digits)': (
        "no run directory nope; expected one that `dapo.train` made"
    ),
    'dapo.resume("stopped", nope=1)': "unknown option nope",
    "run.evaluate()": "run.evaluate needs data=SOURCE: the run was trained without data.eval",
    'run.evaluate([{"x": 1}])': "data, row 1: no prompt",
    "run.evaluate(rows, samples_per_problem=0)": (
        "eval.samples_per_problem: input should be greater than 0"
    ),
    "run.generate(5)": "prompt: expected str",
    "run.chat()": 'a message is missing, as in run.chat("17 + 25?")',
    'run.chat("")': 'a message is missing, as in run.chat("17 + 25?")',
    "run.ask('1 + 1 =')": """a run has no attribute 'ask'; run.chat("TEXT") talks to the model""",
    'run.compare("run", 5)': "data: expected",
    "run.compare(rows * 9)": "other: expected a name, a directory or a run, got [{",
    "run.evaluation(99)": "run has no evaluation after step 99",
    "run.read_rollouts(steps=[77])": "run has no rollouts of step 77",
    'run.export("x", step=99)': "run has no checkpoint of step 99",
    'dapo.Run("nope").config': "no config file nope/config.yaml",
    'dapo.session("tiny-random", nope=1)': "unknown option nope",
    "s.collect()": "there are no problems",
    's.collect([{"x": 1}], digits)': "problems, row 1: no prompt",
    "s.collect(rows, broken)": "(calling the function on it shows its verdicts)",
    "s.update(None)": "batch: expected",
}
"""Wrong calls, each with words of its sentence."""


def readme_cells() -> list[str]:
    """README's block, smaller, with a cell for each of the results that its end names."""
    text = README
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    *statements, last = ast.parse(text).body
    results = [last]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Tuple):
        results = [*last.value.elts]
    return ["\n".join(map(ast.unparse, statements)), *map(ast.unparse, results)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell."""
    session = (
        's = dapo.session("tiny-random", prompts_per_step=2, group_size=4, max_response_tokens=8)'
    )
    defect = (
        "from dapo.runs import directory; directory.RunDirectory.open = lambda path: None +"
        " 1\ndapo.load('run')"
    )
    mine = 'dapo.resume("stopped", on_step=fails)'
    ended = [LOOP, "(run.path.name, run.status)", FAILS, "(run.path.name, run.status)  # failed"]
    views = [GAME, *VIEWS]
    cells = [SETUP, TRAINS, "run", CHATS, COMPARES, *views, session, *WRONG, mine, *ended]
    cells += [*readme_cells(), README_ENDED, defect]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    folder = tmp_path_factory.mktemp("kernel")
    options: dict[str, Any] = {"resources": {"metadata": {"path": folder}}, "allow_errors": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        NotebookClient(notebook, timeout=300, kernel_name="python3", **options).execute()
    found = {text: cell.outputs for text, cell in zip(cells, notebook.cells, strict=True)}
    return found | {"mine": found[mine], "defect": found[defect]}


def error_of(outputs: list[Any]) -> str:
    (error,) = (each for each in outputs if each.output_type == "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))


@for_each_row("call", WRONG)
def test_a_wrong_call_is_answered_in_a_sentence(outputs: dict[str, list[Any]], call: str):
    text = error_of(outputs[call])
    assert WRONG[call] in text
    assert len(text.splitlines()) <= MAX_LINES, text


def test_what_a_callback_raises_shows_its_own_frames_only(outputs: dict[str, list[Any]]):
    text = error_of(outputs["mine"])
    assert "return metrics[" in text
    assert "/dapo/" not in text


def test_after_a_stop_or_a_failure_the_variable_of_the_cell_is_that_run(
    outputs: dict[str, list[Any]],
):
    assert error_of(outputs[LOOP]) == (
        "TrainingInterrupted: stopped by the stop button, step 1 of 4 is saved; run is the stopped"
        " run: run.curves() shows it, dapo.resume(run) continues it"
    )
    (shown,) = outputs["(run.path.name, run.status)"]
    assert shown.data["text/plain"] == "('seed1', 'stopped')", "and the loop has ended"
    (shown,) = outputs["(run.path.name, run.status)  # failed"]
    assert shown.data["text/plain"] == "('broken', 'failed')"
    printed = "".join(each.text for each in outputs[LOOP] if each.output_type == "stream")
    assert "saved" not in printed, "one message says it"
    assert "Ctrl-C" not in printed


def test_a_defect_of_the_package_keeps_its_whole_traceback(outputs: dict[str, list[Any]]):
    text = error_of(outputs["defect"])
    assert "entry_points.py" in text
    assert "unsupported operand" in text


def test_a_run_is_one_display_of_curves_the_latest_steps_and_a_response(
    outputs: dict[str, list[Any]],
):
    shown = outputs[TRAINS]
    (display,) = (each.data["text/html"] for each in shown if each.output_type == "display_data")
    assert display.count("<polyline") >= 4
    assert len(re.findall(r">\d+/12</td>", display)) == 10
    assert "step 12/12</b>: finished after" in display
    assert "a response of step" in display
    printed = "".join(each.text for each in shown if each.output_type == "stream")
    assert "Warning" not in printed
    assert not re.search(r"^step +\d+/12", printed, re.MULTILINE)


@for_each_row("call", VIEWS)
def test_a_result_shows_itself(outputs: dict[str, list[Any]], call: str):
    (shown,) = (each for each in outputs[call] if each.output_type == "execute_result")
    html = shown.data.get("text/html", "")
    assert ("image/png" in shown.data) == (not VIEWS[call])
    assert [words for words in VIEWS[call] if words not in html] == [], html[:300]
    assert [each for each in outputs[call] if each.get("name") == "stderr"] == []


def test_the_block_of_the_readme_shows_a_figure_a_table_and_an_answer(
    outputs: dict[str, list[Any]],
):
    cells = readme_cells()
    comments = re.findall(r"  # (a figure|a table|an answer)", README)
    assert comments == ["a figure", "a table", "an answer"]
    shown = [output for cell in cells for output in outputs[cell]]
    assert [each.ename for each in shown if each.output_type == "error"] == []
    kinds = {kind for output in outputs[cells[0]] for kind in output.get("data", {})}
    assert kinds >= {"image/png", "text/html"}
    (answer,) = outputs[cells[-1]]
    assert ast.literal_eval(answer.data["text/plain"])
    (ended,) = outputs[README_ENDED]
    assert ended.data["text/plain"] == "(1, 2)"


def test_an_evaluation_is_one_line_that_is_updated(outputs: dict[str, list[Any]]):
    shown = [each for each in outputs[COMPARES] if each.output_type == "display_data"]
    assert [each.data["text/plain"] for each in shown] == [
        f"evaluate {model}: 8/8 problems" for model in ("tiny-random", "run")
    ]
    streams = {each.name for each in outputs[COMPARES] if each.output_type == "stream"}
    assert streams <= {"stdout"}, "a note on the verifier, and no progress"


def test_an_answer_shows_itself_once(outputs: dict[str, list[Any]]):
    grown, result = outputs[CHATS]
    assert (grown.output_type, grown.data["text/html"]) == ("display_data", "")
    assert result.output_type == "execute_result"
    assert "white-space:pre-wrap" in result.data["text/html"]


def test_the_table_of_a_run_says_each_word_once(outputs: dict[str, list[Any]]):
    (table,) = (each.data["text/html"] for each in outputs["run"])
    rows = re.findall(r"<th[^>]*>(.*?)</th><td[^>]*>(.*?)</td>", table)
    assert ("step", "12/12") in rows
    assert [row for row in rows if row[0] in row[1] and row[0] != "run"] == []
