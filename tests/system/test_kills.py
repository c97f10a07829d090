"""A run that is killed anywhere, and resumed, is the uninterrupted run to the byte."""

import itertools
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.fork_server import AREAS, ForkServer
from helpers.paths import ROOT
from helpers.tiny_runs import CONFIGS, EVENTFUL, contents, differences, metrics

KILLS = int(os.environ.get("DAPO_KILLS", "14"))
"""Of all variants together; `make nightly` sets 200.

Without it only the first variant is killed.
"""

# a checkpoint every second step, so that a kill loses finished steps as well
OPTIONS = (
    *EVENTFUL,
    "train.threads=1",
    "train.num_steps=6",
    "train.save_every=2",
    "train.keep_checkpoints=2",
)
PREDICTIONS = ("dynamic_sampling.predict=true",)
AUDIT = ("audit.verifier=helpers.reward_functions:yes_or_no", "audit.share=0.5")
EPISODES = (
    "environment=helpers.environments:Digits",
    "environment.max_observation_tokens=24",
    "rollout.max_response_tokens=48",
    "reward.verifier=auto",
)
AGENTS = (
    "agent=helpers.faulty_agents:wild",
    "environment.max_observation_tokens=24",
    "rollout.max_response_tokens=48",
)
FEW_EPISODES = (
    "train.num_steps=2",
    "train.save_every=1",
    "train.eval_every=0",
    "data.eval=null",
    "rollout.prompts_per_step=2",
    "dynamic_sampling.max_groups_per_step=3",
)
ASYNC = ("schedule=async", "max_staleness=3")
SOURCE = ROOT / "src/dapo"
VARIANTS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "predictions, audit and an entropy target": (*PREDICTIONS, *AUDIT, "loss.entropy_target=0.3"),
    "one step off with two engines": (*PREDICTIONS, "schedule=one_step_off", "rollout.engines=2"),
    "two passes": ("train.passes_per_step=2",),
    "critic": ("preset=ppo", "critic.lr=0.01"),
    "LoRA": ("model.lora={rank: 2, alpha: 4}", "loss.kl_coef=0.1"),
    "fork": PREDICTIONS,
    "supervised": (
        "preset=sft",
        "data.demonstrations={builtin: {sums: {}}, size: 11, seed: 1}",
        "train.minibatch_groups=4",
    ),
    "teacher": (
        "preset=distill",
        "loss.reference.model=tiny-random",
        "rollout.group_size=2",
        "dynamic_sampling.enabled=false",
    ),
    "episodes": EPISODES,
    "episodes one step off with two engines": (
        *EPISODES,
        "schedule=one_step_off",
        "rollout.engines=2",
    ),
    "async with two engines": (
        *PREDICTIONS,
        *ASYNC,
        "rollout.engines=2",
        "rollout.max_response_tokens=24",
    ),
    "agents": AGENTS,
    "agents async": (*AGENTS, *ASYNC, "rollout.engines=1"),
    "episodes async": (*EPISODES, *ASYNC, "rollout.engines=1"),
    "async": (*ASYNC, "rollout.engines=1", "rollout.max_response_tokens=24"),
}
KILLED = tuple(VARIANTS) if "DAPO_KILLS" in os.environ else tuple(VARIANTS)[:1]
ATTEMPTS_TO_KILL = 5
KILLS_IN_EPISODES = KILLS // 2 if "DAPO_KILLS" in os.environ else 2
"""Inside of agents' episodes: 100 with `make nightly`."""
KILLS_EACH = -(-KILLS // len(KILLED))


class Started:
    """What a person types to start a run of a variant, and to continue it after whatever
    happened.
    """

    def __init__(
        self, fork_server: ForkServer, variant: str, folder: Path, options: Sequence[str] = ()
    ) -> None:
        self.fork_server = fork_server
        self.variant = variant
        # an option that is given twice is refused
        all_options = (*OPTIONS, *VARIANTS[variant], *options)
        values = dict(option.split("=", 1) for option in all_options)
        given = [f"{name}={value}" for name, value in values.items()]
        self.command = ["train", str(CONFIGS / "tiny.yaml"), *given]
        if variant == "fork":
            code, _ = self(folder / "parent")
            assert code == 0, output_of(folder / "parent").read_text()
            self.command = [
                "fork",
                str(folder / "parent"),
                "--step",
                "4",
                "optim.lr=0.001",
                "train.num_steps=8",
            ]

    def __call__(self, run: Path, **moment: object) -> tuple[int, dict[str, int]]:
        """Start or continue a run: exit code, and calls by area."""
        arguments = (
            ["resume", str(run)]
            if (run / "config.yaml").exists()
            else [*self.command, "--run-dir", str(run)]
        )
        return self.fork_server.run(*arguments, output=output_of(run), **moment)


@pytest.fixture(scope="module", params=KILLED)
def counted(
    request: pytest.FixtureRequest,
    fork_server: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Started, Path, dict[str, int]]:
    """The uninterrupted run, and how many calls it made in each area."""
    folder = tmp_path_factory.mktemp("whole")
    start_or_resume = Started(fork_server, request.param, folder)
    code, calls = start_or_resume(folder / "run", count=True)
    assert code == 0, output_of(folder / "run").read_text()
    return start_or_resume, folder / "run", calls


def test_the_areas_of_a_program_in_which_runs_are_killed_are_files_of_it():
    paths = [part for parts in AREAS.values() for part in parts]
    assert [
        part
        for part in paths
        if not (SOURCE / part).is_dir() and not (SOURCE / f"{part}.py").is_file()
    ] == []


def output_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def test_the_run_that_is_killed_has_everything_that_makes_resuming_hard(
    counted: tuple[Started, Path, dict[str, int]],
):
    start_or_resume, whole, _ = counted
    if start_or_resume.variant != "sync":
        pytest.skip("the other variants have their own tests")
    rows = metrics(whole)[1:]
    assert min(row["rollout/keep_rate"] for row in rows) < 1
    assert sum(row["rollout/groups_excess"] for row in rows) > 0
    assert sum(row["rollout/groups_aborted"] for row in rows) > 0
    assert [row["rollout/epoch"] for row in rows][-1] >= 2
    assert len({row["loss/entropy"] for row in rows}) == 6
    assert 0 < sum(row["rollout/shortfall_groups"] > 0 for row in rows) < 6
    assert len(contents(whole)["files"]) == 6 + 3 + 1 + 5 * (
        3 if (whole / "checkpoints/step_000002").exists() else 2
    )


def test_killed_at_random_moments_and_resumed_it_ends_as_if_nothing_had_happened(
    counted: tuple[Started, Path, dict[str, int]], tmp_path: Path
):
    """SIGKILL in each area of the program by turns: at a random call made there, or up to 20 ms
    after one.
    """
    start_or_resume, whole, calls = counted
    areas = [area for area in AREAS if calls.get(area)]
    expected = contents(whole)
    chance = random.Random(int(os.environ.get("DAPO_KILLS_SEED", "0")))
    killed: Counter[str] = Counter()
    for number in itertools.count():
        run = tmp_path / f"run{number}"
        is_ended = False
        while not is_ended:
            moment: dict[str, object] = {}
            area = areas[killed.total() % len(areas)]
            if killed.total() < KILLS_EACH:
                delay = chance.choice([0, 0, 0.02 * chance.random()])
                moment = {
                    "area": area,
                    # a resumed run makes fewer
                    "calls": chance.randint(1, max(2, int(0.6 * calls[area]))),
                    "signals": [(delay, signal.SIGKILL)],
                }
            code, _ = start_or_resume(run, **moment)
            assert code in (0, -signal.SIGKILL), f"{moment}\n{output_of(run).read_text()[-3000:]}"
            is_ended = code == 0
            killed[area] += not is_ended
        assert differences(contents(run), expected) == [], f"after {killed} in {number + 1} runs"
        assert not list(run.rglob("*.tmp")), "leftovers of a broken-off write"
        shutil.rmtree(run)
        print(f"{killed.total()} kills, {number + 1} runs equal: {dict(killed)}", flush=True)
        if killed.total() >= KILLS_EACH:
            break
    assert set(killed) == set(areas) or len(areas) > KILLS_EACH


def test_killed_inside_of_an_agents_episode_it_ends_as_if_nothing_had_happened(
    fork_server: ForkServer, tmp_path: Path
):
    """Calls of agents' code are made in their episodes alone: SIGKILL at random ones of them."""
    start_or_resume = Started(fork_server, "agents", tmp_path, FEW_EPISODES)
    code, calls = start_or_resume(tmp_path / "whole", count=True)
    assert code == 0, output_of(tmp_path / "whole").read_text()
    expected = contents(tmp_path / "whole")
    rows = metrics(tmp_path / "whole")[1:]
    assert sum(row["rollout/branches_mean"] for row in rows) > 0
    chance = random.Random(int(os.environ.get("DAPO_KILLS_SEED", "0")))
    kills = 0
    for number in itertools.count():
        run = tmp_path / f"run{number}"
        code = -signal.SIGKILL
        while code:
            moment: dict[str, object] = {}
            if kills < KILLS_IN_EPISODES:
                call = chance.randint(1, int(0.6 * calls["agents"]))
                moment = {"area": "agents", "calls": call, "signals": [(0, signal.SIGKILL)]}
            code, _ = start_or_resume(run, **moment)
            assert code in (0, -signal.SIGKILL), output_of(run).read_text()[-3000:]
            kills += code != 0
        assert differences(contents(run), expected) == [], f"after {kills} kills"
        shutil.rmtree(run)
        if kills >= KILLS_IN_EPISODES:
            break


@pytest.mark.parametrize(("file", "phase"), [("config.yaml", "start"), ("summary.json", "end")])
def test_killed_as_soon_as_a_file_of_its_start_or_end_is_there_it_ends_like_the_others(
    counted: tuple[Started, Path, dict[str, int]], tmp_path: Path, file: str, phase: str
):
    """After `summary.json` curves are drawn and checkpoints reduced, which the resumed run
    completes.
    """
    start_or_resume, whole, _ = counted
    for attempt in range(ATTEMPTS_TO_KILL):  # on a busy machine the signal may come too late
        run = tmp_path / f"{phase}{attempt}"
        code, _ = start_or_resume(run, file=str(run / file), lines=1, signals=[(0, signal.SIGKILL)])
        if code == -signal.SIGKILL:
            break
        assert code == 0
    assert code == -signal.SIGKILL
    assert (run / "tokenizer").is_dir()
    code, _ = start_or_resume(run)
    assert code == 0, output_of(run).read_text()[-3000:]
    assert (run / "curves.png").is_file()
    assert [path.parent.name for path in sorted(run.glob("checkpoints/*/weights_only"))] == [
        path.parent.name for path in sorted(whole.glob("checkpoints/*/weights_only"))
    ]
    assert differences(contents(run), contents(whole)) == []
