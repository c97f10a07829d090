"""What a run would leave out or refuse for its length or its template, told from some rows."""

import random
from collections.abc import Iterator, Sequence

from dapo.analysis.check.summary import DataFacts
from dapo.config import Config
from dapo.data.prompts import PromptEncoder
from dapo.policy.model import load_local_tokenizer
from dapo.training.demonstrations import AnswerEncoder, encode_answers
from dapo.types import Problem

SAMPLE = 200
"""The number of rows of a source that are encoded."""


def describe_lengths(config: Config, data: Sequence[DataFacts]) -> Iterator[str]:
    """Yield a line for each limit that rows exceed, by a sample of at most SAMPLE of each source.

    Nothing is told where the model's tokenizer is not on this machine, and of episodes, whose
    environment gives the prompts. Raises DataError as a run would: the chat template rejects a row
    of the sample, or all rows of the source are longer than a limit.
    """
    tokenizer_files = load_local_tokenizer(
        config.model.name, trust_remote_code=config.model.trust_remote_code
    )
    if tokenizer_files is None or config.plays_episodes:
        return
    tokenizer, _ = tokenizer_files
    encoder = PromptEncoder(tokenizer, config.data)
    answers = None
    if config.is_supervised:
        answers = AnswerEncoder(tokenizer, config.data, encoder, history=config.environment.history)
    for facts in data:
        problems = facts.problems or ()
        option = config.data_option if facts.role == "train" else "data.eval"
        sample = _sample_of(problems)
        limit = config.data.max_prompt_tokens
        short_enough = [problem for problem in sample if encoder.length(problem) <= limit]
        if sample and not short_enough:
            encoder.split_by_length(problems)
        line = _line(len(problems), "prompts", len(sample) - len(short_enough))
        if line:
            yield f"{option}: {line} data.max_prompt_tokens={limit}, and are left out"
        if answers is None or facts.role != "train":
            continue
        # a run leaves long prompts out before it reads a response
        limit = config.rollout.max_response_tokens
        num_longer = sum(len(answers.encode(row).token_ids) > limit for row in short_enough)
        if sample and num_longer == len(sample):
            encode_answers(problems, answers, max_tokens=limit)
        line = _line(len(problems), "responses", num_longer)
        if line:
            yield f"{option}: {line} rollout.max_response_tokens={limit}, and are left out"


def _sample_of(problems: Sequence[Problem]) -> list[Problem]:
    """Return at most SAMPLE rows in their order, the same ones at each call.

    They are random, because the rows of a mixture repeat its parts at even steps.
    """
    if len(problems) <= SAMPLE:
        return list(problems)
    indices = random.Random(0).sample(range(len(problems)), SAMPLE)
    return [problems[index] for index in sorted(indices)]


def _line(number: int, kind: str, num_longer: int) -> str:
    """Say how many of a source's rows are longer than a limit; an empty text for none."""
    if not num_longer:
        return ""
    amount = f"{num_longer} of {number} {kind}"
    if number > SAMPLE:
        share = num_longer / SAMPLE
        percent = f"{share:.1%}" if share < 0.01 else f"{share:.0%}"
        amount = f"about {percent} of {number:,} {kind} ({SAMPLE} were looked at)"
    return f"{amount} are longer than"
