"""What is known about options, for people (`dapo show options`) and programs (`dapo show schema`)."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from omegaconf import OmegaConf

from dapo.config import build_config
from dapo.config.option_entries import entries_of, option_differences, option_entries
from dapo.config.schema import config_schema
from dapo.core.errors import ConfigError
from helpers.commands import run
from helpers.paths import CONFIGS, ROOT
from helpers.shipped_configs import configs_of
from helpers.tables import for_each_row

SCHEMA = config_schema()
UNITS = {
    "_tokens": "tokens",
    "_s": "s",
    "_gib": "GiB",
    "_steps": "steps",
    "_processes": "processes",
}
PURE = {
    *("critic.lr", "critic.gae_lambda"),
    "rollout.temperature", "dynamic_sampling.min_spread", "overlong.penalty", "loss.clip_low",
    "loss.clip_high", "loss.kl_coef", "loss.entropy_coef", "optim.lr", "optim.weight_decay",
    "optim.max_grad_norm", "audit.share", "reward.coef",
    "train.seed", "eval.temperature", "eval.top_p", "model.lora.rank",
    "model.lora.alpha",
}  # fmt: skip
"""Options whose numbers have no unit."""
FILES = sorted(CONFIGS.glob("*.yaml"))


def is_valid(values: Any) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(values)


def test_a_number_has_a_unit_and_its_name_agrees_with_it():
    for entry in option_entries():
        is_number = isinstance(entry.default, int | float) and not isinstance(entry.default, bool)
        if is_number and entry.name not in PURE:
            assert entry.unit, entry.name
        for ending, unit in UNITS.items():
            if entry.name.endswith(ending):
                assert entry.unit == unit, entry.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid_by_the_schema_as_written_and_as_run(path: Path):
    jsonschema.validate(OmegaConf.to_container(OmegaConf.load(path)), SCHEMA)
    for config in configs_of(path).values():
        jsonschema.validate(config.model_dump(mode="json"), SCHEMA)


def test_a_stage_is_valid_by_the_schema_with_any_options_and_no_other_keys():
    options = {"model": "tiny-random", "stages": {"a": {"data": {"eval": "builtin:sums"}}}}
    assert is_valid(options)
    assert not is_valid({**options, "stages": {"a": {"dta": {}}}})
    assert not is_valid({**options, "stages": {}})
    assert not is_valid({"model": "tiny-random"})


@for_each_row(
    ("override", "is_right"),
    [
        ("loss.clip_hihg=0.3", False),
        ("loss.clip_high=-1", False),
        ("loss.dual_clip=0.5", False),
        ("loss.dual_clip=null", True),
        ("loss.engine_correction=tis", True),
        ("loss.engine_correction=maybe", False),
        ("loss=null", True),
        ("data=null", False),
        ("train.microbatch_tokens=auto", True),
        ("train.microbatch_tokens=many", False),
        ("train.num_steps=1.5", False),
        ("train.num_steps=true", False),
        ("data.chat_template=on", True),
        ("overlong.mode=off", True),
        ("profile.steps=3", True),
        ("profile.steps=[3, 4]", True),
        ("profile.steps=0", False),
        ("advantage.scale=null", True),
        ("model=tiny-random", True),
        ("optim.betas=[0.9, 1.5]", False),
        ("reward.verifier={math: 1.0}", True),
        ("rollout.group_size=x", False),
    ],
)
def test_schema_and_loader_agree_about_what_stands_in_a_file(override: str, is_right: bool):
    key, _, value = override.partition("=")
    values = {"model": {"name": "tiny-random"}, "data": {"train": "builtin:sums"}}
    inner: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={value}"]))["v"]  # type: ignore[index, call-overload]
    for part in reversed(key.split(".")):
        inner = {part: inner}
    values = (
        {**values, **inner}
        if not isinstance(inner.get("data"), dict)
        else {**values, "data": {**values["data"], **inner["data"]}}
    )
    assert is_valid(values) == is_right
    if is_right:
        build_config(values)
    else:
        with pytest.raises(ConfigError):
            build_config(values)


def test_every_option_is_in_the_schema_with_what_the_page_says_of_it():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    page = re.sub(r"\[(\w+)\.md\]\(\1\.md\)", r"`dapo show docs \1`", page)
    for entry in option_entries():
        section = SCHEMA
        leaf = entry.name.split(".")[-1]
        for part in entry.name.split(".")[:-1]:
            branches = [section["properties"][part], *section["properties"][part].get("anyOf", [])]
            section = next(
                SCHEMA["$defs"][each["$ref"].split("/")[-1]] for each in branches if "$ref" in each
            )
        described = section["properties"][leaf]
        assert described["description"].startswith(entry.meaning)
        assert (f"Unit: {entry.unit}." in described["description"]) == bool(entry.unit)
        assert entry.meaning.replace("*", r"\*") in page


def test_options_are_listed_by_section_and_by_name(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "show", "options", "loss", "--json")
    found = {entry["name"]: entry for entry in json.loads(out)["options"]}
    assert code == 0
    assert set(found) == {entry.name for entry in option_entries() if entry.section == "loss"}
    assert (found["loss.clip_high"]["default"], found["loss.clip_high"]["paper"]) == (0.28, 0.28)
    assert found["loss.max_approx_kl"]["unit"] == "nats"
    code, out, _ = run(capsys, "show", "options", "rollout.group_size")
    assert out.startswith("rollout.group_size  default 16, paper 16, unit responses\n")
    assert [entry.name for entry in entries_of("rollout.native")] == [
        "rollout.native.slots",
        "rollout.native.kernels",
    ]
    code, out, err = run(capsys, "show", "options", "los")
    assert (code, out) == (2, "")
    assert err == "error: no option or section los; did you mean loss?\n"
    err = run(capsys, "show", "options", "qqqqq")[2]
    assert "lists all options; sections: model, data, rollout, " in err
    assert "TRL's beta is loss.kl_coef here" in run(capsys, "show", "options", "beta")[2]


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "show", "schema")
    assert (code, json.loads(out)) == (0, json.loads(json.dumps(SCHEMA)))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_sources_and_verifiers_without_options_differ_by_their_names():
    ours = {
        "model": "tiny-random",
        "reward": {"verifier": "exact"},
        "audit": {"verifier": {"regex": {}}},
    }
    sums, words = (
        build_config(ours | {"data": {"train": {"builtin": {name: {}}}}})
        for name in ("sums", "sorting")
    )
    assert option_differences(sums, words) == {
        "data.train.builtin.sums": [{}, None],
        "data.train.builtin.sorting": [None, {}],
    }
    other = sums.changed("audit", verifier={"math": {}}).changed(
        "reward", options={"extract": "final"}
    )
    assert option_differences(sums, other) == {
        "reward.options.extract": [None, "final"],
        "audit.verifier.regex": [{}, None],
        "audit.verifier.math": [None, {}],
    }
