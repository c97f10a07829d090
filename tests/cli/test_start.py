"""What `dapo train` and `dapo check` find before anything is sampled, loaded or written."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers.commands import own_errors, run
from helpers.fork_server import ForkServer
from helpers.paths import CONFIGS

TINY = str(CONFIGS / "tiny.yaml")
ONE_STEP = [
    "train.num_steps=1",
    "train.threads=1",
    "data.eval=null",
    "train.eval_every=0",
    "reward.workers=1",
]
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with rewards and rows in the layouts of TRL and verl, and without
    answers.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    verl = {
        "data_source": "d",
        "reward_model": {"ground_truth": "7", "style": "rule"},
        "extra_info": {"index": 1},
    }
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


NO_SUCH_NAME = (
    "unknown verifier 'maht'; did you mean math? known: choice, code, environment, exact, gsm8k,"
    " gym, json_schema, math, math_dapo, regex, reward_model, server, or your own function as"
    " module:function"
)
ADVICE = "Rename a column, give the parameter a default value, or set it in reward.options"
REFUSED = {
    "columns that a function needs": (
        ["data.train=trl.jsonl", "reward.verifier=my_rewards:unit"],
        (
            "my_rewards:unit needs level, unit, which 16 rows (the first: 1) of the 16 of"
            f" data.train do not have; columns there: answer, prompt, solution, source. {ADVICE}"
        ),
    ),
    "a ground truth that is not there": (
        ["data.train=bare.jsonl", "reward.verifier=my_rewards:compute_score"],
        (
            "my_rewards:compute_score needs ground_truth, which 16 rows (the first: 1) of the 16"
            f" of data.train do not have; columns there: prompt, source. {ADVICE}"
        ),
    ),
    "an answer that a verifier compares with": (
        ["data.train=bare.jsonl", "reward.verifier=math"],
        (
            "bare.jsonl, line 1: no answer; expected a column reward_model.ground_truth, answer,"
            " final_answer, expected_answer, solution, ground_truth or target, columns here: prompt;"
            " name yours with {path: FILE, answer: COLUMN}"
        ),
    ),
    "an unknown verifier": (["reward.verifier=maht"], NO_SUCH_NAME),
    "a module that is not there": (
        ["reward.verifier=no_such_module:f"],
        (
            "'no_such_module:f': there is no module 'no_such_module' in {dir} or among the"
            " installed packages"
        ),
    ),
    "a function that is not there": (
        ["reward.verifier=my_rewards:brevit"],
        "'my_rewards:brevit': module my_rewards has no 'brevit'; did you mean brevity?",
    ),
    "a filter that is not there": (
        ["dynamic_sampling.filter=my_rewards:brevit"],
        (
            "dynamic_sampling.filter='my_rewards:brevit': module my_rewards has no 'brevit'; did"
            " you mean brevity?"
        ),
    ),
    "an unknown option of a verifier": (
        ["reward.verifier=exact", "reward.options={strict: true}"],
        "verifier exact has no option 'strict'; it has extract, ignore_case",
    ),
    "a model of no kind": (
        ["model=smollm2"],
        (
            "model 'smollm2' is not an alias (smollm2-135m-instruct, tiny-random), a directory here"
            " or a Hugging Face id (OWNER/NAME); did you mean smollm2-135m-instruct?"
        ),
    ),
    "the same problems for training and evaluation": (
        ["data.train=trl.jsonl", "data.eval=trl.jsonl"],
        "data.train: every problem is also in data.eval; nothing is left to train on",
    ),
}
if find_spec("wandb") is None:
    REFUSED["a tracker that is not installed"] = (
        ["log.sinks=[wandb]"],
        "log.sinks needs the package wandb, which is not installed: pip install wandb",
    )


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_found_at_the_start_and_by_check(
    capsys: pytest.CaptureFixture[str], folder: Path, name: str, command: str
):
    options, message = REFUSED[name]
    chosen = {option.partition("=")[0] for option in options}
    others = [option for option in ONE_STEP if option.partition("=")[0] not in chosen]
    run_dir = ["--run-dir", "run"] if command == "train" else []
    code, _, err = run(capsys, command, TINY, *others, *options, *run_dir)
    assert (code, err) == (2, f"error: {message}\n".replace("{dir}", str(folder)))
    assert not Path("run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_ends_the_start(capsys: pytest.CaptureFixture[str], folder: Path):
    code, _, err = run(capsys, "train", TINY, *ONE_STEP, "train.device=cuda", "--run-dir", "run")
    assert (code, err) == (
        2,
        "error: train.device=cuda, but torch finds no CUDA device; use train.device=auto or cpu\n",
    )
    assert not Path("run").exists()


WITHOUT_TORCH = """
import sys
from dapo.cli.main import main
for option in sys.argv[2:]:
    try:
        main(["train", sys.argv[1], option])
    except SystemExit as end:
        print(end.code, *{"torch", "transformers"} & set(sys.modules))
"""


def test_a_wrong_name_is_answered_without_torch(folder: Path):
    options = ("reward.verifier=maht", "reward.verifier=my_rewards:brevit", "model=smollm2")
    command = [sys.executable, "-c", WITHOUT_TORCH, TINY, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2"] * len(options)


@pytest.mark.parametrize(
    ("verifier", "ask", "expected"),
    [
        (
            "math_dapo",
            "Put it into \\boxed{}.",
            "0 of 16 prompts request; they request \\boxed{...} (16 rows)",
        ),
        (
            "math_dapo",
            "Reply with the number.",
            "0 of 16 prompts request. Request it in data.instruction",
        ),
        (
            "gsm8k",
            "Reply with the number.",
            "0 of 16 prompts request. Request it in data.instruction",
        ),
        ("math_dapo", "End with `Answer: 7`.", None),
        ("math", "Put it into \\boxed{}.", None),
        ("exact", "Reply with the number.", None),
    ],
)
def test_check_says_where_the_prompts_ask_for_another_mark_than_the_verifier_reads(
    capsys: pytest.CaptureFixture[str], folder: Path, verifier: str, ask: str, expected: str | None
):
    options = [
        "data.train=trl.jsonl",
        f"reward.verifier={verifier}",
        f"data.instruction={json.dumps(ask)}",
    ]
    code, out, _ = run(capsys, "check", TINY, *ONE_STEP, *options)
    out = " ".join(out.split())
    assert code == 0
    assert ("warning: " in out) == (expected is not None)
    assert (
        expected is None or f"data.train: the verifier {verifier} reads an answer marked by" in out
    )
    assert expected is None or expected in out


def test_a_model_that_has_trained_may_mark_its_answers_without_being_asked_to(
    capsys: pytest.CaptureFixture[str], folder: Path
):
    options = ["data.train=trl.jsonl", "reward.verifier=gsm8k", "data.instruction=Add."]
    assert run(capsys, "train", TINY, *ONE_STEP, "--run-dir", "trained")[0] == 0
    assert run(capsys, "export", "trained", "exported")[0] == 0
    warned = {}
    for model in ("tiny-random", "trained", "exported"):
        code, out, _ = run(capsys, "check", TINY, *ONE_STEP, *options, f"model={model}")
        assert code == 0
        warned[model] = "prompts request" in " ".join(out.split())
    assert warned == {"tiny-random": True, "trained": False, "exported": False}


def test_a_run_continues_in_another_folder_with_its_own_data_and_with_trust_its_modules(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
):
    options = [*ONE_STEP, "data.train={path: trl.jsonl}", "reward.verifier=my_rewards:brevity"]
    assert run(capsys, "train", TINY, *options, "--run-dir", "run")[0] == 0
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "trl.jsonl").write_text('{"prompt": "another file of that name", "answer": "1"}\n')
    command = ["resume", str(folder / "run"), "train.num_steps=2", "--trust"]
    errors = elsewhere / "errors"
    code, _ = fork_server.run(
        *command, output=elsewhere / "output", folder=str(elsewhere), errors=str(errors)
    )
    assert (code, own_errors(errors.read_text())) == (0, "")
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_whose_folder_is_gone_says_where_it_was_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path / "old")
    Path("rows.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1", "answer": "1"}}\n' for i in range(16))
    )
    assert (
        run(capsys, "train", TINY, *ONE_STEP, "data.train=rows.jsonl", "--run-dir", "../run")[0]
        == 0
    )
    monkeypatch.chdir(tmp_path)
    Path("old/rows.jsonl").unlink()
    code, _, err = run(capsys, "resume", "run", "train.num_steps=2")
    assert code == 2
    assert (
        "no data file rows.jsonl; the folder holds no data file (the run was started in"
        f" {tmp_path}/old: " in err
    )
    assert "its data is searched there, then here; override it by data.train=PATH)" in err
    for command in (
        ("eval", "run", "--data", "mine.jsonl"),
        ("resume", "run", "train.num_steps=2", "data.train=mine.jsonl"),
    ):
        code, _, err = run(capsys, *command)
        assert (code, "no data file mine.jsonl" in err, "started in" in err) == (2, True, False)
    code, _, err = run(
        capsys, "eval", "run", "reward.verifier=nobody:judge", "--data", "builtin:sums"
    )
    assert (
        f"(the run was started in {tmp_path}/old: its modules are searched here, with --trust"
        " also in" in err
    )


def test_a_set_option_without_effect_is_named_when_a_run_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ("train", "tiny", "train.num_steps=1", "--run-dir", str(tmp_path / "run"))
    code, out, _ = run(capsys, *small, "rollout.vllm.cache_gib=1")
    assert code == 0
    lines = [line for line in out.splitlines() if "without effect" in line]
    assert lines == ["without effect: rollout.vllm.*: rollout.engine is native"]
