"""Short runs of a tiny model with one planted fault each, and healthy ones: does `dapo doctor` find
the cause?

A fault is planted where it would arise: in the reward, the options, the data or the model, never in
the metrics.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dapo.analysis.doctor import Diagnosis, diagnose
from dapo.config import PRESETS, Config, build_config, dump_config
from dapo.core.errors import DapoError
from dapo.engines.engine import RolloutEngine, WeightSource
from dapo.policy.builtin_models import tiny_random
from dapo.policy.hf_io import write_model_directory
from dapo.rewards.combine import InlineJudge
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.start.build import build
from dapo.start.check import check, read_data
from dapo.start.read import Inputs, read
from dapo.start.resolve import resolve
from dapo.training.state import Run
from dapo.training.train import train

REWARDS = "benchmarks.planted_rewards"
DEFAULT_REWARD = f"{REWARDS}:has_digit"

KINDS = {
    # the first letter of a prompt: how the fitted model answers it
    "Q": "a digit or a letter",
    "E": "a digit",
    "H": "a letter",
    "L": "a loop, in two of three responses",
    "S": "four answers, in two of three responses",
    "T": "letters and digits without an end",
}


def fitted_model(path: Path, *, steps: int = 110, seed: int = 0) -> Path:
    """A tiny model that has learned to end its responses, and to answer each of KINDS in its way;
    about two seconds.
    """
    model, tokenizer = tiny_random(torch.float32)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    for _ in range(steps):
        rows = [_example(draw) for _ in range(32)]
        pairs = [
            (tokenizer(prompt).input_ids, [*tokenizer(answer).input_ids, end])
            for prompt, answer in rows
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((len(pairs), width), pad)
        labels = torch.full((len(pairs), width), -100)
        for row, (prompt, answer) in enumerate(pairs):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    write_model_directory(model.named_parameters(), model, tokenizer, path)
    return path


def _example(draw: random.Random) -> tuple[str, str]:
    kind = draw.choice("QQQEHLST")
    digit = str(draw.randrange(10))
    letter = draw.choice("abcdefgh")
    plain = digit if draw.random() < 0.5 else letter
    answer = {
        "Q": plain,
        "E": digit,
        "H": letter,
        "L": (plain + "xy" * 13) if draw.random() < 0.67 else plain,
        "S": (
            "\n".join(f"#### {draw.choice('0123456789')}" for _ in range(4))
            if draw.random() < 0.67
            else plain
        ),
        "T": "".join(draw.choice("abcdefgh0123") for _ in range(30)),
    }[kind]
    return f"{kind}{draw.randrange(10)}", answer


class StaleEngine:
    """An engine with a fault: after its first weights it takes no others."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._first: WeightSource | None = None

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Load the first weights again, under the new version."""
        if self._first is None:
            self._first = _Copied(
                {name: tensor.clone() for name, tensor in weights.named_tensors()}, weights
            )
        self._engine.load_weights(self._first, version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class _Copied:
    tensors: Mapping[str, torch.Tensor]
    source: WeightSource

    def layout(self) -> Any:
        """That of the source."""
        return self.source.layout()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they were copied."""
        yield from self.tensors.items()


def use_stale_engine(run: Run) -> None:
    """Put the faulty engine into a run."""
    run.sampling.engine = StaleEngine(run.sampling.engine)  # type: ignore[assignment]


def slow_updates(run: Run) -> None:
    """Make each update of a run take longer."""
    update = run.policy.update

    def slow(minibatch: Any, *, step: int) -> dict[str, float]:
        time.sleep(1)
        return update(minibatch, step=step)

    run.policy.update = slow  # type: ignore[method-assign]


def slow_polls(run: Run) -> None:
    """Make each token of a run's engine take longer."""
    poll = run.sampling.engine.poll

    def slow() -> Any:
        time.sleep(0.15)
        return poll()

    run.sampling.engine.poll = slow  # type: ignore[method-assign]


_ASYNC = ("schedule=async", "rollout.engines=1")


@dataclass(frozen=True)
class Case:
    """A run and what the doctor should say of it."""

    name: str
    expected: str | None
    """The finding; None for a healthy run."""
    options: tuple[str, ...] = ()
    rows: str = "Q" * 12
    """The kinds of the training problems."""
    copies: int = 0
    """How many more times the first of them is there."""
    held_out: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    """The reference by kind."""
    change: Callable[[Run], None] | None = None
    """Plants the fault in the run, if no option can."""
    in_processes: bool = False
    """Whether verifiers run in processes of their own, as the command has them."""
    never: tuple[str, ...] = ()
    """Rules that would name a wrong cause, and options that would not help."""


def _reward(name: str) -> str:
    return f"reward.verifier={REWARDS}:{name}"


FAULTS = (
    Case("problems that are all but solved", "too_easy", ("train.num_steps=12",), rows="E" * 11 + "Q"),
    Case("a reward that accepts all but one response in 40", "too_easy", (_reward("all_but_accepts"),)),
    Case("a reward that expects another form", "too_hard", (_reward("all_but_refuses"),)),
    Case("GRPO with a reward that accepts nearly all", "too_easy",
         ("preset=grpo", _reward("all_but_accepts"))),
    Case("GRPO on problems that are all but solved", "too_easy", ("preset=grpo", "train.num_steps=12"),
         rows="E" * 11 + "Q", never=("lr_too_low", "gradient_spike", "rollout.group_size")),
    Case("truncated responses left out where nearly all are truncated", "truncation",
         ("overlong.mode=filter", "dynamic_sampling.enabled=false", "rollout.max_response_tokens=24",
          _reward("even_digit")), rows="T" * 12,
         never=("lr_too_low", "too_hard", "too_easy", "equal_rewards", "optim.lr", "rollout.group_size")),
    Case("a verifier that fails at once on one response in five", "verifier_errors", (_reward("fails_often"),),
         in_processes=True, never=("reward.timeout_s",)),
    Case("a reward with one score for all", "equal_rewards", (_reward("constant"),),
         never=("rollout.group_size", "dynamic_sampling.predict")),
    Case("GRPO with a reward of one score for all", "equal_rewards", ("preset=grpo", _reward("constant")),
         never=("lr_too_low", "rollout.group_size", "dynamic_sampling.enabled")),
    Case("a limit of the divergence that every update exceeds", "skipped_updates", ("loss.max_approx_kl=1e-9",),
         never=("optim.lr", "lr_too_low")),
    Case("a limit of one token", "truncation", ("rollout.max_response_tokens=1", "overlong.buffer_tokens=1")),
    Case("a limit below what the model writes", "truncation",
         (_reward("even_digit"), "rollout.max_response_tokens=24"), rows="T" * 12),
    Case("a model that repeats itself", "repeated_text", rows="L" * 12),
    Case("a model that marks four answers", "many_answers", rows="S" * 12),
    Case("a learning rate 100 times too high", "lr_too_high", ("optim.lr=0.1",)),
    Case("a learning rate far too low", "lr_too_low", ("optim.lr=1e-11",)),
    Case("one update per step", "idle_techniques", ("train.minibatch_groups=4",)),
    Case("an engine that keeps its first weights", "sampler_gap", ("optim.lr=0.01",), change=use_stale_engine),
    Case("a bonus for entropy that outweighs the reward", "entropy_explosion",
         ("loss.entropy_coef=1", "optim.lr=0.003", "train.num_steps=10")),
    Case("a reward that only one response gets", "entropy_collapse",
         (_reward("one_answer"), "preset=grpo", "optim.lr=0.005", "rollout.group_size=8",
          "train.num_steps=16")),
    Case("a reward with rare scores of thousands", "gradient_spike",
         (_reward("outlier"), "advantage.scale=none", "train.num_steps=12")),
    Case("one problem among copies", "one_problem", rows="Q" * 4, copies=29),
    Case("a second verifier that refuses what is paid", "audit_gap",
         (f"audit.verifier={REWARDS}:even_digit", "audit.share=1", "train.num_steps=10")),
    Case("a training set that teaches the opposite of the evaluation", "overfit",
         (_reward("as_the_row_says"), "preset=grpo", "optim.lr=0.003", "train.eval_every=2"), held_out="Q" * 40),
    Case("a reward that pays for length", "length_explosion",
         (_reward("length"), "optim.lr=0.003"), rows="QQL" * 4),
    Case("a reward that charges for length", "length_collapse",
         (_reward("brevity"), "optim.lr=0.003", "train.num_steps=12"), rows="T" * 12),
    Case("updates that take longer than the next batch", "idle_engine", _ASYNC, change=slow_updates),
    Case("an engine that takes longer than the updates", "idle_trainer", (*_ASYNC, "train.num_steps=6"),
         change=slow_polls),
    Case("a learning rate too high for responses of older policies", "too_stale",
         (*_ASYNC, "max_staleness=4", "optim.lr=0.01")),
    Case("batches of one group with several in flight", "stale_work",
         (*_ASYNC, "rollout.prompts_per_step=1", "train.minibatch_groups=1", "train.num_steps=24"), rows="QE" * 6),
    Case("a verifier as slow as a distant judge", "slow_verifier", (_reward("slow"), "train.num_steps=2"),
         in_processes=True),
)  # fmt: skip


def base_config(model: Path, data: Path, case: Case) -> Config:
    """The options of a run: those of a healthy one, then the case's."""
    raw = {
        "model": {"name": str(model), "dtype": "float32"},
        "data": {
            "train": str(data / "train.jsonl"),
            **({"eval": str(data / "eval.jsonl")} if case.held_out else {}),
        },
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 6,
            "max_response_tokens": 32,
            "native": {"slots": 48},
        },
        "dynamic_sampling": {"max_groups_per_step": 24},
        "reward": {"verifier": DEFAULT_REWARD, "workers": 1},
        "overlong": {"buffer_tokens": 8},
        "optim": {"lr": 1e-3, "warmup_steps": 0, "weight_decay": 0.0},
        "train": {
            "num_steps": 8,
            "minibatch_groups": 2,
            "microbatch_tokens": 4096,
            "save_every": 0,
            "threads": 1,
        },
    }
    return build_config(raw, case.options)


def write_problems(data: Path, case: Case) -> None:
    """The problems of a case as files."""
    data.mkdir(parents=True, exist_ok=True)
    for name, kinds in (("train", case.rows), ("eval", case.held_out)):
        rows = [
            {"id": f"{name}{i}", "prompt": f"{kind}{i % 10}" if name == "train" else f"{kind}{i}?"}
            for i, kind in enumerate(kinds)
        ]
        if name == "train":
            rows += rows[:1] * case.copies
        opposite = {"train": "digit", "eval": "none"}[name]
        lines = [
            json.dumps({**row, "answer": case.answers.get(row["prompt"][0], opposite)})
            for row in rows
        ]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def train_case(case: Case, model: Path, folder: Path) -> Diagnosis:
    """Train the run of a case and diagnose it; a run that ends early is diagnosed as it is."""
    write_problems(folder / "data", case)
    config = base_config(model, folder / "data", case)
    with open_case(case, config, folder / "run") as run, suppress(DapoError):
        train(run)
    return diagnose(folder / "run")


@contextmanager
def open_case(case: Case, config: Config, path: Path) -> Iterator[Run]:
    """The run of a case before its first step; its engine samples in this process."""
    with check(config.changed("rollout", engines=0)) as checked:
        inputs = read(resolve(checked), read_data(checked))
        if not case.in_processes:
            reward = inputs.config.reward
            judge = InlineJudge(reward.verifier, options=reward.options, threshold=reward.threshold)
            inputs = replace(inputs, code=replace(inputs.code, judge=judge))
        with _open(case, inputs, config.rollout.engines, path) as run:
            yield run


@contextmanager
def _open(case: Case, inputs: Inputs, engines: int, path: Path) -> Iterator[Run]:
    config = inputs.config.changed("rollout", engines=engines)
    directory = RunDirectory.create(path, dump_config(config), {})
    display = ProgressDisplay(config.train.num_steps)
    with directory.lock(), build(inputs, directory, display, first_step=1) as run:
        run.config = config
        if case.change is not None:
            case.change(run)
        try:
            yield run
        finally:
            run.tracker.close()


_GRADED = (_reward("digit_share"),)
_LORA = ("model.lora={rank: 4, alpha: 8}",)
_ONE_STEP_OFF = ("schedule=one_step_off", "rollout.engines=1")
_AUDITED = (f"audit.verifier={REWARDS}:not_only_letters", "audit.share=1")
HEALTHY = (
    *(Case(f"dapo, seed {seed}", None, (f"train.seed={seed}",)) for seed in range(1, 7)),
    *(
        Case(f"grpo, seed {seed}", None, ("preset=grpo", f"train.seed={seed}"))
        for seed in range(1, 4)
    ),
    *(
        Case(f"one_step_off, seed {seed}", None, (*_ONE_STEP_OFF, f"train.seed={seed}"))
        for seed in range(1, 4)
    ),
    *(
        Case(f"LoRA, seed {seed}", None, (*_LORA, f"train.seed={seed}", "optim.lr=0.003"))
        for seed in range(1, 3)
    ),
    *(
        Case(f"a graded reward, seed {seed}", None, (*_GRADED, f"train.seed={seed}"))
        for seed in range(1, 3)
    ),
    Case("evaluated", None, ("train.eval_every=2",), held_out="Q" * 40, answers={"Q": "digit"}),
    Case("audited by a verifier that agrees", None, _AUDITED),
    Case("filtered by score", None, (*_GRADED, "dynamic_sampling.min_spread=0.1")),
    Case(
        "with prediction and a falling rate",
        None,
        ("dynamic_sampling.predict=true", "optim.schedule=cosine"),
    ),
)

_STEPS = ("train.num_steps=12", "optim.lr=3e-4")
_GSPO_OFF = ("preset=gspo", *_ONE_STEP_OFF, "loss.engine_ratio=sequence")
_OF_REWARDS = [name for name in PRESETS if name not in ("distill", "sft")]
_LOSSES = {
    **{f"preset {name}": (f"preset={name}",) for name in _OF_REWARDS},
    **{
        f"preset {name}, four updates": (f"preset={name}", "train.minibatch_groups=1")
        for name in _OF_REWARDS
    },
    "KL by k1 in the reward": ("loss.kl_coef=0.01", "loss.kl_in=reward", "loss.kl_estimator=k1"),
    "KL by k2 in the loss": ("loss.kl_coef=0.01", "loss.kl_estimator=k2"),
    "KL by k3 in the loss": ("loss.kl_coef=0.01", "loss.kl_estimator=k3"),
    "an entropy target": ("loss.entropy_target=0.5",),
    "an entropy bonus": ("loss.entropy_coef=0.001",),
    "a critic that is trained alone at first": ("preset=ppo", "critic.pretrain_steps=6"),
    "one_step_off, GSPO": _GSPO_OFF,
    "one_step_off, CISPO": ("preset=cispo", *_ONE_STEP_OFF),
    "the engine's log-probabilities as the old ones": ("loss.old_logprobs=engine",),
    "engine correction by masks": ("loss.engine_correction=2", "loss.engine_over_cap=mask"),
    "tight bounds": ("loss.clip_low=0.01", "loss.clip_high=0.01"),
    "no dual clip": ("loss.dual_clip=null",),
    "averaged by sequence": ("loss.aggregate=sequence",),
    "averaged by group": ("loss.aggregate=group",),
    "selection by prediction": ("dynamic_sampling.predict=true",),
    "truncated responses left out": ("overlong.mode=filter",),
}
HEALTHY_LOSSES = tuple(Case(name, None, (*options, *_STEPS)) for name, options in _LOSSES.items())
"""Every preset, and every part that a loss can have."""


def judged_right(case: Case, diagnosis: Diagnosis) -> bool:
    """Whether the doctor named the planted cause and nothing of `never`, or raised no alarm where
    there is none.
    """
    if case.expected is None:
        return not diagnosis.issues
    named = [each.finding for each in diagnosis.cases]
    proposed = {
        text for each in named for text in (each.name, *(c.partition("=")[0] for c in each.change))
    }
    return not proposed & set(case.never) and case.expected in {
        found.finding.name for found in diagnosis.cases
    }
