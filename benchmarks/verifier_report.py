"""Mistakes of each verifier on tables of judged answers: `python -m benchmarks.verifier_report
[--list NAME]`.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo.config.reward_options import RewardConfig
from dapo.rewards import VerifierPool
from dapo.types import Problem, Verdict

DATA = Path(__file__).parents[1] / "tests" / "data"
TABLES: Mapping[str, str] = {
    "cases": "math_cases.jsonl",
    "families": "math_families.jsonl",
    "unseen": "math_unseen.jsonl",
    "subjects": "math_subjects.jsonl",
    "unseen 2": "math_unseen_2.jsonl",
    "notations": "math_notations.jsonl",
    "contexts": "math_contexts.jsonl",
}
MATH_VERIFY = "Math-Verify"
VERIFIERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "math": ("math", {}),
    "math_dapo (as released)": ("math_dapo", {}),
    MATH_VERIFY: ("benchmarks.verifier_report:math_verify_as_documented", {}),
    "gsm8k": ("gsm8k", {}),
    "gsm8k, flexible": ("gsm8k", {"flexible": True}),
    "exact, final": ("exact", {"extract": "final"}),
    "exact, answer line": ("exact", {"extract": "answer_line"}),
    "exact, last number": ("exact", {"extract": "last_number"}),
}
BY_KIND = ("math", "math_dapo (as released)", MATH_VERIFY)
TIMEOUT_S = 15.0  # Math-Verify ends a comparison after 5 s, its parser another 5 s for each text


@dataclass(frozen=True)
class Case:
    """A response to a problem with this reference, and whether a person would call it right."""

    truth: str
    response: str
    expected: bool
    why: str
    kind: str = ""
    question: str = "Q"


@dataclass(frozen=True)
class Mistakes:
    """The mistakes of a verifier on some cases."""

    right: int  # the number of right answers
    wrong: int
    false_positives: Sequence[Case]
    false_negatives: Sequence[Case]
    errors: int

    @classmethod
    def of(cls, judged: Sequence[tuple[Case, Verdict]]) -> "Mistakes":
        """The mistakes in these verdicts; an error is not right."""
        right = sum(case.expected for case, _ in judged)
        return cls(
            right,
            len(judged) - right,
            [case for case, verdict in judged if verdict.correct and not case.expected],
            [case for case, verdict in judged if not verdict.correct and case.expected],
            sum(verdict.error is not None for _, verdict in judged),
        )

    def __str__(self) -> str:
        return f"{len(self.false_positives)} / {len(self.false_negatives)} / {self.errors}"


def read_cases(table: str = "cases") -> list[Case]:
    """A committed table, by its name in `TABLES`."""
    return [
        Case(**json.loads(line))
        for line in (DATA / TABLES[table]).read_text(encoding="utf-8").splitlines()
    ]


def math_verify_as_documented(problem: Problem, response: str) -> bool:
    """Math-Verify as its README uses it: parse the reference and the response, and verify."""
    from math_verify import parse, verify

    reference = (
        problem.answer
        if "$" in problem.answer or "\\boxed" in problem.answer
        else f"${problem.answer}$"
    )
    return verify(parse(reference), parse(response))


def judge(
    cases: Sequence[Case], name: str, options: Mapping[str, Any]
) -> tuple[list[Verdict], float]:
    """One verdict per case, from worker processes as in a run, and the seconds it took."""
    with VerifierPool(
        RewardConfig(verifier=name, options=dict(options), timeout_s=TIMEOUT_S)
    ) as pool:
        began = time.perf_counter()
        futures = [
            pool.submit(Problem(str(i), c.question, c.truth), [c.response], [()])
            for i, c in enumerate(cases)
        ]
        verdicts = [future.result()[0] for future in futures]
        return verdicts, time.perf_counter() - began


def main() -> None:
    """Print the mistakes by table and by kind, and with `--list` the cases that one verifier gets
    wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list", metavar="NAME", choices=VERIFIERS, help="show what this verifier gets wrong"
    )
    wanted = parser.parse_args().list
    cases = {name: read_cases(name) for name in TABLES}
    totals = Table(
        "verifier", title="false positives / false negatives / errors", title_justify="left"
    )
    for name, table in cases.items():
        right = sum(case.expected for case in table)
        totals.add_column(f"{name}: {right} right, {len(table) - right} wrong", justify="right")
    totals.add_column("ms a verdict", justify="right")
    by_kind: dict[str, dict[str, Mistakes]] = {}
    for title, (verifier, options) in VERIFIERS.items():
        every = [case for table in cases.values() for case in table]
        verdicts, seconds = judge(every, verifier, options)
        judged = list(zip(every, verdicts, strict=True))
        parts = iter(judged)
        mistakes = [Mistakes.of([next(parts) for _ in table]) for table in cases.values()]
        totals.add_row(title, *map(str, mistakes), f"{1000 * seconds / len(every):.1f}")
        kinds = sorted({case.kind for case in every if case.kind})
        by_kind[title] = {
            kind: Mistakes.of([pair for pair in judged if pair[0].kind == kind]) for kind in kinds
        }
        if title == wanted:
            _print_mistakes(Mistakes.of(judged))
    console = Console()
    console.print(totals)
    console.print(_kinds_table(by_kind))


def _kinds_table(by_kind: Mapping[str, Mapping[str, Mistakes]]) -> Table:
    table = Table(
        "kind (families and unseen)",
        title="false positives / false negatives by kind",
        title_justify="left",
    )
    table.add_column("wrong / right", justify="right")
    for title in BY_KIND:
        table.add_column(title, justify="right")
    for kind, mistakes in by_kind[BY_KIND[0]].items():
        counts = [by_kind[title][kind] for title in BY_KIND]
        found = [f"{len(count.false_positives)} / {len(count.false_negatives)}" for count in counts]
        table.add_row(kind, f"{mistakes.wrong} / {mistakes.right}", *found)
    return table


def _print_mistakes(mistakes: Mistakes) -> None:
    for kind, found in (
        ("false positive", mistakes.false_positives),
        ("false negative", mistakes.false_negatives),
    ):
        for case in found:
            print(f"{kind}: {case.truth!r} <- {case.response[:80]!r} ({case.kind or case.why})")


if __name__ == "__main__":
    main()
