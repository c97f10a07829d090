"""How much memory does `dapo export` of a large run take?

`python -m benchmarks.export_memory [--layers 16]`: makes a random model of 1 billion parameters and
a run with a checkpoint of it, exports it in a process of its own, and prints the peak of that
process.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

from benchmarks.random_models import write_random_model
from benchmarks.worker_session import ROOT
from dapo.cli.train import start_run
from dapo.config import load_config
from dapo.policy.hf_io import write_tensors
from dapo.runs.directory import RunDirectory

GEOMETRY = {"width": 2048, "heads": 16, "kv_heads": 2, "inner": 8192, "vocabulary": 32000}
PEAK = (
    "import sys; from benchmarks.memory import peak_rss_bytes; from dapo.cli.main import main\n"
    "try: main()\n"
    "finally: print('peak', peak_rss_bytes())\n"
)


def main() -> int:
    """0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_memory")
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dapo-export-") as name:
        folder = Path(name)
        geometry = GEOMETRY | {"layers": arguments.layers, "is_tied": True}
        parameters = write_random_model(folder / "model", geometry)
        run = trained_run(folder)
        master_bytes = put_checkpoint_of(folder / "model", run)
        words = [sys.executable, "-c", PEAK, "export", str(run.path), str(folder / "out")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            return 1
        peak = int(done.stdout.split()[-1])
        files = sorted((folder / "out").glob("*.safetensors"))
        written = sum(file.stat().st_size for file in files)
        print(f"parameters         {parameters / 1e9:.2f} billion")
        print(f"master weights     {master_bytes / 1e9:.2f} GB")
        print(f"export             {written / 1e9:.2f} GB in {len(files)} files")
        print(f"peak of the export {peak / 1e9:.2f} GB")
    return 0


def trained_run(folder: Path) -> RunDirectory:
    """A run of the tiny model in bfloat16 with a checkpoint."""
    options = ["model.dtype=bfloat16", "train.num_steps=1", "train.device=cpu", "data.eval=null"]
    config = load_config(ROOT / "configs" / "tiny.yaml", options)
    path = folder / "run"
    start_run(config, run_dir=path, config_name="tiny")
    return RunDirectory.open(path)


def put_checkpoint_of(model: Path, run: RunDirectory) -> int:
    """Make it a run of `model`, whose weights are its checkpoint's; returns their bytes."""
    text = run.config.read_text(encoding="utf-8")
    run.config.write_text(text.replace("tiny-random", str(model)), encoding="utf-8")
    old = run.checkpoints.latest(warn=print)
    assert old is not None
    with safe_open(model / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118

    def write(folder: Path) -> None:
        shutil.copy(old / "policy.json", folder)
        write_tensors(weights, folder / "weights.safetensors")

    run.checkpoints.save(1, write, keep=1)
    return sum(weight.nbytes for weight in weights.values())


if __name__ == "__main__":
    sys.exit(main())
