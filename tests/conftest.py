"""Fixtures of all tests, and the order of files in `make test`."""

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers import zygote

# fixtures of finished runs, which import torch when a test asks for them
from helpers.finished_runs import (  # noqa: F401
    async_run,
    episode_run,
    finished_folder,
    lora_run,
    sync_run,
)
from helpers.fork_server import ForkServer
from helpers.forked_workers import WorkerForks
from helpers.launchers import SHARED_WORKERS
from helpers.undrawn_curves import undrawn_curves

# vLLM's environment has none; after `gc.freeze`, which a run calls, it cannot be imported
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # the same examples on every machine, however busy it is
    settings.register_profile(
        "dapo", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("dapo")

SLOW_FILES = (
    "system/test_contributing.py",
    "distributed/test_trainer_group.py",
    "code_sandbox/test_code_tests.py",
    "distributed/test_engine_pool.py",
    "training/test_asynchronous.py",
    "start/test_fork.py",
    "training/test_train.py",
    "environments/test_runs.py",
    "training/test_ppo.py",
    "policy/test_update.py",
    "analysis/test_view_browser.py",
    "system/test_kills.py",
    "contracts/test_engine_contract.py",
    "rewards/test_hostile_verifiers.py",
    "policy/test_fsdp.py",
    "policy/test_model.py",
    "code_sandbox/test_probing.py",
    "api/test_python_runs.py",
    "system/test_isolation.py",
    "system/test_durability.py",
    "training/test_divergence.py",
    "rewards/test_verifier_pool.py",
    "cli/test_start.py",
    "system/test_fake_cuda.py",
)
"""The files that take longest.

`make test` starts with them, so that none is left to run alone at the end.
"""

FOLDERS_OF_RUNS = ("analysis", "api", "cli", "evaluation", "sampling", "start", "training")


def pytest_collection() -> None:
    """Collect no garbage while tests are collected: that takes a third of the time, and finds none."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slow files first, in the order above, where pytest-xdist runs several processes."""
    if hasattr(config, "workerinput"):
        order = {config.rootpath / "tests" / name: number for number, name in enumerate(SLOW_FILES)}
        items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """Collect garbage again, but none of the modules and tests that stay until the end."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of compiled kernels where this installation has none for this processor."""
    if item.get_closest_marker("needs_kernels") is None:
        return
    from dapo.libs.cpu_kernels import is_compiled  # imports torch

    if not is_compiled():
        pytest.skip(
            "this installation has no compiled cpu_kernels for this processor (no C++ compiler?)"
        )


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Run `dapo` commands in forks of one process, which has imported torch once."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def _worker_forks() -> Iterator[WorkerForks]:
    forks = WorkerForks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def forked_workers(_worker_forks: WorkerForks) -> Iterator[None]:
    """Fork all workers, which otherwise import their modules anew, in this module."""
    with _worker_forks.stand_in():
        yield


@pytest.fixture
def worker_forks(_worker_forks: WorkerForks) -> WorkerForks:
    """Commands in processes of their own, which are forks."""
    return _worker_forks


@pytest.fixture(scope="module", autouse=True)
def _forked_workers_of_runs(request: pytest.FixtureRequest) -> None:
    """Fork the workers in folders whose subject is what a run does, not its processes."""
    if request.path.parent.name in FOLDERS_OF_RUNS:
        request.getfixturevalue("forked_workers")


@pytest.fixture(scope="module", autouse=True)
def _undrawn_curves() -> Iterator[None]:
    """Leave the drawing of curves to the tests whose subject they are."""
    with undrawn_curves():
        yield


@pytest.fixture(scope="session", autouse=True)
def _close_shared_workers() -> Iterator[None]:
    """End the processes that tests share after the last test."""
    yield
    SHARED_WORKERS.close()
    zygote.release()


@pytest.fixture(autouse=True)
def _forget_modules_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules of a test's temporary folder: the next test may write another one of the same
    name.
    """
    temporary = str(tmp_path_factory.getbasetemp())
    path = list(sys.path)
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(temporary):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry in path or not entry.startswith(temporary)]


@pytest.fixture(scope="session")
def float64_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Starcoder2: its LayerNorm computes in float64, where every RMSNorm of transformers
    rounds to float32.

    Its head is tied to its embedding.
    """
    import torch
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    from dapo.policy.model import load_model

    path = tmp_path_factory.mktemp("model") / "starcoder2"
    tokenizer = load_model("tiny-random", dtype=torch.float32).tokenizer
    config = Starcoder2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=None,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Starcoder2ForCausalLM(config).double()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 8  # the default scale gives a nearly uniform distribution
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
