"""What `dapo train` and `dapo check` find before anything is sampled, loaded or written."""

import json
from pathlib import Path

import pytest

from dapo.cli.main import main
from helpers.paths import CONFIGS

TINY = str(CONFIGS / "tiny.yaml")
ONE_STEP = ["train.num_steps=1", "train.threads=1", "data.eval=null", "reward.workers=1"]
REWARDS = """
def accuracy_reward(completions, solution, **kwargs):
    return [float(completion == right) + completion.count("1") for completion, right in zip(completions, solution)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str.count("1") - 0.5, "acc": "1" in solution_str and ground_truth == "7"}

def brevity(completions, **kwargs):
    return [completion.count("1") for completion in completions]

def unit(completions, unit, level):
    return [1.0 for _ in completions]
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    out, err = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with rewards and rows in the layouts of TRL and verl, and without answers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    verl = {"data_source": "d", "reward_model": {"ground_truth": "7", "style": "rule"}, "extra_info": {"index": 1}}
    for name, columns in {"trl": {"solution": "7"}, "verl": verl, "bare": {}}.items():
        rows = [{"prompt": f"{i}+1=", **columns} for i in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    ("data", "verifier"),
    [
        ("trl.jsonl", "my_rewards:accuracy_reward"),
        ("verl.jsonl", "my_rewards:compute_score"),
        ("trl.jsonl", "my_rewards:compute_score"),
        ("bare.jsonl", "my_rewards:brevity"),
    ],
)
def test_rewards_of_trl_and_verl_train_unchanged_on_their_data(
    capsys: pytest.CaptureFixture[str], folder: Path, data: str, verifier: str
):
    options = [*ONE_STEP, f"data.train={data}", f"reward.verifier={verifier}"]
    assert run(capsys, "check", TINY, *options)[0] == 0
    code, _, err = run(capsys, "train", TINY, *options, "--run-dir", "run")
    assert (code, err) == (0, "")
    (last,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert last["rollout/verifier_errors"] == 0


REFUSED = {
    "columns that a function needs": (
        ["data.train=trl.jsonl", "reward.verifier=my_rewards:unit"],
        "error: my_rewards:unit needs level, unit, which 16 rows (the first: 1) of the 16 of data.train do not have; "
        "columns there: answer, prompt, solution, source. Rename a column, give the parameter a default value, or set "
        "it in reward.options\n",
    ),
    "a ground truth that is not there": (
        ["data.train=bare.jsonl", "reward.verifier=my_rewards:compute_score"],
        "error: my_rewards:compute_score needs ground_truth, which 16 rows (the first: 1) of the 16 of data.train do "
        "not have; columns there: prompt, source. Rename a column, give the parameter a default value, or set it in "
        "reward.options\n",
    ),
    "an answer that a verifier compares with": (
        ["data.train=bare.jsonl", "reward.verifier=math"],
        "error: bare.jsonl, line 1: no answer; expected a column reward_model.ground_truth, answer, solution, "
        "ground_truth or target, columns here: prompt; name yours with {path: FILE, answer: COLUMN}\n",
    ),
}


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_found_at_the_start_and_by_check(
    capsys: pytest.CaptureFixture[str], folder: Path, name: str, command: str
):
    options, message = REFUSED[name]
    code, _, err = run(
        capsys, command, TINY, *ONE_STEP, *options, *(["--run-dir", "run"] if command == "train" else [])
    )
    assert (code, err) == (2, message)
    assert not Path("run").exists()
