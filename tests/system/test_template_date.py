"""The date that a chat template writes is that of a run's first start, in every process that
continues the run.
"""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from dapo.analysis.check.report import describe_prompts
from dapo.cli.train import resume_run, start_run
from dapo.rewards import get_verifier
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.start.fork import create_fork, plan_fork
from dapo.types import Problem
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


def test_a_reward_models_template_has_the_date_of_the_run_too_also_after_a_resume(tmp_path: Path):
    model = reward_model(tmp_path / "rm")
    config = tiny(
        "reward.verifier=reward_model",
        f"reward.options.model={model}",
        "overlong.mode=off",
        "train.num_steps=1",
        "data.eval=null",
    )
    run = tmp_path / "run"
    start_run(config, run_dir=run, config_name="tiny")
    manifest = run / "manifest.json"
    entries = json.loads(manifest.read_text())
    first = datetime.fromisoformat(entries["template_time"])
    manifest.write_text(json.dumps({**entries, "template_time": "2031-01-05T12:00:00"}))
    resume_run(run, ["train.num_steps=2"])
    verifier = get_verifier("reward_model", model=str(model))
    for step, time in ((1, first), (2, datetime(2031, 1, 5, 12))):
        verifier.template_time = time
        rows = read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
        for row in rows[:6]:
            problem = Problem(row["problem_id"], row["question"], row["answer"])
            (verdict,) = verifier.judge_group(problem, [row["response"]], [()])
            assert row["score"] == pytest.approx(verdict.score, abs=1e-5)
    problem = Problem("1", "1 + 1?", "2")
    scores = []
    for time in (first, datetime(2031, 1, 5, 12)):
        verifier.template_time = time
        scores.append(verifier.judge_group(problem, ["2"], [()])[0].score)
    assert scores[0] != pytest.approx(scores[1], abs=1e-4)  # the date is read


def reward_model(path: Path) -> Path:
    """A tiny classifier over characters, whose template writes the year."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from dapo.policy.builtin_models import character_model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    _, tokenizer = character_model(torch.float32, **sizes, num_attention_heads=2)
    tokenizer.chat_template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **sizes,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    return path
