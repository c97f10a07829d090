"""Parses a shell script to commands and words; nothing is run or expanded here."""

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Part:
    """A piece of a word."""

    kind: Literal["text", "variable", "command", "arithmetic"]
    text: str
    """The text; for a variable what stands within its braces; for the others the source of what is
    computed.
    """
    is_quoted: bool = False


Word: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value` or `name=(items)`."""

    name: str
    value: Word | tuple[Word, ...]
    is_added: bool = False
    is_array: bool = False
    index: str | None = None


@dataclass
class Simple:
    """A command with its words."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word | Assignment] = field(default_factory=list)
    heredocs: list[Word] = field(default_factory=list)


@dataclass(frozen=True)
class Branches:
    """`if`: each condition with its commands; `else` has no condition.

    `is_and_or`: of `a && b` and `a || b`.
    """

    line: int
    branches: tuple[tuple["Commands | None", "Commands"], ...]


@dataclass(frozen=True)
class Chain:
    """`first && then` or `first || then`."""

    line: int
    first: "Commands"
    then: "Commands"
    is_and: bool


@dataclass(frozen=True)
class Cases:
    """`case word in`: the patterns of each branch with its commands."""

    line: int
    word: Word
    branches: tuple[tuple[tuple[Word, ...], "Commands"], ...]


@dataclass(frozen=True)
class Loop:
    """`for name in words`, or `while` and `until`, which have no name."""

    line: int
    name: str
    words: tuple[Word, ...]
    body: "Commands"


@dataclass(frozen=True)
class Function:
    """A definition of a function."""

    line: int
    name: str
    body: "Commands"


@dataclass(frozen=True)
class Group:
    """`{ commands; }` or `( commands )`."""

    line: int
    body: "Commands"
    is_subshell: bool


@dataclass(frozen=True)
class Test:
    """`[[ words ]]` or `(( formula ))`."""

    line: int
    words: tuple[Word, ...]
    formula: str = ""


Command: TypeAlias = Simple | Branches | Chain | Cases | Loop | Function | Group | Test
Commands: TypeAlias = tuple[Command, ...]

MAX_DEPTH = 60
_OPERATORS = re.compile(r"&>>|&>|\|\||&&|;;&|;;|;&|\|&|<<<|<<-|<<|>>|>&|<&|<>|>\||[;&|<>()]")
_ENDS = {"then", "do", "done", "fi", "elif", "else", "esac", "}"}
_OPTION_LINE = re.compile(r"\n[ \t]*(?:#[^\n]*\n[ \t]*)*(?:\+{0,2}|~)\w+(?:\.\w+)+=")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=")
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}


class ShellParser:
    """A recursive descent over the text of a script.

    Raises ValueError with the line of what is not closed.
    """

    def __init__(self, text: str, line: int = 1) -> None:
        self.text = text.replace("\r\n", "\n")
        self.position = 0
        self.first_line = line
        self.depth = 0
        self.open_heredocs: list[tuple[str, bool, bool, Simple]] = []
        self.line_ends = [match.start() for match in re.finditer("\n", self.text)]

    @property
    def line(self) -> int:
        """The line at which the parser stands."""
        return self.first_line + bisect_left(self.line_ends, self.position)

    def parse(self) -> Commands:
        """All commands of the text."""
        commands = list(self._commands(frozenset()))
        # an end without a beginning: the rest is read all the same
        while self.position < len(self.text):
            self.position += 1
            commands += self._commands(frozenset())
        return tuple(commands)

    # --- commands

    def _commands(self, ends: frozenset[str]) -> Commands:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"line {self.line}: commands are nested deeper than {MAX_DEPTH}")
        commands: list[Command] = []
        while True:
            self._skip_blank(newlines=True)
            if self.position >= len(self.text):
                break
            sign = self._operator()
            if sign in (";", "&", "|", "|&", "&&", "||"):
                self.position += len(sign)
                continue
            if sign in (")", ";;", ";&", ";;&") or self._keyword() in ends:
                break
            command = self._and_or()
            if command is None:
                break
            commands.append(command)
        self.depth -= 1
        return tuple(commands)

    def _and_or(self) -> Command | None:
        left = self._pipeline()
        while left is not None:
            self._skip_blank()
            sign = self._operator()
            if sign not in ("&&", "||"):
                return left
            line = self.line
            self.position += 2
            self._skip_blank(newlines=True)
            right = self._pipeline()
            if right is None:
                return left
            left = Chain(line, (left,), (right,), sign == "&&")
        return None

    def _pipeline(self) -> Command | None:
        line = self.line
        commands: list[Command] = []
        while True:
            self._skip_blank(newlines=bool(commands))
            while self._keyword() in ("!", "time"):
                self._take_keyword()
                self._skip_blank()
                # of `! command` nobody knows here whether it succeeds
                commands.append(Simple(line, words=[(Part("text", "!"),)]))
            command = self._command()
            if command is None:
                break
            commands.append(command)
            self._skip_blank()
            if self._operator() not in ("|", "|&"):
                break
            self.position += len(self._operator())
        if len(commands) < 2:
            return commands[0] if commands else None
        return Group(line, tuple(commands), is_subshell=False)

    def _command(self) -> Command | None:
        line = self.line
        keyword = self._keyword()
        if self.text.startswith("((", self.position):
            return self._arithmetic_command()
        if self._operator() == "(":
            self.position += 1
            body = self._commands(frozenset())
            self._expect_sign(")", line)
            return self._with_redirections(Group(line, body, is_subshell=True))
        if keyword == "{":
            self._take_keyword()
            body = self._commands(frozenset(("}",)))
            self._expect("}", line)
            return self._with_redirections(Group(line, body, is_subshell=False))
        if keyword == "if":
            return self._with_redirections(self._if())
        if keyword in ("while", "until"):
            self._take_keyword()
            condition = self._commands(frozenset(("do",)))
            self._expect("do", line)
            body = self._commands(frozenset(("done",)))
            self._expect("done", line)
            return self._with_redirections(Loop(line, "", (), (*condition, *body)))
        if keyword in ("for", "select"):
            return self._with_redirections(self._for())
        if keyword == "case":
            return self._with_redirections(self._case())
        if keyword == "[[":
            return self._test()
        if keyword == "function":
            self._take_keyword()
            self._skip_blank()
            name = self._take_keyword()
            if self._after_blank("()"):
                self._skip_blank()
                self.position += 2
            return self._function(line, name)
        if match := re.compile(r"([\w.:-]+)[ \t]*\([ \t]*\)").match(self.text, self.position):
            self.position = match.end()
            return self._function(line, match[1])
        return self._simple()

    def _function(self, line: int, name: str) -> Command:
        self._skip_blank(newlines=True)
        body = self._command()
        return Function(line, name, () if body is None else (body,))

    def _if(self) -> Branches:
        line = self.line
        self._take_keyword()
        branches: list[tuple[Commands | None, Commands]] = []
        ends = frozenset(("elif", "else", "fi"))
        while True:
            condition = self._commands(frozenset(("then",)))
            self._expect("then", line)
            branches.append((condition, self._commands(ends)))
            keyword = self._take_keyword()
            if keyword == "else":
                branches.append((None, self._commands(ends)))
                keyword = self._take_keyword()
            if keyword == "fi":
                return Branches(line, tuple(branches))
            if keyword != "elif":
                raise ValueError(f"line {line}: `if` without `fi`")

    def _for(self) -> Loop:
        line = self.line
        self._take_keyword()
        self._skip_blank()
        name = ""
        words = list[Word]()
        if self.text.startswith("((", self.position):
            self._arithmetic_command()
        else:
            name = self._take_keyword()
            self._skip_blank(newlines=True)
            if self._keyword() == "in":
                self._take_keyword()
                while (word := self._word()) is not None:
                    words.append(word)
            else:
                words.append((Part("variable", "@", is_quoted=True),))
        self._skip_blank(newlines=True)
        if self._operator() == ";":
            self.position += 1
        self._skip_blank(newlines=True)
        self._expect("do", line)
        body = self._commands(frozenset(("done",)))
        self._expect("done", line)
        return Loop(line, name, tuple(words), body)

    def _case(self) -> Cases:
        line = self.line
        self._take_keyword()
        word = self._word() or ()
        self._skip_blank(newlines=True)
        self._expect("in", line)
        branches: list[tuple[tuple[Word, ...], Commands]] = []
        while True:
            self._skip_blank(newlines=True)
            if self._keyword() == "esac":
                self._take_keyword()
                return Cases(line, word, tuple(branches))
            if self._operator() == "(":
                self.position += 1
            patterns: list[Word] = []
            while (pattern := self._word()) is not None:
                patterns.append(pattern)
                self._skip_blank()
                if self._operator() != "|":
                    break
                self.position += 1
            self._expect_sign(")", line)
            branches.append((tuple(patterns), self._commands(frozenset(("esac",)))))
            if self._operator() in (";;", ";&", ";;&"):
                self.position += len(self._operator())

    def _test(self) -> Test:
        line = self.line
        self._take_keyword()
        words: list[Word] = []
        while True:
            self._skip_blank(newlines=True)
            if self.position >= len(self.text):
                raise ValueError(f"line {line}: `[[` without `]]`")
            sign = self._operator()
            if sign:
                self.position += len(sign)
                words.append((Part("text", sign),))
                continue
            word = self._word()
            if word == (Part("text", "]]"),):
                return Test(line, tuple(words))
            words.append(word or ())

    def _arithmetic_command(self) -> Test:
        line = self.line
        start = self.position
        self.position += 2
        depth = 2
        while depth and self.position < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[self.position], 0)
            self.position += 1
        if depth:
            raise ValueError(f"line {line}: `((` without `))`")
        return Test(line, (), self.text[start + 2 : self.position - 2])

    def _with_redirections(self, command: Command) -> Command:
        """A compound command; the words of its redirections say nothing about options."""
        redirections = Simple(self.line)
        while self._redirection(redirections):
            pass
        return command

    def _simple(self) -> Simple | None:
        self._skip_blank()
        command = Simple(self.line)
        start = self.position
        while True:
            if self._redirection(command):
                continue
            may_assign = not command.words or self._declares(command)
            if may_assign:
                assignment = self._assignment()
                if assignment is not None:
                    place: list[Assignment] | list[Word | Assignment] = (
                        command.words if command.words else command.assignments
                    )
                    place.append(assignment)
                    continue
            word = self._word()
            if word is None:
                break
            command.words.append(word)
        return None if self.position == start else command

    @staticmethod
    def _declares(command: Simple) -> bool:
        first = command.words[0]
        return isinstance(first, tuple) and len(first) == 1 and first[0].text in _DECLARING

    def _assignment(self) -> Assignment | None:
        self._skip_blank()
        match = _ASSIGNMENT.match(self.text, self.position)
        if match is None:
            return None
        line = self.line
        self.position = match.end()
        name = match[1]
        index = match[2]
        plus = match[3]
        if self._peek() != "(":
            return Assignment(name, self._word(is_value=True) or (), bool(plus), index=index)
        self.position += 1
        items: list[Word] = []
        while True:
            self._skip_blank(newlines=True)
            if self._peek() == ")":
                self.position += 1
                return Assignment(name, tuple(items), bool(plus), is_array=True)
            item = self._word()
            if item is None:
                raise ValueError(f"line {line}: the array {name} is not closed")
            items.append(item)

    def _redirection(self, command: Simple) -> bool:
        self._skip_blank()
        match = re.compile(r"(?:\d*|\{\w+\})(?=[<>]|&>)").match(self.text, self.position)
        if match is None:
            return False
        self.position = match.end()
        sign = self._operator()
        if self.text.startswith(("<(", ">("), self.position):  # a file that a command writes
            return False
        self.position += len(sign)
        self._skip_blank()
        start = self.position
        word = self._word()
        if sign in ("<<", "<<-"):
            is_literal = any(quote in self.text[start : self.position] for quote in "'\"\\")
            end = "".join(part.text for part in word or ())
            self.open_heredocs.append((end, is_literal, sign == "<<-", command))
        elif sign == "<<<":
            command.heredocs.append(word or ())
        return True

    def _read_heredocs(self) -> None:
        """Take the texts of here-documents, which begin behind the present end of line."""
        for end, is_literal, strips_tabs, command in self.open_heredocs:
            lines: list[str] = []
            while self.position < len(self.text):
                stop = self.text.find("\n", self.position)
                stop = len(self.text) if stop < 0 else stop
                content = self.text[self.position : stop]
                self.position = min(stop + 1, len(self.text))
                if (content.lstrip("\t") if strips_tabs else content) == end:
                    break
                lines.append(content.lstrip("\t") if strips_tabs else content)
            text = "".join(f"{content}\n" for content in lines)
            word = (Part("text", text, is_quoted=True),)
            command.heredocs.append(word if is_literal else parts_of(text))
        self.open_heredocs = []

    # --- words

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _after_blank(self, sign: str) -> bool:
        return re.compile(rf"[ \t]*{re.escape(sign)}").match(self.text, self.position) is not None

    def _operator(self) -> str:
        match = _OPERATORS.match(self.text, self.position)
        return match[0] if match else ""

    def _keyword(self) -> str:
        """The unquoted word that begins here, without taking it."""
        match = re.compile(r"[^\s;&|<>()$`'\"\\]+").match(self.text, self.position)
        return match[0] if match else ""

    def _take_keyword(self) -> str:
        self._skip_blank(newlines=True)
        word = self._keyword()
        self.position += len(word)
        return word

    def _expect(self, keyword: str, line: int) -> None:
        self._skip_blank(newlines=True)
        if self._keyword() != keyword:
            raise ValueError(f"line {line}: `{keyword}` is missing")
        self._take_keyword()

    def _expect_sign(self, sign: str, line: int) -> None:
        self._skip_blank(newlines=True)
        if not self.text.startswith(sign, self.position):
            raise ValueError(f"line {line}: `{sign}` is missing")
        self.position += len(sign)

    def _skip_blank(self, *, newlines: bool = False) -> None:
        """Skip spaces, comments and continued lines; a comment after a continued line continues it
        too.

        The shell ends a command at such a comment. Recipes have options behind it, which their
        writers mean, and some of which never arrive; they are read as meant.
        """
        is_continued = False
        while self.position < len(self.text):
            if self.text.startswith("\\\n", self.position):
                self.position += 2
                is_continued = True
            elif self._peek() in " \t" or self._is_last_backslash():
                self.position += 1
            elif self._peek() == "#" and (
                self.position == 0 or self.text[self.position - 1] in " \t\n;&|()"
            ):
                stop = self.text.find("\n", self.position)
                stop = len(self.text) if stop < 0 else stop
                goes_on = self.text[self.position : stop].rstrip().endswith("\\")
                self.position = stop
                if is_continued and (goes_on or _OPTION_LINE.match(self.text, stop)):
                    self.position += 1
            elif self._peek() == "\n" and (newlines or self.open_heredocs):
                if not newlines:
                    return
                self.position += 1
                self._read_heredocs()
            else:
                return

    def _is_last_backslash(self) -> bool:
        """Whether the file ends with a line that would go on."""
        return self._peek() == "\\" and self.position == len(self.text) - 1

    def _word(self, *, is_value: bool = False) -> Word | None:
        """The next word, or None at the end of the command; the value of an assignment begins at
        once.
        """
        if not is_value:
            self._skip_blank()
        parts: list[Part] = []
        start = self.position
        while self.position < len(self.text):
            sign = self._peek()
            if self.text.startswith(("<(", ">("), self.position):
                parts.append(Part("command", self._bracketed("(", ")", 1)))
                continue
            if sign.isspace() or sign in ";&|<>()":
                break
            if sign == "\\":
                following = self.text[self.position + 1 : self.position + 2]
                self.position += 2
                if following not in ("\n", ""):
                    parts.append(Part("text", following, is_quoted=True))
                continue
            parts += self._piece(sign)
        if self.position == start:
            return None
        return tuple(parts)

    def _piece(self, sign: str) -> list[Part]:
        """The parts that begin at this sign of a word."""
        if sign == "'":
            return [Part("text", self._until("'"), is_quoted=True)]
        if self.text.startswith("$'", self.position):
            self.position += 1
            text = self._until("'", escapes=True)
            return [
                Part(
                    "text",
                    text.encode("latin-1", "backslashreplace").decode("unicode_escape"),
                    is_quoted=True,
                )
            ]
        if sign == '"' or self.text.startswith('$"', self.position):
            self.position += sign == "$"
            return self._double_quoted()
        if sign in "$`":
            return [self._expansion(is_quoted=False)]
        match = re.compile(r"[^\s;&|<>()\\'\"$`]+").match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return [Part("text", match[0])]

    def _until(self, end: str, *, escapes: bool = False) -> str:
        line = self.line
        start = self.position + 1
        stop = start
        while stop < len(self.text) and self.text[stop] != end:
            stop += 2 if escapes and self.text[stop] == "\\" else 1
        if stop >= len(self.text):
            raise ValueError(f"line {line}: No closing quotation")
        self.position = stop + 1
        return self.text[start:stop]

    def _double_quoted(self) -> list[Part]:
        line = self.line
        self.position += 1
        parts = [Part("text", "", is_quoted=True)]
        while self._peek() != '"':
            if self.position >= len(self.text):
                raise ValueError(f"line {line}: No closing quotation")
            parts.append(self._quoted_part())
        self.position += 1
        return parts

    def _quoted_part(self) -> Part:
        """The next part within double quotes or a here-document."""
        sign = self._peek()
        if sign == "\\":
            following = self.text[self.position + 1 : self.position + 2]
            self.position += 2
            if following == "\n":
                return Part("text", "", is_quoted=True)
            return Part(
                "text", following if following in '$`"\\' else f"\\{following}", is_quoted=True
            )
        if sign in "$`":
            return self._expansion(is_quoted=True)
        match = re.compile(r'[^\\"$`]+|"').match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return Part("text", match[0], is_quoted=True)

    def _expansion(self, *, is_quoted: bool) -> Part:
        """A variable, a command or arithmetic that begins with `$` or a backquote."""
        if self._peek() == "`":
            return Part("command", self._until("`", escapes=True), is_quoted)
        if self.text.startswith("$((", self.position):
            start = self.position
            inner = self._bracketed("(", ")", 1)
            if inner.startswith("(") and inner.endswith(")"):
                return Part("arithmetic", inner[1:-1], is_quoted)
            self.position = start
        if self.text.startswith("$[", self.position):
            return Part("arithmetic", self._bracketed("[", "]", 1), is_quoted)
        if self.text.startswith("$(", self.position):
            return Part("command", self._bracketed("(", ")", 1), is_quoted)
        if self.text.startswith("${", self.position):
            return Part("variable", self._bracketed("{", "}", 1), is_quoted)
        match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(self.text, self.position)
        if match is None:
            self.position += 1
            return Part("text", "$", is_quoted)
        self.position = match.end()
        return Part("variable", match[1], is_quoted)

    def _bracketed(self, opens: str, closes: str, offset: int) -> str:
        """What stands between a bracket, `offset` signs behind here, and the one that closes it."""
        line = self.line
        start = self.position + offset + 1
        depth = 1
        stop = start
        in_single = in_double = False
        while depth:
            if stop >= len(self.text):
                raise ValueError(f"line {line}: `{opens}` is not closed")
            sign = self.text[stop]
            if sign == "\\" and not in_single:
                stop += 2
                continue
            if sign == "'" and not in_double:
                in_single = not in_single
            elif sign == '"' and not in_single:
                in_double = not in_double
            elif not in_single and not in_double and sign in (opens, closes):
                depth += 1 if sign == opens else -1
            stop += 1
        self.position = stop
        return self.text[start : stop - 1]


def parts_of(text: str) -> Word:
    """The parts of a text in which variables and commands are expanded, as within double quotes."""
    parser = ShellParser(text)
    parts: list[Part] = []
    while parser.position < len(parser.text):
        parts.append(parser._quoted_part())
    return tuple(parts)


def parse_shell(text: str, line: int = 1) -> Commands:
    """Parse a script whose first line has this number.

    Raises ValueError with the line of what is not closed.
    """
    return ShellParser(text, line).parse()


def parse_word(text: str) -> Word:
    """Parse the word of `${name:-word}`, in which spaces belong to it."""
    parser = ShellParser(text)
    parts: list[Part] = []
    while parser.position < len(parser.text):
        sign = parser._peek()
        if sign == "\\":
            parts.append(
                Part("text", text[parser.position + 1 : parser.position + 2], is_quoted=True)
            )
            parser.position += 2
        elif sign.isspace() or sign in ";&|<>()":
            parts.append(Part("text", sign))
            parser.position += 1
        else:
            parts += parser._piece(sign)
    return tuple(parts)
