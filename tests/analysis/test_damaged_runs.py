"""A run with any damage is named with the reason, and the runs next to it are shown; no command
hangs or crashes.
"""

import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.core.files import atomic_write_json, read_json
from dapo.runs.rollout_table import EPISODE, ROLLOUT_SCHEMA
from helpers.commands import run
from helpers.view_runs import Client, make_run, serving

STEP = 2
"""The step whose table and evaluation are damaged."""
TABLE = f"rollouts/step_{STEP:06d}.parquet"
EVALUATION = f"eval/step_{STEP:06d}.json"
LIMIT_S = 60
"""The longest time that one damage may take with all requests and commands, on a busy machine."""
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "whole", "train.save_every=2")


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Raise in the middle of a call that hangs."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- kinds of damage


def content(name: str, data: bytes) -> Damage:
    return lambda path: (path / name).write_bytes(data) and None


def line(text: str) -> Damage:
    """A last line in metrics.jsonl."""

    def append(path: Path) -> None:
        with open(path / "metrics.jsonl", "ab") as file:
            file.write(text.encode() + b"\n")

    return append


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def pipe(name: str) -> Damage:
    def make(path: Path) -> None:
        remove(path / name)
        os.mkfifo(path / name)

    return make


def sock(name: str) -> Damage:
    def make(path: Path) -> None:
        remove(path / name)
        with socket.socket(socket.AF_UNIX) as found, working_in((path / name).parent):
            found.bind((path / name).name)  # a path of more than 108 bytes is none for a socket

    return make


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(before)


def link(name: str, target: str) -> Damage:
    def make(path: Path) -> None:
        remove(path / name)
        (path / name).symlink_to(target)

    return make


def sparse(name: str) -> Damage:
    return lambda path: os.truncate(path / name, 2**31)


def folder(name: str) -> Damage:
    def make(path: Path) -> None:
        remove(path / name)
        (path / name).mkdir()

    return make


def rewritten(change: Callable[[pa.Table], pa.Table]) -> Damage:
    """The table of a step with something else in it."""
    return lambda path: pq.write_table(change(pq.read_table(path / TABLE)), path / TABLE)


def column(name: str, value: Any, kind: pa.DataType) -> Damage:
    """A column of one value in every row."""

    def change(table: pa.Table) -> pa.Table:
        field = pa.field(name, kind)
        return table.set_column(
            table.schema.get_field_index(name), field, pa.array([value] * len(table), kind)
        )

    return rewritten(change)


def episode(text: str) -> Damage:
    """A column of episodes with this text in every row."""
    return rewritten(lambda table: table.append_column(EPISODE, pa.array([text] * len(table))))


def evaluation(change: Callable[[Any], Any]) -> Damage:
    def write(path: Path) -> None:
        atomic_write_json(path / EVALUATION, change(read_json(path / EVALUATION)))

    return write


def in_first_response(**changed: Any) -> Damage:
    def change(found: Any) -> Any:
        found["table"][0]["responses"][0] |= changed
        return found

    return evaluation(change)


def bomb(*, rows: int, chars: int, dictionary: bool) -> Damage:
    """A table of few bytes that unpacks to gigabytes: by compression, or by a dictionary with one
    value.
    """

    def write(path: Path) -> None:
        row = pq.read_table(path / TABLE).slice(0, 1).to_pylist()[0]
        with pq.ParquetWriter(
            path / TABLE, ROLLOUT_SCHEMA, compression="zstd", use_dictionary=dictionary
        ) as writer:
            columns = {
                name: pa.array([value], ROLLOUT_SCHEMA.field(name).type)
                for name, value in row.items()
            }
            columns["response"] = pa.array(["A" * chars])
            table = pa.table(columns, schema=ROLLOUT_SCHEMA)
            dictionaries = {
                name: pa.DictionaryArray.from_arrays(
                    pa.array([0] * rows, pa.int32()), table[name].combine_chunks()
                )
                for name in (
                    "problem_id",
                    "source",
                    "prompt",
                    "response",
                    "answer",
                    "finish",
                    "outcome",
                )
            }
            if not dictionary:
                for _ in range(rows):
                    writer.write_table(table)
                return
        rest = {
            name: pa.array([row[name]] * rows, field.type)
            for name, field in zip(ROLLOUT_SCHEMA.names, ROLLOUT_SCHEMA, strict=True)
            if name not in dictionaries
        }
        named = {name: (dictionaries | rest)[name] for name in ROLLOUT_SCHEMA.names}
        pq.write_table(pa.table(named), path / TABLE, store_schema=False)

    return write


ALIASES = "a0: &a0 [1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
DEEP = b"[" * 100_000

RUN: dict[str, tuple[Damage, str]] = {
    **{
        f"{name} is a pipe": (pipe(name), f"{name} is not a regular file")
        for name in ("config.yaml", "manifest.json")
    },
    **{
        f"{name} is a pipe": (pipe(name), f"{name} is not a regular file")
        for name in ("lock", "metrics.jsonl")
    },
    "summary.json is a pipe": (pipe("summary.json"), "summary.json is not a regular file"),
    "summary.json is a socket": (sock("summary.json"), "summary.json is not a regular file"),
    "metrics.jsonl is a folder": (folder("metrics.jsonl"), "metrics.jsonl is not a regular file"),
    **{
        f"{name} is a pipe": (pipe(name), f"{name} is not a folder")
        for name in ("eval", "rollouts", "checkpoints")
    },
    "a link to a device": (link("metrics.jsonl", "/dev/zero"), "holds links (metrics.jsonl)"),
    "a link to itself": (link("extra", "extra"), "holds links (extra)"),
    "a link to a folder": (link("rollouts", "/etc"), "holds links (rollouts)"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "manifest.json is no JSON": (content("manifest.json", b"\xff{"), "manifest.json is damaged"),
    "manifest.json is a list": (content("manifest.json", b"[1]"), "it holds a list"),
    "manifest.json without end": (content("manifest.json", DEEP), "brackets nested too deeply"),
    "manifest.json of 2 GB": (sparse("manifest.json"), "it has more than 268,435,456 bytes"),
    "summary.json is no object": (content("summary.json", b"3"), "summary.json is damaged"),
    "summary.json with odd values": (
        content("summary.json", b'{"exit_reason": {}}'),
        "summary.json is damaged",
    ),
    "config.yaml with aliases": (
        content("config.yaml", ALIASES.encode()),
        "it holds more than 10,000 values",
    ),
    "config.yaml with an alias of itself": (
        content("config.yaml", b"a: &a [*a]"),
        "stands inside its own anchor",
    ),
    "config.yaml without end": (content("config.yaml", DEEP), "nested more than 32 deep"),
    "config.yaml in another encoding": (content("config.yaml", b"model: \xff\xfe"), "is not UTF-8"),
    "config.yaml of 2 GB": (sparse("config.yaml"), "it has more than 262,144 bytes"),
    "config.yaml is a list": (content("config.yaml", b"- 1"), "must hold options"),
    "a text for a number": (
        line('{"step": 1, "time/step_s": "x"}'),
        "'time/step_s' must be a number, got 'x'",
    ),
    "a list for a number": (line('{"step": 1, "reward/mean": [1]}'), "must be a number"),
    "a number of 400 digits": (
        line(f'{{"step": 1, "reward/mean": 1{"0" * 400}}}'),
        "must be a number",
    ),
    "a number of 5,000 digits": (
        line(f'{{"step": 1, "reward/mean": 1{"0" * 5000}}}'),
        'expected an object with a "step"',
    ),
    "a step that is too large": (
        line('{"step": 1000000000000}'),
        'expected an object with a "step"',
    ),
    "a step before the first": (line('{"step": -1}'), 'expected an object with a "step"'),
    "a step that is true": (line('{"step": true}'), 'expected an object with a "step"'),
    "metrics in another encoding": (
        content("metrics.jsonl", b'{"step": 1, "\xff": 1}\n'),
        'expected an object with a "step"',
    ),
    "metrics without end": (
        content("metrics.jsonl", DEEP + b"\n"),
        'expected an object with a "step"',
    ),
    "metrics.jsonl of 2 GB": (sparse("metrics.jsonl"), "expected at most"),
}
"""Damage of the run itself: the page, status and every other command name it."""

TABLES: dict[str, tuple[Damage, str]] = {
    "10 bytes": (content(TABLE, b"0123456789"), "is damaged"),
    "no bytes": (content(TABLE, b""), "is damaged"),
    "2 GB of nothing": (sparse(TABLE), "is damaged"),
    "a pipe": (pipe(TABLE), "not a regular file"),
    "a socket": (sock(TABLE), "is damaged"),
    "a folder": (folder(TABLE), "is damaged"),
    "a link": (link(TABLE, "step_000001.parquet"), "it is a link"),
    "no prompt": (column("prompt", None, pa.string()), "rows have no prompt"),
    "no group": (column("group_id", None, pa.int64()), "rows have no group_id"),
    "no problem": (column("problem_id", None, pa.string()), "rows have no problem_id"),
    "correct is an integer": (
        column("correct", 1, pa.int64()),
        "column correct holds int64 instead of bool",
    ),
    "reward is a text": (
        column("reward", "1", pa.string()),
        "column reward holds string instead of double",
    ),
    "log-probabilities are texts": (
        column("engine_logprobs", ["x"], pa.list_(pa.string())),
        "engine_logprobs holds",
    ),
    "a log-probability is missing": (
        column("engine_logprobs", [None], pa.list_(pa.float32())),
        "lacks a value",
    ),
    "response is bytes": (
        column("response", b"\xff", pa.binary()),
        "column response holds binary instead of string",
    ),
    "an episode is no JSON": (episode("</script>"), "a row has no valid episode"),
    "an episode of other values": (
        episode('{"messages": [], "rewards": ["1"]}'),
        "a row has no valid episode",
    ),
    "an episode without end": (episode("[" * 100_000), "a row has no valid episode"),
    "an unknown outcome": (column("outcome", "odd", pa.string()), "an unknown outcome"),
    "an unknown end": (column("finish", "odd", pa.string()), "an unknown finish"),
    "a negative length": (column("response_tokens", -1, pa.int32()), "a negative response_tokens"),
    "a column is missing": (
        rewritten(lambda table: table.drop_columns(["response"])),
        "has no column response",
    ),
    "other columns": (rewritten(lambda table: pa.table({"x": [1]})), "has no column"),
    "unpacks to 1 GB": (
        bomb(rows=100, chars=10_000_000, dictionary=False),
        "it unpacks to more than 268,435,456 bytes",
    ),
    "a dictionary of 1 GB": (
        bomb(rows=100, chars=10_000_000, dictionary=True),
        "it unpacks to more than 268,435,456 bytes",
    ),
}
"""Damage of one table of responses: the page lists it, and the commands that read this table name
it.
"""

EVALUATIONS: dict[str, tuple[Damage, str]] = {
    "no JSON": (content(EVALUATION, b"{"), "is damaged"),
    "without end": (content(EVALUATION, DEEP), "brackets nested too deeply"),
    "a pipe": (pipe(EVALUATION), "it is not a regular file"),
    "a link": (link(EVALUATION, "../config.yaml"), "it is a link"),
    "2 GB": (sparse(EVALUATION), "it has more than"),
    "a list": (evaluation(lambda found: [found]), "holds a list"),
    "another encoding": (content(EVALUATION, b'{"\xff": 1}'), "is damaged"),
    "accuracy is a text": (evaluation(lambda found: found | {"accuracy": "1"}), "accuracy is '1'"),
    "accuracy is huge": (
        evaluation(lambda found: found | {"accuracy": 10**400}),
        "accuracy is 1000",
    ),
    "no sources": (evaluation(lambda found: found | {"by_source": None}), "by_source is None"),
    "a row is a number": (
        evaluation(lambda found: found | {"table": [1]}),
        "each row of its table",
    ),
    "a response is a number": (
        evaluation(lambda found: found["table"][0].update(responses=[1]) or found),
        "1 where an",
    ),
    "a response has no text": (in_first_response(text=None), "text is None"),
    "correct is a text": (in_first_response(correct="yes"), "correct is 'yes'"),
}
"""Damage of one evaluation: the page lists it, and shows the others."""

CASES = {
    f"{kind}: {name}": value
    for kind, cases in (("run", RUN), ("table", TABLES), ("evaluation", EVALUATIONS))
    for name, value in cases.items()
}
SAMPLE = (
    "run: config.yaml is a pipe",
    "run: metrics.jsonl is a folder",
    "run: a link to a device",
    "run: no manifest",
    "run: manifest.json without end",
    "run: manifest.json of 2 GB",
    "run: summary.json with odd values",
    "run: config.yaml with aliases",
    "run: a text for a number",
    "run: a number of 5,000 digits",
    "run: metrics in another encoding",
    "table: 10 bytes",
    "table: a socket",
    "table: a link",
    "table: no prompt",
    "table: correct is an integer",
    "table: a log-probability is missing",
    "table: an episode of other values",
    "table: an unknown outcome",
    "table: unpacks to 1 GB",
    "table: a dictionary of 1 GB",
    "evaluation: without end",
    "evaluation: a pipe",
    "evaluation: a row is a number",
    "evaluation: correct is a text",
)
"""A case of each kind of damage, for `make test`; the others are met at night."""
assert set(SAMPLE) <= set(CASES)


# --- requests and commands


def requests_for(name: str, group: int) -> list[str]:
    """Every endpoint of the page, for a run, its damaged step, and a group of it."""
    given = f"run={name}&step={STEP}"
    return [
        *(f"{path}?run={name}" for path in ("metrics", "rollouts", "problems", "evaluations")),
        f"rollouts?run={name}&text=1",
        f"rollouts?run={name}&sort=longest",
        f"group?{given}&group={group}",
        f"evaluation?{given}",
        f"evaluation?{given}&problem=x",
        f"paired?a_run={name}&a_step=0&b_run={name}&b_step={STEP}",
        f"options?run={name}",
        f"findings?run={name}",
        f"log?run={name}",
        f"paired?a_run=whole&a_step=0&b_run={name}&b_step={STEP}",
    ]


def ask(client: Client, path: str) -> tuple[int, Any]:
    status, _, body = client.request(f"/api/{path}")
    assert status in (200, 400, 404), (path, body)
    return status, json.loads(body)


def shown_reasons(client: Client, name: str, group: int) -> str:
    """Everything that the page says is wrong with a run."""
    summary = next(run for run in ask(client, "overview")[1]["runs"] if run["name"] == name)
    found = {
        path: ask(client, f"{path}?run={name}")[1]
        for path in ("metrics", "rollouts", "evaluations")
    }
    shown = ask(client, f"group?run={name}&step={STEP}&group={group}")[1]
    reasons = [
        summary["problem"],
        shown.get("error"),
        *(each.get("error") for each in found.values()),
    ]
    reasons += [*found["rollouts"].get("index", {}).get("problems", [])]
    reasons += [each.get("problem") for each in found["evaluations"].get("evaluations", [])]
    return "\n".join(filter(None, reasons))


COMMANDS: tuple[Callable[[Path], tuple[str, ...]], ...] = (
    lambda runs: ("view", str(runs / "hurt"), "--save", str(runs.parent / "report.html")),
    lambda runs: ("doctor", str(runs / "hurt")),
    lambda runs: ("compare", str(runs / "whole"), str(runs / "hurt")),
    lambda runs: ("explain", str(runs / "hurt"), "--step", str(STEP)),
    lambda runs: ("explain", str(runs / "hurt"), "--step", str(STEP + 1)),
    lambda runs: ("data", "stats", "builtin:sums", "--run", str(runs / "hurt")),
)
"""The commands that read a run, of a folder with a whole and a damaged one."""


def damaged(whole: Path, tmp_path: Path, case: str) -> Path:
    """A folder with a whole run and a damaged one."""
    runs = tmp_path / "runs"
    for name in ("whole", "hurt"):
        shutil.copytree(whole, runs / name)
    CASES[case][0](runs / "hurt")
    return runs


def answers_in_a_sentence(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The standard error of a command, which may refuse but not crash."""
    code, _, err = run(capsys, *command)
    assert code in (0, 2), (command, err)
    assert "Traceback" not in err
    assert code == 0 or "error: " in err, (command, err)
    return err


@contextmanager
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 700_000, f"{grown:,} kB"


@pytest.mark.parametrize(
    "case",
    [case if case in SAMPLE else pytest.param(case, marks=[pytest.mark.nightly]) for case in CASES],
)
def test_damage_is_named_and_every_other_run_is_shown(tmp_path, capsys, whole, case):
    """Two of six commands meet each damage, in rotation; all of them at night."""
    reason = CASES[case][1]
    runs = damaged(whole, tmp_path, case)
    group = pq.read_table(whole / TABLE)["group_id"][0].as_py()
    with little_memory():
        with serving(runs) as client:
            overview = {run["name"]: run for run in ask(client, "overview")[1]["runs"]}
            assert overview["whole"]["state"] == "finished"
            assert (overview["hurt"]["state"] == "damaged") == case.startswith("run")
            assert reason in shown_reasons(client, "hurt", group)
            for path in requests_for("hurt", group):
                ask(client, path)
            for path in ("metrics", "rollouts", "problems", "evaluations"):
                assert ask(client, f"{path}?run=whole")[0] == 200
        code, out, err = run(capsys, "status", str(runs / "whole"), str(runs / "hurt"))
        assert "Traceback" not in err
        assert "finished" in out
        assert (code, reason in " ".join(out.split())) == (
            (2, True) if case.startswith("run") else (0, False)
        )
        number = list(CASES).index(case)
        for command in (COMMANDS[number % 6], COMMANDS[(number + 3) % 6]):
            answers_in_a_sentence(capsys, *command(runs))
        if case.startswith("table"):
            assert reason in run(capsys, "explain", str(runs / "hurt"), "--step", str(STEP))[2]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_every_command_meets_every_damage(tmp_path, capsys, whole, case):
    runs = damaged(whole, tmp_path, case)
    with little_memory():
        for command in COMMANDS:
            answers_in_a_sentence(capsys, *command(runs))
        answers_in_a_sentence(capsys, "status", str(runs / "hurt"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("a[1]", "a1"),
        *(
            pytest.param(name, other, marks=[pytest.mark.nightly])
            for name, other in (("a*", "ab"), ("a?", "ab"), ("{a,b}", "a"), ("a%", "ab"))
        ),
    ],
)
def test_a_run_whose_name_is_a_pattern_shows_its_own_responses(
    tmp_path, capsys, whole, name, other
):
    for each, text in ((name, "OWN"), (other, "OF THE OTHER RUN")):
        shutil.copytree(whole, tmp_path / each)
        for path in (tmp_path / each / "rollouts").iterdir():
            table = pq.read_table(path)
            at = ROLLOUT_SCHEMA.get_field_index("response")
            pq.write_table(
                table.set_column(at, ROLLOUT_SCHEMA.field(at), pa.array([text] * len(table))), path
            )
    with serving(tmp_path / name) as client:
        (shown,) = [run["name"] for run in ask(client, "overview")[1]["runs"]]
        for text in ("", "&text=own", "&text=other"):
            rows = ask(client, f"rollouts?run={shown}{text}")[1]["rows"]
            assert {row["response"] for row in rows} == (set() if "other" in text else {"OWN"})
        group = ask(client, f"rollouts?run={shown}")[1]["rows"][0]
        found = ask(client, f"group?run={shown}&step={group['step']}&group={group['group_id']}")[1]
    assert {row["response"] for row in found["responses"]} == {"OWN"}
    run(capsys, "view", str(tmp_path / name), "--save", str(tmp_path / "report.html"))
    assert "OF THE OTHER RUN" not in (tmp_path / "report.html").read_text()


def test_files_that_vanish_while_they_are_read_are_an_answer(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "gone")
    shutil.copytree(whole, tmp_path / "whole")
    with serving(tmp_path) as client:
        ask(client, "rollouts?run=gone")
        for path in (tmp_path / "gone" / "rollouts").iterdir():
            path.unlink()
        for path in requests_for("gone", 0):
            ask(client, path)
        shutil.rmtree(tmp_path / "gone")
        for path in requests_for("gone", 0):
            ask(client, path)
        overview = {run["name"]: run["state"] for run in ask(client, "overview")[1]["runs"]}
    assert overview == {"gone": "damaged", "whole": "finished"}
