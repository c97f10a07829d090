"""Text on a terminal: what it may do there is nothing, whatever path it takes."""

import ast
import io
import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.table import Column, Table
from rich.text import Text

import dapo
from dapo.cli import main as cli
from dapo.core.terminal import UNSAFE, print_text, printable, printable_json, to_json
from dapo.runs.console import ProgressDisplay, SafeConsole

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r\x08[red]m[/red] :bomb: \ud800"
ESCAPED = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202eevil\\u2066\\r\\x08[red]m[/red] :bomb: \\ud800"
SOURCES = Path(dapo.__file__).parents[1]
RIM = {
    "dapo/core/terminal.py": {"print"},
    "dapo/runs/console.py": {"Console"},
    # inside of the sandbox: JSON to the parent's pipe, and output of a program, which is kept in
    # memory
    "dapo/libs/code_sandbox/confined/probes.py": {"sys.stdout.write"},
    "dapo/libs/code_sandbox/confined/remote.py": {"sys.stdout.write"},
    # the paths of the files that it compiled, in the package's own folder
    "dapo/libs/cpu_kernels/__main__.py": {"print"},
}
"""The files that write to a stream, and by what."""


def test_every_character_that_controls_is_hidden_or_separates_lines_is_unsafe_and_no_other_is():
    categories = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    for character in map(chr, range(sys.maxunicode + 1)):
        is_unsafe = UNSAFE.match(character) is not None
        if unicodedata.category(character) in categories and character not in "\n\t":
            assert is_unsafe, hex(ord(character))
        elif is_unsafe:
            # other versions know more of them
            assert unicodedata.category(character) == "Cn", hex(ord(character))


def test_text_is_shown_as_it_was_written_and_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
):
    print_text(ATTACK)
    print_text(ATTACK, file=sys.stderr)
    assert capsys.readouterr() == (ESCAPED + "\n", ESCAPED + "\n")


def shown_by_console(*renderables: object) -> str:
    console = SafeConsole(
        file=io.StringIO(), width=200, force_terminal=True, color_system="truecolor"
    )
    for renderable in renderables:
        console.print(renderable)
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]


def test_a_table_of_attacks_is_a_table_of_text():
    table = Table("[bold]name[/bold]", ATTACK, title=ATTACK, caption=ATTACK)
    table.add_row(ATTACK, Text(ATTACK))
    shown = shown_by_console(table, ATTACK, Text(ATTACK))
    assert UNSAFE.search(shown) is None
    assert shown.count("\\x1b]0;owned") == 7
    assert shown.count("[red]m[/red] :bomb:") == 7
    assert "[bold]name[/bold]" in shown
    rows = [line for line in shown.splitlines() if line.startswith(("│", "┃"))]
    assert len({len(row) for row in rows}) == 1  # widths are those of what is shown


def test_a_table_is_shown_where_the_encoding_lacks_its_characters():
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii", write_through=True) as stream:
        console = SafeConsole(file=stream, width=12)
        table = Table(Column("name", no_wrap=True), box=None)
        table.add_row("a name that is too long")
        # a styled text is made without the console
        table.add_row(Text("\N{GREEK SMALL LETTER PI}"))
        console.print(table)
        lines = written.getvalue().decode("ascii").splitlines()
    assert [line.strip() for line in lines] == ["name", "a name th~", "\\u03c0"]


def test_the_progress_display_shows_attacks_as_text():
    stream = io.StringIO()
    display = ProgressDisplay(3, stream=stream)
    display.message(ATTACK)
    display.log(1, {f"eval/{ATTACK}/accuracy": 0.5})
    display.close()
    assert UNSAFE.search(stream.getvalue()) is None
    assert stream.getvalue().count("\\x1b]0;owned") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", f"{ATTACK[:-1]}.yaml"],
        ["train", f"--{ATTACK[:-1]}"],
        ["train", "configs/tiny.yaml", f"{ATTACK[:-1]}=1"],
        ["train", "configs/tiny.yaml", f"loss.clip_low={ATTACK[:-1]}"],
        ["train", "configs/tiny.yaml", f"model.name=/{ATTACK[:-1]}"],
        ["data", "stats", f"{ATTACK[:-1]}.jsonl"],
        ["resume", ATTACK[:-1]],
        ["test", f"{ATTACK[:-1]}:f"],
        [ATTACK[:-1]],
    ],
    ids=lambda arguments: arguments[0][:6],
)
def test_a_command_line_that_is_refused_is_shown_as_text(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(cli.warnings, "formatwarning", cli.warnings.formatwarning)
    monkeypatch.chdir(SOURCES.parent)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert UNSAFE.search(shown.out + shown.err) is None
    assert "owned" in shown.err


def fail(*_: object, **__: object) -> None:
    raise ValueError(ATTACK)


def test_a_traceback_and_a_warning_are_shown_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(cli.warnings, "formatwarning", cli.warnings.formatwarning)
    monkeypatch.setattr(cli, "command_of", lambda app, words: fail)
    with pytest.raises(ValueError, match="owned") as caught:
        cli.main([])
    sys.excepthook(ValueError, caught.value, caught.tb)
    assert UNSAFE.search(cli.warnings.formatwarning(ATTACK, UserWarning, "file.py", 1)) is None
    shown = capsys.readouterr().err
    assert UNSAFE.search(shown) is None
    assert "ValueError: \\x1b]0;owned" in shown


def test_json_that_is_written_has_equal_value_and_nothing_that_controls_a_terminal():
    value = {ATTACK: [ATTACK, "\U000e0041\U0001f600é\t\n", 1.5]}
    text = to_json(value)
    assert UNSAFE.search(text) is None
    assert "\U0001f600é" in text
    assert json.loads(text) == value
    assert json.loads(printable_json(json.dumps(value, ensure_ascii=False))) == value


def test_printable_text_stays_the_same_when_it_is_made_printable_again():
    assert printable(printable(ATTACK)) == printable(ATTACK) == ESCAPED


def dotted_name(node: ast.expr) -> str:
    """The text `a.b.c` of a function that is called; of another expression the end of it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def printing(path: Path) -> set[str]:
    """The ways to a terminal that a source file uses without the modules that escape."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    if re.search(r"print|echo|write|exit|rich", text) is None:
        return found
    for node in ast.walk(ast.parse(text)):
        name = dotted_name(node.func) if isinstance(node, ast.Call) else ""
        if name in (
            "print",
            "typer.echo",
            "typer.secho",
            "rich.print",
            "pprint",
            "traceback.print_exc",
        ):
            found.add(name)
        if re.fullmatch(r"(sys\.)?(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?", name):
            found.add(name)
        if name == "sys.exit" and node.args and isinstance(node.args[0], ast.JoinedStr | ast.BinOp):  # type: ignore[attr-defined]
            found.add("sys.exit with a text")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rich"):
            found |= {alias.name for alias in node.names} & {
                "Console",
                "print",
                "escape",
                "inspect",
            }
    return found


def test_nothing_prints_but_the_modules_that_escape():
    found = {path.relative_to(SOURCES).as_posix(): printing(path) for path in SOURCES.rglob("*.py")}
    assert {name: ways for name, ways in found.items() if ways} == RIM


@pytest.mark.parametrize(
    "line",
    [
        "print(x)",
        "sys.stderr.write(x)",
        "sys.stdout.buffer.write(x)",
        "typer.echo(x)",
        "sys.exit(f'error: {x}')",
        "from rich.console import Console",
        "from rich import print",
        "traceback.print_exc()",
    ],
)
def test_a_line_that_prints_is_found(tmp_path: Path, line: str):
    (tmp_path / "m.py").write_text(f"def f(x):\n    {line}\n")
    assert printing(tmp_path / "m.py")
