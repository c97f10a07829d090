"""Secrets are refused as options and masked elsewhere, and nothing harmless is taken for one."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dapo.config import build_config, dump_config, load_config
from dapo.config.option_fields import options_of
from dapo.core.environment import public_environment
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.core.openai_client import ChatClient
from dapo.core.secrets import (
    HUB_VARIABLES,
    find_secrets,
    is_secret_name,
    mask_options,
    mask_secrets,
    mask_text,
)
from dapo.rewards import get_verifier
from dapo.rewards.verdicts import error_verdict
from dapo.runs.manifest import make_manifest
from helpers.shipped_configs import SHIPPED
from helpers.tables import for_each_row

STARTED = datetime(2025, 3, 9, tzinfo=UTC)
BASE = {"model": "m", "data": {"train": "builtin:sums"}}
K = "zqK7vX31"
"""The secret: no word of any message."""

REFUSED = {
    "a user and a password in a URL": f"reward.options.url=http://user:{K}@host/judge",
    "a token in a URL": f"reward.options.url=https://{K}@host",
    "a user in another scheme": f"launcher=ray://user:{K}@host",
    "a key in a query": f"reward.options.url=http://host/judge?a=1&api_key={K}",
    "a short name in a query": f"reward.options.url=http://host?key={K}",
    "a signature in a query": f"model.name=https://host/model?X-Amz-Signature={K}",
    "a token in a fragment": f"reward.options.url=http://host/#access_token={K}",
    "a header": f"reward.options.headers={{Authorization: Bearer {K}}}",
    "a header of another name": f"reward.options.headers={{X-Api-Key: {K}}}",
    "a cookie": f"reward.options.headers={{Cookie: session={K}}}",
    "a header as text": f'reward.options.header="Authorization: Bearer {K}"',
    "a header as a pair": f"reward.options.headers=[[Authorization, {K}]]",
    "a key of a firm": f"reward.options.openai_key={K}",
    "a key": f"reward.options.key={K}",
    "a word": f"reward.options.auth={K}",
    "a bearer": f"reward.options.bearer={K}",
    "an abbreviation": f"reward.options.pw={K}",
    "several": f"reward.options.api_keys=[{K}]",
    "several tokens": f"reward.options.tokens=[{K}, {K}]",
    "in a list of mappings": f"reward.options.judges=[{{url: u}}, {{api_key: {K}}}]",
    "under a mapping of that name": f"reward.options.credentials={{first: {{value: {K}}}}}",
    "camel case": f"reward.options.hfAccessToken={K}",
    "of one of several verifiers": (
        f"reward.options={{math: {{}}, server: {{url: u, secret: {K}}}}}"
    ),
    "where no option is": f"reward.api_key={K}",
    "in data": f"data.train={{gym: {{chain_sum: {{token: {K}}}}}}}",
    "a path with a user": f"data.train=https://user:{K}@host/problems.jsonl",
    "a token of Hugging Face": f"data.instruction=hf_{K * 4}",
    "a key of OpenAI": f"reward.options.model=sk-proj-{K * 3}",
    "a token of GitHub": f"reward.options.a=ghp_{K * 4}",
    "a JSON web token": f"reward.options.a=eyJ{K}{K}.eyJ{K}{K}.{K}",
    "in place of a variable's name": f"reward.options.token_env=hf_{K * 4}",
}


@for_each_row("name", REFUSED)
def test_an_option_that_is_a_secret_is_refused_and_not_repeated(name: str):
    with pytest.raises(
        ConfigError, match=r"options are written to config\.yaml and to trackers"
    ) as caught:
        build_config(BASE, [REFUSED[name]])
    assert K not in str(caught.value)


@for_each_row("name", REFUSED)
def test_what_is_refused_is_masked_on_a_command_line(name: str):
    command = make_manifest(["dapo", "train", "c.yaml", REFUSED[name]], seed=0, started=STARTED)[
        "command"
    ]
    assert K not in " ".join(command)
    assert command[:3] == ["dapo", "train", "c.yaml"]


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["--api-key", K, "x"], ["--api-key", "***", "x"]),
        (["--token", K], ["--token", "***"]),
        (["--api-key-env", "NAME"], ["--api-key-env", "NAME"]),
        (["-H", f"Authorization: Bearer {K}"], ["-H", "***"]),
        (["Authorization:", "Bearer", K, "x"], ["Authorization:", "***", "***", "x"]),
        ([f"hf_{K * 4}", "x"], ["***", "x"]),
        (["--server", f"http://u:{K}@host/v1"], ["--server", "http://***@host/v1"]),
        (["--sbatch", f"--export=API_KEY={K}"], ["--sbatch", "--export=***"]),
        (["--setup", f"export WANDB_API_KEY={K}"], ["--setup", "export WANDB_API_KEY=***"]),
    ],
)
def test_secrets_of_several_words_are_masked(words: list[str], masked: list[str]):
    assert mask_secrets(words) == masked


@for_each_row(
    "option",
    [
        "reward.options.stop_token=</s>",
        "reward.options.max_tokens=100",
        "reward.options.tokenizer=gpt2",
        "reward.options.token=3",
        "reward.options.answer_key=final",
        "reward.options.column=key",
        "reward.options.token_env=JUDGE_TOKEN",
        "reward.options.api_key_env=JUDGE_KEY",
        "reward.options.url=http://host:8000/judge?mode=strict&keyword=no",
        "reward.options.pattern='(?<=key: )\\d+'",
        "reward.verifier=my_rewards:token",
        "reward.verifier={my_rewards:auth: 1.0, math: 0.5}",
        "reward.options={my_rewards:token: {size: big}}",
        "data.train={path: a.jsonl, prompt: question, answer: key}",
        "data.instruction='The key: think. Basic arithmetic only. Bearer of news @ 5:30.'",
        "data.system='You are at http://host:80/a@b.'",
        "loss.aggregate=token",
        "model.name=org/key-token-7b",
        "launcher=ray:host:6379",
        "model.name=task-force-disk-sk-learn-models",
    ],
)
def test_what_only_sounds_like_a_secret_is_taken_and_not_masked(option: str):
    config = build_config(BASE, [option])
    options = config.model_dump(mode="json")
    assert list(find_secrets(options)) == []
    assert mask_options(options) == options


@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_configuration_is_taken_to_hold_a_secret(name: str):
    options = SHIPPED[name].model_dump(mode="json")
    assert list(find_secrets(options)) == []
    assert mask_options(options) == options


def test_no_option_of_ours_is_named_like_a_secret():
    assert [name for name, _ in options_of() if is_secret_name(name)] == []


@pytest.mark.parametrize(
    "text", ["${oc.env:MY_TOK}", "x${oc.env:MY_TOK,none}y", "${oc.decode:${oc.env:MY_TOK}}"]
)
def test_a_variable_of_the_environment_is_not_written_to_the_configuration(
    text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOK", K)
    for raw, overrides in (
        (BASE, [f"data.train={text}"]),
        (BASE | {"data": {**BASE["data"], "instruction": text}}, []),
    ):
        with pytest.raises(
            ConfigError, match=r"oc\.env:MY_TOK\}: the value of this environment variable"
        ) as caught:
            build_config(raw, overrides)
        assert K not in str(caught.value)
    # a text is taken literally
    assert build_config(BASE, [f"data.instruction={text}"]).data.instruction == text


def test_a_variable_that_names_a_location_is_filled_in_and_an_escaped_one_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MY_DATA_DIR", "/data")
    config = build_config(
        BASE, ["data.train=${oc.env:MY_DATA_DIR}/p.jsonl", "data.instruction=${oc.env:MY_TOK}"]
    )
    assert (config.data.train, config.data.instruction) == ("/data/p.jsonl", "${oc.env:MY_TOK}")
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def test_a_servers_address_with_a_user_is_refused_at_the_start_and_not_repeated():
    for url in (f"http://user:{K}@127.0.0.1:9/x", f"https://{K}@host", f"http://user:{K}@["):
        with pytest.raises(RewardError) as refused:
            get_verifier("server", url=url)
        with pytest.raises(DataError) as refused_too:
            ChatClient(url, "model")
        assert K not in f"{refused.value}{refused_too.value}"
    with pytest.raises(DataError, match="a query"):
        ChatClient(f"http://host/v1?api_key={K}", "model")


def test_errors_do_not_repeat_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", f"{K}-of-the-environment")
    quoted = (
        f"server: http://user:{K}@127.0.0.1:9/x: Name or service not known",
        f"GET https://host/a?page=2&api_key={K} failed",
        f"KeyError: hf_{K * 4}",
        f"refused header Authorization: Bearer {K}",
        f"the key {K}-of-the-environment is not valid",
    )
    for text in quoted:
        for masked in (mask_text(text), error_verdict(text).error):
            assert masked is not None
            assert K not in masked
            assert "***" in masked
    assert mask_text("PWD is no password: " + str(Path.cwd())) == "PWD is no password: " + str(
        Path.cwd()
    )


def test_a_process_gets_no_secret_of_its_parent_but_those_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = {
        "WANDB_API_KEY": "abc",
        "HF_TOKEN": "hf_" + "a" * 20,
        "DATABASE": "postgres://me:word@host/db",
        "NOTES": "ghp_" + "b" * 36,
        "MY_PASSWORD": "x",
    }
    harmless = {
        "PWD": "/tmp",
        "HOME": "/root",
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "12",
        "RAY_PATH": "/x",
    }
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for name, value in (secrets | harmless).items():
        monkeypatch.setenv(name, value)
    assert public_environment() == harmless
    assert public_environment(["HF_TOKEN"]) == harmless | {"HF_TOKEN": secrets["HF_TOKEN"]}
    assert public_environment(HUB_VARIABLES) == harmless | {"HF_TOKEN": secrets["HF_TOKEN"]}
