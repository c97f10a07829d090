"""`make simulate`: the controller at the paper's size and around it, with nothing behind it that
computes.

512 prompts x 16 responses of up to 20,480 tokens, about two of three groups without a signal. Each size
runs in a process of its own. Writes a results file, and prints its tables.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.async_simulation import GROUP_SIZE, table
from benchmarks.machine import describe_commit, describe_machine, today
from benchmarks.oversampling_simulation import TABLES, rows
from benchmarks.worker_session import ROOT
from dapo.config import load_config

PROMPTS = 512
ASYNC_STEPS = 24
RESULTS = ROOT / "benchmarks" / "results" / "simulation.json"
DOCUMENT = ROOT / "docs" / "lab" / "scale.md"
MARK = "<!-- simulation -->"
"""Stands before and after the tables in the document."""
TARGET_S = 0.5
TARGET_GB = 8.0
"""From the last response to the first old log-probability; peak memory."""
GB = 10**9
MEAN_TOKENS = 6700
"""Mean length of a response, with the median and the limit of `Size`."""


@dataclass(frozen=True)
class Size:
    """The size of one simulation."""

    prompts: int
    steps: int = 3
    median_tokens: float = 5000.0
    limit: int = 20480
    group_size: int = 16
    minibatch_groups: int = 32
    tokenizer: str = "smollm2"
    ranks: int = 8
    """Processes of the trainer on this machine."""
    shared_rows: bool = False
    """One row of each length in place of all of them: memory is then not that of a run."""

    @property
    def overrides(self) -> list[str]:
        """Over configs/dapo_32b.yaml."""
        return [
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.group_size={self.group_size}",
            f"rollout.max_response_tokens={self.limit}",
            f"overlong.buffer_tokens={max(1, self.limit // 5)}",
            f"train.minibatch_groups={self.minibatch_groups}",
            f"train.num_steps={self.steps}",
            f"distributed.trainer_ranks={self.ranks}",
            "launcher=local",
            "train.threads=1",
            "train.device=cpu",
            "train.save_every=1",
            "train.eval_every=0",
        ]


def simulate(size: Size) -> dict[str, Any]:
    """In this process."""
    from benchmarks.controller_simulation import Simulation, byte_tokenizer, real_tokenizer

    config = load_config(ROOT / "configs" / "dapo_32b.yaml", size.overrides)
    tokenizer = byte_tokenizer() if size.tokenizer == "bytes" else real_tokenizer()
    with tempfile.TemporaryDirectory(prefix="dapo-simulation-") as folder:
        found = Simulation(
            config, Path(folder), tokenizer, size.median_tokens, size.shared_rows
        ).run()
    return {"size": asdict(size)} | found


def simulate_apart(size: Size) -> dict[str, Any]:
    """In a process of its own, so that its memory is its own.

    Raises CalledProcessError if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.simulate", "--one", json.dumps(asdict(size))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """0 if the targets at the paper's size are met, or it was not among the sizes."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[64, 128, 256, 512], help="groups kept per step"
    )
    parser.add_argument(
        "--scale",
        type=float,
        help=(
            f"so many times {PROMPTS} prompts, with shared rows (see docs/lab/scale.md), and no"
            " others"
        ),
    )
    parser.add_argument("--ranks", type=int, default=8, help="processes of the trainer")
    parser.add_argument(
        "--steps", type=int, default=3, help="the first starts everything and does not count"
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=14.0,
        help="sizes that would take more are left out, but not --scale",
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        nargs="+",
        help=(
            "print how long a step takes with each of these bounds (async_simulation.py), and"
            " nothing else"
        ),
    )
    parser.add_argument(
        "--update-share",
        type=float,
        default=1.0,
        help="with --max-staleness: an update's time over generation's",
    )
    parser.add_argument(
        "--clock",
        choices=("history", "load"),
        default="history",
        help="with --max-staleness: rollout.clock",
    )
    parser.add_argument(
        "--early-updates",
        action="store_true",
        help="with --max-staleness: an update begins when its minibatch is complete",
    )
    parser.add_argument(
        "--oversampling",
        choices=tuple(TABLES),
        nargs="*",
        help=(
            "print what dynamic_sampling.oversampling saves (oversampling_simulation.py) by these"
            " tables, all but large by default, and nothing else"
        ),
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(simulate(Size(**json.loads(arguments.one)))))
        return 0
    if arguments.oversampling is not None:
        for name in arguments.oversampling or ("sizes", "engines", "shares"):
            for line in rows(TABLES[name]):
                print(line, flush=True)
            print()
        return 0
    if arguments.max_staleness:
        for prompts in (
            [96] if arguments.prompts == parser.get_default("prompts") else arguments.prompts
        ):
            print(f"{prompts} prompts x {GROUP_SIZE} responses, {ASYNC_STEPS} steps\n")
            options = {
                "update_share": arguments.update_share,
                "clock": arguments.clock,
                "early": arguments.early_updates,
            }
            print(table(arguments.max_staleness, prompts=prompts, steps=ASYNC_STEPS, **options))
        return 0
    is_shared = arguments.scale is not None
    wanted = [round(PROMPTS * arguments.scale)] if is_shared else arguments.prompts
    runs = (
        json.loads(arguments.output.read_text(encoding="utf-8"))["runs"]
        if arguments.output.exists()
        else []
    )
    for prompts in wanted:
        size = Size(prompts, steps=arguments.steps, ranks=arguments.ranks, shared_rows=is_shared)
        expected = predicted_bytes(
            [run for run in runs if run["size"]["shared_rows"] == is_shared], size
        )
        print(expectation(size, expected), file=sys.stderr)
        if not is_shared and expected is not None and expected > arguments.memory_gib * 2**30:
            print(
                f"{prompts:,} prompts: left out, more than --memory-gib {arguments.memory_gib:g}",
                file=sys.stderr,
            )
            continue
        run = measured(size)
        runs = with_run(runs, run)
        print(row_of(run), file=sys.stderr)
        write_results(arguments.output, runs)
    print(markdown(runs))
    return 0 if meets_targets([run for run in runs if run["size"]["prompts"] in wanted]) else 1


def measured(size: Size) -> dict[str, Any]:
    """One size, with what its figures depend on."""
    load = os.getloadavg()[0]
    found = {
        "machine": describe_machine(),
        "commit": describe_commit(ROOT),
        "date": today(),
        "load_before": load,
    }
    return found | simulate_apart(size)


def with_run(runs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs with a new one, which replaces that of its size; in order of size, those with shared
    rows last.
    """

    def key(each: Mapping[str, Any]) -> tuple[bool, int]:
        return each["size"]["shared_rows"], each["size"]["prompts"]

    return sorted([*(each for each in runs if key(each) != key(run)), run], key=key)


def write_results(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write the file of results and, for the committed one, every table of docs/lab/scale.md."""
    unit = "seconds are processor seconds of one thread, but for until_first_logprob_s, which pass"
    path.write_text(json.dumps({"unit": unit, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    if path == RESULTS:
        before, _, after = DOCUMENT.read_text(encoding="utf-8").split(MARK)
        DOCUMENT.write_text(MARK.join([before, f"\n{markdown(runs)}\n", after]), encoding="utf-8")


def predicted_bytes(runs: Sequence[Mapping[str, Any]], size: Size) -> float | None:
    """Peak memory of controller and ranks; None without a run.

    From one run: its start, and what it has taken above that in proportion; from several the line
    through the smallest and the largest. With shared rows the controller holds no more than one row
    of each length.
    """
    if not runs:
        return None
    small, large = (pick(runs, key=lambda run: run["size"]["prompts"]) for pick in (min, max))
    start = small["start_bytes"] + small["ranks_start_bytes"] * size.ranks / small["size"]["ranks"]
    if size.shared_rows:
        responses = 3 * size.prompts * size.group_size
        trained_tokens = size.prompts * size.group_size * MEAN_TOKENS
        rows = 12 * size.limit * (size.limit + 1) / 2  # token ids, log-probabilities, text
        # in the ranks 8 bytes per token, and as many again for samples that move between them
        return float(start + rows + 2000 * responses + 2 * 8 * trained_tokens)
    if small is large:
        return float(start + all_grown(large) * size.prompts / large["size"]["prompts"])
    slope = (all_grown(large) - all_grown(small)) / (
        large["size"]["prompts"] - small["size"]["prompts"]
    )
    return float(start + all_grown(small) + slope * (size.prompts - small["size"]["prompts"]))


def all_grown(run: Mapping[str, Any]) -> float:
    """Memory that the steps have taken, in the controller and in the ranks."""
    return float(grown(run) + run["ranks_peak_bytes"] - run["ranks_start_bytes"])


def expectation(size: Size, expected: float | None) -> str:
    """The line that is printed before a run."""
    amount = (
        "unknown, nothing like it was run before"
        if expected is None
        else f"about {expected / GB:.1f} GB"
    )
    return f"{size.prompts:,} prompts: peak memory of controller and {size.ranks} ranks: {amount}"


def meets_targets(runs: Sequence[Mapping[str, Any]]) -> bool:
    """At the paper's size."""
    papers = [run for run in with_own_rows(runs) if run["size"]["prompts"] == PROMPTS]
    return all(
        figure(run, "until_first_logprob_s") <= TARGET_S and run["peak_bytes"] <= TARGET_GB * GB
        for run in papers
    )


def with_own_rows(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs in which every response has rows of its own, so that their memory is that of a
    run.
    """
    return [run for run in runs if not run["size"]["shared_rows"]]


def figure(run: Mapping[str, Any], name: str) -> float:
    """The median over the steps after the first."""
    return median(step[name] for step in counted(run))


def counted(run: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The steps after the first, which starts everything; that one if there is no other."""
    return run["steps"][1:] or run["steps"]


def part(run: Mapping[str, Any], kind: str, name: str) -> float:
    """The median of one part."""
    return median(step[kind].get(name, 0) for step in counted(run))


def exponent(runs: Sequence[Mapping[str, Any]], value: str) -> float:
    """The exponent of growth with tokens, from the smallest to the largest run: 1 is linear."""
    small = min(runs, key=lambda r: figure(r, "tokens"))
    large = max(runs, key=lambda r: figure(r, "tokens"))
    measure = grown if value == "memory" else partial(figure, name=value)
    ratio = measure(large) / measure(small)
    return math.log(ratio) / math.log(figure(large, "tokens") / figure(small, "tokens"))


def grown(run: Mapping[str, Any]) -> int:
    """Memory that the steps have taken, beyond what the process began with."""
    return int(run["peak_bytes"] - run["start_bytes"])


def row_of(run: Mapping[str, Any]) -> str:
    """A size in one line of a table."""
    tokens = figure(run, "tokens")
    per_token = f"{grown(run) / tokens:.1f}"
    cells = [
        f"{run['size']['prompts']:,}",
        f"{figure(run, 'groups') * run['size']['group_size']:,.0f}",
        f"{tokens / 1e6:,.1f}",
        f"{figure(run, 'controller_s'):.2f}",
        f"{figure(run, 'after_last_response_s'):.2f}",
        (
            f"{figure(run, 'until_first_pass_s'):.2f}"
            if "until_first_pass_s" in counted(run)[0]
            else ""
        ),
        f"{figure(run, 'until_first_logprob_s'):.2f}",
        f"{figure(run, 'background_s'):.2f}",
        f"{1e9 * figure(run, 'controller_s') / tokens:.1f}",
        f"{run['peak_bytes'] / GB:.2f}",
        "shared rows" if run["size"]["shared_rows"] else per_token,
        f"{run['ranks_peak_bytes'] / GB:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """Growth, then the largest size that is not above the paper's by part, then what the figures
    depend on.
    """
    lines = [
        (
            "| prompts per step | responses | million tokens | controller, s | of it after the last"
            " response, s | until the ranks have their first pass, s | until the first old"
            " log-probability, s | background threads, s | controller, ns per token | peak memory,"
            " GB | grown, bytes per token | peak memory of the ranks, GB |"
        ),
        "|" + " --- |" * 12,
        *(row_of(run) for run in runs),
    ]
    own = with_own_rows(runs)
    if len(own) > 1:
        growth = f"time {exponent(runs, 'controller_s'):.2f}, memory {exponent(own, 'memory'):.2f}"
        lines += ["", f"Exponent of growth against tokens: {growth}."]
    upto = [run for run in own if run["size"]["prompts"] <= PROMPTS]
    chosen = max(upto, key=lambda run: run["size"]["prompts"], default=None)
    if chosen is not None:
        lines += ["", *breakdown(chosen)]
    return "\n".join([*lines, "", *map(provenance, runs)])


def provenance(run: Mapping[str, Any]) -> str:
    """The settings and the machine of a run, as a list item."""
    size = run["size"]
    machine = run["machine"]
    shared = " with shared rows" if size["shared_rows"] else ""
    return (
        f"- {size['prompts']:,} prompts{shared}: {size['ranks']} ranks, {len(run['steps'])} steps;"
        f" {machine['cpu']}, {machine['cores']} cores, on which {run['load_before']:.1f} other"
        f" threads were running; {run['date']}, commit {run['commit']}"
    )


def breakdown(run: Mapping[str, Any]) -> list[str]:
    """Seconds and bytes of one size by part."""
    names = dict.fromkeys(name for step in counted(run) for name in step["by_part_s"])
    until = dict.fromkeys(name for step in counted(run) for name in step["until_scored_by_part_s"])
    moved = dict.fromkeys(name for step in counted(run) for name in step["moved_bytes"])
    rows = sorted(
        ((name, part(run, "by_part_s", name)) for name in names), key=lambda pair: -pair[1]
    )
    return [
        f"| part of the controller, {run['size']['prompts']:,} prompts | s |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in rows),
        "",
        "| of it from the last response until the batch is scored | s |",
        "| --- | --- |",
        *(f"| {name} | {part(run, 'until_scored_by_part_s', name):.2f} |" for name in until),
        "",
        "| moved per step | GB | bytes per token |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {part(run, 'moved_bytes', name) / GB:.2f} | "
            f"{part(run, 'moved_bytes', name) / figure(run, 'tokens'):.1f} |"
            for name in moved
        ),
        (
            f"| table of responses on disk | {figure(run, 'table_bytes') / GB:.2f} | "
            f"{figure(run, 'table_bytes') / figure(run, 'tokens'):.1f} |"
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
