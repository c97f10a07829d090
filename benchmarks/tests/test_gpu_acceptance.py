"""`make gpu-acceptance`: all that a CPU can check of it, and how its checks end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from typing import Any

import acceptance_checks
import pytest
import torch
from acceptance_engine import PLANTED, TOTAL_GIB, PretendedGpu, SharingEngine
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.acceptance.check import Measurement, Setting
from benchmarks.acceptance.correctness import check_gradients
from benchmarks.acceptance.engines import equal_share, rounded_share, sampling_requests
from benchmarks.acceptance.models import ragged_samples
from benchmarks.acceptance.numbers_file import read_results
from benchmarks.acceptance.observed import LastLoad, Observed
from benchmarks.acceptance.processes import loaded_model, run_config, vocabulary_of
from benchmarks.acceptance.references import FILE, SKETCH, sketch
from benchmarks.acceptance.report import without_names
from benchmarks.acceptance.vllm_cycles import CYCLES, measure_cycles
from benchmarks.compute_limits import memory_limit_tokens_per_s
from benchmarks.gpu_acceptance import CHECKS, TOTAL_S, chosen_checks, main, run_checks
from benchmarks.make_references import all_references, write_references
from dapo.config.rollout_options import NativeConfig
from dapo.engines.native.engine import NativeEngine
from dapo.policy.policy import Policy
from dapo.types import Generation
from helpers.paths import ROOT
from helpers.tables import for_each_row

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


def lines_of(report: Path) -> list[dict[str, Any]]:
    """The file of numbers beside a report."""
    text = report.with_suffix(".jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_number_has_its_line_and_a_later_call_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "report.md"
    stages = {check.name: check for check in acceptance_checks.STAGES}
    # the second is ended after two of its numbers, and the third would end too late
    assert run_checks([*stages.values()], "cuda", {"GPUs": "H100"}, out=out, total_s=61) == 1
    assert "not begun: within; --from within goes on" in capsys.readouterr().out
    numbers = [(line["stage"], line["value"]) for line in lines_of(out) if "value" in line]
    assert numbers == [("begins", 0.0), ("counts", 1.0), ("counts", 2.0)]
    assert lines_of(out)[-1]["status"] == "fail"
    found = {check["name"]: check for check in json_of(out.read_text())["checks"]}
    assert [m["value"] for m in found["counts"]["measurements"]] == [1.0, 2.0]
    assert found["within"]["status"] == "not begun"

    earlier = read_results(out.with_suffix(".jsonl"), "cuda", {"GPUs": "H100"})
    machine = {"GPUs": "H100"}
    assert (
        run_checks([stages["within"]], "cuda", machine, out=out, earlier=earlier, goes_on=True) == 1
    )
    found = {check["name"]: check for check in json_of(out.read_text())["checks"]}
    assert [(name, check["status"]) for name, check in found.items()] == [
        ("begins", "pass"),
        ("counts", "fail"),
        ("within", "pass"),
    ]
    assert [line["stage"] for line in lines_of(out) if "status" in line] == [*stages]
    with pytest.raises(ValueError, match="another GPUs: H100, and here it is L4"):
        read_results(out.with_suffix(".jsonl"), "cuda", {"GPUs": "L4"})


def test_the_stages_fit_a_call_of_ten_minutes_and_begin_where_they_are_told():
    assert sum(check.limit_s for check in CHECKS) <= TOTAL_S < 600
    names = [check.name for check in CHECKS]
    assert [check.name for check in chosen_checks(None, "speed")] == names[names.index("speed") :]
    assert [check.name for check in chosen_checks(["ranks", "logprobs"], "vllm")] == ["ranks"]


@pytest.mark.skipif(not FILE.is_file(), reason="python -m benchmarks.make_references has not run")
def test_the_stored_references_are_of_todays_models_and_samples():
    keys = {reference.key for reference in all_references(on_gpu=True)}
    with safe_open(FILE, framework="pt") as file:
        stored = {name.rpartition("/")[0] for name in file.keys()}  # noqa: SIM118
    assert stored <= keys, "run python -m benchmarks.make_references"
    assert FILE.stat().st_size < 100_000


def test_a_check_compares_with_the_stored_references(tmp_path: Path):
    (reference,) = [
        each for each in all_references(on_gpu=False) if each.name == "gradients, heads of 64"
    ]
    file = tmp_path / "references.safetensors"
    write_references([reference], file)

    def error() -> float:
        (tmp_path / "work").mkdir()
        first = next(iter(check_gradients(Setting("cpu", tmp_path / "work", None, file))))
        shutil.rmtree(tmp_path / "work")
        return first.value

    assert 0 < error() < 0.05
    numbers = load_file(file)
    other = {k: -v if k.endswith("sketches") else v for k, v in numbers.items()}
    save_file(other, file)
    assert error() == pytest.approx(2, abs=0.1)
    # of other weights than those that are drawn here: computed again
    save_file(other | {f"{reference.key}/weights": torch.tensor(1)}, file)
    assert 0 < error() < 0.05


def test_sketches_keep_the_norm_of_a_difference():
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for shape in ((200, 896), (64, SKETCH * 3), (7,)):
        first, second = torch.randn(2, *shape, generator=generator)
        estimate = (sketch(first) - sketch(second)).norm()
        ratios.append(float(estimate / (first - second).norm()))
    assert ratios == pytest.approx([1, 1, 1], abs=0.25)


@pytest.fixture(scope="module")
def policy_parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_config(Setting("cpu", tmp_path_factory.mktemp("cycles")), dtype="bfloat16")


def cycles_of(config: Any, fault: str | None) -> list[Measurement]:
    """The numbers of the check of vLLM, of an engine with a fault."""
    loaded = loaded_model(config)
    policy = Policy(config, loaded)
    if fault == "the policy does not change":
        policy.update = lambda *_, **__: {}  # type: ignore[assignment]
    gpu = PretendedGpu(fault)
    engine = NativeEngine(loaded_model(config).model, NativeConfig(slots=8))
    vocabulary = vocabulary_of(loaded)
    numbers = measure_cycles(
        SharingEngine(engine, gpu),
        policy,
        sampling_requests(vocabulary, tokens=12)[:4],
        ragged_samples(vocabulary)[:3],
        count=CYCLES,
        observer=gpu,
        total_gib=TOTAL_GIB,
        clock=gpu.clock,
    )
    return list(numbers)


def kind(measurement: Measurement) -> str:
    """What was measured, whatever the cycle."""
    return measurement.what.rpartition(": ")[2]


def test_every_bound_of_the_check_of_vllm_has_a_planted_fault(policy_parts: Any):
    healthy = cycles_of(policy_parts, None)
    assert [m.what for m in healthy if not m.ok] == []
    bounded = {kind(m) for m in healthy if m.at_most is not None or m.at_least is not None}
    assert bounded == set().union(*PLANTED.values())


@for_each_row(("fault", "red"), PLANTED.items())
def test_a_fault_of_sleep_or_transfer_turns_its_number_red(
    policy_parts: Any, fault: str, red: set[str]
):
    assert {kind(m) for m in cycles_of(policy_parts, fault) if not m.ok} == red


def test_a_worker_says_how_its_weights_came():
    observed = Observed("acceptance_checks:Loaded", {})
    assert observed.last_load() == LastLoad("never", 0)
    observed.load_published(None)
    assert observed.last_load() == LastLoad("file", 1)
    for layout in ("layout", None, None):
        observed.receive_weights({"ipc_handles": {"GPU-1": 1}}, layout, None)
    assert observed.last_load() == LastLoad("ipc", 3)
    observed.receive_weights({"names": []}, "layout", 2)
    assert observed.last_load() == LastLoad("nccl", 1)


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
