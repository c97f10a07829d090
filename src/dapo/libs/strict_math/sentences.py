"""Finds the value in a sentence whose subject is the answer, or a quantity that the question
names.
"""

import re
from collections.abc import Iterator

from .asked import TERM
from .question import DETERMINERS, Question
from .units import canonical, is_unit
from .vocabulary import (
    CARDINALS,
    CONTAINERS,
    COUNTED,
    GENERIC,
    KINDS,
    NO_UNIT,
    QUANTITIES,
    TENS,
    word_set,
)
from .working import without_working

_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|finally|then|consequently|altogether|a total of|in total|in"
    r" all|in conclusion"
    r"|as a result|(?:this|that) means|(?:we|i) (?:find|get|see|have|conclude|obtain)"
    r"|it follows)(?: that)?(?:,| )\s*)+",
    re.IGNORECASE,
)
# The name of a notation, which changes no number
_NOTATION = (
    r"(?:in|as)(?: an?)?"
    r" (?:(?:decimal|simplest|simplified|lowest|reduced|standard|exact|scientific|fractional|mixed)"
    r" (?:form|notation|terms|number)|decimal|fraction)"
)
_IS = (
    r"(?:is|are|was|were|equals|is equal to|are equal to|will be|is given by|comes to|comes out"
    r" to|amounts to|would be)"
)
_ADVERB = (
    r"(?:only|exactly|precisely|simply|actually|indeed|just|now|then|still|also|thus|therefore|a"
    r" total of|in total)"
)
_VALUE = r"(?P<value>(?:[^A-Za-z\s,.;:]|\\).*)"
_SUBJECT = r"(?P<subject>[A-Za-z\\$(][A-Za-z\d ,'’$\\()+*/^{}_-]*?)"
_STATED = re.compile(
    rf"{_SUBJECT}(?: {_ADVERB})?(?: (?P<verb>{_IS}) ?:?| ?[:=])(?: {_ADVERB})? {_VALUE}",
    re.IGNORECASE,
)
_DONE = re.compile(
    rf"{_SUBJECT}(?: {_ADVERB})? (?P<verb>will have|is left with|ends? up with|[a-z]+)"
    rf"(?: (?:him|her|them|it|us|me|you))?(?P<by> by)?(?: {_ADVERB})? {_VALUE}",
    re.IGNORECASE,
)
_COMPUTED = re.compile(
    rf"(?P<left>\d[\d .,+*/×÷^()−-]*?)(?: {_NOTATION})? (?:{_IS}|=) {_VALUE}", re.IGNORECASE
)
_COUNTED = re.compile(r"(?P<value>[^A-Za-z\s]*\d\S*) (?P<words>[A-Za-z].*)")
_AMOUNT_OF = re.compile(
    r"(?P<value>[^A-Za-z\s]*\d\S* (?P<unit>[A-Za-z]+)) of (?P<words>[A-Za-z].*)"
)
_WITH_QUANTITY = re.compile(
    rf"(?P<owner>[A-Za-z '’]+?) has (?:an? )?(?P<quantity>[a-z ]+?)(?: of)? {_VALUE}", re.IGNORECASE
)
_VALUE_FIRST = re.compile(
    r"(?P<value>(?:[^A-Za-z\s,.;]|\\|[A-Za-z] ?[=<>\\≤≥]).*) (?:is|are)(?: indeed)? "
    r"(?P<subject>(?:the|our|my|its|his|her|their) [a-z ]+)",
    re.IGNORECASE,
)
_IN_NOTATION = re.compile(rf"{_NOTATION}[:,]? ", re.IGNORECASE)
_IT_IS = re.compile(
    r"(?:it|this|that) (?:is|was) (?:an? )?(?P<words>[A-Za-z][A-Za-z -]*)", re.IGNORECASE
)
_ANSWER = re.compile(
    r"(?:it|this|that|there|(?:the |our |my )?(?:final |correct |numerical |exact |required"
    r" |desired |total )?"
    r"(?:(?:answer|result|solution)s?(?: (?:to|of|for) (?:the|this)"
    r" (?:problem|question|equation|exercise|puzzle))?"
    r"|(?:total|value|number|amount|count|quantity)s?))",
    re.IGNORECASE,
)
_NUMBER_OF = re.compile(
    r"(?:the |a )?(?:total )?(?:number|amount|count|total|value) of (?P<things>.+)", re.IGNORECASE
)
_EXPRESSION = re.compile(
    rf"(?:the value of )?(?:\\\(|\$)? ?(?P<text>{TERM}(?: ?[-+*/^] ?{TERM}){{0,5}}) ?(?:\\\)|\$)?",
    re.IGNORECASE,
)
_OF_FIGURE = re.compile(
    r"(?:[Tt]he )?(?P<quantity>[a-z]+) of (?:(?P<kind>[a-z]+) )?\$?[A-Z]{2,8}\$?"
)
_EXTREME = re.compile(
    r"(?:the )?(?:smallest|largest|least|greatest|minimum|maximum)(?: possible)?(?: value of)?"
    r" \$?[a-z]\$?",
    re.IGNORECASE,
)
_DERIVATIVE = re.compile(r"\$?[A-Za-z]'+ ?\(")
_TOTAL = re.compile(r"(?:the )?total (?P<name>[a-z]+)", re.IGNORECASE)
_PREPOSITIONS = word_set("to in on at for from after before by with")
_PERSONS = word_set("he she they it we you i")
_THIRD_PERSONS = word_set("he she they")
_NEED = re.compile(r"needs?|needed", re.IGNORECASE)
_EACH = re.compile(r"(?:each|every|one|another|the other)\b", re.IGNORECASE)
_ANY_VERB = re.compile(
    r"is left with|ends? up with|has|have|had|will have|needs?|needed|takes?|took|costs?"
    r"|makes?|made|gets?|got|holds?|contains?|totals?|travels?|traveled",
    re.IGNORECASE,
)
_PERSONAL_VERB = re.compile(
    r"earns?|earned|pays?|paid|sells?|sold|spends?|spent|eats?|ate|walks?|walked|runs?|ran|buys?|bought|gives?|gave"
    r"|uses?|used|reads?|saves?|saved",
    re.IGNORECASE,
)
_TAIL = re.compile(
    rf" (?:{_NOTATION}|in total|in all|in this"
    r" (?:case|context|problem)|altogether|overall|total|left"
    r"|left over|remaining|now"
    r"|(?P<rest>(?:is|are|was|were) (?:left|left over|remaining)|remain(?:s|ed)?)"
    r"|(?:in|at|on|for|of) (?:the|his|her|their|its|this|that) (?P<words>[A-Za-z]+(?:"
    r" [A-Za-z]+){0,2})"
    r"|(?:in|at|on|for) (?P<measure>\d+ [A-Za-z]+))",
    re.IGNORECASE,
)
_ONE_NUMBER = re.compile(r"[-+−]?(?:\\?[$€£₹] ?)?\d+(?:,\d{3})*(?:\.\d+)?(?:\\?%| ?€)?")
_WORD = re.compile(r"[A-Za-z]{2}")
_MONEY = re.compile(r"[$€£₹]")
# signs that a sentence of plain words has not
_OTHER_SIGNS = re.compile(r"[^A-Za-z\s,.'’-]|(?<=\s)-|-(?=\s)")
_THAN = re.compile(r"\bthan\b", re.IGNORECASE)
_WORDS_IN_TEXT = re.compile(r"\\text\{([A-Za-z ,:]*)\}")
_IT_APOSTROPHE = re.compile(r"^(it|that)['’]s\b", re.IGNORECASE)
_MAX_TAIL = 60
_MAX_COUNTED = 80
# `She has 18, so` in front of the conclusion
_REASON = re.compile(
    r"(?P<reason>.+?)(?:,? so|, thus|, hence|, therefore|,? which means|,? meaning)(?: that)?,? "
    r"(?P<statement>.+)",
    re.IGNORECASE,
)
# `If she has 18,` and `Since she has 18,` before it
_CONDITION = re.compile(
    r"(?P<word>if|when|once|after|to|since|because|as) (?P<reason>[^,]+), (?:then )?"
    r"(?P<statement>.+)",
    re.IGNORECASE,
)
# `Then add the prices to find the total cost: $18`
_STEP = re.compile(
    r"(?P<reason>[^:=]+?) to (?:find|get|determine|calculate|compute) (?P<subject>[^:=]+): "
    r"(?P<value>[^:=]+)",
    re.IGNORECASE,
)
_NUMBER_WORDS = re.compile(
    rf"(?<![\w.,^-])(?<!\d )(?:(?P<tens>{'|'.join(TENS)})(?:["
    rf" -](?P<ones>{'|'.join(CARDINALS[1:10])}))?"
    rf"|(?P<small>{'|'.join(reversed(CARDINALS))}))(?![\w^]|[ ,]\d)",
    re.IGNORECASE,
)
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4} | {
    f"{ordinal}{ending}": number
    for number, ordinal in enumerate(
        [
            "third",
            "fourth",
            "fifth",
            "sixth",
            "seventh",
            "eighth",
            "ninth",
            "tenth",
            "eleventh",
            "twelfth",
            "thirteenth",
            "fourteenth",
            "fifteenth",
            "sixteenth",
        ],
        3,
    )
    for ending in ("", "s")
}
_COUNTS = "|".join(reversed(CARDINALS[1:]))
_FRACTION_WORDS = re.compile(
    rf"(?<![\w.,^-])(?<!\d )(?P<whole>(?:{_COUNTS}|\d{{1,6}}) and )?(?P<count>{_COUNTS}|an?)[ -]"
    rf"(?P<part>{'|'.join(sorted(_PARTS, key=len, reverse=True))})(?![\w-])",
    re.IGNORECASE,
)
_WRAPPED = re.compile(r"\\text\{(?P<words>[A-Za-z -]{1,60})\}")
_OPERATION_WORDS = (
    (re.compile(r"(?<=\d) (?:times|multiplied by) (?=\d)"), " * "),
    (re.compile(r"(?<=\d) plus (?=\d)"), " + "),
    (re.compile(r"(?<=\d) minus (?=\d)"), " - "),
    (re.compile(r"(?<=\d) (?:divided by|over) (?=\d)"), " / "),
)


def digits_for_words(text: str) -> str:
    r"""Return the text with `twelve` and `twenty-five` as digits, and `three quarters` as
    `\frac{3}{4}`.
    """

    def digits(match: re.Match[str]) -> str:
        words = [(match[name] or "").lower() for name in ("tens", "ones", "small")]
        tens = 10 * (TENS.index(words[0]) + 2) if words[0] else 0
        return str(tens + sum(CARDINALS.index(word) for word in words[1:] if word))

    def fraction(match: re.Match[str]) -> str:
        count = match["count"].lower()
        above = 1 if count in ("a", "an") else CARDINALS.index(count)
        integer = (match["whole"] or "").split(" ")[0].lower()
        integer = str(CARDINALS.index(integer)) if integer in CARDINALS else integer
        return f"{integer}\\frac{{{above}}}{{{_PARTS[match['part'].lower()]}}}"

    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped["words"]
    return _NUMBER_WORDS.sub(digits, _FRACTION_WORDS.sub(fraction, text))


def value_in_sentence(line: str, question: Question) -> str | None:
    """Return the value of a sentence such as `The number of ways is 13.`: the text after its verb;
    None for other lines.

    The subject must be the answer, or the quantity that the question asks for. The caller parses
    the value.

    Args:
        line: one line without repeated white space.
        question: the question; where it is not known, a few common quantities (`the area`) count as
            asked.
    """
    line = _plain_line(line)
    operation = line
    for pattern, sign in _OPERATION_WORDS:
        operation = pattern.sub(sign, operation)
    computation = _COMPUTED.fullmatch(operation)
    if computation:
        return f"{computation['left']} = {_without_tail(computation['value'], question)}"
    answer_words = _IT_IS.fullmatch(line)
    if answer_words:
        return answer_words["words"]
    inverted = _VALUE_FIRST.fullmatch(line)  # `13 is the answer`
    if inverted and _is_answer(inverted["subject"], question):
        return inverted["value"]
    possession = _WITH_QUANTITY.fullmatch(line)  # `the circle has a radius of 3`
    if possession:
        quantity = f"the {possession['quantity']} of {possession['owner']}"
        if _is_quantity(quantity, question):
            return _without_tail(possession["value"], question)
    statement = _STATED.fullmatch(line)
    if statement and not _DERIVATIVE.match(line):
        return _value_of_statement(statement, question)
    deed = _DONE.fullmatch(line)
    if deed:
        return _value_of_deed(deed, question)
    return _without_tail(line, question)


def value_in_words_of(question: Question, line: str) -> str | None:
    """Return the number of a sentence that repeats its question, with its unit: `68 inches` of
    `Tamara is 68 inches tall.`; None for other lines.

    Every other number must be one of the sentences that ask, with what it counts: `8 pens` in
    `8 pens cost $12`.

    Args:
        question: The question.
        line: One line without repeated white space.
    """
    if not question.is_known:
        return None
    line = _plain_line(line)
    numbers = list(_ONE_NUMBER.finditer(line))
    if len(numbers) > 1:
        numbers = [number for number in numbers if not _is_asked(number, question)]
    if len(numbers) != 1:
        return None
    number = numbers[0]
    before = _ONE_NUMBER.sub("", line[: number.start()])
    behind = line[number.end() :]
    if _ONE_NUMBER.match(behind.lstrip()):
        return None
    behind = _ONE_NUMBER.sub("", behind)
    if _OTHER_SIGNS.search(before + behind) or _THAN.search(before):
        return None
    if not question.repeats(before, behind, is_money=_MONEY.search(number[0]) is not None):
        return None
    word = behind.strip().partition(" ")[0].strip(",")
    return f"{number[0]} {word}" if is_unit(word) else number[0]


def _is_asked(number: re.Match[str], question: Question) -> bool:
    """Return True if a number is one of the sentences that ask, with the word behind it."""
    start = number.start()
    return question.asks_with_number(number.string[start : start + _MAX_COUNTED])


def statements_of(line: str, question: Question) -> Iterator[str]:
    """Yield the statements that a line makes in other words: with the result in the place of a
    calculation, without the reason before the conclusion, and of a step what it finds.

    A reason must repeat what the question says: its words and its numbers.

    Args:
        line: One line without repeated white space.
        question: The question.
    """
    line = without_working(line)
    yield line
    if not question.is_known:
        return
    for pattern in (_REASON, _CONDITION):
        conclusion = pattern.fullmatch(_plain_line(line))
        if conclusion is None or not _is_given(conclusion, question):
            continue
        line = conclusion["statement"]
        yield line
    step = _STEP.fullmatch(_plain_line(line))
    if step and question.gives_numbers(step["reason"]):
        yield f"{step['subject']} is {step['value']}"


def _is_given(conclusion: re.Match[str], question: Question) -> bool:
    """Return True if the question says what a conclusion is drawn from; a condition must be in a
    sentence that asks.
    """
    reason = conclusion["reason"]
    word = conclusion.groupdict().get("word", "since").lower()
    is_fact = word in ("since", "because", "as")
    if not _WORD.search(reason):
        return False
    # `Ann has 3 apples left, so` is another answer
    is_asked = word == "to" or question.asks_with_numbers(reason)
    if not is_asked and value_in_words_of(question, reason) is not None:
        return False
    return question.gives(reason, in_asking=not is_fact)


def _plain_line(line: str) -> str:
    """Return a sentence without text commands, a full stop and words such as `so` before it."""
    line = _WORDS_IN_TEXT.sub(r"\1", line.strip().rstrip(".").rstrip())
    line = _IT_APOSTROPHE.sub(r"\1 is", " ".join(line.split()))
    # both are looked up in the whole line: the second is no continuation of the first
    leads = (_LEAD.match(line), _IN_NOTATION.match(line))
    for lead in filter(None, leads):
        line = line[lead.end() :]
    return line


def _value_of_statement(statement: re.Match[str], question: Question) -> str | None:
    """Return the value of `SUBJECT is VALUE`; None if the subject is not the answer."""
    expression = _EXPRESSION.fullmatch(statement["subject"])
    if expression and not expression["text"].isdigit():
        if statement["verb"]:
            return f"{expression['text']} = {statement['value']}"
        return None
    if not _is_answer(statement["subject"], question):
        return None
    return _without_tail(statement["value"], question)


def _value_of_deed(deed: re.Match[str], question: Question) -> str | None:
    """Return the value of `SUBJECT VERB VALUE`; None if the question does not ask about that."""
    if deed["by"] and not (question.is_known and question.has(["by"])):
        return None
    if not _acts(deed["subject"], deed["verb"], question):
        return None
    return _without_tail(deed["value"], question)


def _is_answer(subject: str, question: Question) -> bool:
    """Return True if a subject of `is` means the answer."""
    if _ANSWER.fullmatch(subject) or _is_quantity(subject, question):
        return True
    number_of = _NUMBER_OF.fullmatch(subject)
    if number_of is None:
        return False
    words = [word for word in number_of["things"].lower().split() if word not in DETERMINERS]
    if not words:
        return False  # `the number of each`
    things = [word for word in words if word not in KINDS]
    if question.is_known and question.counts(words) and question.asks_about(things):
        return True
    if not KINDS.issuperset(words[:-1]):
        return False
    countable = GENERIC if question.is_known else COUNTED
    return canonical(words[-1]) in countable or is_unit(words[-1])


def _is_quantity(subject: str, question: Question) -> bool:
    """Return True if a noun phrase is the quantity that the question asks for."""
    if question.is_known:
        if question.quotes(subject.replace("$", "")):
            return True
        total = _TOTAL.fullmatch(subject)
        return total is not None and question.measures(total["name"])
    figure = _OF_FIGURE.fullmatch(subject)
    if figure:
        is_container = not figure["kind"] or figure["kind"] in CONTAINERS
        return is_container and figure["quantity"] in QUANTITIES
    if _EXTREME.fullmatch(subject):
        return True
    words = [word for word in subject.lower().split() if word not in DETERMINERS]
    head, of, thing = " ".join(words).partition(" of ")
    if head not in QUANTITIES:
        return False
    return not of or thing in CONTAINERS or canonical(thing) in COUNTED


def _acts(subject: str, verb: str, question: Question) -> bool:
    """Return True if a subject does what the question asks about: `Tom has`, `it takes`."""
    if verb.lower() == "than":  # `Ann read more than 12 pages`
        return False
    is_person = subject.lower() in _PERSONS
    always = _ANY_VERB.fullmatch(verb) is not None
    if not question.is_known:
        if always:
            return is_person or _ANSWER.fullmatch(subject) is not None
        return is_person and _PERSONAL_VERB.fullmatch(verb) is not None
    if subject.lower() in _THIRD_PERSONS and not question.has_person:
        return False
    if verb.lower() == "had" and not question.asks_for_past:
        return False  # where the question asks what he has
    if _NEED.fullmatch(verb) and not question.asks_with(verb.lower()):
        return False
    if _EACH.match(subject) and not question.asks_for_each:
        return False
    if not is_person and not question.names_actor(subject):
        return False
    return always or question.asks_with(verb.lower())


def _without_tail(text: str, question: Question) -> str:
    """Return the text without a tail such as `in total` or the question's words; words that may
    change the number are kept.
    """
    if question.is_known:
        number = _COUNTED.fullmatch(text)
        if number and question.restates(number["words"]):
            return number["value"]
        amount = _AMOUNT_OF.fullmatch(text)
        if amount and is_unit(amount["unit"]) and question.restates(amount["words"]):
            return amount["value"]
    for start in range(max(0, len(text) - _MAX_TAIL), len(text)):
        if text[start] == " " and _is_tail(text, start, question):
            return text[:start]
    return text


def _is_tail(text: str, start: int, question: Question) -> bool:
    """Return True if the text from `start` on leaves the number before it unchanged."""
    tail = _TAIL.fullmatch(text, start)
    if tail is None:
        first = text[start + 1 :].split(" ", 1)[0].lower()
        if not question.is_known or not first.isalpha() or first == "per":
            return False
        # a word that changes the number, or its unit, is no tail
        if first not in _PREPOSITIONS and (first in NO_UNIT or is_unit(first)):
            return False
        return question.ends_with(text[start:])
    if tail["measure"]:
        return question.is_known and question.has(tail["measure"].split())
    if tail["rest"]:
        if not question.is_known:
            return True
        return any(question.has([word]) for word in ("left", "remain", "remaining"))
    return not tail["words"] or _is_container(tail["words"].lower(), question)


def _is_container(words: str, question: Question) -> bool:
    if not NO_UNIT.isdisjoint(words.split()):
        return False
    if question.is_known:
        return question.has(words.split())
    return words in CONTAINERS or canonical(words) in COUNTED
