"""The worker processes of a benchmark: which can be had, how they are started, and that all of them
end.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.protocol import Worker

ROOT = Path(__file__).parents[1]
VENVS = dict.fromkeys(("ours", "transformers", "evaluator", "matmul", "dapo_internals"), ".venv")
VENVS |= dict.fromkeys(("trl", "trl_supervised", "trl_distillation"), ".venv-trl") | {
    "vllm": ".venv-vllm"
}
INSTALL = "make bench-peers"
GPU_INSTALL = "make bench-peers BENCH_DEVICE=cuda"
ON_A_GPU = {"trl": ("trl", "vllm"), "vllm": ("vllm",)}
"""The packages without which a comparison on a GPU would be with a crippled system."""
MAX_MODEL_LEN = 1024
"""Positions of a prompt and its response, for vLLM."""
DEFAULT_MICROBATCH = 1024
"""Tokens, on a CPU and where no step of a run is measured."""
MATMUL_SIZES = {"cpu": 4096, "cuda": 8192}


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement, equal for every system."""

    rounds: int = 5
    dtype: str = "auto"
    threads: int = 2
    device: str = "cpu"
    model: str = "smollm2-135m-instruct"
    prompts: int = 8
    group: int = 8
    tokens: int = 64
    microbatch_tokens: int | None = DEFAULT_MICROBATCH
    """Ours; None: what fits."""
    trl_microbatches: tuple[int, ...] = (8, 16, 32, 64)
    seeds: int = 5
    first_seed: int = 0
    systems: tuple[str, ...] = ("ours", "trl")
    """Systems of the accuracy part; the next six belong to it as well."""
    rate: float | None = None
    """The learning rate of every system; None: the quickstart's."""
    budget: int = 20_000
    held_out_size: int = 756
    target: float = 0.75
    minutes: float | None = None
    again: bool = False
    gsm8k: Path | None = None
    """The folder of the data set's files, of the parts that are named so."""
    quick: bool = False
    timeout_s: float = 1800.0
    plots: Path = ROOT / "docs" / "lab"
    results: Path | None = None
    """The file that the results will join."""

    @property
    def responses(self) -> int:
        """The number of responses per step."""
        return self.prompts * self.group


@dataclass
class Session:
    """Started workers by name; on leaving, every one of them is ended."""

    settings: Settings
    workers: dict[str, Worker] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each worker's answer to being opened."""

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dapo-bench-")
        self.folder = Path(self._folder.name)
        self._started = time.monotonic()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers.values():
            # after an error, or a signal, a worker in the middle of a command is not waited for
            worker.close() if kind is None else worker.kill()
        self.workers.clear()
        self._folder.cleanup()

    def log(self, text: str) -> None:
        """Progress, on standard error."""
        print(f"[{time.monotonic() - self._started:6.0f} s] {text}", file=sys.stderr, flush=True)

    @property
    def dtype(self) -> str:
        """The dtype that dapo resolves on this machine; known once our worker is open."""
        return str(self.answers["ours"]["dtype"])

    def start(self, name: str, module: str, *, environment: dict[str, str] | None = None) -> Worker:
        """A worker process that runs `benchmarks.workers.MODULE` in its system's environment."""
        python = python_of(module)
        log = ROOT / "benchmarks" / "logs" / f"{name}.log"
        env = worker_environment(self.settings, module) | (environment or {})
        worker = Worker(
            name, [str(python), "-m", f"benchmarks.workers.{module}"], env=env, log=log, cwd=ROOT
        )
        self.workers[name] = worker
        return worker

    def ask(self, name: str, do: str, **arguments: Any) -> dict[str, Any]:
        """One command, one answer."""
        return self.workers[name].ask(do, timeout_s=self.settings.timeout_s, **arguments)

    def close(self, *names: str) -> None:
        """End these workers."""
        for name in names:
            self.workers.pop(name).close()

    def matmul_gflops(self) -> float:
        """The machine's rate, in this moment."""
        settings = self.settings
        if "matmul" not in self.workers:
            self.start("matmul", "matmul")
        size = 2048 if settings.quick else MATMUL_SIZES[settings.device]
        answer = self.ask(
            "matmul",
            "multiply",
            dtype=self.dtype,
            device=settings.device,
            size=size,
            repeats=3,
            threads=settings.threads,
        )
        return float(answer["gflops"])


def python_of(module: str) -> Path:
    """The interpreter that a worker needs."""
    return ROOT / VENVS[module] / "bin" / "python"


def is_installed(module: str) -> bool:
    """Is there an environment for this system?"""
    return python_of(module).exists()


def install_command(settings: Settings) -> str:
    """The command that installs the other systems for a device."""
    return GPU_INSTALL if settings.device == "cuda" else INSTALL


def missing_packages(system: str) -> list[str]:
    """The packages of ON_A_GPU that a system's environment lacks; all of them without one."""
    packages = ON_A_GPU[system]
    if not is_installed(system):
        return list(packages)
    code = (
        "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
    )
    words = [str(python_of(system)), "-c", code, *packages]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def worker_environment(settings: Settings, module: str) -> dict[str, str]:
    """Threads fixed, no network, and idle workers that sleep."""
    environment = dict(os.environ)
    threads = str(settings.threads)
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
        "OMP_NUM_THREADS": threads,
        "KMP_BLOCKTIME": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if module == "vllm" and settings.device == "cpu":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
        # vLLM asks for one OpenMP library in the process: torch's own
        library = next(
            (ROOT / VENVS[module]).glob("lib/python3*/site-packages/torch/lib/libgomp*.so*"), None
        )
        if library is not None:
            environment["LD_PRELOAD"] = str(library)
    return environment


def rotated(names: list[str], round_index: int) -> list[str]:
    """Another one begins in every round, so that none always follows the same neighbour."""
    start = round_index % len(names) if names else 0
    return names[start:] + names[:start]


Part = Callable[[Session], dict[str, Any]]
"""Measures one part: `{"figures": [...], "skipped": [...], ...}` as JSON values."""
