"""Plays an environment without training: with nonsense, with texts of a person, or with a run.

The code that reads the prompts, encodes them and plays the episodes is that of training.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.config import Config, build_config, parse_data_argument
from dapo.config.load import override
from dapo.config.model_options import DataSpec
from dapo.core.errors import ConfigError, DataError
from dapo.core.loading import AGENT_PREFIX
from dapo.data.problems import load_problems
from dapo.environments.agents.pool import AgentPool
from dapo.environments.nonsense import KINDS, Play
from dapo.environments.pool import EnvironmentPool
from dapo.environments.starts import NoPrompt
from dapo.evaluation.evaluate import EngineSampler, Response, evaluate
from dapo.evaluation.scores import JudgedResponse, evaluation_plan
from dapo.runs.directory import RunDirectory
from dapo.runs.stages import run_path_of
from dapo.runs.stored_config import load_run_config, with_start_folder
from dapo.start.check import check, read_data
from dapo.start.episodes import Episodes, agent_episodes, environment_episodes
from dapo.start.evaluate import EvalRequest, evaluation_config, open_engine_sampler, run_options
from dapo.types import Episode, EpisodeText, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_PROBLEMS = {"environment": {}, "size": 64}
"""The data of an environment that writes its prompts, as in training without data."""
_LEAST_OBSERVATION = 64
_BYTES_PER_TOKEN = 8
"""The room of a chat in bytes, for one with tokens: limits are for a model's."""
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
        source: DataSpec = OWN_PROBLEMS
        if data is not None:
            source = parse_data_argument(data)
        elif name.startswith(AGENT_PREFIX):
            source = "builtin:sums"
        raw = {"model": "none", "data": {"train": source}, "environment": {"name": name}}
        config = build_config(raw, overrides, where="dapo test")
    tokenizer = _tokenizer_of(name, config)
    if config.runs_agent:
        return _nonsense_of_agent(config, tokenizer)
    with opened(config, tokenizer) as episodes:
        return nonsense_in(episodes, needs_data=data is not None)[0]


def _nonsense_of_agent(config: Config, tokenizer: "PreTrainedTokenizerBase | None") -> list[Play]:
    """Play an agent with answers of nonsense; without a tokenizer, a token is a byte."""
    problems = load_problems(config.data.train_source, require_answer=False)
    with AgentPool(
        config.environment,
        memory_gib=config.reward.memory_gib,
        template_kwargs=config.data.chat_template_kwargs,
    ) as pool:
        if tokenizer is not None:
            return agent_episodes(config, tokenizer, pool).play_nonsense(problems)
        episodes = agent_episodes(config, _byte_tokenizer(), pool)
        roomy = replace(episodes, max_context=_BYTES_PER_TOKEN * episodes.max_context)
        return roomy.play_nonsense(problems)


@contextmanager
def opened(
    config: Config, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> Iterator[Episodes]:
    """Start the processes of an environment; without a tokenizer, a token is a byte.

    Raises ConfigError for an agent, which is no environment that answers turns.
    """
    if config.runs_agent:
        raise ConfigError(
            "an agent cannot be played here: it asks the policy itself, over an endpoint; dapo test"
            " agent:module:function plays it with nonsense"
        )
    with EnvironmentPool(config.environment, memory_gib=config.reward.memory_gib) as pool:
        if tokenizer is not None:
            yield environment_episodes(config, tokenizer, pool)
        else:
            yield _with_room(environment_episodes(config, _byte_tokenizer(), pool))


def nonsense_in(episodes: Episodes, *, needs_data: bool = True) -> tuple[list[Play], list[Problem]]:
    """Play nonsense; return the episodes, and the problems with their prompts, empty if none begins.

    Without `needs_data`, sums are the problems of an environment whose `reset` returns no prompt.
    """
    config = episodes.config
    problems = load_problems(config.data.train_source, require_answer=False)
    try:
        begun = episodes.with_prompts(problems)
    except DataError as error:  # training ends with it
        if not needs_data and isinstance(error.__cause__, NoPrompt):
            sums = config.changed("data", train="builtin:sums")
            return nonsense_in(replace(episodes, config=sums))
        failed = Episode((), (), error=str(error))
        return [Play(seed, kind, failed) for seed, kind in enumerate(KINDS)], []
    return episodes.play_nonsense(begun), begun


def play_texts(episodes: Episodes, problem: Problem, say: Callable[[str], str | None]) -> Episode:
    """Play an episode of a problem from `nonsense_in`, in an environment opened without a tokenizer.

    `say` returns each turn for what the environment has said last; None ends the episode.
    """
    return episodes.player().play(problem, lambda text: say(_last_message(text)))


def _last_message(text: str) -> str:
    """Return the last message of a conversation in the form of _TEMPLATE."""
    start, end = _MARKS
    before_turn = text.rpartition(start)[0]
    message = before_turn.rpartition(start)[2].partition(end)[0]
    return message.partition("\n")[2]


@dataclass(frozen=True)
class JudgedEpisode:
    """An episode of a run's policy with its verdict."""

    problem: Problem
    episode: Episode
    verdict: JudgedResponse


def play_run(
    path: Path, count: int, *, seed: int, temperature: float | None
) -> list[JudgedEpisode]:
    """Play episodes of the newest checkpoint, one for each of the first held-out problems.

    Without held-out data, the problems are those of training.

    Args:
        path: the run directory.
        count: the number of episodes.
        seed: equal seeds give equal episodes.
        temperature: that of sampling; None: `eval.temperature`.

    Raises ConfigError for a run without an environment, CheckpointError without a checkpoint.
    """
    from dapo.start.read import read
    from dapo.start.resolve import resolve

    base = run_options(str(path))
    assert base is not None
    source = base["data"]["eval"] or base["data"]["train"]
    request = EvalRequest(source, 1)
    config, checkpoint = evaluation_config(str(path), source, request, base)
    if not config.plays_episodes:
        raise ConfigError(
            f"{path} has no environment to play; run.generate(PROMPT) samples answers"
        )
    with with_start_folder(RunDirectory(run_path_of(path))), ExitStack() as stack:
        checked = stack.enter_context(check(config, training=False))
        inputs = read(resolve(checked, training=False), read_data(checked, training=False))
        config = inputs.config
        plan = replace(evaluation_plan(config, inputs.loaded.stop_ids), samples_per_problem=1)
        plan = replace(plan, seed=seed)
        if temperature is not None:
            plan = replace(plan, temperature=temperature)
        engine = open_engine_sampler(
            config, inputs.loaded, inputs.encoder, checkpoint, plan, stack, inputs.episodes
        )
        sampler = _Recorder(engine)
        assert checked.code.judge is not None
        problems = inputs.held_out[:count]
        judged = evaluate(sampler, checked.code.judge, problems).problems
    played = []
    for index, each in enumerate(judged):
        text = sampler.texts[index]
        assert isinstance(text, EpisodeText)
        played.append(JudgedEpisode(each.problem, text.episode, each.responses[0]))
    return played


class _Recorder:
    """A sampler that keeps the texts of the responses, by the index of their problem."""

    def __init__(self, sampler: EngineSampler) -> None:
        self._sampler = sampler
        self.plan = sampler.plan
        self.texts: dict[int, str] = {}

    def submit(self, index: int, problem: Problem) -> None:
        self._sampler.submit(index, problem)

    def poll(self) -> list[tuple[int, int, Response]]:
        responses = self._sampler.poll()
        for index, _, response in responses:
            self.texts[index] = response.text
        return responses

    def abort(self) -> None:
        self._sampler.abort()


def _with_room(episodes: Episodes) -> Episodes:
    """Let observations have more tokens where each byte is one: the limit is for a model's."""
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
