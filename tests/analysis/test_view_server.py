"""The server of `dapo view`: who may ask, that nothing is written, and what the answers say of a
real run.
"""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from statistics import pvariance
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dapo.analysis.compare import compare_runs
from dapo.analysis.doctor import diagnose
from dapo.analysis.explain import explain_group
from dapo.analysis.view import report
from dapo.analysis.view.queries import Runs, ViewedRun, missing_rollouts
from dapo.analysis.view.server import HEADERS, listen
from dapo.config import dump_config, load_config
from dapo.config.option_entries import flat_options
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.terminal import to_json
from dapo.environments.starts import environment_seed
from dapo.policy.builtin_models import tiny_random
from dapo.policy.hf_io import write_model_directory
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import read_metrics
from dapo.runs.rollout_index import Filter, RolloutIndex
from dapo.runs.rollout_table import write_rollouts
from dapo.runs.run_reader import RunReader
from dapo.runs.status import run_status
from dapo.types import Problem
from helpers.run_files import append_bytes
from helpers.tables import for_each_row
from helpers.tiny_runs import tiny
from helpers.view_runs import SHORT, Client, close_with, copy_judged, make_run, serving

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view") / "first")


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[Client]:
    with serving(run) as found:
        yield found


def problem(row: dict[str, Any]) -> Problem:
    return Problem(row["problem_id"], row["question"], row["answer"])


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All stored responses, read without the index."""
    return [
        row
        for path in sorted(run.glob("rollouts/*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


# --- who may ask


@for_each_row(
    "host", ["example.org", "example.org:{port}", "127.0.0.1", "127.0.0.1.example.org:{port}", ""]
)
def test_a_request_under_another_host_name_is_refused(client, host):
    status, _, body = client.request(
        "/api/overview", headers={"Host": host.format(port=client.port)}
    )
    assert status == 403
    assert b"model" not in body


@for_each_row(
    "origin", ["http://example.org", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"]
)
def test_a_request_of_another_origin_is_refused(client, origin):
    assert (
        client.request("/api/overview", headers={"Origin": origin.format(port=client.port)})[0]
        == 403
    )


@for_each_row("path", ["/", "/app.js", "/api/overview"])
def test_other_sites_get_nothing_not_even_the_page_itself(client, path):
    for site in ("cross-site", "same-site"):
        assert client.request(path, headers={"Sec-Fetch-Site": site})[0] == 403
    for site in ("none", "same-origin"):
        assert client.request(path, headers={"Sec-Fetch-Site": site})[0] == 200


def test_the_own_names_of_this_machine_are_answered(client):
    for name in ("127.0.0.1", "localhost"):
        address = f"{name}:{client.port}"
        headers = {"Host": address, "Origin": f"http://{address}", "Sec-Fetch-Site": "same-origin"}
        assert client.request("/api/overview", headers=headers)[0] == 200


@for_each_row("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_server_only_answers_reading(client, method):
    assert client.request("/api/overview", method=method)[0] == 405


def test_every_answer_has_the_security_headers(client):
    for path in ("/", "/app.js", "/api/overview", "/nothing", "/api/group?run=nobody"):
        headers = client.request(path)[1]
        assert {name: headers[name.lower()] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http:" not in policy


def test_it_listens_on_the_loopback_address_only():
    with listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            listen(port)
        with socket.socket() as other, pytest.raises(OSError):
            other.connect(("127.0.0.2", port))


@for_each_row(
    "path", ["/../pyproject.toml", "/%2e%2e/config.yaml", "/page/app.js", "/api/../style.css"]
)
def test_no_path_leads_out_of_the_page(client, path):
    assert client.request(path)[0] == 404


# --- what is read, and that nothing is written


def test_showing_a_run_changes_nothing_in_it(run, client):
    before = snapshot(run)
    for path in ("overview", "metrics", "rollouts", "problems", "evaluations"):
        client.get(path, run="first")
    client.get("group", run="first", step=1, group=rows_of(run)[0]["group_id"])
    client.get("evaluation", run="first", step=4)
    assert snapshot(run) == before


def test_the_metrics_are_those_of_the_file(run, client):
    found = client.get("metrics", run="first")
    records = read_metrics(run / "metrics.jsonl")
    assert found["steps"] == [0, 1, 2, 3, 4]
    for record in records:
        at = found["steps"].index(record["step"])
        for name, value in record.items():
            if name != "step":
                assert found["columns"][name][at] == pytest.approx(value, rel=1e-6)
    assert found["summary"]["state"] == "finished"
    assert (found["summary"]["data"], found["summary"]["held_out"]) == ("sums", "sums")
    assert "optim.lr" not in found["summary"]
    assert client.get("metrics", run="first", version=found["version"])["unchanged"]


def test_a_half_written_last_line_is_left_out_and_a_new_one_shown(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    files = RunReader("copy", copy)
    whole = files.metrics()["steps"]
    append_bytes(copy / "metrics.jsonl", b'{"step": 5, "reward/me')
    assert files.metrics()["steps"] == whole
    append_bytes(copy / "metrics.jsonl", b'an": 0.5}\n')
    assert files.metrics()["steps"] == [*whole, 5]
    assert files.metrics()["columns"]["reward/mean"][-1] == 0.5
    append_bytes(copy / "metrics.jsonl", b"nonsense\n")
    assert "expected an object" in files.metrics()["problem"]


def copy_of(run: Path, target: Path, *, summary: bool = False) -> RunDirectory:
    """A copy of a run as its process left it, or as it was before it wrote its summary."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints"))
    if not summary:
        (target / "summary.json").unlink()
    return RunDirectory(target)


def shown_as(run: RunDirectory) -> dict[str, Any]:
    """The summary of a run on the page, which has the state and the time left that `dapo status`
    reports.
    """
    found = RunReader("copy", run.path).summary()
    status = run_status(run.path)
    assert (found["state"], found["note"]) == (status.state, status.exit_reason)
    assert (found["steps"], found["num_steps"]) == (status.step, status.num_steps)
    assert found["seconds_left"] == pytest.approx(status.seconds_left)
    return found


def test_a_live_run_is_shown_as_running_with_the_steps_of_its_lock_and_its_time_left(run, tmp_path):
    copy = copy_of(run, tmp_path / "copy")
    with copy.lock(24):
        live = shown_as(copy)
    assert (live["state"], live["num_steps"]) == ("running", 24)
    assert live["seconds_left"] > 0
    assert shown_as(copy)["state"] == "stopped"  # its process was killed


def test_a_budget_of_tokens_counts_in_the_time_left(run, tmp_path):
    copy = copy_of(run, tmp_path / "copy")
    spent = sum(record.get("rollout/tokens_generated", 0) for record in read_metrics(copy.metrics))
    budget = ["train.num_steps=1000", f"train.token_budget={int(spent * 1.5)}"]
    copy.config.write_text(dump_config(load_config(copy.config, budget)))
    with copy.lock(1000):
        assert (
            0
            < shown_as(copy)["seconds_left"]
            < 1000
            * 0.01
            * sum(record.get("time/step_s", 0) for record in read_metrics(copy.metrics))
        )


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("finished", "finished"),
        ("solved", "solved"),
        ("interrupted: stopped by SIGINT", "stopped"),
        ("CheckpointError: the disk is full", "failed"),
    ],
)
def test_an_ended_run_is_shown_as_it_ended(run, tmp_path, reason, state):
    copy = copy_of(run, tmp_path / "copy")
    close_with(copy.path, reason)
    found = shown_as(copy)
    assert (found["state"], found["note"], found["seconds_left"]) == (state, reason, None)


def test_runs_are_found_by_path_or_in_a_folder_and_have_names_of_their_own(run, tmp_path):
    for folder in ("a", "b"):
        shutil.copytree(
            run,
            tmp_path / folder / "same",
            ignore=shutil.ignore_patterns("checkpoints", "rollouts"),
        )
    assert list(Runs([tmp_path / "a", tmp_path / "b" / "same"]).runs) == ["same", "same.2"]
    with pytest.raises(CheckpointError, match="no run directory"):
        Runs([tmp_path / "c"])


def test_runs_that_begin_after_the_page_are_found_and_keep_their_names(run, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    with serving(folder, run) as client:
        assert client.get("runs") == ["first"]
        late = folder / "first"
        shutil.copytree(run, late, ignore=shutil.ignore_patterns("checkpoints", "config.yaml"))
        assert client.get("runs") == ["first"]  # it has no options yet
        shutil.copy(run / "config.yaml", late)
        assert client.get("runs") == ["first.2", "first"]
        assert [each["path"] for each in client.get("overview")["runs"]] == [str(late), str(run)]
        assert client.get("metrics", run="first.2")["steps"] == [0, 1, 2, 3, 4]
        shutil.rmtree(folder)
        assert client.get("runs") == ["first.2", "first"]
        assert [each["state"] for each in client.get("overview")["runs"]] == ["damaged", "finished"]


# --- the table of responses


def accepts(row: dict[str, Any], **wanted: Any) -> bool:
    """The filter once more, in plain Python."""
    verdict = (
        "error"
        if row["error"]
        else {True: "correct", False: "wrong", None: "score"}[row["correct"]]
    )
    return (
        wanted.get("first_step", 0) <= row["step"] <= wanted.get("last_step", 99)
        and wanted.get("min_tokens", 0) <= row["response_tokens"] <= wanted.get("max_tokens", 99)
        and ("outcomes" not in wanted or row["outcome"] in wanted["outcomes"].split(","))
        and ("verdicts" not in wanted or verdict in wanted["verdicts"].split(","))
        and wanted.get("problem", row["problem_id"]) == row["problem_id"]
        and wanted.get("text", "").lower() in row["response"].lower()
    )


@for_each_row(
    "wanted",
    [
        {},
        {"first_step": 2, "last_step": 3},
        {"outcomes": "trained"},
        {"outcomes": "all_correct,all_wrong", "verdicts": "wrong"},
        {"verdicts": "correct", "min_tokens": 4, "max_tokens": 7},
        {"text": "a"},
        {"text": "A", "verdicts": "wrong", "first_step": 2},
        {"text": "no model writes this"},
    ],
)
def test_a_filter_finds_exactly_the_responses_that_pass_it(run, client, wanted):
    expected = [row for row in rows_of(run) if accepts(row, **wanted)]
    found = client.get("rollouts", run="first", limit=200, sort="oldest", **wanted)
    while found["steps_left"]:
        found = client.get("rollouts", run="first", limit=200, sort="oldest", **wanted)
    assert found["total"] == len(expected)
    names = ("step", "group_id", "sample", "response", "outcome")
    assert [[row[name] for name in names] for row in found["rows"]] == [
        [row[name] for name in names] for row in expected
    ]


def test_pages_hold_each_response_once_in_every_order(run, client):
    for sort in ("spread", "newest", "longest", "worst"):
        pages = [
            client.get("rollouts", run="first", limit=7, offset=at, sort=sort)
            for at in range(0, 200, 7)
        ]
        keys = [
            (row["step"], row["group_id"], row["sample"]) for page in pages for row in page["rows"]
        ]
        assert sorted(keys) == sorted(
            (row["step"], row["group_id"], row["sample"]) for row in rows_of(run)
        )
    longest = client.get("rollouts", run="first", sort="longest", limit=200)["rows"]
    assert [row["tokens"] for row in longest] == sorted(
        (row["tokens"] for row in longest), reverse=True
    )


def test_by_spread_the_groups_come_as_a_plain_loop_ranks_them(run, client):
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows_of(run):
        groups.setdefault((row["step"], row["group_id"]), []).append(row)

    def rank(key: tuple[int, int]) -> tuple[float, ...]:
        rows = groups[key]
        has_trained = rows[0]["outcome"] == "trained"
        is_mixed = has_trained and len({row["correct"] for row in rows}) == 2
        variance = pvariance([row["reward"] for row in rows if row["reward"] is not None] or [0])
        # of equal groups the newest, in the order of the stream
        return -has_trained, -is_mixed, -round(variance, 9), -key[0], key[1]

    found = client.get("rollouts", run="first", limit=200)["rows"]
    keys = list(dict.fromkeys((row["step"], row["group_id"]) for row in found))
    assert keys == sorted(groups, key=rank)[: len(keys)]
    assert len(keys) > 10


@for_each_row(
    ("given", "problem"),
    [
        ({"first_step": "x"}, "first_step must be an integer"),
        ({"first_step": "9" * 30}, "out of range"),
        ({"outcomes": "trained') OR true --"}, "outcomes must be some of"),
        ({"sort": "tokens; DROP TABLE files"}, "sort must be some of"),
        ({"limit": 100_000}, "limit from 1 to 200"),
        ({"offset": -1}, "offset must be at least 0"),
    ],
)
def test_a_parameter_that_is_not_understood_is_refused_in_one_sentence(client, given, problem):
    query = "&".join(
        f"{name}={value}" for name, value in {"run": "first", **given}.items()
    ).replace(" ", "%20")
    status, _, body = client.request(f"/api/rollouts?{query}")
    assert status == 400
    assert problem in json.loads(body)["error"]


def test_an_unknown_run_group_or_evaluation_is_not_found(client):
    for path in (
        "rollouts?run=nobody",
        "group?run=first&step=1&group=999",
        "evaluation?run=first&step=3",
    ):
        status, _, body = client.request(f"/api/{path}")
        assert status == 404
        assert json.loads(body)["error"]


def test_a_group_has_its_rewards_advantages_and_probabilities(run, client):
    row = next(row for row in rows_of(run) if row["outcome"] == "trained")
    stored = [
        r for r in rows_of(run) if (r["step"], r["group_id"]) == (row["step"], row["group_id"])
    ]
    group = client.get("group", run="first", step=row["step"], group=row["group_id"])
    assert [each["reward"] for each in group["responses"]] == [each["reward"] for each in stored]
    assert [each["advantage"] for each in group["responses"]] == [
        each["advantage"] for each in stored
    ]
    from math import exp

    for shown, each in zip(group["responses"], stored, strict=True):
        assert shown["probabilities"] == pytest.approx(
            [exp(p) for p in each["engine_logprobs"]], abs=1e-4
        )


def test_a_group_of_episodes_has_their_turns_and_observed_tokens(episode_run):
    stored = rows_of(episode_run)
    assert max(len(row["sampled"] or ()) for row in stored) >= 4  # one with two turns
    with serving(episode_run) as client:
        listed = {
            (row["group_id"], row["sample"]): row
            for row in client.get("rollouts", run="episodes")["rows"]
        }
        for row in stored:
            group = client.get("group", run="episodes", step=1, group=row["group_id"])
            shown = group["responses"][row["sample"]]
            episode = json.loads(row["episode"])
            assert [(each["role"], each["text"]) for each in shown["turns"]] == [
                (message["role"], message["content"]) for message in episode["messages"]
            ]
            turns = [each for each in shown["turns"] if each["role"] == "assistant"]
            assert [each["reward"] for each in turns] == episode["rewards"]
            observed = len(row["response_ids"]) - row["response_tokens"]
            assert (shown["episode"]["turns"], shown["observed_tokens"]) == (len(turns), observed)
            # of Echo: its last answer with `done`, and nothing from `end`
            is_cut = shown["episode"]["is_cut"]
            assert shown["episode"]["ending"][:3] == ("" if is_cut else "3: ")
            assert group["environment_seed"] == str(
                environment_seed(load_config(episode_run / "config.yaml").train.seed, problem(row))
            )
            assert listed[row["group_id"], row["sample"]]["turns"] == len(turns)
            if shown["sampled"] is not None:  # each turn is one range of sampled tokens
                ranges = "".join(map(str, map(int, shown["sampled"]))).split("0")
                assert len([each for each in ranges if each]) == len(turns)


def test_a_group_leads_to_the_ones_before_and_after_it_in_its_step(run, client):
    ids = list(dict.fromkeys(row["group_id"] for row in rows_of(run) if row["step"] == 2))
    assert len(ids) > 1
    found = [client.get("group", run="first", step=2, group=group) for group in ids]
    assert [group["next"] for group in found] == [*ids[1:], None]
    assert [group["previous"] for group in found] == [None, *ids[:-1]]


def test_a_group_is_what_explain_says_of_it(run, client):
    for step, group in sorted({(row["step"], row["group_id"]) for row in rows_of(run)}):
        shown = client.get("group", run="first", step=step, group=group)
        expected = json.loads(to_json(explain_group(run, step, group)))
        for response, each in zip(shown.pop("responses"), expected.pop("responses"), strict=True):
            changed = {"response_ids", "engine_logprobs", "sampled"}
            kept = {name: value for name, value in each.items() if name not in changed}
            assert {name: response[name] for name in kept} == kept
        assert {name: shown[name] for name in expected} == expected


def test_the_texts_of_tokens_make_up_the_response():
    from dapo.analysis.view.queries import TokenTexts

    tokens = TokenTexts("tiny-random")
    assert tokens.wait() == "ready"
    assert tokens.texts([]) == []
    ids = tokens._tokenizer.encode("12 + 3 = 15", add_special_tokens=False)
    assert "".join(tokens.texts(ids)) == "12 + 3 = 15"
    assert len(tokens.texts(ids)) == len(ids)
    absent = TokenTexts("nobody/has-this-model")
    assert "is not on this machine" in absent.wait()


def test_tokens_have_texts_without_the_model_that_trained_on_this_machine(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    model, tokenizer = tiny_random(torch.float32)
    write_model_directory(model.named_parameters(), model, tokenizer, folder)
    run = make_run(tmp_path / "run", f"model.name={folder}", "train.num_steps=1", "data.eval=null")
    shutil.rmtree(folder)
    for name in ("HOME", "HF_HOME", "DAPO_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "another"))
    row = rows_of(run)[0]
    with serving(run) as client:
        tokens = "loading"
        while tokens == "loading":
            group = client.get("group", run="run", step=row["step"], group=row["group_id"])
            tokens = group["tokens"]
    assert tokens == "ready"
    assert "".join(group["responses"][0]["tokens"]).startswith(group["responses"][0]["response"])


# --- the pages of one run


def test_options_are_marked_where_they_differ_from_the_default_under_the_preset(tmp_path):
    run = tmp_path / "run"
    options = ("loss.kl_coef=0.001", "loss.clip_high=0.3", "optim.warmup_steps=20")
    RunDirectory.create(run, dump_config(tiny(*SHORT, "preset=grpo", *options)), {})
    with serving(run) as client:
        found = client.get("options", run="run")
    rows = {row["name"]: row for row in found["rows"]}
    assert found["preset"] == "grpo"
    assert set(rows) == set(flat_options(load_config(run / "config.yaml")))
    assert (rows["loss.clip_high"]["value"], rows["loss.clip_high"]["default"]) == (0.3, 0.2)
    for name in ("loss.kl_coef", "loss.clip_low", "optim.warmup_steps", "optim.betas"):
        assert rows[name]["value"] == rows[name]["default"], name
    assert (rows["data.train.size"]["value"], rows["data.train.size"]["default"]) == (12, None)
    assert all(
        row["meaning"]
        for name, row in rows.items()
        if name.startswith(("loss.", "train.", "optim."))
    )


def test_findings_are_those_of_the_doctor(run, client):
    assert client.get("findings", run="first") == json.loads(to_json(diagnose(run).to_json()))


def test_the_log_of_the_verifier_is_shown_from_its_end(tmp_path):
    aloud = "reward.verifier=helpers.reward_functions:digits_aloud"
    run = make_run(tmp_path / "run", aloud, "train.num_steps=1", "data.eval=null")
    log = RunDirectory(run).verifier_log
    with serving(run) as client:
        found = client.get("log", run="run", file="verifier.log")
        assert found == {
            "files": ["console.log", "verifier.log"],
            "file": "verifier.log",
            "text": log.read_text(),
            "left_out": 0,
        }
        append_bytes(log, b"x" * 300_000 + b"the end")
        found = client.get("log", run="run", file="verifier.log")
        assert found["text"].endswith("the end")
        assert found["left_out"] == log.stat().st_size - 200_000
        # without a name: the console's lines, which name the first line that the verifier printed
        console = client.get("log", run="run")
        assert console["file"] == "console.log"
        assert "the verifier prints: 'judged" in console["text"]
        for name in ("../config.yaml", "absent.log"):
            assert client.request(f"/api/log?run=run&file={name}")[0] == 404


def test_a_run_without_a_log_has_none(run, tmp_path):
    shutil.copytree(run, tmp_path / "older", ignore=shutil.ignore_patterns("logs"))
    with serving(tmp_path / "older") as client:
        found = client.get("log", run="older")
    assert found == {"files": [], "file": None, "text": "", "left_out": 0}


# --- the index follows the files


def test_the_index_follows_new_changed_removed_and_damaged_tables(run, tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    tables = sorted(run.glob("rollouts/*.parquet"))
    counts = [pq.read_metadata(path).num_rows for path in tables]
    index = RolloutIndex(folder)
    assert index.state()["responses"] == 0
    for path in tables[:3]:
        shutil.copy(path, folder)
    index.wait()
    assert index.page(Filter())["total"] == sum(counts[:3])
    first = pq.read_table(tables[0]).to_pylist()
    write_rollouts(folder / tables[0].name, first[:4])  # as a resumed run does
    (folder / tables[1].name).unlink()
    shutil.copy(tables[3], folder)
    (folder / "step_000009.parquet").write_bytes(b"PAR1 this is no table PAR1")
    (folder / ".step_000008.parquet.tmp").write_bytes(b"half")
    index.wait()
    assert index.page(Filter())["total"] == 4 + counts[2] + counts[3]
    assert [
        "step_000009.parquet is damaged" in problem for problem in index.state()["problems"]
    ] == [True]
    index.close()


def test_the_index_of_a_long_run_is_kept_and_used_again(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dapo.runs.rollout_database.KEPT_FROM_STEPS", 2)
    before = snapshot(run)
    first = RolloutIndex(run / "rollouts")
    first.wait()
    total = first.page(Filter())["total"]
    second = RolloutIndex(run / "rollouts")  # the kept one is in use: it works in memory
    second.wait()
    assert second.page(Filter())["total"] == total
    second.close()
    first.close()
    third = RolloutIndex(run / "rollouts")
    assert third._one("SELECT count(*) FROM responses")[0] == total
    third.close()
    assert snapshot(run) == before


def test_a_kept_index_that_is_damaged_is_made_again_in_memory(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dapo.runs.rollout_database.KEPT_FROM_STEPS", 2)
    index = RolloutIndex(run / "rollouts")
    index.wait()
    total = index.page(Filter())["total"]
    index.close()
    (kept,) = (tmp_path / "cache" / "view").iterdir()
    kept.write_bytes(b"this is no database" * 1000)
    index = RolloutIndex(run / "rollouts")
    index.wait()
    assert index.page(Filter())["total"] == total > 0
    index.close()


def test_questions_to_an_index_that_is_being_filled_count_whole_files(run, tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    table = sorted(run.glob("rollouts/*.parquet"))[0]
    size = pq.read_metadata(table).num_rows
    for step in range(1, 65):
        shutil.copy(table, folder / f"step_{step:06d}.parquet")
    index = RolloutIndex(folder)
    index.state()  # reads the first files, and begins with the others
    counts = []
    while not counts or counts[-1] < 64 * size:
        counts.append(index._one("SELECT count(*) FROM responses")[0])
    index.close()
    assert counts == sorted(counts)
    assert {count % size for count in counts} == {0}


def test_a_supervised_run_waits_for_no_responses(tmp_path):
    config = tiny("preset=sft", "data.demonstrations=sft.jsonl")
    RunDirectory.create(tmp_path / "sft", dump_config(config), {})
    note = missing_rollouts(ViewedRun(RunReader("sft", tmp_path / "sft")))
    assert note is not None
    assert note.startswith("This run samples no responses")


def test_problems_are_counted_as_a_plain_loop_counts_them(run, client):
    rates: dict[str, list[bool]] = {}
    for row in rows_of(run):
        if row["outcome"] not in ("excess", "aborted"):
            rates.setdefault(row["problem_id"], []).append(row["correct"])
    found = client.get("problems", run="first", limit=200)
    assert {row["problem_id"]: (row["correct"], row["decided"]) for row in found["rows"]} == {
        problem: (sum(correct), len(correct)) for problem, correct in rates.items()
    }
    assert found["counts"].get("never", 0) == sum(not any(correct) for correct in rates.values())
    assert found["counts"].get("always", 0) == sum(all(correct) for correct in rates.values())


# --- evaluations


def test_a_report_holds_a_group_however_large_its_groups_are(run, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_GROUP_BYTES", 1)
    found = report.write_report(run, tmp_path / "report.html")
    assert found["groups"] == 1
    assert found["of_groups"] > 1


def test_a_report_cuts_the_calls_of_an_agent_as_it_cuts_a_response():
    long = 10_000 * "x"
    call = {"text": long, "tool_calls": [long], "messages": [{"text": long}], "context": [long]}
    calls = [dict(call, messages=[{"text": long}]) for _ in range(3)] + [dict(call, context=["y"])]
    response = {"response": long, "turns": None, "calls": calls}
    report.shorten_texts(response)
    assert len(to_json(response)) < 4 * report.MAX_TEXT + 1000
    assert [call["context"] for call in calls] == [None, None, None, ["y"]]
    assert calls[0]["text"].endswith("x...")


def test_two_evaluations_are_paired_by_problem(run, client):
    tables = [
        {
            row["id"]: row["accuracy"]
            for row in client.get("evaluation", run="first", step=s)["table"]
        }
        for s in (0, 4)
    ]
    differences = [tables[1][problem] - tables[0][problem] for problem in tables[0]]
    found = client.get("paired", a_run="first", a_step=0, b_run="first", b_step=4)
    assert found["difference"] == pytest.approx(sum(differences) / len(differences))
    assert found["better"] == sum(each > 0 for each in differences)
    assert len(found["table"]) == len(differences)


def test_the_page_refuses_to_pair_what_dapo_compare_refuses(run, tmp_path):
    other = tmp_path / "other"
    copy_judged(run, other, temperature=0.1)
    with serving(run, other) as client:
        status, _, body = client.request("/api/paired?a_run=first&a_step=0&b_run=other&b_step=4")
    assert status == 404
    assert json.loads(body) == {"error": "temperature is 1.0 in one and 0.1 in the other"}
    assert "temperature is 1.0 in one and 0.1 in the other" in " ".join(
        compare_runs(run, other).notes
    )
