"""The base models of the experiments, trained from scratch: `python -m evidence.base_model`.

A Llama of a million weights over single characters learns the written-out solutions of
`evidence.corpus` to training problems of `evidence/base.yaml` by predicting the next character;
held-out problems are never among them. The result resembles a pretrained model: it can work
problems out, mostly right, and rarely does.

`--seed` trains another base model on other texts, so that an experiment can cross several base
models with its seeds. Each model is cached in a folder of its own, along with its recipe, and is
trained again when the recipe has changed. On one kind of processor the code determines the model:
every random number is keyed, and one thread adds in a fixed order. Another processor or another
release of torch rounds differently and gives a different model.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_commit, describe_machine, today
from dapo.config import Config, load_config
from dapo.config.data_spec import TaskSource
from dapo.core.files import atomic_write_json, cache_folder, read_json, remove
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptEncoder
from dapo.policy.builtin_models import character_model
from dapo.policy.model import LoadedModel, export_model, find_stop_ids
from dapo.policy.policy import Policy
from dapo.types import Problem, Sample
from evidence import corpus

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "evidence" / "base.yaml"
NAME = "evidence-base"
ORIGIN = "made_from.json"
"""The file of the cached model that records its recipe, its machine and its commit."""


@dataclass(frozen=True)
class Recipe:
    """The shape of the model and the options of its training."""

    hidden_size: int = 128
    intermediate_size: int = 576
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    """Half the heads: a decode step of a small model mostly reads keys and values."""
    updates: int = 4500
    problems_per_update: int = 8
    texts_per_problem: int = 4
    lr: float = 2.0e-3
    warmup_updates: int = 50
    beta2: float = 0.98
    seed: int = 1000
    """The seed of problems and texts, which differs from those of runs; the initial weights do not
    depend on it.
    """

    @property
    def name(self) -> str:
        """The model's folder: `evidence-base`, then the seed and the number of updates if they are
        not the defaults.
        """
        changed = [
            getattr(self, key)
            for key in ("seed", "updates")
            if getattr(self, key) != getattr(Recipe, key)
        ]
        return "-".join([NAME, *map(str, changed)])

    @property
    def config(self) -> Path:
        """The configuration of the training, whose problems the texts answer."""
        return CONFIG

    def data_options(self) -> list[str]:
        """Overrides of that configuration: other problems."""
        return []

    def solve(self, problem: Problem, *key: int) -> corpus.Solution:
        """The text to a problem that a key determines."""
        return corpus.solve(problem, *key)

    def initial_model(self) -> LoadedModel:
        """The model before its training."""
        return new_model(self)

    def facts(self) -> dict[str, Any]:
        """Everything that determines the texts and is no field of the recipe."""
        rates = {
            name: getattr(corpus, name)
            for name in ("RIGHT_GUESSES", "SLIP_RATE", "ENDLESS", "GO_ON")
        }
        return {"shares": dict(corpus.SHARES), **rates}


def model_directory(recipe: Recipe | None = None) -> Path:
    """The folder of a recipe's model, as experiments name it; by default that of
    `evidence/base.yaml`.
    """
    return cache_folder() / "models" / (recipe.name if recipe else NAME)


def new_model(recipe: Recipe) -> LoadedModel:
    """The model before its training, with the characters of `tiny-random` as its tokens."""
    heads = recipe.num_attention_heads
    model, tokenizer = character_model(
        torch.float32,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.hidden_size // heads,
    )
    return LoadedModel(model.eval(), tokenizer, find_stop_ids(model, tokenizer), NAME)


def training_config(recipe: Recipe) -> Config:
    """The options of the training: the experiments' options with the recipe's optimizer."""
    overrides = [
        *recipe.data_options(),
        f"rollout.prompts_per_step={recipe.problems_per_update}",
        f"train.minibatch_groups={recipe.problems_per_update}",
        f"train.num_steps={recipe.updates}",
        "train.microbatch_tokens=16384",
        f"optim.lr={recipe.lr}",
        f"optim.warmup_steps={recipe.warmup_updates}",
        "optim.schedule=cosine:0.02",
        f"optim.betas=[0.9, {recipe.beta2}]",
    ]
    return load_config(recipe.config, overrides)


def corpus_problems(config: Config, recipe: Recipe) -> list[Problem]:
    """The training problems of the texts, in order; a problem that is sampled twice is listed
    twice.
    """
    source = config.data.train_source
    assert isinstance(source, TaskSource)
    size = recipe.updates * recipe.problems_per_update
    return load_problems(replace(source, size=size, seed=recipe.seed), split="train")


def minibatches(config: Config, recipe: Recipe, loaded: LoadedModel) -> Iterator[list[Sample]]:
    """The texts of each update.

    Maximum likelihood is Eq. 8 with an advantage of 1 for every text and the ratio 1 of a first
    update: its gradient is then that of the mean log-probability of the texts' tokens. A prompt is
    computed once for its texts.
    """
    encoder, (end,) = PromptEncoder(loaded.tokenizer, config.data), loaded.stop_ids
    problems = corpus_problems(config, recipe)
    for first in range(0, len(problems), recipe.problems_per_update):
        samples = []
        for index, problem in enumerate(
            problems[first : first + recipe.problems_per_update], first
        ):
            for number in range(recipe.texts_per_problem):
                solution = recipe.solve(problem, recipe.seed, index, number)
                ids = [
                    *loaded.tokenizer(solution.text)["input_ids"],
                    *([end] if solution.ends else []),
                ]
                samples.append(_sample(index, encoder.encode(problem), ids))
        yield samples


def _sample(group: int, prompt: tuple[int, ...], ids: list[int]) -> Sample:
    return Sample(
        group_id=group,
        prompt_ids=prompt,
        response_ids=tuple(ids),
        reward=1.0,
        advantage=1.0,
        engine_logprobs=(),
        old_logprobs=None,
        mask=(True,) * len(ids),
    )


def train(recipe: Recipe, log: Callable[[str], None]) -> tuple[Policy, LoadedModel, dict[str, Any]]:
    """Train the model; return the policy, the model before training, and measurements."""
    config = training_config(recipe)
    loaded = recipe.initial_model()
    threads = torch.get_num_threads()
    started = time.perf_counter()
    torch.set_num_threads(config.train.threads or 1)
    try:
        policy = Policy(config, loaded)
        tokens = 0
        metrics = {}
        for update, minibatch in enumerate(minibatches(config, recipe, loaded), 1):
            metrics = policy.update(minibatch, step=update)
            tokens += int(metrics["optim/update_tokens"])
            if update % 100 == 0 or update == recipe.updates:
                seconds = time.perf_counter() - started
                log(
                    f"update {update} of {recipe.updates}: mean probability of the next character "
                    f"{metrics['loss/token_prob_mean']:.3f}, {seconds:.0f} s"
                )
    finally:
        torch.set_num_threads(threads)
    measured = {"characters": tokens, "seconds": round(time.perf_counter() - started, 1)}
    return policy, loaded, measured


def recipe_of(recipe: Recipe) -> dict[str, Any]:
    """Everything that determines the model, as stored along with it."""
    source = load_config(recipe.config, recipe.data_options()).data.train_source
    assert isinstance(source, TaskSource)
    return {**asdict(recipe), "tasks": source.tasks, **recipe.facts()}


def base_model(
    log: Callable[[str], None], *, recipe: Recipe | None = None, again: bool = False
) -> tuple[Path, dict[str, Any]]:
    """The folder of a recipe's model and the record of its training; trains it if it is missing, or
    with `again`.
    """
    recipe = recipe or Recipe()
    folder = model_directory(recipe)
    wanted = json.loads(json.dumps(recipe_of(recipe)))
    with suppress(OSError, ValueError, KeyError):  # missing or damaged: it is made again
        origin: dict[str, Any] = read_json(folder / ORIGIN)
        if not again and origin["recipe"] == wanted:
            return folder, origin
    log(f"training a base model of the experiments; it is kept in {folder}")
    policy, loaded, measured = train(recipe, log)
    origin = {
        "recipe": wanted,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        **measured,
        "commit": describe_commit(ROOT),
        "date": today(),
        "torch": torch.__version__,
        "machine": describe_machine(),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=folder.parent) as temporary:
        export = Path(temporary) / NAME
        export_model(policy.weights(version=0).named_tensors(), loaded, export)
        atomic_write_json(export / ORIGIN, origin)
        remove(folder) if folder.exists() else None
        os.replace(export, folder)
    return folder, origin


def main() -> None:
    """Train the model if it is missing, and print its folder and its record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--again", action="store_true", help="train it again, with the code of this checkout"
    )
    parser.add_argument(
        "--seed", type=int, default=Recipe.seed, help="the seed of its problems and texts"
    )
    parser.add_argument(
        "--updates", type=int, default=Recipe.updates, help="the number of its updates"
    )
    given = parser.parse_args()
    recipe = Recipe(seed=given.seed, updates=given.updates)
    folder, origin = base_model(
        partial(print, file=sys.stderr, flush=True), recipe=recipe, again=given.again
    )
    print(folder)
    print(json.dumps(origin, indent=1))


if __name__ == "__main__":
    main()
