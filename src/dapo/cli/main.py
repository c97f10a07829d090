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
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dapo import __version__
from dapo.cli import analysis_commands, model_commands, run_commands
from dapo.cli.arguments import (
    DATA,
    REFERENCE,
    TRAIN,
    AsJson,
    Changes,
    complete_shown,
    complete_tested,
)
from dapo.cli.data import data_app
from dapo.cli.plugin_commands import command_of
from dapo.cli.spelling import as_typed, example_of, flag_answer
from dapo.core.errors import EXIT_CODES, ConfigError, ConversionFault, DapoError
from dapo.core.secrets import mask_text
from dapo.core.terminal import print_json, print_text, printable, stdout_to_stderr, warn

# torch and transformers are imported inside the commands, so that --help and a config error answer
# at once

app = typer.Typer(
    name="dapo", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
app.add_typer(run_commands.commands)
app.add_typer(model_commands.commands)
app.add_typer(analysis_commands.commands)
app.add_typer(
    data_app, name="data", help="Import, inspect and clean problems.", rich_help_panel=DATA
)
other_commands = typer.Typer()
app.add_typer(other_commands)

CommandLineError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""The error that typer raises for an unknown option; typer exports no name for it."""
_CHAT = "dapo chat MODEL_OR_RUN talks to a model"
_PUSH = "dapo export RUN_DIR OUT_DIR --push OWNER/NAME uploads the model of a run to the hub"
_GENERATE = "dapo generate MODEL_OR_RUN PROMPT prints answers"
_SERVE = (
    "dapo serve MODEL_OR_RUN answers at an address; dapo export RUN_DIR OUT_DIR writes a model that"
    " vLLM and others serve"
)
OTHER_NAMES = {
    "completion": "dapo --install-completion completes commands and options",
    "report": "dapo view RUN_DIR --save FILE.html writes one",
    "options": "their list is dapo show options",
    "configs": "their list is dapo show configs",
    "docs": "their list is dapo show docs",
    "schema": "it is what dapo show schema prints",
    "reward": "dapo test REWARD judges responses with one",
    "environment": "dapo test ENVIRONMENT plays one",
    "ask": f"{_GENERATE}; {_CHAT}",
    "sample": _GENERATE,
    "infer": _GENERATE,
    "inference": _GENERATE,
    "predict": _GENERATE,
    "complete": _GENERATE,
    "play": _CHAT,
    "talk": _CHAT,
    "repl": _CHAT,
    "server": _SERVE,
    "host": _SERVE,
    "deploy": _SERVE,
    "endpoint": _SERVE,
    "api": _SERVE,
    "push": _PUSH,
    "upload": _PUSH,
    "publish": _PUSH,
}
"""What there is instead of commands that one might try."""
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
        command = command_of(app, words)
        code = command(words, prog_name="dapo", standalone_mode=False)
    except DapoError as error:
        text = mask_text(as_typed(str(error), words))
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
        error.message = _with_advice(error, words)
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
            sys.excepthook = _print_traceback
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


def _with_advice(error: Any, words: Sequence[str]) -> str:
    """Name in an error of the command line what can be typed instead."""
    message: str = error.message
    name = words[0] if words else ""
    if name in OTHER_NAMES and message.startswith(f"No such command '{name}'"):
        return f"there is no command {name}; {OTHER_NAMES[name]}"
    if error.ctx is None:
        return message
    command = error.ctx.command
    example = example_of(error.format_message(), command)
    if example is not None:
        return example
    answer = flag_answer(message, words, command)
    if answer is None:
        return message
    error.possibilities = None  # which are flags
    return answer


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


@other_commands.command(rich_help_panel=TRAIN, epilog="Example: dapo convert grpo.py > my.yaml")
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


@other_commands.command(
    "test",
    rich_help_panel=DATA,
    epilog="Example: dapo test my_rewards:mentions_unit --data train.jsonl",
)
def examine(
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            autocompletion=complete_tested,
            help=(
                "A verifier such as math, an environment such as calculator, your own as"
                " MODULE:FUNCTION or MODULE:CLASS, or a run."
            ),
        ),
    ],
    overrides: Changes = None,
    is_reward: Annotated[
        bool, Option("--reward", help="Test NAME as a reward, if it may be either.")
    ] = False,
    is_environment: Annotated[
        bool, Option("--environment", help="Test NAME as an environment, if it may be either.")
    ] = False,
    data: Annotated[
        str | None,
        Option(help="Data source of the problems.", show_default="an example, or that of the run"),
    ] = None,
    answer: Annotated[
        str | None, Option(help="Of a reward: reference answer of the example problem.")
    ] = None,
    right: Annotated[
        str | None,
        Option(help="Of a reward: a correct response, if none of the usual forms is accepted."),
    ] = None,
    verbose: Annotated[
        bool,
        Option(
            "--verbose",
            help="Print every response or episode, not only the suspicious ones, and the times.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Test a reward or an environment on nonsense before training with it.

    A reward judges wrong, empty, endless and hostile responses; an environment plays meaningless
    actions, twice. The exit code is 1 if a reward accepts one of them, or if an environment fails
    or is not deterministic: the same seed and actions give different episodes.
    """
    from dapo.cli.tested_kind import find_kind

    with stdout_to_stderr(as_json):  # the module of NAME may print
        kind = find_kind(name, is_reward=is_reward, is_environment=is_environment)
    if kind == "reward":
        is_suspicious = _test_reward(name, overrides, data, answer, right, verbose, as_json)
    elif answer is None and right is None:
        is_suspicious = _test_environment(name, overrides, data, verbose, as_json)
    else:
        raise ConfigError(
            f"--answer and --right are for rewards, and {name} is tested as"
            " an environment; leave them out"
        )
    if is_suspicious:
        raise typer.Exit(1)


def _test_reward(
    verifier: str,
    overrides: list[str] | None,
    data: str | None,
    answer: str | None,
    right: str | None,
    verbose: bool,
    as_json: bool,
) -> bool:
    """Print the audit of a reward, and return True if it is suspicious."""
    from dapo.cli.reward import examine_reward, print_report

    with stdout_to_stderr(as_json):
        report = examine_reward(
            verifier, data=data, answer=answer, right=right, overrides=overrides or []
        )
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report, verbose=verbose)
    return report.suspicious


def _test_environment(
    name: str, overrides: list[str] | None, data: str | None, verbose: bool, as_json: bool
) -> bool:
    """Print the episodes of an environment, and return True if they are suspicious."""
    from dapo.cli.environment import print_plays
    from dapo.environments.nonsense import is_suspicious
    from dapo.start.play import play_nonsense

    with stdout_to_stderr(as_json):
        plays = play_nonsense(name, data=data, overrides=overrides or [])
    if as_json:
        print_json(
            {
                "environment": name,
                "suspicious": is_suspicious(plays),
                "episodes": [play.as_json() for play in plays],
            }
        )
    else:
        print_plays(plays, verbose=verbose)
    return is_suspicious(plays)


@other_commands.command(
    "show", rich_help_panel=REFERENCE, epilog="Example: dapo show quickstart > my.yaml"
)
def show_command(
    what: Annotated[
        str | None,
        Argument(
            metavar="WHAT",
            autocompletion=complete_shown,
            help=(
                "One of options, configs, docs and schema, or a name of an option, a section, a"
                " configuration or a page."
            ),
            show_default="a list of names",
        ),
    ] = None,
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            autocompletion=complete_shown,
            help="After options, configs or docs, which of them.",
            show_default="all",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show options, shipped configurations, the documentation or the JSON schema.

    An option has its meaning, default, unit and the paper's value. An editor that reads the schema
    completes and checks configuration files.
    """
    from dapo.cli.show import show

    show(what, name, as_json=as_json)


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
