"""The value of an option of text is taken letter by letter; every other type has its forms, and
each can be written.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest

from dapo.api.keywords import build_scaled, options_from
from dapo.config import Config, build_config, dump_config, load_config, parse_overrides
from dapo.config.load import override, require_set_once, without_repeats
from dapo.config.option_entries import flat_options
from dapo.config.option_fields import options_of
from dapo.config.option_values import plain_references
from dapo.core.errors import ConfigError
from helpers.tables import for_each_row

TEXTS = [
    "Give # of apples",
    "end with #### and the number",
    'Write "Answer: N"',
    "a: b",
    "5",
    "-1.5e3",
    "no",
    "on",
    "true",
    "[",
    "[a, b]",
    "{",
    "{a: 1}",
    "~",
    "null",
    "Null",
    "none",
    '"quoted"',
    "'quoted'",
    '"half',
    "  spaces  ",
    "\ttab",
    "two\nlines\n",
    "=",
    "a=b==c",
    "",
    "- item",
    "? key",
    "| block",
    "> folded",
    "&anchor x",
    "*alias",
    "!!int 5",
    "@at",
    "%percent",
    "back\\slash\\n",
    "\\null",
    "${oc.env:HOME} ${x}",
    "\\${x}",
    "1:30",
    "数学 😀",
]
TEXT_OPTIONS = [name for name, info in options_of() if info.annotation in (str, str | None)]
UNION_OPTIONS = ["data.train", "data.eval", "reward.verifier", "audit.verifier"]
BASE: dict[str, Any] = {"model": "m", "data": {"train": "builtin:sums"}}


def value_of(options: Any, name: str) -> Any:
    for part in name.split("."):
        options = options[part]
    return options


def test_the_options_of_text_are_found_by_their_type() -> None:
    assert {"data.instruction", "data.system", "model.name", "environment.name"} <= set(
        TEXT_OPTIONS
    )


@for_each_row("name", TEXT_OPTIONS)
def test_an_option_of_text_is_taken_letter_by_letter(name: str) -> None:
    expected = dict(zip(TEXTS, TEXTS, strict=True))
    if dict(options_of())[name].annotation is not str:
        expected |= {"null": None, "\\null": "null"}
    for text in TEXTS:
        found = value_of(parse_overrides([f"{name}={text}"]), name)
        assert (found if found is None else plain_references(found)) == expected[text], text


@for_each_row("text", TEXTS)
def test_an_instruction_arrives_as_it_was_typed_also_after_it_was_stored(
    text: str, tmp_path: Path
) -> None:
    typed = build_config(BASE, [f"data.instruction={text}"])
    assert typed.data.instruction == text
    (tmp_path / "c.yaml").write_text(dump_config(typed), encoding="utf-8")
    assert load_config(tmp_path / "c.yaml") == typed
    built, _ = build_scaled(BASE, options_from({"instruction": text}), where="test")
    assert built.data.instruction == text


@for_each_row("name", [*TEXT_OPTIONS, *UNION_OPTIONS, "reward.options.x", "environment.options.x"])
def test_every_text_can_be_written_on_a_command_line(name: str) -> None:
    for text in TEXTS:
        (value,) = options_from({name: text}).values()
        assert value_of(parse_overrides([override(name, value)]), name) == value, text


def test_values_of_several_types_are_told_apart_by_their_form() -> None:
    for typed, expected in {
        "data.system=null": None,
        "data.system=\\null": "null",
        "data.system=~": "~",
        "data.train={path: a.jsonl, size: 5}": {"path": "a.jsonl", "size": 5},
        "data.train=a # b.jsonl": "a # b.jsonl",
        "data.train=a: b.jsonl": "a: b.jsonl",
        "data.train=\\{a}.jsonl": "{a}.jsonl",
        "data.train=[a.jsonl, b.jsonl]": ["a.jsonl", "b.jsonl"],
        "reward.verifier={math: 1, code: 0.5}": {"math": 1, "code": 0.5},
        "reward.verifier=math: 1": "math: 1",
        "environment.tools=[m:f, 5, no, 'a # b']": ["m:f", "5", "no", "a # b"],
        "reward.options.x=5": 5,
        "reward.options.x=1e-3": 1e-3,
        "reward.options.x=false": False,
        'reward.options.x="5"': "5",
        "reward.options.x='a # b'": "a # b",
        "reward.options.x=Give # of: apples": "Give # of: apples",
        "reward.options.x=5 # or 6": "5 # or 6",
        "reward.options.x=1:30": "1:30",
        "reward.options.x={a: [1]}": {"a": [1]},
        "audit.verifier.choice.letters=ABCD": "ABCD",
        "optim.lr=1e-4": 1e-4,
        "train.num_steps=5": 5,
    }.items():
        name = typed.partition("=")[0]
        assert value_of(parse_overrides([typed]), name) == expected, typed


def test_the_texts_of_a_list_are_taken_letter_by_letter_too() -> None:
    words = ["bash", "-c", "echo ${HOME} ${#x} \\${y}"]
    one_text = f"environment.command={shlex.join(words)}"
    several = f"environment.command=[{words[0]}, {words[1]}, '{words[2]}']"
    for typed in (one_text, several):
        assert build_config(BASE, [typed]).environment.command == tuple(words), typed
        value = value_of(parse_overrides([typed]), "environment.command")
        written = override("environment.command", value)
        assert value_of(parse_overrides([written]), "environment.command") == value, typed


@pytest.mark.parametrize(
    "typed", ["environment.tools=[a, b # c\n]", "reward.options.x={a: 1 # b\n}"]
)
def test_a_comment_in_a_list_or_mapping_is_refused_and_not_dropped(typed: str) -> None:
    with pytest.raises(ConfigError, match="`#` begins a comment here"):
        parse_overrides([typed])


@pytest.mark.parametrize("name", ["data.instruction", "model.name"])
@pytest.mark.parametrize("value", [5, True, ["a"]])
def test_a_value_from_python_that_is_no_text_is_refused_where_a_text_is_wanted(
    name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"option {name}"):
        build_scaled(BASE, options_from({name: value}), where="test")
    with pytest.raises(ConfigError, match=f"option {name}: input should be a text"):
        override(name, value)


def test_a_list_of_data_sources_is_a_mix_named_after_them() -> None:
    typed = build_config(
        BASE, ["data.train=[data/a.jsonl, b c.parquet, 'hub:org/a', builtin:sums]"]
    )
    names = ["a", "b-c", "a-3", "sums"]
    assert typed.data.train == {
        "mix": dict(
            zip(names, ["data/a.jsonl", "b c.parquet", "hub:org/a", "builtin:sums"], strict=True)
        )
    }
    assert build_config(
        {"model": "m", "data": ["x.jsonl", {"path": "y.jsonl", "size": 3}]}
    ).data.train == {"mix": {"x": "x.jsonl", "y": {"path": "y.jsonl", "size": 3}}}
    assert list(flat_options(typed))


HUB = {"hub": "org/a", "config": "main", "split": "test", "prompt": "question", "remove": "<.>"}


@pytest.mark.parametrize("option", ["train", "eval", "demonstrations"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("{path: a.jsonl}", {"path": "a.jsonl"}),
        (".path=a.jsonl", {"path": "a.jsonl", "prompt": "question", "remove": "<.>"}),
        (".builtin=sums", {"builtin": "sums"}),
        (".mix.b=b.jsonl", {"mix": {"b": "b.jsonl"}}),
        (".split=train", HUB | {"split": "train"}),
        (".hub=org/b", HUB | {"hub": "org/b"}),
    ],
)
def test_a_source_of_another_kind_takes_the_place_of_the_one_in_the_file(
    option: str, override: str, expected: dict[str, Any]
) -> None:
    dotted = override if override.startswith(".") else f"={override}"
    sources = {"train": "x.jsonl", option: dict(HUB)}
    config = build_config({"model": "m", "data": sources}, [f"data.{option}{dotted}"])
    assert config.data.model_dump()[option] == expected
    in_mix = {"train": "x.jsonl", option: {"mix": {"a": dict(HUB)}}}
    config = build_config({"model": "m", "data": in_mix}, [f"data.{option}.mix.a.path=a.jsonl"])
    source = {"path": "a.jsonl", "prompt": "question", "remove": "<.>"}
    assert config.data.model_dump()[option] == {"mix": {"a": source}}
    # the pages say that another place keeps the number of rows, too
    short = {"train": "x.jsonl", option: HUB | {"size": 9}}
    config = build_config({"model": "m", "data": short}, [f"data.{option}.path=a.jsonl"])
    assert config.data.model_dump()[option] == source | {"size": 9}


@pytest.mark.parametrize(
    "name",
    [
        "data.chat_template_kwargs",
        "rollout.options",
        "rollout.vllm.options",
        "reward.options",
        "environment.options",
    ],
)
def test_a_written_mapping_replaces_free_options_and_a_dotted_one_adds_to_them(name: str) -> None:
    def value_under(overrides: list[str]) -> object:
        merged = parse_overrides([f"{name}={{old: 1}}", *overrides])
        for part in name.split("."):
            merged = merged[part]
        return merged

    assert value_under([f"{name}={{new: 2}}"]) == {"new": 2}
    assert value_under([f"{name}.new=2"]) == {"old": 1, "new": 2}


def test_options_that_contradict_each_other_in_one_call_are_refused() -> None:
    refused: list[list[str]] = [
        ["optim.lr=1", "optim.lr=2"],
        ["optim={lr: 1}", "optim.lr=2"],
        ["model=m", "model.name=n"],
        ["data.train=a", "data.train.size=5"],
        ["reward.options.x=1", "reward.options={}"],
        ["data.train={path: a}", "data.train={builtin: sums}"],
    ]
    for items in refused:
        with pytest.raises(ConfigError, match="is set twice, by"):
            require_set_once([(item, parse_overrides([item])) for item in items])
        assert parse_overrides(without_repeats(items)) == parse_overrides(items), items
    allowed: list[list[str]] = [
        ["optim.lr=1", "optim.lr=1"],
        ["data.train={path: a}", "data.train.size=5"],
        ["reward.options={}", "reward.options.x=1"],
        ["loss.clip_high=0.3", "loss.clip_low=0.2"],
    ]
    for items in allowed:
        require_set_once([(item, parse_overrides([item])) for item in items])


@pytest.mark.parametrize(
    "keywords",
    [
        {"optim": {"lr": 1e-4}, "lr": 1e-3},
        {"rollout": {"group_size": 4}, "group_size": 8},
        {"loss": {"clip_high": 0.3}, "loss.clip_high": 0.2},
        {"steps": 2, "train": {"num_steps": 3}},
    ],
)
def test_a_section_and_one_of_its_options_are_one_option_set_twice(
    keywords: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="is set twice"):
        options_from(keywords)
    assert Config.model_fields.keys() >= keywords.keys() & Config.model_fields.keys()
