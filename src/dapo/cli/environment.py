"""`dapo test ENVIRONMENT`: plays an environment twice with nonsense, and prints the rewards.

The code that reads the prompts, encodes them and plays the episodes is that of training. Only the
turns are not sampled from a model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Column, Table

from dapo.cli.formatting import right, say, titled_table
from dapo.config import Config, build_config, parse_data_argument
from dapo.config.load import override
from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.environments.nonsense import (
    KINDS,
    NOT_DETERMINISTIC,
    Play,
    rewarded_cut,
)
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import verdict_word
from dapo.runs.stored_config import load_run_config
from dapo.start.check import open_environment
from dapo.start.episodes import AgentEpisodes, Episodes, episodes_of
from dapo.types import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_CHARS = 60
_LEAST_OBSERVATION = 64
_BYTES_PER_TOKEN = 8
_MARKS = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def play_nonsense(name: str, *, data: str | None, overrides: Sequence[str]) -> list[Play]:
    """Play an episode of nonsense of each of KINDS, then replay them in reverse order.

    `name` may be a run, whose environment, tools and problems are taken. The problems are the first
    of `data`, else sums. `overrides` are options of environment. Raises ConfigError or DataError
    for an argument that cannot be used.
    """
    if not all(item.startswith("environment.") for item in overrides):
        raise ConfigError(
            "dapo test of an environment takes options of environment only, for example"
            " environment.max_turns=4"
        )
    if RunDirectory.is_run(name):
        added = [] if data is None else [override("data.train", parse_data_argument(data))]
        config = load_run_config(RunDirectory.open(name), [*added, *overrides])
        if not config.plays_episodes:
            raise ConfigError(f"{name} plays no episodes: it has no environment and no tools")
    else:
        source = "builtin:sums" if data is None else parse_data_argument(data)
        raw = {"model": "none", "data": {"train": source}, "environment": {"name": name}}
        config = build_config(raw, overrides, where="dapo test")
    tokenizer = _tokenizer_of(name, config)
    problems = load_problems(config.data.train_source, require_answer=False)
    with open_environment(config) as pool:
        assert pool is not None
        episodes = episodes_of(config, tokenizer or _byte_tokenizer(), pool)
        if tokenizer is None:
            episodes = _with_room(episodes)
        try:
            begun = episodes.with_prompts(problems)
        except DataError as error:  # training ends with it
            return [
                Play(seed, kind, Episode((), (), error=str(error)))
                for seed, kind in enumerate(KINDS)
            ]
        return episodes.play_nonsense(begun)


def _with_room(episodes: Episodes | AgentEpisodes) -> Episodes | AgentEpisodes:
    """Let texts have more tokens where each byte is one: the limits are for a model's."""
    if isinstance(episodes, AgentEpisodes):
        return replace(episodes, max_context=_BYTES_PER_TOKEN * episodes.max_context)
    options = episodes.config.environment
    least = episodes.renderer.overhead + _LEAST_OBSERVATION
    room = max(options.max_observation_tokens, least)
    config = episodes.config.changed("environment", max_observation_tokens=room)
    return replace(episodes, config=config)


def _tokenizer_of(name: str, config: Config) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a run with its chat template; None where there is no run."""
    folder = RunDirectory.open(name).tokenizer if RunDirectory.is_run(name) else None
    if folder is None or not folder.is_dir():
        return None
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=config.model.trust_remote_code
    )
    return tokenizer


def _byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Return a tokenizer of bytes with a chat template, for an environment without a model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(alphabet, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_MARKS[1])
    tokenizer.name_or_path = "bytes"
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def print_plays(plays: Sequence[Play], *, verbose: bool) -> None:
    """Print the verdict on the environment, and with `verbose` a row for each episode."""
    console = SafeConsole()
    say(console, _verdict_on(plays), style="bold")
    if any(play.differs for play in plays):
        say(console, NOT_DETERMINISTIC)
    cut = rewarded_cut(plays)
    if cut is not None:
        say(console, cut.advice)
    if verbose:
        console.print(_table_of(plays))


def _verdict_on(plays: Sequence[Play]) -> str:
    """Say whether episodes failed or differed, and how much nonsense is rewarded."""
    failed = [play for play in plays if play.error is not None]
    different = [play for play in plays if play.differs]
    highest = max(play.reward for play in plays)
    issues = []
    if failed:
        issues.append(f"{len(failed)} of {len(plays)} episodes failed: {failed[0].error}")
    if different:
        issues.append(f"{len(different)} of {len(plays)} episodes differ when they are repeated")
    if not issues:
        issues.append(f"nothing suspicious in {len(plays)} episodes of nonsense, played twice")
    if len(failed) < len(plays):
        issues.append(f"the highest reward of nonsense is {highest:g}")
    return "; ".join(issues)


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


def is_suspicious(plays: Sequence[Play]) -> bool:
    """Return True if two plays differ, the environment fails, or being cut pays."""
    return rewarded_cut(plays) is not None or any(
        play.differs or play.error is not None for play in plays
    )
