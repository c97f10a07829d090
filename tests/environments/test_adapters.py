"""Tools, TRL's classes and other packages' environments, run from their text."""

import json
from importlib.util import find_spec
from types import MethodType
from typing import Any

import numpy as np
import pytest

from dapo.core.errors import ConfigError, DataError
from dapo.environments import StepResult
from dapo.environments.adapters import environment_maker
from dapo.environments.environment import result_to_json
from dapo.environments.games.calculator import Calculator
from dapo.rewards.combine import build_verifier
from dapo.types import Episode, EpisodeText, Problem

PROBLEM = Problem("1", "How many?", "8", fields={"start": 3})


class IncrementEnv:
    """In the form of TRL's `environment_factory`."""

    def reset(self, **kwargs: Any) -> str:
        self.counter = kwargs["start"]
        return f" The counter is {self.counter}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The amount to add to the counter.

        Returns:
            The counter.
        """
        if step < 0:
            raise ValueError("step must not be negative")
        self.counter += step
        return self.counter

    async def read(self) -> str:
        """Read the counter."""
        return f"it is {self.counter}"

    def get_reward(self) -> float:
        return float(self.counter == 8)


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


class Web:
    @staticmethod
    def search(word: str) -> str:
        """Searches.

        Args:
            word: what to search
        """
        return f"found {word}"


def multiply_under_another_name() -> Any:
    """Return a function as a decorator does that keeps the docstring and the types alone."""

    def wrapper(a: int, b: int) -> int:
        return multiply(a, b)

    wrapper.__doc__ = multiply.__doc__
    return wrapper


product = multiply_under_another_name()


def look(self) -> list[dict[str, str]]:
    """Looks around."""
    return [{"type": "text", "text": "a door\n"}, {"type": "text", "text": self.view}]


class Bound:
    """Has a tool that its constructor binds, a text for itself, and helpers without self."""

    def __init__(self) -> None:
        self.view = "is open"
        self.look = MethodType(look, self)

    def reset(self, **columns: Any) -> None:
        self.waited = self.parse("1")

    def wait(self) -> int:
        """Waits a turn."""
        self.waited += 1
        return self.waited

    @staticmethod
    def parse(text):  # type: ignore[no-untyped-def]
        return int(text)


class Results:
    """Returns what JSON lacks; has a property that needs `reset`, and a class inside."""

    class Square:
        """It is no tool."""

    @property
    def board(self) -> str:
        return str(self.squares)

    def reset(self, **columns: Any) -> None:
        self.squares = {(0, 1): "x"}

    def look(self) -> Any:
        """Returns the squares."""
        return self.squares

    def count(self) -> Any:
        """Counts to three."""
        yield from range(1, 4)

    async def stream(self) -> Any:
        """Counts to two, asynchronously."""
        for number in (1, 2):
            yield number

    def measure(self) -> Any:
        """Returns numbers of numpy."""
        return [np.int64(5), np.float32(2.5), np.bool_(True), {"x": np.arange(3)}, np.float64(1)]

    def fail(self) -> Any:
        """Fails in its second step."""
        yield 1
        raise ValueError("no second step")


def untyped(a):  # type: ignore[no-untyped-def]
    return a


NAME = f"{__name__}:"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def texts(result: StepResult) -> list[str]:
    assert not isinstance(result.observation, str)
    return [message["content"] for message in result.observation]


def test_a_class_of_trl_has_its_methods_as_tools_and_a_reward_at_the_end():
    maker = environment_maker(f"{NAME}IncrementEnv", {}, [])
    assert [tool["function"]["name"] for tool in maker.tools] == ["increment", "read"]
    assert maker.tools[0]["function"]["parameters"]["properties"]["step"]["type"] == "integer"
    episode = maker.make("hermes")
    assert episode.reset(PROBLEM, 0) == "How many? The counter is 3."
    first = episode.step(call("increment", step=5) + call("read"))
    assert (texts(first), first.tool_calls, first.tool_errors, first.done) == (
        ["8", "it is 8"],
        2,
        0,
        False,
    )
    assert episode.step("It is 8.") == StepResult(reward=1.0, done=True)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (call("increment", step=-1), "Error: ValueError: step must not be negative"),
        (call("increment"), "Error: increment: missing: step"),
        (
            call("decrement", step=1),
            "Error: there is no tool 'decrement'; the tools are: increment, read",
        ),
        ("<tool_call>{</tool_call>", "Error: the call is not valid JSON"),
    ],
)
def test_a_call_that_fails_is_answered_and_the_episode_goes_on(action: str, answer: str):
    episode = environment_maker(f"{NAME}IncrementEnv", {}, []).make("hermes")
    episode.reset(PROBLEM, 0)
    result = episode.step(action)
    assert texts(result)[0].startswith(answer)
    assert (result.tool_calls, result.tool_errors, result.done) == (1, 1, False)
    assert texts(episode.step(call("increment", step=1))) == ["4"]


def test_functions_are_tools_alone_and_with_a_class():
    alone = environment_maker(None, {}, [f"{NAME}multiply"])
    episode = alone.make("llama")
    assert episode.reset(PROBLEM, 0) is None
    assert texts(episode.step('{"name": "multiply", "parameters": {"a": 6, "b": 7}}')) == ["42"]
    assert episode.step("42") == StepResult(done=True)
    both = environment_maker(f"{NAME}IncrementEnv", {}, [f"{NAME}multiply"])
    assert [tool["function"]["name"] for tool in both.tools] == ["increment", "read", "multiply"]


def test_a_tool_is_called_by_the_name_that_the_options_give_it():
    maker = environment_maker(None, {}, [f"{NAME}Web.search", f"{NAME}product"])
    assert [tool["function"]["name"] for tool in maker.tools] == ["search", "product"]
    result = maker.make("hermes").step(call("search", word="x") + call("product", a=6, b=7))
    assert (texts(result), result.tool_errors) == (["found x", "42"], 0)


def test_a_key_of_a_message_that_is_null_is_left_out():
    message = {"role": "tool", "content": "x", "name": None}
    observation = result_to_json(StepResult([message]))["observation"]
    assert observation == [{"role": "tool", "content": "x"}]


def test_parts_of_text_are_the_text_of_an_observation_and_others_are_refused():
    """As `reset` takes them."""
    words = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    result = StepResult([{"role": "user", "content": words}])
    assert result_to_json(result)["observation"] == [{"role": "user", "content": "a\nb"}]
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(TypeError, match="expected a text or a list of messages"):
        result_to_json(StepResult([{"role": "user", "content": picture}]))


def test_only_methods_are_tools_and_every_result_is_shown():
    maker = environment_maker(f"{NAME}Results", {}, [])
    assert [tool["function"]["name"] for tool in maker.tools] == [
        "count",
        "fail",
        "look",
        "measure",
        "stream",
    ]
    episode = maker.make("hermes")
    episode.reset(PROBLEM, 0)
    names = ("look", "count", "stream", "measure", "fail")
    result = episode.step("".join(map(call, names)))
    squares, numbers, streamed, measured, failure = texts(result)
    assert (squares, numbers, streamed) == ("{(0, 1): 'x'}", "[1, 2, 3]", "[1, 2]")
    assert measured == '[5, 2.5, true, {"x": [0, 1, 2]}, 1.0]'
    assert failure.startswith("Error: ValueError: no second step")
    assert result.tool_errors == 1


@pytest.mark.parametrize(
    ("name", "tools", "error", "message"),
    [
        (
            "calculator",
            [f"{NAME}multiply"],
            ConfigError,
            "calculator answers turns itself, and environment.tools are not",
        ),
        (
            None,
            [f"{NAME}untyped"],
            DataError,
            "tool untyped: .* a tool needs types in its signature",
        ),
        (None, [f"{NAME}missing"], ConfigError, "has no 'missing'"),
        (
            None,
            [f"{NAME}multiply", f"{NAME}Alias.multiply"],
            ConfigError,
            "two functions have the name multiply",
        ),
        (
            f"{NAME}multiply",
            [],
            ConfigError,
            "needs a and b: set environment.options={a: VALUE, b: VALUE}",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused_in_a_sentence(
    name: Any, tools: Any, error: Any, message: str
):
    with pytest.raises(error, match=message):
        environment_maker(name, {}, tools)


@pytest.mark.parametrize(
    ("turns", "rewards"),
    [
        (["What is 4821 + 3977? 4821 + 3977", "8798"], [0, 1]),
        (["4821 + 3977 = 1", "It is 8798."], [0, 1]),
        (["8798"], [1]),
        (["no number"], [-1]),
        (["3977 * 2", "It is 7954"], [0, -1]),
    ],
)
def test_the_calculator_shows_one_result_and_the_next_turn_is_the_answer(
    turns: list[str], rewards: list[float]
):
    game = Calculator()
    game.reset(Problem("1", "What is 4821 + 3977?", "8798"), 0)
    results = [game.step(turn) for turn in turns]
    assert [each.reward for each in results] == rewards
    assert [each.done for each in results] == [False] * (len(turns) - 1) + [True]
    assert results[-1].correct is (rewards[-1] == 1)
    if len(turns) > 1:
        shown = eval(turns[0].split("=")[0].split("?")[-1])
        assert results[0].observation == f"The calculator shows {shown}"


@pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="needs skyrl-gym: make install-gym")
def test_an_environment_of_skyrl_gym_plays_unchanged():
    episode = environment_maker("skyrl:gsm8k_multi_turn", {}, []).make(None)
    problem = Problem("1", "What is 2 + 3?", "5", fields={"extra_info": {"max_turns": 3}})
    assert episode.reset(problem, 0) == [{"role": "user", "content": "What is 2 + 3?"}]
    first = episode.step("I think #### 4")
    assert (first.done, round(first.reward or 0, 6)) == (False, round(0.2 / 3, 6))
    assert "tentative numeric answer" in texts(first)[0]
    assert episode.step("#### 5") == StepResult([], reward=1.0, done=True)
    episode.close()


@pytest.mark.skipif(find_spec("textarena") is None, reason="needs textarena: make install-gym")
def test_a_game_of_textarena_plays_by_its_seed():
    maker = environment_maker("textarena:GuessTheNumber-v0", {}, [])
    first = maker.make(None)
    second = maker.make(None)
    prompt = first.reset(PROBLEM, 5)
    assert prompt == second.reset(PROBLEM, 5)
    assert "number between 1 and 20" in str(prompt)
    assert first.step("[10]") == second.step("[10]")
    results = [first.step(f"[{guess}]") for guess in range(1, 21) if guess != 10]
    assert any(each.done for each in results)
    with pytest.raises(ConfigError, match="textarena has no game 'GuessTheNumbers-v0'"):
        environment_maker("textarena:GuessTheNumbers-v0", {}, [])


@pytest.mark.skipif(find_spec("textarena") is None, reason="needs textarena: make install-gym")
@pytest.mark.parametrize(
    ("game", "action", "message"),
    [
        ("TicTacToe-v0", "", "TicTacToe-v0 is not a game for one player: .* has to be 2"),
        ("ThreeCardMonte-v0", "no", "ThreeCardMonte-v0 ends with the text .* in place of a reward"),
    ],
)
def test_a_game_of_textarena_that_cannot_be_played_says_why(game: str, action: str, message: str):
    episode = environment_maker(f"textarena:{game}", {}, []).make(None)

    def play() -> None:
        episode.reset(PROBLEM, 0)
        for _ in range(9):
            episode.step(action)

    with pytest.raises(ValueError, match=message):
        play()


@pytest.mark.skipif(find_spec("textarena") is None, reason="needs textarena: make install-gym")
def test_a_game_of_textarena_that_posts_numbers_shows_them():
    episode = environment_maker("textarena:Countdown-v0", {}, []).make(None)
    assert "target" in str(episode.reset(PROBLEM, 0)).lower()


def test_methods_that_a_constructor_binds_are_tools_and_static_ones_are_helpers():
    maker = environment_maker(f"{NAME}Bound", {}, [])
    assert [tool["function"]["name"] for tool in maker.tools] == ["look", "wait"]
    episode = maker.make("hermes")
    episode.reset(PROBLEM, 0)
    assert texts(episode.step(call("look") + call("wait"))) == ["a door\nis open", "2"]


@pytest.mark.parametrize("verifier", ["environment", "exact", "dapo.rewards.examples:has_digit"])
def test_an_episode_whose_environment_failed_has_no_verdict_of_any_verifier(verifier: str):
    texts = [
        EpisodeText(Episode([{"role": "assistant", "content": "8"}], [1.0], error=error))
        for error in (None, "it broke")
    ]
    whole, failed = build_verifier(verifier).judge_group(PROBLEM, texts, [[1], [1]])
    assert whole.error is None
    assert (failed.correct, failed.error) == (None, "environment: it broke")
