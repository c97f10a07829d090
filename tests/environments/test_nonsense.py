"""Ten episodes of nonsense before training: what is refused, what is a warning, what stays equal."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dapo.api.play import _speaker
from dapo.config import Config, build_config
from dapo.core.errors import ConfigError, DataError
from dapo.environments.nonsense import BUDGET_S, KINDS, Play, is_suspicious, verdict_on
from dapo.environments.pool import EnvironmentPool
from dapo.start.episodes import Episodes, episodes_of
from dapo.start.play import nonsense_in, play_nonsense
from dapo.types import Episode, Problem
from helpers.chat_templates import tokenizer
from helpers.tables import for_each_row

pytestmark = pytest.mark.usefixtures("forked_workers")

MODULE = "helpers.faulty_environments"
TOKENIZER = tokenizer("qwen 2.5")
PROBLEMS = [Problem(str(i), f"Play game {i}.", str(i), fields={"level": i}) for i in range(12)]


@contextmanager
def episodes(name: str | None, *options: str) -> Iterator[Episodes]:
    raw: dict[str, Any] = {"model": "none", "data": {"train": "builtin:sums"}}
    if name is not None:
        raw["environment"] = {"name": f"{MODULE}:{name}"}
    config: Config = build_config(raw, options)
    with EnvironmentPool(config.environment, memory_gib=1.0) as pool:
        yield episodes_of(config, TOKENIZER, pool)


def start(name: str | None, *options: str) -> tuple[list[str] | ConfigError, bool]:
    """Do what a start of training does; return its warnings or its refusal.

    Return, too, whether `dapo test`, which plays all ten episodes, finds something.
    """
    with episodes(name, *options) as opened:
        begun = opened.with_prompts(PROBLEMS)
        is_found = is_suspicious(opened.play_nonsense(begun))
        try:
            return opened.try_out(begun), is_found
        except ConfigError as refusal:
            return refusal, is_found


TOOL = (f"environment.tools=[{MODULE}:triple]",)


@for_each_row(
    ("name", "options"),
    [
        ("Good", ()),
        ("Tool", ()),
        ("ToolWithText", ()),
        (None, (*TOOL, "reward.verifier=math")),
        ("ToolWithText", TOOL),
        ("Coroutines", ()),
        ("NoReward", ("reward.verifier=math",)),
    ],
)
def test_each_form_of_an_environment_starts_without_a_warning(name, options):
    assert start(name, *options, "overlong.mode=off") == ([], False)


@for_each_row(
    ("name", "failed", "cause"),
    [
        (
            "GymTuple",
            9,
            "return StepResult(observation, reward, done) (faulty_environments.py, line ",
        ),
        ("Raises", 9, "raised ConnectionError: the server is down (faulty_environments.py, line "),
        ("RaisesInLibrary", 9, "Singular matrix (faulty_environments.py, line "),
        (
            "WrongReward",
            10,
            "get_reward: the reward is str 'much', expected a number or None (faulty_",
        ),
        ("RandomPrompt", 10, "draw from the global `random` or a generator of `seed`"),
    ],
)
def test_an_environment_that_fails_whatever_is_said_is_refused_with_the_users_line(
    name, failed, cause
):
    refusal, is_found = start(name)
    assert is_found
    head, *table = str(refusal).split("\n")
    assert head.startswith(f"environment {MODULE}:{name}: {failed} of 10 episodes of nonsense")
    assert sum(cause in line for line in table) >= 3
    assert "(environment.py" not in str(refusal)


@for_each_row(
    ("name", "options", "advice"),
    [
        (None, TOOL, "environment.tools give no reward: set reward.verifier"),
        ("NoReward", (), "it has no get_reward, so every episode would have a reward of 0"),
    ],
)
def test_an_environment_that_rewards_nothing_is_refused(name, options, advice):
    refusal, _ = start(name, *options)
    assert isinstance(refusal, ConfigError)
    assert advice in str(refusal)


def test_on_a_busy_machine_an_environment_that_fails_is_played_for_longer(
    monkeypatch: pytest.MonkeyPatch,
):
    with episodes("Raises") as opened:
        begun = opened.with_prompts(PROBLEMS)
        plays = opened.play_nonsense(begun)

        def play_in_time(self: Episodes, problems: object, *, budget_s: float) -> list[Play]:
            return plays[:2] if budget_s == BUDGET_S else plays

        monkeypatch.setattr(Episodes, "play_nonsense", play_in_time)
        with pytest.raises(ConfigError, match="9 of 10 episodes of nonsense failed"):
            opened.try_out(begun)


def test_the_highest_reward_of_nonsense_is_one_of_an_episode_that_did_not_fail():
    turn = {"role": "assistant", "content": ""}
    plays = [
        Play(0, "nothing", Episode([turn], [-1.0])),
        Play(1, "random text", Episode([turn], [], error="it broke")),
    ]
    assert verdict_on(plays) == (
        "1 of 2 episodes failed: it broke; the highest reward of nonsense is -1"
    )


def test_a_prompt_of_reset_stands_in_the_place_of_sums():
    class_of_trl = f"{MODULE}:WithoutColumns"
    assert {play.error for play in play_nonsense(class_of_trl, data=None, overrides=[])} == {None}
    with episodes(class_of_trl.partition(":")[2]) as opened:
        config = opened.config.changed("data", train={"environment": {}, "size": 4})
        _, problems = nonsense_in(replace(opened, config=config), needs_data=False)
        assert {problem.prompt for problem in problems} == {"Count to 5."}
    with episodes("Tool") as opened:
        config = opened.config.changed("data", train={"environment": {}, "size": 4})
        _, problems = nonsense_in(replace(opened, config=config), needs_data=False)
        assert {problem.source for problem in problems} == {"sums"}


def test_a_tuple_of_reset_is_refused_with_what_to_return():
    with pytest.raises(
        DataError, match=r"return the observation alone \(faulty_environments.py, line"
    ):
        start("GymnasiumReset")
    assert is_suspicious(play_nonsense(f"{MODULE}:GymnasiumReset", data=None, overrides=[]))


NO_END = "def end(self): return StepResult(reward="


@for_each_row(
    ("name", "options", "expected"),
    [
        ("RaisesWithoutNumber", (), "6 of 10 episodes of nonsense failed"),
        ("RandomNumber", (), "two plays with the same seed and the same turns differ"),
        ("Shared", (), "keep nothing between episodes"),
        ("PaysForCuts", ("overlong.mode=off",), "let a wrong turn end the episode with `Step"),
        ("PaysForCuts", ("overlong.mode=off",), f"{NO_END}-0.8, done=True)"),
        ("PaysForCutsAtOnce", ("overlong.mode=off",), f"give the environment `{NO_END}-1, done"),
        # the limit of a turn leaves tokens, which Eq. 13 does not punish
        ("PaysForCuts", ("environment.max_turn_tokens=16",), NO_END),
    ],
)
def test_a_fault_with_which_a_run_can_train_is_a_warning(name, options, expected):
    warnings, is_found = start(name, *options)
    assert any(expected in warning for warning in warnings)
    assert is_found


def test_where_the_overlong_penalty_punishes_cuts_or_they_do_not_train_nothing_is_said():
    for mode in ("soft", "filter"):
        assert start("PaysForCuts", f"overlong.mode={mode}")[0] == []


def test_a_slow_environment_delays_the_start_by_two_seconds_at_most():
    with episodes("Slow", "environment.workers=1") as opened:
        problems = opened.with_prompts(PROBLEMS)
        started = time.monotonic()
        assert opened.try_out(problems) == []
        assert time.monotonic() - started < 2.0


def test_an_environment_without_a_prompt_needs_problems():
    raw = {"model": "none", "environment": f"{MODULE}:Tool"}
    config = build_config(raw)
    assert config.data.train == "environment"
    named = [Problem("1", "episode 0 of train, seed 0", "", source="environment")]
    with EnvironmentPool(config.environment, memory_gib=1.0) as pool:
        opened = episodes_of(config, TOKENIZER, pool)
        with pytest.raises(DataError, match="return the prompt from reset, or name problems in"):
            opened.with_prompts(named)


def test_an_episode_cannot_begin_with_the_beginning_of_an_answer():
    begun = [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "Well,"}]
    with episodes("Tool") as opened, pytest.raises(DataError, match="in an episode the policy"):
        opened.with_prompts([Problem("1", begun, "5")])


def test_training_continues_as_if_nothing_had_been_played():
    """Episodes, and the states of all random generators, are equal with and without nonsense."""
    turns = ["12", "no number", "7"]
    results = []
    for is_tried in (False, True):
        with episodes("Good") as opened:
            problems = opened.with_prompts(PROBLEMS)
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
            if is_tried:
                opened.try_out(problems)
            states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
            answers = []
            for problem in problems:
                handle = opened.starts.open(problem)
                answers.append([handle.reset.result(), *(handle.step(t).result() for t in turns)])
                handle.close()
            results.append((states[:2], states[2].tolist(), answers))
    assert results[0] == results[1]


def test_every_kind_of_turn_is_among_the_first_four_of_the_ten():
    assert (len(KINDS), KINDS.count("cut off")) == (10, 1)
    assert set(KINDS[:4]) == set(KINDS)


def test_a_turn_of_a_player_that_is_no_text_is_refused():
    say = _speaker(lambda said: {"go": 5, "end": None}.get(said, said))  # type: ignore[arg-type]
    assert say is not None
    assert (say("hello"), say("end")) == ("hello", None)
    with pytest.raises(ConfigError, match="turns returned 5, expected a text, or None at the end"):
        say("go")
