"""`dapo test ENVIRONMENT`: plays an environment twice with nonsense, and prints the rewards.

The code that reads the prompts, encodes them and plays the episodes is that of training. Only the
turns are not sampled from a model.
"""

import random
import string
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from dapo.cli.formatting import right, say, titled_table
from dapo.config import Config, build_config, parse_data_argument
from dapo.config.load import override
from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.engines.continuation import ContinuingEngine
from dapo.engines.engine import Capabilities, WeightSource
from dapo.environments.engine import EpisodeEngine
from dapo.environments.pool import EnvironmentPool
from dapo.environments.starts import EpisodeStarts
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import verdict_word
from dapo.runs.stored_config import load_run_config
from dapo.start.episodes import turn_renderer
from dapo.types import Episode, Generation, GenerationRequest, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODES = 10
_KINDS = ("nothing", "random text", "a number")
_SHOWN_CHARS = 60
_MAX_TOKENS = 2**30
_LEAST_OBSERVATION = 64
_MARKS = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Play:
    """An episode of nonsense, and whether a second play of it differed."""

    seed: int
    kind: str
    episode: Episode
    differs: bool = False

    @property
    def turns(self) -> int:
        return self.episode.num_turns

    @property
    def reward(self) -> float:
        return sum(self.episode.rewards)

    @property
    def correct(self) -> bool | None:
        return self.episode.correct

    @property
    def error(self) -> str | None:
        return self.episode.error

    def as_json(self) -> dict[str, Any]:
        """Return the episode as JSON values."""
        names = ("seed", "kind", "turns", "reward", "correct", "error", "differs")
        return {name: getattr(self, name) for name in names}


class NonsenseEngine:
    """A rollout engine without a model: each turn is nonsense of one kind."""

    capabilities = Capabilities()

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_id: int, kind: str, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_id = stop_id
        self._kind = kind
        self._chance = random.Random(seed)
        self._waiting: list[GenerationRequest] = []

    def load_weights(self, weights: WeightSource, version: int) -> None:
        raise NotImplementedError("nonsense has no weights")

    def drop_weights(self) -> None:
        raise NotImplementedError("nonsense has no weights")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting += requests

    def poll(self) -> list[Generation]:
        requests = self._waiting
        self._waiting = []
        return [self._turn(request) for request in requests]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        raise NotImplementedError("nonsense is not aborted")

    def close(self) -> None:
        self._waiting.clear()

    def _turn(self, request: GenerationRequest) -> Generation:
        text = _nonsense(self._kind, self._chance)
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._stop_id]
        return Generation(request.id, array("i", ids), array("f", [-1.0] * len(ids)), "stop", 0)


def play_nonsense(name: str, *, data: str | None, overrides: Sequence[str]) -> list[Play]:
    """Play EPISODES episodes of nonsense, then replay them in reverse order.

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
    tokenizer = _tokenizer_of(name, config) or _byte_tokenizer()
    problems = load_problems(config.data.train_source, require_answer=False)
    with EnvironmentPool(config.environment, memory_gib=config.reward.memory_gib) as pool:
        player = _Player(config, tokenizer, pool)
        tasks = [(problems[seed % len(problems)], seed) for seed in range(EPISODES)]
        first = [player.play(problem, seed) for problem, seed in tasks]
        second = [player.play(problem, seed) for problem, seed in reversed(tasks)][::-1]
    return [
        replace(result, differs=result.episode != repetition.episode)
        for result, repetition in zip(first, second, strict=True)
    ]


class _Player:
    """Plays episodes as training does."""

    def __init__(
        self, config: Config, tokenizer: "PreTrainedTokenizerBase", pool: EnvironmentPool
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._renderer = turn_renderer(config, tokenizer, pool)
        room = max(
            config.environment.max_observation_tokens, self._renderer.overhead + _LEAST_OBSERVATION
        )
        self._options = config.environment.model_copy(update={"max_observation_tokens": room})

    def play(self, problem: Problem, seed: int) -> Play:
        """Play one episode; if the environment cannot begin, the episode has an error."""
        kind = _KINDS[seed % len(_KINDS)]
        starts = EpisodeStarts(self._pool, seed=seed)
        prompts = self._renderer.prompts
        try:
            (begun,) = starts.with_prompts([problem])
            prompt_ids = prompts.encode(begun)
        except DataError as error:
            return Play(seed, kind, Episode((), (), error=str(error)))
        end = prompts.turn_end
        stop_id = (
            self._tokenizer.eos_token_id if end is None or end.token_id is None else end.token_id
        )
        nonsense = ContinuingEngine(NonsenseEngine(self._tokenizer, stop_id, kind, seed))
        engine = EpisodeEngine(nonsense, self._pool, self._renderer, self._options, starts=starts)
        engine.submit(
            [
                GenerationRequest(
                    "0", prompt_ids, _MAX_TOKENS, 1.0, 1.0, seed, (stop_id,), problem=begun
                )
            ]
        )
        ended: list[Generation] = []
        while not ended:
            ended = engine.poll()
        episode = ended[0].episode
        assert episode is not None
        return Play(seed, kind, episode)


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


def _nonsense(kind: str, chance: random.Random) -> str:
    """Return the text of one turn."""
    if kind == "nothing":
        return ""
    if kind == "a number":
        return str(chance.randint(0, 99))
    return "".join(chance.choices(string.printable, k=40))


def print_plays(plays: Sequence[Play], *, verbose: bool) -> None:
    """Print the verdict on the environment, and with `verbose` a row for each episode."""
    console = SafeConsole()
    say(console, _verdict_on(plays), style="bold")
    if any(play.differs for play in plays):
        advice = (
            "draw from the global `random` or a generator of `seed`, and keep nothing between"
            " episodes"
        )
        say(console, f"the environment is not deterministic: {advice}")
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
    """Return True if two plays differ, or the environment fails on nonsense."""
    return any(play.differs or play.error is not None for play in plays)
