"""A teacher: a reference that is another model. What trains, what is refused, and exact resume."""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from dapo.cli.train import resume_run, start_run
from dapo.config import Config, ReferenceConfig, ReferenceServerConfig
from dapo.core.errors import CheckpointError, ConfigError, DapoError, DataError
from dapo.policy.builtin_models import character_model
from dapo.policy.hf_io import write_model_directory
from dapo.policy.model import load_model
from dapo.start.card.facts import base_of, has_trained
from dapo.start.check import Checked, UserCode
from dapo.start.run import with_exported_runs
from helpers.forked_workers import WorkerForks
from helpers.naive_update import whole_gradient
from helpers.processes import wait_until
from helpers.tiny_policies import (
    assert_close,
    branching,
    gradient_of,
    loaded,
    make_policy,
    plain_copy,
    ragged,
)
from helpers.tiny_runs import CONFIGS, contents, differences, inputs_of, metrics, saved_steps, tiny

ALONE = (
    "reward.coef=0",
    "loss.kl_coef=1",
    "loss.kl_estimator=full",
    "rollout.group_size=1",
    "train.num_steps=4",
    "train.minibatch_groups=4",
    "train.save_every=1",
    "train.keep_checkpoints=9",
    "train.eval_every=0",
    "optim.lr=0.01",
)


def teacher_folder(path: Path, *, change: Any = None, **shape: Any) -> Path:
    """A model of other sizes over the characters of the tiny model."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
    }
    model, tokenizer = character_model(
        torch.float32, **(sizes | {"num_key_value_heads": 3, "head_dim": 16} | shape)
    )
    if change is not None:
        change(tokenizer)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    write_model_directory(weights.items(), model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_folder(tmp_path_factory.mktemp("teacher") / "big")


def alone(teacher: Path, *overrides: str) -> Config:
    return tiny(*ALONE, f"loss.reference.model={teacher}", *overrides)


@contextmanager
def served(
    folder: Path,
    *,
    shift: float = 0.0,
    drop: int = 0,
    text: Callable[[str], str] = str,
    refusal: Callable[[int], str | None] = lambda number: None,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on loopback that scores prompts by a model, and what it was asked; `shift` is added
    to each number.

    `text` changes what it says of its tokens. `refusal` gets the number of a request, from 1, and
    returns the `Retry-After` of a status 429, or None for an answer.
    """
    loaded = load_model(str(folder), dtype=torch.float32)
    model = loaded.model
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "big"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request)
            retry_after = refusal(len(asked))
            if retry_after is not None:
                self.reply({"error": "busy"}, status=429, retry_after=retry_after)
                return
            ids = torch.tensor([request["prompt"]])
            with torch.no_grad():
                rows = model(ids).logits[0].log_softmax(dim=-1)
            found = [rows[i, token].item() + shift for i, token in enumerate(request["prompt"][1:])]
            texts = [text(loaded.tokenizer.decode([token])) for token in request["prompt"]]
            scores = {"token_logprobs": [None, *found[drop:], -1.0], "tokens": [*texts, "!"]}
            self.reply({"choices": [{"logprobs": scores}]})

        def reply(
            self, values: dict[str, Any], *, status: int = 200, retry_after: str | None = None
        ) -> None:
            body = json.dumps(values).encode()
            self.send_response(status)
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def whole(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    start_run(alone(teacher), run_dir=path, config_name="t")
    return path


def test_a_student_comes_nearer_to_its_teacher_without_rewards_and_every_group_trains(
    whole: Path,
) -> None:
    rows = [row for row in metrics(whole) if row["step"]]
    kl = [row["loss/kl"] for row in rows]
    assert kl[-1] < 0.6 * kl[0]
    assert all(row["loss/policy"] == 0 for row in rows)
    assert all(row["rollout/groups_trained"] == row["rollout/groups_generated"] for row in rows)
    assert all("reward/mean" in row for row in rows)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_byte(
    whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "cut")
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        assert not (path / "reference.safetensors").exists()
        if int(path.name.removeprefix("step_")) > 2:
            shutil.rmtree(path)
    resume_run(tmp_path / "cut", [])
    assert contents(tmp_path / "cut") == contents(whole)


@pytest.mark.parametrize("estimator", ["k2", "full"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all_weights", "lora"])
def test_the_gradient_is_that_of_the_naive_divergence_to_another_architecture(
    estimator: str, lora: dict[str, Any] | None, teacher: Path, tmp_path: Path
) -> None:
    big: PreTrainedModel = character_model(torch.float64, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
                                           num_attention_heads=3, num_key_value_heads=3, head_dim=16)[0]  # fmt: skip
    own = loaded(character_model(torch.float64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                 num_attention_heads=2, num_key_value_heads=1, head_dim=16)[0])  # fmt: skip
    vocabulary = own.model.config.vocab_size
    samples = [
        replace(
            row,
            prompt_ids=tuple(token % vocabulary for token in row.prompt_ids),
            response_ids=tuple(token % vocabulary for token in row.response_ids),
        )
        for row in (*ragged(), *(replace(row, group_id=9 + row.group_id) for row in branching()))
    ]
    options = {"kl_coef": 0.5, "kl_estimator": estimator}
    network = plain_copy(own)
    policy = make_policy(own, loss=options | {"reference": {"model": str(teacher)}}, lora=lora)
    found = gradient_of(policy, samples, tmp_path / "x")
    if lora is None:
        expected = whole_gradient(
            network, samples, 1.0, reference=big, is_on_policy=True, **options
        )
        assert_close(found, expected, relative=1e-5)  # RMSNorm computes in float32
    else:
        assert len(found) > 0
        assert all("lora" in name for name in found)


def test_a_run_is_a_teacher_by_its_newest_checkpoint_and_its_later_ones_change_nothing(
    whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "teacher"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step_000004")
    alone_with_run = Checked(alone(run), UserCode())
    checked = with_exported_runs(alone_with_run)
    exported = exported_of(run, step=3)
    assert checked.config.loss.teacher == str(exported)
    assert AutoTokenizer.from_pretrained(exported).vocab_size > 50
    assert checked.notes == [f"loss.reference.model: {run} is exported to {exported}"]
    written = {path: path.stat().st_mtime_ns for path in exported.iterdir()}
    assert with_exported_runs(alone_with_run) == checked
    assert {path: path.stat().st_mtime_ns for path in exported.iterdir()} == written
    start_run(
        alone(run, "train.num_steps=1", f"model={run}"),
        run_dir=tmp_path / "student",
        config_name="t",
    )
    (row,) = [row for row in metrics(tmp_path / "student") if row["step"]]
    assert row["loss/kl"] == pytest.approx(0, abs=1e-9)  # the student is its own teacher
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        with_exported_runs(alone_with_run)


def test_a_resumed_run_may_take_a_run_as_its_new_teacher(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "student"
    shutil.copytree(whole, run)
    teacher_run = tmp_path / "teacher"
    shutil.copytree(whole, teacher_run)
    resume_run(run, [f"loss.reference.model={teacher_run}", "train.num_steps=5"])
    (row,) = [row for row in metrics(run) if row["step"] == 5]
    assert row["loss/kl"] == pytest.approx(0, abs=1e-9)  # it is its own teacher


def exported_of(run: Path, *, step: int) -> Path:
    """The only export of a step with which other runs began."""
    (exported,) = (run / "exported").glob(f"step_{step:06d}-*")
    return exported


def test_a_step_that_was_trained_anew_is_exported_anew(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "teacher"
    shutil.copytree(whole, run)
    checked = Checked(alone(run), UserCode())
    with_exported_runs(checked)
    first = exported_of(run, step=4)
    weights = (first / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step_000004")
    resume_run(run, ["optim.lr=0.02"])
    second = with_exported_runs(checked).config.loss.teacher
    assert second is not None
    assert Path(second).parent == first.parent
    assert (Path(second) / "model.safetensors").read_bytes() != weights
    # an earlier student resumes with it
    assert (first / "model.safetensors").read_bytes() == weights
    assert base_of(second).text.startswith("the model of the run `teacher` after step 4")


def test_a_run_below_the_home_folder_is_a_model_and_a_teacher(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "teacher"
    shutil.copytree(whole, run)
    monkeypatch.setenv("HOME", str(tmp_path))
    named = alone(Path("~/teacher"), "model=~/teacher")
    checked = with_exported_runs(Checked(named, UserCode()))
    exported = str(exported_of(run, step=4))
    assert (checked.config.model.name, checked.config.loss.teacher) == (exported, exported)
    assert has_trained("~/teacher")


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    def add(tokenizer: Any) -> None:
        tokenizer.add_tokens(["<extra>"])

    folder = teacher_folder(tmp_path / "other", change=add)
    with pytest.raises(
        ConfigError,
        match=r"has another vocabulary than tiny-random: 1 tokens differ, the first is '<ex",
    ):
        inputs_of(alone(folder))


def test_another_template_is_noted_and_too_few_positions_are_refused(tmp_path: Path) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.chat_template = "{{ messages }}"

    folder = teacher_folder(tmp_path / "other", change=change)
    notes = inputs_of(alone(folder)).notes
    assert any(
        "has another chat template than tiny-random; it reads tiny-random's prompts" in note
        for note in notes
    )
    short = teacher_folder(tmp_path / "short")
    text = (short / "config.json").read_text()
    (short / "config.json").write_text(
        text.replace('"max_position_embeddings": 4096', '"max_position_embeddings": 16')
    )
    with pytest.raises(
        ConfigError, match="has 16 positions, and a prompt with its response may have"
    ):
        inputs_of(alone(short))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.kl_coef=0"], "reward.coef=0 leaves nothing to train on"),
        (["loss.kl_in=reward", "loss.kl_estimator=k1"], "loss.kl_in=reward subtracts from rewards"),
        (
            ["loss.kl_in=reward", "reward.coef=1", "rollout.group_size=4"],
            "loss.kl_estimator=full is a term of the loss",
        ),
        (["reward.coef=1"], "rollout.group_size must be at least 2"),
        (
            ["loss.reference.model=/nowhere"],
            "loss.reference.model: model '/nowhere': there is no such directory",
        ),
    ],
)
def test_what_cannot_work_together_is_refused(
    teacher: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        inputs_of(alone(teacher, *overrides))


def test_rewards_of_weight_0_turn_dynamic_sampling_off_unless_it_is_set(teacher: Path) -> None:
    assert alone(teacher).dynamic_sampling.enabled is False
    assert alone(teacher, "dynamic_sampling.enabled=true").dynamic_sampling.enabled is True
    assert tiny("reward.coef=0.5").dynamic_sampling.enabled is True


def behind(url: str, model: str) -> ReferenceConfig:
    return ReferenceConfig(server=ReferenceServerConfig(url=url, model=model))


def test_a_teacher_behind_a_server_trains_what_the_same_model_in_memory_does(
    teacher: Path, tmp_path: Path
) -> None:
    start_run(alone(teacher, "loss.kl_estimator=k2"), run_dir=tmp_path / "local", config_name="t")
    with served(teacher) as (url, asked):
        config = alone(
            teacher,
            "loss.kl_estimator=k2",
            f"loss.reference={{server: {{url: '{url}', model: big}}}}",
        )
        start_run(config, run_dir=tmp_path / "served", config_name="t")
    assert asked
    assert all(
        request["model"] == "big" and request["echo"] and request["max_tokens"] == 1
        for request in asked
    )
    local, remote = (metrics(tmp_path / name) for name in ("local", "served"))
    for one, other in zip(local, remote, strict=True):
        assert one.keys() == other.keys()
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)
    with (
        served(teacher, drop=3) as (url, _),
        pytest.raises(DataError, match=r"log-probabilities for .* tokens of the"),
    ):
        start_run(
            config.changed("loss", reference=behind(url, "big")),
            run_dir=tmp_path / "d",
            config_name="t",
        )
    with (
        served(teacher, shift=float("inf")) as (url, _),
        pytest.raises(DapoError, match="is inf, expected a log-probability"),
    ):
        start_run(
            config.changed("loss", reference=behind(url, "big")),
            run_dir=tmp_path / "e",
            config_name="t",
        )
    differs = (
        r"of \d+ tokens compared, \d+ differ; the first is id \d+, 'b' here and 'B' there; serve a"
        r" model"
    )
    with served(teacher, text=str.upper) as (url, _), pytest.raises(ConfigError, match=differs):
        start_run(
            config.changed("loss", reference=behind(url, "big")),
            run_dir=tmp_path / "g",
            config_name="t",
        )
    with (
        served(teacher) as (url, _),
        pytest.raises(ConfigError, match="the server has no model other; it has big"),
    ):
        start_run(
            config.changed("loss", reference=behind(url, "other")),
            run_dir=tmp_path / "f",
            config_name="t",
        )


class BusyTeacher:
    """A teacher that, from step 3 of its first run on, asks every client to come back later."""

    def __init__(self, retry_after: str) -> None:
        self._retry_after = retry_after
        self.is_busy = False
        self.has_refused = threading.Event()

    def refusal(self, number: int) -> str | None:
        # one request compares the vocabularies, then each step has four samples
        self.is_busy = self.is_busy or number == 1 + 2 * 4 + 1
        if not self.is_busy:
            return None
        self.has_refused.set()
        return self._retry_after


def command_behind(url: str) -> list[str]:
    """The command that trains behind this server, up to its run directory."""
    reference = f"loss.reference={{server: {{url: '{url}', model: big}}}}"
    by_name = dict(option.split("=", 1) for option in (*ALONE, "loss.kl_estimator=k2"))
    options = [f"{name}={value}" for name, value in by_name.items()]
    return ["train", str(CONFIGS / "tiny.yaml"), "train.threads=1", *options, reference]


@pytest.fixture(scope="module")
def whole_behind_a_server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "run"
    with served(teacher) as (url, _):
        reference = f"loss.reference={{server: {{url: '{url}', model: big}}}}"
        config = alone(teacher, "loss.kl_estimator=k2", reference)
        start_run(config, run_dir=path, config_name="t")
    return path


@pytest.mark.parametrize(
    ("signum", "retry_after"),
    [(signal.SIGTERM, "300"), (signal.SIGINT, "0")],
    ids=["one_long_wait", "retries"],
)
def test_a_signal_ends_the_wait_for_a_busy_teacher_and_a_resume_continues_exactly(
    signum: signal.Signals,
    retry_after: str,
    teacher: Path,
    whole_behind_a_server: Path,
    worker_forks: WorkerForks,
    tmp_path: Path,
) -> None:
    busy = BusyTeacher(retry_after)
    run = tmp_path / "run"
    with served(teacher, refusal=busy.refusal) as (url, _):
        with (tmp_path / "log").open("w") as log:
            command = [*command_behind(url), "--run-dir", str(run)]
            process = worker_forks.command(*command, output=log)
            try:
                wait_until(
                    lambda: busy.has_refused.is_set() or process.poll() is not None,
                    timeout_s=120,
                    what="that the server refuses",
                )
                time.sleep(1.0)  # into the wait
                process.send_signal(signum)
                code = process.wait(timeout=20)  # not the 5 minutes that the server asks for
            finally:
                process.kill()
                process.wait()
        printed = (tmp_path / "log").read_text()
        assert code == 128 + signum, printed
        assert f"stopped by {signum.name}" in printed
        assert "Traceback" not in printed
        assert saved_steps(run) == ["step_000001", "step_000002"]
    with served(teacher) as (url, _):
        reference = f"loss.reference={{server: {{url: '{url}', model: big}}}}"
        resume_run(run, [reference])
    assert differences(contents(run), contents(whole_behind_a_server)) == []


def test_a_teacher_that_asks_for_days_ends_the_run_which_is_saved(
    teacher: Path, tmp_path: Path
) -> None:
    busy = BusyTeacher("1000000")
    run = tmp_path / "run"
    with served(teacher, refusal=busy.refusal) as (url, _):
        reference = f"loss.reference={{server: {{url: '{url}', model: big}}}}"
        config = alone(teacher, "loss.kl_estimator=k2", reference)
        with pytest.raises(DapoError, match=r"asks to wait 11\.6 days; the longest wait is 5 min"):
            start_run(config, run_dir=run, config_name="t")
    assert saved_steps(run) == ["step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loss.kl_estimator=full"],
            "gives log-probabilities of sampled tokens alone, which loss.kl_estimator=full",
        ),
        (
            ["rollout.temperature=0.7"],
            "gives log-probabilities at temperature 1, and rollout.temperature=0.7",
        ),
        (["distributed.trainer_ranks=2"], "which a trainer in separate processes does not use"),
    ],
)
def test_options_that_a_server_cannot_serve_are_refused(overrides: list[str], message: str) -> None:
    given = [
        *ALONE,
        "loss.reference={server: {url: 'http://localhost:1/v1', model: big}}",
        "loss.kl_estimator=k2",
    ]
    with pytest.raises(ConfigError) as error:
        tiny(*given, *overrides)
    assert message in str(error.value)
