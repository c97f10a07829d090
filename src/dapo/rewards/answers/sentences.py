"""Finds the value in a sentence behind `Answer:` where there is exactly one way to read it."""

import re

from dapo.rewards.answers.vocabulary import NO_UNIT

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
_DOUBTFUL = re.compile(
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


def is_doubtful(words: str) -> bool:
    """Whether words deny, weaken or offer a choice: `not`, `maybe`, `or`."""
    return _DOUBTFUL.search(words) is not None


def value_in_sentence(line: str) -> str | None:
    """The value of `The number of ways is 13.`: what follows the verb; None if the line is no such sentence.

    What is before the verb has no digits and no words of denial or doubt; what follows must be readable as a value.
    """
    line = re.sub(r"\\text\{([A-Za-z ,:]*)\}", r"\1", line.strip().rstrip(".").rstrip())
    line = re.sub(r"^(it|that)['’]s\b", r"\1 is", line, flags=re.IGNORECASE)
    match = _SENTENCE.fullmatch(line)
    if words := _IT_IS.fullmatch(line):
        return words["words"]
    if match is None:
        value = _without_tail(line)
        return None if value == line or is_doubtful(line) else value
    if _subject_is_doubtful(match["subject"]) or is_doubtful(re.sub(r"\\[A-Za-z]+", " ", match["value"])):
        return None
    return _without_tail(match["value"])


def _without_tail(text: str) -> str:
    """The text without `in total` and `in the class`, but with words that may change the number before them."""
    tail = _TAIL.search(text)
    if tail is None or (tail["words"] and not NO_UNIT.isdisjoint(tail["words"].lower().split())):
        return text
    return text[: tail.start()]


def _subject_is_doubtful(subject: str) -> bool:
    quantities = re.sub(r"\b(?:the|at) (?:least|most)\b(?= [a-z]+)", " ", subject, flags=re.IGNORECASE)
    return is_doubtful(quantities) or _OTHER_NUMBER.search(subject) is not None


def without_preamble(line: str) -> str:
    """The line without `The answer is` before it."""
    return _ANSWER_IS.sub("", line, count=1) if _ANSWER_IS.match(line) else line
