"""Mistakes made by rule, and which test functions no mistake needs."""

import os
import time

from benchmarks.mutant_matrix import in_child, judge
from benchmarks.mutation import function_at, mutations

SOURCE = '''"""Doc: 1 + 1."""

LIMIT = 3


class Box:
    """Doc."""

    def inside(self, x: int = 2) -> bool:
        if x < LIMIT and not self.closed:
            self.count(x)
        raise ValueError(f"{x + 1}: {1 + 2}")
'''


def test_each_operator_constant_and_call_is_changed_once_and_texts_and_messages_are_not():
    found = {each.change: each for each in mutations(SOURCE)}
    assert set(found) == {
        "3 -> 4",
        "2 -> 3",
        "x < LIMIT and (not self.closed) -> x < LIMIT or not self.closed",
        "x < LIMIT -> x <= LIMIT",
        "not self.closed -> self.closed",
        "self.count(x) -> pass",
    }
    assert {each.function for each in found.values()} == {"", "Box.inside"}
    changed = found["x < LIMIT -> x <= LIMIT"]
    assert changed.source == SOURCE.replace("x < LIMIT", "(x <= LIMIT)")
    assert function_at(SOURCE, changed.line) == "Box.inside"
    assert function_at(SOURCE, 3) == ""


def test_a_function_is_needed_where_a_mistake_is_caught_by_no_other():
    first = {
        "seconds": dict.fromkeys("abcd", 1.0) | {"slow": 9.0},
        "calls": {n: ["f"] for n in "abc"} | {"d": []},
    }
    first["calls"]["slow"] = ["f"]
    caught = [["a"], ["a", "b"], ["b", "c"], [], ["no end"], ["tests/x.py"]]
    found = judge(
        [first, *({"mistake": str(i), "failed": each} for i, each in enumerate(caught))], slow_s=5.0
    )
    assert (found.mistakes, found.caught, found.survive) == (6, 3, ["3"])
    # d calls nothing of the folder, and the slow one is left out
    assert found.judged == {"a", "b", "c"}
    assert (found.needed, found.shared, found.none) == ({"a"}, {"b", "c"}, set())
    assert found.cover in ({"a", "b"}, {"a", "c"})


def test_a_child_that_dies_or_does_not_end_answers_nothing():
    assert in_child(lambda: {"x": 1}, 30) == {"x": 1}
    assert in_child(lambda: os._exit(3), 30) is None
    assert in_child(lambda: time.sleep(30), 0.3) is None
