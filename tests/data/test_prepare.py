"""Writing problems, and finding copies, contamination and difficulty among them."""

import json

import pytest

from dapo.core.errors import DataError
from dapo.data.prepare.decontaminate import OverlapIndex, find_contaminated, longest_passage
from dapo.data.prepare.dedupe import RULES, deduplicate, jaccard
from dapo.data.prepare.stats import PassRate, describe_difficulty, describe_problems, summarize
from dapo.data.prepare.write import row_of, write_problems
from dapo.data.problems import load_problems
from dapo.data.sources.rows import problem_id
from dapo.types import Problem
from helpers.paths import SHARED_DATA
from helpers.released import aime_parquet, dapo_math_parquet

BEFORE = (
    "Solve the following math problem step by step. The last line should be of the form Answer:"
    " $Answer."
)
AFTER = 'Remember to put your answer on its own line after "Answer:".'
QUESTIONS = [
    (
        "A farmer has 17 sheep and all but 9 run away in the night; how many sheep does the farmer"
        " still have?"
    ),
    (
        "The sum of three consecutive odd integers is 51; what is the largest of the three odd"
        " integers?"
    ),
    (
        "A rectangle has a perimeter of 30 and an area of 56; find the length of its longer side in"
        " metres."
    ),
    (
        "Two dice are thrown once; in how many ways can the sum of the two faces be equal to 7 or"
        " to 11?"
    ),
    (
        "How many positive integers less than 1000 are divisible by neither 5 nor by 7 nor by both"
        " of them?"
    ),
    (
        "Let f be a polynomial of degree 3 with f(1) = 1, f(2) = 8 and f(3) = 27; compute the value"
        " of f(4)."
    ),
    "The circle with centre O has radius 13 and a chord of length 24; how far is the chord from O?",
    (
        "A clock loses 4 minutes each day; after how many days does it show the right time again at"
        " noon?"
    ),
    "Find the number of ways to tile a board of 2 by 10 squares with dominoes of 1 by 2 squares.",
]


def problem(prompt, answer="1", source="s", **fields):
    return Problem(problem_id(prompt, answer), prompt, answer, source, fields)


def wrapped(question, answer="1"):
    return problem([{"role": "user", "content": f"{BEFORE}\n\n{question}\n\n{AFTER}"}], answer)


# --- writing


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_is_written_reads_back_to_the_same_problems(tmp_path, ending):
    problems = [
        problem(
            [{"role": "user", "content": "π\u2028 \\frac{1}{2}\n"}],
            " 1/2",
            data_source="s",
            level=3,
        ),
        problem(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}],
            "2",
            data_source="s",
        ),
    ]
    path = tmp_path / f"out.{ending}"
    write_problems(path, problems)
    back = load_problems(str(path))
    assert [(p.id, p.prompt, p.answer, p.source) for p in back] == [
        (p.id, p.prompt, p.answer, p.source) for p in problems
    ]
    assert back[0].fields == {"source": "s", "data_source": "s", "level": 3}


def test_a_second_import_changes_nothing(tmp_path):
    first = tmp_path / "first.jsonl"
    second = tmp_path / "second.jsonl"
    rows = [
        {"question": "q", "answer": "x\n#### 1,000"},
        {"question": "r", "answer": 3.0, "reward_model": {"a": 1}},
    ]
    first.write_text("\n".join(map(json.dumps, rows)))
    write_problems(second, load_problems(str(first)))
    third = tmp_path / "third.jsonl"
    write_problems(third, load_problems(str(second)))
    assert second.read_bytes() == third.read_bytes()
    assert [p.answer for p in load_problems(str(third))] == ["1000", "3"]


def test_columns_that_would_be_read_as_ours_are_renamed():
    fields = {
        "prompt": "p",
        "answer": "wrong",
        "source": "other",
        "reward_model": {"ground_truth": "wrong", "style": "rule"},
        "reward_model.ground_truth": "wrong",
    }
    assert row_of(Problem("id", "q", "7", "s", fields)) == {
        "prompt": "q",
        "answer": "7",
        "source": "s",
        "original_prompt": "p",
        "original_answer": "wrong",
        "original_source": "other",
        "reward_model": {"style": "rule"},
        "original_reward_model_ground_truth": "wrong",
    }
    assert "reward_model" not in row_of(problem("q", "7", reward_model={"ground_truth": "7"}))


def test_no_column_is_lost_to_another_one_or_because_it_repeats_the_prompt():
    fields = {"original_answer": "o", "answer": "x", "question": "q", "original_question": "q"}
    assert row_of(Problem("id", "q", "7", "s", fields)) == {
        "prompt": "q",
        "answer": "7",
        "source": "s",
        "original_answer": "o",
        "original_original_answer": "x",
        "original_question": "q",
    }
    swapped = {"answer": "x", "original_answer": "o"}
    row = row_of(Problem("id", "q", "7", "s", swapped))
    assert (row["original_answer"], row["original_original_answer"]) == ("o", "x")


def test_text_and_messages_in_one_parquet_file_are_refused_and_fit_into_jsonl(tmp_path):
    mixed = [problem("q"), problem([{"role": "user", "content": "r"}])]
    with pytest.raises(DataError, match=r"do not fit one Parquet table .*write \.jsonl instead"):
        write_problems(tmp_path / "out.parquet", mixed)
    write_problems(tmp_path / "out.jsonl", mixed)
    assert [p.id for p in load_problems(str(tmp_path / "out.jsonl"))] == [p.id for p in mixed]


def test_an_answer_that_would_read_back_as_another_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"problem 2 \(answer '#### 5'\) would not read back the same: .* as '5'"
    ):
        write_problems(tmp_path / "out.jsonl", [problem("q"), problem("q", "#### 5")])


# --- copies


def test_hundredfold_copies_collapse_to_one_each_whatever_their_order():
    rows = [wrapped(question, str(n)) for n, question in enumerate(QUESTIONS)]
    result = deduplicate(rows * 100, threshold=0.8)
    assert list(result.kept) == rows
    assert result.by_rule == dict.fromkeys(RULES, 0) | {"exact duplicate": 99 * len(QUESTIONS)}
    assert [(r.row, r.kept_row) for r in result.removed[:2]] == [(10, 1), (11, 2)]


def test_a_copy_with_other_formatting_is_an_exact_duplicate():
    others = [wrapped(question) for question in QUESTIONS[1:]]
    dressed = problem("  " + QUESTIONS[0].upper().rstrip("?") + " ", "1.0")
    result = deduplicate([wrapped(QUESTIONS[0]), *others, dressed], threshold=None)
    assert [(r.row, r.rule, r.kept_row, r.kept) for r in result.removed] == [
        (10, "exact duplicate", 1, wrapped(QUESTIONS[0]))
    ]


def test_near_duplicates_need_the_same_numbers_and_the_same_answer():
    first = problem(QUESTIONS[0], "9")
    near = problem(QUESTIONS[0].replace("in the night", "at night"), "9")
    other_number = problem(QUESTIONS[0].replace("17", "18"), "9")
    other_answer = problem(QUESTIONS[0].replace("still", "then"), "8")
    result = deduplicate([first, near, other_number, other_answer], threshold=0.6)
    assert list(result.kept) == [first, other_number, other_answer]
    assert [(r.row, r.rule, r.kept_row) for r in result.removed] == [(2, "near duplicate", 1)]
    # 22 words and 21: 20 and 19 runs of three, 16 shared
    assert result.removed[0].similarity == pytest.approx(16 / 23)
    assert result.near_duplicates_kept == 2
    assert result.removed[0].as_json()["kept_question"] == QUESTIONS[0]


def test_near_duplicates_are_found_at_the_threshold_and_not_above_it():
    pair = [problem(QUESTIONS[0]), problem(QUESTIONS[0].replace("in the night", "at night"))]
    assert len(deduplicate(pair, threshold=16 / 23).kept) == 1
    assert len(deduplicate(pair, threshold=16 / 23 + 1e-9).kept) == 2
    assert len(deduplicate(pair, threshold=None).kept) == 2


def test_of_conflicting_answers_the_majority_stays_or_none():
    minority = [problem("p", "4"), problem("p", "5"), problem("P", "5.0"), problem("p?", "5")]
    tied = [problem("q", "1"), problem("q", "2")]
    result = deduplicate([*minority, *tied, problem("r")], threshold=None)
    assert list(result.kept) == [minority[1], problem("r")]
    assert [(r.row, r.rule, r.kept_row) for r in result.removed] == [
        (1, "minority answer", 2),
        (3, "exact duplicate", 2),
        (4, "exact duplicate", 2),
        (5, "conflicting answers", None),
        (6, "conflicting answers", None),
    ]
    assert result.conflicts == 2


def test_a_plurality_is_no_majority():
    rows = [problem("p", answer) for answer in ("1", "1", "2", "3")]
    assert deduplicate(rows, threshold=None).kept == ()


def test_similarity_is_intersection_over_union():
    assert jaccard({1, 2, 3}, {2, 3, 4}) == 0.5
    assert jaccard(set(), set()) == 1.0
    assert jaccard({1}, set()) == 0.0


# --- contamination


def test_decontamination_finds_a_planted_problem_but_not_a_shared_instruction():
    held_out = [wrapped(question, "9") for question in QUESTIONS[:3]]
    own = [
        problem(f"Please solve this now, and think: {question} Put it in a box, please.")
        for question in QUESTIONS
    ]
    kept, removed = find_contaminated(own, held_out, ngram=8, min_overlap=0.5)
    assert kept == own[3:]
    assert [(r.row, r.overlap, r.against) for r in removed] == [
        (n + 1, 1.0, held_out[n]) for n in range(3)
    ]
    assert removed[0].passage.startswith("a farmer has 17 sheep")
    assert removed[0].as_json()["question"] == QUESTIONS[0]
    # without QUESTIONS[:3] only the evaluation's instruction is shared
    assert (
        find_contaminated(
            [wrapped(q) for q in QUESTIONS[3:]] * 2, held_out, ngram=8, min_overlap=0.01
        )[1]
        == []
    )


def test_the_overlap_is_a_fraction_of_the_evaluation_problems_ngrams():
    index = OverlapIndex(["a b c d e f", "x y z"], 3)  # 4 runs and 1
    match = index.best("q a b c d q e f", "")
    assert match is not None
    assert (match.index, match.overlap, match.passage) == (0, 0.5, "a b c d")
    both = index.best("x y z and a b c", "")  # 1 of 1 is more than 1 of 4
    assert both is not None
    assert (both.index, both.overlap) == (1, 1.0)
    assert index.best("x y", "x y") is None


def test_a_short_evaluation_problem_matches_an_equal_one_only():
    index = OverlapIndex(["What is 3?"], 8)
    match = index.best("Tell me: what is 3", "what is 3")
    assert match is not None
    assert (match.overlap, match.passage) == (1.0, "what is 3")
    assert index.best("So what is 3?", "So what is 3?") is None


def test_a_passage_is_the_longest_series_of_adjacent_ngrams():
    shingles = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "f"), ("f", "g")]
    assert (
        longest_passage(shingles, {shingles[0], shingles[2], shingles[3], shingles[5]}) == "c d e"
    )


def test_an_evaluation_problem_among_rows_in_the_form_of_dapo_math_is_removed(tmp_path):
    train = load_problems(str(dapo_math_parquet(tmp_path)))
    held_out = load_problems(str(aime_parquet(tmp_path)))
    kept, removed = find_contaminated([*train, held_out[0]], held_out, ngram=8, min_overlap=0.5)
    assert len(kept) == len(train) == 10
    assert [r.problem for r in removed] == [held_out[0]]


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the data sets are not on this machine")
def test_dapo_math_does_not_contain_aime_2024():
    train = load_problems({"path": str(SHARED_DATA / "dapo-math-17k.parquet"), "size": 2000})
    held_out = load_problems(str(SHARED_DATA / "aime-2024.parquet"))
    kept, removed = find_contaminated([*train, held_out[0]], held_out, ngram=8, min_overlap=0.5)
    assert len(kept) == 2000
    assert [r.problem for r in removed] == [held_out[0]]


# --- what a data set is, and how hard


def test_a_description_counts_copies_lengths_kinds_and_sources():
    rows = [
        problem("ab", "1"),
        problem("ab", "1"),
        problem("abcd", "1/2", "t"),
        problem("abc  d", "yes"),
    ]
    description = describe_problems(rows, tokens={p.id: len(p.answer) for p in rows})
    assert (
        description["rows"],
        description["distinct"],
        description["copies"],
        description["max_copies"],
    ) == (
        4,
        3,
        1,
        2,
    )
    assert description["prompt_characters"] == {
        "min": 2,
        "median": 4,
        "p90": 4.8,
        "max": 5,
        "mean": pytest.approx(11 / 3),
    }
    assert description["prompt_tokens"]["max"] == 3
    assert {kind: n for kind, n in description["answer_types"].items() if n} == {
        "integer": 2,
        "fraction": 1,
        "text": 1,
    }
    assert description["sources"] == {"s": 3, "t": 1}
    assert summarize([7])["median"] == 7


def test_texts_with_different_answers_are_counted():
    rows = [
        problem("a", "1"),
        problem(" a ", "2"),
        problem("b", "1/2"),
        problem("b", "0.5"),
        problem("c", "1"),
    ]
    assert describe_problems([*rows, rows[-1]])["conflicting_answers"] == 1


def test_the_instruction_of_a_data_set_is_described():
    description = describe_problems([wrapped(question) for question in QUESTIONS])
    assert (description["instruction_before"], description["instruction_after"]) == (BEFORE, AFTER)


def test_difficulty_in_tenths_and_what_dynamic_sampling_keeps():
    data = [Problem(name, name, "1") for name in "abcdde"]
    rates = {
        r.id: r
        for r in [
            PassRate("a", 10, 0),
            PassRate("b", 10, 3),
            PassRate("c", 2, 1),
            PassRate("d", 4, 4),
        ]
    }
    description = describe_difficulty(data, rates | {"x": PassRate("x", 1, 1)}, 2)
    assert description["histogram"] == [1, 0, 0, 1, 0, 1, 0, 0, 0, 1]
    assert (
        description["never_correct"],
        description["always_correct"],
        description["responses"],
    ) == (1, 1, 26)
    # of 45 pairs of ten responses, three right, 21 hold a right and a wrong one; so does the only
    # pair of two
    assert description["expected_keep_rate"] == pytest.approx((0 + 21 / 45 + 1 + 0) / 4)
    assert (description["unseen"], description["not_in_data"]) == (1, 1)
    assert describe_difficulty(data, {}, 2)["expected_keep_rate"] is None
