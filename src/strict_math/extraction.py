"""Finds the answer that a response states, and the value in a sentence that has exactly one reading."""

import re

from strict_math.text import answer_line, boxes, final_part, is_list, last_boxes
from strict_math.vocabulary import NO_UNIT

_ONLY_WORDS = re.compile(r"(?:[A-Za-z\s.,:;!*$'’]|\\[()\[\]])*")
_ANSWER_IS = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the\s+)?(?:final\s+|correct\s+)?answer\s+is:?\s*)?", re.IGNORECASE
)
_VERBS = (
    r"(?:is|are|was|were|equals?|is equal to|has|have|had|needs?|needed|takes?|took|costs?|makes?|made|gets?|got|earns?"
    r"|earned|pays?|paid|sells?|sold|spends?|spent|eats?|ate|totals?|contains?|holds?|travels?|traveled|walks?|walked"
    r"|runs?|ran|weighs?|weighed|receives?|received|buys?|bought|gives?|gave|uses?|used|collects?|collected|will be)"
)
_SENTENCE = re.compile(
    rf"(?P<subject>[A-Za-z$][A-Za-z ,'’$\\()\-]*?)(?:\s+(?:{_VERBS})\s*:?|:)"
    rf"(?:\s+(?:him|her|them|it|us|me|you|only|exactly|a total of))?\s+(?P<value>[^A-Za-z\s,.;].*|\\.*)",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r"\s+(?:in total|in all|altogether|overall|total"
    r"|(?:in|at|on|for|of) (?:the|his|her|their|its|this|that|each) (?P<words>[a-z]+(?: [a-z]+){0,2}))$",
    re.IGNORECASE,
)
_IT_IS = re.compile(r"(?:it|this|that) (?:is|was) (?:an? )?(?P<words>[A-Za-z][A-Za-z -]*)", re.IGNORECASE)
_HEDGES = re.compile(
    r"\b(?:not|no|never|nobody|none|cannot|\w+n['’]?t|neither|nor|or|false|wrong|incorrect|maybe|perhaps|possibly|might|may"
    r"|could|would|doubt|unlikely|unless|if|whether|either|guess|except|but|instead|rather|hardly|approximately|about"
    r"|around|roughly|nearly|almost|than|unsure|uncertain|least|most)\b",
    re.IGNORECASE,
)
_OTHER_NUMBER = re.compile(
    r"\b(?:of (?:the|my|this) answer|opposite|reciprocal|plus|minus|zero|one|twice|half|double|triple|two|three|four"
    r"|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE,
)


def extract_answer(response: str) -> str | None:
    r"""The text of the answer that a response states: its last `Answer:` line, else its last `\boxed{}`, else None.

    Text before `</think>` is ignored. A single box on the `Answer:` line with only words around it is the answer; boxes
    joined by commas, `and` or `or` are a list; any other box counts as brackets.

    Example:
        >>> extract_answer("6 * 7 is 42.\nAnswer: $42$")
        '$42$'
        >>> extract_answer(r"The roots are \boxed{2} and \boxed{3}.")
        '2, 3'
        >>> extract_answer("It is 42.") is None
        True
    """
    text = final_part(response)
    if (line := answer_line(text)) is None:
        return ", ".join(last_boxes(text)) or None
    line = _ANSWER_IS.sub("", line, count=1)
    found = boxes(line)
    if not found:
        return line
    around = line[: found[0].start] + " " + line[found[-1].end :]
    if not (_ONLY_WORDS.fullmatch(around) and is_list(line, found)):
        return _without_boxes(line)
    return line if is_hedged(around) else ", ".join(last_boxes(line))


def _without_boxes(text: str) -> str:
    """The text with each box replaced by its content."""
    for box in sorted(boxes(text), reverse=True):
        text = text[: box.start] + box.content + text[box.end :]
    return text


def is_hedged(words: str) -> bool:
    """Whether words deny, weaken or offer a choice: `not`, `maybe`, `or`."""
    return _HEDGES.search(words) is not None


def value_in_sentence(line: str) -> str | None:
    """The value of a sentence such as `The number of ways is 13.`: the text after its verb; None for other lines.

    The subject must have no digits, no denial and no doubt. The caller parses the value.
    """
    line = re.sub(r"\\text\{([A-Za-z ,:]*)\}", r"\1", line.strip().rstrip(".").rstrip())
    line = re.sub(r"^(it|that)['’]s\b", r"\1 is", line, flags=re.IGNORECASE)
    match = _SENTENCE.fullmatch(line)
    if words := _IT_IS.fullmatch(line):
        return words["words"]
    if match is None:
        value = _without_tail(line)
        return None if value == line or is_hedged(line) else value
    if _subject_is_hedged(match["subject"]) or is_hedged(re.sub(r"\\[A-Za-z]+", " ", match["value"])):
        return None
    return _without_tail(match["value"])


def _without_tail(text: str) -> str:
    """The text without a tail such as `in total` or `in the class`; words that may change the number are kept."""
    tail = _TAIL.search(text)
    if tail is None or (tail["words"] and not NO_UNIT.isdisjoint(tail["words"].lower().split())):
        return text
    return text[: tail.start()]


def _subject_is_hedged(subject: str) -> bool:
    quantities = re.sub(r"\b(?:the|at) (?:least|most)\b(?= [a-z]+)", " ", subject, flags=re.IGNORECASE)
    return is_hedged(quantities) or _OTHER_NUMBER.search(subject) is not None
