"""Options outside of training: `eval`, `distributed`, `log`, `profile`."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from dapo.config.section import (
    MAX_PROCESSES,
    Float,
    Positive,
    Processes,
    Section,
    Tokens,
    one_or_several,
    option,
)


class EvalConfig(Section):
    samples_per_problem: Positive = option(
        1, "Responses per problem: the k of avg@k.", paper=32, le=10**5, unit="responses"
    )
    temperature: Float = option(
        1.0, "Sampling temperature; 0: the most likely token.", paper=1.0, ge=0
    )
    top_p: Float = option(
        0.7,
        "Sample only the most likely tokens, up to this sum of their probabilities.",
        paper=0.7,
        gt=0,
        le=1,
    )
    max_response_tokens: Tokens | None = option(
        None, "Largest length of a response; none: rollout.max_response_tokens.", unit="tokens"
    )


START_TIMEOUT_S = 900.0  # time limit for the start of all processes of a run, in seconds
MAX_RESTARTS = 3  # restarts from the newest checkpoint after the loss of a trainer rank


class DistributedConfig(Section):
    trainer_ranks: Processes = option(
        1, "Processes that train shards of the model (FSDP2).", unit="processes"
    )
    gpus_per_process: Float | None = option(
        None,
        "GPUs per trainer rank and per engine on Ray; 0.5: two processes share a GPU; none: one GPU"
        " if the cluster has GPUs, or rollout.vllm.tensor_parallel for an engine.",
        only_with="uses_ray",
        ge=0,
        le=MAX_PROCESSES,
        unit="GPUs",
    )


def _rollouts(value: str) -> str:
    if value not in ("all", "no-logprobs", "none") and not re.fullmatch(
        r"last:[1-9]\d{0,8}", value
    ):
        raise ValueError("expected all, no-logprobs, none or last:N with N of at least 1")
    return value


class LogConfig(Section):
    sinks: Annotated[
        list[Literal["tensorboard", "wandb", "trackio", "mlflow"]],
        BeforeValidator(one_or_several),
    ] = option(
        [],
        "Trackers, one or a list, that receive metrics, in addition to metrics.jsonl and the"
        " console.",
        also=[{"enum": ["tensorboard", "wandb", "trackio", "mlflow"]}, {"type": "null"}],
    )
    rollouts: Annotated[str, AfterValidator(_rollouts)] = option(
        "all",
        "Judged responses that are kept in rollouts/*.parquet. all: every step; no-logprobs: every"
        " step, without the large column engine_logprobs; last:N: the last N steps; none.",
    )

    @property
    def rollout_steps(self) -> int | None:
        """The number of steps whose responses are kept; None: all."""
        return (
            int(self.rollouts.removeprefix("last:")) if self.rollouts.startswith("last:") else None
        )


class ProfileConfig(Section):
    steps: Annotated[list[Positive], BeforeValidator(one_or_several)] = option(
        [],
        "Training steps, one or a list, with profiler traces in profile/ of the run directory.",
        also=[{"type": "integer", "minimum": 1}, {"type": "null"}],
    )
