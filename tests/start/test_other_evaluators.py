"""lm-eval and inspect_ai evaluate an export, where they are installed, with the lines of the page."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "evaluation.md").read_text()
ROWS = [{"question": f"{i} + 2 =", "answer": str(i + 2)} for i in range(5)]
LM_EVAL_TASK = {
    "task": "five",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "five.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def five():
    rows = json_dataset("five.jsonl", FieldSpec(input="question", target="answer"))
    return Task(dataset=rows, solver=generate(), scorer=match())
"""


@pytest.fixture
def folder(sync_run: Path, tmp_path: Path) -> Path:
    """A folder with an export and five problems."""
    from dapo.start.export import export_model_of

    export_model_of(sync_run, tmp_path / "my-model", step=None, warn=pytest.fail)
    (tmp_path / "five.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "five.yaml").write_text(yaml.safe_dump(LM_EVAL_TASK))
    (tmp_path / "five.py").write_text(INSPECT_TASK)
    return tmp_path


def output_of(line: str, folder: Path) -> str:
    """What a command of this Python's environment prints, without a network."""
    program, *words = shlex.split(line)
    path = Path(sys.executable).with_name(program)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    answer = subprocess.run(
        [str(path), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout


def line_of(program: str) -> str:
    return next(line for line in PAGE.splitlines() if line.startswith(f"{program} "))


def test_lm_eval_evaluates_an_export_with_the_line_of_the_page(folder: Path):
    pytest.importorskip("lm_eval")
    line = line_of("lm_eval").replace("gsm8k --apply_chat_template", "five --include_path .")
    assert "|five |" in output_of(f"{line} --device cpu", folder)


def test_inspect_evaluates_an_export_with_the_line_of_the_page(folder: Path):
    pytest.importorskip("inspect_ai")
    line = line_of("inspect").replace("inspect_evals/gsm8k", "five.py")
    assert "five (5 samples)" in output_of(f"{line} --max-tokens 8 --display plain", folder)
