"""The comparison of two commits: what is counted, which ratio is taken, and when a machine is
quiet.
"""

import math
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

# the benchmarks are not part of the package: they are run from the repository's root
from benchmarks.paired.positions import count_prefixes, positions_of_step
from benchmarks.paired.quickstart import figures_of, rows_of
from benchmarks.paired.sides import Ratio, Side, Target, in_turn, open_sides, row
from benchmarks.paired.table import cells_of, markdown
from benchmarks.quiet import ProcessorTime


def response(group, prompt, tokens, advantage=None):
    return {"group_id": group, "prompt_ids": prompt, "response_ids": tokens, "advantage": advantage}


def test_positions_with_equal_prefixes_are_distinct_once():
    # 1 2 3, 1 2 4 and 5: prefixes 1, 12, 123, 124, 5
    assert count_prefixes([(0, [1, 2, 3]), (0, [1, 2, 4]), (0, [5]), (0, [1, 2])]) == 5
    # the first two tokens of each are not counted: 123, 124
    assert count_prefixes([(2, [1, 2, 3]), (2, [1, 2, 4])]) == 2


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_distinct_prefixes_are_those_of_a_set_of_all_prefixes(sequences):
    prefixes = {tuple(tokens[: end + 1]) for tokens in sequences for end in range(len(tokens))}
    assert count_prefixes((0, tokens) for tokens in sequences) == len(prefixes)


def test_a_step_counts_prompts_once_a_group_and_every_fed_token():
    rows = [
        response(0, [9, 9, 1], [4, 5, 6], advantage=1.0),
        # parts with its last token, which is not fed
        response(0, [9, 9, 1], [4, 5, 7], advantage=-1.0),
        response(1, [9, 9, 2], [4, 4], advantage=None),
        response(1, [9, 9, 2], [5], advantage=None),
    ]
    found = positions_of_step(rows)
    assert found["update"] == (3 + 2 + 2, 3 + 2)
    assert found["decode"] == (2 + 2 + 1 + 0, 2 + 1)
    assert found["prefill"] == (3 + 3, 4)


def test_a_ratio_is_the_geometric_mean_with_an_interval_over_the_rounds():
    found = Ratio.of([2.0, 1.0, 2.0], [4.0, 1.0, 4.0])
    assert found.mean == pytest.approx(0.25 ** (1 / 3))
    # logarithms -ln 2, 0, -ln 2: mean -2/3 ln 2, standard error ln 2 / 3, Student's quantile of 2
    # degrees 4.303
    half = 4.303 * math.log(2) / 3
    assert found.interval == pytest.approx(
        (found.mean * math.exp(-half), found.mean * math.exp(half)), rel=1e-3
    )


def test_one_round_has_no_interval():
    assert Ratio.of([1.0], [2.0]) == Ratio(0.5, None)


def test_the_other_side_begins_in_every_second_round(tmp_path):
    sides = [Side("base", tmp_path, "a"), Side("ours", tmp_path, "b")]
    assert [[side.name for side in in_turn(sides, i)] for i in range(3)] == [
        ["base", "ours"],
        ["ours", "base"],
        ["base", "ours"],
    ]


def test_training_is_the_step_without_its_evaluation_and_late_steps_begin_with_the_tenth():
    records = [{"step": 0}]
    for step in range(1, 13):
        seconds = {"time/step_s": 10.0, "time/generate_s": 4.0, "time/update_s": 5.0}
        records.append({"step": step, "rollout/tokens_generated": 100, **seconds})
    records[12] |= {"time/step_s": 13.0, "time/evaluate_s": 3.0, "time/old_logprobs_s": 1.0}
    found = figures_of(records)
    assert (found["training"], found["late"], found["evaluation"]) == (120.0, 30.0, 3.0)
    assert (found["generation"], found["update"], found["generated_tokens"]) == (48.0, 61.0, 1200)


def test_a_run_of_nine_steps_has_no_row_of_late_ones():
    run = dict.fromkeys(("training", "generation", "update"), 1.0) | {"late": 0, "evaluation": 2.0}
    run |= {"generated_tokens": 5, "accuracy": 0.5}
    run |= {
        f"{kind}_{which}": 1
        for kind in ("update", "decode", "prefill")
        for which in ("all", "distinct")
    }
    names = [found["name"] for found in rows_of({"base": [run], "ours": [run]}, 9)]
    assert not any(name.startswith("steps 10") for name in names)
    assert names[:2] == ["training, 9 steps without evaluations", "evaluations after steps"]


@pytest.mark.parametrize(
    ("target", "ours", "expected"),
    [
        (Target(0.60, at_most=True), 0.59, "at most 0.60: met"),
        (Target(0.60, at_most=True), 0.61, "at most 0.60: missed"),
        (Target(1.30, at_most=False), 1.31, "at least 1.30: met"),
        (Target(1.30, at_most=False), 1.29, "at least 1.30: missed"),
    ],
)
def test_a_row_says_whether_its_target_is_met(target, ours, expected):
    cells = cells_of(row("training", "s", {"base": [1.0], "ours": [ours]}, target))
    assert cells[0] == "training, s (less is better)"
    assert cells[3:] == (f"{ours:.2f}", expected)


def test_figures_from_a_busy_machine_are_marked():
    part = {"rows": [], "date": "2026-01-02", "base": "a", "commit": "b", "rounds": 1}
    machine = {"cpu": "A Processor", "cores": 2}
    for share, is_quiet in ((0.4, False), (0.01, True)):
        parts = {"quickstart": part | {"others_share": [share], "is_quiet": is_quiet}}
        assert ("Not a quiet machine" in markdown({"machine": machine, "parts": parts})) != is_quiet


def test_others_have_what_is_neither_idle_nor_ones_own():
    before = ProcessorTime.parse("cpu  100 0 100 1000 0 0 0 0 0 0\ncpu0 ...\n", ticks_per_s=100)
    after = ProcessorTime.parse("cpu  300 0 200 1600 100 0 0 0 0 0\ncpu0 ...\n", ticks_per_s=100)
    # of ten seconds seven were idle; of the three busy ones two were our own
    assert after.share_since(before) == pytest.approx(0.3)
    assert after.share_since(before, own_s=2.0) == pytest.approx(0.1)
    assert after.share_since(before, own_s=5.0) == 0.0


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_base_is_what_git_holds_and_ours_the_checkout_as_it_was_at_the_start(tmp_path):
    root = tmp_path / "checkout"
    folder = tmp_path / "sides"
    (root / "src").mkdir(parents=True)
    (root / "configs").mkdir()
    (root / "configs" / "a.yaml").write_text("a: 1\n")
    source = root / "src" / "a.py"
    source.write_text("committed = True\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    source.write_text("committed = False\n")
    base, ours = open_sides("HEAD", folder, root=root)
    source.write_text("changed while they are compared\n")
    assert (base.root / "src" / "a.py").read_text() == "committed = True\n"
    assert (ours.root / "src" / "a.py").read_text() == "committed = False\n"
    assert ours.commit == f"{base.commit}+"
    assert str(base.root / "src") in base.environment["PYTHONPATH"]
    with pytest.raises(ValueError, match="does not know the commit 'nothing'"):
        open_sides("nothing", tmp_path / "other", root=root)
