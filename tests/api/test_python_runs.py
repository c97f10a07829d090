"""`dapo.train` from Python: a run like that of the command, with rows and functions that were only
typed.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from datetime import date
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import dapo
from dapo.analysis.doctor import diagnose
from dapo.api.keywords import build_scaled, options_from, scale_defaults
from dapo.api.notebook import NotebookDisplay
from dapo.api.plain_values import plain_value
from dapo.config import build_config, dump_config, load_config
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.waiting import Interrupted
from dapo.runs.directory import RunDirectory
from helpers.commands import run as run_command
from helpers.fork_server import ForkServer
from helpers.tables import for_each_row
from helpers.tiny_runs import contents, differences

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
    "lr": 1e-3,
}
DIGITS = "dapo.rewards.examples:has_digit"

SCRIPT = """
import dapo, re, sys
DIGIT = re.compile(r"[0-9]")
def count(text):
    return len(DIGIT.findall(text))
def reward(completions, answer, **columns):
    return [count(text) + (right in text) for text, right in zip(completions, answer)]
rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
run = dapo.train("tiny-random", data=rows, eval_data=rows[:2], reward=reward, steps=4, prompts_per_step=2, group_size=4,
                 max_response_tokens=6, threads=1, workers=1, lr=1e-3, save_every=1, eval_every=2, run_dir="run")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FINISHED: dict[str, Any] = {
    "data": ROWS[2:],
    "eval_data": ROWS[:2],
    "reward": DIGITS,
    "steps": 2,
    **SMALL,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dapo.Run:
    """A run of two steps, evaluated before and after."""
    path = tmp_path_factory.mktemp("finished") / "run"
    return dapo.train("tiny-random", run_dir=path, **FINISHED)


def test_a_reward_typed_in_a_script_goes_on_in_another_process_and_folder_to_the_same_bytes(
    fork_server: ForkServer, tmp_path: Path
):
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    start: dict[str, Any] = {"program": "helpers.commands:run_script", "output": tmp_path / "out"}
    script = str(tmp_path / "script.py")
    assert fork_server.run(script, folder=str(tmp_path / "whole"), **start)[0] == 0, (
        tmp_path / "out"
    ).read_text()
    at = {
        "file": str(tmp_path / "killed/run/metrics.jsonl"),
        "lines": 3,
        "signals": [(0, signal.SIGKILL)],
    }
    assert (
        fork_server.run(script, folder=str(tmp_path / "killed"), **start, **at)[0]
        == -signal.SIGKILL
    )
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "killed/run", tmp_path / "elsewhere/moved")
    (tmp_path / "killed").rmdir()
    code, _ = fork_server.run(
        "resume", "moved", output=tmp_path / "out", folder=str(tmp_path / "elsewhere")
    )
    assert code == 0, (tmp_path / "out").read_text()
    assert "warning" not in (tmp_path / "out").read_text()
    assert (
        differences(contents(tmp_path / "elsewhere/moved"), contents(tmp_path / "whole/run")) == []
    )


def test_each_call_makes_a_new_run_directory_with_its_rows_and_their_questions():
    rows = [
        {"prompt": [{"role": "user", "content": each["prompt"]}], "answer": each["answer"]}
        for each in ROWS
    ]
    options = {"data": rows, "reward": DIGITS, "steps": 1, "instruction": "Be brief.", **SMALL}
    runs = [dapo.train("tiny-random", **options) for _ in range(2)]
    assert runs[0].path != runs[1].path
    for run in runs:
        assert run.path.parent == Path("runs")
        stored = (run.path / "data/train.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in stored] == rows
    assert differences(contents(runs[0].path), contents(runs[1].path)) == []
    found = runs[0].rollouts
    assert set(found["question"]) <= {row["prompt"] for row in ROWS}
    assert list(found["prompt"]) == [f"{question}\nBe brief." for question in found["question"]]
    assert list(runs[0].read_rollouts(columns=["question"])["question"]) == list(found["question"])


def test_the_command_of_a_run_is_read_by_a_shell_and_makes_the_same_run(
    capsys: pytest.CaptureFixture[str],
):
    prompt = 'say "it\'s" ${x}: {a: 1}, no, null'
    options: dict[str, Any] = {
        "loss.clip_high": 0.3,
        "data.instruction": prompt,
        "betas": (0.8, 0.9),
        "preset": "grpo",
    }
    run = dapo.train(
        "tiny-random", data=ROWS, reward=DIGITS, steps=1, run_dir="a b", **SMALL, **options
    )
    program, *arguments = shlex.split(run.command)
    assert (program, arguments[-2:]) == ("dapo", ["--run-dir", "a b"])
    code, _, err = run_command(capsys, *arguments[:-1], "again")
    assert (code, err) == (0, "")
    first, again = (load_config(RunDirectory.open(path).config) for path in ("a b", "again"))
    assert dump_config(first) == dump_config(again)
    assert first.data.instruction == prompt
    assert differences(contents(Path("a b")), contents(Path("again"))) == []


def test_a_shipped_configuration_and_one_of_your_own_are_laid_under_the_keywords(
    capsys: pytest.CaptureFixture[str],
):
    run = dapo.train(
        config="tiny", steps=1, eval_data=None, threads=1, run_dir="shipped", reward=DIGITS
    )
    own = {
        "model": "tiny-random",
        "data": {"train": "builtin:sums"},
        "rollout": {"prompts_per_step": 4},
    }
    assert (run.config.train.num_steps, run.config.rollout.prompts_per_step) == (1, 4)
    assert shlex.split(run.command)[:3] == ["dapo", "train", "tiny"]
    with pytest.raises(
        dapo.ConfigError,
        match=r"prompts_per_step=4 .* must be a multiple of minibatch_groups=3",
    ):
        dapo.train(config=own, steps=1, minibatch_groups=3, max_response_tokens=6)


ROWS_IN_MEMORY = {
    "a DataFrame of pandas": pd.DataFrame(
        {**{k: [r[k] for r in ROWS] for k in ROWS[0]}, "level": [None, *range(7)]}
    ),
    "a table of Arrow": pa.Table.from_pylist(ROWS),
    "a generator": (row for row in ROWS),
}


@pytest.mark.parametrize("kind", ROWS_IN_MEMORY)
def test_rows_of_each_kind_are_written_as_they_are(kind: str, tmp_path: Path):
    from dapo.api.in_memory_data import write_rows

    assert write_rows(tmp_path / "rows.jsonl", ROWS_IN_MEMORY[kind]) == 8
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    assert kind != "a DataFrame of pandas" or [row["level"] for row in found] == [None, *range(7)]


def test_columns_that_are_lists_are_rows_and_named_sets_stay_sets():
    from dapo.api.in_memory_data import stored_data

    file = Path("rows.jsonl")
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    assert stored_data(columns, file, argument="data").rows == {file: ROWS}
    conversations = {"messages": [[{"role": "user", "content": "1 + 1 ="}]]}
    assert stored_data(conversations, file, argument="data").rows == {
        file: [{"messages": conversations["messages"][0]}]
    }
    kinds: list[Any] = [np.array, pd.Series, pa.array]
    for kind in kinds:
        arrays = {name: kind(values) for name, values in columns.items()}
        assert stored_data(arrays, file, argument="data").rows == {file: ROWS}
    sets = stored_data({"easy": ROWS[:2], "hard": ROWS[2:]}, file, argument="eval_data")
    assert [len(rows) for rows in sets.rows.values()] == [2, 6]


def test_a_dataset_of_hugging_face_is_written_as_it_is(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    from dapo.api.in_memory_data import stored_data, write_rows

    rows = [
        {"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in ROWS
    ]
    assert write_rows(tmp_path / "rows.jsonl", datasets.Dataset.from_list(rows)) == 8
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    stored = stored_data(splits, tmp_path / "train.jsonl", argument="data")
    assert stored.source == str(tmp_path / "train.jsonl")
    assert stored.rows[tmp_path / "train.jsonl"] is splits["train"]
    splits["test"] = splits["train"]
    with pytest.raises(
        dapo.DataError,
        match=r"several data sets \(train, test\).* data=DATA\['train'\], eval_data=DATA\['test'\]",
    ):
        stored_data(splits, tmp_path / "train.jsonl", argument="data")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an integer that Python does not format": (
        {"lr": 10**5000},
        "lr: expected text, a number, a list or a mapping, got",
    ),
    "such an integer in a mapping": (
        {"config": {"optim": {"betas": [10**5000]}}},
        "config: expected text, a number",
    ),
    "bytes": (
        {"instruction": b"x"},
        "instruction: expected text, a number, a list or a mapping, got bytes",
    ),
    "an array": (
        {"lr": np.array([1.0, 2.0])},
        "option optim.lr: input should be a valid number, got [1.0, 2.0]",
    ),
    "an ambiguous keyword": (
        {"temperature": 0.5},
        (
            "unknown option temperature; did you mean rollout.temperature or eval.temperature?"
            ' Write the whole name: **{"rollout.temperature": ...}'
        ),
    ),
    "an unknown keyword": (
        {"learning_rate": 1.0},
        ("dapo.train: unknown option learning_rate; TRL's learning_rate=1.0 is lr=1.0 here"),
    ),
    "a keyword that is nearly one": (
        {"group_sizes": 4},
        "unknown option group_sizes; did you mean group_size (rollout.group_size)?",
    ),
    "a keyword like none": (
        {"xyzzy": 4},
        "unknown option xyzzy; `dapo show options` lists all options",
    ),
    "an option set twice": (
        {"num_steps": 3},
        "num_steps: train.num_steps is set twice in one call",
    ),
    "an unknown option of a section": (
        {"loss.clip_hih": 0.3},
        "unknown option loss.clip_hih; did you mean clip_high (loss.clip_high)?",
    ),
    "several wrong keywords": (
        {
            "stepz": 2,
            "lrr": 1e-3,
            "rundir": "x",
            "rewards": len,
            "num_generations": 8,
            "eval.temprature": 0,
        },
        (
            "unknown option stepz; did you mean steps (train.num_steps)?\n  unknown option lrr; did"
            " you mean lr (optim.lr)?\n  unknown option rundir; did you mean run_dir?\n  unknown"
            " option rewards; did you mean reward?"
        ),
    ),
    "a name that is not unique": (
        {"eval.temprature": 0},
        'did you mean eval.temperature? Write the whole name: **{"eval.temperature": ...}',
    ),
    "TRL's keyword with a function": (
        {"reward_funcs": [DIGITS]},
        (
            'reward_funcs=["dapo.rewards.examples:has_digit"] is'
            ' reward=["dapo.rewards.examples:has_digit"] here'
        ),
    ),
    "a reward that is none": (
        {"reward": 3},
        (
            "reward: expected a verifier's name, module:function, a function, or several of them,"
            " got 3"
        ),
    ),
    "rows that are none": (
        {"data": [1, 2]},
        "data, row 1: expected a mapping of columns to values, got int",
    ),
    "held-out rows that are none": (
        {"eval_data": [{"prompt": "1 + 1 =", "answer": "2"}, 2]},
        "eval_data, row 2: expected a mapping of columns to values, got int",
    ),
    "a held-out set without rows": (
        {"eval_data": {"easy": ROWS[:2], "hard": []}},
        "eval_data['hard']: no rows",
    ),
    "no rows": ({"data": []}, "data: no rows"),
    "a value that no file holds": (
        {"data": [{"prompt": object()}]},
        "data, row 1: prompt holds a value of type object",
    ),
    "a lambda": (
        {"reward": lambda completions: [1.0]},
        "reward: the source of a lambda cannot be copied",
    ),
    "a lambda as environment": (
        {"environment": lambda: None},
        "write it as a class with reset(problem, seed) and step(action)",
    ),
    "a lambda as loss": (
        {"loss": lambda *tensors: None},
        "def loss(logprobs, old_logprobs, advantages, mask, weights): return LOSS, METRICS",
    ),
    "a parameter of the environment": (
        {"environment": Fraction, "numerator": 3},
        'numerator is a parameter of Fraction, not of dapo: write **{"environment.options":',
    ),
    "schemas as tools": (
        {"tools": [{"type": "function"}]},
        "tools: expected functions, whose types and docstrings are their schemas",
    ),
    "a class within a section": (
        {"environment": {"name": Fraction, "options": {"numerator": 2}}},
        'environment="fractions:Fraction": Fraction has no method reset',
    ),
    "an agent without data": ({"data": None, "agent": "my_agent:solve"}, "data is missing"),
    "one row": ({"data": dict(ROWS[0])}, "data: got one row; rows are a list of dicts"),
    "columns of two lengths": (
        {"data": {"prompt": ["1 + 1 =", "2 + 2 ="], "answer": ["2"]}},
        "columns that are lists of one length, got prompt: 2, answer: 1",
    ),
    "an event's function of one parameter": (
        {"on_step": lambda metrics: None},
        "on_step: <lambda>(metrics) is called as <lambda>(run, metrics)",
    ),
    "columns that the data has not": (
        {"reward": "dapo.rewards.examples:nothing"},
        "has no 'nothing'",
    ),
}


@for_each_row("name", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence_and_leaves_nothing(name: str):
    options, message = REFUSED[name]
    arguments: dict[str, Any] = {
        "data": ROWS,
        "reward": DIGITS,
        "steps": 1,
        "run_dir": "run",
        **SMALL,
        **options,
    }
    with pytest.raises(dapo.DapoError) as refused:
        dapo.train("tiny-random", **arguments)
    assert message in str(refused.value)
    assert not Path("run").exists()


def test_a_directory_with_files_of_its_own_is_left_as_it_was(tmp_path: Path):
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/data/train.jsonl").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty and holds no run"):
        dapo.train("tiny-random", data=ROWS, reward=DIGITS, steps=1, run_dir="run", **SMALL)
    assert (tmp_path / "run/data/train.jsonl").read_text() == "mine"


def test_keywords_are_the_names_of_options():
    assert options_from(
        {"steps": 1, "lr": 2, "loss.clip_high": 3, "loss": {"clip_low": 0.1}, "predict": True}
    ) == {
        "train.num_steps": 1,
        "optim.lr": 2,
        "loss.clip_high": 3,
        "loss": {"clip_low": 0.1},
        "dynamic_sampling.predict": True,
    }


def test_the_members_of_an_enumeration_are_their_values():
    class Judge(str, Enum):  # noqa: UP042  unlike that of a StrEnum its text is its name
        EXACT = "exact"

    assert options_from({"surrogate": Judge.EXACT}) == {"loss.surrogate": "exact"}
    assert plain_value({Judge.EXACT: np.float32(1)}, "reward") == {"exact": 1.0}


def test_keywords_are_read_like_overrides_of_the_command_line():
    base = {"model": "tiny-random", "data": {"train": {"builtin": {"sums": {}}, "size": 50}}}
    config, _ = build_scaled(
        base, options_from({"data.train.size": 20, "lr": Decimal("1e-5")}), where="here"
    )
    overridden = build_config(base, ["data.train.size=20", "optim.lr=1e-5"])
    assert config == overridden
    assert (config.data.train["size"], config.optim.lr) == (20, 1e-5)


@for_each_row(
    ("raw", "expected"),
    [
        ({"rollout": {"prompts_per_step": 8}}, {"train.minibatch_groups": 8}),
        ({"rollout": {"prompts_per_step": 48}}, {"train.minibatch_groups": 24}),
        ({"rollout": {"prompts_per_step": 512}}, {}),
        ({"rollout": {"prompts_per_step": 8}, "train": {"minibatch_groups": 2}}, {}),
        ({"rollout": {"max_response_tokens": 64}}, {"overlong.buffer_tokens": 12}),
        ({"rollout": {"max_response_tokens": 64}, "overlong": {"mode": "off"}}, {}),
        ({"rollout": {"max_response_tokens": 64}, "preset": "grpo"}, {}),
        ({"rollout": {"max_response_tokens": 8192}}, {}),
        ({"train": {"num_steps": 18}}, {"optim.warmup_steps": 1}),
        ({"train": {"num_steps": 300}}, {}),
    ],
)
def test_options_sized_for_the_paper_follow_a_smaller_size_unless_set(
    raw: dict[str, Any], expected: dict[str, Any]
):
    assert scale_defaults(raw) == expected


def test_in_another_thread_a_callback_and_a_sink_get_every_step_and_no_signal_is_touched():
    seen: list[tuple[str, int]] = []
    handlers: list[Any] = []
    runs: list[dapo.Run] = []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    class Sink:
        def write(self, step: int, metrics: Any) -> None:
            seen.append(("sink", step))

    def on_step(run: dapo.Run, metrics: dict[str, Any]) -> None:
        assert run.metrics.index[-1] == metrics["step"]  # it is in the run's files already
        assert run.status == "running"
        seen.append(("call", metrics["step"]))
        handlers.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    def train() -> None:
        options = {"steps": 2, "on_step": on_step, "sinks": [Sink()], **SMALL}
        runs.append(dapo.train("tiny-random", data=ROWS, reward=DIGITS, **options))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [("sink", 1), ("call", 1), ("sink", 2), ("call", 2)]
    assert handlers == [before, before]
    assert [run.status for run in runs] == ["finished"]


@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_in_a_callback_is_raised_and_the_run_goes_on_to_the_same_bytes(
    finished: dapo.Run, at: int
):

    def fails(run: dapo.Run, metrics: dict[str, Any]) -> None:
        if metrics["step"] == at:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        dapo.train("tiny-random", on_step=fails, run_dir="cut", **FINISHED)
    cut = dapo.load("cut")
    assert cut.status == "failed"
    assert "raised ZeroDivisionError: mine" in str(cut.summary)
    assert cut.state.checkpoint is not None
    assert cut.state.checkpoint["step"] == at
    again = dapo.resume(cut)
    assert again.status == "finished"
    assert (
        differences(
            contents(again.path, checkpoints="step_000002"),
            contents(finished.path, checkpoints="step_000002"),
        )
        == []
    )


def test_a_signal_saves_and_raises_keyboard_interrupt_with_the_run():
    def interrupt(run: dapo.Run, metrics: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped:
        dapo.train("tiny-random", data=ROWS, reward=DIGITS, steps=3, on_step=interrupt, **SMALL)
    assert signal.getsignal(signal.SIGINT) is handler
    assert isinstance(stopped.value, dapo.TrainingInterrupted)
    run = stopped.value.run
    assert run.status == "stopped"
    assert run.state.checkpoint is not None
    assert re.search(
        r"stopped by SIGINT, step 1 of 3 is saved; continue with: run = dapo.resume\('runs/",
        str(stopped.value),
    )


def test_what_a_run_holds_is_read_as_tables(finished: dapo.Run):
    assert list(finished.metrics.index) == [0, 1, 2]
    rollouts = finished.rollouts
    assert set(rollouts["step"]) == {1, 2}
    assert "response_ids" not in rollouts
    part = finished.read_rollouts(steps=[2], columns=["step", "response_ids"])
    assert list(part.columns) == ["step", "response_ids"]
    assert len(part) == (rollouts["step"] == 2).sum() >= 8
    newest: Any = finished.metrics.index[-1]  # a number of NumPy
    assert len(finished.read_rollouts(steps=newest, columns="step")) == len(part)
    generated: Any = (step for step in [2])
    assert len(finished.read_rollouts(steps=generated, columns="step")) == len(part)
    with pytest.raises(dapo.DataError, match="has no rollouts of step 9"):
        finished.read_rollouts(steps=[9])
    assert finished.problems["responses"].sum() == len(rollouts)
    assert list(finished.evaluations.index) == [0, 2]
    assert finished.evaluation().accuracy == finished.evaluations["accuracy"][2]
    assert len(finished.evaluation(0).table) == 2
    assert finished.summary is not None
    assert finished.summary["exit_reason"] == "finished"
    assert finished.config.optim.lr == 1e-3
    assert finished.status == "finished"


def test_a_run_leads_to_its_page_its_report_and_its_findings(finished: dapo.Run, tmp_path: Path):
    address = finished.view()
    with urlopen(f"{address}api/runs") as answer:
        assert json.load(answer) == [finished.path.name]
    assert finished.report() == Path(f"{finished.path.name}.html")
    assert finished.report(tmp_path / "mine.html").read_text().count("report-data")
    with pytest.raises(ConfigError, match="must end in"):
        finished.report(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match="is inside the run"):
        finished.report(finished.path / "mine.html")
    found = finished.doctor()
    assert list(found.columns[:2]) == ["name", "severity"]
    diagnosis = diagnose(finished.path)
    assert list(found["name"]) == [case.finding.name for case in diagnosis.cases]


def test_a_run_says_in_a_line_and_in_html_how_it_stands(finished: dapo.Run):
    line = repr(finished)
    assert line.startswith(f"<Run {finished.path}: finished, step 2/2, reward ")
    assert f"evaluation held_out {finished.evaluation().accuracy:.1%} after step 2" in line
    assert (
        "<th style='text-align:left'>state</th><td style='text-align:left'>finished</td>"
        in finished._repr_html_()
    )
    assert repr(dapo.Run("nothing<b>")).startswith(
        "<Run nothing<b>: cannot be read (no run directory nothing<b>"
    )
    assert "<b>" not in dapo.Run("nothing<b>")._repr_html_()


def test_the_curves_are_a_figure_that_a_notebook_shows(finished: dapo.Run):
    curves = finished.curves()
    assert curves._repr_png_()[:4] == b"\x89PNG"
    assert "Accuracy" in repr(curves)


def test_a_run_answers_questions_alike_each_time(finished: dapo.Run):
    one = finished.generate("17 + 25?", max_new_tokens=4)
    assert isinstance(one, str)
    assert finished.generate("17 + 25?", max_new_tokens=4) == one
    numbers: dict[str, Any] = {"max_new_tokens": np.int64(4), "temperature": np.float32(1)}
    assert finished.generate("17 + 25?", seed=0, **numbers) == one
    several = finished.generate(["17 + 25?", "1 + 1?"], samples=2, max_new_tokens=4)
    assert [len(each) for each in several] == [2, 2]
    assert several[0][0] == one
    assert (
        finished.generate(
            [{"role": "user", "content": "17 + 25?"}], max_new_tokens=4, temperature=0
        )
        != ""
    )
    assert finished.generate("17 + 25?", max_new_tokens=4, seed=1) != one
    finished.close()


def test_a_chat_goes_on_with_a_model_that_was_freed(finished: dapo.Run):
    finished.chat("17 + 25?", max_new_tokens=4)
    finished.close()
    assert finished.chat.retry().question == "17 + 25?"
    finished.close()
    compared = finished.chat.compare()
    assert compared.text == finished.chat.messages[-1]["content"]
    assert compared.untrained is not None
    finished.chat.reset()
    finished.close()


def test_ctrl_c_ends_an_answer_of_a_chat_and_another_signal_the_process(finished: dapo.Run):
    def stopped_by(signum: int) -> Any:
        raise Interrupted(signum)

    answer = finished.chat._grow("1 + 1 =", lambda check: stopped_by(signal.SIGINT))
    assert (answer.text, answer.finish) == ("", None)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        finished.chat._grow("1 + 1 =", lambda check: stopped_by(signal.SIGTERM))


def test_a_run_is_evaluated_and_compared_with_another_model_in_pairs(finished: dapo.Run):
    result = finished.evaluate(ROWS, samples_per_problem=2)
    assert len(result.table) == 8
    assert f"avg@2 {result.accuracy:.1%}" in repr(result)
    again = finished.evaluate()
    assert again.accuracy == finished.evaluation().accuracy
    same = finished.compare(finished)
    assert (same.difference, same.better, same.worse, same.equal) == (0, 0, 0, 2)
    other = finished.compare("tiny-random", ROWS, samples_per_problem=2)
    assert other.difference == pytest.approx(other.first.accuracy - other.second.accuracy)
    assert other.first.accuracy == result.accuracy
    assert "minus tiny-random" in repr(other)


def test_a_run_is_exported_as_a_model_that_trains_on(finished: dapo.Run, tmp_path: Path):
    path = finished.export(tmp_path / "model")
    again = dapo.train(path, data=ROWS, reward=DIGITS, steps=1, **SMALL)
    assert again.status == "finished"
    with pytest.raises(dapo.ConfigError, match="model"):
        finished.export(tmp_path / "model")


def test_a_finished_run_is_left_as_it_is_and_trained_on_where_steps_are_added(
    tmp_path: Path, finished: dapo.Run, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(finished.path, tmp_path / "copy")
    before = contents(tmp_path / "copy")
    assert dapo.resume("copy").status == "finished"
    assert differences(contents(tmp_path / "copy"), before) == []
    assert dapo.resume("copy", steps=3).state.step == 3
    assert "warning" not in capsys.readouterr().out  # its rows are elsewhere, and the same


def test_importing_dapo_imports_nothing_else():
    """Its time is that of its modules: counted, for a busy machine takes longer."""
    code = (
        "import sys, typing; before = set(sys.modules); import dapo; print(sorted(set(sys.modules)"
        " - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['dapo']\n"
    assert set(dapo.__all__) <= set(dir(dapo))
    assert all(getattr(dapo, name) is not None for name in dapo.__all__)
    with pytest.raises(
        AttributeError, match="module 'dapo' has no attribute 'tarin'; did you mean train"
    ):
        dapo.tarin  # noqa: B018


RIGHT = {"correct": True, "error": None, "score": 1.0}


def test_a_notebook_shows_one_display_that_is_replaced(capsys: pytest.CaptureFixture[str]):
    shown: list[str] = []

    def show(data: dict[str, str], **options: object) -> SimpleNamespace:
        shown.append(data["text/html"])
        return SimpleNamespace(update=show)

    display = NotebookDisplay(3, first_step=1, show=show)
    display.phase("generate", 1, 4, "met <b>")
    display.phase("generate", 2, 4)  # within REDRAW_S of the last one
    display.log(1, {"reward/mean": 0.5, "reward/accuracy": 0.75, "time/step_s": 1.0})
    display.phase("update", 1, 2)
    display.message("saved; continue with: dapo resume runs/x")
    display.sample({"step": 1, "question": "1 + 1 =", "answer": "2", "response": "<i>", **RIGHT})
    display.end("stopped")
    display.close()
    texts = [re.sub(r"<[^<>]*>", " ", html).strip() for html in shown]
    assert texts[0] == "step 1/3 : start 0s"
    assert texts[1].startswith("step 1/3 : generate 1/4 groups, ")
    assert "&lt;b&gt;" in texts[1]
    assert texts[-1].startswith("step 1/3 : stopped after 0s")
    assert "1/3  +0.500  75.0%  1.0" in texts[-1]
    assert "&lt;i&gt;  [correct]" in texts[-1]
    assert "<polyline" in shown[-1]
    assert len(shown) == 3, "the display is not updated more often than every REDRAW_S seconds"
    assert capsys.readouterr().out == "saved; continue with: dapo.resume('runs/x')\n"


TYPES = """
from datetime import date
from decimal import Decimal


def reward(completions, day, price, **kwargs):
    assert all(type(value) is date for value in day), day
    assert all(type(value) is Decimal for value in price), price
    return [float(str(price[0])[-1] in text) + len(text) / 100 for text in completions]
"""


def test_columns_of_python_rows_have_their_types_in_a_run_and_after_its_resume(
    capsys: pytest.CaptureFixture[str],
):
    Path("types_reward.py").write_text(TYPES)
    rows = [
        {"prompt": f"{n}?", "day": date(2026, 1, n + 1), "price": Decimal(f"1.5{n}")}
        for n in range(4)
    ]
    run = dapo.train(
        "tiny-random", data=rows, reward="types_reward:reward", steps=1, run_dir="typed", **SMALL
    )
    run = dapo.resume("typed", steps=2)
    assert run.state.step == 2
    assert "as text" not in capsys.readouterr().out
    responses = run.rollouts
    assert set(responses["step"]) == {1, 2}
    assert responses["error"].isna().all(), responses["error"].tolist()


def test_there_is_nothing_to_load_where_no_run_is():
    with pytest.raises(CheckpointError, match="no run directory nothing"):
        dapo.load("nothing")
