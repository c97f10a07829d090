"""How episodes begin: `reset` gets the problem as the data has it, and its text is in the prompt
once.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scripted_engine import ScriptedEngine
from dapo.cli.train import start_run
from dapo.config import DataConfig
from dapo.config.environment import EnvironmentConfig
from dapo.core.errors import DataError
from dapo.engines.checked import CheckedEngine
from dapo.environments.adapters import environment_maker
from dapo.environments.engine import EpisodeEngine
from dapo.environments.rendering import TurnRenderer
from dapo.environments.starts import EpisodeStarts
from dapo.types import Episode, GenerationRequest, Problem
from helpers.chat_templates import tokenizer
from helpers.environments import Echo, LocalPool, open_pool
from helpers.tables import for_each_row
from helpers.tiny_runs import metrics, tiny

pytestmark = pytest.mark.usefixtures("forked_workers")

TOKENIZER = tokenizer("qwen 2.5")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TEXT = Problem("1", "Play.", "five", fields={"word": "abc", "env": "words", "level": 3})
CHAT = Problem(
    "2",
    [{"role": "system", "content": "s"}, {"role": "user", "content": "Play."}],
    "five",
    fields=TEXT.fields,
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class PoolWithTools(LocalPool):
    """Plays an environment by its name, without processes."""

    def __init__(self, name: str) -> None:
        maker = environment_maker(name, {}, [])
        self.tools = list(maker.tools)
        super().__init__(lambda: maker.make(self.form, self.begun))

    def read_calls_as(self, renderer: TurnRenderer) -> None:
        self.form = None if renderer.calls is None else renderer.calls.form
        self.begun = renderer.begun


def played(
    name: str, problems: Sequence[Problem], turns: Sequence[str], *, open_pool: Any = open_pool
) -> tuple[list[Problem], list[Episode]]:
    """The problems with their prompts, and an episode of each with these turns, as in training."""
    with closing(open_pool(name)) as pool:
        renderer = TurnRenderer(TOKENIZER, DataConfig(train="builtin:sums"), tools=pool.tools)
        pool.read_calls_as(renderer)
        starts = EpisodeStarts(pool, seed=7)
        begun = starts.with_prompts(problems)
        texts = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in turns]

        def turn(request: GenerationRequest) -> Any:
            return [*texts[int(request.id.partition("/")[2])], END], "stop"

        inner = CheckedEngine(ScriptedEngine(turn), vocabulary=len(TOKENIZER))
        options = EnvironmentConfig(name=name, max_turns=len(turns))
        engine = EpisodeEngine(inner, pool, renderer, options, starts=starts)
        engine.submit(
            [
                GenerationRequest(
                    str(i), renderer.prompts.encode(each), 999, 1.0, 1.0, 1, (END,), problem=each
                )
                for i, each in enumerate(begun)
            ]
        )
        ended: dict[str, Episode | None] = {}
        while len(ended) < len(problems):
            ended |= {each.request_id: each.episode for each in engine.poll()}
    episodes = [ended[str(i)] for i in range(len(problems))]
    return begun, [episode for episode in episodes if episode is not None]


TRL = "helpers.trl_environments:"


@pytest.mark.parametrize(
    ("name", "turns", "begins", "reward"),
    [
        ("EchoTools", [call("echo", message="Hello"), "done"], "", 0.5),
        (
            "Words",
            [call("guess", guess="[abz]"), call("guess", guess="[abc]"), "done"],
            " The word has 3 letters.",
            1,
        ),
        ("Several", [call("guess", guess="[abc]"), "done"], " The word has 3 letters.", 1),
        ("Columns", [call("nothing"), "done"], None, 0),
        ("Parts", ["done"], " ab", 0),
        ("Say", [call("say", word="five"), "done"], None, 1),
    ],
)
def test_a_class_of_trl_plays_with_its_text_once_in_a_prompt_of_text_or_messages(
    name: str, turns: list[str], begins: str | None, reward: float
):
    begun, episodes = played(TRL + name, [TEXT, CHAT], turns, open_pool=PoolWithTools)
    texts = [str(each.question) for each in begun]
    expected = {
        "Columns": ["Play.|str 3", "Play.|list 3"],
        "Say": ["Play.Say five.", "Play.Say five."],
    }.get(name, [f"Play.{begins}"] * 2)
    assert texts == expected
    for episode in episodes:
        assert episode.error is None
        assert (sum(episode.rewards), episode.num_turns) == (reward, len(turns))


def test_a_random_reset_is_the_same_at_the_start_and_in_each_episode_and_differs_by_problem():
    problems = [Problem(str(i), "Play.", "") for i in range(12)]
    begun, episodes = played(
        f"{TRL}Catch", [*problems, *problems], [call("stay"), call("move", direction="up"), "."]
    )
    assert [each.prompt for each in begun[:12]] == [each.prompt for each in begun[12:]]
    assert len({each.prompt for each in begun}) > 2
    for problem, episode in zip(begun, episodes, strict=True):
        assert episode.error is None
        ball = problem.question.partition("ball ")[2][0]
        assert episode.messages[1]["content"] == f"ball {ball} row 1 paddle 2"
        assert episode.messages[3]["content"].startswith(
            "Error: ValueError: Invalid direction 'up'"
        )


def test_a_prompt_that_is_another_one_each_time_is_an_error_of_the_episode():
    _, (episode,) = played(f"{TRL}Restless", [TEXT], ["done"])
    assert (
        episode.error
        == "reset returned a different prompt from that at the start for problem 1 and the same seed;"
        " draw from the global `random` or a generator of `seed`"
    )


def local_starts(reset: Any) -> EpisodeStarts:
    class Environment(Echo):
        def reset(self, problem: Problem, seed: int) -> Any:
            return reset(problem)

    return EpisodeStarts(LocalPool(Environment), seed=1)  # type: ignore[arg-type]


ROWS = [Problem(str(i), f"Row {i}.", "") for i in range(500)]


def test_a_reset_that_gives_some_rows_a_prompt_is_asked_for_all_of_them():
    starts = local_starts(
        lambda problem: f"{problem.prompt} Go." if int(problem.id) >= 300 else None
    )
    begun = starts.with_prompts(ROWS)
    assert [each.prompt for each in begun] == [
        f"Row {i}. Go." if i >= 300 else f"Row {i}." for i in range(500)
    ]
    # the own prompts are known, and nothing is appended twice
    assert starts.with_prompts(begun) == begun
    for each in (begun[0], begun[400]):
        handle = starts.open(each)
        assert starts.difference(each, handle.reset.result()["prompt"]) is None


class FailsOnce:
    """A pool whose `reset` fails for one problem, and gives the others a prompt."""

    def __init__(self, failing: str) -> None:
        self.failing = failing

    def open(self, problem: Problem, seed: int) -> Any:
        answer = {"prompt": f"Level {problem.id}."}
        if problem.id == self.failing:
            answer = {"error": "there is no such level"}
        reset: Future[dict[str, str]] = Future()
        reset.set_result(answer)
        return SimpleNamespace(reset=reset, close=lambda: None)


def test_one_problem_that_cannot_begin_refuses_nothing_wherever_it_stands():
    """Of 1025 problems the last one is read alone, after 1024 others."""
    problems = [Problem(str(i), f"Row {i}.", "") for i in range(1025)]
    for failing in (0, 700, 1024):
        starts = EpisodeStarts(FailsOnce(str(failing)), seed=1)  # type: ignore[arg-type]
        begun = starts.with_prompts(problems)
        assert begun[failing] == problems[failing]
        assert begun[5].prompt == "Level 5."


def test_a_prompt_that_was_not_seen_at_the_start_is_named():
    starts = local_starts(lambda problem: "Go." if problem.id == "11" else None)
    assert starts.with_prompts(ROWS) == ROWS
    reason = starts.difference(ROWS[11], starts.open(ROWS[11]).reset.result()["prompt"])
    assert (
        reason
        == "reset returned a prompt, and none for the first 8 problems and 56 others at the start,"
        " for problem 11 and the same seed"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "a text",
        [{"role": "user", "content": "a"}],
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
            },
            {"role": "tool", "content": "5", "name": "f"},
        ],
    ],
)
def test_messages_of_a_reset_keep_their_keys_and_values(prompt: Any):
    """Parts of text are one text, as those of a data file."""
    (begun,) = local_starts(lambda problem: prompt).with_prompts(ROWS[:1])
    expected = prompt
    if not isinstance(prompt, str):
        expected = [{**message, "content": text_of(message["content"])} for message in prompt]
    assert begun.prompt == expected


def text_of(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


@for_each_row(
    "prompt", [3, [], ["a"], [{"role": "user"}], [{"content": "a"}], {"role": "user"}, b"a"]
)
def test_what_is_no_prompt_is_refused(prompt: Any):
    with pytest.raises(TypeError, match="expected a text or a list of messages"):
        local_starts(lambda problem: prompt).with_prompts(ROWS[:1])


def test_rows_of_a_class_of_trl_train(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"word {i}", "answer": "one"}) + "\n" for i in range(10))
    )
    options = (f"data.train={rows}", "data.eval=null", "train.eval_every=0", "train.num_steps=1")
    sampling = (
        "dynamic_sampling.enabled=false",
        "rollout.max_response_tokens=16",
        "reward.verifier=auto",
        "overlong.mode=off",
    )
    start_run(
        tiny(f"environment={TRL}Say", *options, *sampling),
        run_dir=tmp_path / "run",
        config_name="t",
    )
    (row,) = metrics(tmp_path / "run")[-1:]
    assert row["rollout/environment_errors"] == 0
    assert row["reward/mean"] == 1.0


@pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="needs skyrl-gym: make install-gym")
def test_environments_of_skyrl_begin_once_with_a_prompt_that_their_init_changes():
    problems = [
        Problem(str(i), "What is 2 + 3?", "5", fields={"extra_info": {"max_turns": 3}})
        for i in range(2)
    ]
    for name in ("skyrl:gsm8k_multi_turn", f"{__name__}:Announced"):
        begun, episodes = played(name, problems, ["I think #### 4", "#### 5"])
        assert [each.error for each in episodes] == [None, None]
        assert [sum(each.rewards) > 0 for each in episodes] == [True, True]
        roles = [message["role"] for message in begun[0].prompt]  # type: ignore[union-attr]
        assert roles == (["system", "user"] if name.endswith("Announced") else ["user"])


class Announced:
    """In the form of skyrl-gym, with a system message before the prompt."""

    def __init__(self, extras: Any, env_config: Any) -> None:
        self.answer = extras["reward_spec"]["ground_truth"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": "Be brief."}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        done = action.endswith(self.answer)
        return {
            "observations": [{"role": "user", "content": "No."}],
            "reward": float(done),
            "done": done,
        }

    def close(self) -> None:
        pass


@pytest.mark.skipif(find_spec("textarena") is None, reason="needs textarena: make install-gym")
def test_games_of_textarena_begin_once_with_their_own_prompt():
    begun, episodes = played("textarena:GuessTheNumber-v0", [TEXT, CHAT], ["[10]", "[11]"])
    assert all(str(each.prompt).count("number between 1 and 20") == 1 for each in begun)
    assert [each.error for each in episodes] == [None, None]


def test_an_environment_that_cannot_begin_stops_the_start_with_its_reason():
    with pytest.raises(DataError, match=r"problem 1: .*KeyError: 'word'"):
        played(f"{TRL}Words", [Problem("1", "Play.", "")], ["done"])
