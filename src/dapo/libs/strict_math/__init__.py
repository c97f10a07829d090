r"""Reads mathematical answers, LaTeX or plain text, and compares them exactly; no text is evaluated
as code.

Example:
    >>> from dapo.libs.strict_math import Reference, extract_answer, is_equal
    >>> reference = Reference.read(r"\frac{1}{2}")
    >>> answer = extract_answer("The probability is one half.\nAnswer: $0.5$")
    >>> reference.matches(answer)
    True
    >>> is_equal(r"x \in [2, 3)", "2 <= x < 3")
    True

`strict_math.text` has the rules for finding answers in text: `Answer:` lines, boxes, wrappers,
plain numbers.
"""

# text -> tokenizer, units -> expressions -> arithmetic -> answer_forms, real_sets -> answer,
# equality -> answer_parser -> comparison: the order in which an answer is read, and in which
# modules import each other
from .comparison import Reference, is_equal
from .extraction import extract_answer

__all__ = ["Reference", "extract_answer", "is_equal"]
