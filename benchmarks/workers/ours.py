"""dapo as a user runs it: the shipped loop, engine and policy, put together by
`dapo.start`.
"""

import io
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

import dapo
from benchmarks.geometries import GEOMETRIES
from benchmarks.memory import peak_rss_bytes
from benchmarks.protocol import Channel, Handler, serve
from benchmarks.random_models import write_random_model
from dapo.config import dump_config, load_config
from dapo.core.rng import keyed_seed
from dapo.data.problems import load_problems
from dapo.data.stream import ProblemStream
from dapo.engines.engine import RolloutEngine
from dapo.evaluation.evaluate import EngineSampler, evaluate
from dapo.policy.builtin_models import smollm2_directory
from dapo.policy.model import export_model
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import make_manifest
from dapo.runs.sinks import Tracker
from dapo.sampling.continuous import ContinuousSampling
from dapo.start.build import build
from dapo.start.check import check, read_data
from dapo.start.read import read
from dapo.start.resolve import resolve
from dapo.training.train import train
from dapo.types import Generation, GenerationRequest


def problems(config: str, count: int) -> dict[str, Any]:
    """The first training problems of a configuration, as rows of a data file."""
    found = load_problems(load_config(config).data.train, split="train")[:count]
    return {
        "rows": [
            {"id": problem.id, "prompt": problem.prompt, "answer": problem.answer}
            for problem in found
        ]
    }


def with_template(directory: str, template: str) -> dict[str, Any]:
    """Write the small model with another chat template."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (Path(directory) / name).symlink_to(smollm2_directory() / name)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return {}


def random_model(directory: str, name: str) -> dict[str, Any]:
    """Write a model of this geometry with random weights and a tokenizer of bytes."""
    return {"parameters": write_random_model(directory, GEOMETRIES[name])}


class StepSink:
    """Hands on the metrics of each step."""

    def __init__(self, on_step: Callable[[Mapping[str, float]], None]) -> None:
        self._on_step = on_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._on_step(metrics)

    def close(self) -> None: ...


class ForcedTurns:
    """Wraps the engine of an episode's turns: each has the most tokens, and the last one is the
    token that ends it.
    """

    def __init__(self, engine: RolloutEngine, end_id: int) -> None:
        self._engine = engine
        self._end_id = end_id

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit them with as many tokens as they may have."""
        self._engine.submit(
            [replace(request, min_new_tokens=request.max_new_tokens) for request in requests]
        )

    def poll(self) -> list[Generation]:
        """The finished turns, with their end."""
        return [
            replace(turn, token_ids=(*turn.token_ids[:-1], self._end_id), finish="stop")
            for turn in self._engine.poll()
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Ours:
    """One run, whose loop hands over after each step.

    The loop, like every other command, runs in the main thread, as the loop of a user's run does:
    the threads of libgomp sleep sooner between operations when two threads of a process have called
    them.
    """

    def __init__(self, on_step: Callable[[dict[str, Any]], None]) -> None:
        """`on_step` gets the seconds of each step, and returns when the loop shall go on."""
        self._stack = ExitStack()
        self._on_step = on_step

    def open(
        self,
        config: str,
        overrides: list[str],
        forced_lengths: bool = False,
        forced_turns: bool = False,
    ) -> dict[str, Any]:
        """Load what a run of this configuration would; with forced lengths, responses or turns have
        the most tokens.
        """
        checked = self._stack.enter_context(check(load_config(config, overrides)))
        self.inputs = read(resolve(checked), read_data(checked))
        self.config = self.inputs.config
        parameters = sum(p.numel() for p in self.inputs.loaded.model.parameters())
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        manifest = make_manifest([], seed=self.config.train.seed, started=datetime.now(UTC))
        run = RunDirectory.create(Path(folder) / "run", dump_config(self.config), manifest)
        display = ProgressDisplay(self.config.train.num_steps, stream=io.StringIO())
        self.run = self._stack.enter_context(build(self.inputs, run, display, first_step=1))
        if forced_lengths:
            plan = self.run.sampling.plan
            self.run.sampling.plan = replace(plan, min_response_tokens=plan.max_response_tokens)
        if forced_turns:
            episodes: Any = self.run.engine
            end_id = self.inputs.loaded.tokenizer.eos_token_id
            episodes._engine = ForcedTurns(episodes._engine, end_id)
        # the run's own loop takes the steps, one at a time: nothing is evaluated or saved, and it
        # never ends
        endless = {
            "train": self.config.train.model_copy(
                update={"num_steps": 10**6, "save_every": 0, "eval_every": 0}
            )
        }
        self.run.config = self.config.model_copy(update=endless)
        if isinstance(self.run.sampling, ContinuousSampling):
            self.run.sampling.lookahead = self.run.config.lookahead
        self.run.state.pending_metrics = None
        self.run.tracker.close()
        sink = StepSink(lambda metrics: self._on_step(self._describe(metrics)))
        self.run.tracker = Tracker([sink], ProgressDisplay(1, stream=io.StringIO()))
        return {
            "config": self.config.model_dump(mode="json"),
            "directory": str(model_directory(self.config.model.name)),
            "parameters": parameters,
            "dtype": self.config.model.dtype,
            "threads": torch.get_num_threads(),
            "versions": {
                "dapo": dapo.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "stop_ids": list(self.inputs.loaded.stop_ids),
        }

    def rows(self, count: int) -> dict[str, Any]:
        """The stream's first `count` problems, as any system reads them."""
        stream = ProblemStream(self.inputs.train, seed=self.config.train.seed)
        return {"rows": [self._row(stream.take()[1]) for _ in range(count)]}

    def demonstrations(self, count: int) -> dict[str, Any]:
        """The token ids of the stream's first `count` demonstrations."""
        stream = self.run.sampling.stream
        encode = self.run.sampling.encoder.encode
        found = [stream.problem_at(i) for i in range(count)]
        answers = [self.run.answers[each.id].token_ids for each in found]
        pairs = zip(found, answers, strict=True)
        return {
            "samples": [
                {"prompt_ids": list(encode(p)), "response_ids": list(ids)} for p, ids in pairs
            ]
        }

    def held_out(self) -> dict[str, Any]:
        """The evaluation problems, and how they are sampled."""
        plan = self.run.eval_plan
        assert plan is not None
        return {
            "rows": [self._row(problem) for problem in self.inputs.held_out],
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "max_new_tokens": plan.max_response_tokens,
            "verifier": self.config.reward.verifier,
            "options": dict(self.config.reward.options),
        }

    def generate(self, prompts: list[list[int]], group: int, tokens: int) -> dict[str, Any]:
        """Exactly `tokens` tokens for `group` responses to each prompt, from submission to the last
        one.
        """
        requests = [
            GenerationRequest(
                id=f"{p}/{i}",
                prompt_ids=tuple(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                temperature=1.0,
                top_p=1.0,
                seed=keyed_seed("bench", p, i),
                stop_ids=self.inputs.loaded.stop_ids,
            )
            for p, ids in enumerate(prompts)
            for i in range(group)
        ]
        self.run.sync_engine()
        started = time.perf_counter()
        lengths = drain(self.run.engine, requests)
        return {"seconds": time.perf_counter() - started, "tokens": sum(lengths)}

    def evaluate(self) -> dict[str, Any]:
        """The evaluation of a training, verdicts included, from handing in the problems to the last
        score.
        """
        assert self.run.eval_plan is not None
        self.run.sync_engine()
        sampler = EngineSampler(self.run.engine, self.run.sampling.encoder, self.run.eval_plan)
        started = time.perf_counter()
        found = evaluate(sampler, self.inputs.code.judge, self.inputs.held_out)
        seconds = time.perf_counter() - started
        lengths = [response.tokens for judged in found.problems for response in judged.responses]
        return {"seconds": seconds, "tokens": sum(lengths), "responses": len(lengths)}

    def train(self) -> dict[str, Any]:
        """The loop of the run's schedule, which only an exception of `on_step` ends."""
        train(self.run)
        return {}

    def _describe(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The seconds of a step by phase, and its work."""
        if self.config.train.device == "cuda":
            torch.cuda.synchronize()
        return {
            "step_s": metrics["time/step_s"],
            "loss": metrics.get("loss/nll", metrics.get("loss/policy")),
            "generation_s": metrics.get("time/generate_s", 0.0),
            "update_s": metrics["time/update_s"] + metrics.get("time/old_logprobs_s", 0.0),
            "load_weights_s": metrics.get("time/load_weights_s", 0.0),
            "wait_s": metrics.get("time/trainer_idle_s", 0.0),
            "generated_tokens": int(metrics["rollout/tokens_generated"]),
            "trained_tokens": int(metrics["rollout/tokens_in_minibatches"]),
            "observed_tokens": int(metrics.get("rollout/observation_tokens", 0)),
            "lr": metrics["optim/lr"],
        }

    def memory(self) -> dict[str, Any]:
        """Peak bytes: resident, verifier processes included, and on the GPU."""
        gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {"rss_bytes": peak_rss_bytes(self.inputs.code.judge.worker_pids), "gpu_bytes": gpu}

    def export(self, directory: str) -> dict[str, Any]:
        """Write the policy as a Hugging Face directory."""
        export_model(
            self.run.policy.weights(version=0).named_tensors(), self.inputs.loaded, directory
        )
        return {}

    def close(self) -> None:
        """End the verifier processes."""
        self._stack.close()

    def _row(self, problem: Any) -> dict[str, Any]:
        prompt = problem.prompt
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [dict(m) for m in prompt]
        )
        return {
            "id": problem.id,
            "prompt": messages,
            "answer": problem.answer,
            "prompt_ids": list(self.run.sampling.encoder.encode(problem)),
        }


def model_directory(name: str) -> Path:
    """Where other systems find the model."""
    return smollm2_directory() if name == "smollm2-135m-instruct" else Path(name)


def drain(engine: RolloutEngine, requests: list[GenerationRequest]) -> list[int]:
    """Answer all requests; the lengths of the responses, as they finished."""
    engine.submit(requests)
    lengths: list[int] = []
    while len(lengths) < len(requests):
        lengths += [len(generation.token_ids) for generation in engine.poll()]
    return lengths


def main() -> None:
    """Answer the coordinator; `step` lets the loop go on, and is answered when it hands over."""
    channel = Channel()
    handlers: dict[str, Handler] = {}

    def on_step(answer: dict[str, Any]) -> None:
        channel.answer(answer)
        if not serve(handlers, channel, until="step"):
            raise SystemExit

    ours = Ours(on_step)
    commands = (
        "open",
        "rows",
        "held_out",
        "demonstrations",
        "generate",
        "evaluate",
        "memory",
        "export",
    )
    handlers |= {"problems": problems, "random_model": random_model, "with_template": with_template}
    handlers |= {name: getattr(ours, name) for name in commands} | {"step": ours.train}
    try:
        serve(handlers, channel)
    finally:
        ours.close()


if __name__ == "__main__":
    main()
