"""The command line: bad input is answered in words and writes nothing, good input does what it
says.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.cli.main import main
from dapo.policy.checkpoint import SavedWeights
from helpers.commands import own_errors, run
from helpers.paths import CONFIGS
from helpers.tables import for_each_row
from helpers.undrawn_curves import drawn_curves

TINY = str(CONFIGS / "tiny.yaml")
QUICK = ["train.num_steps=2", "train.threads=1", "data.eval.builtin.sums.low=1"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    with drawn_curves(), pytest.raises(SystemExit) as stopped:
        main(["train", TINY, *QUICK, "--run-dir", str(path)])
    assert stopped.value.code == 0
    return path


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loss.clip_hihg=0.3", "unknown option loss.clip_hihg; did you mean loss.clip_high=0.3?"),
        ("rollout.temperature=warm", "option rollout.temperature: input should be a valid number"),
        (
            "rollout.group_size=1",
            "rollout.group_size must be at least 2 to compare responses with each other, got 1",
        ),
        (
            "train.minibatch_groups=3",
            "rollout.prompts_per_step=4 (prompts per step) must be a multiple of",
        ),
        ("rollout.top_p=0.9", "unknown option rollout.top_p; it is fixed to 1"),
        ("clip_high", "'clip_high' is not NAME=VALUE; type loss.clip_high=VALUE"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("data.train=builtin:sumz", "sums"),
        ("reward.verifier=maths", "unknown verifier 'maths'; did you mean math?"),
        ("reward.verifier=no_such_module:reward", "no_such_module"),
        ("reward.verifier=dapo.rewards.examples:nothing", "nothing"),
        ("model=/no/such/model", "there is no such directory"),
        (
            "dynamic_sampling.filter=json:nothing",
            "dynamic_sampling.filter='json:nothing': module json has no 'nothing'",
        ),
        ("rollout.max_response_tokens=5000", "exceed the"),
        ("train.device=tpu", "option train.device: input should be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_bad_options_exit_2_with_one_message_and_write_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, expected: str
):
    code, out, err = run(capsys, "train", TINY, override, "--run-dir", str(tmp_path / "run"))
    assert code == 2
    assert err.startswith("error: ")
    assert expected in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n', "line 2"),
        ('{"answer": "2"}\n', "line 1"),
        ('{"prompt": "1+1"}\n', "line 1"),
        ('{"prompt": "", "answer": "2"}\n', "line 1"),
        ("[1, 2]\n", "line 1"),
    ],
)
def test_bad_data_exits_2_and_names_file_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, expected: str
):
    data = write(tmp_path / "bad.jsonl", content)
    code, _, err = run(
        capsys,
        "train",
        TINY,
        f"data.train={data}",
        "reward.verifier=exact",
        "--run-dir",
        str(tmp_path / "run"),
    )
    assert (code, "Traceback" in err) == (2, False)
    assert data in err
    assert expected in err
    assert not (tmp_path / "run").exists()


def test_a_model_directory_without_weights_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = run(
        capsys, "train", TINY, f"model.name={model}", "--run-dir", str(tmp_path / "run")
    )
    assert code == 2
    assert "has no weights" in err


def test_a_missing_config_file_is_named(capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "train", "nowhere.yaml")
    assert (code, err) == (
        2,
        (
            "error: no config file nowhere.yaml; expected a YAML file, or the name of a shipped"
            " one: calculator, dapo_32b, dapo_7b, four_digits, gsm8k_0.5b, gsm8k_laptop, quickstart, tiny\n"
        ),
    )


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(
    capsys: pytest.CaptureFixture[str], finished_run: Path
):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    code, _, err = run(capsys, "train", TINY, "--run-dir", str(finished_run))
    assert code == 2
    assert f"already holds a run; continue it with `dapo resume {finished_run}`" in err
    assert {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")} == before


@pytest.mark.parametrize("command", ["resume", "export"])
def test_what_is_no_run_cannot_be_resumed_or_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
):
    code, _, err = run(
        capsys, command, str(tmp_path), *([str(tmp_path / "out")] if command == "export" else [])
    )
    assert code == 2
    assert "is not a run directory: it has no config.yaml and no manifest.json" in err


def test_a_run_writes_what_the_architecture_says(finished_run: Path):
    names = {
        path.relative_to(finished_run).as_posix()
        for path in finished_run.rglob("*")
        if path.is_file()
    }
    assert {
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "eval/step_000000.json",
        "eval/step_000002.json",
        "rollouts/step_000001.parquet",
        "rollouts/step_000002.parquet",
        "checkpoints/step_000002/weights.safetensors",
        "checkpoints/step_000002/state.json",
    } <= names
    assert (finished_run / "curves.png").stat().st_size > 10_000
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["exit_reason"] == "finished"
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    for which in ("eval_first", "eval_last"):
        result = summary[which]
        assert 0 <= result["low"] <= result["accuracy"] <= result["high"] <= 1
        assert result["problems"] == 8
    steps = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [0, 1, 2]
    for row in steps[1:]:
        outcomes = [
            v
            for k, v in row.items()
            if k.startswith("rollout/groups_") and not k.endswith("_generated")
        ]
        assert row["rollout/groups_generated"] == sum(outcomes)
        tokens = [
            v
            for k, v in row.items()
            if k.startswith("rollout/tokens_") and not k.endswith(("_generated", "_minibatches"))
        ]
        assert row["rollout/tokens_generated"] == sum(tokens)


PAPER_METRICS = [
    "rollout/response_tokens_mean",
    "rollout/truncated_fraction",
    "reward/mean",
    "reward/trained_mean",
    "loss/entropy",
    "loss/token_prob_mean",
    "rollout/all_correct_fraction",
    "rollout/all_wrong_fraction",
    "loss/clip_low_fraction",
    "loss/clip_high_fraction",
    "optim/grad_norm",
    "optim/lr",
    "rollout/keep_rate",
    "rollout/tokens_generated",
    "rollout/tokens_trained",
    "rollout/tokens_excess",
    "rollout/engine_logprob_gap_max",
    "rollout/engine_logprob_gap_mean",
    "rollout/reflection_fraction",
    "time/generate_s",
    "time/update_s",
    "time/tokens_per_s",
    "time/peak_memory_gib",
]


@for_each_row("name", PAPER_METRICS)
def test_what_the_paper_watches_is_in_the_metrics(finished_run: Path, name: str):
    last = json.loads((finished_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert isinstance(last[name], int | float)


def test_export_writes_a_model_that_transformers_loads_with_the_trained_weights(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
):
    out = tmp_path / "model"
    code, output, _ = run(capsys, "export", str(finished_run), str(out))
    assert code == 0
    assert "after 2 steps" in output
    loaded = AutoModelForCausalLM.from_pretrained(out)
    trained = dict(SavedWeights(finished_run / "checkpoints" / "step_000002").named_tensors())
    for name, tensor in loaded.named_parameters():
        torch.testing.assert_close(tensor.float(), trained[name].float(), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(out)("12")["input_ids"]
    code, _, err = run(capsys, "export", str(finished_run), str(out))
    assert code == 2
    assert "already exists" in err


def test_eval_of_a_run_and_of_its_export_agree(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
):
    options = ["--data", "{builtin: {sums: {}}, size: 6}", "--samples-per-problem", "2"]
    first = tmp_path / "first.json"
    second = tmp_path / "second.json"
    model = tmp_path / "model"
    assert run(capsys, "eval", str(finished_run), *options, "--output", str(first))[0] == 0
    assert run(capsys, "export", str(finished_run), str(model))[0] == 0
    verifier = [
        "reward.verifier=dapo.rewards.examples:has_digit",
        "model.dtype=float32",
        "eval.max_response_tokens=8",
    ]
    code, output, _ = run(capsys, "eval", str(model), *options, "--output", str(second), *verifier)
    assert code == 0
    assert "avg@2" in output
    one = json.loads(first.read_text())
    two = json.loads(second.read_text())
    assert [row["responses"] for row in one["table"]] == [row["responses"] for row in two["table"]]
    assert one["problems"] == 6
    assert set(one) >= {"accuracy", "low", "high", "pass@1", "pass@2"}


def test_eval_wants_data(capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "eval", "tiny-random")
    assert code == 2
    assert "--data" in err


def test_check_says_what_would_run_and_trains_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, output, _ = run(
        capsys, "check", TINY, "overlong.mode=off", "loss.clip_high=0.3", "--verbose"
    )
    assert code == 0
    for words in (
        "prompts     4 that carry a signal (Eq. 11); at most 16 are judged",
        "responses   16 train: 4 per prompt",
        "tokens      at most 128 response tokens train (8 per response)",
        "updates     2 of 2 prompts = 8 responses each",
        "overlong.buffer_tokens: overlong.mode is off",
        "loss.clip_high: 0.3 (paper: 0.28)",
    ):
        assert words in output


MISBEHAVING = """
def raises(completions, **columns):
    if any("5" in completion for completion in completions):
        raise RuntimeError("no fives, please")
    return [any(c.isdigit() for c in completion) for completion in completions]

def miscounts(completions, **columns):
    return [1.0]

def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)

def a_string(completions, **columns):
    return ["good"] * len(completions)

def prints(completions, **columns):
    print(f"JUDGING {len(completions)}\\n", end="")
    return [any(c.isdigit() for c in completion) for completion in completions]
"""


def test_a_reward_that_sometimes_raises_costs_its_own_responses_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my_rewards.py", MISBEHAVING)
    code, output, _ = run(
        capsys,
        "train",
        TINY,
        *QUICK,
        "reward.verifier=my_rewards:raises",
        "--run-dir",
        str(tmp_path / "run"),
    )
    assert code == 0
    assert "verifier errors, most often: " in output
    assert "no fives, please" in output
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/verifier_errors"] > 0


@pytest.mark.parametrize(
    ("function", "reason"), [("miscounts", "1"), ("not_a_number", "nan"), ("a_string", "good")]
)
def test_a_reward_that_only_fails_ends_the_run_saved_and_says_why(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    reason: str,
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my_rewards.py", MISBEHAVING)
    path = tmp_path / "run"
    code, _, err = run(
        capsys,
        "train",
        TINY,
        "train.num_steps=2",
        "train.threads=1",
        "data.eval=null",
        "train.eval_every=0",
        f"reward.verifier=my_rewards:{function}",
        "--run-dir",
        str(path),
    )
    assert code == 1
    assert err.startswith(
        "error: none of the 32 responses judged last has a verdict. 32 times:"
        f" my_rewards:{function}"
    )
    assert f"(dapo test {path} shows its verdicts)" in err
    assert reason in err
    assert "Traceback" not in err
    assert (path / "checkpoints" / "step_000000").is_dir()
    assert json.loads((path / "summary.json").read_text())["exit_reason"].startswith(
        "VerifierFailed: none of the 32"
    )


def test_what_a_reward_prints_is_in_a_file_of_the_run_and_once_on_the_console(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my_rewards.py", MISBEHAVING)
    code, out, err = run(
        capfd, "train", TINY, *QUICK, "reward.verifier=my_rewards:prints", "--run-dir", "run"
    )
    assert code == 0
    (line,) = (line for line in (out + err).splitlines() if "the verifier prints" in line)
    assert re.fullmatch(r"the verifier prints: 'JUDGING \d'; kept in run/logs/verifier.log", line)
    kept = (tmp_path / "run" / "logs" / "verifier.log").read_text().splitlines()
    assert len(kept) > 4
    assert set(kept) <= {"JUDGING 4", "JUDGING 1"}


def test_prompts_that_are_too_long_are_dropped_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    rows = [{"prompt": "1+1=" if i % 2 else "long " * 30, "answer": "2"} for i in range(20)]
    data = write(tmp_path / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    code, output, _ = run(
        capsys, "train", TINY, "train.num_steps=1", f"data.train={data}", "data.max_prompt_tokens=20", "data.eval=null",
        "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert code == 0
    assert "10 training prompts left out: longer than data.max_prompt_tokens" in output


@pytest.mark.parametrize("arguments", [["show", "options"], ["show", "options", "--json"]])
def test_a_full_disk_behind_the_output_is_one_line(arguments: list[str]):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dapo", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    errors = own_errors(done.stderr)
    assert (done.returncode, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: the output: No space left on device; name another place")


def test_an_error_of_a_path_is_one_line_that_names_it(
    finished_run: Path, tmp_path: Path, capsys: Any
):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "export", str(finished_run), str(tmp_path / "file" / "model"))
    assert (code, err.count("\n")) == (2, 1)
    assert str(tmp_path / "file") in err
