"""What a run would leave out or refuse for its length or its template, told from some rows."""

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
        sample = _in_even_steps(problems)
        limit = config.data.max_prompt_tokens
        num_longer = sum(encoder.length(problem) > limit for problem in sample)
        if num_longer and num_longer == len(sample):
            encoder.split_by_length(problems)
        yield from _line(facts, "prompts", num_longer, f"data.max_prompt_tokens={limit}")
        if answers is None or facts.role != "train":
            continue
        limit = config.rollout.max_response_tokens
        num_longer = sum(len(answers.encode(problem).token_ids) > limit for problem in sample)
        if num_longer and num_longer == len(sample):
            encode_answers(problems, answers, max_tokens=limit)
        yield from _line(facts, "responses", num_longer, f"rollout.max_response_tokens={limit}")


def _in_even_steps(problems: Sequence[Problem]) -> list[Problem]:
    if len(problems) <= SAMPLE:
        return list(problems)
    return [problems[index * len(problems) // SAMPLE] for index in range(SAMPLE)]


def _line(facts: DataFacts, kind: str, num_longer: int, limit: str) -> Iterator[str]:
    if not num_longer:
        return
    number = len(facts.problems or ())
    amount = f"{num_longer} of {number} {kind}"
    if number > SAMPLE:
        amount = f"about {num_longer / SAMPLE:.0%} of {number:,} {kind} ({SAMPLE} were looked at)"
    yield f"data.{facts.role}: {amount} are longer than {limit}, and are left out"
