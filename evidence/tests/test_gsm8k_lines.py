"""A worked solution becomes problems of one line."""

from dapo.types import Problem
from evidence.gsm8k_lines import line_problems, next_line

ROW = {
    "question": "How many?",
    "answer": "There are 2*3=<<2*3=6>>6 boxes.\nNone is lost.\nSo 6/4=<<6/4=1.5>>1.5.\n#### 1.5",
}


class Tokenizer:
    @staticmethod
    def apply_chat_template(messages, **_):
        return f"user: {messages[0]['content']} model: "


def test_the_prompt_holds_the_lines_before_and_the_answer_is_the_result_of_the_next():
    found = {
        (problem["prompt"], problem["answer"])
        for seed in range(20)
        for problem in line_problems([ROW], Tokenizer(), seed=seed)
    }
    start = "user: How many? model: "
    assert found == {
        (start, "6"),
        (start + "There are 2*3=6 boxes.\nNone is lost.\n", "3/2"),
    }
    assert not list(line_problems([{**ROW, "answer": "Six.\n#### 6"}], Tokenizer()))


def test_a_line_is_right_by_its_last_result():
    problem = Problem("1", "Q", "3/2")
    assert next_line(problem, "He has 6 / 4 = 1.50 left.")
    assert next_line(problem, "3 + 3 = 6, and 6 / 4 = 1.5")
    assert not next_line(problem, "6 / 4 = 1.5, and 1.5 + 1 = 2.5")
    assert not next_line(problem, "1.5")
