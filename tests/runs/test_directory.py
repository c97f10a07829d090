"""The run directory: layout, lock, manifest, checkpoints that survive a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dapo.config import dump_config, load_config
from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json, atomic_write_text
from dapo.core.secrets import mask_secrets
from dapo.evaluation.scores import Evaluation, EvaluationPlan
from dapo.policy.hf_io import appearing_directory
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import SUMMARY_FIELDS, RunDirectory, default_run_path
from dapo.runs.evaluations import first_and_last_evaluation, load_evaluation, write_evaluation
from dapo.runs.manifest import make_manifest, written_options
from dapo.runs.rollout_table import write_rollouts
from helpers.run_files import append_bytes, log_metrics, new_run
from helpers.tables import for_each_row


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs" / "a", "seed: 0\n", {"seed": 0})


def weights(text):
    """A checkpoint writer."""

    def write(directory: Path) -> None:
        (directory / "policy").mkdir()
        (directory / "policy" / "w").write_text(text)
        (directory / "state.json").write_text("{}")

    return write


def no_warning(text):
    raise AssertionError(f"unexpected warning: {text}")


def one_bit_and_the_case(position, value):
    """Of a byte of a manifest one bit, another one at each position, and of a letter the bit that
    makes it large or small: a checksum read as a number would not notice that one.
    """
    bits = {position % 8}
    if chr(value).isalpha():
        bits.add(5)
    return bits


def all_bits(position, value):
    return range(8)


class TestCreateAndOpen:
    def test_a_new_run_holds_its_config_and_manifest(self, run):
        assert run.config.read_text() == "seed: 0\n"
        assert json.loads(run.manifest.read_text()) == {"seed": 0}
        assert sorted(path.name for path in run.path.iterdir()) == [
            "config.yaml",
            "lock",
            "manifest.json",
        ]
        assert RunDirectory.open(run.path) == run

    def test_the_layout_is_the_documented_one(self):
        run = RunDirectory(Path("runs/a"))
        assert run.metrics == Path("runs/a/metrics.jsonl")
        assert run.rollouts(12) == Path("runs/a/rollouts/step_000012.parquet")
        assert run.eval(10) == Path("runs/a/eval/step_000010.json")
        assert run.checkpoints.folder == Path("runs/a/checkpoints")
        assert run.summary == Path("runs/a/summary.json")

    def test_an_empty_directory_may_be_used(self, tmp_path):
        assert RunDirectory.create(tmp_path, "", {}).path == tmp_path

    def test_a_directory_that_holds_a_run_is_refused(self, run):
        with pytest.raises(CheckpointError) as error:
            RunDirectory.create(run.path, "other: 1\n", {})
        assert (
            str(error.value)
            == f"{run.path} already holds a run; continue it with `dapo resume {run.path}` or"
            " choose another --run-dir"
        )
        assert error.value.exit_code == 2
        assert run.config.read_text() == "seed: 0\n"

    def test_the_directory_of_a_run_that_trains_is_refused_with_its_process(self, run, monkeypatch):
        process = os.getpid()
        with run.lock():
            monkeypatch.setattr(os, "getpid", lambda: process + 1)  # as seen by another process
            with pytest.raises(CheckpointError) as error:
                RunDirectory.create(run.path, "other: 1\n", {})
        assert (
            str(error.value)
            == f"{run.path} already holds a run, which process {process} is training; follow it"
            f" with `dapo status {run.path}` or choose another --run-dir"
        )

    def test_what_a_start_left_that_was_killed_in_the_middle_is_replaced(self, tmp_path):
        path = tmp_path / "run"
        child = os.fork()
        if child == 0:

            def be_killed(run: RunDirectory) -> None:
                with appearing_directory(run.tokenizer) as folder:
                    (folder / "tokenizer.json").write_text("half")
                    os._exit(9)

            RunDirectory.create(path, "seed: 0\n", {"seed": 0}, write_first=be_killed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        left = {entry.name for entry in path.iterdir()}
        assert len(left) == 2, left  # the lock and the folder of the tokenizer
        RunDirectory.create(path, "seed: 0\n", {"seed": 0})
        names = {entry.name for entry in path.iterdir()}
        assert names == {"lock", "manifest.json", "config.yaml"}

    def test_a_directory_with_other_files_is_refused(self, tmp_path):
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(CheckpointError) as error:
            RunDirectory.create(tmp_path, "", {})
        assert (
            str(error.value)
            == f"{tmp_path} is not empty and holds no run (found thesis.tex); choose a new or empty"
            " --run-dir"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_file_in_the_way_is_named(self, tmp_path):
        (tmp_path / "a").touch()
        with pytest.raises(
            CheckpointError, match=r"cannot create the run directory .*a: File exists"
        ):
            RunDirectory.create(tmp_path / "a", "", {})

    def test_opening_what_is_no_run_names_what_is_missing(self, tmp_path):
        with pytest.raises(CheckpointError) as error:
            RunDirectory.open(tmp_path / "nowhere")
        assert (
            str(error.value)
            == f"no run directory {tmp_path / 'nowhere'}; expected one that `dapo train` made"
        )
        with pytest.raises(CheckpointError) as error:
            RunDirectory.open(tmp_path)
        assert (
            str(error.value)
            == f"{tmp_path} is not a run directory: it has no config.yaml and no manifest.json"
        )

    def test_a_run_without_a_name_is_named_after_its_config_and_the_time(self):
        path = default_run_path("configs/quickstart.yaml", datetime(2025, 3, 9, 7, 5, 1))
        assert path == Path("runs/quickstart-20250309-070501")


class TestLock:
    def test_a_second_process_is_refused_by_name_until_the_holder_is_killed(self, run):
        with in_background(HOLD_LOCK, run.path) as holder:
            with pytest.raises(CheckpointError) as error, run.lock():
                pass
            refusal = (
                f"{run.path} is in use by process {holder.pid}; wait until it has ended, or stop it"
            )
            assert str(error.value) == refusal
            holder.kill()
            holder.wait()
        with run.lock():
            assert (run.path / "lock").read_text() == f"{os.getpid()}\n"

    def test_it_is_free_after_the_block_even_if_that_raises(self, run):
        with pytest.raises(KeyboardInterrupt), run.lock():
            raise KeyboardInterrupt
        with run.lock():
            pass


class TestCheckpoints:
    def test_a_checkpoint_is_named_after_its_step_and_knows_its_files(self, run):
        path = run.checkpoints.save(10, weights("hello"), keep=2)
        assert path == run.checkpoints.folder / "step_000010"
        assert step_of(path) == 10
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["step"] == 10
        assert manifest["files"]["policy/w"] == {
            "bytes": 5,
            "crc32": "3610a686",
        }
        assert sorted(manifest["files"]) == ["policy/w", "state.json"]
        assert run.checkpoints.latest(no_warning) == path

    def test_the_newest_are_kept(self, run):
        for step in (5, 10, 15):
            run.checkpoints.save(step, weights(str(step)), keep=2)
        assert sorted(path.name for path in run.checkpoints.folder.iterdir()) == [
            "step_000010",
            "step_000015",
        ]

    def test_saving_a_step_again_replaces_it(self, run):
        for text in ("old", "new"):
            path = run.checkpoints.save(10, weights(text), keep=1)
        assert (path / "policy" / "w").read_text() == "new"
        assert list(run.checkpoints.folder.iterdir()) == [path]

    def test_a_run_that_saved_nothing_has_none(self, run):
        assert run.checkpoints.latest(no_warning) is None

    def test_a_save_that_fails_leaves_the_one_before_and_no_rubbish(self, run):
        def full_disk(directory):
            (directory / "half").write_text("x")
            raise OSError("No space left on device")

        run.checkpoints.save(5, weights("five"), keep=1)
        with pytest.raises(OSError, match="No space left"):
            run.checkpoints.save(10, full_disk, keep=1)
        assert [path.name for path in run.checkpoints.folder.iterdir()] == ["step_000005"]

    def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(self, run):
        with in_background(SAVE_FOR_EVER, run.path) as saver:
            os.kill(saver.pid, signal.SIGKILL)
            saver.wait()
        assert sorted(path.name for path in run.checkpoints.folder.iterdir()) == [
            ".step_000010.tmp",
            "step_000005",
        ]
        latest = run.checkpoints.latest(no_warning)
        assert latest == run.checkpoints.folder / "step_000005"
        assert (latest / "weights").read_text() == "five"
        run.checkpoints.save(10, weights("ten"), keep=2)
        assert sorted(path.name for path in run.checkpoints.folder.iterdir()) == [
            "step_000005",
            "step_000010",
        ]

    def test_a_kill_between_the_two_renames_of_a_replacement_leaves_the_old_one(self, run):
        path = run.checkpoints.save(5, weights("old"), keep=1)
        path.rename(run.checkpoints.folder / ".step_000005.replaced.tmp")
        (run.checkpoints.folder / ".step_000005.tmp").mkdir()
        run.checkpoints.clear_leftovers()
        assert list(run.checkpoints.folder.iterdir()) == [path]
        assert run.checkpoints.latest(no_warning) == path

    def test_a_kill_before_the_old_are_dropped_is_made_up_for(self, run):
        for step, accuracy in ((5, 0.5), (10, 0.25), (15, None), (20, None)):
            run.checkpoints.save(step, weights(""), keep=9, accuracy=accuracy)
        run.checkpoints.drop_old(15, keep=1)
        assert sorted(step_of(path) for path in run.checkpoints.folder.iterdir()) == [5, 15, 20]
        run.checkpoints.drop_old(20, keep=1)
        assert sorted(step_of(path) for path in run.checkpoints.folder.iterdir()) == [5, 20]

    @pytest.mark.parametrize(
        ("damage", "fault"),
        [
            (
                lambda path: (path / "policy/w").write_text("hellO"),
                "policy/w does not match its checksum",
            ),
            (
                lambda path: (path / "policy/w").write_text("hell"),
                "policy/w has 4 bytes instead of 5",
            ),
            (lambda path: (path / "policy/w").unlink(), "policy/w is missing"),
            (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
            (
                lambda path: (path / "manifest.json").write_text('{"files": ['),
                "manifest.json is not readable",
            ),
            (
                lambda path: (path / "manifest.json").write_text("[]"),
                "manifest.json is not readable",
            ),
            (
                lambda path: (path / "manifest.json").write_text("[" * 100_000),
                "manifest.json is not readable",
            ),
            (
                lambda path: (path / "manifest.json").write_text("{}"),
                "manifest.json does not match its checksum",
            ),
            (lambda path: (path / "policy/more").touch(), "policy/more does not belong to it"),
            (
                lambda path: path.joinpath("manifest.json").write_bytes(
                    path.with_name("step_000005").joinpath("manifest.json").read_bytes()
                ),
                "it is the checkpoint of step 5",
            ),
        ],
    )
    def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(self, run, damage, fault):
        older = run.checkpoints.save(5, weights("hello"), keep=2)
        newer = run.checkpoints.save(10, weights("hello"), keep=2)
        damage(newer)
        warnings = []
        assert run.checkpoints.latest(warnings.append) == older
        assert warnings == [f"checkpoint {newer} is damaged ({fault}); trying the one before it"]
        with pytest.raises(CheckpointError) as error:
            run.checkpoints.find(10)
        assert str(error.value) == f"checkpoint {newer} is damaged ({fault})"

    @pytest.mark.parametrize(
        "bits_of", [one_bit_and_the_case, pytest.param(all_bits, marks=pytest.mark.nightly)]
    )
    def test_no_bit_of_its_manifest_can_change_unseen(self, run, bits_of):
        older = run.checkpoints.save(5, weights("hello"), keep=2)
        newer = run.checkpoints.save(10, weights("hello"), keep=2, accuracy=0.25)
        manifest = newer / "manifest.json"
        content = manifest.read_bytes()
        accepted = []
        for position, value in enumerate(content):
            for bit in bits_of(position, value):
                changed = bytearray(content)
                changed[position] ^= 1 << bit
                manifest.write_bytes(changed)
                if run.checkpoints.latest(lambda text: None) != older:
                    accepted.append((position, bit, bytes(changed)))
        assert accepted == []
        manifest.write_bytes(content)
        assert run.checkpoints.latest(no_warning) == newer

    def test_a_manifest_that_lists_nothing_is_damaged_even_if_its_checksum_holds(self, run):
        older = run.checkpoints.save(5, weights("hello"), keep=2)
        newer = run.checkpoints.save(10, lambda directory: None, keep=2)
        warnings = []
        assert run.checkpoints.latest(warnings.append) == older
        assert warnings == [
            f"checkpoint {newer} is damaged (manifest.json lists no files); trying the one"
            " before it"
        ]

    def test_if_all_are_damaged_the_run_does_not_silently_start_again(self, run):
        (run.checkpoints.save(5, weights("hello"), keep=2) / "state.json").unlink()
        with pytest.raises(CheckpointError) as error:
            run.checkpoints.latest(lambda text: None)
        assert (
            str(error.value)
            == f"every checkpoint in {run.checkpoints.folder} is damaged; start again in a new"
            " --run-dir"
        )

    def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(self, run):
        for step in (5, 10):
            run.checkpoints.save(step, weights(""), keep=2)
        assert run.checkpoints.find(5) == run.checkpoints.folder / "step_000005"
        with pytest.raises(CheckpointError) as error:
            run.checkpoints.find(7)
        assert str(error.value) == f"{run.path} has no checkpoint of step 7; there are: 5, 10"

    def test_a_users_own_copy_is_neither_read_nor_removed(self, run):
        (run.checkpoints.folder / "step_000099_backup").mkdir(parents=True)
        path = run.checkpoints.save(5, weights(""), keep=1)
        run.truncate_after(5)
        assert run.checkpoints.latest(no_warning) == path
        assert (run.checkpoints.folder / "step_000099_backup").is_dir()


class TestResume:
    def test_everything_after_the_step_is_cut_and_nothing_before_it(self, run):
        for step in (5, 10):
            run.checkpoints.save(step, weights(""), keep=2)
        log_metrics(run.metrics, [{"step": step} for step in (0, 5, 6, 10)])
        append_bytes(run.metrics, b'{"st')
        for step in (0, 5, 6, 10):
            write_rollouts(run.rollouts(step), [])
            write_evaluation(run, step, SUMMARY, [ROW])
        run.write_summary(dict.fromkeys(SUMMARY_FIELDS))
        run.truncate_after(5)
        assert run.metrics.read_text() == '{"step": 0}\n{"step": 5}\n'
        assert sorted(step_of(path) for path in (run.path / "rollouts").iterdir()) == [0, 5]
        assert sorted(step_of(path) for path in (run.path / "eval").iterdir()) == [0, 5]
        assert [path.name for path in run.checkpoints.folder.iterdir()] == ["step_000005"]
        assert not run.summary.exists()

    def test_a_damaged_later_checkpoint_does_not_push_out_new_ones(self, run):
        run.checkpoints.save(5, weights("hello"), keep=1)
        (run.checkpoints.folder / "step_000010").mkdir()
        run.truncate_after(5)
        path = run.checkpoints.save(8, weights("hello"), keep=1)
        assert run.checkpoints.latest(no_warning) == path

    def test_cutting_a_run_that_wrote_nothing_is_fine(self, run):
        run.truncate_after(-1)
        assert sorted(path.name for path in run.path.iterdir()) == [
            "config.yaml",
            "lock",
            "manifest.json",
        ]


class TestManifest:
    STARTED = datetime(2025, 3, 9, 7, 5, 1, tzinfo=UTC)

    def test_it_says_what_ran_where(self):
        manifest = make_manifest(
            ["dapo", "train", "c.yaml"], seed=7, started=self.STARTED, gpus=["H100"]
        )
        assert manifest["command"] == ["dapo", "train", "c.yaml"]
        assert manifest["seed"] == 7
        assert manifest["started"] == "2025-03-09T07:05:01+00:00"
        assert manifest["versions"]["python"] == ".".join(
            str(part) for part in sys.version_info[:3]
        )
        assert set(manifest["versions"]) == {"dapo", "python", "torch", "transformers", "numpy"}
        assert manifest["machine"]["gpus"] == ["H100"]
        assert manifest["machine"]["cores"] == os.cpu_count()
        assert manifest["machine"]["cpu"]
        json.dumps(manifest)

    def test_the_written_options_are_those_of_the_file_and_the_command(self, tmp_path):
        config = tmp_path / "my=config.yaml"
        config.write_text("model: tiny-random\ndata: {train: a.jsonl}\noptim: {lr: 1e-6}\n")
        words = ["loss.clip_high=0.3", "data.train=b.jsonl", "train={num_steps: 3}", "typo="]
        command = ["/bin/dapo", "train", "--run-dir", "tiny", str(config), "--json", *words]
        names = ["model.name", "data.train", "optim.lr", "loss.clip_high", "train.num_steps"]
        assert written_options(command) == [*names, "typo"]
        assert written_options(command, ["optim.lr"])[:3] == ["model.name", "data.train", names[3]]
        assert written_options(["dapo", "train", "absent.yaml", "no option"]) == []
        assert written_options(["dapo", "fork", "runs/a"]) == []

    @pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
    def test_the_commit_is_that_of_the_current_directory_and_null_outside_a_repository(
        self, tmp_path
    ):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("GIT_")
        }
        environment["GIT_CEILING_DIRECTORIES"] = str(tmp_path.parent)

        def run_here(*command):
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
            )
            return done.stdout

        def commit():
            return json.loads(run_here(sys.executable, "-c", SHOW_COMMIT))

        assert commit() is None
        (tmp_path / "file").touch()
        run_here("git", "init")
        run_here("git", "add", "file")
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        run_here("git", *identity, "commit", "-m", "one")
        head = run_here("git", "rev-parse", "HEAD").strip()
        assert commit() == head
        (tmp_path / "file").write_text("changed")
        assert commit() == f"{head}-dirty"

    @for_each_row(
        ("argument", "masked"),
        [
            ("reward.options.api_key=sk-123", "reward.options.api_key=***"),
            ("reward.options.openaiApiKey=sk-123", "reward.options.openaiApiKey=***"),
            ("reward.options.HF_TOKEN=abc=def", "reward.options.HF_TOKEN=***"),
            ("--password=x", "--password=***"),
            ("reward.options={url: a, api_key: sk-123}", "reward.options=***"),
            ('{"secret": "x"}', "***"),
            ("data.train=https://me:pass@host/p.jsonl", "data.train=https://***@host/p.jsonl"),
            # these only sound like secrets
            ("loss.aggregate=token", "loss.aggregate=token"),
            ("train.microbatch_tokens=4096", "train.microbatch_tokens=4096"),
            ("eval.max_response_tokens=4096", "eval.max_response_tokens=4096"),
            ("data.train=secret.jsonl", "data.train=secret.jsonl"),
            ("configs/token.yaml", "configs/token.yaml"),
        ],
    )
    def test_secrets_on_the_command_line_are_masked(self, argument, masked):
        assert mask_secrets(["dapo", argument]) == ["dapo", masked]


class TestSummary:
    SUMMARY = {  # noqa: RUF012
        "steps": 50,
        "wall_s": 500.5,
        "tokens_generated": 9000,
        "tokens_trained": 6000,
        "eval_first": {"accuracy": 0.1, "low": 0.05, "high": 0.15, "problems": 150},
        "eval_last": None,
        "exit_reason": "finished",
        "best_step": 40,
    }

    def test_it_is_written_whole_with_what_else_is_known(self, run):
        run.write_summary(self.SUMMARY)
        assert json.loads(run.summary.read_text()) == self.SUMMARY

    def test_a_missing_field_is_named(self, run):
        with pytest.raises(ValueError, match="lacks wall_s, exit_reason"):
            run.write_summary(
                {k: v for k, v in self.SUMMARY.items() if k not in ("wall_s", "exit_reason")}
            )
        assert not run.summary.exists()


RESPONSE = {
    "text": "A",
    "correct": True,
    "score": 1.0,
    "error": None,
    "answer": "A",
    "tokens": 1,
    "finish": "stop",
}
ROW = {
    "id": "1",
    "accuracy": 1.0,
    "source": "s",
    "question": "Q",
    "answer": "A",
    "responses": [RESPONSE],
}
SUMMARY = Evaluation(EvaluationPlan("e", 1, 1.0, 1.0, 1, (), 0), ()).summary()


@for_each_row(
    "content",
    [
        "",
        '{"accuracy": 0.',
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        json.dumps(SUMMARY | {"accuracy": "0.5", "table": [ROW]}),
        json.dumps(SUMMARY | {"table": {}}),
        json.dumps(SUMMARY | {"table": [ROW | {"responses": []}]}),
        json.dumps(SUMMARY | {"table": [ROW | {"responses": ["A"]}]}),
    ],
)
def test_a_damaged_evaluation_is_named_and_left_out(run, content):
    good = {"step": 0, **SUMMARY, "table": [ROW]}
    write_evaluation(run, 0, SUMMARY, [ROW])
    atomic_write_text(run.eval(5), content)
    warnings = []
    assert first_and_last_evaluation(run, warnings.append) == [good]
    assert len(warnings) == 1
    assert str(run.eval(5)) in warnings[0]
    assert "left out" in warnings[0]


def test_an_evaluation_that_stores_no_verifier_has_the_one_that_was_in_force_in_its_step(tmp_path):
    run = new_run(tmp_path / "run")
    first = load_config(run.config).reward.verifier
    resumed = load_config(run.config, ["reward.verifier=exact", "reward.options={extract: final}"])
    run.replace_config(dump_config(resumed), after=10)
    for step in (10, 20):
        write_evaluation(run, step, SUMMARY, [ROW])
    write_evaluation(run, 30, SUMMARY | {"verifier": "choice"}, [ROW])
    found = [load_evaluation(run.eval(step)) for step in (10, 20, 30)]
    assert [each["verifier"] for each in found] == [first, "exact", "choice"]
    assert found[1]["verifier_options"] == {"extract": "final"}
    copy = run.path / "copy.json"  # outside of eval/, nothing says which options were in force
    shutil.copy(run.eval(10), copy)
    assert "verifier" not in load_evaluation(copy)


def test_only_the_first_and_the_last_readable_evaluation_are_read(run):
    assert first_and_last_evaluation(run, pytest.fail) == []
    for step in (0, 5, 10, 15, 20, 25):
        write_evaluation(run, step, SUMMARY, [ROW])
    for step in (0, 10, 25):  # a damaged one in between is not looked at
        atomic_write_text(run.eval(step), "{")
    warnings = []
    assert [found["step"] for found in first_and_last_evaluation(run, warnings.append)] == [5, 20]
    assert [Path(text.split()[0]).name for text in warnings] == [
        "step_000000.json",
        "step_000025.json",
    ]
    run.eval(20).unlink()
    run.eval(15).unlink()
    assert [found["step"] for found in first_and_last_evaluation(run, warnings.append)] == [5]


class TestAtomicFiles:
    def test_json_has_null_where_a_number_is_not_finite(self, tmp_path):
        atomic_write_json(
            tmp_path / "f", {"a": [float("nan"), 1.5], "b": {"c": float("-inf")}, "é": (1, 2)}
        )
        assert json.loads((tmp_path / "f").read_text()) == {
            "a": [None, 1.5],
            "b": {"c": None},
            "é": [1, 2],
        }


SHOW_COMMIT = """
import json
from datetime import UTC, datetime
from dapo.runs.manifest import make_manifest
print(json.dumps(make_manifest([], seed=0, started=datetime.now(UTC))["git_commit"]))
"""

HOLD_LOCK = """
import sys, time
from dapo.runs.directory import RunDirectory
with RunDirectory.open(sys.argv[1]).lock():
    print("ready", flush=True)
    time.sleep(600)
"""

SAVE_FOR_EVER = """
import sys, time
from dapo.runs.directory import RunDirectory
run = RunDirectory.open(sys.argv[1])
run.checkpoints.save(5, lambda directory: (directory / "weights").write_text("five"), keep=1)
def write(directory):
    (directory / "weights").write_text("te")
    print("ready", flush=True)
    time.sleep(600)
run.checkpoints.save(10, write, keep=1)
"""


@contextmanager
def in_background(script, path):
    """A process that has said it is ready; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
