"""Reads a box with what stands around it on its line: the rest of its formula, and the words next
to it.
"""

import re
from collections.abc import Sequence

from .languages import FOLLOWING, PROSE, denies, is_prose
from .text import Box
from .units import words_of_unit
from .vocabulary import NO_UNIT, QUANTITIES, QUANTITY_DIMENSIONS, word_set

_BEFORE = 300
# The numbers of characters that are read on both sides
_AFTER = 200
_MAX_DISTANCE = 12  # words between a denial and the box
_MAX_PROSE = 80  # characters in which the language of a sentence shows
_BULLET = re.compile(r"\s*(?:(?:[-*+>•]|#+|\(?[A-Za-z\d]{1,2}[.)])\s+)+")
# The end of a line whose formula goes on in the next one
_CONTINUES = re.compile(
    r"(?:[=<>≤≥≠≈∈+*/·×-]|\\(?:leq?|geq?|neq?|lt|gt|approx|in|times|cdot|div|pm))\s*$"
)
_DELIMITER = re.compile(r"\\\$|(?P<toggle>\$\$?)|\\(?P<side>[()\[\]])")
_LETTER = rf"(?<![A-Za-z{PROSE}])(?![aAI]\b)[A-Za-z](?![A-Za-z{PROSE}])"
_FORMULA_BEFORE = re.compile(rf"(?:\\[A-Za-z]+|{_LETTER}|[^A-Za-z{PROSE}])*$")
_FORMULA_AFTER = re.compile(
    rf"(?:\\[A-Za-z]+(?:\s?\{{[^{{}}]*\}})?|{_LETTER}|[^A-Za-z$\\{PROSE}])*"
)
_SEPARATOR = re.compile(
    r"(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<cut>[,;:&⇒→∴](?!\d{3})|[.](?:\s|$)|\\\\|\\(?:Rightarrow|Longrightarrow|implies|iff|therefore|to|rightarrow"
    r"|longrightarrow|q?quad|blacksquare|square|Box|checkmark|hfill|tag|end|n|text\{ ?(?:so|and)"
    r" \})(?![A-Za-z]))"
    r"|(?P<relation>(?:\\not ?)?"
    r"(?:\\(?:leq?|leqslant|geq?|geqslant|neq?|lt|gt|approx|sim|in|equiv)(?![A-Za-z])|[<>!]=|[=<>≤≥≠≈≡∈~]))"
    r"|\\[A-Za-z]+"
)
_PLAIN_SIDE = re.compile(r"(?=.*(?<![A-Za-z\\])[A-Za-z])[\w\s\\^{}()+*/.|'-]+", re.ASCII)
_JOINS_BEFORE = re.compile(r"[\w)}]$")
_JOINS_AFTER = re.compile(r"\w|\s*[\^_!]")
_ONE_TOKEN = re.compile(r"[\d.,]*\w*")
# A box before this one, with a word that takes it back
_AFTER_BOX = re.compile(
    r"^.*\}[\s$,;]*(?:no|well|wait|hmm+|oh|actually|sorry)?(?=[\s,;$]|$)", re.IGNORECASE
)
_MEMBER = ("\\in", "∈")
_EQUAL = ("=", "≡", "\\equiv")
_MODULUS = re.compile(r"\s*(?:\\pmod|\\?\(?\\?(?:b?mod|text\{ ?mod ?\}))\s*\{?\w+\}?\s*\)?")
_WORD = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?")
_CLAUSE_END = re.compile(r"[.;:!?](?=[\s*_$]|$)|[。；！？।]")
# `By inspection, $`; `\,` is a space
_ENDS_IN_COMMA = re.compile(r"(?<!\\),[\s$*_(]*(?:\\[(\[])?\s*$")
_SENTENCE_END = re.compile(r"[.;!?](?=[\s*_$]|$)|[。；！？।]")
_NAMES = sorted(word for words in QUANTITY_DIMENSIONS for word in words.split())
_STATING = word_set(
    "is are was were equal equals get gets got obtain obtains obtained has have had having give"
    " gives giving gave yield yields yielding answer answers result results solution solutions so"
    " thus hence therefore then value becomes become make makes making find finds found conclude"
    " concludes only exactly precisely simply just indeed altogether cost costs pay pays paid earn"
    " earns earned need needs needed take takes took sell sells sold buy buys bought spend spends"
    " spent use uses used leave leaves leaving contain contains hold holds total totals write"
    " choose chooses select pick option choice letter worth say namely obtaining finally and"
)
# How the text before a box may end; any other text is a sentence that the reader of sentences
# judges
_STATING_PAIRS = frozenset(
    f"{first} {last}"
    for firsts, last in (
        ("will would must should to", "be"),
        ("equal comes amounts simplifies reduces evaluates leads sum sums equivalent", "to"),
        (" ".join(("total quotient remainder maximum minimum", *QUANTITIES)), "of"),
        ("left remain remains", "with"),
        ("conclude find see get know means follows shows have obtain is so", "that"),
    )
    for first in firsts.split()
)
# The end of the text before a box that names the box's quantity
_QUANTITY = re.compile(
    r"(?:\b(?:the|its|their|his|her) (?:[a-z]+ ){0,2}|^[a-z]*"
    rf" ?|\\text\{{)(?P<name>{'|'.join(_NAMES)})\}}?"
    r"(?: of [^,;:=]{1,80}?)?(?: (?:is|was|equals)(?: [a-z]+){0,2}| ?=[^A-Za-z]{0,80}|:)["
    r" $*_\\(]*$",
    re.IGNORECASE,
)
_NAME_IS = re.compile(
    r"(?:^|[\s,])(?:\$|\\\()?(?P<name>(?![aAI]\b)[A-Za-z](?:_\d)?)(?:\$|\\\))? (?:is|equals|must be"
    r"|will be)[ $*_\\(]*$"
)
_PASSED_OVER = word_set("a an the us me him her them")
# Verbs of those who solve a problem
_OF_PERSONS = word_set(
    "get gets got obtain obtains obtained find finds found conclude concludes write choose chooses"
    " select pick say see know"
)
# Words before such a verb whose value is the answer, unlike that of `my friend got`
_OWN_PERSONS = word_set(
    "we i one us let to and so thus hence therefore then finally must can now also just simply"
    " indeed eventually you solving simplifying adding by only clearly easily immediately thereby"
    " altogether overall"
)
_CONNECTIVES = word_set(
    "so thus hence therefore then finally namely only exactly precisely simply just indeed"
    " altogether and answer answers result results solution solutions value choice letter option"
    " total totals"
)
# Subjects of `gives` and `is` whose value is the answer
_OWN_SUBJECTS = QUANTITIES | word_set(
    "it this that these which what there here we i answer answers result results solution solutions"
    " value values total totals sum number numbers count amount product quotient difference"
    " remainder expression expressions equation equations formula formulas theorem identity"
    " integral series limit root roots term terms coefficient coefficients digit digits ways"
    " calculation computation simplification substitution algebra recurrence induction condition"
    " conditions constraint constraints case cases method step steps fraction determinant quantity"
    " exponent degree range minimum maximum length side sides point points set units function"
    " derivative rule law side everything both inequality symmetry definition all simplifies"
    " evaluates equality line pattern rate ratio percentage"
)
# Words of a clause whose value somebody else states, or nobody
_DISOWNING = word_set(
    "trap tempting tempted temptation careless naive flawed mistake mistakes mistaken error errors"
    " erroneous friend friends student students solver solvers people someone somebody everyone"
    " everybody others guess guessed guesses decoy distractor distractors reject rejected rejects"
    " discard discarded previous previously earlier initially originally initial attempt book claim"
    " claims claimed might may could if unless suppose supposing supposedly imagine ignoring ignore"
    " forgetting forgot forget forgotten neglecting omitting overlooking misreading assuming"
    " another invalid fake bogus spurious extraneous faulty overcounting overcount undercounting"
    " bait pitfall usually often typically commonly he she they his her their instead allegedly"
    " apparently pretend had naively carelessly wrongly mistakenly incorrectly falsely believed"
    " thought plausible hasty sloppy beginners beginner classmate teacher colleague opponent"
    " skeptic shortcut misconception fallacy pseudo red herring placeholder example sample"
)
_HER_OWN = frozenset(
    ("it's", "that's", "let's", "here's", "there's", "what's", "today's", "problem's", "question's")
)
_POSSESSIVE = re.compile(r"[a-z]+['’]s$")
# A value that a text behind a box states
_LATER_ANSWER = re.compile(
    r"\b(?:the |our |my )?(?:true |real |actual |correct |right |final |proper"
    r" )?(?:answer|value|result|solution) "
    r"(?:is|equals|=)(?: actually| really| in fact)?[: ]+(?P<value>[$\\({\[]*[-+−]?[\d.\\].*)",
    re.IGNORECASE,
)
_DENYING = word_set(
    "not never cannot nor neither no wrong incorrect false doubt unlikely impossible"
)
_CHANGING = NO_UNIT - word_set(
    "in as for on by with which where when that because since so to of from after at the this it"
    " its we he she they and each every per there then these those while left left total between"
    " among correct right you i a"
)
_AND_MORE = re.compile(
    r"and (?:a|one|two|three)[ -]?(?:half|halves|thirds?|quarters?)|at (?:most|least)\b|per"
    r" ?mill?e?\b|ppm\b"
    r"|basis points?\b|parts? per\b",
    re.IGNORECASE,
)
_AS_WANTED = re.compile(
    r"(?:is|was) (?:what (?:we|you|they|I|was|is|the (?:question|problem))|correct|right"
    r"|(?:the|our|my) (?:final |correct |desired )?answer)\b",
    re.IGNORECASE,
)


def with_context(first: Box, last: Box, contents: str) -> str:
    """Return the contents of neighboring boxes with all that belongs to their value: the rest of a
    formula, a unit, words.

    A formula that ends in `=` before the box states the content. Other words and signs stay in the
    result, where whoever reads it finds another value, or none.
    """
    line_before = _line_before(first)
    line_after = last.text[last.end : last.end + _AFTER].partition("\n")[0]
    start, is_open = _formula_start(line_before)
    if is_open:
        formula = line_before[start:]
        formula_after, words = _rest_of_open_formula(line_after)
    else:
        formula = _FORMULA_BEFORE.search(line_before, start)[0]  # type: ignore[index]
        formula_after = _FORMULA_AFTER.match(line_after)[0]  # type: ignore[index]
        words = line_after[len(formula_after) :].lstrip(" $*_\\)]}")
    is_formula = re.search(r"[^\s.,:;!?*_$`{(\"'，：。；]", formula) is not None
    subject, value = _value(formula, formula_after, contents, is_open=is_open)
    later = _LATER_ANSWER.search(line_after)
    if later and "boxed" not in later["value"]:
        return later["value"]
    clause = _clause(line_before[: len(line_before) - len(formula)] if is_formula else line_before)
    if not subject:
        subject = _named_subject(line_before)
    statement = f"{subject} = {value}" if subject else value
    is_statement = is_formula and not is_prose(clause)
    if not is_statement and not _states(clause):
        statement = f"{clause.strip(' *_$')} {statement}"
    sentence = _SENTENCE_END.split(line_after, maxsplit=1)[0] + _first_end(line_after)
    if "?" in sentence or "？" in sentence:
        statement = f"{statement}?"  # a question states nothing
    following = words if denies(words) else _words_after(words)
    return " ".join(f"{statement} {following}".split())


def _rest_of_open_formula(line_after: str) -> tuple[str, str]:
    """Return the text up to the end of the formula that the box is in, and the text behind it."""
    for delimiter in _DELIMITER.finditer(line_after):
        if delimiter[0] != "\\$":
            return line_after[: delimiter.start()], line_after[delimiter.end() :]
    return line_after, ""


def _named_subject(line_before: str) -> str:
    """Return the quantity or the letter that the text before a box equates with it, or nothing."""
    sentence = _SENTENCE_END.split(line_before)[-1].strip()
    name = _QUANTITY.search(sentence) or _NAME_IS.search(line_before)
    return name["name"] if name else ""


def _first_end(text: str) -> str:
    """Return the sign at the end of the first sentence of a text."""
    end = _SENTENCE_END.search(text)
    return end[0] if end else ""


def _clause(prose: str) -> str:
    """Return the last clause of a text; of a label before a colon the label, unless it only
    announces an answer.
    """
    prose = _AFTER_BOX.sub("", prose)
    *earlier_clauses, clause = _CLAUSE_END.split(prose)
    if is_prose(prose):
        return _SENTENCE_END.split(prose)[-1]
    if clause.strip(" *_$\t") or not earlier_clauses:
        return clause
    prose = prose.rstrip(" *_$\t")
    label = _CLAUSE_END.split(prose[:-1])[-1]
    if prose.endswith(":") and _is_disowned(_words_of(label)):
        return f"{label}:"
    return clause


def _words_of(text: str) -> list[str]:
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]


def _is_disowned(words: Sequence[str]) -> bool:
    """Return True if a clause denies its value or gives it to somebody else: `my friend got`,
    `Bob's answer`.
    """
    if any(word in _DENYING or word.endswith("n't") for word in words[-_MAX_DISTANCE:]):
        return True
    for word in words:
        if word in _DISOWNING:
            return True
        if _POSSESSIVE.match(word) and word not in _HER_OWN:
            return True
    return False


def _line_before(box: Box) -> str:
    """Return the text before a box on its line, and the line before it if its formula continues."""
    *lines, line = box.text[max(0, box.start - _BEFORE) : box.start].split("\n")
    if not line.strip(" $") and lines and _CONTINUES.search(lines[-1]):
        line = f"{lines[-1]} {line}"
    bullet = _BULLET.match(line)
    return line[bullet.end() if bullet else 0 :]


def _formula_start(text: str) -> tuple[int, bool]:
    r"""Return where the last formula in `$` or `\(` starts that is not closed, else where the last
    one ends; and which.
    """
    start = 0
    is_open = False
    for delimiter in _DELIMITER.finditer(text):
        if delimiter["toggle"] or delimiter["side"]:
            start = delimiter.end()
            is_open = delimiter["side"] in ("(", "[") if delimiter["side"] else not is_open
    return start, is_open


def _value(formula: str, suffix: str, contents: str, *, is_open: bool) -> tuple[str, str]:
    """Return the left side of the equation that a box ends, if it is a name or an expression, and
    the value.

    Args:
        formula: The formula before the box.
        suffix: The formula behind it.
        contents: What is in the box.
        is_open: Whether the formula began in signs of mathematics, which close it.
    """
    start, depth, relations = _last_statement(formula)
    suffix = _value_end(suffix, depth, is_open=is_open)
    suffix = suffix.rstrip(" *_.`\"'" if is_open else " *_.!`\"'")
    suffix = _MODULUS.sub("", suffix, count=1)
    subject = ""
    if relations and relations[-1][0] in _EQUAL:
        subject = formula[start : relations[0].start()].strip(" &*")
        start = relations[-1].end()
    prefix = formula[start:].strip(" &" if is_open else " *_`\"'&")
    value = _with_neighbours(prefix, contents, suffix)
    return subject if _PLAIN_SIDE.fullmatch(subject) else "", value


def _last_statement(formula: str) -> tuple[int, int, list[re.Match[str]]]:
    """Return where the last statement of a formula starts, how many brackets are open at its end,
    and its relations outside of brackets.
    """
    start = 0
    depth = 0
    relations: list[re.Match[str]] = []
    for separator in _SEPARATOR.finditer(formula):
        depth += bool(separator["open"]) - bool(separator["close"])
        if (separator["cut"] and depth == 0) or depth < 0:
            start = separator.end()
            relations = []
            depth = 0
        elif separator["relation"] and depth == 0:
            relations.append(separator)
    return start, max(0, depth), relations


def _value_end(suffix: str, depth: int, *, is_open: bool) -> str:
    """Return the part of the formula behind a box that belongs to its value."""
    for separator in _SEPARATOR.finditer(suffix):
        depth += bool(separator["open"]) - bool(separator["close"])
        ends = separator["cut"] or separator["relation"] in ("=", "\\approx", "≈")
        if (ends and depth <= 0) or (depth < 0 and not is_open):
            return suffix[: separator.start()]
    return suffix


def _with_neighbours(prefix: str, contents: str, suffix: str) -> str:
    """Return the content of a box with what stands before and behind it, in braces if it would
    join them.
    """
    is_member = prefix.endswith(_MEMBER)
    is_alone = not prefix and not suffix.strip()
    touches = _JOINS_BEFORE.search(prefix) or _JOINS_AFTER.match(suffix)
    is_apart = is_alone or is_member or _ONE_TOKEN.fullmatch(contents)
    if not is_apart or (touches and not is_member):
        contents = f"{{{contents}}}"
    is_sign = prefix in ("-", "−", "+") or prefix.endswith("{")
    space = "" if is_sign else " "
    return f"{prefix}{space}{contents}{suffix}".lstrip()


def _states(clause: str) -> bool:
    """Return True if the words before a box leave its content the value."""
    if is_prose(clause):
        return False
    words = _words_of(clause)
    while words and words[-1] in _PASSED_OVER:
        words.pop()
    if _is_disowned(words):
        return False
    if not words or _ENDS_IN_COMMA.search(clause):
        return True
    if " ".join(words[-2:]) in _STATING_PAIRS:
        return _has_own_subject(words[:-2], words[-2])
    return words[-1] in _STATING and _has_own_subject(words[:-1], words[-1])


def _has_own_subject(subject_words: Sequence[str], verb: str) -> bool:
    """Return True if the words before a verb name the answer or those who give it: `we`, `the
    answer`, `adding these`.
    """
    if verb in _CONNECTIVES or verb in ("has", "have", "having") or not subject_words:
        return True
    if verb in _OF_PERSONS:
        return (
            subject_words[-1] in _OWN_PERSONS
            or subject_words[0] in ("we", "i")
            or subject_words[-2:-1] in (["we"], ["i"])
        )
    is_letter = any(len(word) == 1 for word in subject_words)
    is_gerund = any(word.endswith("ing") and len(word) > 4 for word in subject_words[:3])
    return is_letter or is_gerund or not _OWN_SUBJECTS.isdisjoint(subject_words)


def _words_after(text: str) -> str:
    """Return the unit that follows a box, or the clause if it begins with a word that changes or
    denies a value.
    """
    text = text.lstrip(" $*_")
    if text[:1] in ("%", "?"):
        return text[0]
    if text.startswith("\\%"):
        return "%"
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    if is_prose(text[:1]):
        return sentence
    word = _WORD.match(text)
    if word is None:
        return ""
    if word[0].lower() in FOLLOWING or is_prose(sentence[:_MAX_PROSE]):
        return sentence
    changes = word[0].lower() in _CHANGING or _AND_MORE.match(text)
    if changes and not _AS_WANTED.match(text):
        return re.split(r"[.,;:!?\n]", text, maxsplit=1)[0]
    return words_of_unit(text)
