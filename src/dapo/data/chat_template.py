"""A model's chat template: the text of messages, the forms that it takes, its marks, and what it
reads besides.

Rendering is a function of the messages: the clock that a template may read stands still, and what
it draws at random is drawn with a fixed seed.
"""

import json
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.text import quoted
from dapo.types import Message, content_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS = re.compile(r"think|reason", re.IGNORECASE)
"""Marks around private reasoning, which an instruction to the model may name."""
_MARK = re.compile(r"<+[^<>\s]{1,60}>+|\[[^\[\]\s]{1,60}\]")
"""A text in brackets, such as `<|user|>`, `<start_of_turn>`, `[/INST]`."""
_FIRST = "zq1question"
_ANSWER = "zq2answer"
_LAST = "zq3question"
_NAME = "zq4tool"
_KEY = "zq5key"
_VALUE = "zq6value"
# tags of transformers around the assistant's tokens
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_SEEDING = threading.Lock()


class ChatTemplate:
    """The chat template of a tokenizer, with variables and time for every rendering."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        time: datetime,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Render nothing yet.

        Args:
            tokenizer: The tokenizer, which has a chat template.
            time: The local time that the template reads as now.
            variables: Variables for the template (`data.chat_template_kwargs`).
            tools: Schemas of tools.
        """
        self._tokenizer = tokenizer
        self._time = time
        self._variables = dict(variables)
        self._tools = [dict(schema) for schema in tools] or None

    # --- what the template reads

    @cached_property
    def _tree(self) -> Any:
        """The template, parsed; None if it cannot be."""
        from jinja2 import Environment, TemplateError

        try:
            source = self._tokenizer.get_chat_template(None, self._tools)
            environment = Environment(extensions=["jinja2.ext.loopcontrols"])
            environment.globals.clear()  # names of globals, such as lipsum, are read as well
            return environment.parse(_GENERATION.sub("", source))
        except (TemplateError, TypeError, ValueError):
            return None

    @cached_property
    def variables_read(self) -> frozenset[str]:
        """The names of the variables that the template does not set itself."""
        from jinja2 import meta

        if self._tree is None:
            return frozenset()
        return frozenset(meta.find_undeclared_variables(self._tree))

    @property
    def reads_clock(self) -> bool:
        return "strftime_now" in self.variables_read

    @cached_property
    def _draws(self) -> bool:
        """True if the template has a random function."""
        from jinja2 import nodes

        if self._tree is None:
            return False
        if "lipsum" in self.variables_read:
            return True
        return any(node.name == "random" for node in self._tree.find_all(nodes.Filter))

    @cached_property
    def _words(self) -> frozenset[str]:
        """All attributes and texts of the template's code, with the message keys that it reads."""
        from jinja2 import nodes

        if self._tree is None:
            return frozenset()
        words = {node.attr for node in self._tree.find_all(nodes.Getattr)}
        for node in self._tree.find_all(nodes.Const):
            if isinstance(node.value, str):
                words.add(node.value)
        return frozenset(words)

    def unread_keys(self, messages: Sequence[Message]) -> list[str]:
        """Return the message keys that the template never names, so that the text ignores them."""
        keys = set(chain.from_iterable(messages)) - self._words - {"role", "content"}
        unread = []
        for key in sorted(keys):
            shorter = [_without_key(message, key) for message in messages]
            # a template may also read all keys at once, as JSON of the message
            try:
                is_read = self.render(messages) != self.render(shorter)
            except ValueError:
                continue
            if not is_read:
                unread.append(key)
        return unread

    # --- rendering

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        header: bool = True,
        is_open: bool = False,
        tools: Any = None,
        **variables: Any,
    ) -> str:
        """Return the text of messages.

        Args:
            messages: the messages.
            header: whether the header of the assistant's next turn follows.
            is_open: the text ends with the last message, whose turn is not closed, so that the
                model continues it.
            tools: schemas of tools if the constructor got none.
            variables: further variables for the template.

        Raises:
            ValueError: the template rejects the messages, with its reason.
        """
        from jinja2 import TemplateError

        options = {
            "strftime_now": self._time.strftime,
            **self._variables,
            **variables,
            "tools": self._tools or tools,
            "add_generation_prompt": header and not is_open,
            "tokenize": False,
        }
        if is_open:
            options["continue_final_message"] = True
        plain = [dict(message) for message in messages]
        try:
            # the seeding takes a lock, which most templates do not need
            if not self._draws:
                return str(self._tokenizer.apply_chat_template(plain, **options))
            with _seeded(json.dumps([plain, header], default=str)):
                return str(self._tokenizer.apply_chat_template(plain, **options))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(str(error)) from None

    def _try(self, messages: Sequence[Mapping[str, Any]], *, header: bool = True) -> str | None:
        """Return the text of messages; None if the template rejects them."""
        try:
            return self.render(messages, header=header)
        except ValueError:
            return None

    # --- the forms of messages

    def in_its_forms(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages with contents and call arguments in the form that the template takes.

        A form that it takes is left as it is. Raises ValueError for arguments that are no JSON
        object.
        """
        return [self._in_its_form(message) for message in messages]

    def _in_its_form(self, message: Message) -> dict[str, Any]:
        adapted = dict(message)
        content = message.get("content")
        if isinstance(content, str) and not self._takes_texts and self._takes_parts:
            adapted["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list | tuple) and not self._takes_parts:
            adapted["content"] = content_text(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            adapted["tool_calls"] = [self._call_in_its_form(call) for call in calls]
        return adapted

    def _call_in_its_form(self, call: Any) -> Any:
        """Return a call with its arguments in the form that the template writes."""
        function = None
        if isinstance(call, Mapping):
            function = call.get("function", call)
        arguments = None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
        if isinstance(arguments, str) and self._takes_objects and not self._takes_json:
            arguments = _parsed_arguments(arguments)
        elif isinstance(arguments, Mapping) and self._takes_json and not self._takes_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        if "function" not in call:
            return {**call, "arguments": arguments}
        return {**call, "function": {**call["function"], "arguments": arguments}}

    @cached_property
    def _takes_texts(self) -> bool:
        """True if the content of a message may be a text."""
        return _FIRST in (self._try([_user(_FIRST)]) or "")

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the content of a message may be a list of parts."""
        rendered = self._try([_user([{"type": "text", "text": _FIRST}])])
        if rendered is None or _FIRST not in rendered:
            return False
        return rendered == self._try([_user(_FIRST)]) or not self._takes_texts

    @cached_property
    def _takes_objects(self) -> bool:
        """True if the arguments of a call may be an object."""
        return self._writes_call({_KEY: _VALUE})

    @cached_property
    def _takes_json(self) -> bool:
        """True if the arguments of a call may be JSON text."""
        return self._writes_call(json.dumps({_KEY: _VALUE}))

    def _writes_call(self, arguments: object) -> bool:
        """Return True if the template writes call arguments as JSON that is not quoted twice."""
        function = {"name": _NAME, "arguments": arguments}
        call = {"type": "function", "id": "call00000", "function": function}
        result = {"role": "tool", "name": _NAME, "tool_call_id": "call00000", "content": _ANSWER}
        # templates differ in what they accept around a call: the first form that renders decides
        for content in ("", None):
            turn = {"role": "assistant", "content": content, "tool_calls": [call]}
            for behind in ([result], [], [result, _user(_LAST)]):
                text = self._try([_user(_FIRST), turn, *behind], header=False)
                if text is not None and _NAME in text:
                    return _VALUE in text and f'\\"{_KEY}' not in text and f"'{_KEY}'" not in text
        return False

    # --- texts that are rendered already

    def rendered_prompt(self, text: str) -> str | None:
        """Return a text that is a whole prompt in this template, with its begin token, or None.

        It begins with a mark of the template, and ends with what the template puts behind the last
        question. The beginning of the answer, without marks, may follow.
        """
        header = self._borders[-1].rstrip()
        if not self._marks.search(header) or not self._marks.match(text):
            return None
        _, found_header, answer = text.rpartition(header)
        if not found_header or self._marks.search(answer):
            return None
        begin = str(self._tokenizer.bos_token or "")
        if self._borders[0].startswith(begin) and not text.startswith(begin):
            return begin + text
        return text

    def require_unrendered(self, messages: Sequence[Message]) -> None:
        """Raise DataError if a message holds the template's marks, or is a whole conversation."""
        for message in messages:
            text = content_text(message)
            match = self._marks.search(text)
            mark = None
            if match:
                mark = match[0]
            elif message["role"] == "user":
                mark = self._labels_in(text)
            if mark:
                raise DataError(
                    f"the text {quoted(text)} holds {mark}, which the model's chat template uses"
                    " for turns, so the prompt would be rendered twice: give messages with role and"
                    " content, or use whole prompts as they are with data.chat_template=off;"
                    " remove a mark that is part of the question"
                )

    @cached_property
    def _borders(self) -> tuple[str, str, str, str]:
        """The template's texts before and after a question, between turns, and after an answer."""
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._try([_user(_FIRST), answer, _user(_LAST)]) or ""
        if _FIRST in text and _ANSWER in text and _LAST in text:
            head, _, remainder = text.partition(_FIRST)
            behind, _, remainder = remainder.partition(_ANSWER)
            between, _, header = remainder.partition(_LAST)
            return head, behind, between, header
        head, _, header = (self._try([_user(_FIRST)]) or "").partition(_FIRST)
        return head, header, "", header

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Special tokens that the template writes, and bracketed texts around turns."""
        head, behind, between, header = self._borders
        turns = f"{behind} {between} {header}"
        candidates = set(_MARK.findall(turns))
        tokenizer = self._tokenizer
        special = {str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        for token in tokenizer.added_tokens_decoder.values():
            if token.special:
                special.add(str(token.content))
        for text in special:
            if text in f"{head} {turns}" or text == tokenizer.bos_token:
                candidates.add(text)
        # a word alone may be part of any question
        marks = [mark for mark in candidates if re.search(r"[^\w\s]", mark)]
        marks = [mark for mark in marks if not THOUGHTS.search(mark)]
        longest_first = sorted(marks, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _labels_in(self, text: str) -> str | None:
        """Return the labels of both roles, as `User:`, if they make the text a conversation.

        It ends with the label of the answer, or begins with that of the question and has the
        beginning of the answer behind its label.
        """
        head, _, _, header = self._borders
        question = self._label(head)
        answer = self._label(header)
        if not question or not answer:
            return None
        before_answer, found_label, begun_answer = text.rpartition(answer)
        if not found_label:
            return None
        if re.search(rf"(?:^|\s){re.escape(question)}", before_answer) is None:
            return None
        if begun_answer.strip() and not text.lstrip().startswith(question):
            return None
        return f"{question} and {answer}"

    def _label(self, border: str) -> str:
        """Return the last line of a border without its marks, if it ends as a label does."""
        lines = self._marks.sub("", border).strip().splitlines()
        if not lines:
            return ""
        label = lines[-1].strip()
        return label if re.fullmatch(r".*\w.*[^\w\s]", label) else ""


def _without_key(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parsed_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call from JSON text; an empty text has none."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call must be a JSON object, got {quoted(text)}")
    return arguments


@contextmanager
def _seeded(seed: str) -> Iterator[None]:
    """Seed Python's random numbers, from which jinja's random functions draw, in the block."""
    with _SEEDING:
        state = random.getstate()
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
