"""`log.sinks=[mlflow]`, with MLflow itself and its store in files."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.core.errors import ConfigError
from dapo.runs.optional_sink import OptionalSink
from dapo.runs.sinks import MlflowSink

IS_INSTALLED = importlib.util.find_spec("mlflow") is not None
needs_mlflow = pytest.mark.skipif(not IS_INSTALLED, reason="mlflow is not installed")
OPTIONS = {"optim": {"lr": 1e-3}, "reward": {"options": {"api_key": "secret-123456"}}}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sums")
    monkeypatch.chdir(tmp_path)
    return mlflow.MlflowClient()


def the_run(client: Any) -> Any:
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def history(client: Any, name: str) -> list[tuple[int, float]]:
    entries = client.get_metric_history(the_run(client).info.run_id, name)
    return [(entry.step, entry.value) for entry in entries]


@needs_mlflow
def test_a_resumed_run_goes_on_there_and_repeats_no_step(client: Any, tmp_path: Path) -> None:
    first = MlflowSink("sums", "run", OPTIONS, tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": float(step)})
    first.close()  # killed; the checkpoint is of step 1
    assert the_run(client).info.status == "RUNNING"
    changed = OPTIONS | {"optim": {"lr": 1e-4}}
    resumed = MlflowSink("sums", "run", changed, tmp_path)
    for step in (2, 3, 4):
        resumed.log(step, {"reward/mean": float(step), "new/metric (é)": 0.5})
    resumed.end("stopped")
    assert history(client, "reward/mean") == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert history(client, "new/metric ___") == [(2, 0.5), (3, 0.5), (4, 0.5)]
    run = the_run(client)
    assert (run.info.status, run.info.run_name) == ("KILLED", "run")
    assert run.data.params["optim.lr"] == "0.001"
    assert run.data.tags["optim.lr"] == "0.0001"
    assert "secret-123456" not in str(run.data.params)


@needs_mlflow
@pytest.mark.parametrize(("state", "status"), [("solved", "FINISHED"), ("failed", "FAILED")])
def test_the_end_of_a_run_reaches_it_through_the_thread(
    client: Any, tmp_path: Path, state: str, status: str
) -> None:
    sink = OptionalSink(
        "mlflow", lambda step: MlflowSink("sums", "run", OPTIONS, tmp_path), print, first_step=1
    )
    sink.log(1, {"reward/mean": float("nan")})
    sink.end(state)
    sink.close()
    assert the_run(client).info.status == status


@needs_mlflow
def test_a_run_is_logged_whole(client: Any) -> None:
    run = dapo.train(
        "tiny-random",
        data="builtin:sums",
        reward="dapo.rewards.examples:has_digit",
        steps=2,
        prompts_per_step=2,
        group_size=4,
        max_response_tokens=6,
        sinks=["mlflow"],
    )
    logged = the_run(client)
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", run.path.name)
    assert logged.data.params["train.num_steps"] == "2"
    assert history(client, "reward/mean") == [
        (step, pytest.approx(value)) for step, value in run.metrics["reward/mean"].items()
    ]


@pytest.mark.skipif(IS_INSTALLED, reason="mlflow is installed")
def test_without_mlflow_a_sentence_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"log.sinks needs the package mlflow, .*: pip install ml"
    ):
        dapo.train("tiny-random", data="builtin:sums", sinks="mlflow", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
