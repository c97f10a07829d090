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
DETAILS = (run_details.options, run_details.findings)


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
    num_groups, groups = _sample(run)
    all_rows = {"kind": "all", "limit": str(queries.MAX_PAGE)}
    pages = [
        queries.problems(run, all_rows | {"offset": str(at)})
        for at in range(0, MAX_PROBLEMS, queries.MAX_PAGE)
    ]
    return {
        "overview": queries.overview([run]),
        "metrics": queries.metrics(run, {}),
        **{query.__name__: _or_error(partial(query, run, {})) for query in DETAILS},
        "logs": _or_error(partial(_logs, run)),
        "groups": groups,
        "of_groups": num_groups,
        "index": run.index.state(),
        "note": queries.missing_rollouts(run),
        "problems": pages[0] | {"rows": [row for page in pages for row in page["rows"]]},
        **_evaluations(run.files),
    }


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
    total, order = pick_groups(run.index)
    chosen: list[dict[str, Any]] = []
    budget = MAX_GROUP_BYTES
    for step, group_id in order:
        group = queries.group(
            run, {"step": str(step), "group": str(group_id)}, max_tokens=MAX_TOKENS_SHOWN
        )
        for response in group["responses"]:
            shorten_texts(response)
        budget -= len(to_json(group))
        if budget < 0 and chosen:
            break
        chosen.append(group)
    return total, sorted(chosen, key=lambda group: (-group["step"], group["group_id"]))


def shorten_texts(response: dict[str, Any]) -> None:
    """Cut the texts of a response, which its turns or calls share; the page shows where."""
    response["response"] = shorten(response["response"], MAX_TEXT)
    turns = response["turns"] or ()
    for turn in turns:
        turn["text"] = shorten(turn["text"], max(MIN_TEXT, MAX_TEXT // len(turns)))
    calls = response["calls"] or ()
    for call in calls:
        most = max(MIN_TEXT, MAX_TEXT // len(calls))
        call["text"] = shorten(call["text"], most)
        call["tool_calls"] = [shorten(text, most) for text in call["tool_calls"]]
        for message in call["messages"]:
            message["text"] = shorten(message["text"], most)
        # the page shows the messages in the place of their tokens
        if call["context"] is not None and sum(map(len, call["context"])) > most:
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
    ranked: list[tuple[int, int, int]] = []
    for step in steps:
        here = [group for group in groups if group["step"] == step]
        ranked += [(rank, -step, group["group_id"]) for rank, group in _by_interest(here)]
    return len(groups), [(-step, group_id) for _, step, group_id in sorted(ranked)]


def _by_interest(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the groups of a step with their ranks, the most informative first."""
    trained = [group for group in groups if group["outcome"] == "trained"]
    by_score = sorted(trained, key=lambda group: (group["score"] or 0.0, group["group_id"]))
    first = [*by_score[-1:], *by_score[:1]]
    if groups and groups[0]["outcome"] == "trained":
        first.append(groups[0])
    by_outcome = {}
    for group in reversed(groups):
        if group["outcome"] != "trained":
            by_outcome[group["outcome"]] = group
    ids: set[int] = set()
    for rank, kind in enumerate((first, list(by_outcome.values()), groups)):
        for group in kind:
            if group["group_id"] not in ids:
                ids.add(group["group_id"])
                yield rank, group


def _evaluations(files: RunReader) -> dict[str, Any]:
    """Return summaries of all evaluations, and tables and differences of some."""
    summaries = files.evaluations()
    readable = [summary["step"] for summary in summaries if "problem" not in summary]
    steps = readable
    if len(readable) > EVALUATIONS_PAIRED:
        half = EVALUATIONS_PAIRED // 2
        steps = [*readable[:half], *readable[-half:]]
    tables = {}
    paired = {}
    budget = MAX_EVALUATION_BYTES
    for step in [*steps[:1], *steps[:0:-1]]:  # the first, then from the last one back
        table = files.evaluation(step)
        budget -= len(to_json(table))
        if budget >= 0:
            tables[str(step)] = table
    for a, b in combinations(steps, 2):
        # a resumed run may have evaluated with other settings
        difference = partial(paired_evaluations, files.evaluation(a), files.evaluation(b))
        paired[f"{a}:{b}"] = _or_error(difference)
    return {"evaluations": summaries, "evaluation_tables": tables, "paired": paired}


def _page(data: dict[str, Any], *, title: str) -> str:
    """Return the HTML of the report: scripts, style and values, and a policy of their hashes."""
    scripts = [page_file(name) for name in SCRIPTS]
    scripts = [re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE) for text in scripts]
    style = page_file("style.css")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)};"
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
    inline = "\n".join(f"<script>{text}</script>" for text in scripts)
    data_element = f'<script type="application/json" id="report-data">{values}</script>'
    body = body.replace("</body>", f"{data_element}\n{inline}\n</body>")
    return f"{head}</head>{body}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
