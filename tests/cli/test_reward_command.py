"""`dapo test`: what is suspicious, what is printed, and how it ends."""

import re

import pytest

from dapo.rewards import InlineJudge
from dapo.rewards.audit import EXAMPLES, SUM, audit_reward, nonsense
from dapo.types import Problem
from helpers import commands


def run(capsys, *arguments):
    """Exit code, standard output, standard error of `dapo test`."""
    return commands.run(capsys, "test", *arguments)


def issues(verifier, problem=SUM, right=None, **options):
    audit = audit_reward(InlineJudge(verifier, options=options), problem, right)
    return {
        check.name if check.reference is None else "broken": check.issues
        for check in audit.suspicious
    }


@pytest.mark.parametrize(
    ("verifier", "options"),
    [("math", {}), ("math_dapo", {}), ("gsm8k", {}), ("exact", {}), ("exact", {"extract": "answer_line"}),
     ("exact", {"extract": "final"}), ("choice", {}), ("regex", {})],
)  # fmt: skip
def test_the_registered_verifiers_reward_no_nonsense(verifier, options):
    problem, right = EXAMPLES.get(verifier, (SUM, None))
    found = issues(verifier, problem, right, **options)
    # the released verifier compares texts: it meets an unreadable reference as it meets any other
    assert set(found) <= ({"broken"} if verifier == "math_dapo" else set())


def test_a_reward_that_takes_the_last_number_rewards_hedging():
    assert issues("exact", extract="last_number") == {
        "several answers on one line": ("false positive",),
        "several marked answers": ("false positive",),
        "several boxes": ("false positive",),
        "the answer denied": ("false positive",),
    }


def test_a_reward_that_finds_the_answer_anywhere_rewards_all_text_that_contains_it():
    found = issues("helpers.faulty_rewards:contains")
    assert {"all numbers 0 to 999", "the answer denied", "several boxes", "broken"} <= set(found)


def test_a_score_counts_from_half_that_of_a_right_answer():
    found = issues("dapo.rewards.examples:digit_share", right="42")
    assert found["100 kB of digits"] == ("false positive",)
    assert found["all numbers 0 to 999"] == ("false positive",)
    assert "several answers on one line" not in found
    assert "empty" in issues("dapo.rewards.examples:brevity", right="one two three")


def test_a_reward_of_a_format_that_no_usual_answer_has_pays_no_nonsense():
    """As the strict format of a script, of which every text here has the score 0."""
    audit = audit_reward(InlineJudge("helpers.faulty_rewards:of_a_format"), SUM)
    assert (audit.right, audit.suspicious) == (None, [])
    right = "<reasoning>\n6 * 7\n</reasoning>"
    audit = audit_reward(InlineJudge("helpers.faulty_rewards:of_a_format"), SUM, right)
    assert audit.right is not None
    assert audit.suspicious == []
    # the same score for everything is right and wrong at once
    audit = audit_reward(InlineJudge("helpers.faulty_rewards:always_one"), SUM)
    assert len(audit.suspicious) == len(audit.checks)


def test_a_non_deterministic_or_failing_reward_is_found():
    assert "non-deterministic" in issues("helpers.faulty_rewards:non_deterministic")["empty"]
    assert issues("helpers.faulty_rewards:fragile")["empty"] == ("verifier error",)


def test_a_reward_that_does_not_apply_is_not_broken():
    assert issues("helpers.faulty_rewards:silent_on_nonsense") == {}


def test_the_nonsense_holds_what_the_documentation_says():
    texts = nonsense(SUM)
    assert texts["empty"] == ""
    assert texts["all numbers 0 to 999"].split() == [str(n) for n in range(1000)]
    assert texts["the prompt repeated"] == SUM.prompt
    assert sum(len(text) >= 99_000 for text in texts.values()) == 5
    assert (
        nonsense(Problem("1", [{"role": "user", "content": "Q?"}], "7"))["the prompt repeated"]
        == "Q?"
    )


def test_nothing_suspicious_is_exit_0_and_a_false_positive_is_exit_1(capsys):
    code, out, _ = run(capsys, "math", "--verbose", "reward.workers=1")
    printed = " ".join(out.split())
    assert (code, "19 of 19 verdicts are errors" in printed) == (0, True)
    assert re.search(r"a group of 16 responses: [\d.e-]+ s with 1 worker\n", out)
    code, out, _ = run(capsys, "math", "reward.workers=1")
    assert out == "nothing suspicious in 44 responses that are wrong or hostile\n"
    code, out, _ = run(capsys, "exact", "reward.options.extract=last_number", "reward.workers=1")
    assert code == 1
    assert out.startswith("4 of 44 responses are judged right though they are wrong\n")
    assert "Answer: 1 or 2 or 42" in out


def test_what_is_not_suspicious_is_shown_on_demand_only(capsys):
    _, short, _ = run(capsys, "math", "reward.workers=1")
    _, long, _ = run(capsys, "math", "--verbose", "reward.workers=1")
    assert "praise of itself" not in short
    assert "praise of itself" in long
    assert len(short.splitlines()) < len(long.splitlines()) - 20


def test_a_function_that_needs_a_column_is_to_be_audited_on_data_that_has_it(capsys, tmp_path):
    code, out, err = run(capsys, "helpers.reward_functions:needs_solution")
    assert (code, out) == (2, "")
    assert (
        err == "error: helpers.reward_functions:needs_solution needs solution, which the example"
        " problem does not have; audit it on problems of your data that have it: --data"
        " train.jsonl\n"
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "6 * 7?", "solution": "42"}\n')
    data = str(tmp_path / "train.jsonl")
    code, out, err = run(capsys, "helpers.reward_functions:needs_solution", "--data", data)
    assert (code == 2, err) == (False, "")


def test_problems_come_from_data_or_an_answer_is_given(capsys):
    code, out, _ = run(capsys, "gsm8k", "--data", "builtin:sums", "reward.workers=1")
    assert (code, out.count("nothing suspicious in 1")) == (0, 1)
    code, out, _ = run(
        capsys, "math", "--answer", "\\frac{1}{2}", "--right", "Answer: 0.5", "--verbose"
    )
    assert (code, "a right answer" in out) == (0, True)
    code, out, _ = run(capsys, "regex", "--answer", "\\d+", "--right", "none", "reward.workers=1")
    assert "no usual form of the right answer is accepted" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maths"], "error: no verifier, environment or run is named maths; did you mean math?"),
        (["maths", "--reward"], "error: unknown verifier 'maths'; did you mean math?"),
        (["nowhere:f"], "error: 'nowhere:f': there is no module 'nowhere' in"),
        (
            ["math", "reward.options.strict=1"],
            "error: verifier math has no option 'strict'; it has none",
        ),
        (
            ["math", "loss.clip_high=0.3"],
            "error: dapo test of a reward takes options of reward only",
        ),
        (["math", "--data", "builtin:sumz"], "sumz"),
        (
            ["math", "--data", "builtin:sums", "--answer", "3"],
            "error: --answer and --right belong to the example",
        ),
        (
            ["math", "reward.workers=0"],
            "error: command line: option reward.workers: input should be greater than 0",
        ),
        (["server"], "error: verifier server needs the option url: reward.options.url=..."),
    ],
)
def test_bad_input_is_exit_2_and_one_message(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
