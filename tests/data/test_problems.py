"""Properties of problems of any source: copies, overlap, light imports."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dapo.config.data_spec import parse_spec
from dapo.core.errors import DataError
from dapo.core.loading import require_package
from dapo.data.demonstrations import load_demonstrations
from dapo.data.problems import load_problems, remove_overlap, unique_problems
from dapo.types import Problem


def problem(prompt, answer="a"):
    return Problem(str(prompt), prompt, answer)


def test_unique_problems_keep_the_order_of_first_appearance():
    first = problem("p")
    second = problem("q")
    assert unique_problems([second, first, second, second]) == [(second, 3), (first, 1)]
    assert unique_problems([]) == []


def test_held_out_texts_leave_the_training_set_however_they_are_laid_out():
    train = [
        problem("What is  1+1?\n", "2"),
        problem(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 1+1?"},
            ],
            "two",
        ),
        problem("What is 1+2?", "3"),
        problem("what is 1+1?", "2"),
    ]
    kept, removed = remove_overlap(train, [problem([{"role": "user", "content": "What is 1+1?"}])])
    assert (kept, removed) == (train[2:], 2)


def test_without_held_out_problems_everything_is_kept():
    train = [problem("p"), problem("p")]
    assert remove_overlap(train, []) == (train, 0)


@pytest.mark.parametrize(
    ("pattern", "num_warnings"),
    [("<<.*?>>", 0), (r"\[\[.*?\]\]", 1), (None, 0)],
)
def test_a_pattern_that_deletes_nothing_is_named(
    tmp_path: Path, pattern: str | None, num_warnings: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question": "1+1?", "answer": "two"}\n{"question": "2+2?", "answer": "<<2+2=4>>4"}\n'
    )
    spec = {"path": str(path), "prompt": "question", "answer": "answer", "remove": pattern}
    mixed = {"mix": {"marked": {key: value for key, value in spec.items() if value is not None}}}
    expected = [
        f"remove={pattern!r} matches in none of the 2 answers of rows, so nothing is deleted;"
        " correct the pattern, or leave it out"
    ][:num_warnings]
    problem_warnings: list[str] = []
    load_problems(mixed, warnings=problem_warnings)
    assert problem_warnings == expected
    _, demonstration_warnings = load_demonstrations(parse_spec(mixed))
    assert demonstration_warnings == [f"data.demonstrations: {line}" for line in expected]


@pytest.mark.skipif(find_spec("datasets") is not None, reason="the package datasets is installed")
def test_the_hub_without_its_package_says_what_to_install():
    with pytest.raises(DataError) as caught:
        load_problems("hub:openai/gsm8k:test")
    assert (
        str(caught.value)
        == "hub:openai/gsm8k:test needs the package datasets, which is not installed: pip install"
        " datasets"
    )


def test_a_missing_package_names_the_package_to_install():
    require_package("json", purpose="x")
    with pytest.raises(DataError) as caught:
        require_package("no_such_package", purpose="gym:gcd")
    assert (
        str(caught.value)
        == "gym:gcd needs the package no_such_package, which is not installed: pip install"
        " no-such-package"
    )


def test_an_unknown_split_is_a_programming_error():
    with pytest.raises(ValueError, match="split must be train or eval, got 'test'"):
        load_problems("builtin:sums", split="test")


def test_importing_the_data_modules_loads_nothing_heavy():
    script = (
        "import sys, dapo.data.problems, dapo.data.stream, dapo.data.prompts; print(*{'torch',"
        " 'transformers', 'pyarrow', 'datasets', 'reasoning_gym', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
