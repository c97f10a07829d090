"""Writes a run as one self-contained HTML file: the page of `dapo view` with its values.

The file opens without a network and without a server. Its security policy lists its scripts and its
style by their hashes, so that nothing else in it can run, whatever a model wrote.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

from dapo.analysis.view import queries, run_details
from dapo.analysis.view.server import SCRIPTS, page_file
from dapo.core.errors import ConfigError, DapoError
from dapo.core.files import atomic_write_text, damage_of
from dapo.core.terminal import printable, to_json
from dapo.core.text import shorten
from dapo.evaluation.pairing import paired_evaluations
from dapo.runs.rollout_index import RolloutIndex
from dapo.runs.run_reader import RunReader

MAX_GROUP_BYTES = 700_000
MAX_EVALUATION_BYTES = 250_000
MAX_PROBLEMS = 400
MAX_STEPS = 60
MAX_TOKENS_SHOWN = 300
MAX_TEXT = 4_000
MIN_TEXT = 100
EVALUATIONS_PAIRED = 4


def write_report(path: Path, output: Path | None = None) -> dict[str, Any]:
    """Write the report of a run, by default with its name in the current folder.

    Raises ConfigError for `output`.

    Returns `output`, `bytes`, and the numbers of groups in the report and in the run.
    """
    files = _reader(path)
    output = output or Path(f"{files.name}.html")
    if output.suffix.lower() != ".html":
        raise ConfigError(f"the report {output} must end in .html")
    if output.resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"{output} is inside the run, which is never changed; write the report elsewhere"
        )
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} for the report")
    html, data = _report(files)
    atomic_write_text(output, html)
    return {
        "output": str(output),
        "bytes": len(html.encode()),
        "groups": len(data["groups"]),
        "of_groups": data["of_groups"],
    }


def report_html(path: Path) -> str:
    """Return the text of the report of a run. Raises CheckpointError without a run."""
    html, _ = _report(_reader(path))
    return html


def _reader(path: Path) -> RunReader:
    """Return the reader of a run. Raises CheckpointError without one."""
    files = RunReader(path.resolve().name, path)
    files.require_run()
    return files


def _report(files: RunReader) -> tuple[str, dict[str, Any]]:
    """Return the report with the values in it."""
    run = queries.ViewedRun(files)
    try:
        with damage_of(files.directory.path):
            run.index.wait()
            run.tokens.wait()
            data = _collect(run)
    finally:
        run.close()
    return _page(data, title=files.name), data


def _collect(run: queries.ViewedRun) -> dict[str, Any]:
    """Return the values of the page, by the names under which its scripts read them."""
    num_groups, groups = _sample(run)
    problems = _problems(run)
    return {
        "overview": queries.overview([run]),
        "metrics": queries.metrics(run, {}),
        "options": _or_error(partial(run_details.options, run, {})),
        "findings": _or_error(partial(run_details.findings, run, {})),
        "logs": _or_error(partial(_logs, run)),
        "groups": groups,
        "of_groups": num_groups,
        "index": run.index.state(),
        "note": queries.missing_rollouts(run),
        "problems": problems,
        **_evaluations(run.files),
    }


def _problems(run: queries.ViewedRun) -> dict[str, Any]:
    """Return the first MAX_PROBLEMS problems, with the facts of the first page of them."""
    pages = []
    for offset in range(0, MAX_PROBLEMS, queries.MAX_PAGE):
        parameters = {"kind": "all", "limit": str(queries.MAX_PAGE), "offset": str(offset)}
        pages.append(queries.problems(run, parameters))
    rows = [row for page in pages for row in page["rows"]]
    return pages[0] | {"rows": rows}


def _logs(run: queries.ViewedRun) -> list[dict[str, Any]]:
    """Return the ends of the console's log and of the verifier's, where the run has them."""
    directory = run.files.directory
    paths = [path for path in (directory.console_log, directory.verifier_log) if path.is_file()]
    return [run_details.log(run, {"file": path.name}) for path in paths]


def _or_error(answer: Callable[[], Any]) -> Any:
    """Return the answer, or the `error` that the page shows in its place."""
    try:
        return answer()
    except DapoError as error:
        return {"error": str(error)}


def _sample(run: queries.ViewedRun) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of stored groups, and the most informative ones that fit, at least one."""
    num_groups, keys = pick_groups(run.index)
    groups: list[dict[str, Any]] = []
    budget = MAX_GROUP_BYTES
    for step, group_id in keys:
        parameters = {"step": str(step), "group": str(group_id)}
        group = queries.group(run, parameters, max_tokens=MAX_TOKENS_SHOWN)
        for response in group["responses"]:
            shorten_texts(response)
        budget -= len(to_json(group))
        if budget < 0 and groups:
            break
        groups.append(group)
    groups.sort(key=lambda group: (-group["step"], group["group_id"]))
    return num_groups, groups


def shorten_texts(response: dict[str, Any]) -> None:
    """Cut the texts of a response, which its turns or calls share; the page shows where."""
    response["response"] = shorten(response["response"], MAX_TEXT)
    turns = response["turns"] or ()
    for turn in turns:
        max_chars = max(MIN_TEXT, MAX_TEXT // len(turns))
        turn["text"] = shorten(turn["text"], max_chars)
    calls = response["calls"] or ()
    for call in calls:
        max_chars = max(MIN_TEXT, MAX_TEXT // len(calls))
        call["text"] = shorten(call["text"], max_chars)
        call["tool_calls"] = [shorten(text, max_chars) for text in call["tool_calls"]]
        for message in call["messages"]:
            message["text"] = shorten(message["text"], max_chars)
        # the page shows the messages in the place of their tokens
        if call["context"] is not None and sum(map(len, call["context"])) > max_chars:
            call["context"] = None


def pick_groups(index: RolloutIndex) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of stored groups, and the keys of the most informative ones.

    Up to MAX_STEPS evenly spread steps, the first and the last included, each give the first, the
    best and the worst group that trained; then one of each other outcome; then the other groups.
    """
    groups = index.groups()
    steps = sorted({group["step"] for group in groups})
    if len(steps) > MAX_STEPS:
        last = len(steps) - 1
        indices = {round(i * last / (MAX_STEPS - 1)) for i in range(MAX_STEPS)}
        steps = [steps[index] for index in sorted(indices)]
    # sorted, these give the best rank first, and of one rank the latest step
    order: list[tuple[int, int, int]] = []
    for step in steps:
        step_groups = [group for group in groups if group["step"] == step]
        for rank, group in _by_interest(step_groups):
            order.append((rank, -step, group["group_id"]))
    order.sort()
    keys = [(-negative_step, group_id) for _, negative_step, group_id in order]
    return len(groups), keys


def _by_interest(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the groups of a step with their ranks, the most informative first."""
    trained = [group for group in groups if group["outcome"] == "trained"]
    by_score = sorted(trained, key=lambda group: (group["score"] or 0.0, group["group_id"]))
    best_and_worst = []
    if by_score:
        best_and_worst = [by_score[-1], by_score[0]]
    if groups and groups[0]["outcome"] == "trained":
        best_and_worst.append(groups[0])
    first_of_outcome = {}
    for group in reversed(groups):
        if group["outcome"] != "trained":
            first_of_outcome[group["outcome"]] = group
    ids: set[int] = set()
    ranks = (best_and_worst, list(first_of_outcome.values()), groups)
    for rank, rank_groups in enumerate(ranks):
        for group in rank_groups:
            if group["group_id"] not in ids:
                ids.add(group["group_id"])
                yield rank, group


def _evaluations(files: RunReader) -> dict[str, Any]:
    """Return summaries of all evaluations, and tables and differences of some."""
    summaries = files.evaluations()
    steps = [summary["step"] for summary in summaries if "problem" not in summary]
    if len(steps) > EVALUATIONS_PAIRED:
        half = EVALUATIONS_PAIRED // 2
        steps = [*steps[:half], *steps[-half:]]
    tables = {}
    budget = MAX_EVALUATION_BYTES
    first_step = steps[:1]
    later_steps = steps[1:]
    # those that a reader wants most: the first, then from the last one back
    for step in [*first_step, *reversed(later_steps)]:
        table = files.evaluation(step)
        budget -= len(to_json(table))
        if budget >= 0:
            tables[str(step)] = table
    differences = {}
    for first, second in combinations(steps, 2):
        pair = partial(paired_evaluations, files.evaluation(first), files.evaluation(second))
        # a resumed run may have evaluated with other settings
        differences[f"{first}:{second}"] = _or_error(pair)
    return {"evaluations": summaries, "evaluation_tables": tables, "paired": differences}


def _page(data: dict[str, Any], *, title: str) -> str:
    """Return the HTML of the report: scripts, style and values, and a policy of their hashes."""
    scripts = [_script(name) for name in SCRIPTS]
    style = page_file("style.css")
    script_hashes = " ".join(map(_hash, scripts))
    policy = (
        f"default-src 'none'; script-src {script_hashes}; style-src {_hash(style)};"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    values = to_json(data).replace("<", "\\u003c")  # no text can then end the element
    head, body = page_file("index.html").split("</head>")
    head = head.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    head = head.replace("<title>dapo view</title>", f"<title>{escape(printable(title))}</title>")
    head = head.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    body = re.sub(r"<script src=[^>]*></script>\n", "", body)
    script_elements = "\n".join(f"<script>{text}</script>" for text in scripts)
    data_element = f'<script type="application/json" id="report-data">{values}</script>'
    body = body.replace("</body>", f"{data_element}\n{script_elements}\n</body>")
    return f"{head}</head>{body}"


def _script(name: str) -> str:
    """Return a script of the page, in which no text ends the element that it stands in."""
    return re.sub(r"</(script)", r"<\\/\1", page_file(name), flags=re.IGNORECASE)


def _hash(text: str) -> str:
    """Return the hash of an element's text, as a security policy lists it."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    code = base64.b64encode(digest).decode("ascii")
    return f"'sha256-{code}'"
