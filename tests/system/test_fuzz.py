"""Whatever is thrown at configs, data and verifiers: an error in words or a sound value, soon, and
never `correct`.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.config import Config, build_config, dump_config, load_config
from dapo.config.data_spec import parse_spec
from dapo.config.option_fields import options_of
from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.data.sources.rows import problem_from_row
from dapo.processes.frames import encode
from dapo.rewards import get_verifier
from dapo.rewards.verdicts import problem_to_json
from dapo.types import Problem
from helpers.verifier_pools import open_pool

LIMIT_S = 10.0
"""Of processor time, so that a busy machine fails nothing: what reward.timeout_s gives a verdict.
"""
FUZZ = settings(
    max_examples=100,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# text with what breaks programs: halves of surrogate pairs, NUL, right-to-left, controls, joiners,
# LaTeX, JSON, YAML
NASTY = st.sampled_from(
    [
        "\ud800",
        "\udfff",
        "\x00",
        "\u202e",
        "\u200f",
        "\u2066",
        "\u2028",
        "\x85",
        "\x1b[2J",
        "\ufeff",
        "\r\n",
        "\u0301" * 5,
        "👩‍👩‍👧",
        "٣",
        "３",
        "½",
        "∞",
        "−",
        "ﷺ",
        "\\boxed{",
        "}",
        "{",
        "$",
        "\\frac{1}{0}",
        "####",
        "Answer:",
        "</think>",
        "<answer>",
        "</answer>",
        "${",
        "${oc.env:HOME}",
        "!!python/object:os.system",
        "&a",
        "*a",
        "- ",
        ": ",
        "#",
        "'",
        '"',
        "null",
        "true",
        ".nan",
        "1e999",
        "-0",
        "0x10",
        "1_000",
        "..",
        "/",
        "%s",
    ]
)
TEXT = st.lists(st.one_of(NASTY, st.text(max_size=8)), max_size=8).map("".join)
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**30, 10**40),
    st.floats(),
    TEXT,
    st.sampled_from(["", " "]),
)
JSON = st.recursive(
    SCALAR,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
OPTIONS = st.sampled_from(sorted(name for name, _ in options_of()))


def nested(option: str, value: object) -> dict[str, Any]:
    for part in reversed(option.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


def assert_readable_message(error: Exception, start: str = "") -> None:
    """In words that any terminal and any log file take, beginning with the place where that is
    known.
    """
    assert str(error).startswith(start)
    assert str(error).removeprefix(start).strip()
    assert str(error).encode(errors="replace")


@FUZZ
@given(option=st.one_of(OPTIONS, TEXT), value=JSON)
def test_any_value_of_any_option_is_taken_or_answered(option: str, value: object):
    base = {"model": "tiny-random", "data": {"train": "builtin:sums"}}
    raw = base | (nested(option, value) if option else {})
    try:
        config = build_config(raw)
    except ConfigError as error:
        assert_readable_message(error)
    else:
        assert build_config(nested_of_dump(config)) == config


def nested_of_dump(config: Config) -> dict[str, Any]:
    import yaml

    loaded = yaml.safe_load(dump_config(config))
    assert isinstance(loaded, dict)
    return loaded


@FUZZ
@given(words=st.lists(st.one_of(st.tuples(OPTIONS, TEXT).map("=".join), TEXT), max_size=3))
def test_any_override_is_taken_or_answered(words: list[str]):
    base = {"model": "tiny-random", "data": {"train": "builtin:sums"}}
    try:
        build_config(base, words)
    except ConfigError as error:
        assert_readable_message(error)


@FUZZ
@given(
    content=st.one_of(
        st.binary(max_size=80), TEXT.map(lambda t: t.encode(errors="surrogatepass")), JSON.map(repr)
    )
)
def test_any_config_file_is_read_or_answered(tmp_path: Path, content: bytes | str):
    path = tmp_path / "c.yaml"
    path.write_bytes(
        content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    )
    try:
        load_config(path)
    except ConfigError as error:
        assert_readable_message(error)


@FUZZ
@given(
    spec=st.one_of(
        TEXT,
        st.dictionaries(
            st.one_of(st.sampled_from(["path", "hub", "builtin", "gym", "size"]), TEXT),
            JSON,
            max_size=3,
        ),
    )
)
def test_any_data_source_is_understood_or_answered(spec: Any):
    try:
        parse_spec(spec)
        assert parse_spec(spec).label is not None
    except DataError as error:
        assert_readable_message(error)


MESSAGES = st.lists(
    st.one_of(
        JSON,
        st.fixed_dictionaries(
            {
                "role": st.one_of(st.sampled_from(["user", "system", "assistant"]), JSON),
                "content": JSON,
            }
        ),
    ),
    max_size=3,
)
ROWS = st.one_of(
    st.fixed_dictionaries(
        {"prompt": st.one_of(TEXT, MESSAGES), "answer": SCALAR},
        optional={"data_source": JSON, "x": JSON},
    ),
    st.dictionaries(
        st.one_of(st.sampled_from(["prompt", "answer", "reward_model"]), TEXT), JSON, max_size=4
    ),
)


def assert_valid(problem: Problem) -> None:
    """Text that files and tokenizers take, and JSON all through."""
    described = json.dumps(problem_to_json(problem), ensure_ascii=False, allow_nan=False)
    assert described.encode()
    assert encode(problem_to_json(problem))
    assert problem.answer.strip()


@FUZZ
@given(row=ROWS)
def test_any_row_is_a_valid_problem_or_an_error_with_its_line(row: dict[str, Any]):
    try:
        problem = problem_from_row(row, where="FILE, line 3", source="s")
    except DataError as error:
        assert_readable_message(error, "FILE, line 3")
    else:
        assert_valid(problem)


@FUZZ
@given(
    lines=st.lists(
        st.one_of(st.binary(max_size=60), ROWS.map(lambda row: json.dumps(row).encode())),
        max_size=4,
    )
)
def test_any_json_lines_file_is_read_or_answered(tmp_path: Path, lines: list[bytes]):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        problems = load_problems(str(path))
    except DataError as error:
        head, _, rows = str(error).partition("rows cannot be used:\n  ")
        assert_readable_message(DataError(rows or head), str(path))
    else:
        for problem in problems:
            assert_valid(problem)


CELLS = st.one_of(
    st.lists(
        SCALAR.filter(lambda v: not isinstance(v, int) or abs(v) < 2**63), min_size=2, max_size=2
    )
)


@FUZZ
@given(
    columns=st.dictionaries(
        st.sampled_from(["prompt", "answer", "question", "x"]),
        st.one_of(
            st.lists(TEXT.filter(lambda t: t.isprintable()), min_size=2, max_size=2),
            st.lists(st.floats(), min_size=2, max_size=2),
            st.lists(st.binary(max_size=5), min_size=2, max_size=2),
            st.lists(st.dates(), min_size=2, max_size=2),
            st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=2, max_size=2),
            st.lists(st.none(), min_size=2, max_size=2),
        ),
        max_size=3,
    ),
    cut=st.one_of(st.none(), st.integers(0, 300)),
)
def test_any_parquet_file_whole_or_cut_is_read_or_answered(
    tmp_path: Path, columns: dict[str, Any], cut: int | None
):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "d.parquet"
    pq.write_table(pa.table(columns), path)
    if cut is not None:
        whole = path.read_bytes()
        path.write_bytes(whole[:cut] + bytes(20) + whole[cut + 20 :])
    try:
        problems = load_problems(str(path))
    except DataError as error:
        assert_readable_message(error, str(path))
    else:
        for problem in problems:
            assert_valid(problem)


# verifiers: model output is the most hostile input of all

VERIFIERS: dict[str, Callable[[], Any]] = {
    "exact": lambda: get_verifier("exact"),
    "exact final": lambda: get_verifier("exact", extract="final"),
    "exact answer_line": lambda: get_verifier("exact", extract="answer_line"),
    "gsm8k": lambda: get_verifier("gsm8k"),
    "gsm8k flexible": lambda: get_verifier("gsm8k", flexible=True),
    "math": lambda: get_verifier("math"),
    "math_dapo": lambda: get_verifier("math_dapo"),
    "gym": lambda: get_verifier("gym"),
    "regex": lambda: get_verifier("regex"),
    "json_schema": lambda: get_verifier("json_schema"),
}
REFERENCE = "7351902"  # no fuzzer writes that by chance
SIZES = 100_000
"""Characters: what the longest response of the paper, 20,480 tokens, comes to."""
BOMBS = {
    "no end of one letter": "x" * SIZES,
    "no end of digits": "7" * SIZES,
    "no end of opening braces": "{" * SIZES,
    "no end of boxes": "\\boxed{" * (SIZES // 7),
    "no end of closed boxes": "\\boxed{1}" * (SIZES // 9),
    "no end of answer lines": "Answer: 1\n" * (SIZES // 10),
    "one endless answer line": "Answer: " + "1 " * (SIZES // 2),
    "no end of spaces": "Answer:" + " " * SIZES,
    "no end of bold": "*" * SIZES,
    "no end of quotes": "Answer: " + '"' * SIZES,
    "no end of dollars": "$" * SIZES,
    "no end of full stops": "." * SIZES,
    "no end of commas": "Answer: " + "1," * (SIZES // 2),
    "no end of fractions": "Answer: " + "\\frac" * (SIZES // 5),
    "no end of marks": "####" * (SIZES // 4),
    "no end of tags": "<answer>" * (SIZES // 8),
    "no end of backslashes": "\\" * SIZES,
    "no end of line ends": "\n" * SIZES,
    "no end of think": "</think>" * (SIZES // 8),
    "no end of right-to-left": "\u202e" * SIZES,
    "no end of surrogates": "\ud800" * SIZES,
    "no end of NUL": "\x00" * SIZES,
    "nested fractions": "Answer: " + "\\frac{1}{" * 60 + "2" + "}" * 60,
    "nested roots": "Answer: $" + "\\sqrt{" * 80 + "2" + "}" * 80 + "$",
    "long number in a box": "\\boxed{" + "9" * 5000 + "}",
    "long fraction": "Answer: 0." + "3" * 5000,
    "exponent": "Answer: 1e999999999",
    "code": "Answer: __import__('os').system('touch owned')",
    "code in a box": "\\boxed{().__class__.__bases__[0].__subclasses__()}",
    "infinity": "Answer: \\infty",
    "NaN": "Answer: nan",
    "hedging": f"Answer: {REFERENCE} or 3",
    "every number": " ".join(map(str, range(1000))),
    "full width": "Answer: ７３５１９０３",
}
ENDLESS = {
    "an enormous power": "Answer: 9^{9^{9^{9}}}",
    "an enormous factorial": "Answer: 99999999!",
    "a power in Python": "9**9**9**9",
    "a factorial of factorials": f"Answer: ((((9!)!)!)!)! = {REFERENCE}",
    "a binomial coefficient": f"Answer: \\binom{{10^9}}{{5\\cdot 10^8}} = {REFERENCE}",
    "a polynomial": f"Answer: (x+y+z+w+v)^{{10^{{9}}}} - 2^{{10^{{20}}}} = {REFERENCE}+",
}
"""Arithmetic that would not end if it were evaluated."""


@pytest.fixture(scope="module", params=VERIFIERS)
def named_verifier(request: pytest.FixtureRequest) -> tuple[str, Any]:
    if package := {"gym": "reasoning_gym", "json_schema": "jsonschema"}.get(request.param):
        pytest.importorskip(package)
    return request.param, VERIFIERS[request.param]()


def problem_for(name: str) -> Problem:
    if name == "json_schema":
        return Problem("p", "Q", f'{{"const": {REFERENCE}}}')
    if name != "gym":
        return Problem("p", "Q", REFERENCE)
    entry = {"question": "Q", "answer": REFERENCE, "metadata": {"difficulty": {}}}
    return Problem(
        "p", "Q", REFERENCE, "", {"gym_task": "chain_sum", "gym_config": {}, "gym_entry": entry}
    )


@settings(FUZZ, max_examples=60)
@given(
    response=st.one_of(
        TEXT, TEXT.map(lambda t: f"Answer: {t}"), TEXT.map(lambda t: f"\\boxed{{{t}}}")
    )
)
def test_no_garbage_is_correct_and_none_raises(named_verifier: tuple[str, Any], response: str):
    name, verifier = named_verifier
    start = time.process_time()
    verdict = verifier(problem_for(name), response)
    assert time.process_time() - start < LIMIT_S
    assert (verdict.correct, verdict.score, verdict.error) == (False, -1.0, None)


@settings(FUZZ, max_examples=60)
@given(answer=TEXT, response=TEXT)
def test_a_strange_reference_is_an_error_or_judged_and_never_raises(
    named_verifier: tuple[str, Any], answer: str, response: str
):
    name, verifier = named_verifier
    problem = Problem(
        "p",
        "Q",
        answer,
        "",
        {"gym_task": answer, "gym_entry": {"answer": answer}} if name == "gym" else {},
    )
    verdict = verifier(problem, response)
    assert verdict.error is None or (verdict.correct is None and verdict.error.encode())


def test_a_bomb_is_judged_wrong_in_time(named_verifier: tuple[str, Any]):
    name, verifier = named_verifier
    for bomb, response in BOMBS.items():
        start = time.process_time()
        verdict = verifier(problem_for(name), response)
        assert time.process_time() - start < LIMIT_S, bomb
        assert (verdict.correct, verdict.score, verdict.error) == (False, -1.0, None), bomb


@pytest.mark.skipif(sys.platform != "linux", reason="limits of worker processes are those of Linux")
def test_endless_arithmetic_is_wrong_before_it_is_evaluated_and_the_next_verdict_is_valid():
    with open_pool("math", timeout_s=20, workers=1) as pool:
        verdicts = pool.submit(
            problem_for("math"), list(ENDLESS.values()), [[1]] * len(ENDLESS)
        ).result(60)
        next_verdicts = pool.submit(problem_for("math"), [f"Answer: {REFERENCE}"], [[1]]).result(60)
    assert [verdict.correct for verdict in verdicts] == [False] * len(ENDLESS)
    assert next_verdicts[0].correct is True
