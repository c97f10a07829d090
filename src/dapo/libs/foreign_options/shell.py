"""Reads the options that a shell script passes to programs, by following its variables; no command
is run.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import yaml

from .formulas import Unknown, compute
from .reading import Reading
from .shell_syntax import (
    Assignment,
    Branches,
    Cases,
    Chain,
    Command,
    Commands,
    Function,
    Group,
    Loop,
    Part,
    Simple,
    Test,
    Word,
    parse_shell,
    parse_word,
    parts_of,
)

MAX_COMMANDS = 20_000  # that are followed, for loops and functions that call each other
MAX_TEXT = 2**20  # signs in one variable
MAX_DEPTH = 20  # of functions and of text that is a command again

_OPEN = "\ue000"
_CLOSE = "\ue001"
"""Around a piece of text whose value only the running script knows, as `$name`."""
_SPACE = "\ue002"
"""In the place of a space within such a piece, so that it is not split there."""

Value: TypeAlias = str | dict[str, str]  # a text, or an array by index
_PRINTING = (
    "echo",
    "printf",
    "cat",
    "tee",
    ":",
    "true",
    "false",
    "which",
    "command",
    "type",
    "cd",
    "mkdir",
    "rm",
)
_SHELLS = ("bash", "sh", "zsh")
_NAME = r"[A-Za-z_]\w*"
_OPTION = re.compile(rf"(?:\+{{0,2}}|~)({_NAME}(?:[.@/][\w@/-]+)*)=(.*)", flags=re.DOTALL)
_STRAY = re.compile(rf"(?:\+{{0,2}}|~){_NAME}(?:\.\w+)+=.*", flags=re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", flags=re.DOTALL)
_FILE = re.compile(r"@.*|.*\.(?:ya?ml|json|toml|txt|cfg|conf|args)", flags=re.DOTALL)
_LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run", "torch.distributed.launch")
_COUNTS = ("num_processes", "nproc_per_node", "nproc-per-node")


def read_shell(text: str, environment: Mapping[str, str]) -> list[Reading]:
    """The commands of a script that have options, with the values of its variables, or Unknown if
    they are not known.

    `environment` has the variables that are set outside of the script. Raises ValueError for what
    is not closed.

    Example:
        >>> read_shell("n=4; python3 -m main_ppo data.train_batch_size=$((n * 8))", {})[0].options
        {'data.train_batch_size': 32}
    """
    shell = _Shell(dict(environment))
    with suppress(_Exit):
        shell.follow(parse_shell(text))
    for reading in shell.readings:
        reading.unread = [*dict.fromkeys([*reading.unread, *shell.unread])]
        reading.assumed = [*dict.fromkeys([*reading.assumed, *shell.assumed])]
    return shell.readings


class _Exit(Exception):
    """The script ends, or the function returns."""


@dataclass
class _Shell:
    """The state of a shell that only follows values."""

    variables: dict[str, Value]
    readings: list[Reading] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    functions: dict[str, Commands] = field(default_factory=dict)
    arguments: list[str] | None = None  # of a function, or by `set --`
    num_commands: int = 0
    depth: int = 0
    branch: str = ""  # the undecided branch that is followed

    # --- commands

    def follow(self, commands: Commands) -> None:
        for command in commands:
            self.num_commands += 1
            if self.num_commands > MAX_COMMANDS:
                raise ValueError(
                    f"line {command.line}: the script has over {MAX_COMMANDS} commands to follow"
                )
            self._follow_one(command)

    def _follow_one(self, command: Command) -> None:
        match command:
            case Simple():
                self._simple(command)
            case Group(body=body, is_subshell=is_subshell):
                before = dict(self.variables)
                self._follow_body(body)
                if is_subshell:
                    self.variables = before
            case Chain():
                self._chain(command)
            case Branches():
                self._branches(command)
            case Cases():
                self._cases(command)
            case Loop():
                self._loop(command)
            case Function(name=name, body=body):
                self.functions[name] = body
            case Test(formula=formula):
                for assignment in filter(None, formula.split(",")):
                    self._assign_formula(assignment)

    def _follow_body(self, body: Commands) -> bool:
        """Follow commands that may end the script; returns whether they do."""
        try:
            self.follow(body)
        except _Exit:
            return True
        return False

    def _chain(self, chain: Chain) -> None:
        verdict = self._truth(chain.first)
        if verdict is None:
            self.follow(chain.first)
            last = chain.first[-1]
            if not isinstance(last, Test) and not self._is_test(last):
                # an ordinary command is taken to succeed
                verdict = True
        if verdict is None:
            self._either([chain.then], chain.line, has_rest=True)
        elif verdict == chain.is_and:
            self._follow_body(chain.then)

    def _branches(self, command: Branches) -> None:
        open_branches: list[Commands] = []
        for condition, body in command.branches:
            verdict = True if condition is None else self._truth(condition)
            if verdict is False:
                continue
            open_branches.append(body)
            if verdict:
                self._either(open_branches, command.line, has_rest=False)
                return
        self._either(open_branches, command.line, has_rest=True)

    def _cases(self, command: Cases) -> None:
        word = self._text(command.word)
        if _OPEN in word and not self._is_unset(command.word):
            bodies = [body for _, body in command.branches]
            self._either(bodies, command.line, has_rest=True)
            return
        if _OPEN in word:
            word = ""
        for patterns, body in command.branches:
            texts = [self._text(pattern) for pattern in patterns]
            if any(_OPEN in text for text in texts):
                self._either([body], command.line, has_rest=True)
            elif any(fnmatch.fnmatchcase(word, text) for text in texts):
                self._either([body], command.line, has_rest=False)
                return

    def _either(self, bodies: Sequence[Commands], line: int, *, has_rest: bool) -> None:
        """Follow one of several branches, or where several are possible each of them; their values
        are then unknown.
        """
        if not bodies:
            return
        if len(bodies) == 1 and not has_rest:
            before = dict(self.variables)
            if self._follow_body(bodies[0]) and not self.branch:
                self.assumed.append(f"line {line}: a branch that ends the script is not taken")
                self.variables = before
            return
        before = self.variables
        branch = self.branch
        ends = [dict(before)] if has_rest else []
        num_readings = len(self.readings)
        self.branch = branch or f"line {line}"
        for body in bodies:
            self.variables = dict(before)
            if not self._follow_body(body):
                ends.append(self.variables)
        self.branch = branch
        self.variables = self._variables_behind(before, ends, line)
        if len(self.readings) > num_readings:
            self.assumed.append(
                f"line {line}: which branch is taken is known only when the script runs"
            )

    def _variables_behind(
        self, before: dict[str, Value], ends: Sequence[dict[str, Value]], line: int
    ) -> dict[str, Value]:
        """The variables behind several branches: those that differ are unknown."""
        if not ends:
            return before
        variables: dict[str, Value] = {}
        names = dict.fromkeys(name for end in ends for name in end)
        for name in names:
            values = [end.get(name) for end in ends]
            first = values[0]
            if first is not None and all(value == first for value in values):
                variables[name] = first
                continue
            texts = [_without_marks(_array_text(value)) if value else "nothing" for value in values]
            distinct_texts = dict.fromkeys(texts)
            listing = " or ".join(distinct_texts)
            variables[name] = f"{_OPEN}${name} (line {line}: {listing}){_CLOSE}"
        return variables

    def _loop(self, loop: Loop) -> None:
        if not loop.name:
            assigned = sorted(set(_variables_set_by(loop.body)))
            if assigned:
                self.assumed.append(
                    f"line {loop.line}: a loop is not followed, which may set {', '.join(assigned)}"
                )
            self._look_into(loop.body, loop.line)
            return
        items = [item for word in loop.words for item in self._fields(word)]
        if any(_OPEN in item for item in items) or not items:
            items = [f"{_OPEN}${loop.name}{_CLOSE}"]
        num_readings = len(self.readings)
        for item in items:
            self.variables[loop.name] = item
            if self._follow_body(loop.body):
                break
        if len(items) > 1 and len(self.readings) > num_readings:
            listing = " ".join(map(_without_marks, items))
            self.assumed.append(
                f"line {loop.line}: a loop runs for each of {loop.name} = {listing}"
            )

    def _look_into(self, body: Commands, line: int) -> None:
        """Follow commands that may run, without what they do to variables."""
        before = dict(self.variables)
        branch = self.branch
        num_readings = len(self.readings)
        self.branch = branch or f"line {line}"
        self._follow_body(body)
        self.variables = before
        self.branch = branch
        if len(self.readings) > num_readings:
            self.assumed.append(f"line {line}: a loop is followed once")

    def _simple(self, command: Simple) -> None:
        before = dict(self.variables)
        for assignment in command.assignments:
            self._assign(assignment)
        words: list[str] = []
        for word in command.words:
            if not isinstance(word, Assignment):
                words += self._fields(word)
        if not words:
            return
        name = words[0].rpartition("/")[2]
        if name in ("export", "declare", "local", "readonly", "typeset"):
            for word in command.words:
                if isinstance(word, Assignment):
                    self._assign(word)
            return
        self._run(name, words, command)
        if command.assignments and name not in self.functions and name not in (":", "set"):
            self.variables = before

    def _run(self, name: str, words: list[str], command: Simple) -> None:  # noqa: C901, PLR0912 (a case for each)
        """Follow a command whose words are known."""
        if name in ("exit", "return") or (name == "exec" and len(words) == 1):
            raise _Exit
        script = _script_of_shell(words)
        if name in self.functions and self.depth < MAX_DEPTH:
            self._call(self.functions[name], words[1:])
        elif name == "set":
            if "--" in words:
                self.arguments = words[words.index("--") + 1 :]
        elif name == "shift":
            self.arguments = (self.arguments or [])[1:]
        elif name == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
        elif name in ("read", "mapfile", "readarray"):
            self._read_variables(words, command)
        elif name in ("source", "."):
            self.assumed.append(f"line {command.line}: {_display(words)} is not read")
        elif name == "let":
            for word in words[1:]:
                self._assign_formula(word)
        elif name == "eval":
            self._nested(" ".join(words[1:]), command)
        elif script is not None and name not in _PRINTING:
            self._nested(script, command)
        elif name == "printf" and words[1:2] == ["-v"] and len(words) > 2:
            self.variables[words[2]] = f"{_OPEN}${words[2]}{_CLOSE}"
        elif name in _PRINTING:
            if command.heredocs:
                self.assumed.append(f"line {command.line}: a here-document of `{name}` is not read")
        elif name not in ("[", "test", "trap", "alias"):
            self._program(words, command)

    def _call(self, body: Commands, arguments: list[str]) -> None:
        before = self.arguments
        self.arguments = arguments
        self.depth += 1
        self._follow_body(body)
        self.depth -= 1
        self.arguments = before

    def _nested(self, text: str, command: Simple) -> None:
        """A text that is run as commands."""
        if self.depth >= MAX_DEPTH:
            return
        self.depth += 1
        try:
            self._follow_body(parse_shell(_quote_unknown(text), command.line))
        except ValueError:
            self.unread.append(f"line {command.line}: {_without_marks(text)}")
        self.depth -= 1

    def _read_variables(self, words: list[str], command: Simple) -> None:
        """`read NAME`, which takes a here-document where there is one."""
        names = [word for word in words[1:] if re.fullmatch(_NAME, word)]
        takes_all = any(word in ("-d", "-rd", "-d ") for word in words)
        for name in names:
            self.variables[name] = f"{_OPEN}${name}{_CLOSE}"
        if takes_all and len(names) == 1 and command.heredocs:
            self.variables[names[0]] = self._text(command.heredocs[-1])

    def _program(self, words: list[str], command: Simple) -> None:
        """A command that may be a trainer."""
        if _STRAY.fullmatch(words[0]):
            # a line ended too early: `\ # comment`; the shell takes the rest for a command
            self.unread += [
                f"line {command.line}: {_without_marks(word)} stands outside of a command"
                for word in words
                if _STRAY.fullmatch(word)
            ]
            return
        start = _program_end(words)
        reading = Reading(command=_display(words[:start]), line=command.line)
        if start > 1:
            reading.program = _without_marks(words[start - 1])
        reading.num_processes = _num_processes(words[:start])
        _read_arguments(words[start:], reading)
        for word in command.heredocs:
            reading.unread.append(
                f"line {command.line}: a here-document, {_display([self._text(word)])}"
            )
        if reading.options or reading.unread:
            if self.branch:
                reading.assumed.append(
                    f"line {command.line}: the command stands in a branch ({self.branch})"
                )
            self.readings.append(reading)

    # --- conditions

    @staticmethod
    def _is_test(command: Command) -> bool:
        """Return True for a command whose success says something: a test, a search."""
        if not isinstance(command, Simple) or not command.words:
            return False
        first = command.words[0]
        if not isinstance(first, tuple):
            return False
        name = "".join(part.text for part in first)
        return name in ("[", "test", "!", "grep")

    def _truth(self, commands: Commands) -> bool | None:
        """Whether a condition holds; None: it is known only when the script runs."""
        if len(commands) != 1:
            return None
        match commands[0]:
            case Simple(words=words):
                return self._truth_of_simple(words)
            case Test(words=words) if words:
                return self._double_bracket([self._condition_text(word) for word in words])
            case Test(formula=formula):
                number = self._arithmetic(formula)
                return None if _OPEN in number else number != "0"
            case Group(body=(Simple(words=[(Part(text="!"),)]), command)):
                inner = self._truth((command,))
                return None if inner is None else not inner
            case Chain(first=first, then=then, is_and=is_and):
                left = self._truth(first)
                if left is None:
                    return None
                return self._truth(then) if left == is_and else left
        return None

    def _truth_of_simple(self, words: Sequence[Word | Assignment]) -> bool | None:
        """Whether `true`, `false`, `[ ... ]` or `test ...` holds; None for any other command."""
        # the text of a word may set variables: no word is read unless all are
        if not words or any(isinstance(word, Assignment) for word in words):
            return None
        texts = [self._condition_text(word) for word in words if isinstance(word, tuple)]
        name, *operands = texts
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name == "[" and texts[-1] == "]":
            return _verdict_of_test(operands[:-1])
        if name == "test":
            return _verdict_of_test(operands)
        return None

    def _double_bracket(self, words: list[str]) -> bool | None:
        """Whether `[[ ... ]]` holds, with `||` and `&&` between its tests."""
        for sign, decides in (("||", True), ("&&", False)):
            if sign in words:
                at = words.index(sign)
                left = self._double_bracket(words[:at])
                right = self._double_bracket(words[at + 1 :])
                if decides in (left, right):
                    return decides
                return None if None in (left, right) else not decides
        return _verdict_of_test(words)

    def _condition_text(self, word: Word) -> str:
        """The text of a word in a condition, in which a variable that nobody set is empty, as it is
        here.
        """
        text = self._text(word)
        return "" if _OPEN in text and self._is_unset(word) else text

    def _is_unset(self, word: Word) -> bool:
        """Whether a word is one variable that the script does not set."""
        parts = [part for part in word if part.text]
        if len(parts) != 1 or parts[0].kind != "variable":
            return False
        return self._value_of(parts[0].text, checks_existence=True) is None

    # --- variables

    def _assign(self, assignment: Assignment) -> None:
        name = assignment.name
        before = self.variables.get(assignment.name)
        if assignment.is_array:
            texts: list[str] = []
            for word in assignment.value:
                texts += self._fields(word)  # type: ignore[arg-type]
            self.variables[name] = _array_of(texts, before if assignment.is_added else None)
            return
        value = self._text(assignment.value)  # type: ignore[arg-type]
        if assignment.index is not None:
            index = self._text(parts_of(assignment.index)).strip("'\"")
            items = dict(before) if isinstance(before, dict) else {}
            item_before = items.get(index, "") if assignment.is_added else ""
            items[index] = f"{item_before}{value}"
            self.variables[name] = items
        elif assignment.is_added:
            start = _array_text(before) if before is not None else ""
            self.variables[name] = f"{start}{value}"[:MAX_TEXT]
        else:
            self.variables[name] = value

    def _assign_formula(self, text: str) -> None:
        """An assignment of arithmetic: `x = 3`, `x += 1`, `x++`."""
        match = re.fullmatch(
            rf"\s*({_NAME})\s*(\+\+|--|([-+*/%]?)=(?!=)(.*))\s*", text, flags=re.DOTALL
        )
        if match is None:
            return
        name, whole, sign, formula = match.groups()
        if whole in ("++", "--"):
            sign = whole[0]
            formula = "1"
        if sign:
            formula = f"{name} {sign} ({formula})"
        self.variables[name] = self._arithmetic(formula)

    def _value_of(self, source: str, *, checks_existence: bool = False) -> list[str] | None:
        """The texts of a variable by what stands in its braces; None: nobody set it.

        `checks_existence` only asks for that.
        """
        match = re.fullmatch(rf"({_NAME}|[0-9@*#?$!-])(?:\[([^\]]*)\])?", source)
        if match is None:
            # an operator stands behind the name: `name:-word`
            variable = re.match(_NAME, source)
            if checks_existence and variable is not None and variable[0] not in self.variables:
                return None
            return [""]
        name, index = match.groups()
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return None if self.arguments is None else [str(len(self.arguments))]
        if name.isdigit():
            number = int(name)
            arguments = self.arguments or []
            return [arguments[number - 1]] if 0 < number <= len(arguments) else None
        value = self.variables.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return [value]
        if index in ("@", "*"):
            return [*value.values()]
        item = value.get(self._index(index or "0", value))
        return None if item is None else [item]

    def _index(self, text: str, array: dict[str, str]) -> str:
        """The key of an array's item: a name, or a number that counts from the end if it is below 0."""
        key = self._text(parts_of(text)).strip("'\"")
        if key in array:
            return key
        position = self._arithmetic(key)
        if _is_integer(position) and int(position) < 0:
            return str(len(array) + int(position))
        return position

    # --- words

    def _text(self, word: Word) -> str:
        """The text of a word that is not split."""
        texts = [" ".join(self._expansion(part)) for part in self._with_home(word)]
        return "".join(texts)[:MAX_TEXT]

    def _with_home(self, word: Word) -> Word:
        """Replace a `~/` at the begin of a word by the home directory."""
        home = self.variables.get("HOME")
        first = word[0] if word else None
        if first is None or first.kind != "text" or first.is_quoted or not isinstance(home, str):
            return word
        if not first.text.startswith("~/"):
            return word
        return (Part("text", f"{home}{first.text[1:]}"), *word[1:])

    def _fields(self, word: Word) -> list[str]:
        """The words that a word becomes: what is not quoted is split at spaces, an array gives a
        word for each item.
        """
        fields: list[str] = []
        is_open = False  # whether the next text continues the last field
        for part in self._with_home(word):
            texts = self._expansion(part)
            ends_open = True
            if part.kind == "text":
                texts = ["".join(texts)]
            elif not part.is_quoted:
                text = " ".join(texts)
                if text[:1].isspace():
                    is_open = False
                ends_open = not text[-1:].isspace()
                texts = _split_fields(text)
            elif not _is_list(part.text):
                texts = [" ".join(texts)]
            if texts:
                self._append(fields, texts, is_open=is_open)
                is_open = ends_open
        return fields

    @staticmethod
    def _append(fields: list[str], texts: list[str], *, is_open: bool) -> None:
        if is_open and fields:
            fields[-1] += texts[0]
            texts = texts[1:]
        fields += texts

    def _expansion(self, part: Part) -> list[str]:
        """The texts of a part; what is not known stands between two marks."""
        if part.kind == "text":
            return [part.text]
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text)]
        if part.kind == "command":
            return self._output_of(part.text)
        return self._variable(part.text)

    def _output_of(self, text: str) -> list[str]:
        """`$(text)`: a comment gives nothing, `echo` its words; anything else is not run."""
        command_text = [f"{_OPEN}$({' '.join(text.split())}){_CLOSE}"]
        try:
            commands = parse_shell(text)
        except ValueError:
            return command_text
        if not commands:
            return []
        command = commands[0]
        if len(commands) > 1 or not isinstance(command, Simple) or command.assignments:
            return command_text
        words: list[str] = []
        for word in command.words:
            if isinstance(word, tuple):
                words += self._fields(word)
        if words == ["cat"] and len(command.heredocs) == 1:
            return [self._text(command.heredocs[0]).rstrip("\n")]
        if words[:1] == ["echo"] and not any(word.startswith("-") for word in words[1:]):
            return [" ".join(words[1:])]
        if any(_OPEN in word for word in words):
            return command_text
        output = self._output_of_words(words)
        return command_text if output is None else [output]

    def _output_of_words(self, words: list[str]) -> str | None:
        """The output of `expr`, `basename` and `dirname`; None for any other command."""
        match words:
            case ["expr", _, *_] if all(re.fullmatch(r"\d+|[-+*/%()]", word) for word in words[1:]):
                number = self._arithmetic(" ".join(words[1:]))
                return number if _is_integer(number) else None
            case ["basename", path]:
                return path.rstrip("/").rpartition("/")[2]
            case ["basename", path, ending]:
                return path.rstrip("/").rpartition("/")[2].removesuffix(ending)
            case ["dirname", path]:
                return PurePosixPath(path).parent.as_posix()
        return None

    def _variable(self, source: str) -> list[str]:
        """The texts of a variable; `source` stands behind its dollar sign, or in the braces."""
        is_name = re.fullmatch(r"\w+|[@*#?!$-]", source) is not None
        written = f"${source}" if is_name else f"${{{source}}}"
        source_text = [f"{_OPEN}{written}{_CLOSE}"]
        if source.startswith("#") and len(source) > 1:
            values = self._value_of(source[1:])
            if values is None:
                return source_text
            # the number of items of an array, the number of signs of a text
            is_array = source.endswith(("[@]", "[*]"))
            length = len(values) if is_array else len(values[0])
            return [str(length)]
        if source.startswith("!"):
            names = self._value_of(source[1:])
            if names is None or not re.fullmatch(_NAME, names[0]):
                return source_text
            return self._variable(names[0])
        match = re.match(rf"({_NAME}|[0-9@*#?$!-])(?:\[[^\]]*\])?", source)
        if match is None:
            return source_text
        values = self._value_of(match[0])
        rest = source[match.end() :]
        if not rest:
            return source_text if values is None else values
        return self._braces(match[0], values, rest, source_text)

    def _braces(
        self, name: str, values: list[str] | None, rest: str, source_text: list[str]
    ) -> list[str]:
        """The texts of `${name:-word}` and of the other operators of braces.

        Args:
            name: the variable, with the index of an array.
            values: its texts; None: nobody set it.
            rest: what stands behind the name.
            source_text: the whole in marks, for a value that is not known.
        """
        operator = re.match(r":?[-=+?]", rest)
        if operator:
            word = rest[operator.end() :]
            return self._with_default(name, values, operator[0], word, source_text)
        if values is None or _OPEN in "".join(values):
            return source_text
        removal = re.match(r"##?|%%?", rest)
        if removal:
            pattern = self._text(parse_word(rest[removal.end() :]))
            if _OPEN in pattern:
                return source_text
            return [_without_match(value, removal[0], pattern) for value in values]
        if rest.startswith("/"):
            return self._with_replacement(values, rest)
        if rest in ("^^", ",,", "^", ","):
            change = str.upper if rest[0] == "^" else str.lower
            if len(rest) == 2:
                return [change(value) for value in values]
            return [change(value[:1]) + value[1:] for value in values]
        piece = re.fullmatch(r":\s*(\(?\s*-?[^:]+?\)?)(?::(.+))?", rest, flags=re.DOTALL)
        if piece:
            start = self._arithmetic(piece[1])
            length = self._arithmetic(piece[2] or "0")
            if not _is_integer(start) or not _is_integer(length):
                return source_text
            count = None if piece[2] is None else int(length)
            return _piece_of(name, values, int(start), count)
        return source_text

    def _with_replacement(self, values: list[str], rest: str) -> list[str]:
        """The texts of `${name/pattern/word}`, and of `//`, which replaces every match."""
        count = 0 if rest.startswith("//") else 1  # 0: all of them
        pattern, _, replacement = rest.lstrip("/").partition("/")
        regex = _regex(self._text(parse_word(pattern)))
        text = self._text(parse_word(replacement))
        return [re.sub(regex, lambda _: text, value, count=count) for value in values]

    def _with_default(
        self, name: str, values: list[str] | None, sign: str, word: str, source_text: list[str]
    ) -> list[str]:
        """The texts of `${name:-word}`, and with `=`, `+` and `?` in place of `-`.

        Args:
            name: the variable, with the index of an array.
            values: its texts; None: nobody set it.
            sign: the operator; with a colon an empty variable counts as one that is not set.
            word: what stands behind the operator.
            source_text: the whole in marks, for a value that is not known.
        """
        is_absent = values is None or (sign[0] == ":" and not "".join(values))
        if sign[-1] == "+":
            return [] if is_absent else [self._text(parse_word(word))]
        if not is_absent:
            return values or [""]
        if sign[-1] == "?":
            return source_text
        default_word = parse_word(word)
        default = self._text(default_word)
        if sign[-1] == "=":
            self.variables[name] = default
        parts = [part for part in default_word if part.text]
        if len(parts) == 1 and parts[0].kind == "variable":
            # an array stays several words
            return self._variable(parts[0].text)
        return [default]

    def _arithmetic(self, text: str) -> str:
        """The value of arithmetic, or its text between marks."""
        source = self._text(parts_of(text))
        names: dict[str, Any] = {}
        for name in set(re.findall(_NAME, source)):
            value = self.variables.get(name)
            if not isinstance(value, str) or value == name:
                continue
            if _is_integer(value):
                names[name] = int(value)
            elif re.fullmatch(r"[\w\s()*/%+-]+", value):
                # the shell computes the text of a variable too
                inner = self._arithmetic(value) if self.depth < MAX_DEPTH else ""
                if _is_integer(inner):
                    names[name] = int(inner)
        try:
            if _OPEN in source:
                raise ValueError(source)
            number = compute(_as_python(source), names)
            return str(int(number))
        except (ValueError, TypeError, ArithmeticError):
            return f"{_OPEN}$(({' '.join(_without_marks(source).split())})){_CLOSE}"


def _array_of(texts: Sequence[str], before: Value | None) -> dict[str, str]:
    """An array of these texts behind the items of `before`; a text `[key]=value` has its key."""
    items: dict[str, str] = {}
    if isinstance(before, dict):
        items = dict(before)
    elif before:
        items = {"0": before}
    for text in texts:
        key = re.match(r"\[([^\]]+)\]=", text)
        if key is None:
            items[str(len(items))] = text
        else:
            items[key[1].strip("'\"")] = text[key.end() :]
    return items


def _piece_of(name: str, values: list[str], start: int, count: int | None) -> list[str]:
    """The texts of `${name:start:count}`: items of an array, or signs of a text.

    Args:
        name: the variable, with the index of an array.
        values: its texts.
        start: the first one; below 0, counted from the end.
        count: how many; None: all that follow.
    """
    if not name.endswith(("[@]", "[*]", "@", "*")):
        text = values[0][start:]
        return [text[:count]]
    # the arguments of a script are counted from 1, the items of an array from 0
    is_of_arguments = name in ("@", "*")
    first = start - 1 if is_of_arguments and start > 0 else start
    if count is None:
        return values[first:]
    return values[first : first + count]


def _as_python(text: str) -> str:
    """A formula of the shell as one of Python: integer division, `a ? b : c`, `&&`, `||`, `!`."""
    choice = re.fullmatch(r"([^?]+)\?([^?:]+):(.+)", text, flags=re.DOTALL)
    if choice:
        condition, first, second = (_as_python(formula) for formula in choice.groups())
        return f"(({first}) if ({condition}) else ({second}))"
    text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    return " ".join(re.sub(r"!(?!=)", " not ", text).split())


def _read_arguments(words: Sequence[str], reading: Reading) -> None:
    """Sort the words behind a program into options and what is not read."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        text = _without_marks(word)
        if match := _FLAG.fullmatch(word):
            name, value = match.groups()
            texts: list[str] = [] if value is None else [value]
            while value is None and i < len(words) and _may_be_value(words[i]):
                texts.append(words[i])
                i += 1
            if _OPEN in name:
                reading.unread.append(f"line {reading.line}: {text}")
            else:
                reading.options[name] = _flag_value(texts)
        elif match := _OPTION.fullmatch(word):
            name, value = match.groups()
            if word.startswith("~"):
                reading.unread.append(f"line {reading.line}: {text} removes an option")
            elif _OPEN in name:
                reading.unread.append(f"line {reading.line}: {text}")
            else:
                reading.options[name] = _hydra_value(value)
        elif _is_open_word(word) and re.fullmatch(rf"{_OPEN}\$\{{?[@*0-9]\}}?{_CLOSE}", word):
            reading.assumed.append(
                f"line {reading.line}: {text}, the script's arguments, is taken as empty"
            )
        elif _OPEN in word or "=" in word or _FILE.fullmatch(word) or word.startswith(("~", "+")):
            reading.unread.append(f"line {reading.line}: {text}")
        elif word.strip():
            reading.assumed.append(f"line {reading.line}: {text} is no option")


def _may_be_value(word: str) -> bool:
    """Whether a word behind a flag may be its value: no flag, no option of Hydra, and one word."""
    if word.startswith("--") or _is_open_word(word):
        return False
    is_option = _OPTION.fullmatch(word) is not None
    name = word.partition("=")[0]
    return not is_option or "." not in name


def _flag_value(texts: Sequence[str]) -> Any:
    """The value of a flag: that of its only word, a list, or True if no word stands behind it."""
    values = [_hydra_value(text) for text in texts]
    if len(values) == 1:
        return values[0]
    unknown = next((value for value in values if isinstance(value, Unknown)), None)
    return unknown or values or True


def _is_open_word(word: str) -> bool:
    """Whether a whole word is unknown, which may be any number of options."""
    return word.startswith(_OPEN) and word.endswith(_CLOSE) and word.count(_OPEN) == 1


def _program_end(words: Sequence[str]) -> int:
    """The position behind the program that options are for, and its launchers: `accelerate launch
    train.py`.
    """
    for i, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return i + 1
        if word == "-m" and i + 1 < len(words) and words[i + 1] not in _LAUNCHERS:
            return i + 2
        if word.rpartition("/")[2] in ("trl", "swift") and i + 1 < len(words):
            return i + 2
    return 1


def _num_processes(words: Sequence[str]) -> int | None:
    """The number of processes that a launcher starts, from its own options."""
    for i, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in _COUNTS:
            next_word = "".join(words[i + 1 : i + 2])  # empty behind the last one
            count = value if equals else next_word
            return int(count) if count.isdigit() and int(count) > 0 else None
    return None


def _variables_set_by(commands: Commands) -> list[str]:
    """The names of the variables that commands set."""
    names: list[str] = []
    for command in commands:
        match command:
            case Simple(assignments=assignments, words=words):
                names += [
                    assignment.name
                    for assignment in (*assignments, *words)
                    if isinstance(assignment, Assignment)
                ]
            case Group(body=body) | Loop(body=body):
                names += _variables_set_by(body)
            case Branches(branches=branches):
                names += [name for _, body in branches for name in _variables_set_by(body)]
            case Cases(branches=cases):
                names += [name for _, body in cases for name in _variables_set_by(body)]
            case Chain(first=first, then=then):
                names += _variables_set_by((*first, *then))
    return names


def _verdict_of_test(words: Sequence[str]) -> bool | None:
    """The verdict of `test`; None: it is known only when the script runs."""
    if words[:1] == ["!"]:
        inner = _verdict_of_test(words[1:])
        return None if inner is None else not inner
    if any(_OPEN in word for word in words):
        return None
    match words:
        case [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, "=~", pattern]:
            return _verdict_of_pattern(pattern, left)
        case [left, sign, right]:
            return _verdict_of_numbers(left or "0", sign, right or "0")
    return None


def _verdict_of_pattern(pattern: str, text: str) -> bool | None:
    """Whether a regular expression is found; None for one that is long or that is none."""
    if len(pattern) >= 100:
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None


def _verdict_of_numbers(left: str, sign: str, right: str) -> bool | None:
    """The verdict of `left -eq right` and the other comparisons of numbers; None for any other."""
    if sign not in _NUMERIC or not _is_integer(left) or not _is_integer(right):
        return None
    difference = int(left) - int(right)
    order = (difference > 0) - (difference < 0)
    return order in _NUMERIC[sign]


_NUMERIC = {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}
"""The comparisons of numbers, each with the signs of `left - right` for which it holds."""


def _script_of_shell(words: Sequence[str]) -> str | None:
    """The commands of `bash -lc COMMANDS`, also behind a launcher: `srun bash -c COMMANDS`."""
    for i, word in enumerate(words):
        if word.rpartition("/")[2] not in _SHELLS:
            continue
        for flag, script in zip(words[i + 1 :], words[i + 2 :], strict=False):
            if re.fullmatch(r"-[a-z]*c", flag):
                return script
            if not flag.startswith("-"):
                break
    return None


def _is_list(source: str) -> bool:
    return bool(re.match(rf"@|{_NAME}\[@\]", source))


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def _regex(pattern: str) -> str:
    """A pattern of the shell as a regular expression."""
    meanings = {"*": ".*", "?": "."}
    return "".join(meanings.get(sign, re.escape(sign)) for sign in pattern)


def _without_match(value: str, sign: str, pattern: str) -> str:
    """`${value#pattern}`, `##`, `%` and `%%`."""
    lengths = range(len(value) + 1)
    if len(sign) == 2:
        # the longest match first
        lengths = lengths[::-1]
    for length in lengths:
        if sign[0] == "#":
            piece = value[:length]
            rest = value[length:]
        else:
            piece = value[len(value) - length :]
            rest = value[: len(value) - length]
        if fnmatch.fnmatchcase(piece, pattern):
            return rest
    return value


def _split_fields(text: str) -> list[str]:
    """Split at spaces outside of what is not known."""

    def with_placeholders(unknown: re.Match[str]) -> str:
        return re.sub(r"\s", _SPACE, unknown[0])

    text_to_split = re.sub(rf"{_OPEN}[^{_CLOSE}]*{_CLOSE}", with_placeholders, text)
    return [piece.replace(_SPACE, " ") for piece in text_to_split.split()]


def _array_text(value: Value) -> str:
    """A text, or the items of an array as one text."""
    return value if isinstance(value, str) else " ".join(value.values())


def _without_marks(text: str) -> str:
    """A text for people, without marks."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def _quote_unknown(text: str) -> str:
    """A text with unknown pieces, quoted so that it can be parsed once more."""
    return re.sub(rf"{_OPEN}([^{_CLOSE}]*){_CLOSE}", lambda match: match[0].replace("$", ""), text)


def _display(words: Sequence[str]) -> str:
    """Words in a message, at most 100 signs of them."""
    line = " ".join(map(_without_marks, words))
    text = " ".join(line.split())
    if len(text) >= 100:
        text = f"{text[:97]}..."
    return f"`{text}`"


def _hydra_value(text: str) -> Any:
    """The value of an option in Hydra's grammar, which is nearly that of YAML."""
    if _OPEN in text:
        return Unknown(_without_marks(text))
    if re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+", text):
        return float(text)
    # YAML has a space behind the colon of a mapping, Hydra need not have one
    yaml_text = text
    if text.startswith("{"):
        yaml_text = re.sub(r"([{,]\s*[\w.'\"-]+):(?=\S)", r"\1: ", text)
    try:
        return yaml.safe_load(yaml_text)
    except yaml.YAMLError:
        return text
