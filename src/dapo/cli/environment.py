"""`dapo test ENVIRONMENT`: prints the rewards of an environment for nonsense."""

from collections.abc import Sequence

from rich.table import Column, Table

from dapo.cli.formatting import right, say, titled_table
from dapo.environments.agents.nonsense import NOT_DETERMINISTIC as AGENT_NOT_DETERMINISTIC
from dapo.environments.nonsense import NOT_DETERMINISTIC, Play, rewarded_cut, verdict_on
from dapo.runs.console import SafeConsole
from dapo.runs.outcomes import verdict_word

_SHOWN_CHARS = 60


def print_plays(plays: Sequence[Play], *, verbose: bool) -> None:
    """Print the verdict on the environment, and with `verbose` a row for each episode."""
    console = SafeConsole()
    say(console, verdict_on(plays), style="bold")
    if any(play.differs for play in plays):
        is_agent = any(play.is_agent for play in plays)
        say(console, AGENT_NOT_DETERMINISTIC if is_agent else NOT_DETERMINISTIC)
    cut = rewarded_cut(plays)
    if cut is not None:
        say(console, cut.advice)
    if verbose:
        console.print(_table_of(plays))


def _table_of(plays: Sequence[Play]) -> Table:
    """Make a row for each episode."""
    table = titled_table(
        "Episodes of nonsense",
        *right("seed"),
        "each turn",
        *right("turns", "reward"),
        "verdict",
        Column("remark", overflow="fold"),
    )
    for play in plays:
        verdict = verdict_word(play.correct, play.error)
        remark = "two plays differ" if play.differs else (play.error or "")[:_SHOWN_CHARS]
        table.add_row(
            f"{play.seed}", play.kind, f"{play.turns}", f"{play.reward:g}", verdict, remark
        )
    return table
