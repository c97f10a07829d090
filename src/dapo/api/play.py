"""Episodes as conversations: of a trained policy, of nonsense, or of a person."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import fsum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dapo.api.in_memory_data import Data, row_errors, stored_data
from dapo.api.keywords import build_scaled, read_keywords
from dapo.api.python_errors import python_interface
from dapo.core.errors import ConfigError
from dapo.core.loading import add_code_folder
from dapo.core.terminal import printable
from dapo.core.text import quoted
from dapo.runs.outcomes import verdict_word
from dapo.runs.stored_config import CODE_FOLDER

if TYPE_CHECKING:
    from dapo.environments.nonsense import Play
    from dapo.types import Episode, Message, Prompt

Turns = str | Sequence[str] | Callable[[str], str | None] | None
_POLICY = "border-left:3px solid #2563eb;padding-left:.6em;margin:.3em 0"
_OTHERS = "border-left:3px solid #94a3b8;padding-left:.6em;margin:.3em 0 .3em 2em"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"


@dataclass(frozen=True, repr=False)
class PlayedEpisode:
    """An episode that a notebook shows as a conversation."""

    title: str
    """Who has played which problem."""
    prompt: "Prompt"
    messages: "Sequence[Message]"
    """The conversation behind the prompt: turns have the role `assistant`."""
    rewards: Sequence[float]
    """The reward of each turn."""
    correct: bool | None
    """Whether it is solved; None: only its rewards count, or it has failed."""
    ending: str
    """What the environment said last."""
    is_cut: bool
    """Whether no tokens or turns were left before the environment ended the episode."""
    error: str | None
    """Why the environment failed; None: it has not."""

    @classmethod
    def of(cls, title: str, prompt: "Prompt", episode: "Episode") -> "PlayedEpisode":
        return cls(
            title,
            prompt,
            episode.messages,
            episode.rewards,
            episode.correct,
            episode.ending,
            episode.is_cut,
            episode.error,
        )

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return fsum(self.rewards)

    @property
    def outcome(self) -> str:
        """How the episode has ended, in a sentence."""
        if self.error is not None:
            return f"failed: {self.error}"
        parts = ["cut: no turns or tokens were left"] if self.is_cut else ["ended"]
        if self.correct is not None:
            parts.append(verdict_word(self.correct, None))
        parts.append(f"reward {self.reward:g}")
        if self.ending:
            parts.append(f"the environment said: {self.ending}")
        return "; ".join(parts)

    def __repr__(self) -> str:
        lines = [self.title]
        for speaker, text, reward in self._lines():
            label = f"  {speaker:<12}"
            lines.append(label + text.replace("\n", "\n" + " " * len(label)))
            lines[-1] += "" if reward is None else f"  [{reward:+g}]"
        return printable("\n".join([*lines, f"  {self.outcome}"]))

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{_safe(self.title)}</b></p>"]
        for speaker, text, reward in self._lines():
            shown = "" if reward is None else f" <b>{reward:+g}</b>"
            style = _POLICY if speaker == "policy" else _OTHERS
            parts.append(
                f"<div style='{style}'><small style='opacity:.65'>{_safe(speaker)}{shown}</small>"
                f"<div style='{_TEXT}'>{_safe(text)}</div></div>"
            )
        return f"<div>{''.join(parts)}<p>{_safe(self.outcome)}</p></div>"

    def _lines(self) -> Iterator[tuple[str, str, float | None]]:
        """Yield speaker, text and reward of each message, those of the prompt first."""
        prompt = self.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for message in messages:
            yield str(message["role"]), _content(message), None
        rewards = iter(self.rewards)
        for message in self.messages:
            if message["role"] == "assistant":
                reward = next(rewards, None)
                yield "policy", _content(message) or "(nothing)", reward
            else:
                yield "environment", _content(message), None


@dataclass(frozen=True, repr=False)
class Episodes(Sequence[PlayedEpisode]):
    """Episodes with a sentence about them, which a notebook shows as conversations."""

    headline: str
    episodes: tuple[PlayedEpisode, ...]

    def __len__(self) -> int:
        return len(self.episodes)

    def __getitem__(self, index: Any) -> Any:
        return self.episodes[index]

    def __repr__(self) -> str:
        return "\n\n".join([printable(self.headline), *map(repr, self.episodes)])

    def _repr_html_(self) -> str:
        shown = "<hr>".join(each._repr_html_() for each in self.episodes)
        return f"<p><b>{_safe(self.headline)}</b></p>{shown}"


@python_interface
def play(environment: Any, data: Data = None, *, turns: Turns = None, **options: Any) -> Episodes:
    """Play an environment before any training, and show the conversation.

    The first line is the verdict of `dapo test`: whether the environment fails, is not
    deterministic, or rewards nonsense.

    Args:
        environment: a class, or a name as for `dapo.train`.
        data: rows or a data source, of which the first problem is played; None: the environment's
            own problems, or sums.
        turns: what the policy says: a text, several, or a function that returns each turn for what
            the environment said last, as `input` does (None ends the episode). None: nonsense.
        **options: options of `environment`, and `tools`, as for `dapo.train`.

    Raises ConfigError and DataError as `dapo.train` does.

    Example:
        >>> class Echo:
        ...     def reset(self, problem, seed):
        ...         return "Say something."
        ...     def step(self, action):
        ...         from dapo.environments import StepResult
        ...         return StepResult("I heard you.", reward=0.5, done=True)
        >>> dapo.play(Echo, turns="hello")[0].reward
        0.5
    """
    from dapo.config.load import resolve_auto_verifier
    from dapo.environments.nonsense import verdict_on
    from dapo.start.play import OWN_PROBLEMS, nonsense_in, opened, play_texts

    say = _speaker(turns)
    with TemporaryDirectory(prefix="dapo-play-") as folder:
        stored = stored_data(data, Path(folder) / "rows.jsonl", argument="data")
        settings = {"model.name": "none", "data.train": stored.source or OWN_PROBLEMS}
        keywords = {**options, "environment": environment}
        if isinstance(environment, Mapping) or environment is None:
            raise ConfigError(f"environment: expected a class or a name, got {quoted(environment)}")
        values, modules, _ = read_keywords(settings, None, keywords)
        config, _ = build_scaled({}, values, where="dapo.play")
        for module in modules:
            module.write(Path(folder) / CODE_FOLDER)
        add_code_folder(Path(folder) / CODE_FOLDER)
        with row_errors(stored.labels), opened(resolve_auto_verifier(config)) as episodes:
            stored.write()
            plays, problems = nonsense_in(episodes, needs_data=data is not None)
            headline = verdict_on(plays)
            if say is None or not problems:
                return Episodes(headline, _nonsense_shown(plays, problems))
            problem = problems[0]
            episode = play_texts(episodes, problem, say)
        return Episodes(headline, (PlayedEpisode.of("your turns", problem.prompt, episode),))


def _nonsense_shown(plays: "Sequence[Play]", problems: Sequence[Any]) -> tuple[PlayedEpisode, ...]:
    """Return the first episode of each kind of nonsense."""
    shown: dict[str, PlayedEpisode] = {}
    for each in plays:
        prompt = problems[each.seed % len(problems)].prompt if problems else ""
        title = f"each turn: {each.kind}"
        shown.setdefault(each.kind, PlayedEpisode.of(title, prompt, each.episode))
    return tuple(shown.values())


def _speaker(turns: Turns) -> Callable[[str], str | None] | None:
    """Return a function of what the environment said last; None for nonsense."""
    if turns is None:
        return None
    if callable(turns):
        return _checked_speaker(turns)
    texts = [turns] if isinstance(turns, str) else turns
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"turns: expected a text, several, or a function such as input, got {quoted(turns)}"
        )
    rest = iter(texts)
    return lambda said: next(rest, None)


def _checked_speaker(turns: Callable[[str], Any]) -> Callable[[str], str | None]:
    """Return the function, which raises ConfigError for a turn that is no text."""

    def say(said: str) -> str | None:
        turn = turns(said)
        if turn is not None and not isinstance(turn, str):
            raise ConfigError(f"turns returned {quoted(turn)}, expected a text, or None at the end")
        return turn

    return say


def _content(message: "Mapping[str, Any]") -> str:
    return str(message["content"] or "")


def _safe(text: str) -> str:
    return escape(printable(text))
