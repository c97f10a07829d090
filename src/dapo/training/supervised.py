"""`schedule: supervised`: updates on demonstrations instead of sampled responses, as a warm start
before Algorithm 1.

Step s takes the next `train.minibatch_groups` demonstrations of the stream and makes one update.
Each is a `Sample` whose tokens have the advantage 1 and are on policy, so that the gradient of Eq.
8 is exactly that of

    - mean over the answers' tokens of log pi(token | tokens before it)

Evaluations, checkpoints and resumption are those of every run. A step that fails has taken no
demonstration.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from dapo.core.constant_rows import constant_row
from dapo.core.ranges import mask_of
from dapo.training.state import Run
from dapo.types import Sample

KEPT_METRICS = ("loss/nll", "loss/entropy", "loss/token_prob_mean", "loss/kl", "optim/")
"""Beginnings of the metrics of an update that mean something without rewards."""


def step(run: Run, number: int) -> None:
    """Take a step: one update on the next demonstrations."""
    run.stop.check()
    samples = next_samples(run)
    with run.phase("update", total=1):
        metrics = run.policy.update(samples, step=number)
    run.state.updates.append(metrics)
    _report(run, samples, metrics)


def next_samples(run: Run) -> list[Sample]:
    """Return the samples of the next update; those of one prompt are adjacent and share it."""
    stream = run.sampling.stream
    answers = run.answers
    encode = run.sampling.encoder.encode
    problems = [
        stream.problem_at(stream.position + i) for i in range(run.config.train.minibatch_groups)
    ]
    prompts = [encode(problem) for problem in problems]
    order = sorted(range(len(problems)), key=lambda i: (prompts[i], i))
    samples: list[Sample] = []
    for group_id, (prompt_ids, members) in enumerate(groupby(order, key=lambda i: prompts[i])):
        for index, i in enumerate(members):
            answer = answers[problems[i].id]
            length = len(answer.token_ids)
            if answer.sampled is None:
                mask = constant_row(True, length)
            else:
                mask = mask_of(answer.sampled, length)
            samples.append(
                Sample(
                    group_id=group_id,
                    index=index,
                    prompt_ids=prompt_ids,
                    response_ids=answer.token_ids,
                    reward=0.0,
                    advantage=1.0,
                    engine_logprobs=(),
                    old_logprobs=None,
                    mask=mask,
                    sampled=answer.sampled,
                )
            )
    return samples


def _report(run: Run, samples: Sequence[Sample], update: Mapping[str, float]) -> None:
    """Count the step as finished, and keep its metrics until it is evaluated."""
    stream = run.sampling.stream
    tokens = sum(sample.num_trained_tokens for sample in samples)
    metrics = {name: value for name, value in update.items() if name.startswith(KEPT_METRICS)}
    metrics |= {
        "rollout/epoch": stream.epoch,
        "rollout/tokens_generated": 0,
        "rollout/tokens_in_minibatches": tokens,
    }
    for _ in range(run.config.train.minibatch_groups):
        stream.take()
    run.state.advance(metrics, tokens_generated=0, tokens_trained=tokens)
