"""Stop tokens of a run and an evaluation: those of the model's files, and the one that ends an
assistant's turn.
"""

import json
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from dapo.cli.main import main
from dapo.cli.train import start_run
from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.start.export import export_model_of
from dapo.start.read import Inputs
from helpers.paths import TINY
from helpers.tiny_models import model_with_template
from helpers.tiny_runs import inputs_of, new_run, tiny

PAD = 0
EOS = 2
"""The tiny model's special tokens; its files name the second as its end token."""


def template(end: str) -> str:
    """A chat template that puts `end` behind every turn."""
    return (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


@pytest.fixture(scope="module")
def with_turn_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files name <eos>, its template puts <pad> behind a turn."""
    return model_with_template(tmp_path_factory.mktemp("models") / "model", template("<pad>"))


def config_of(model: Path, *overrides: str) -> Config:
    return tiny(f"model={model}", *overrides)


def inputs_with(model: Path, *overrides: str) -> Inputs:
    return inputs_of(config_of(model, *overrides))


def test_the_turn_end_is_a_stop_token_where_the_template_is_in_use_and_only_there(
    with_turn_end: Path,
):
    inputs = inputs_with(with_turn_end)
    assert inputs.loaded.stop_ids == (PAD, EOS)
    assert inputs.notes == [
        "responses also stop at '<pad>', which ends an assistant's turn; the model's files name"
        " '<eos>'"
    ]
    off = inputs_with(with_turn_end, "data.chat_template=off")
    assert (off.loaded.stop_ids, off.notes) == ((EOS,), [])


def test_training_and_evaluation_sample_with_the_same_stop_tokens(
    with_turn_end: Path, tmp_path: Path
):
    with new_run(config_of(with_turn_end), tmp_path / "run") as run:
        assert run.sampling.plan.stop_ids == (PAD, EOS)
        assert run.eval_plan is not None
        assert run.eval_plan.stop_ids == (PAD, EOS)


def test_responses_stop_at_either_and_keep_the_sampled_token(with_turn_end: Path, tmp_path: Path):
    options = (
        "train.num_steps=1",
        "data.eval=null",
        "rollout.group_size=32",
        "dynamic_sampling.enabled=false",
    )
    config = config_of(
        with_turn_end, *options, "rollout.max_response_tokens=40", "overlong.mode=off"
    )
    start_run(config, run_dir=tmp_path / "run", config_name="tiny")
    (path,) = (tmp_path / "run" / "rollouts").iterdir()
    rows = read_table(path).to_pylist()
    ends = {row["response_ids"][-1] for row in rows if row["finish"] == "stop"}
    assert ends == {PAD, EOS}
    assert not any({PAD, EOS} & set(row["response_ids"][:-1]) for row in rows)
    assert not any("<pad>" in row["response"] or "<eos>" in row["response"] for row in rows)


def test_an_export_names_the_turn_end_for_other_programs(with_turn_end: Path, tmp_path: Path):
    options = ("train.num_steps=1", "data.eval=null", "dynamic_sampling.enabled=false")
    run = tmp_path / "run"
    start_run(config_of(with_turn_end, *options), run_dir=run, config_name="tiny")
    export_model_of(run, tmp_path / "model", step=None, warn=pytest.fail)
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [EOS, PAD]
    assert inputs_with(tmp_path / "model").notes == []


def test_a_template_without_a_turn_end_is_reported_at_the_start_and_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = model_with_template(tmp_path / "plain", template("\n\n"))
    inputs = inputs_with(model)
    assert inputs.loaded.stop_ids == (EOS,)
    (note,) = inputs.notes
    assert note.startswith(
        r"the chat template puts no special token after an assistant's turn, but '\n\n'"
    )
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(TINY), f"model={model}", "--verbose"])
    assert stopped.value.code in (None, 0)
    printed = " ".join(capsys.readouterr().out.split())
    assert "responses end at '<eos>'" in printed
    assert note in printed


def test_an_evaluation_stops_at_the_turn_end_and_says_so(
    with_turn_end: Path, capsys: pytest.CaptureFixture[str]
):
    options = ("eval.samples_per_problem=2", "eval.max_response_tokens=8", "train.threads=1")
    with pytest.raises(SystemExit) as stopped:
        main(["eval", str(with_turn_end), "--data", "{builtin: {sums: {}}, size: 6}", *options])
    assert stopped.value.code in (None, 0)
    assert (
        "responses also stop at '<pad>', which ends an assistant's turn" in capsys.readouterr().out
    )


def test_text_before_the_turn_end_is_reported(tmp_path: Path):
    (note,) = inputs_with(model_with_template(tmp_path / "mixed", template("### End<eos>"))).notes
    assert note.startswith(
        "the chat template ends an assistant's turn with '### End<eos>', no single special token"
    )


def test_a_template_alone_may_name_the_end_and_with_no_end_at_all_a_model_is_refused(
    tmp_path: Path,
):
    only_template = inputs_with(
        model_with_template(tmp_path / "a", template("<pad>"), has_eos=False)
    )
    assert only_template.loaded.stop_ids == (PAD,)
    nothing = model_with_template(tmp_path / "b", template("\n"), has_eos=False)
    with pytest.raises(
        ConfigError, match="its chat template puts none after an assistant's turn: set eos_token_id"
    ):
        inputs_with(nothing)
    with pytest.raises(ConfigError, match="has no end token"):
        inputs_with(model_with_template(tmp_path / "c", "", has_eos=False))
