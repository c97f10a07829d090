"""Finds the value in a sentence whose subject is the answer, or a quantity that the question
names.
"""

import re

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

_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|finally|then|consequently|altogether|a total of|in total|in"
    r" all|in conclusion"
    r"|as a result|this means|(?:we|i) (?:find|get|see|have|conclude|obtain)|it follows)(?:"
    r" that)?(?:,| )\s*)+",
    re.IGNORECASE,
)
_NOTATION = (
    r"(?:in|as)(?: an?)?"
    r" (?:(?:decimal|simplest|simplified|lowest|reduced|standard|exact|scientific|fractional|mixed)"
    r" (?:form|notation|terms|number)|decimal|fraction)"
)
"""The name of a notation, which changes no number."""
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
_FORMER = re.compile(r"had|needs?|needed", re.IGNORECASE)
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
_MAX_TAIL = 60
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
    r"""The text with `twelve` and `twenty-five` as digits, and `three quarters` as
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
    """The value of a sentence such as `The number of ways is 13.`: the text after its verb; None
    for other lines.

    The subject must be the answer, or the quantity that the question asks for. The caller parses
    the value.

    Args:
        line: one line without repeated white space.
        question: the question; where it is not known, a few common quantities (`the area`) count as
            asked.
    """
    line = re.sub(r"\\text\{([A-Za-z ,:]*)\}", r"\1", line.strip().rstrip(".").rstrip())
    line = " ".join(line.split())
    line = re.sub(r"^(it|that)['’]s\b", r"\1 is", line, flags=re.IGNORECASE)
    for lead in (_LEAD.match(line), _IN_NOTATION.match(line)):
        line = line[lead.end() :] if lead else line
    operation = line
    for pattern, sign in _OPERATION_WORDS:
        operation = pattern.sub(sign, operation)
    if computation := _COMPUTED.fullmatch(operation):
        return f"{computation['left']} = {_without_tail(computation['value'], question)}"
    if answer_words := _IT_IS.fullmatch(line):
        return answer_words["words"]
    inverted = _VALUE_FIRST.fullmatch(line)
    if inverted and _is_answer(inverted["subject"], question):
        return inverted["value"]
    possession = _WITH_QUANTITY.fullmatch(line)
    if possession and _is_quantity(
        f"the {possession['quantity']} of {possession['owner']}", question
    ):
        return _without_tail(possession["value"], question)
    if statement := None if _DERIVATIVE.match(line) else _STATED.fullmatch(line):
        expression = _EXPRESSION.fullmatch(statement["subject"])
        if expression and not expression["text"].isdigit():
            return f"{expression['text']} = {statement['value']}" if statement["verb"] else None
        return (
            _without_tail(statement["value"], question)
            if _is_answer(statement["subject"], question)
            else None
        )
    if deed := _DONE.fullmatch(line):
        if deed["by"] and not (question.is_known and question.has(["by"])):
            return None
        return (
            _without_tail(deed["value"], question)
            if _acts(deed["subject"], deed["verb"], question)
            else None
        )
    return _without_tail(line, question)


def _is_answer(subject: str, question: Question) -> bool:
    """Whether a subject of `is` means the answer."""
    if _ANSWER.fullmatch(subject) or _is_quantity(subject, question):
        return True
    counted = _NUMBER_OF.fullmatch(subject)
    if counted is None:
        return False
    words = [word for word in counted["things"].lower().split() if word not in DETERMINERS]
    if (
        question.is_known
        and question.counts(words)
        and question.asks_about([word for word in words if word not in KINDS])
    ):
        return True
    countable = GENERIC if question.is_known else COUNTED
    return all(word in KINDS for word in words[:-1]) and (
        canonical(words[-1]) in countable or is_unit(words[-1])
    )


def _is_quantity(subject: str, question: Question) -> bool:
    """Whether a noun phrase is the quantity that the question asks for."""
    if question.is_known:
        total = _TOTAL.fullmatch(subject)
        return question.quotes(subject.replace("$", "")) or (
            total is not None and question.measures(total["name"])
        )
    if figure := _OF_FIGURE.fullmatch(subject):
        return figure["quantity"] in QUANTITIES and (
            not figure["kind"] or figure["kind"] in CONTAINERS
        )
    if _EXTREME.fullmatch(subject):
        return True
    words = [word for word in subject.lower().split() if word not in DETERMINERS]
    head, of, thing = " ".join(words).partition(" of ")
    return head in QUANTITIES and (not of or thing in CONTAINERS or canonical(thing) in COUNTED)


def _acts(subject: str, verb: str, question: Question) -> bool:
    """Whether a subject does what the question asks about: `Tom has`, `it takes`."""
    is_person = subject.lower() in _PERSONS
    always = _ANY_VERB.fullmatch(verb) is not None
    if not question.is_known:
        if always:
            return is_person or _ANSWER.fullmatch(subject) is not None
        return is_person and _PERSONAL_VERB.fullmatch(verb) is not None
    if subject.lower() in _THIRD_PERSONS and not question.has_person:
        return False
    if _FORMER.fullmatch(verb) and not question.asks_with(verb.lower()):
        return False  # `Tom had`, where the question asks what he has
    if _EACH.match(subject) and not question.asks_for_each:
        return False
    return (is_person or question.names_actor(subject)) and (
        always or question.asks_with(verb.lower())
    )


def _without_tail(text: str, question: Question) -> str:
    """The text without a tail such as `in total` or the question's words; words that may change the
    number are kept.
    """
    counted = _COUNTED.fullmatch(text)
    amount = _AMOUNT_OF.fullmatch(text)
    if counted and question.is_known and question.restates(counted["words"]):
        return counted["value"]
    if (
        amount
        and question.is_known
        and is_unit(amount["unit"])
        and question.restates(amount["words"])
    ):
        return amount["value"]
    for start in (
        index for index in range(max(0, len(text) - _MAX_TAIL), len(text)) if text[index] == " "
    ):
        if _is_tail(text, start, question):
            return text[:start]
    return text


def _is_tail(text: str, start: int, question: Question) -> bool:
    """Whether the text from `start` on leaves the number before it unchanged."""
    tail = _TAIL.fullmatch(text, start)
    if tail is None:
        first = text[start + 1 :].split(" ", 1)[0].lower()
        is_free = first != "per" and (
            first in _PREPOSITIONS or not (first in NO_UNIT or is_unit(first))
        )
        return (
            question.is_known and first.isalpha() and is_free and question.ends_with(text[start:])
        )
    if tail["measure"]:
        return question.is_known and question.has(tail["measure"].split())
    if tail["rest"]:
        return not question.is_known or any(
            map(question.has, (["left"], ["remain"], ["remaining"]))
        )
    return not tail["words"] or _is_container(tail["words"].lower(), question)


def _is_container(words: str, question: Question) -> bool:
    if not NO_UNIT.isdisjoint(words.split()):
        return False
    return (
        question.has(words.split())
        if question.is_known
        else words in CONTAINERS or canonical(words) in COUNTED
    )
