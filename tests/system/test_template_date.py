"""The date that a chat template writes is that of a run's first start, in every process that
continues the run.
"""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from dapo.cli.check.report import describe_prompts
from dapo.cli.train import resume_run, start_run
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.start.fork import create_fork, plan_fork
from helpers.tiny_models import model_with_template
from helpers.tiny_runs import tiny

TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }} {{ language }}{% for m in messages %}{{ m.role }}: {{ m.content"
    " }}<pad>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, whose manifest says that it was started on another day."""
    folder = tmp_path_factory.mktemp("dated")
    model = model_with_template(folder / "model", TEMPLATE)
    options = [
        "data.chat_template_kwargs={language: en}",
        "train.num_steps=1",
        "data.eval=null",
        "train.keep_checkpoints=5",
    ]
    config = tiny(f"model={model}", *options)
    before = datetime.now().replace(microsecond=0)
    start_run(config, run_dir=folder / "run", config_name="tiny")
    manifest = folder / "run" / "manifest.json"
    entries = json.loads(manifest.read_text())
    recorded = datetime.fromisoformat(entries["template_time"])
    assert before <= recorded <= datetime.now()
    assert all(recorded.strftime("%d %b %Y en") in prompt for prompt in prompts(folder / "run", 1))
    manifest.write_text(json.dumps({**entries, "template_time": "2031-01-05T12:00:00"}))
    return folder / "run"


def prompts(run: Path, step: int) -> list[str]:
    return read_table(run / f"rollouts/step_{step:06d}.parquet", columns=["prompt"])[
        "prompt"
    ].to_pylist()


def test_a_run_that_is_resumed_on_another_day_keeps_its_date_and_its_variables(run: Path):
    resume_run(run, ["train.num_steps=2"])
    assert all(prompt.startswith("05 Jan 2031 en") for prompt in prompts(run, 2))


def test_a_fork_and_every_reader_of_a_run_have_its_date(run: Path, tmp_path: Path):
    fork = create_fork(
        plan_fork(RunDirectory(run), 1, [], branch=None), tmp_path / "fork", ["dapo", "fork"]
    )
    for directory in (RunDirectory(run), fork):
        assert load_run_config(directory, ["train.num_steps=5"]).data.template_time == datetime(
            2031, 1, 5, 12
        )


def test_a_run_from_before_the_entry_has_the_date_of_its_start(run: Path, tmp_path: Path):
    entries = json.loads((run / "manifest.json").read_text())
    del entries["template_time"]
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    time = load_run_config(RunDirectory(tmp_path)).data.template_time
    assert abs(time.astimezone() - datetime.fromisoformat(entries["started"])) < timedelta(
        seconds=2
    )


def test_check_prints_the_time_that_the_template_reads(run: Path):
    lines = list(describe_prompts(load_run_config(RunDirectory(run))))
    assert any(
        "reads the clock, which shows 2031-01-05 12:00:00 in all prompts" in line for line in lines
    )
