"""Pages keep what they promise: options, commands, targets and files that they name exist, examples
are valid.
"""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dapo.cli.main import app
from dapo.config import SECTIONS, build_config
from dapo.config.load import read_options
from dapo.config.option_fields import options_of
from dapo.config.options import STAGES
from dapo.config.other_names import COUNTERPARTS
from dapo.config.stages import build_stages
from dapo.core.errors import ConfigError
from dapo.training.rules.all_rules import RULES
from helpers.paths import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md")))
}
COMMAND_LINE: Any = typer.main.get_command(app)
OPTIONS = {name for name, _ in options_of()}
SHIPPED = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
"""The shipped configurations by their short names."""
THEIRS = {
    "docs/coming_from.md": {
        row.name.removesuffix(".*") for rows in COUNTERPARTS.values() for row in rows
    }
}
"""Options of other systems, on the page about them."""
FREE = ("reward.options.", "data.train.", "data.eval.", "data.demonstrations.", "reward.verifier.")
"""Below these a user's own names stand."""
FILES = (".py", ".json", ".jsonl", ".parquet", ".yaml", ".md", ".png")
COMMANDS = ("", "sh", "bash", "console")
ANY = {"model": "tiny-random", "data": {"train": "builtin:sums"}}
"""What an example of single options leaves out."""


def quoted(page: str) -> list[str]:
    """What stands in backquotes within lines."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    )


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and text of fenced blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


def unknown_options(page: str) -> list[str]:
    """Quoted `section.name`s, with or without a value, that are not options."""
    named = re.findall(
        rf"(?<![\w./-])((?:{'|'.join(sorted(SECTIONS))})(?:\.\w+)+)", "\n".join(quoted(page))
    )
    names = {name for name in named if not name.endswith(FILES) and not name.startswith(FREE)}
    return sorted(name for name in names if name not in OPTIONS)


def bad_yaml(page: str) -> list[str]:
    """What is wrong with blocks of options; what an example leaves out is filled in."""
    faults = []
    for language, text in blocks(page):
        if language == "yaml":
            try:
                options = ANY | yaml.safe_load(text)
                if STAGES in options:
                    build_stages(options)
                else:
                    build_config(options)
            except (ConfigError, yaml.YAMLError) as error:
                faults.append(str(error))
    return faults


def commands_on(page: str) -> Iterator[list[str]]:
    """`dapo ...` in blocks that are no other language and in quotes, as words."""
    lines = [
        line
        for language, text in blocks(page)
        if language in COMMANDS
        for line in text.splitlines()
    ]
    for line in [*lines, *quoted(page)]:
        if line.startswith("dapo "):
            yield shlex.split(line.replace("...", " "), comments=True)[1:]


def bad_commands(page: str) -> list[str]:
    """Commands or options that do not exist, configs that are not shipped, overrides that are
    refused.
    """
    return [fault for words in commands_on(page) if (fault := _fault_of(words)) is not None]


def _fault_of(words: list[str]) -> str | None:
    command = COMMAND_LINE
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] == "|" or "|" in rest[1:2]:
            return None  # `dapo data a | b | c` lists commands
        if rest[0] not in command.commands:
            return f"no command {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    options = [word.strip("[]").split("=")[0] for word in rest if word.startswith(("--", "[--"))]
    if wrong := [option for option in options if option not in known]:
        return f"dapo {' '.join(words)}: no option {', '.join(wrong)}"
    takes_value = {
        name
        for parameter in command.params
        for name in parameter.opts
        if not getattr(parameter, "is_flag", False)
    }
    rest = [
        word for before, word in zip(["", *rest], rest, strict=False) if before not in takes_value
    ]
    overrides = [word for word in rest if re.match(r"[a-z_]+(\.\w+)*=", word)]
    config = next((word for word in rest if word.startswith("configs/") or word in SHIPPED), None)
    try:
        if config is None:
            # without training no length is punished
            is_training = words[0] not in ("eval", "data")
            build_config(ANY if is_training else ANY | {"overlong": {"mode": "off"}}, overrides)
            return None
        options = read_options(SHIPPED.get(config, ROOT / config))
        if STAGES in options:
            build_stages(options, overrides)
        else:
            build_config(options, overrides)
    except ConfigError as error:
        return f"dapo {' '.join(words)}: {error}"
    return None


def missing_targets(page: str) -> list[str]:
    """`make NAME` without a rule."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(
        [*(text for language, text in blocks(page) if language in COMMANDS), *quoted(page)]
    )
    named = set(re.findall(r"^make ([a-z][\w-]*)", text, flags=re.MULTILINE))
    return sorted(
        name for name in named if not re.search(rf"^{name}:", makefile, flags=re.MULTILINE)
    )


def dead_links(page: str, folder: Path) -> list[str]:
    """Links and images that lead nowhere on this disk."""
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", page)]
    return [
        target
        for target in targets
        if target and "://" not in target and not (folder / target).exists()
    ]


def missing_tests(page: str) -> list[str]:
    """Named test files that are not there, and named tests that are in none of them."""
    files = [
        name
        for name in re.findall(r"(?:\w+/)*tests/[\w/]+\.py", page)
        if not (ROOT / name).is_file()
    ]
    named = re.findall(r"((?:\w+/)*test_\w+\.py)::(test_\w+)", page)
    return files + [
        f"{file}::{test}"
        for file, test in named
        if test not in names_of_tests(file.removeprefix("tests/"))
    ]


@cache
def names_of_tests(file: str) -> set[str]:
    """The names of the tests in a file below tests/; none if there is no such file."""
    path = ROOT / "tests" / file
    return (
        set(re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8")))
        if path.is_file()
        else set()
    )


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists_and_its_examples_are_valid(name: str):
    path = PAGES[name]
    page = path.read_text(encoding="utf-8")
    assert set(unknown_options(page)) <= THEIRS.get(name, set())
    assert bad_yaml(page) == []
    assert bad_commands(page) == []
    assert missing_targets(page) == []
    assert dead_links(page, path.parent) == []
    assert missing_tests(page) == []


@pytest.mark.parametrize("title", ["On a laptop", "On one GPU server", "On a cluster"])
def test_the_section_of_a_size_begins_with_a_command_that_can_be_typed(title: str):
    page = PAGES["docs/machines.md"].read_text(encoding="utf-8")
    language, text = blocks(page.partition(f"\n## {title}\n")[2])[0]
    (line,) = text.splitlines()
    command, _, config, *_ = shlex.split(line)
    assert (language, command) == ("", "dapo")
    assert config == "my.yaml" or (ROOT / config).is_file()
    anchor = title.lower().replace(" ", "-")
    assert f"(docs/machines.md#{anchor})" in PAGES["README.md"].read_text(encoding="utf-8")


def test_the_page_of_findings_counts_the_rules():
    assert f"{len(RULES)} rules looked" in PAGES["docs/doctor.md"].read_text(encoding="utf-8")


def test_the_gpu_page_names_what_its_acceptance_prints():
    page = PAGES["docs/machines.md"].read_text(encoding="utf-8")
    source = (ROOT / "benchmarks" / "gpu_acceptance.py").read_text(encoding="utf-8")
    for text in ("torch finds no CUDA device here", "the report: "):
        assert text in source
        assert text in page


def test_each_kind_of_mistake_is_found(tmp_path: Path):
    page = """\
Set `loss.clip_hihg=0.3`, `rollout.vllm.cache`, `reward.options.x` or `loss.clip_high`; see `algo/loss.py`, `train.py`
and `time/eval.x`. Not `dapo trian x.yaml`, `dapo train x.yaml --run-dri y`, [here](nowhere.md), tests/test_none.py.

```yaml
loss: {clip_hihg: 0.3}
```

```
make nothing
dapo train configs/none.yaml
dapo train configs/tiny.yaml loss.clip_hihg=0.3    # a comment
dapo resume RUN_DIR [key=value ...]
dapo train gsm8k_laptop stages.rewards.data.train.path=train.jsonl
dapo train gsm8k_laptop stages.reward.optim.lr=1
```
"""
    assert unknown_options(page) == ["loss.clip_hihg", "rollout.vllm.cache"]
    assert len(bad_yaml(page)) == 1
    assert [fault.split(":")[0] for fault in bad_commands(page)] == [
        "dapo train configs/none.yaml",
        "dapo train configs/tiny.yaml loss.clip_hihg=0.3",
        "dapo train gsm8k_laptop stages.reward.optim.lr=1",
        "no command trian x.yaml",
        "dapo train x.yaml --run-dri y",
    ]
    assert missing_targets(page) == ["nothing"]
    assert dead_links(page, tmp_path) == ["nowhere.md"]
    assert missing_tests(page) == ["tests/test_none.py"]
    named = (
        "`system/test_docs.py::test_each_kind_of_mistake_is_found`,"
        " `tests/system/test_docs.py::test_nothing`"
    )
    assert missing_tests(named + " and `nowhere/test_x.py::test_y`") == [
        "tests/system/test_docs.py::test_nothing",
        "nowhere/test_x.py::test_y",
    ]


def test_the_checks_find_something_on_the_pages_at_all():
    pages = [path.read_text(encoding="utf-8") for path in PAGES.values()]
    assert sum(len(list(commands_on(page))) for page in pages) > 30
    assert sum(len(re.findall(r"`\w+\.\w+", page)) for page in pages) > 100
    assert sum(language == "yaml" for page in pages for language, _ in blocks(page)) >= 4


def navigation() -> dict[str, list[str]]:
    """The pages of each group of the site, in its order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    groups: list[dict[str, Any]] = yaml.safe_load(text[text.index("nav:\n") :])["nav"]
    return {
        name: [page for entry in pages for page in entry.values()]
        for group in groups
        for name, pages in group.items()
    }


def test_the_laboratory_is_the_last_group_of_the_site_and_has_its_folder():
    assert list(navigation())[-1] == "Laboratory"
    assert all(page.startswith("lab/") for page in navigation()["Laboratory"])


@pytest.mark.parametrize("name", ["README.md", "AGENTS.md", "docs/index.md"])
def test_people_and_tools_begin_with_the_same_command(name: str):
    language, text = blocks(PAGES[name].read_text(encoding="utf-8"))[0]
    commands = [line.split("#")[0].strip() for line in text.splitlines()]
    assert language == ""
    # the README begins with the clone and its folder
    assert commands[2 if name == "README.md" else 0] == "make quickstart"


def test_the_site_begins_as_the_readme_does():
    begins = []
    for name in ("README.md", "docs/index.md"):
        title, sentence, picture, caption = PAGES[name].read_text("utf-8").split("\n\n")[:4]
        begins.append((title, sentence, picture.replace("(docs/", "("), caption))
    assert begins[0] == begins[1]
