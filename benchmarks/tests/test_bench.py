"""The benchmark's pure functions: limits, ratios, the table, and calls to worker processes."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

# the benchmarks are not part of the package: they are run from the repository's root
from benchmarks import (
    bench,
    compare,
    compilers,
    gsm8k,
    natural,
    op_categories,
    report,
    reward_noise,
    wheel_requirements,
)
from benchmarks.compute_limits import (
    heavy_tail_lengths,
    limit_tokens_per_s,
    share_of_limit,
    static_slot_steps,
)
from benchmarks.geometries import GEOMETRIES
from benchmarks.plots import Curve, plot_growth
from benchmarks.protocol import Worker, WorkerFailed
from benchmarks.random_models import byte_tokenizer, model_without_weights, write_random_model
from benchmarks.worker_session import Settings, rotated
from benchmarks.workers import vllm as vllm_worker
from benchmarks.workers.ours import Ours
from dapo.config import load_config
from dapo.policy.model import load_model
from helpers.paths import ROOT

ECHO = """
from benchmarks.protocol import serve
import time

def double(number):
    print("a library that prints")
    return {"number": 2 * number}

def fail():
    raise ValueError("no such thing")

def sleep():
    time.sleep(60)
    return {}

serve({"double": double, "fail": fail, "sleep": sleep})
"""


@pytest.fixture
def echo(tmp_path):
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    worker = Worker("echo", [sys.executable, "-c", ECHO], env=env, log=tmp_path / "echo.log")
    yield worker
    worker.kill()


def test_a_limit_is_the_matmul_rate_over_the_flop_of_a_token():
    # 200 GFLOP/s, 100 million parameters: 2e11 / 2e8 and 2e11 / 6e8
    assert limit_tokens_per_s(200.0, 100_000_000, 2) == 1000.0
    assert limit_tokens_per_s(200.0, 100_000_000, 6) == pytest.approx(333.333, abs=1e-3)
    assert share_of_limit(250.0, 200.0, 100_000_000, 2) == 0.25


def test_a_step_costs_the_flop_of_generating_and_of_training_a_token():
    assert compare.FLOP == {"generation": 2, "update": 6, "step": 8}


def test_a_static_batch_runs_until_its_longest_response_ends():
    # batches (3, 1), (2, 5) and a last one of a single row
    assert static_slot_steps([3, 1, 2, 5, 4], slots=2) == 2 * 3 + 2 * 5 + 1 * 4
    assert static_slot_steps([7, 7, 7], slots=3) == 21


def test_a_heavy_tail_starts_at_the_shortest_and_reaches_the_limit_with_its_share():
    # survival 1, 0.1 and 0.01: Pareto through (16, 1) and (1600, 0.01) has alpha = 1
    lengths = heavy_tail_lengths(
        [0.0, 0.9, 0.99, 0.999], shortest=16, limit=1600, share_at_limit=0.01
    )
    assert lengths[0] == 16
    assert lengths[1] in (159, 160)
    assert lengths[3] == 1600
    many = heavy_tail_lengths(
        [i / 1000 for i in range(1000)], shortest=16, limit=1600, share_at_limit=0.01
    )
    assert 9 <= sum(length == 1600 for length in many) <= 11


def test_a_ratio_is_taken_round_by_round_so_that_a_drift_of_the_machine_cancels():
    found = report.ratio([100.0, 50.0, 200.0], [50.0, 25.0, 100.0])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    # not the same rounds: the medians
    assert report.ratio([100.0, 50.0, 200.0], [50.0]).median == 2.0


def test_another_system_begins_in_every_round():
    assert [rotated(["a", "b", "c"], i) for i in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]


def test_on_a_gpu_the_work_fills_it_and_vllm_has_its_own_defaults():
    settings = bench.settings_of(bench.parse_arguments(["step", "--device", "cuda"]))
    assert (settings.prompts, settings.group, settings.tokens) == (64, 8, 256)
    assert (settings.dtype, settings.microbatch_tokens) == ("bfloat16", None)
    chosen = bench.settings_of(bench.parse_arguments(["--device", "cuda", "--dtype", "float32"]))
    assert chosen.dtype == "float32"
    assert bench.settings_of(bench.parse_arguments([])) == Settings()
    on_a_gpu = vllm_worker.arguments_of("m", "bfloat16", "cuda")
    assert not on_a_gpu.keys() & vllm_worker.ON_A_CPU.keys()
    assert vllm_worker.arguments_of("m", "bfloat16", "cpu")["enforce_eager"]


def test_a_comparison_on_a_gpu_refuses_opponents_without_vllm():
    lacking = {"trl": ["vllm"], "vllm": []}
    on_a_gpu = Settings(device="cuda")
    with pytest.raises(
        ValueError, match=r"\.venv-trl lacks vllm; `make bench-peers BENCH_DEVICE=cuda`"
    ):
        bench.require_peers(on_a_gpu, ["step"], lacking.__getitem__)
    bench.require_peers(on_a_gpu, ["longtail"], lacking.__getitem__)
    bench.require_peers(on_a_gpu, ["step"], lambda system: [])
    bench.require_peers(Settings(), ["step"], lacking.__getitem__)
    assert compare.TRL_ON_A_GPU["use_vllm"]


def test_random_models_have_qwens_sizes_and_a_token_for_every_byte(tmp_path):
    tokenizer = byte_tokenizer()
    billions = {
        name: sum(weight.numel() for weight in model_without_weights(sizes, tokenizer).parameters())
        / 1e9
        for name, sizes in GEOMETRIES.items()
    }
    assert billions == pytest.approx(
        {"qwen2-0.5b": 0.494, "qwen2-1.5b": 1.544, "qwen2-7b": 7.616}, abs=1e-3
    )
    text = "1 + 2 = 3\n\tä€"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    tiny = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "inner": 64, "vocabulary": 300}
    write_random_model(tmp_path / "model", tiny | {"is_tied": False})
    loaded = load_model(str(tmp_path / "model"), dtype=torch.bfloat16)
    assert loaded.stop_ids == (tokenizer.eos_token_id,)
    assert 0.1 < loaded.model.lm_head.weight.detach().float().std().item() * 32**0.5 < 1.5


def figure(name, system, values, **more):
    return {
        "name": name,
        "system": system,
        "values": values,
        "unit": "tokens/s",
        "better": "higher",
        **more,
    }


def results(figures, skipped=(), **part):
    measured = {
        "figures": figures,
        "skipped": list(skipped),
        "dtype": "float32",
        "date": "2026-01-02",
        "commit": "abc",
    }
    machine = {"cpu": "A Processor", "flags": ["avx2"], "cores": 2}
    return {"machine": machine, "parts": {"update": measured | part}}


def test_the_table_shows_medians_ratio_range_and_shares():
    ours = figure("update", "ours", [120.0, 100.0, 140.0], flop_per_parameter=6)
    trl = figure("update", "trl", [60.0, 40.0, 56.0], flop_per_parameter=6)
    rows = report.table_rows(
        results([ours, trl], gflops=[360.0, 300.0, 420.0], parameters=100_000_000)
    )
    assert rows == [
        (
            "update, tokens/s",
            "120 (100 to 140)",
            "56 (40 to 60)",
            "trl",
            "2.50 (2.00 to 2.50)",
            "20 %",
            "8 %",
        ),
    ]


def test_several_processors_are_columns_and_what_one_lacks_is_not_measured():
    ours = figure("update", "ours", [120.0], flop_per_parameter=6)
    trl = figure("update", "trl", [60.0], flop_per_parameter=6)
    vllm = figure("update", "vllm", [100.0])
    one = results([ours, trl], gflops=[360.0], parameters=100_000_000)
    header, _, *rows = report.processors_table(
        [one, results([figure("update", "ours", [50.0]), vllm])]
    ).split("\n")
    assert header.endswith("| opponent | A Processor: avx2, float32 | A Processor: avx2, float32 |")
    assert rows[0] == "| update, tokens/s | trl | 2.00; 20 %, 10 % | not measured |"
    assert rows[1] == "| update, tokens/s | vllm | not measured | 0.50 |"


def test_an_opponent_that_is_not_installed_is_a_row_with_its_reason():
    ours = figure("generation", "ours", [100.0])
    rows = report.table_rows(
        results([ours], [{"system": "vllm", "reason": "not installed; `make bench-peers`"}])
    )
    assert rows[1][3:5] == ("vllm", "skipped: not installed; `make bench-peers`")


def test_an_opponent_that_gave_up_is_a_bound_and_not_a_figure():
    ours = figure("seconds", "ours", [100.0]) | {"better": "lower", "unit": "s"}
    trl = figure("seconds", "trl", [1000.0], unfinished=True) | {"better": "lower", "unit": "s"}
    (row,) = report.table_rows(results([ours, trl]))
    assert row[2] == "at least 1,000"
    assert row[4] == "at most 0.10"
    (row,) = report.table_rows(results([ours | {"unfinished": True}, trl]))
    assert row[4] == "ours did not finish"


def test_the_table_replaces_the_text_between_the_markers_and_nothing_else():
    # a line that only names it is none
    after = f'after\npython -m benchmarks.report --marker "{report.MARKER}"\n'
    text = f"before\n{report.MARKER}\nold\n{report.MARKER}\n{after}"
    replaced = report.replace_between_markers(text, "new")
    assert replaced == f"before\n{report.MARKER}\nnew\n{report.MARKER}\n{after}"
    assert report.replace_between_markers(replaced, "new") == replaced
    with pytest.raises(ValueError, match="exactly two lines"):
        report.replace_between_markers("no marker", "new")


def test_a_part_measured_again_replaces_its_results_and_leaves_the_others(tmp_path):
    path = tmp_path / "cpu.json"
    part = {"figures": [figure("update", "ours", [1.0])], "dtype": "float32"}
    bench.write_results(path, {"update": part, "generation": part}, Settings())
    bench.write_results(path, {"update": part | {"figures": []}}, Settings())
    written = json.loads(path.read_text())
    assert list(written["parts"]) == ["generation", "update"]
    assert written["parts"]["update"]["figures"] == []
    assert written["parts"]["generation"]["figures"] == part["figures"]
    assert {"date", "commit", "settings"} <= written["parts"]["update"].keys()


def test_figures_of_another_machine_do_not_join_these(tmp_path):
    path = tmp_path / "cpu.json"
    bench.require_same_machine(path)  # none yet
    bench.write_results(path, {}, Settings())
    bench.require_same_machine(path)
    results = json.loads(path.read_text())
    path.write_text(
        json.dumps(results | {"machine": results["machine"] | {"cpu": "Another Processor"}})
    )
    with pytest.raises(
        ValueError,
        match=r"cpu\.json holds figures of another machine \(Another Processor, .*--name",
    ):
        bench.require_same_machine(path)


def test_parts_that_share_workers_are_measured_in_the_same_rounds():
    plan = bench.plan_of(["step", "growth", "generation"])
    assert [names for _, names in plan] == [["generation", "step"], ["growth"]]


def test_gsm8k_is_measured_where_its_files_are_given(tmp_path):
    names = {gsm8k.UPDATE, gsm8k.EVALUATION}
    assert not names & set(bench.parts_without_files(Settings()))
    assert names <= set(bench.parts_without_files(Settings(gsm8k=tmp_path)))
    with pytest.raises(ValueError, match="need --gsm8k FOLDER"):
        gsm8k.measure_update(SimpleNamespace(settings=Settings()))


def test_gsm8k_trains_the_stage_of_the_shipped_configuration_on_the_files(tmp_path):
    session = SimpleNamespace(settings=Settings(threads=1), folder=tmp_path)
    config = load_config(gsm8k.write_config(session, tmp_path))
    demonstrations = {
        "path": str(tmp_path / "train.jsonl"),
        "prompt": "question",
        "answer": "answer",
        "remove": "<<.*?>>",
    }
    assert config.data.demonstrations == demonstrations
    assert config.data.eval == {"path": str(tmp_path / "test.jsonl"), "size": gsm8k.PROBLEMS}
    assert (config.train.minibatch_groups, config.train.microbatch_tokens) == (32, 4096)
    assert (config.train.threads, config.eval.samples_per_problem) == (1, gsm8k.SAMPLES)


def test_an_evaluation_of_gsm8k_is_counted_in_tokens_and_in_responses_per_second():
    ours = {"seconds": 2.0, "tokens": 600, "responses": 8}
    vllm = {"seconds": 4.0, "tokens": 800, "responses": 8}
    figures = gsm8k.evaluation_figures([{"vllm": vllm, "ours": ours}])
    values = [(each["system"], each["unit"], each["values"]) for each in figures]
    assert values == [
        ("ours", "tokens/s", [300.0]),
        ("vllm", "tokens/s", [200.0]),
        ("ours", "responses/s", [4.0]),
        ("vllm", "responses/s", [2.0]),
        ("ours", "tokens", [75.0]),
        ("vllm", "tokens", [100.0]),
    ]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::addmm", "aten::linear"], op_categories.MATMULS),
        (["mkldnn::_linear_pointwise"], op_categories.MATMULS),
        (["mkl::_mkl_linear"], op_categories.MATMULS),
        (
            [
                "aten::bmm",
                "aten::_scaled_dot_product_attention_math",
                "aten::scaled_dot_product_attention",
            ],
            "attention",
        ),
        (["aten::mm", "_ScoreBackward"], op_categories.MATMULS),
        (["aten::mul_", "_ScoreBackward"], "log-softmax and entropy"),
        (["aten::add_", "torch::autograd::AccumulateGrad"], "gradients and optimiser"),
        (["aten::_fused_adamw_", "Optimizer.step#AdamW.step"], "gradients and optimiser"),
        (["aten::silu"], op_categories.OTHERS),
        (["cpu_kernels::decode"], op_categories.LAYERS),
    ],
)
def test_an_operation_is_of_a_kind_by_its_name_and_its_callers(names, kind):
    assert op_categories.kind_of(names) == kind


def test_what_no_operation_took_of_the_time_is_python():
    outer = SimpleNamespace(name="aten::linear", self_cpu_time_total=1e6, cpu_parent=None)
    inner = SimpleNamespace(name="aten::addmm", self_cpu_time_total=5e6, cpu_parent=outer)
    assert op_categories.seconds_by_kind([outer, inner], 10.0) == {
        op_categories.MATMULS: 5.0,
        op_categories.OTHERS: 1.0,
        op_categories.BETWEEN: 4.0,
    }


def test_forced_work_that_was_not_done_is_refused():
    with pytest.raises(ValueError, match="4095 tokens where 4096 were forced"):
        compare.require_tokens("trl", 4095, 4096)


def test_a_worker_answers_in_turn_whatever_its_libraries_print(echo):
    assert echo.ask("double", timeout_s=20, number=21) == {"number": 42}
    assert echo.ask("double", timeout_s=20, number=-1) == {"number": -2}
    echo.close()
    assert "a library that prints" in echo.log.read_text()


def test_an_error_in_a_worker_is_reported_with_the_path_of_its_output(echo):
    with pytest.raises(WorkerFailed, match=r"ValueError: no such thing.*echo\.log"):
        echo.ask("fail", timeout_s=20)


def test_a_worker_that_does_not_answer_is_ended(echo):
    assert echo.ask("double", timeout_s=20, number=1) == {"number": 2}
    with pytest.raises(WorkerFailed, match="no answer to sleep in time"):
        echo.ask("sleep", timeout_s=0.1)
    with pytest.raises(WorkerFailed):
        echo.ask("double", timeout_s=20, number=1)


def test_a_growth_curve_of_a_square_has_slope_two_and_becomes_a_small_picture(tmp_path):
    curve = Curve("update", "width", "seconds", [64, 128, 256], [1.0, 4.0, 16.0])
    assert curve.final_slope() == pytest.approx(2.0)
    assert plot_growth(tmp_path / "growth.png", [curve]).stat().st_size < 150_000


def test_our_worker_takes_a_step_and_says_what_it_cost():
    steps = []

    def end(step):
        steps.append(step)
        raise SystemExit

    ours = Ours(end)
    ours.open(str(ROOT / "configs" / "tiny.yaml"), ["train.threads=1"])
    with pytest.raises(SystemExit):
        ours.train()
    (step,) = steps
    assert step["generated_tokens"] >= step["trained_tokens"] > 0
    assert 0 < step["generation_s"] + step["update_s"] < step["step_s"]
    (problem,) = ours.rows(1)["rows"]
    of_run = next(each for each in ours.inputs.train if each.id == problem["id"])
    assert problem["prompt_ids"] == list(ours.run.sampling.encoder.encode(of_run))
    held_out = ours.held_out()
    evaluation = ours.evaluate()
    assert evaluation["responses"] == len(held_out["rows"]) > 0
    assert 0 < evaluation["tokens"] <= evaluation["responses"] * held_out["max_new_tokens"]
    ours.close()


@pytest.mark.parametrize(
    "work", [compare.Work(2, 4, 8), compare.Work(2, 4, 8, updates=2, forced=False)]
)
def test_the_options_of_the_compared_steps_are_options(work, tmp_path):
    problem = {"id": "1", "prompt": "1 + 1 = ?", "answer": "2"}
    session = SimpleNamespace(
        settings=Settings(),
        folder=tmp_path,
        start=lambda *_: None,
        ask=lambda *_, **__: {"rows": [problem, problem]},
    )
    minibatch = f"train.minibatch_groups={work.prompts // work.updates}"
    config = load_config(ROOT / compare.CONFIG, [*compare.step_options(session, work), minibatch])
    assert config.rollout.max_response_tokens == 8
    assert (config.data.eval is None) == work.forced


def natural_round(seconds, tokens, responses=4):
    return {"seconds": seconds, "tokens": tokens, "responses": responses}


def test_natural_lengths_are_compared_by_tokens_and_by_responses_per_second():
    ours = {
        "generation": natural_round(2.0, 40),
        "update": natural_round(4.0, 40),
        "step": natural_round(8.0, 40),
    }
    trl = {
        "generation": natural_round(4.0, 60),
        "update": natural_round(8.0, 60),
        "step": natural_round(16.0, 60),
    }
    figures = natural.figures([{"ours": ours, "trl": trl}])
    part = {
        "figures": figures,
        "skipped": [],
        "dtype": "float32",
        "date": "2026-01-02",
        "commit": "abc",
    }
    rows = report.table_rows({"machine": {}, "parts": {"natural": part}})
    assert [row[:5] for row in rows] == [
        ("generation, natural lengths, tokens/s", "20", "15", "trl", "1.33"),
        ("generation, natural lengths, responses/s", "2", "1", "trl", "2.00"),
        ("mean response of a step, tokens", "10", "15", "trl", "0.67"),
        ("update, natural lengths, tokens/s", "10", "7.5", "trl", "1.33"),
        ("update, natural lengths, responses/s", "1", "0.5", "trl", "2.00"),
        ("step, natural lengths, tokens/s", "5", "3.75", "trl", "1.33"),
        ("step, natural lengths, responses/s", "0.5", "0.25", "trl", "2.00"),
    ]


def test_a_system_that_trains_less_than_it_sampled_is_refused():
    work = {"generation": natural_round(2.0, 40), "update": natural_round(4.0, 39)}
    with pytest.raises(ValueError, match="trained 39 tokens of 40"):
        natural.require_responses("trl", work, 4, 9)
    with pytest.raises(ValueError, match="4 responses where 5 were asked for"):
        natural.require_responses("trl", work, 5, 9)


def test_requirements_leave_out_extras_and_what_is_named():
    declared = [
        "torch==2.13.0",
        "numpy",
        "Torch_Vision; python_version > '3.8'",
        "ray>=2; extra == 'ray'",
    ]
    assert wheel_requirements.requirements(declared, {"torch", "torch-vision"}) == ["numpy"]


def test_noise_weighs_as_much_as_signal_under_std_and_by_its_own_size_under_none():
    judged = reward_noise.groups(400, 16, 0.25, seed=1)
    without, with_signal = reward_noise.push(judged, "std")
    assert without == pytest.approx(with_signal, rel=0.03)
    without, with_signal = reward_noise.push(judged, "none")
    assert without / with_signal == pytest.approx(0.25 / (1 + 0.25**2) ** 0.5, rel=0.1)


def test_a_spread_of_six_standard_deviations_of_the_judge_keeps_groups_by_signal():
    judged = reward_noise.groups(400, 16, 0.25, seed=1)
    # Eq. 11 alone tells nothing: all scores differ
    assert len(reward_noise.kept(judged, 0.0)) == 400
    kept = reward_noise.kept(judged, 6 * 0.25)
    assert sum(group.has_signal for group in kept) >= 198
    assert sum(not group.has_signal for group in kept) <= 2
    assert reward_noise.agreement(kept, "std") > 0.9 > 0.7 > reward_noise.agreement(judged, "std")


@pytest.mark.parametrize("way", ["PyTorch", "C++ extension"])
def test_ways_to_compile_compute_the_same(way: str):
    threads = torch.get_num_threads()
    try:
        found = compilers.measure(way, threads=1)
    finally:
        torch.set_num_threads(threads)
    assert found["error"] < 1e-5
    assert found["equal"] > 0.95
    assert found["repeats"] == 1
