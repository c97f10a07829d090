"""The part `episodes`: equal work in both systems, forced turns, and its figures."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import bench, episodes, report
from benchmarks.compare import CONFIG, Work, step_options
from benchmarks.notes import Notes, forced_call
from benchmarks.scripted_engine import ScriptedEngine
from benchmarks.workers.ours import ForcedTurns, Ours
from dapo.config import load_config
from dapo.types import GenerationRequest
from helpers.paths import ROOT

WORK = Work(2, 4, 16)
FAIR = {"generated_tokens": 128, "trained_tokens": 128, "observed_tokens": 60, "prompt_tokens": 90}


@pytest.fixture
def steps() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def ours(steps: list[dict[str, Any]]) -> Iterator[Ours]:
    def end(step: dict[str, Any]) -> None:
        steps.append(step)
        raise SystemExit

    ours = Ours(end)
    yield ours
    ours.close()


def test_every_turn_has_the_most_tokens_and_ends():
    scripted = ScriptedEngine(lambda request: ([5, 9, 6, 7, 8], "stop"))
    engine = ForcedTurns(scripted, end_id=9)
    engine.submit([GenerationRequest("a", (1,), 3, 1.0, 1.0, 0, (9,), min_new_tokens=0)])
    turns: list[Any] = []
    while not turns:
        turns = engine.poll()
    assert [(turn.token_ids, turn.finish) for turn in turns] == [((5, 6, 9), "stop")]
    assert scripted.submitted[0].min_new_tokens == 3


def test_our_worker_plays_as_many_turns_of_as_many_tokens_as_are_forced(
    ours: Ours, steps: list[dict[str, Any]]
):
    model = [
        "train.threads=1",
        "model.dtype=float32",
        "overlong.mode=off",
        "rollout.max_response_tokens=16",
    ]
    shape = [
        "rollout.prompts_per_step=2",
        "rollout.group_size=4",
        "train.minibatch_groups=2",
        "data.eval=null",
    ]
    ours.open(
        str(ROOT / "configs" / "tiny.yaml"),
        [*model, *shape, *episodes.episode_options(WORK)],
        forced_turns=True,
    )
    with pytest.raises(SystemExit):
        ours.train()
    (step,) = steps
    assert step["generated_tokens"] == step["trained_tokens"] == WORK.responses * WORK.tokens
    assert (
        step["observed_tokens"] % (WORK.responses * (episodes.TURNS - 1))
        == 0
        < step["observed_tokens"]
    )


def test_the_options_of_the_episodes_are_options(tmp_path):
    class Session:
        settings = bench.Settings()
        folder = tmp_path

        def start(self, *_: Any) -> None: ...

        def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"rows": [{"id": "1", "prompt": "1 + 1 = ?", "answer": "2"}] * WORK.prompts}

    config = load_config(
        ROOT / CONFIG, [*step_options(Session(), WORK), *episodes.episode_options(WORK)]
    )
    assert (
        config.environment.max_turns * (config.environment.max_turn_tokens or 0)
        == config.rollout.max_response_tokens
    )
    assert config.reward.verifier == "environment"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"trained_tokens": 127}, "trl: trained_tokens is 127 where 128 were forced"),
        ({"generated_tokens": 130}, "trl: generated_tokens is 130 where 128 were forced"),
        (
            {"observed_tokens": 61},
            "observed_tokens differ, so the figures cannot be compared: ours 60, trl 61",
        ),
        (
            {"prompt_tokens": 91},
            "prompt_tokens differ, so the figures cannot be compared: ours 90, trl 91",
        ),
    ],
)
def test_systems_that_do_other_work_are_not_compared(counts: dict[str, int], message: str):
    episodes.require_same_work({"ours": FAIR, "trl": FAIR}, WORK)
    with pytest.raises(ValueError, match=message):
        episodes.require_same_work({"ours": FAIR, "trl": FAIR | counts}, WORK)


def test_episodes_per_second_are_compared_round_by_round():
    rounds = [{"ours": {"play_s": 2.0, "step_s": 4.0}, "trl": {"play_s": 8.0, "step_s": 20.0}}]
    part = {
        "figures": episodes.figures(rounds, WORK),
        "dtype": "float32",
        "date": "2026-01-02",
        "commit": "abc",
    }
    rows = report.table_rows({"machine": {}, "parts": {"episodes": part}})
    assert [row[:5] for row in rows] == [
        ("8 episodes of 4 turns of 4, played, episodes/s", "4", "1", "trl", "4.00"),
        (
            "8 episodes of 4 turns of 4, trained in a whole step, episodes/s",
            "2",
            "0.4",
            "trl",
            "5.00",
        ),
    ]


def test_a_turn_of_any_text_calls_the_environments_only_tool():
    name, arguments = forced_call("any text")
    notes = Notes()
    notes.reset()
    assert getattr(notes, name)(**arguments) == "The note is kept. Write the next one, or end here."
    assert notes.texts == ["any text"]
