"""The pages and tables that `make docs` makes from the code: metrics, options, methods.

Run as a program with the name `metrics` or `options`, it prints that page; given pages, it renews
their tables.
"""

import re
import sys
from pathlib import Path

from dapo.algo.estimator_table import ESTIMATORS
from dapo.algo.surrogate_table import SURROGATES
from dapo.config.option_entries import option_entries, yaml_text
from dapo.config.option_fields import CONDITIONS
from dapo.core.terminal import print_text
from dapo.runs.metric_table import METRICS, SECTIONS
from dapo.runs.outcomes import OUTCOME_MEANINGS


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        (
            "<!-- Made from src/dapo/runs/metrics.tsv by `make docs`: change the table, not this"
            " page. -->"
        ),
        "# Metrics",
        "",
        (
            "The metrics of `metrics.jsonl`, one line per step. *Updates* is the way in which the"
            " values of a step's optimizer updates are combined; without an entry the metric"
            " describes the whole step. *When* is the condition under which a metric is logged; a"
            " step without trained tokens has no means over tokens."
        ),
    ]
    for section, text in SECTIONS.items():
        lines += [
            "",
            f"## {section}/",
            "",
            _linked(text),
            "",
            "| metric | unit | meaning | paper | updates | when |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.unit} | {m.meaning} | {m.paper} | {m.over_updates} | {m.when} |"
            for m in METRICS
            if m.name.startswith(f"{section}/")
        ]
        if section == "rollout":
            lines += ["", "The outcome of a group is one of:", ""]
            lines += [f"- `{outcome}`: {meaning}." for outcome, meaning in OUTCOME_MEANINGS.items()]
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """docs/options.md."""
    lines = [
        "<!-- Made from src/dapo/config/ by `make docs`: change the options, not this page. -->",
        "# Options",
        "",
        (
            "Everything that a YAML file or `KEY=VALUE` on the command line can set; `dapo show"
            " options loss` prints a section. *Paper* is the paper's value, where it has one. *Only with*"
            " is the condition under which the option has an effect; `dapo check` lists what is set"
            " without it."
        ),
        "",
        (
            "On the command line the option's type decides how its value is read. Of a text"
            " everything behind the first `=` is the value, letter by letter:"
            " `'data.instruction=Reply with #### and a number'` (the outer quotes are the shell's)."
            " Where an option may be something else, too, `null` is none, a number a number,"
            " `{...}` a mapping and `[...]` a list; a backslash in front makes it a text"
            " (`data.system=\\null`). The value that meanings call none is written `null`: the word"
            " `none` is a text, or an error. Options of a verifier or an environment are YAML where"
            " they are a number, `true`, `null`, a text in quotes, `{...}` or `[...]`, and texts"
            " otherwise; all other options are YAML. An option may be set only once in a call."
        ),
    ]
    of_sections: dict[str, list[str]] = {"A run": []}
    for entry in option_entries():
        default = entry.default_text if entry.is_required else f"`{entry.default_text}`"
        paper = f"`{yaml_text(entry.paper)}`" if entry.has_paper_value else ""
        shown = CONDITIONS.get(entry.condition) or (
            f"`{entry.condition}`" if entry.condition else ""
        )
        row = (
            f"| `{entry.name}` | {default} | {paper} | {entry.unit} | {_linked(entry.meaning)} |"
            f" {shown} |"
        )
        row = row.replace("*", r"\*")
        of_sections.setdefault(entry.section or "A run", []).append(row)
    for heading, rows in of_sections.items():
        title = heading if heading == "A run" else f"`{heading}`"
        lines += [
            "",
            f"## {title}",
            "",
            "| option | default | paper | unit | meaning | only with |",
            "|---|---|---|---|---|---|",
        ]
        lines += rows
    return "\n".join(lines) + "\n"


def _linked(text: str) -> str:
    """The text with links to the pages that it names."""
    return re.sub(r"`dapo (?:show )?docs (\w+)`", r"[\1.md](\1.md)", text)


def with_methods(page: str) -> str:
    """The text of docs/losses.md with new tables between its marks `<!-- surrogates -->` and `<!--
    estimators -->`.
    """
    surrogates = ["| `loss.surrogate` | per token | from |", "|---|---|---|"]
    surrogates += [f"| `{name}` | {row.term} | {row.source} |" for name, row in SURROGATES.items()]
    estimators = ["| `advantage.estimator` | A of response i | source |", "|---|---|---|"]
    estimators += [
        f"| `{name}` | {row.formula} | {row.source} |" for name, row in ESTIMATORS.items()
    ]
    page = _with_table(page, "surrogates", "\n".join(surrogates))
    return _with_table(page, "estimators", "\n".join(estimators))


def _with_table(page: str, name: str, table: str) -> str:
    mark = f"<!-- {name} -->"
    return re.sub(f"{mark}.*?{mark}", lambda _: f"{mark}\n{table}\n{mark}", page, flags=re.DOTALL)


if __name__ == "__main__":
    pages = {"metrics": metrics_page, "options": options_page}
    for argument in sys.argv[1:]:
        if argument in pages:
            print_text(pages[argument](), end="")
            continue
        path = Path(argument)
        path.write_text(with_methods(path.read_text(encoding="utf-8")), encoding="utf-8")
