"""What an agent costs beside an environment: `python -m benchmarks.agents`, for docs/agents.md.

The first part plays agents that only ask, over an engine that samples nothing, and prints the
processor time of this process, which has the endpoint and the engine, per call. The second one
trains the same episodes twice, as an environment and as an agent that relays it, and compares their
episodes per second.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import dapo
from benchmarks.asking_agents import CALLS
from benchmarks.scripted_engine import ScriptedEngine
from dapo.config import DataConfig
from dapo.config.environment import EnvironmentConfig
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.environments.agents.engine import AgentEngine
from dapo.environments.agents.pool import AgentPool
from dapo.environments.agents.rendering import AgentRenderer
from dapo.policy.model import load_model
from dapo.processes.output import WorkerOutput
from dapo.types import GenerationRequest, Problem

TURN = "The result of the calculation is 1234."
SIZES: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_response_tokens": 96,
    "max_groups_per_step": 4,
    "dynamic_sampling.enabled": False,
    "environment.max_turns": 2,
    "environment.max_turn_tokens": 48,
    "overlong.mode": "off",
    "lr": 1e-7,
}


def time_of_calls(episodes: int, *, by_load: bool) -> float:
    """Return the milliseconds of processor time of this process per call."""
    options = EnvironmentConfig(
        name="agent:benchmarks.asking_agents:conversation", max_turns=CALLS, timeout_s=60.0
    )
    tokenizer = load_model("tiny-random", dtype=torch.float32).tokenizer
    renderer = AgentRenderer(tokenizer, DataConfig(train="builtin:sums"), "append")
    ids = tokenizer(TURN, add_special_tokens=False)["input_ids"]
    problem = Problem("1", "What is 1200 + 34? Think about it first, then write a number.", "1234")
    prompts = renderer.plain.prompts
    end = prompts.turn_end
    stop_id = tokenizer.eos_token_id if end is None or end.token_id is None else end.token_id
    prompt_ids = prompts.encode(problem)
    with AgentPool(options, memory_gib=1.0, output=WorkerOutput()) as pool:
        inner = ScriptedEngine(lambda request: ([*ids, stop_id], "stop"))
        engine = AgentEngine(
            ContinuingEngine(CheckedEngine(inner, vocabulary=len(tokenizer))),
            pool,
            renderer,
            options,
            seed_of=lambda request: request.seed,
            max_context=8192,
            by_load=by_load,
        )
        requests = [
            GenerationRequest(
                str(number), prompt_ids, 4096, 1.0, 1.0, number, (stop_id,), problem=problem
            )
            for number in range(episodes)
        ]
        began = time.process_time()
        engine.submit(requests)
        ended = 0
        while ended < episodes:
            for generation in engine.poll():
                assert generation.episode is not None
                assert generation.episode.error is None, generation.episode.error
                assert len(generation.episode.calls) == CALLS
                ended += 1
        return 1000 * (time.process_time() - began) / (CALLS * episodes)


def episodes_per_second(model: str, steps: int, folder: Path, **player: str) -> list[float]:
    """Return those of each step but the first, which warms up."""
    run = dapo.train(model, data="builtin:sums", run_dir=folder, steps=steps + 1, **player, **SIZES)
    episodes = SIZES["prompts_per_step"] * SIZES["group_size"]
    seconds = run.metrics["time/generate_s"].dropna().tolist()
    return [episodes / each for each in seconds[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    for clock, by_load in (("steps", False), ("load", True)):
        times = [time_of_calls(arguments.episodes, by_load=by_load) for _ in range(3)]
        print(
            f"clock={clock}: {median(times):.2f} ms of processor time per call,"
            f" {arguments.episodes} episodes of {CALLS} calls at once"
        )
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    with TemporaryDirectory() as folder:
        rates = {}
        players = {
            "environment": {"environment": "calculator"},
            "relay": {"agent": "benchmarks.asking_agents:relay"},
            "relay on the OpenAI SDK": {"agent": "calculator_agent:solve"},
        }
        for name, player in players.items():
            path = Path(folder) / name.replace(" ", "-")
            rates[name] = median(
                episodes_per_second(arguments.model, arguments.steps, path, **player)
            )
            ratio = rates[name] / rates["environment"]
            print(
                f"{name}: {rates[name]:.2f} episodes per second, {ratio:.2f} of the environment's"
            )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
