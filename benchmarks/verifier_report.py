"""What each math verifier gets wrong on a table of cases: `python -m benchmarks.verifier_report [--list NAME]`."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo.config.reward import RewardConfig
from dapo.rewards import VerifierPool
from dapo.types import Problem, Verdict

CASES = Path(__file__).parents[1] / "tests" / "data" / "math_cases.jsonl"
VERIFIERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "math_dapo (as released)": ("math_dapo", {}),
    "math": ("math", {}),
    "gsm8k": ("gsm8k", {}),
    "gsm8k, flexible": ("gsm8k", {"flexible": True}),
    "exact, answer line": ("exact", {"extract": "answer_line"}),
    "exact, last number": ("exact", {"extract": "last_number"}),
}
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Case:
    """A response to a problem with this reference, and whether a person would call it right."""

    truth: str
    response: str
    expected: bool
    why: str


def read_cases() -> list[Case]:
    """The committed table."""
    return [Case(**json.loads(line)) for line in CASES.read_text(encoding="utf-8").splitlines()]


def judge(cases: Sequence[Case], name: str, options: Mapping[str, Any]) -> tuple[list[Verdict], float]:
    """One verdict a case, from worker processes as in a run, and the seconds it took."""
    with VerifierPool(RewardConfig(verifier=name, options=dict(options), timeout_s=TIMEOUT_S)) as pool:
        began = time.perf_counter()
        futures = [pool.submit(Problem(str(i), "Q", c.truth), [c.response], [()]) for i, c in enumerate(cases)]
        verdicts = [future.result()[0] for future in futures]
        return verdicts, time.perf_counter() - began


def main() -> None:
    """Print the table, and with `--list` the cases that one verifier gets wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="NAME", choices=VERIFIERS, help="show what this verifier gets wrong")
    wanted = parser.parse_args().list
    cases = read_cases()
    wrong, right = sum(not c.expected for c in cases), sum(c.expected for c in cases)
    table = Table(title=f"{len(cases)} cases: {right} right answers, {wrong} wrong ones", title_justify="left")
    for column in ("verifier", "false positives", "false negatives", "no judgement", "ms a verdict"):
        table.add_column(column, justify="left" if column == "verifier" else "right")
    for title, (name, options) in VERIFIERS.items():
        verdicts, seconds = judge(cases, name, options)
        pairs = list(zip(cases, verdicts, strict=True))
        false_positives = [c for c, v in pairs if v.correct and not c.expected]
        false_negatives = [c for c, v in pairs if not v.correct and c.expected]
        table.add_row(
            title,
            f"{len(false_positives)} ({len(false_positives) / wrong:.1%})",
            f"{len(false_negatives)} ({len(false_negatives) / right:.1%})",
            str(sum(v.error is not None for v in verdicts)),
            f"{1000 * seconds / len(cases):.1f}",
        )
        if title == wanted:
            for kind, found in (("false positive", false_positives), ("false negative", false_negatives)):
                for c in found:
                    print(f"{kind}: {c.truth!r} <- {c.response[:80]!r} ({c.why})")
    Console().print(table)


if __name__ == "__main__":
    main()
