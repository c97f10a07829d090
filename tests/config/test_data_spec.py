"""Data specs: every form that the contract names, and every way to get one wrong."""

from pathlib import Path

import pytest

from dapo.config.data_spec import (
    Columns,
    FileSource,
    HubSource,
    MixSource,
    TaskSource,
    kinds,
    parse_spec,
    paths_in,
)
from dapo.core.errors import DataError
from dapo.data.demonstrations import load_demonstrations
from dapo.data.problems import load_problems
from helpers.tables import for_each_row

EXPECTED = (
    "expected a path (.jsonl, .parquet, .csv, .tsv, .json), hub:NAME[:SPLIT], builtin:TASK,...,"
    " gym:TASK,..., environment, a benchmark (aime24, aime25, math500, gsm8k, amc23) or a mapping"
    " with one of the keys path, hub, builtin, gym, environment, mix"
)


@for_each_row(
    ("spec", "source"),
    [
        ("data/x.jsonl", FileSource(Path("data/x.jsonl"))),
        ("odd:name.parquet", FileSource(Path("odd:name.parquet"))),
        ("hub:openai/gsm8k", HubSource("openai/gsm8k")),
        ("hub:openai/gsm8k:test", HubSource("openai/gsm8k", "test")),
        ("builtin:sums, products", TaskSource("builtin", {"sums": {}, "products": {}})),
        (
            "aime24",
            HubSource(
                "HuggingFaceH4/aime_2024",
                "train",
                columns=Columns("problem", "answer"),
                benchmark="aime24",
            ),
        ),
        (
            "gsm8k",
            HubSource(
                "openai/gsm8k", "test", "main", Columns("question", "answer"), benchmark="gsm8k"
            ),
        ),
        ("gym:chain_sum", TaskSource("gym", {"chain_sum": {}})),
        (
            {"gym": {"chain_sum": {"max_terms": 2}}, "size": 2000, "seed": 1},
            TaskSource("gym", {"chain_sum": {"max_terms": 2}}, 2000, 1),
        ),
        (
            {"builtin": {"sums": {"digits": 1}, "products": None}, "size": 400, "seed": 7},
            TaskSource("builtin", {"sums": {"digits": 1}, "products": {}}, 400, 7),
        ),
        (
            {"builtin": "sums,products", "size": None},
            TaskSource("builtin", {"sums": {}, "products": {}}),
        ),
        ({"builtin": ["sums", "gcd"]}, TaskSource("builtin", {"sums": {}, "gcd": {}})),
        (
            {"path": "f.jsonl", "prompt": "question", "answer": "target", "size": 5},
            FileSource(Path("f.jsonl"), Columns("question", "target"), 5),
        ),
        (
            {"hub": "openai/gsm8k", "config": "main", "split": "test"},
            HubSource("openai/gsm8k", "test", "main"),
        ),
        (
            {"mix": {"easy": "builtin:sums", "from-file": {"path": "f.jsonl", "size": 5}}},
            MixSource(
                {
                    "easy": TaskSource("builtin", {"sums": {}}),
                    "from-file": FileSource(Path("f.jsonl"), Columns(), 5),
                }
            ),
        ),
    ],
)
def test_every_form_of_the_contract_is_read(spec, source):
    assert parse_spec(spec) == source


def test_what_remove_matches_is_deleted_from_answers_and_demonstrations(tmp_path: Path):
    path = tmp_path / "solved.jsonl"
    answer = "48/2 = <<48/2=24>>24 clips.\\n#### <<x>>24"
    path.write_text(f'{{"question": "How many?", "answer": "{answer}"}}\n')
    spec = {"path": str(path), "prompt": "question", "answer": "answer", "remove": "<<.*?>>"}
    ((demonstration,), _) = load_demonstrations(parse_spec(spec))
    assert demonstration.answer == "48/2 = 24 clips.\n#### 24"
    (problem,) = load_problems(parse_spec(spec))
    assert (problem.answer, problem.fields["solution"]) == ("24", "48/2 = 24 clips.\n#### 24")
    assert problem.fields["answer"] == "48/2 = <<48/2=24>>24 clips.\n#### <<x>>24"


@for_each_row(
    ("spec", "message"),
    [
        ("", f"the data source is empty; {EXPECTED}"),
        (7, f"data source 7 is a int; {EXPECTED}"),
        (
            "buildin:sums",
            (
                "data source 'buildin:sums': unknown kind 'buildin', did you mean builtin?;"
                f" {EXPECTED}"
            ),
        ),
        ({}, f"data source: the keys (none); {EXPECTED}"),
        ({"file": "x"}, f"data source: the keys file; {EXPECTED}"),
        (
            {"path": "x", "remove": "<<(.*?>>"},
            "data source path: remove is no regular expression (missing ), unterminated subpattern"
            " at position 2): '<<(.*?>>'; a backslash before a sign such as ( takes it literally",
        ),
        ({"path": "x", "hub": "y"}, f"data source: both path and hub; {EXPECTED}"),
        (
            {"path": "x.jsonl", "promt": "q"},
            "data source path: unknown option 'promt'; did you mean prompt?",
        ),
        (
            {"path": "x.jsonl", "response": "Loesung"},
            "data source path: unknown option 'response'; the column of answers or responses is named"
            " by answer: Loesung",
        ),
        (
            {"path": "x.jsonl", "zzz": 1},
            "data source path: unknown option 'zzz'; known: path, prompt, answer, remove, size",
        ),
        (
            {"builtin": "sums", "sede": 1},
            "data source builtin: unknown option 'sede'; did you mean seed?",
        ),
        (
            {"builtin": "sums", "size": 0},
            "data source builtin: size must be an integer of at least 1, got 0",
        ),
        (
            {"gym": "gcd", "seed": True},
            "data source gym: seed must be an integer of at least 0, got True",
        ),
        (
            {"gym": "gcd", "seed": "1"},
            "data source gym: seed must be an integer of at least 0, got '1'",
        ),
        (
            "builtin:",
            "data source builtin: no task is named; write for example builtin:sums,products",
        ),
        ({"gym": {}}, "data source gym: no task is named; write for example gym:chain_sum,gcd"),
        ("builtin:sums,sums", "data source builtin: task sums is listed twice"),
        (
            {"builtin": 3},
            "data source builtin: expected names of tasks or a mapping of tasks to options, got 3",
        ),
        (
            {"builtin": {"sums": 2}},
            (
                "data source builtin: the options of task sums must be a mapping (option: value),"
                " got 2"
            ),
        ),
        ("hub:", "data source hub: hub must be text, got ''"),
        ({"path": None}, "data source path: path must be text, got None"),
        ({"path": "x.jsonl", "prompt": 3}, "data source path: prompt must be text, got 3"),
        ({"mix": {}}, "data source mix: expected a mapping of names to data sources, got {}"),
        (
            {"mix": ["a", "b"]},
            "data source mix: expected a mapping of names to data sources, got ['a', 'b']",
        ),
        (
            {"mix": {"a": "builtin:sums"}, "size": 3},
            "data source mix: unknown option 'size'; options belong to the parts of the mix",
        ),
        (
            {"mix": {"a/b": "builtin:sums"}},
            "data source mix: 'a/b' is not a valid name of a part; use letters, digits, _ and -",
        ),
        (
            {"mix": {"a": {"builtin": "sums", "sede": 1}}},
            "data source mix, part a: builtin: unknown option 'sede'; did you mean seed?",
        ),
        (
            {"mix": {"a": {"mix": {"b": "builtin:sums"}}}},
            "data source mix, part a: a mix within a mix; name its parts in the outer one",
        ),
    ],
)
def test_a_wrong_spec_says_what_was_expected_and_what_came(spec, message):
    with pytest.raises(DataError) as caught:
        parse_spec(spec)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "kind", "name"),
    [
        ("data/aime-2024.parquet", "path", "aime-2024"),
        ("hub:openai/gsm8k:test", "hub", "gsm8k"),
        ("builtin:sums,products", "builtin", "sums+products"),
        ({"gym": {"a": {}, "b": {}, "c": {}, "d": {}, "e": {}}}, "gym", "a+4"),
    ],
)
def test_kind_and_short_name(spec, kind, name):
    assert (parse_spec(spec).kind, parse_spec(spec).label) == (kind, name)


def test_a_mix_is_of_all_kinds_of_its_parts_and_is_called_by_their_names():
    mix = parse_spec({"mix": {"easy": "builtin:sums", "hard": "x.jsonl"}})
    assert (kinds(mix), mix.label) == ({"builtin", "path"}, "easy+hard")
    assert kinds(parse_spec("builtin:sums")) == {"builtin"}
    assert parse_spec({"mix": dict.fromkeys("abcde", "builtin:sums")}).label == "a+4"


def test_paths_are_found_wherever_a_source_may_have_one():
    assert paths_in("x.jsonl", "data.train") == {"data.train": "x.jsonl"}
    assert paths_in({"path": "x.jsonl", "size": 3}, "data.eval") == {"data.eval.path": "x.jsonl"}
    assert paths_in({"builtin": "sums"}, "data.train") == {}
    mix = {"mix": {"a": "x.jsonl", "b": {"path": "y.jsonl"}, "c": {"gym": "gcd"}}}
    assert paths_in(mix, "data.train") == {
        "data.train.mix.a": "x.jsonl",
        "data.train.mix.b.path": "y.jsonl",
    }


def test_a_home_folder_is_expanded():
    assert parse_spec("~/x.jsonl").path == Path.home() / "x.jsonl"


def test_a_benchmark_has_the_name_that_papers_give_it():
    assert parse_spec("aime24").label == "aime24"
    assert parse_spec("hub:HuggingFaceH4/aime_2024").label == "aime_2024"
