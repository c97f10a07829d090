"""Tool calls: schemas of functions, and turns with right, wrong and hostile calls."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.core.errors import DataError
from dapo.environments.calls import CallReader, ToolCall, WrongCall, tool_schema, tool_text
from helpers.tables import for_each_row


def add(a: int, b: int = 2) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number,
            on two lines
    """
    return a + b


def search(
    query: str, kinds: list[str], where: Literal["web", "files"] = "web", limit: float | None = None
) -> str:
    """Searches.

    Args:
        query: words
        kinds: kinds of pages
        where: the source
        limit: the most results
    """
    return f"{query} {kinds} {where} {limit}"


class Counter:
    def increment(self, step: int) -> int:
        """Increments the counter.

        Args:
            step: what is added
        """
        return step


SCHEMAS = [tool_schema(add), tool_schema(search)]


def hermes(text: str) -> list[ToolCall | WrongCall]:
    return CallReader("hermes", SCHEMAS).read(text)


def llama(text: str) -> list[ToolCall | WrongCall]:
    return CallReader("llama", SCHEMAS).read(text)


def test_a_schema_has_types_defaults_and_descriptions_and_no_self():
    function = SCHEMAS[0]["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first number"},
            "b": {
                "type": "integer",
                "description": "the second number, on two lines",
                "default": 2,
            },
        },
        "required": ["a"],
    }
    assert tool_schema(Counter().increment)["function"]["parameters"]["required"] == ["step"]


def test_a_function_without_types_descriptions_or_named_parameters_is_refused():
    def no_docstring(a: int) -> int:
        return a

    def no_description(a: int) -> int:
        """Does something."""
        return a

    def no_type(a) -> int:  # type: ignore[no-untyped-def]
        """Does something.

        Args:
            a: a number
        """
        return a

    def any_number(*numbers: int) -> int:
        """Does something.

        Args:
            numbers: numbers
        """
        return sum(numbers)

    for function, reason in [
        (no_docstring, "docstring"),
        (no_description, "description for the argument 'a'"),
        (no_type, "missing a type hint"),
        (any_number, r"parameter \*numbers"),
    ]:
        with pytest.raises(DataError, match=f"tool {function.__name__}: .*{reason}"):
            tool_schema(function)


ADD = '{"name": "add", "arguments": {"a": 1}}'


@for_each_row(
    ("text", "count"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", 1),
        (f"Let me see. <tool_call>{ADD}</tool_call> and <tool_call>{ADD}</tool_call>", 2),
        (f"<tool_call>[{ADD}, {ADD}]</tool_call>", 2),
        (f"<tool_call>{ADD}", 1),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', 1),
        (f"<think>I could <tool_call>{ADD}</tool_call></think><tool_call>{ADD}</tool_call>", 1),
        (f"<think><tool_call>{ADD}</tool_call></think>The answer is 3.", 0),
        ("The answer is 3.", 0),
        (ADD, 0),
        ("", 0),
    ],
)
def test_calls_in_the_form_of_hermes(text: str, count: int):
    assert hermes(text) == [ToolCall("add", {"a": 1})] * count


@for_each_row(
    ("text", "count"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', 1),
        ('\n<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', 1),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', 2),
        ('{"name": "add", "parameters": {"a": 1}}\nThat is it.', 1),
        ('{"answer": 3}', 0),
        ('Let me call {"name": "add", "parameters": {"a": 1}}', 0),
        ("", 0),
    ],
)
def test_calls_in_the_form_of_llama_3(text: str, count: int):
    assert llama(text) == [ToolCall("add", {"a": 1})] * count


MARKS = [
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<reasoning>", "</reasoning>"),
]
CALLS = {
    "hermes": f"<tool_call>{ADD}</tool_call>",
    "llama": '{"parameters": {"a": 1}, "name": "add"}',
}


@pytest.mark.parametrize(("opening", "closing"), MARKS)
@for_each_row("form", CALLS)
def test_a_thought_holds_no_call_whether_it_ends_or_was_cut_off(
    form: Any, opening: str, closing: str
):
    reader = CallReader(form, SCHEMAS)
    begun = CallReader(form, SCHEMAS, begun=f"{opening}\n")
    made = CALLS[form]
    for text, count in [
        (f"{opening}perhaps {made}", 0),
        (f"{opening}{made}{closing}3", 0),
        (f"{opening}why{closing}\n\n{made}", 1),
        (f"{opening}{made}{closing}{made}", 1),
        (f"why{closing}{made}", 1),
        (f"{made}{closing}3", 0),
        (f"{opening}a{closing}{opening}{made}", 0),
        (f"{opening}a{closing}{opening}b{closing}{made}", 1),
        (f"{made}{opening}and then", 1),
    ]:
        assert reader.read(text) == [ToolCall("add", {"a": 1})] * count, text
    assert (
        begun.read(made) == begun.read(f"perhaps {made}") == begun.read(f"{made}{closing}3") == []
    )
    assert begun.read(f"perhaps {made}{closing}{made}") == [ToolCall("add", {"a": 1})]


STRINGS = [
    "</tool_call>",
    "<tool_call>",
    "</think>",
    "<think>",
    "<|python_tag|>",
    "}}",
    '"',
    "é\u2028€",
    '{"name": 1}',
]


@pytest.mark.parametrize("text", STRINGS)
@for_each_row("name_first", [True, False])
def test_a_mark_within_a_string_is_text_in_any_order_of_keys(text: str, name_first: bool):
    arguments = {"query": f"what is {text}?", "kinds": []}
    for form, key in (
        ("hermes", "arguments"),
        ("hermes", "parameters"),
        ("llama", "parameters"),
        ("llama", "arguments"),
    ):
        for given_arguments in (arguments, json.dumps(arguments)):
            entries = [("name", "search"), (key, given_arguments)]
            value = json.dumps(dict(entries if name_first else entries[::-1]), ensure_ascii=False)
            made = f"<tool_call>{value}</tool_call>" if form == "hermes" else value
            for around in (made, f"{made}\nThat is it.", f"<think>?</think>{made}"):
                assert CallReader(form, SCHEMAS).read(around) == [ToolCall("search", arguments)]  # type: ignore[arg-type]


@for_each_row(
    ("text", "expected"),
    [
        (f"<tool_call>{ADD}\n{ADD}</tool_call>", [1, 1]),
        (f"<tool_call>{ADD} and so on", [1]),
        (f"<tool_call>{ADD} and <tool_call>{ADD}</tool_call>", [1, 1]),
        (
            f"<tool_call>{ADD} }}</tool_call><tool_call>{ADD}</tool_call>",
            ["'}' stands behind it", 1],
        ),
        (f"<tool_call>{ADD[:-2]}</tool_call>\n<tool_call>{ADD}</tool_call>", ["not valid JSON", 1]),
        ("<tool_call>{'name': 'add', 'arguments': {'a': 1}}</tool_call>", ["double quotes"]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', ["add: missing: a"]),
        (f'<tool_call>{{"type": "function", "function": {ADD}}}</tool_call>', [1]),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', ["Error: expected"]),
    ],
)
def test_what_stands_between_tags_is_calls_or_one_error(text: str, expected: list[Any]):
    found = hermes(text)
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert each == ToolCall("add", {"a": 1}) if wanted == 1 else wanted in each.error  # type: ignore[union-attr]


@for_each_row(
    ("text", "expected"),
    [
        ('{"type": "function", "parameters": {"a": 1}, "name": "add"}', [1]),
        ('I look. <|python_tag|>{"parameters": {"a": 1}, "name": "add"}', [1]),
        (
            '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {"a": 1}}]',
            [1, 1],
        ),
        ('{"name": "add", "parameters": {"a": 1}} {"answer": 3}', [1]),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": ',
            [1, "not valid JSON"],
        ),
        ("{'name': 'add', 'parameters': {'a': 1}}", ["double quotes"]),
        ('{"parameters": {"a": 1}, "name": ', ["not valid JSON"]),
        ('{"name": "sub", "parameters": {"a": 1}}', ["there is no tool 'sub'"]),
        ('{"name": "add"}', ["add: missing: a"]),
        ('{"name": "Ada", "age": 36}', []),
        ('{"type": "circle", "r": 2}', []),
        ("{1, 2}", []),
        ("[1, 2]", []),
        ("3", []),
    ],
)
def test_json_without_a_tag_is_a_call_or_an_answer(text: str, expected: list[Any]):
    found = llama(text)
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert each == ToolCall("add", {"a": 1}) if wanted == 1 else wanted in each.error  # type: ignore[union-attr]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "x", "kinds": ["a"]},
        {"query": "x", "kinds": [], "where": "files", "limit": 3},
        {"query": "", "kinds": [], "limit": None},
        {"query": "", "kinds": [], "limit": 2.5},
    ],
)
def test_arguments_that_fit_are_passed_on(arguments: dict[str, Any]):
    assert hermes(call("search", **arguments)) == [ToolCall("search", arguments)]


def test_an_integer_with_a_point_reaches_the_tool_as_an_integer():
    def take(count: int, sizes: list[int], share: float, limit: int | None = None) -> str:
        """Takes.

        Args:
            count: a number
            sizes: numbers
            share: a number
            limit: a number
        """
        return f"{count} {sizes} {share} {limit}"

    (made,) = CallReader("hermes", [tool_schema(take)]).read(
        call("take", count=2.0, sizes=[1.0, 2], share=2.0, limit=3.0)
    )
    assert isinstance(made, ToolCall)
    assert take(**made.arguments) == "2 [1, 2] 2.0 3"


@for_each_row(
    "parameters",
    [
        # null, where Go writes an empty list or map
        {"type": "object", "properties": {"a": {"type": "array"}}, "required": None},
        {"properties": {"a": {"type": None, "enum": None, "items": None}}},
        # any value
        {"properties": {"a": True}},
        # a tuple of JSON Schema's older drafts, and of its newer ones
        {"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}}},
        {"properties": {"a": {"prefixItems": [{"type": "integer"}], "items": False}}},
        {"properties": {"a": {"type": ["array", ["x"]]}}, "required": [["a"], "a"]},
    ],
)
def test_schemas_as_clients_write_them_are_read(parameters: dict[str, Any]):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    reader = CallReader("hermes", [tool])
    assert reader.read(call("f", a=[1])) == [ToolCall("f", {"a": [1]})]


def test_a_schema_without_properties_lets_a_call_be_wrong():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": None}}}
    (wrong,) = CallReader("hermes", [tool]).read(call("f", a=1))
    assert isinstance(wrong, WrongCall)
    assert wrong.written == ToolCall("f", {"a": 1})


@for_each_row(
    ("text", "error"),
    [
        (call("sub", a=1), "Error: there is no tool 'sub'; the tools are: add, search"),
        (call("add"), "Error: add: missing: a"),
        (call("add", a=1, c=2), "Error: add: there is no argument 'c'; the arguments are: a, b"),
        (call("add", a="1"), 'Error: add: a must fit the schema {"type": "integer", '),
        (call("add", a=True), "Error: add: a must fit the schema"),
        (call("add", a=1.5), "Error: add: a must fit the schema"),
        (call("add", a=None), "Error: add: a must fit the schema"),
        (call("search", query="x", kinds=[1]), "Error: search: kinds must fit the schema"),
        (
            call("search", query="x", kinds=[], where="here"),
            "Error: search: where must fit the schema",
        ),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "Error: add: expected an object of arguments",
        ),
        (
            '<tool_call>{"name": "add", "arguments": "1 +"}</tool_call>',
            "Error: the call is not valid JSON: ",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "Error: the call is not valid JSON: NaN",
        ),
        ("<tool_call>add(1)</tool_call>", "Error: the call is not valid JSON: "),
        ("<tool_call></tool_call>", "Error: the call is not valid JSON: "),
        ("<tool_call>3</tool_call>", "Error: expected <tool_call>"),
        ('<tool_call>{"name": ["add"]}</tool_call>', "Error: expected <tool_call>"),
        (
            "<tool_call>" + "[" * 100_000 + "</tool_call>",
            "Error: the call is not valid JSON: nested too deeply",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
            "Error: the call is not",
        ),
    ],
)
def test_a_wrong_call_gives_an_error_for_the_model(text: str, error: str):
    (wrong,) = hermes(text)
    assert isinstance(wrong, WrongCall)
    assert wrong.error.startswith(error)
    assert len(wrong.error) < 500


def test_a_wrong_call_in_the_form_of_llama_3_names_that_form():
    for text in ('{"name": "add", "parameters": {"a": 1', "<|python_tag|>add.call(1)"):
        (wrong,) = llama(text)
        assert isinstance(wrong, WrongCall)
        assert wrong.error.endswith('write {"name": NAME, "parameters": {ARGUMENT: VALUE}}')


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    '{"name": "add", ',
    '"arguments": ',
    '{"a": ',
    "1",
    "}",
    "]",
]


@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12),
    st.sampled_from([hermes, llama]),
)
@settings(max_examples=300, deadline=None)
def test_no_turn_raises_an_exception(pieces: list[str], read: Any):
    assert all(isinstance(each, ToolCall | WrongCall) for each in read("".join(pieces)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x, max_size=3),
    )
)
@settings(max_examples=200, deadline=None)
def test_a_call_with_any_value_is_right_only_if_the_value_is_an_integer(value: Any):
    (made,) = hermes(
        f'<tool_call>{{"name": "add", "arguments": {{"a": {json.dumps(value)}}}}}</tool_call>'
    )
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    assert isinstance(made, ToolCall) == whole


def test_the_text_of_the_tools_has_their_schemas_and_the_form():
    text = tool_text(SCHEMAS, "hermes")
    assert '"name": "add"' in text
    assert "<tool_call>" in text
