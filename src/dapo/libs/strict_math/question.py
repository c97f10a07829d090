"""The part of a question in reading its answers: the nouns that it counts, and the phrases that it
uses.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from .asked import asked_expressions
from .asked_units import AskedUnits
from .units import Unit, canonical, is_unit
from .vocabulary import CARDINALS, DERIVED, NEUTRAL, QUANTITIES, word_set

_MAX_CHARS = 20_000
_MAX_COUNTED = 500
# A text with fewer words is no question whose words an answer could quote
_MIN_WORDS = 3
_WORD = re.compile(r"\d+|[A-Za-z]+(?:['’]s?\b)?|[?.!](?=\s|$)|\n")
_SENTENCE = re.compile(r"(?:[^.?!\n]|[.?!](?=\S))+[.?!]?")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_ENDS = frozenset("?.!\n")
_ASKING = word_set(
    "what find how which who when where compute determine calculate evaluate express give simplify"
    " solve ?"
)
DETERMINERS = word_set("a an the his her its their our your my this that these those each every")
_LIGHT = DETERMINERS | word_set("is are was were do does did")
_HOW_MANY = re.compile(r"\b(?:how (?:many|much)|number of) ", re.IGNORECASE)
_STARTS = word_set("what which find compute determine calculate evaluate give express state")
_EXTREMES = (
    "smallest|largest|least|greatest|minimum|maximum|lowest|highest|biggest|shortest|longest"
)
_OF_SEVERAL = r"(?:two|three|four|five|six|seven|eight|nine|ten|\d{1,3})"
_EXTREME = re.compile(
    rf"(?:the )?(?P<which>{_EXTREMES})"
    rf"(?P<of> (?:of|among) (?:the|these|those|all|all the|all these)(?: {_OF_SEVERAL})?(?="
    r" [a-z]+s$))?"
    r"(?: (?:possible|positive|integer|value of))* \$?(?P<thing>[a-z]+)\$?",
    re.IGNORECASE,
)
_PASSED_OVER = word_set(
    "possible positive integer value of given listed following two three four five six seven eight"
    " nine ten"
)
_QUESTION_WORDS = ("what", "which", "much", "how")
_IS = word_set("is are was were")
_JOINING = word_set(
    "of in that which who to for from with by and at on there is are left remaining remain has have"
)
_LATEX_MARKS = re.compile(r"[\s\\{}$*]|\\(?:left|right|cdot|,|;|!)")
_FUNCTION = re.compile(r"(?P<name>[A-Za-z])\((?P<argument>[^()]*)\)$")
_ONE_LETTER = re.compile(r"(?<![A-Za-z\\'’])(?!a [a-z]|A [a-z]|I [a-z])[A-Za-z](?![A-Za-z'’])")
_FIGURE = re.compile(r"(?<![A-Za-z])[A-Z]{2,8}(?![A-Za-z])")
_ASKS_EQUATION = re.compile(
    r"\bequations? (?:of|for|that (?:describes|represents)|describing|representing)\b",
    re.IGNORECASE,
)
_ASKS_SOLUTION = re.compile(r"\bsolve|\bsolutions?\b|\broots?\b", re.IGNORECASE)
_BASE_NAMES = {"2": "binary", "8": "octal", "16": "hexadecimal"}
_ONE_OF_SEVERAL = re.compile(r"\b(?:each|every|one|a|an|per|other)\b", re.IGNORECASE)
_PRONOUNS = word_set("he she they his her their him them who")
_REFERRING = word_set("he she they it him her them their his its")
_Phrase: TypeAlias = Sequence[tuple[str, bool]]  # words, each with whether it is a possessive
_PERSONS = word_set(
    "people person child man woman boy girl student teacher friend worker player team family"
    " customer farmer runner driver member brother sister mother father passenger guest employee"
    " cyclist couple"
)
_CAPITALIZED = re.compile(r"\b[A-Z][a-z]{2,}\b")
_OPENING_WORDS = (
    _ASKING
    | DETERMINERS
    | word_set(
        "if let given suppose there all for in on at while two three four five six seven eight nine"
        " ten one and or but assume consider two solve write show state hint note answer then after"
        " before when where both some each no of factor expand convert round prove use it as with"
        " from to by during"
    )
)
_HEDGES = word_set(
    "if unless whether because since maybe perhaps possibly probably about around approximately"
    " nearly almost not no never or either but except should could may might must guess assume"
    " suppose let"
)
"""Words with which a sentence is no statement of its number, even where the question has them."""
_AT_BOUND = re.compile(r"\bat (?:least|most)\b", re.IGNORECASE)
_EACH = word_set("each every one another")
_COMPARED = word_set("more fewer less longer farther further taller older faster heavier")
_MORE = word_set("more fewer less")
_SHOULD = word_set("should must need needs can will would")
_MODALS = word_set("should could must")
_NEEDS_TO = re.compile(r"\bneeds? to\b(?= )")
_PAIR = re.compile(r"([a-z]{2,}) and (?:(?:the|a|an|his|her|its|their|\d+) )?([a-z]{2,})")
# `If Tom is 3,` of `If Tom is 3, how old is Ann?`, and ` if Tom is 3` behind the question
_CONDITION = re.compile(
    r"\b(?:if|when|given that|assuming)\b[^.?!]{0,300}?,(?=[^,.?!]{0,300}\b(?:how|what)\b)"
    r"|,? \bif\b[^.?!,]{0,300}",
    re.IGNORECASE,
)
_FEW_WORDS = 3
_BE = word_set("is are was were be")
_HAVE = word_set("has have had")
_AUXILIARIES = word_set("do does did will would can could should must")
_CAPITALIZED_IN = re.compile(r"(?<=\S )[A-Z][a-z]+|^(?!The |A |An |There )[A-Z][a-z]+")
_OF_THE_GIVEN = re.compile(r" of the (?:given|listed|following) (?=[a-z]+s$)", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """The text of a question; an empty text is a question that is not known."""

    text: str = ""

    @cached_property
    def _sentences(self) -> list[list[str]]:
        """The words of each sentence in lower case, with its final sign."""
        sentences: list[list[str]] = [[]]
        for word in _WORD.findall(self.text[-_MAX_CHARS:]):
            sentences[-1].append(word.lower().replace("’", "'"))
            if word in _ENDS:
                sentences.append([])
        return [sentence for sentence in sentences if sentence]

    @cached_property
    def words(self) -> frozenset[str]:
        """The singular of every word."""
        return frozenset(
            _singular(word)
            for sentence in self._sentences
            for word in sentence
            if word not in _ENDS
        )

    @property
    def is_known(self) -> bool:
        """True if the text has enough words to be quoted."""
        return len(self.words) >= _MIN_WORDS

    @cached_property
    def asked(self) -> frozenset[str]:
        """The nouns after `how many`, among them words that change a number elsewhere: `how many
        times`, `pairs`.
        """
        return self._units.asked_nouns

    @cached_property
    def _units(self) -> AskedUnits:
        return AskedUnits(self.text[-_MAX_CHARS:], self._asking_text)

    def contradicts(self, unit: Unit) -> bool:
        """Return True if the question excludes a unit: centimeters where it asks for meters,
        minutes for a number of seats.
        """
        return self.is_known and self._units.exclude(unit)

    def contradicts_quantity(self, quantity: str) -> bool:
        """Return True if the question asks for a quantity of other dimensions than the named one,
        such as `perimeter`.
        """
        asks_in_words = self.is_known and not asked_expressions(self.text).texts
        return asks_in_words and self._units.exclude_quantity(quantity)

    @cached_property
    def _compact(self) -> str:
        """The text without spaces and marks of LaTeX."""
        return _LATEX_MARKS.sub("", self.text[-_MAX_CHARS:])

    def writes(self, expression: str) -> bool:
        """Return True if an expression stands in the question, or a value of its function: `f(3)`,
        where it has `f(x)`.
        """
        compact = _LATEX_MARKS.sub("", expression)
        function = _FUNCTION.match(compact)
        if function and function["argument"].isalnum() and f"{function['name']}(" in self._compact:
            return True
        place = self._compact.find(compact)
        if len(compact) > 1:
            return place >= 0
        while place >= 0:
            # a letter between two letters is a part of a word
            end = place + len(compact)
            neighbours = self._compact[max(0, place - 1) : place] + self._compact[end : end + 1]
            if not neighbours.isalpha():
                return True
            place = self._compact.find(compact, place + 1)
        return False

    def uses_letters(self, names: frozenset[str]) -> bool:
        """Return True if the question has all these variables: single letters, or points of its
        figures.
        """
        plain = {name.split("_")[0].lstrip("\\") for name in names}
        return all(plain) and plain <= self._letters

    @cached_property
    def _letters(self) -> frozenset[str]:
        letters = set(_ONE_LETTER.findall(self.text[-_MAX_CHARS:]))
        figures = _FIGURE.findall(self.text[-_MAX_CHARS:])
        return frozenset(letters | {letter for figure in figures for letter in figure})

    @cached_property
    def asks_for_equation(self) -> bool:
        """True if the question asks for an equation, all of whose forms are right: `the equation of the
        line`.
        """
        if not _ASKS_EQUATION.search(self._asking_text):
            return False
        return _ASKS_SOLUTION.search(self._asking_text) is None

    def measures(self, quantity: str) -> bool:
        """Return True if the question asks for a quantity of the same dimensions as the named one: a price,
        where it asks for a cost.
        """
        return self._units.asks_quantity(quantity)

    @cached_property
    def asks_for_chance(self) -> bool:
        """True if the question asks for a probability or an expected value, which answers call `P(A)` and
        `E(X)`.
        """
        return re.search(r"probab|chance|likel|expect|odds", self.text, re.IGNORECASE) is not None

    @cached_property
    def asks_for_remainder(self) -> bool:
        """True if the question asks for a remainder, or works with one."""
        return re.search(r"remainder|\bmod|modul[ou]", self.text, re.IGNORECASE) is not None

    def asks_for_base(self, base: str) -> bool:
        """Return True if the question asks for the digits in this base."""
        name = _BASE_NAMES.get(base, base)
        if name.isdigit() and int(name) < len(CARDINALS):
            name = CARDINALS[int(name)]
        pattern = rf"\bbase[\s$-]*(?:{base}|{name})\b|\b{name}\b"
        return re.search(pattern, self._asking_text, re.IGNORECASE) is not None

    def has(self, words: Sequence[str]) -> bool:
        """Return True if all these words occur in the question."""
        return all(_singular(word) in self.words for word in words)

    def asks_about(self, words: Sequence[str]) -> bool:
        """Return True if all these words occur in the sentences that ask; `that` and the like may
        stand between.
        """
        asking = {_singular(word) for sentence in self._asking_sentences for word, _ in sentence}
        verbs = {_verb(word) for sentence in self._asking_sentences for word, _ in sentence}
        for word in words:
            if word in _JOINING or word in DETERMINERS:
                continue
            if _singular(word) not in asking and _verb(word) not in verbs:
                return False
        return True

    def repeats(self, before: str, behind: str, *, is_money: bool = False) -> bool:
        """Return True if a sentence repeats the sentences that ask, with a number in the place of
        `how many`: `It took Ann 30 months` answers `How many months did it take Ann?`.

        Every word must be one of theirs or change nothing. Where they refer to somebody (`she`),
        the names of the whole question are theirs. A quantity must be the one that is asked for:
        `Its radius is 3` does not tell the area.

        Args:
            before: The words before the number, with the verb.
            behind: Those behind it, which begin with what the question counts, or with a unit.
            is_money: True if the number has the sign of a currency.
        """
        subject = _lower_words(before)
        rest = _lower_words(behind)
        is_measured = is_money or (bool(rest) and is_unit(rest[0]))
        if not self._states(before, subject, is_measured) or not self._counts_first(rest):
            return False
        words = subject + rest
        hedges = _HEDGES - (_MODALS & self._asking_words)
        if not hedges.isdisjoint(words) or _AT_BOUND.search(before):
            return False
        if self._tells_half(words) or self._tells_of_another(before):
            return False
        if not _EACH.isdisjoint(words) and not self._asks_for_one:
            return False
        if "had" in words and not self.asks_for_past:
            return False
        if "than" in rest:
            place = rest.index("than")
            if not self._compares_with(rest[place + 1 :]):
                return False
            words = subject + rest[:place]
        is_age = rest[:1] in (["years"], ["year"]) and "old" in self._asking_words
        if is_age or (rest and self._units.name(rest[0])):
            words.remove(rest[0])  # the comparison judges the unit
        if not _SHOULD.isdisjoint(self._asking_words):
            words = _NEEDS_TO.sub("", " ".join(words)).split()
        return all(self._says(word) for word in words)

    def _tells_half(self, words: Sequence[str]) -> bool:
        """Return True if words have one of two things that the question asks about together: `Ann`,
        where it has `Ann and Tom`.
        """
        singulars = set(map(_singular, words))
        return any(len(pair & singulars) == 1 for pair in self._pairs)

    @cached_property
    def _pairs(self) -> list[set[str]]:
        """The two words at each `and` of the clauses that ask."""
        pairs = _PAIR.findall(self._asking_clauses.lower())
        return [{_singular(first), _singular(second)} for first, second in pairs]

    def _tells_of_another(self, subject: str) -> bool:
        """Return True if a subject has a name that only the conditions have, where the clauses that
        ask have one: `Tom`, where the question is `If Tom is 3, how old is Ann?`.
        """
        asking = set(_CAPITALIZED_IN.findall(self._asking_clauses))
        words = set(re.findall(r"[a-z]+", self._asking_clauses.lower()))
        if not asking or not _REFERRING.isdisjoint(words):
            return False
        names = {name.lower() for name in _CAPITALIZED.findall(subject)}
        return not words.issuperset(names & self._all_names)

    @cached_property
    def _asking_clauses(self) -> str:
        """The sentences that ask, without the condition before or behind the question."""
        return _CONDITION.sub("", self._asking_text)

    def asks_with_number(self, text: str) -> bool:
        """Return True if a text begins with a number of a sentence that asks, with what it counts:
        `8 pens`.
        """
        words = _plain_words(text)[:2]
        return len(words) == 2 and any(words == pair for pair in self._asked_numbers)

    @cached_property
    def _asked_numbers(self) -> list[list[str]]:
        """The numbers of the sentences that ask, each with the word behind it."""
        words = _plain_words(self._asking_text)
        return [words[index : index + 2] for index, word in enumerate(words) if word.isdigit()]

    def gives(self, reason: str, *, in_asking: bool) -> bool:
        """Return True if the question has all the words and numbers of a reason, and if that hedges
        nothing.

        Args:
            reason: The reason for a conclusion.
            in_asking: True if the sentences that ask must have its words.
        """
        words = _lower_words(reason)
        if not self.gives_numbers(reason) or not _HEDGES.isdisjoint(words):
            return False
        words = [word for word in words if word not in NEUTRAL and not word.isdigit()]
        if in_asking:
            return self.asks_about(words)
        verbs = {_verb(word) for word in self.words}
        return all(_singular(word) in self.words or _verb(word) in verbs for word in words)

    def gives_numbers(self, text: str) -> bool:
        """Return True if the question has all the numbers of a text."""
        return self._numbers.issuperset(_NUMBER.findall(text))

    def asks_with_numbers(self, text: str) -> bool:
        """Return True if the sentences that ask have all the numbers of a text."""
        return set(_NUMBER.findall(self._asking_text)).issuperset(_NUMBER.findall(text))

    @cached_property
    def _numbers(self) -> frozenset[str]:
        return frozenset(_NUMBER.findall(self.text[-_MAX_CHARS:]))

    def _states(self, before: str, subject: Sequence[str], is_measured: bool) -> bool:
        """Return True if words have a verb that the question has, or `is` with a name, a unit or the
        number of what is counted.
        """
        if not _BE.isdisjoint(subject):
            if is_measured or "there" in subject or self._names_count(subject):
                return True
            return _CAPITALIZED_IN.search(before) is not None
        if not _HAVE.isdisjoint(subject):
            return True
        verbs = {_verb(word) for word in self._asking_words}
        is_asked = not self._asking_words.isdisjoint(_AUXILIARIES)
        return any(_verb(word) in verbs and (is_asked or _verb(word) != word) for word in subject)

    def _names_count(self, subject: Sequence[str]) -> bool:
        """Return True if words name the number of what the question counts: `the number of cups`,
        where it has `how many cups`.
        """
        words = [word for word in subject if word not in DETERMINERS]
        if "of" not in words:
            return False
        place = words.index("of")
        thing = words[place + 1 : place + 2]
        if words[:place] not in (["number"], ["total", "number"]):
            return False
        return any(counted[:1] == list(map(_singular, thing)) for counted in self._counted)

    def _counts_first(self, rest: Sequence[str]) -> bool:
        """Return True if the words behind a number begin with a unit, or with what the question
        counts.
        """
        if not rest or rest[0] in NEUTRAL or rest[0] == "than" or is_unit(rest[0]):
            return True
        first = list(map(_singular, rest[:2]))
        if first[1:] and first[1] in _MORE:
            first.reverse()  # `5 laps more` for `how many more laps`
            return any(counted[:2] == first for counted in self._counted)
        return any(counted and first[0] == counted[0] for counted in self._counted)

    def _says(self, word: str) -> bool:
        """Return True if a word changes nothing, or stands in a sentence that asks."""
        if word in NEUTRAL:
            return True
        if len(word) == 1 or word.isdigit():
            return False
        counted = {first for words in self._counted for first in words[:_FEW_WORDS]}
        if word == "number":
            return "many" in self._asking_words
        if word == "amount":
            return "much" in self._asking_words
        if word in QUANTITIES | DERIVED and word not in counted:
            return self.measures(word)
        return word in self._names_referred_to or self.asks_about([word])

    @cached_property
    def _names_referred_to(self) -> frozenset[str]:
        """The names of the question, in lower case, where the sentences that ask refer to one."""
        if self._asking_words.isdisjoint(_REFERRING):
            return frozenset()
        return self._all_names

    @cached_property
    def _all_names(self) -> frozenset[str]:
        """The names of the question, in lower case."""
        names = _CAPITALIZED.findall(self.text[-_MAX_CHARS:])
        return frozenset(name.lower() for name in names) - _OPENING_WORDS

    @property
    def _asks_for_one(self) -> bool:
        return not self._asking_words.isdisjoint(("each", "every", "per", "one"))

    @property
    def asks_for_past(self) -> bool:
        """True if a sentence asks what was: what somebody had, not what they have."""
        return not self._asking_words.isdisjoint(("had", "did", "originally", "was", "were"))

    def _compares_with(self, words: Sequence[str]) -> bool:
        """Return True if the question compares with these words: those behind its `than` or
        `compared`, or any where it only asks for `more`.
        """
        words = [word for word in words if word not in NEUTRAL]
        than = next((word for word in ("than", "compared") if word in self._asking_words), None)
        if than is None:
            return not self._asking_words.isdisjoint(_COMPARED) and self.has(words)
        for sentence in self._sentences:
            if than in sentence and not _ASKING.isdisjoint(sentence):
                behind = {_singular(word) for word in sentence[sentence.index(than) + 1 :]}
                if all(_singular(word) in behind for word in words):
                    return True
        return False

    @cached_property
    def _asking_words(self) -> frozenset[str]:
        """The words of the sentences that ask, in lower case."""
        return frozenset(re.findall(r"[a-z]+", self._asking_text.lower()))

    @cached_property
    def has_person(self) -> bool:
        """True if it speaks of somebody, whom an answer may call `he`, `she` or `they`."""
        if not _PRONOUNS.isdisjoint(word for sentence in self._sentences for word in sentence):
            return True
        if any(_singular(word) in _PERSONS for sentence in self._sentences for word in sentence):
            return True
        names = _CAPITALIZED.findall(self.text[-_MAX_CHARS:])
        return any(name.lower() not in _OPENING_WORDS for name in names)

    @property
    def asks_for_each(self) -> bool:
        """True if a sentence that asks is about each of several things, or about one of them."""
        return _ONE_OF_SEVERAL.search(self._asking_text) is not None

    def counts(self, words: Sequence[str]) -> bool:
        """Return True if the question asks for a number of things, these among them."""
        return "number" in self.words or not self._units.things.isdisjoint(map(_singular, words))

    def quotes(self, phrase: str) -> bool:
        """Return True if a noun phrase is the one whose value the question requests, not one inside
        of another phrase.
        """
        phrase = _OF_THE_GIVEN.sub(" of these ", phrase.replace(" among ", " of "))
        extreme = _EXTREME.fullmatch(phrase)
        if extreme is None:
            return self._quotes(phrase)
        which = extreme["which"].lower()
        thing = extreme["thing"].lower()
        # `the largest numbers` are several, unlike `the largest of these numbers`
        is_one = bool(extreme["of"]) or not extreme["thing"].endswith("s")
        return (is_one and self._asks_extreme(which, thing)) or self._quotes(phrase)

    def _quotes(self, phrase: str) -> bool:
        """Return True if a sentence that asks has the phrase, or its head for a thing it names."""
        head, of, thing = phrase.partition(" of ")
        content = _content(_WORD.findall(phrase))
        forms = [content] if content else []
        if len(content) > 1 and not of:
            # `the largest number`, where the question has `the largest of these numbers`
            noun, _ = content[-1]
            forms.append([*content[:-1], ("of", False), (f"{noun}s", False)])
        head_content = _content(_WORD.findall(head)) if of else []
        thing_words = [word for word, _ in _content(thing.split())]
        for sentence in self._asking_sentences:
            if any(_occurs(sentence, form) for form in forms):
                return True
            if head_content and _occurs_alone(sentence, head_content) and self.has(thing_words):
                return True  # `the area of the rectangle`, where the question has `its area`
        return False

    def _asks_extreme(self, which: str, thing: str) -> bool:
        """Return True if the question requests the smallest, say, of some things, however it names
        them.
        """
        for sentence in self._asking_sentences:
            for index in _starts(sentence, [(which, False)]):
                noun = _noun_behind(sentence, index)
                if noun is None and self.has([thing]):
                    return True
                if noun is not None and _singular(noun) == _singular(thing):
                    return True
        return False

    def restates(self, words: str) -> bool:
        """Return True if words after a number are those after `how many` in the question, all or
        the first of them.
        """
        answer_words = _plain_words(words)
        if not answer_words or any(word.isdigit() for word in answer_words):
            return False
        return any(counted[: len(answer_words)] == answer_words for counted in self._counted)

    @cached_property
    def _counted(self) -> list[list[str]]:
        """The words after each `how many`."""
        starts = (request.end() for request in _HOW_MANY.finditer(self._asking_text))
        return [_plain_words(self._asking_text[start : start + _MAX_COUNTED]) for start in starts]

    def ends_with(self, words: str) -> bool:
        """Return True if a sentence that asks ends with these words, at least two of them."""
        answer_words = _plain_words(words)
        size = len(answer_words)
        return size > 1 and any(ending[-size:] == answer_words for ending in self._endings)

    @cached_property
    def _endings(self) -> list[list[str]]:
        return [
            _plain_words(" ".join(word for word, _ in sentence[-_MAX_COUNTED:]))
            for sentence in self._asking_sentences
        ]

    def names_actor(self, phrase: str) -> bool:
        """Return True if a phrase names somebody or something of the question."""
        words = [word for word, _ in _content(phrase.split())]
        if not words or not self.has(words) or self._tells_half(words):
            return False
        asking = {word for sentence in self._asking_sentences for word, _ in sentence}
        # a pronoun may stand for the name
        return not asking.isdisjoint(_REFERRING) or asking.issuperset(words)

    def asks_with(self, verb: str) -> bool:
        """Return True if a sentence that asks has this verb, in any of its forms."""
        forms = {_verb(word) for sentence in self._asking_sentences for word, _ in sentence}
        return _verb(verb) in forms

    @cached_property
    def _asking_text(self) -> str:
        """The sentences that ask, as they stand in the text."""
        sentences = list(filter(str.strip, _SENTENCE.findall(self.text[-_MAX_CHARS:])))
        asking = []
        for sentence in sentences:
            has_verb = not _ASKING.isdisjoint(re.findall("[a-z]+", sentence.lower()))
            if has_verb or sentence.rstrip().endswith("?"):
                asking.append(sentence)
        return " ".join(asking or sentences[-1:])

    @cached_property
    def _asking_sentences(self) -> list[list[tuple[str, bool]]]:
        """The sentences with a question mark or a verb that asks, and the last one; see
        `_content`.
        """
        # a question mark is one of the words that ask
        asking = [words for words in self._sentences if not _ASKING.isdisjoint(words)]
        return [
            _content([word for word in words if word not in _ENDS])
            for words in asking or self._sentences[-1:]
        ]


def _lower_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without possessive endings."""
    words = (word.lower().replace("’", "'") for word in _WORD.findall(text) if word not in _ENDS)
    return [word.removesuffix("'s").rstrip("'") for word in words]


def _plain_words(text: str) -> list[str]:
    """Return the singulars of the words of a text without determiners and forms of `to be` and `to
    do`.
    """
    words = (word.lower().replace("’", "'") for word in _WORD.findall(text))
    return [_singular(word) for word in words if word not in _LIGHT]


def _content(words: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the words without determiners, each with whether it is a possessive."""
    plain = (word.lower().replace("’", "'") for word in words)
    return [
        (word.removesuffix("'s").rstrip("'"), word.endswith(("'s", "s'")))
        for word in plain
        if word not in DETERMINERS
    ]


def _starts(sentence: _Phrase, phrase: _Phrase) -> Iterator[int]:
    """Yield the indices at which a phrase stands in a sentence as the thing that is asked for."""
    words = [word for word, _ in phrase]
    for index in range(len(sentence) - len(words) + 1):
        if [word for word, _ in sentence[index : index + len(words)]] != words:
            continue
        # `Tom's` in `What is Tom's age?`
        start = index - 1 if index and sentence[index - 1][1] else index
        preceding = [word for word, _ in sentence[max(0, start - 2) : start]]
        is_first = not preceding or preceding[-1] in _STARTS
        if is_first or (preceding[-1] in _IS and preceding[0] in _QUESTION_WORDS):
            yield index


def _occurs(sentence: _Phrase, phrase: _Phrase) -> bool:
    return any(True for _ in _starts(sentence, phrase))


def _occurs_alone(sentence: _Phrase, phrase: _Phrase) -> bool:
    """Return True if a phrase stands in a sentence without an `of` behind it."""
    for index in _starts(sentence, phrase):
        end = index + len(phrase)
        if end == len(sentence) or sentence[end][0] != "of":
            return True
    return False


def _noun_behind(sentence: _Phrase, index: int) -> str | None:
    """Return the next word that is no adjective or number; None at the end of a sentence."""
    for word, _ in sentence[index + 1 :]:
        if word not in _PASSED_OVER and not word.isdigit():
            return word
    return None


def _singular(word: str) -> str:
    return canonical(word.removesuffix("'s").rstrip("'"))


_IRREGULAR = {
    "was": "be", "were": "be", "is": "be", "are": "be", "been": "be", "began": "begin", "begun": "begin",
    "broke": "break", "broken": "break", "brought": "bring", "built": "build", "bought": "buy", "caught": "catch",
    "chose": "choose", "chosen": "choose", "came": "come", "did": "do", "done": "do", "does": "do", "drew": "draw",
    "drawn": "draw", "drank": "drink", "drunk": "drink", "drove": "drive", "driven": "drive", "ate": "eat",
    "eaten": "eat", "fell": "fall", "fallen": "fall", "fed": "feed", "found": "find", "flew": "fly", "flown": "fly",
    "got": "get", "gotten": "get", "gave": "give", "given": "give", "went": "go", "gone": "go", "goes": "go",
    "grew": "grow", "grown": "grow", "had": "have", "has": "have", "held": "hold", "kept": "keep", "knew": "know",
    "known": "know", "left": "leave", "lent": "lend", "lost": "lose", "made": "make", "met": "meet", "paid": "pay",
    "rode": "ride", "ridden": "ride", "rose": "rise", "risen": "rise", "ran": "run", "said": "say", "sold": "sell",
    "sent": "send", "sang": "sing", "sung": "sing", "slept": "sleep", "spoke": "speak", "spoken": "speak",
    "spent": "spend", "stood": "stand", "stole": "steal", "stolen": "steal", "swam": "swim", "swum": "swim",
    "took": "take", "taken": "take", "taught": "teach", "told": "tell", "thought": "think", "threw": "throw",
    "thrown": "throw", "wore": "wear", "worn": "wear", "won": "win", "wrote": "write", "written": "write",
}  # fmt: skip
"""Forms of irregular verbs, and their infinitives."""


def _verb(word: str) -> str:
    """Return what the forms of a verb share: `tak` of `took`, `takes` and `taking`."""
    return re.sub(r"(?<=[a-z]{2})(?:ing|ed|es|s|e)$", "", _IRREGULAR.get(word, word))
