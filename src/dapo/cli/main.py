"""The `dapo` command."""

import errno
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from dapo import __version__
from dapo.cli import analysis_commands, run_commands
from dapo.cli.arguments import (
    DATA,
    REFERENCE,
    TRAIN,
    AsJson,
    Changes,
    complete_config,
    complete_page,
    complete_verifier,
)
from dapo.cli.data import data_app
from dapo.core.errors import EXIT_CODES, ConfigError, ConversionFault, DapoError
from dapo.core.secrets import mask_text
from dapo.core.terminal import print_json, print_text, printable, stdout_to_stderr, warn

# torch and transformers are imported inside the commands, so that --help and a config error answer
# at once

app = typer.Typer(
    name="dapo", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
app.add_typer(run_commands.commands)
app.add_typer(analysis_commands.commands)
app.add_typer(
    data_app, name="data", help="Import, inspect and clean problems.", rich_help_panel=DATA
)
reward_app = typer.Typer(no_args_is_help=True)
app.add_typer(
    reward_app, name="reward", help="Test a reward before training on it.", rich_help_panel=DATA
)
environment_app = typer.Typer(no_args_is_help=True)
app.add_typer(
    environment_app,
    name="environment",
    help="Test an environment before training in it.",
    rich_help_panel=DATA,
)
lists_app = typer.Typer()
app.add_typer(lists_app)

CommandLineError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""The error that typer raises for an unknown option; typer exports no name for it."""
REMOVED = {
    "completion": "Completion is set up by: dapo --install-completion",
    "check --assume": (
        "dapo check describes this machine; train.device=cuda and launcher=ray describe GPUs"
    ),
    "check --verbose": "dapo check prints the values that it takes in any case",
    "explain --no-replay": "dapo explain shows what the run stored and loads no model",
    "explain --trust": "dapo explain imports no module of the run",
}
"""Advice for each command and flag that was removed."""
OF_FILES = (
    "EACCES",
    "EPERM",
    "EROFS",
    "ENOSPC",
    "EDQUOT",
    "EISDIR",
    "ENOTDIR",
    "EEXIST",
    "ENAMETOOLONG",
)
"""The errors that a user's path or disk causes, not dapo."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; print errors of the user without a traceback."""
    warnings.formatwarning = _format_warning
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for argument in words:
            if not argument.isascii() and argument.encode(errors="ignore").decode() != argument:
                raise ConfigError(f"the argument {argument!a} is not UTF-8")
        code = app(words, prog_name="dapo", standalone_mode=False)
    except DapoError as error:
        text = mask_text(str(error))
        code = error.exit_code
        _print_error(
            f"error: {text}\n" if code < 128 else f"{text}\n",
            text,
            type(error).__name__,
            code,
            words,
        )
    except CommandLineError as error:  # it shows what was typed
        code = error.exit_code
        error.message = _with_advice(error.message, words)
        typed = StringIO()
        error.show(typed)
        if error.format_message():  # empty after the help that answers no arguments
            _print_error(
                mask_text(typed.getvalue()),
                mask_text(error.format_message()),
                "UsageError",
                code,
                words,
            )
    except Exception as error:
        if not isinstance(error, OSError) or errno.errorcode.get(error.errno or 0) not in OF_FILES:
            sys.excepthook = _print_traceback  # instead of typer's
            raise
        code = ConfigError.exit_code
        name = str(error.filename or "the output")
        text = (
            f"{name}: {error.strerror}; name another place, or make this one accessible with free"
            " space"
        )
        text = text if error.errno != errno.ENAMETOOLONG else f"{name[:60]}...: {error.strerror}"
        _print_error(f"error: {text}\n", text, "ConfigError", code, words)
    sys.exit(code or 0)


def _with_advice(message: str, words: Sequence[str]) -> str:
    """Append the replacement of a removed command or flag to its error message."""
    for removed, advice in REMOVED.items():
        command, *flag = removed.split()
        if command in words and (flag or [command])[0] in message:
            message = f"{message}\n{advice}"
    return message


def _print_error(line: str, message: str, kind: str, code: int, words: Sequence[str]) -> None:
    """Print an error for a person and, with `--json`, for a program too."""
    print_text(line, file=sys.stderr, end="")
    with suppress(OSError):  # the output may be full
        if "--json" in words:
            print_json({"error": message, "kind": kind, "exit_code": code})


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return printable(f"{filename}:{lineno}: {category.__name__}: {message}\n")


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    print_text(
        mask_text("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end=""
    )


@lists_app.command(
    "options", rich_help_panel=REFERENCE, epilog="Example: dapo options loss.clip_high --json"
)
def show_options(
    section: Annotated[
        str | None, Argument(metavar="SECTION", help="A section or an option.", show_default="all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the options with their meanings, defaults, units and the paper's values."""
    from dapo.config.option_entries import entries_of, section_names, yaml_text

    entries = entries_of(section)
    if as_json:
        print_json({"options": [entry.as_json() for entry in entries]})
        return
    from rich.padding import Padding
    from rich.text import Text

    from dapo.runs.console import SafeConsole

    console = SafeConsole()
    for entry in entries:
        values = [f"default {entry.default_text}" if not entry.is_required else "required"]
        if entry.has_paper_value:
            values.append(f"paper {yaml_text(entry.paper)}")
        if entry.unit:
            values.append(f"unit {entry.unit}")
        console.print(Text.assemble((entry.name, "bold"), f"  {', '.join(values)}"), soft_wrap=True)
        condition = f" Only with {entry.condition_text}." if entry.condition else ""
        console.print(Padding(f"{entry.meaning}{condition}", (0, 0, 0, 4)))
    sections = section_names(entries)
    if len(sections) > 1:
        console.print(
            f"\n{len(entries)} options; one section: dapo options {'|'.join(sections)}",
            soft_wrap=True,
        )


@lists_app.command(
    "configs", rich_help_panel=REFERENCE, epilog="Example: dapo configs tiny > my.yaml"
)
def show_configs(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", autocompletion=complete_config, help="Configuration to print."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the configurations that come with dapo, or print one."""
    if name is not None:
        from dapo.config import find_config

        print_text(find_config(name).read_text(encoding="utf-8"), end="")
        return
    use = (
        "dapo train NAME [KEY=VALUE]... trains with one; dapo configs NAME > my.yaml makes a file"
        " to change"
    )
    _list_shipped("configs", use, as_json)


@lists_app.command(
    "docs", rich_help_panel=REFERENCE, epilog="Example: dapo docs from_verl > from_verl.md"
)
def show_docs(
    page: Annotated[
        str | None, Argument(metavar="PAGE", autocompletion=complete_page, help="Page to print.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the pages of the documentation, or print one."""
    if page is None:
        _list_shipped("docs", "dapo docs PAGE prints one", as_json)
        return
    from dapo.config.load import shipped

    pages = shipped("docs")
    if (path := pages.get(Path(page).stem)) is None:
        raise ConfigError(f"no page {page}; expected one of {', '.join(pages)}")
    print_text(path.read_text(encoding="utf-8"), end="")


def _list_shipped(folder: Literal["configs", "docs"], use: str, as_json: bool) -> None:
    from dapo.config.load import shipped, title_of

    descriptions = {
        name: {"about": title_of(path), "path": str(path)} for name, path in shipped(folder).items()
    }
    if as_json:
        print_json(descriptions)
        return
    width = max(map(len, descriptions), default=0)
    for name, about in descriptions.items():
        print_text(f"{name:<{width}}  {about['about']}")
    print_text(f"\n{use}")


@lists_app.command(rich_help_panel=TRAIN, epilog="Example: dapo convert grpo.py > my.yaml")
def convert(
    file: Annotated[
        Path,
        Argument(metavar="FILE", help="A script, notebook or YAML file, which is read, never run."),
    ],
    processes: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="Number of trainer processes of a TRL script.",
            show_default="1",
        ),
    ] = None,
) -> None:
    """Translate a configuration of verl, AReaL or TRL.

    Reads a script of verl or TRL, or YAML of verl, AReaL or TRL. Options without a counterpart are
    listed, each with what happens instead.

    The exit code is 1 if the configuration does not load, 2 if FILE is of no other system, 3 if
    options could not be read, and 4 if there is no such algorithm here.
    """
    from dapo.cli.convert import NOT_WHOLE, convert_file

    conversion = convert_file(file, processes)
    print_text(conversion.text, end="")
    if conversion.message is None:
        return
    if conversion.exit_code == NOT_WHOLE:
        warn(conversion.message)
        raise typer.Exit(NOT_WHOLE)
    raise ConversionFault(conversion.message, conversion.exit_code)


@lists_app.command(rich_help_panel=REFERENCE, epilog="Example: dapo schema > dapo.schema.json")
def schema() -> None:
    """Print the JSON schema of configuration files, for editors.

    An editor that reads the schema completes and checks options.
    """
    from dapo.config.schema import config_schema

    print_json(config_schema())


@reward_app.command(
    "test", epilog="Example: dapo reward test my_rewards:mentions_unit --data train.jsonl"
)
def reward_test(
    verifier: Annotated[
        str,
        Argument(
            metavar="VERIFIER",
            autocompletion=complete_verifier,
            help="A name such as math, a function as MODULE:FUNCTION, or a run.",
        ),
    ],
    overrides: Changes = None,
    data: Annotated[str | None, Option(help="Data source whose first problems are used.")] = None,
    answer: Annotated[str | None, Option(help="Reference answer of the example problem.")] = None,
    right: Annotated[
        str | None,
        Option(help="A correct response, if the reward accepts none of the usual forms."),
    ] = None,
    show_all: Annotated[
        bool, Option("--all", help="Print every response, not only the suspicious ones.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Test a reward on wrong, empty, endless and hostile responses.

    The exit code is 1 if the reward accepts one of them.
    """
    from dapo.cli.reward import examine_reward, print_report

    with stdout_to_stderr(as_json):
        report = examine_reward(
            verifier, data=data, answer=answer, right=right, overrides=overrides or []
        )
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report, show_all=show_all)
    if report.suspicious:
        raise typer.Exit(1)


@environment_app.command(
    "test", epilog="Example: dapo environment test my_games:Countdown environment.max_turns=4"
)
def environment_test(
    name: Annotated[
        str,
        Argument(
            metavar="NAME|RUN",
            help="A name such as calculator, textarena:ID, skyrl:ID or MODULE:CLASS; or a run.",
        ),
    ],
    overrides: Changes = None,
    data: Annotated[
        str | None, Option(help="Data source to take problems from, instead of sums.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play meaningless actions in an environment and print the rewards.

    The exit code is 1 if the environment fails, or if it is not deterministic: the same seed and
    actions give different episodes.
    """
    from dapo.cli.environment import is_suspicious, play_nonsense, print_plays

    with stdout_to_stderr(as_json):
        plays = play_nonsense(name, data=data, overrides=overrides or [])
    if as_json:
        print_json(
            {
                "environment": name,
                "suspicious": is_suspicious(plays),
                "episodes": [p.as_json() for p in plays],
            }
        )
    else:
        print_plays(plays)
    if is_suspicious(plays):
        raise typer.Exit(1)


_EXAMPLES = (
    "Examples: dapo train quickstart trains a small model in runs/; dapo view shows it in a"
    " browser."
)
_EXIT_CODES = "; ".join(f"{code}: {meaning}" for code, meaning in EXIT_CODES.items())


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(f"dapo {__version__}")
        raise typer.Exit


@app.callback(epilog=f"{_EXAMPLES}\n\nExit codes: {_EXIT_CODES}.")
def options(
    version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Reinforcement learning for language models with DAPO (arXiv 2503.14476)."""


if __name__ == "__main__":
    main()
