"""Which rows `dapo data select` keeps, and the files that pass rates are read from."""

import json
from pathlib import Path

import pytest

from dapo.core.errors import DataError
from dapo.data.prepare.select import read_pass_rates, select_by_pass_rate
from dapo.data.prepare.stats import PassRate
from dapo.types import Problem


def problem(name: str) -> Problem:
    return Problem(name, f"question {name}", "1")


RATES = {name: PassRate(name, *counts) for name, counts in {
    "never": (10, 0), "low": (10, 2), "under": (10, 1), "half": (10, 5), "high": (10, 8), "over": (10, 9),
    "always": (10, 10), "few": (4, 2), "elsewhere": (10, 5),
}.items()}  # fmt: skip


def test_both_bounds_are_included_and_copies_stay_in_their_order():
    rows = [
        problem(name)
        for name in (
            "high",
            "never",
            "low",
            "half",
            "under",
            "over",
            "half",
            "always",
            "new",
            "few",
        )
    ]
    found = select_by_pass_rate(rows, RATES, low=0.2, high=0.8, min_responses=8)
    assert [each.id for each in found.kept] == ["high", "low", "half", "half"]
    assert [each.fields["pass_rate"] for each in found.kept] == [0.8, 0.2, 0.5, 0.5]
    assert found.mean_pass_rate == pytest.approx((0.8 + 0.2 + 0.5 + 0.5) / 4)
    assert [
        (row["row"], row["id"], row["reason"], row["responses"], row["pass_rate"])
        for row in found.removed
    ] == [
        (2, "never", "pass rate too low", 10, 0.0),
        (5, "under", "pass rate too low", 10, 0.1),
        (6, "over", "pass rate too high", 10, 0.9),
        (8, "always", "pass rate too high", 10, 1.0),
        (9, "new", "not measured", 0, None),
        (10, "few", "too few responses", 4, 0.5),
    ]
    assert found.by_reason["pass rate too low"] == 2


def test_a_bound_of_a_tenth_takes_every_number_of_responses_that_can_have_it():
    for tenth in range(1, 10):
        for responses in (10, 20, 30, 70, 110):
            rates = {"p": PassRate("p", responses, tenth * responses // 10)}
            found = select_by_pass_rate([problem("p")], rates, low=tenth / 10, high=tenth / 10)
            assert len(found.kept) == 1


def test_nothing_kept_has_no_mean():
    assert select_by_pass_rate([problem("never")], RATES, low=0.2, high=0.8).mean_pass_rate is None


def test_pass_rates_are_read_from_an_evaluation_without_its_errors_and_from_statistics(
    tmp_path: Path,
):
    def response(correct: bool | None, error: str | None = None) -> dict[str, object]:
        return {"correct": correct, "error": error, "score": 0.0}

    evaluation = [
        {
            "id": "a",
            "responses": [
                response(True),
                response(False),
                response(None, "timed out"),
                response(True),
            ],
        },
        {"id": "b", "responses": [response(None, "timed out")]},
    ]
    statistics = [{"id": "a", "run": {"responses": 8, "correct": 2}}, {"id": "b", "run": None}]
    sampled = [
        {"id": "a", "model": {"responses": 4, "correct": 4}, "run": {"responses": 8, "correct": 2}}
    ]
    for rows, expected in ((evaluation, (3, 2)), (statistics, (8, 2)), (sampled, (4, 4))):
        (tmp_path / "rates.json").write_text(json.dumps({"table": rows}))
        found = read_pass_rates(tmp_path / "rates.json")
        assert list(found) == ["a"]
        assert (found["a"].responses, found["a"].correct) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as pass rates"),
        ("[]", "holds no pass rates; expected a run directory, or a file of dapo eval"),
        ('{"table": [{"id": "a"}]}', "holds no pass rates"),
        (
            '{"table": [{"id": "a", "responses": [{"correct": null, "error": null}]}]}',
            "no response was judged right",
        ),
    ],
)
def test_another_file_is_refused_with_what_was_expected(tmp_path: Path, text: str, message: str):
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_pass_rates(tmp_path / "rates.json")
