"""A configuration with stages: each is a run, which trains the model of the one before."""

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import dapo
from dapo.cli.clean import clean_runs
from dapo.cli.train import change_later_stages, check_stages
from dapo.config import SECTIONS, Config, dump_config, find_config
from dapo.config.load import load_config, read_options
from dapo.config.option_fields import options_of
from dapo.config.stages import build_stages
from dapo.core.errors import ConfigError, DataError
from dapo.runs.directory import RunDirectory
from dapo.runs.run_reader import find_runs
from dapo.runs.stages import StagesFolder
from helpers.fork_server import ForkServer
from helpers.paths import CONFIGS
from helpers.tables import for_each_row
from helpers.tiny_runs import contents, differences, metrics

COMMON: dict[str, Any] = {
    "model": "tiny-random",
    "rollout": {"prompts_per_step": 2},
    "train": {"minibatch_groups": 2},
    "data": {"train": {"builtin": "sums"}},
}


def staged(**stages: Mapping[str, Any]) -> dict[str, Any]:
    return {**COMMON, "stages": stages}


def test_a_stage_has_the_common_options_its_own_and_the_overrides():
    raw = staged(a={"optim": {"lr": 1e-4}}, b={"train": {"num_steps": 9}}, c={"model": "other/one"})
    overrides = ["optim.lr=0.5", "stages.b.optim.lr=0.25", "stages.c.seed=3"]
    with pytest.raises(ConfigError, match="unknown option seed"):
        build_stages(raw, overrides)
    stages = build_stages(raw, overrides[:2])
    assert [stage.config.optim.lr for stage in stages.values()] == [0.5, 0.25, 0.5]
    assert stages["b"].config.train.num_steps == 9
    assert {stage.config.train.minibatch_groups for stage in stages.values()} == {2}
    assert [stage.takes_model_from for stage in stages.values()] == [None, "a", None]
    assert [stage.config.model.name for stage in stages.values()] == ["tiny-random"] * 2 + [
        "other/one"
    ]


def test_an_empty_section_of_a_stage_leaves_the_common_options():
    empty = {"train": None, "rollout": None, "data": None, "model": None, "environment": None}
    common = COMMON | {"environment": "calculator"}
    stages = build_stages({**common, "stages": {"a": {}, "b": empty}})
    assert stages["b"].config == stages["a"].config
    assert stages["b"].takes_model_from == "a"
    alone = build_stages({**common, "stages": {"a": {"environment": {"name": None}}}})
    assert alone["a"].config.environment.name is None


def test_no_section_can_be_null():
    """So that `build_stages` may read `train:` without a line as a section that sets nothing."""
    for name in SECTIONS:
        assert type(None) not in get_args(Config.model_fields[name].annotation), name


def test_adapters_or_a_number_format_of_a_stage_leave_it_the_model_of_the_one_before():
    lora = {"model": {"lora": 8}}
    raw = staged(a={}, b=lora, c={}, d={"model": {"name": "other/one", "lora": 4}})
    stages = build_stages(raw, ["stages.c.model.dtype=float64"])
    assert [stage.takes_model_from for stage in stages.values()] == [None, "a", "b", None]
    assert stages["b"].config.model.lora is not None
    assert stages["c"].config.model.dtype == "float64"
    named = build_stages(staged(a={}, b=lora), ["stages.b.model=other/one"])
    assert named["b"].takes_model_from is None


@for_each_row(
    ("raw", "overrides", "words"),
    [
        ({**COMMON, "stages": {}}, [], "must map the name of each stage"),
        ({**COMMON, "stages": ["a"]}, [], "must map the name of each stage"),
        (staged(**{"a/b": {}}), [], "cannot be the name of a folder"),
        ({**COMMON, "stages": {"a": 3}}, [], "stages.a must hold options, got 3"),
        (staged(a={"optim": {"rate": 1}}), [], "stage a: "),
        ({**COMMON, "stages": {"a": None}}, [], "stages.a must hold options, got nothing; {}"),
        ({**staged(a={}), "b": {"preset": "sft"}}, [], "b stands beside `stages`; "),
        (
            staged(a={"preset": "sft"}, b={}),
            ["preset=grpo"],
            "preset=sft for stage a; write stages.b.preset=grpo",
        ),
        (
            staged(a={"preset": "dapo"}, b={"preset": "sft"}),
            ["preset=grpo"],
            "write stages.a.preset=grpo",
        ),
        (staged(a={}), ["stages.b.optim.lr=1"], "no stage 'b'; "),
        (staged(a={}), ["stages.a"], "expected stages.a.OPTION=VALUE"),
        (staged(a={}), ["stages.a=3"], "expected stages.a.OPTION=VALUE"),
        (staged(a={}), ["stages=3"], "expected stages.NAME.OPTION=VALUE"),
        (staged(a={}), ["a.optim.lr=1"], "a is a stage; write stages.a.optim.lr=1"),
        (staged(a={}), ["stages.a.optim.lr=x"], "command line, stage a: option optim.lr: "),
        (staged(a={}), ["optim.lr=x"], "command line: option optim.lr: "),
        (COMMON | {"stages": {"a": {}}, "optim": {"lr": "x"}}, [], "my.yaml, stage a: option "),
    ],
)
def test_what_cannot_be_stages_is_named(raw: dict[str, Any], overrides: list[str], words: str):
    with pytest.raises(ConfigError) as raised:
        build_stages(raw, overrides, where="my.yaml")
    assert words in str(raised.value)


def test_a_later_stage_is_checked_with_the_model_that_it_will_train():
    raw = {**staged(a={"model": "first/one"}, b={"model": {"lora": 8}}), "model": "other/one"}
    stages = build_stages(raw)
    assert [stage.config.model.name for stage in stages.values()] == ["first/one"] * 2
    assert stages["b"].config.model.lora is not None
    # so the model may stand in the first stage alone
    del raw["model"]
    assert build_stages(raw)["b"].config.model.name == "first/one"


@for_each_row(
    ("overrides", "message"),
    [
        (["stages.b.data.order=level"], "stage b: data.order=level: "),
        (["stages.b.data.max_prompt_tokens=3"], "stage b: all .* are longer than"),
        (["stages.b.data.chat_template=on"], "stage b: data.chat_template=on, but"),
    ],
)
def test_a_fault_of_a_later_stage_is_found_before_the_first_one_trains(
    overrides: list[str], message: str
):
    sums = {"data": {"train": {"builtin": {"sums": {}}, "size": 9}}}
    raw = {**staged(a={}, b={}), **sums, "reward": {"verifier": "exact", "workers": 1}}
    assert check_stages(build_stages(raw)) == []
    with pytest.raises((ConfigError, DataError), match=message):
        check_stages(build_stages(raw, overrides))


def test_overrides_of_a_stage_that_has_not_begun_are_kept_for_it(tmp_path: Path):
    stages = build_stages(staged(a={}, b={}, c={}))
    folder = StagesFolder.create(tmp_path / "run", stages)
    RunDirectory.create(folder.path / "a", dump_config(stages["a"].config), {})
    own = ["optim.lr=0.5", "stages.a.train.num_steps=4"]
    items = [*own, "stages.c.optim.lr=0.25", "stages.c.model=other/one"]
    changed, rest = change_later_stages(folder, items, None)
    assert rest == own
    stored = StagesFolder.open(folder.path)
    assert changed.stages == stored.stages
    assert stored.stages["b"] == stages["b"]
    assert stored.stages["c"].config.optim.lr == 0.25
    # a model of its own is not that of the stage before
    assert stored.stages["c"].takes_model_from is None
    assert (stored.started_in, stages["c"].takes_model_from) == (Path.cwd(), "b")
    # the folder of a stage that is named says which one is meant
    _, rest = change_later_stages(stored, ["optim.lr=0.125"], "b")
    assert rest == []
    assert StagesFolder.open(folder.path).stages["b"].config.optim.lr == 0.125
    with pytest.raises(ConfigError, match=r"stage b: .* optim\.lrr"):
        change_later_stages(stored, ["stages.b.optim.lrr=1"], None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two supervised steps, then two on rewards, of the tiny model."""
    options = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())
    del options["data"]["train"]
    options["train"] |= {"threads": 1, "num_steps": 2, "save_every": 1}
    sums = {"builtin": {"sums": {}}, "size": 11, "seed": 1}
    options["stages"] = {
        "imitate": {"preset": "sft", "data": {"demonstrations": sums}},
        "rewards": {"preset": "dapo", "data": {"train": sums}, "optim": {"lr": 5e-4}},
    }
    path = tmp_path / "staged.yaml"
    path.write_text(yaml.safe_dump(options, sort_keys=False))
    return path


def test_killed_in_each_stage_and_resumed_both_runs_are_equal_to_the_byte(
    file: Path, fork_server: ForkServer, tmp_path: Path
):
    whole = tmp_path / "whole"
    log = tmp_path / "log"
    code, _ = fork_server.run("train", str(file), "--run-dir", str(whole), output=log)
    assert code == 0, log.read_text()
    assert "stage 2 of 2: rewards" in log.read_text()
    killed = tmp_path / "killed"
    command = ["train", str(file), "--run-dir", str(killed)]
    for stage in ("imitate", "rewards"):
        code, _ = fork_server.run(
            *command,
            output=log,
            file=str(killed / stage / "metrics.jsonl"),
            lines=2,
            signals=[(0, signal.SIGKILL)],
        )
        assert code == -signal.SIGKILL, log.read_text()
        # a stage's own folder stands for all of them
        command = ["resume", str(killed / "imitate" if stage == "imitate" else killed)]
    code, _ = fork_server.run(*command, output=log)
    assert code == 0, log.read_text()
    for stage in ("imitate", "rewards"):
        assert len(metrics(killed / stage)) == 3
        assert differences(contents(killed / stage), contents(whole / stage)) == []
    names = {path.parent.name for path in whole.glob("*/config.yaml")}
    assert names == {"imitate", "rewards"}
    trained = yaml.safe_load((whole / "rewards/config.yaml").read_text())["model"]["name"]
    assert trained.startswith(str(whole / "imitate"))
    # the folder stands for the newest stage
    answer = tmp_path / "answer"
    code, _ = fork_server.run("explain", str(whole), "--json", output=answer)
    assert (code, json.loads(answer.read_text())["step"]) == (0, 2), answer.read_text()
    stages = {path / stage for path in (killed, whole) for stage in ("rewards", "imitate")}
    assert set(find_runs([tmp_path])) == stages
    for command in (
        ["generate", str(whole), "1 + 1", "--json"],
        ["view", str(whole), "--save", str(tmp_path / "page.html")],
    ):
        code, _ = fork_server.run(*command, output=log)
        assert code == 0, log.read_text()


def test_a_wrong_later_stage_is_refused_before_the_first_begins(
    file: Path, fork_server: ForkServer, tmp_path: Path
):
    run = tmp_path / "run"
    code, _ = fork_server.run(
        "train",
        str(file),
        "stages.rewards.data.train=no.jsonl",
        "--run-dir",
        str(run),
        output=tmp_path / "log",
    )
    assert (code, run.exists()) == (2, False)
    assert "no.jsonl" in (tmp_path / "log").read_text()


def run_stage_alone(
    file: Path, fork_server: ForkServer, folder: Path, *, begun: Sequence[str] = ("imitate",)
) -> Path:
    """Train both stages in `folder`, and keep those that have `begun`, as a kill would."""
    log = folder.with_name("log")
    here = str(file.parent)
    code, _ = fork_server.run("train", str(file), "--run-dir", str(folder), output=log, folder=here)
    assert code == 0, log.read_text()
    for stage in {"imitate", "rewards"} - set(begun):
        shutil.rmtree(folder / stage)
    return folder


def stored_options(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_options_after_resume_change_the_stage_that_begins_and_no_other_one(
    file: Path, fork_server: ForkServer, tmp_path: Path
):
    run = run_stage_alone(file, fork_server, tmp_path / "run")
    refused = tmp_path / "refused"
    for place, option in ((run / "imitate", "optim.lr=0.1"), (run, "stages.imitate.optim.lr=0.1")):
        code, _ = fork_server.run("resume", str(place), option, output=refused)
        assert code == 2, refused.read_text()
    assert f"for rewards it is dapo resume {run}/rewards optim.lr=0.1" in refused.read_text()
    assert "that continues, here rewards" in refused.read_text()
    code, _ = fork_server.run("resume", str(run), "preset=grpo", output=refused)
    assert (code, (run / "rewards").exists()) == (2, False)
    log = tmp_path / "resumed"
    curves = run / "imitate/curves.png"
    curves.unlink()  # as if it was killed before they were drawn
    options = ["train.num_steps=1", "stages.rewards.optim.lr=0.1"]
    code, _ = fork_server.run("resume", str(run), *options, output=log)
    assert (code, curves.is_file()) == (0, True), log.read_text()
    begun = stored_options(run / "rewards")
    assert (begun["train"]["num_steps"], begun["optim"]["lr"]) == (1, 0.1)
    # only what the user has set can be without effect
    assert "rollout.vllm" not in log.read_text()


def test_a_stage_that_begins_finds_its_files_where_the_training_was_started(
    file: Path, fork_server: ForkServer, tmp_path: Path
):
    rows = [{"prompt": f"{a} + 1", "answer": str(a + 1)} for a in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    raw = yaml.safe_load(file.read_text())
    raw["stages"]["rewards"]["data"]["train"] = "sums.jsonl"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    run = run_stage_alone(file, fork_server, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    log = tmp_path / "resumed"
    code, _ = fork_server.run("resume", str(run), output=log, folder=str(elsewhere))
    assert code == 0, log.read_text()
    assert len(metrics(run / "rewards")) == 3


def test_a_folder_of_stages_can_be_moved(file: Path, fork_server: ForkServer, tmp_path: Path):
    run = run_stage_alone(file, fork_server, tmp_path / "run", begun=("imitate", "rewards")).rename(
        tmp_path / "moved"
    )
    log = tmp_path / "resumed"
    for command in (
        ["resume", str(run), "train.num_steps=3"],
        ["export", str(run), str(tmp_path / "model")],
    ):
        code, _ = fork_server.run(*command, output=log)
        assert code == 0, log.read_text()
    assert len(metrics(run / "rewards")) == 4
    # the same model in another folder is no change
    assert "model.name was" not in log.read_text()


def test_a_stage_whose_folder_was_removed_is_not_trained_again(
    file: Path, fork_server: ForkServer, tmp_path: Path
):
    run = run_stage_alone(file, fork_server, tmp_path / "run", begun=("imitate", "rewards"))
    shutil.move(run / "imitate", tmp_path / "elsewhere")
    log = tmp_path / "resumed"
    code, _ = fork_server.run("resume", str(run), output=log)
    assert code == 0, log.read_text()
    assert "it is not trained again, as rewards has begun" in " ".join(log.read_text().split())
    assert not (run / "imitate").exists()
    # commands about responses say what a run of worked solutions is
    shutil.move(tmp_path / "elsewhere", run / "imitate")
    code, _ = fork_server.run("explain", str(run / "imitate"), output=log)
    assert (code, "samples no responses" in log.read_text()) == (2, True)


def test_what_has_not_begun_is_named_with_the_command_that_begins_it(
    file: Path, fork_server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = run_stage_alone(file, fork_server, tmp_path / "run")
    advice = f"stage rewards has not begun; begin it with: dapo resume {run}"
    log = tmp_path / "status"
    code, _ = fork_server.run("status", str(run), output=log)
    shown = " ".join(log.read_text().split())
    assert (code, shown.startswith("finished, step 2/2"), advice in shown) == (0, True, True)
    for command in (["export", str(run / "rewards"), "m"], ["eval", str(run / "rewards")]):
        log = tmp_path / command[0]
        code, _ = fork_server.run(*command, output=log)
        assert (code, advice in log.read_text()) == (2, True), log.read_text()
    capsys.readouterr()
    dapo.resume(run)
    assert "stage rewards has not begun; the command line begins it" in capsys.readouterr().out
    # both folders hold something, and say what
    log = tmp_path / "again"
    code, _ = fork_server.run("train", str(file), "--run-dir", str(run), output=log)
    assert (code, f"continue it with `dapo resume {run}`" in log.read_text()) == (2, True)
    shutil.rmtree(run / "imitate")
    log = tmp_path / "none"
    for command in (["doctor", str(run)], ["generate", str(run), "1"]):
        code, _ = fork_server.run(*command, output=log)
        assert code == 2, log.read_text()
    assert log.read_text().count("stage imitate has not begun; begin it with") == 2
    # as after an error while the first model was loaded: the training may be started again
    code, _ = fork_server.run("train", str(file), "--run-dir", str(run), output=log)
    assert code == 0, log.read_text()


@for_each_row(["name"], [("gsm8k_laptop",), ("tiny",), ("calculator",)])
def test_stored_options_of_stages_are_those_that_were_set(name: str, tmp_path: Path):
    raw = read_options(find_config(name))
    stages = build_stages(raw if "stages" in raw else {**raw, "stages": {"a": {}, "b": {}}})
    StagesFolder.create(tmp_path, stages)
    folder = StagesFolder.open(tmp_path)
    assert folder.stages == stages
    for stage, built in stages.items():
        stored = folder.stages[stage].config
        names = [option for option, _ in options_of()]
        assert [stored.sets(option) for option in names] == [
            built.config.sets(option) for option in names
        ]


def test_problems_that_one_stage_learns_and_another_holds_out_are_counted(
    file: Path, fork_server: ForkServer, tmp_path: Path
):
    raw = yaml.safe_load(file.read_text())
    held_out = str(tmp_path / "held_out.jsonl")
    rows = [{"prompt": f"{a} + 1", "response": str(a), "answer": str(a)} for a in range(8)]
    Path(held_out).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    del raw["data"]["eval"]
    raw["stages"]["imitate"]["data"]["demonstrations"] = held_out
    raw["stages"]["rewards"]["data"]["eval"] = held_out
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    told = "warning: stage imitate trains on 8 problems that stage rewards holds out"
    log = tmp_path / "check"
    code, _ = fork_server.run("check", str(file), output=log)
    assert (code, told in log.read_text()) == (0, True), log.read_text()
    # the verdict first; stages have no --probe
    assert log.read_text().startswith("stage imitate: ok: ")
    assert "--probe" not in log.read_text()
    stages = build_stages(raw)
    assert [note[: len(told)] for note in check_stages(stages)] == [told]
    alone = build_stages(raw, ["stages.rewards.model=tiny-random"])
    assert check_stages(alone) == []
    with pytest.raises(DataError, match=r"stage rewards: no data file no\.jsonl"):
        check_stages(build_stages(raw, ["stages.rewards.data.train=no.jsonl"]))


def test_forks_beside_the_stages_are_found_and_clean_takes_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = StagesFolder.create(tmp_path / "runs/a", build_stages(staged(b={}, a={})))
    runs = [folder.path / name for name in ("b", "a", "a-step2")]
    for run in runs:
        RunDirectory.create(run, "", {})
        (run / "checkpoints/step_000001").mkdir(parents=True)
        (run / "checkpoints/step_000001/weights.safetensors").write_bytes(b"1234")
    assert find_runs([folder.path]) == runs[::-1]
    assert set(find_runs([tmp_path / "runs"])) == set(runs)
    clean_runs([folder.path], keep="nothing", apply=False, as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in shown[:-1]] == [str(run) for run in runs]


def test_other_commands_name_the_stages(file: Path):
    with pytest.raises(ConfigError, match=r"has stages \(imitate, rewards\)"):
        load_config(file)


def test_python_names_the_stages_and_the_way(file: Path):
    with pytest.raises(ConfigError, match=r"imitate, rewards.*model=PREVIOUS_RUN"):
        dapo.train(config=file)
