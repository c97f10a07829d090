"""`make gpu-acceptance`: all that a CPU can check of it, and how its checks end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from typing import Any

import acceptance_checks
import pytest

from benchmarks.acceptance.engines import equal_share, rounded_share
from benchmarks.acceptance.report import without_names
from benchmarks.compute_limits import memory_limit_tokens_per_s
from benchmarks.gpu_acceptance import CHECKS, main, run_checks
from dapo.types import Generation
from helpers.paths import ROOT

ONLY_ON_GPUS = {"kernels", "memory", "syncs", "vllm"}


def json_of(report: str) -> dict[str, Any]:
    """The JSON at the end of a report."""
    return json.loads(report.rpartition("```json\n")[2].removesuffix("\n```\n"))


@pytest.mark.timeout(600)
def test_all_that_a_cpu_can_check_passes_and_the_report_names_no_folder(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_acceptance",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "report.md"),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    environment.pop("VLLM_PYTHON", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590
    )
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + report
    found = json_of(report)
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert statuses == {c.name: "skipped" if c.name in ONLY_ON_GPUS else "pass" for c in CHECKS}
    for check in found["checks"]:
        assert check["reason"] if check["status"] == "skipped" else check["measurements"], check[
            "name"
        ]
        # at the end of every comparison there is a bound that a wrong computation would break
        bounds = [
            m
            for m in check["measurements"]
            if m["at_most"] is not None or m["at_least"] is not None
        ]
        assert bounds or check["name"] in ONLY_ON_GPUS | {"speed"}, check["name"]
    assert found["environment"]["torch"]
    for private in (str(ROOT), str(tmp_path), str(Path.home()) + "/", gethostname()):
        assert private not in report


def test_a_check_that_fails_in_any_way_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "report.md"
    assert run_checks(acceptance_checks.ALL, "cpu", {"torch": "2"}, out=out) == 1
    report = out.read_text(encoding="utf-8")
    found = {check["name"]: check for check in json_of(report)["checks"]}
    assert {name: check["status"] for name, check in found.items()} == {
        "raises": "fail",
        "dies": "fail",
        "hangs": "fail",
        "skips": "skipped",
        "not_finite": "fail",
        "beyond": "fail",
        "within": "pass",
    }
    assert "ValueError: no file" in found["raises"]["reason"]
    assert found["raises"]["log_tail"] == ["what a library prints"]
    assert found["dies"]["reason"] == "the process ended with exit code 7 and without a result"
    assert found["hangs"]["reason"] == "no result within 1 s"
    assert found["skips"]["reason"] == "there is one GPU"
    assert "hf_abcdefghij" not in report
    assert str(Path.home() / "models") not in report
    assert "| rise (of 3 steps) | 0.09 | at least 0.1 | **FAIL** |" in report
    assert "| gap | 0.5 nats | at most 0.5 | pass |" in report
    assert "beyond" in capsys.readouterr().out


def test_checks_that_pass_or_are_skipped_are_no_failure(tmp_path: Path):
    good = [check for check in acceptance_checks.ALL if check.name in ("within", "skips")]
    assert run_checks(good, "cpu", {}, out=tmp_path / "report.md") == 0


def test_folders_in_a_report_lose_what_is_before_their_last_name():
    text = f"{ROOT}/src/x.py, {Path.home()}/a/b, '/data/models/qwen/config.json': 3 tokens/s"
    assert without_names(text) == "REPOSITORY/src/x.py, .../b, '.../config.json': 3 tokens/s"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/x/ci/src/a.py", "REPOSITORY/src/a.py"),
        ("in /home/x/ci.", "in REPOSITORY."),
        ("'/home/x/ci': (/home/x/ci)", "'REPOSITORY': (REPOSITORY)"),
        ("/home/x/cihome/a/b", ".../b"),
        ("/home/x/ci-2/b and /home/x/ci2", ".../b and .../ci2"),
        ("/mnt/home/x/ci/b, /home/x/ci.old/b", ".../b, .../b"),
    ],
)
def test_the_repository_is_recognized_as_a_folder_not_as_text(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
):
    monkeypatch.setattr("benchmarks.acceptance.report.ROOT", Path("/home/x/ci"))
    assert without_names(text) == shown


def test_memory_limits_decoding_by_the_weights_once_and_each_rows_cache():
    # 3 TB/s, 3 GB of weights, 100 rows of 30 MB: 6 GB a step, 500 steps a second
    assert (
        memory_limit_tokens_per_s(3000, rows=100, weight_bytes=3 * 10**9, cache_bytes_per_row=3e7)
        == 50_000
    )


def test_the_list_names_every_check_and_runs_none(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        check.name for check in CHECKS
    ]


def test_a_response_that_leaves_for_a_neighbour_in_the_vocabulary_is_equal_but_for_rounding():
    def answered(*tokens: int) -> Generation:
        return Generation("0/0", tokens, (-1.0,) * len(tokens), "length", 0)

    expected = [answered(5, 6, 7)] * 4
    found = [answered(5, 6, 7), answered(5, 7, 90), answered(5, 5, 7), answered(5, 8, 7)]
    assert equal_share(found, expected) == 0.25
    assert rounded_share(found, expected) == 0.75
