"""Reward functions as users write them, good and bad; tests name them as
`helpers.reward_functions:NAME`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

from dapo.types import Verdict


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def names_types(completions, day, price, **kwargs):
    """1 for a response that names the types and texts of two columns."""
    pairs = zip(completions, day, price, strict=True)
    return [float(text == f"{type(d).__name__} {d} {type(p).__name__} {p}") for text, d, p in pairs]


def digits_aloud(completions, **kwargs):
    print(f"judged {len(completions)}")
    return [any(character.isdigit() for character in text) for text in completions]


def only_completions(completions):
    return [len(text) / 10 for text in completions]


async def async_length(completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(len(text)) for text in completions]


async def async_verifier(problem, response):
    await asyncio.sleep(0)
    return response == problem.answer


class SameLoop:
    """An async callable that fails if its second call runs on another event loop than the first."""

    def __init__(self, bonus=0.0):
        self.bonus = bonus
        self.loop = None

    async def __call__(self, completions, **kwargs):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return [self.bonus for _ in completions]


same_loop = SameLoop(2.0)


def sees(prompts, completions, completion_ids, answer, level, **kwargs):
    """1 if every argument is what TRL would give for the problem of the tests."""
    text = completions == ["a", "bb"] and prompts == ["Q", "Q"]
    chat = (
        completions == [[{"role": "assistant", "content": t}] for t in ("a", "bb")]
        and prompts == [[{"role": "user", "content": "Q"}]] * 2
        and prompts[0] is not prompts[1]
    )
    rest = (
        completion_ids == [[1], [2, 3]]
        and answer == ["A", "A"]
        and level == [3, 3]
        and kwargs["source"] == ["s", "s"]
    )
    return [1.0 if (text or chat) and rest else 0.0 for _ in completions]


def needs_solution(completions, solution):
    return [1.0 for _ in completions]


def accuracy_reward(completions, solution, **kwargs):
    """As in TRL: the completions are lists of messages where the prompt is one."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(content == right) for content, right in zip(contents, solution, strict=True)]


def names_columns(completions, **kwargs):
    return [Verdict(None, 0.0, f"{' '.join(sorted(kwargs))!r}") for _ in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0):
    """As in verl."""
    assert data_source in ("openai/gsm8k", "s", "d")
    assert extra_info in (None, {"index": 3})
    return 1.0 if solution_str == str(ground_truth) else format_score


def compute_score_of_any(solution_str, **kwargs):
    return 1 + len(kwargs)


def compute_score_by_level(solution_str, level=None, **kwargs):
    return -1.0 if level is None else float(level)


def compute_score_with_details(data_source, solution_str, ground_truth, extra_info):
    right = solution_str == str(ground_truth)
    return {
        "score": 1.0 if right else -1.0,
        "acc": right,
        "pred": solution_str,
        "other": [object()],
    }


def compute_score_gone_wrong(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("as asked")
    details = {"no score": {"acc": True, "pred": "7"}, "nested nan": {"score": float("nan")}}
    return (
        details.get(solution_str)
        or {"text": "high", "list": [1.0], "nan": float("nan")}[solution_str]
    )


def within(problem, response, limit):
    return len(response) <= limit


def not_applicable_to_short(completions, **kwargs):
    return [None if len(text) < 3 else 1.0 for text in completions]


def nothing(completions, **kwargs):
    return [None for _ in completions]


def yes_or_no(completions, answer, **kwargs):
    return [text == right for text, right in zip(completions, answer, strict=True)]


def not_a_number(completions, **kwargs):
    return [
        float("nan") if text == "nan" else float("inf") if text == "inf" else 1.0
        for text in completions
    ]


def words(completions, **kwargs):
    return ["good" if text == "bad" else 1.0 for text in completions]


def one_too_few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


def one_number(completions, **kwargs):
    return 0.5


def no_return(completions, **kwargs):
    pass


def numpy_array(completions, **kwargs):
    import numpy

    return numpy.arange(len(completions), dtype=numpy.float32)


def numpy_scalars(completions, **kwargs):
    import numpy

    return [numpy.float32(0.5), numpy.bool_(True), numpy.int64(3)][: len(completions)]


def huge(completions, **kwargs):
    return [10**400 for _ in completions]


def raises_on_bad(completions, **kwargs):
    if "bad" in completions:
        raise ValueError("no bad ones\nsecond line")
    return [1.0 for _ in completions]


def leaves(completions, **kwargs):
    sys.exit(5)


async def leaves_later(completions, **kwargs):
    sys.exit(5)


def scaled(completions, *, factor=1.0, **kwargs):
    return [factor * len(text) for text in completions]


def verdict(problem, response):
    return Verdict(response == problem.answer, 7.0)


def verdict_without_score(problem, response):
    return Verdict(True, "high")


def verdict_with_error(problem, response):
    return Verdict(None, 0.0, "the judge is out")


def right_or_no_verdict(problem, response):
    return (
        Verdict(True, 1.0)
        if ord(response[:1] or "a") % 3
        else Verdict(None, 0.0, "the judge is out")
    )


def tolerant(problem, response, *, tolerance=0):
    return abs(int(response) - int(problem.answer)) <= tolerance


def positional(completions, /):
    return [1.0]


def stranger(text, reference):
    return 1.0


NOT_A_FUNCTION = 3


# for the pool: `problem, response` is one job a response, `completions` one a group


def acts(problem, response):
    """Does what the response says."""
    if response == "hang":
        time.sleep(60)
    if response == "hang in C":
        sum(range(10**12))
    if response == "exit":
        os._exit(3)
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "close":
        os.closerange(3, 256)
        time.sleep(60)
    if response == "print":
        print("many words\n" * 20_000)
    if response == "raise":
        raise RuntimeError("as asked")
    if response.startswith("child "):
        child = subprocess.Popen(["sleep", "60"])
        Path(response.removeprefix("child ")).write_text(str(child.pid))
        time.sleep(60)
    return len(response)


def hang_group(completions, **kwargs):
    if "hang" in completions:
        time.sleep(60)
    return [1.0 for _ in completions]


def about_the_worker(completions, **kwargs):
    facts = {
        "pid": os.getpid(),
        "torch": int("torch" in sys.modules),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "hash": hash("the same in every worker"),
    }
    return [facts[text] for text in completions]


def waits_for_a_signal(problem, response, *, folder, every):
    """Whether the response has a digit.

    At the first call with one of `every` responses it waits for what a test does.

    It names its process and the supervisor's in `folder/NAME.pids`, and goes on when
    `folder/NAME.go` exists. Every call leaves a file `NAME.call*`.
    """
    checksum = zlib.crc32(response.encode())
    note = Path(folder) / f"{checksum:08x}.pids"
    note.with_suffix(f".call{time.monotonic_ns()}").touch()
    if every and checksum % every == 0 and not note.exists():
        note.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
        note.with_suffix(".new").rename(note)
        while not note.with_suffix(".go").exists():
            time.sleep(0.01)
    return any(character.isdigit() for character in response)


def kills_itself(problem, response, *, folder):
    """Kills its process at each call, and leaves a file for each."""
    (Path(folder) / str(time.monotonic_ns())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def always(problem, response, *, verdict):
    """The same verdict on every response."""
    return verdict


def has_digit_until(problem, response, *, folder, then):
    """Whether the response has a digit, and `then` for all of them once the folder holds the file
    `now`.
    """
    if (Path(folder) / "now").exists():
        return then
    return any(character.isdigit() for character in response)


def keep_all(group):
    """A filter of groups, `dynamic_sampling.filter`."""
    return True


def counts_letters(completions, **columns):
    """For texts: a list of messages has no letters."""
    return [sum(letter.isalpha() for letter in text) for text in completions]


def strips(completions, **columns):
    """For texts: a list has no `strip`."""
    return [len(text.strip()) for text in completions]


def divides(completions, **columns):
    """Fails for another reason than the form of its completions."""
    return [1 / (len(completions) - 1) for _ in completions]
