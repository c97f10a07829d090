"""Safe by default: models, data and configurations run no code, open no file and tell no secret
unasked.
"""

import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table

from dapo.cli.main import main
from dapo.cli.train import start_run
from dapo.config import Config, load_config
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.terminal import UNSAFE
from dapo.policy.model import export_model, load_model
from dapo.rewards import get_verifier
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import JsonlSink
from dapo.types import Problem
from helpers.hostile_functions import ATTACK
from helpers.paths import CONFIGS
from helpers.run_files import log_metrics
from helpers.shipped_configs import SHIPPED

SECRET = "zqK7vX31"
CANARY = "canary-5c1d7e"


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sound model directory."""
    out = tmp_path_factory.mktemp("models") / "sound"
    loaded = load_model("tiny-random", dtype=torch.float32)
    export_model(loaded.model.state_dict().items(), loaded, out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def write_files(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def code_that_touches(path: Path) -> bytes:
    return f"from pathlib import Path\nPath({str(path)!r}).touch()\n".encode()


@pytest.mark.parametrize("model_type", ["of_its_own", "llama"])
def test_code_that_comes_with_a_model_is_not_run(
    tmp_path: Path, model_files: dict[str, bytes], model_type: str
):
    ran = tmp_path / "ran"
    classes = {
        "AutoConfig": "evil.C",
        "AutoModelForCausalLM": "evil.M",
        "AutoTokenizer": ["evil.T", None],
    }
    config = json.loads(model_files["config.json"]) | {
        "model_type": model_type,
        "auto_map": classes,
    }
    tokenizer = json.loads(model_files["tokenizer_config.json"]) | {
        "auto_map": classes,
        "tokenizer_class": "T",
    }
    extra = {
        "evil.py": code_that_touches(ran),
        "config.json": json.dumps(config).encode(),
        "tokenizer_config.json": json.dumps(tokenizer).encode(),
    }
    directory = write_files(tmp_path / "model", model_files | extra)
    with pytest.raises(ConfigError, match=r"read the code, and set model\.trust_remote_code=true"):
        load_model(str(directory), dtype=torch.float32)
    assert not ran.exists()


class TouchOnUnpickle:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_pickle_among_a_models_weights_is_not_run(tmp_path: Path, model_files: dict[str, bytes]):
    ran = tmp_path / "ran"
    attack = pickle.dumps({"weight": TouchOnUnpickle(ran)}, protocol=2)
    pickle.loads(attack)
    assert ran.exists()  # it would work
    ran.unlink()
    files = {
        name: content for name, content in model_files.items() if not name.endswith(".safetensors")
    }
    directory = write_files(tmp_path / "model", files | {"pytorch_model.bin": attack})
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"):
        (directory / "pytorch_model.bin").replace(directory / name)
        with pytest.raises(
            ConfigError, match=rf"has no safetensors but pickled weights \({name}\)"
        ) as error:
            load_model(str(directory), dtype=torch.float32)
        assert "save_pretrained('converted')" in str(error.value)
        assert "weights_only" not in str(error.value)
        with pytest.raises(ConfigError, match="is a file of weights; expected a directory"):
            load_model(str(directory / name), dtype=torch.float32)
        (directory / name).replace(directory / "pytorch_model.bin")
    assert not ran.exists()


def test_no_shipped_configuration_trusts_code_of_a_model_and_it_is_asked_for_by_name_only():
    for name, config in SHIPPED.items():
        assert config.model.trust_remote_code is False, name
    assert (
        load_config(CONFIGS / "tiny.yaml", ["model.trust_remote_code=true"]).model.trust_remote_code
        is True
    )


def test_a_configuration_cannot_make_objects(tmp_path: Path):
    ran = tmp_path / "ran"
    text = (CONFIGS / "tiny.yaml").read_text()
    attack = (
        "  system: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path"
        f' ["{ran}"]]\n'
    )
    (tmp_path / "c.yaml").write_text(text.replace("data:\n", "data:\n" + attack))
    with pytest.raises(ConfigError, match="not readable as YAML"):
        load_config(tmp_path / "c.yaml")
    assert not ran.exists()


# an audit hook cannot be taken out again: outside of `opened_files` it has nothing to write to
_opened: list[list[str]] = []


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened:
        _opened[-1].append(str(arguments[0]))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Every file that this process opens inside."""
    if not hasattr(sys, "_dapo_test_hook"):
        sys.addaudithook(_note_open)
        sys._dapo_test_hook = True  # type: ignore[attr-defined]
    _opened.append([])
    try:
        yield _opened[-1]
    finally:
        _opened.pop()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file and a module that data speaks of, and secrets in the
    environment.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MY_HARMLESS_VARIABLE"):
        monkeypatch.setenv(name, CANARY)
    (tmp_path / "bait.txt").write_text(CANARY)
    (tmp_path / "evil_module.py").write_bytes(
        code_that_touches(tmp_path / "ran")
        + b"def reward(completions, **kw):\n    return [1.0 for _ in completions]\n"
    )
    bait = str(tmp_path / "bait.txt")
    names = {
        "data_source": "evil_module:reward",
        "verifier": "evil_module:reward",
        "reward_fn": "evil_module:reward",
        "filter": "evil_module:reward",
        "chat_template": "{{ cycler.__init__.__globals__.os.environ }}",
        "image": bait,
        "images": [bait, f"file://{bait}"],
        "path": bait,
        "extra_info": {"path": bait, "module": "evil_module"},
    }
    rows = [
        {
            "prompt": f"{i} + 1? {bait} {{{{ 7 * 7 }}}} ${{oc.env:HF_TOKEN}} $HF_TOKEN",
            "answer": bait,
        }
        | names
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def run_on_rows(trap: Path, *overrides: str) -> Config:
    return load_config(
        CONFIGS / "tiny.yaml",
        [
            "data.train=rows.jsonl",
            "data.eval=null",
            "train.num_steps=1",
            "train.threads=1",
            *overrides,
        ],
    )


def test_names_in_data_are_neither_opened_nor_imported_and_secrets_stay_private(
    trap: Path, capfd: pytest.CaptureFixture[str]
):
    with opened_files() as opened:
        start_run(run_on_rows(trap), run_dir=trap / "run", config_name="tiny")
    assert any(path.endswith("rows.jsonl") for path in opened)  # the hook sees what is opened
    assert not any("bait" in path for path in opened)
    assert not (trap / "ran").exists()
    captured = capfd.readouterr()
    assert CANARY not in captured.out + captured.err
    written = [path for path in (trap / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json"} <= {
        path.name for path in written
    }
    for path in written:
        assert CANARY.encode() not in path.read_bytes(), path


def test_user_code_runs_where_the_configuration_names_it(trap: Path):
    config = run_on_rows(
        trap, "reward.verifier=evil_module:reward", "dynamic_sampling.enabled=false"
    )
    start_run(config, run_dir=trap / "run", config_name="tiny")
    assert (trap / "ran").exists()  # so the test above could fail


@pytest.mark.parametrize("name", ["exact", "gsm8k", "math", "math_dapo", "gym"])
def test_no_verifier_opens_a_file_that_a_reference_or_a_response_names(trap: Path, name: str):
    if name == "gym":
        pytest.importorskip("reasoning_gym")
    verifier = get_verifier(name)
    bait = str(trap / "bait.txt")
    entry = {"question": "Q", "answer": bait, "metadata": {"path": bait}}
    problem = Problem(
        "p", bait, bait, "s", {"gym_task": "chain_sum", "gym_config": {}, "gym_entry": entry}
    )
    verifier(problem, "warm up: what it imports is opened here")
    with opened_files() as opened:
        for response in (
            bait,
            f"Answer: {bait}",
            f"\\boxed{{{bait}}}",
            f"\\input{{{bait}}}",
            f"open({bait!r}).read()",
        ):
            verifier(problem, response)
        assert not any("bait" in path for path in opened)
        (trap / "bait.txt").read_text()
    assert any("bait" in path for path in opened)


@pytest.fixture
def strangers_run(tmp_path: Path) -> RunDirectory:
    """A run directory with a checkpoint, into which links will be put."""
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n", {})
    run.checkpoints.save(4, lambda folder: (folder / "w").write_text("weights"), keep=1)
    log_metrics(run.metrics, [{"step": 4, "x": 1.0}])
    return run


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "metrics.jsonl",
        "config.yaml",
        "problems.parquet",
        "rollouts",
        "checkpoints",
        "eval",
        "logs",
    ],
)
def test_a_run_directory_with_a_link_in_it_is_refused(
    tmp_path: Path, strangers_run: RunDirectory, name: str
):
    path = strangers_run.path / name
    target = path.rename(tmp_path / "elsewhere") if path.exists() else tmp_path / "elsewhere"
    path.symlink_to(target)
    with pytest.raises(
        CheckpointError, match=rf"holds links \({name}\), through which a run would change files"
    ):
        RunDirectory.open(strangers_run.path)


def test_a_run_directory_may_itself_be_reached_through_a_link(
    tmp_path: Path, strangers_run: RunDirectory
):
    (tmp_path / "link").symlink_to(strangers_run.path)
    with RunDirectory.open(tmp_path / "link").lock():
        pass


def test_neither_the_lock_nor_the_metrics_are_written_through_a_link(
    tmp_path: Path, strangers_run: RunDirectory
):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for path in (strangers_run.path / "lock", strangers_run.metrics):
        path.unlink()
        path.symlink_to(victim)
    with pytest.raises(OSError, match="it is a link"), strangers_run.lock():
        pass
    with pytest.raises(OSError, match="it is a link"):
        JsonlSink(strangers_run.metrics)
    strangers_run.truncate_after(4)
    assert victim.read_text() == "mine"


def test_leftovers_that_are_links_or_files_are_removed_and_their_targets_stay(
    tmp_path: Path, strangers_run: RunDirectory
):
    checkpoints = strangers_run.checkpoints.folder
    victims = [tmp_path / "folder", tmp_path / "file"]
    victims[0].mkdir()
    victims[1].write_text("mine")
    for number, victim in enumerate(victims):
        (checkpoints / f".step_00001{number}.tmp").symlink_to(victim)
        (checkpoints / f".step_00002{number}.gone.tmp").symlink_to(victim)
        (checkpoints / f".step_000004.{number}.replaced.tmp").symlink_to(victim)
    (checkpoints / ".step_000008.tmp").write_text("a file")
    (strangers_run.path / ".metrics.jsonl.tmp").symlink_to(victims[1])
    (strangers_run.path / ".summary.json.0a1b2c3d.tmp").write_text("half")
    run = strangers_run
    run.checkpoints.clear_leftovers()
    run.truncate_after(4)
    run.checkpoints.save(8, lambda folder: (folder / "w").write_text("weights"), keep=2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000004", "step_000008"]
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".")) == []
    assert victims[0].is_dir()
    assert victims[1].read_text() == "mine"


def test_text_that_is_an_attack_ends_no_run_and_reaches_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    source = ATTACK[:-1]  # what is read from a file is valid Unicode
    rows = [
        {"prompt": f"{source} {i} + 1?", "answer": f"{source}{i}", "source": source}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [
        "data.train=rows.jsonl",
        "data.eval={builtin: {sums: {}}, size: 8, seed: 2}",
        "train.threads=1",
    ]
    overrides += [
        "reward.verifier=helpers.hostile_functions:drives_the_terminal",
        "train.num_steps=2",
    ]
    overrides += ["train.eval_every=1", "dynamic_sampling.enabled=false"]
    run_dir = tmp_path / "run"
    start_run(load_config(CONFIGS / "tiny.yaml", overrides), run_dir=run_dir, config_name="tiny")
    for command in (["data", "stats", "run"], ["data", "stats", "rows.jsonl"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0
    shown = capfd.readouterr()
    assert UNSAFE.search(shown.out + shown.err) is None
    assert "\\x1b]0;owned\\x07" in shown.out
    table = read_table(run_dir / "rollouts" / "step_000001.parquet").to_pylist()
    errors = {row["error"] for row in table if row["error"] is not None}
    assert errors, "the verifier fails sometimes"
    assert all("http://***@host" in error and "api_key=***" in error for error in errors)
    assert all(SECRET not in error for error in errors)
    for path in run_dir.rglob("*.json*"):
        text = path.read_text(encoding="utf-8")
        assert UNSAFE.search(text) is None, path
        assert SECRET not in text, path
    answers = json.dumps(json.loads((run_dir / "eval" / "step_000002.json").read_text()))
    assert json.dumps(ATTACK)[1:-1] in answers  # it was written, and is read back as it was
