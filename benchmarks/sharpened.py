"""A policy that has sharpened, for benchmarks at natural lengths: `python -m benchmarks.sharpened`.

The quickstart is trained once, as its configuration says, and its export is kept in a cache folder
outside the repository, beside what it was made from. Its responses end by themselves, after about
ten tokens, and many of a group are equal: what the later steps of a training look like.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_commit, today
from benchmarks.worker_session import ROOT

CONFIG = "configs/quickstart.yaml"
NAME = "quickstart-sharpened"
ORIGIN = "made_from.json"
"""The file of the cached model that says which commit made it, how, and how well it answers."""


def cache_folder() -> Path:
    """Where models are kept between benchmarks."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo-bench"


def sharpened_policy(
    log: Callable[[str], None], *, again: bool = False, options: Sequence[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """The directory of the cached model and what it was made from.

    It is trained where there is none, or `again`, with `options` over those of the configuration.

    Raises subprocess.CalledProcessError where the training fails.
    """
    folder = cache_folder() / NAME
    if again or not (folder / ORIGIN).is_file():
        log(f"training {CONFIG} once, for the policy at natural lengths; it is kept in {folder}")
        _train(folder, options)
    origin: dict[str, Any] = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    return folder, origin


def _train(folder: Path, options: Sequence[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="dapo-sharpened-") as temporary:
        run = Path(temporary) / "run"
        export = Path(temporary) / "export"
        for words in (
            ["train", CONFIG, *options, "--run-dir", str(run)],
            ["export", str(run), str(export)],
        ):
            subprocess.run(
                [sys.executable, "-m", "dapo", *words],
                check=True,
                cwd=ROOT,
                env=environment,
                stdout=sys.stderr,
            )
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        origin = {
            "command": " ".join(["dapo train", CONFIG, *options]),
            "commit": describe_commit(ROOT),
            "date": today(),
            **{key: summary[key] for key in ("steps", "eval_first", "eval_last")},
        }
        (export / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(export, folder)


def main() -> None:
    """Make the model if it is not there, and print where it is and what it was made from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--again", action="store_true", help="train it anew, with the code of this checkout"
    )
    parser.add_argument(
        "options", nargs="*", metavar="KEY=VALUE", help="over those of the quickstart"
    )
    given = parser.parse_args()
    log = partial(print, file=sys.stderr, flush=True)
    folder, origin = sharpened_policy(
        log, again=given.again or bool(given.options), options=given.options
    )
    print(folder)
    print(json.dumps(origin, indent=1))


if __name__ == "__main__":
    main()
