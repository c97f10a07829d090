"""Secrets in source that a run would keep are found; what only looks like one is not."""

import pytest

from dapo.core.environment import worker_environment
from dapo.core.source_secrets import find_in_source
from helpers.tables import for_each_row

SECRET = {
    'API_KEY = "sk-ant-REALSECRET123"': "API_KEY",
    'API_KEY: str = "wordswords"': "API_KEY",
    'H = {"Authorization": "Bearer sk-abcdefgh12345"}': "Authorization",
    'client = _restored(Client, {"token": "abc12345xyz"})': "token",
    'def f(a, key="4f9a02c77d"): pass': "key",
    'def f(a, *, b=1, api_key="plainpassword"): pass': "api_key",
    "judge = functools.partial(ask, api_key='hunter22')": "api_key",
    "x = 1  # sk-ant-REALSECRET123": "a comment",
    'URL = "postgres://user:word@host/base"': "URL",
    'get("https://host/path?api_key=abc")': "a constant",
    'name, password = "me", "hunter22"': "password",
    'class Judge:\n    token = "ghp_abcdefghijklmnop1234"': "token",
    'headers["X-Api-Key"] = "4f9a02c77d"': "X-Api-Key",
    'self.password = "correcthorse"': "password",
    'MY_TOKEN = "REALSECRET"': "MY_TOKEN",
    'CREDENTIALS = {"base": {"user": "x", "value": "aaaaa1aaa"}}': "value",
    'key = os.environ.get("K") or "4f9a02c77d"': "key",
    'X = "Zq9 of no known form"': "X",
    'X = ["Token Zq9 of no known form"]': "X",
    "X = b'Zq9 of no known form'": "X",
    "PIN = 8391028371": "PIN",
}
HARMLESS = (
    'key = "final"',
    'pat = r"#### (\\d+)"',
    'token = "<|endoftext|>"',
    'eos_token = "<|im_end|>"',
    'key = os.environ["OPENAI_API_KEY"]',
    'client = OpenAI(base_url=url, api_key="EMPTY")',
    'h = {"Authorization": f"Bearer {key}"}',
    'secret = "banana"',
    'answer_key = "Answer1234"',
    '"""Authorization: the usual header. Bearer tokens work."""',
    'api_key_env = "OPENAI_API_KEY"',
    "# token=tokenizer.decode(x)\nx = 12345678",
    "HOME = '/home/somebody'",
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SETTING", "Zq9 of no known form")
    monkeypatch.setenv("DOOR", "8391028371")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SHORT", "final")


@for_each_row("source", SECRET)
def test_a_secret_is_found_by_its_name_its_form_or_the_environment(source: str):
    assert next(find_in_source(source))[0] == SECRET[source]


@for_each_row("source", HARMLESS)
def test_harmless_source_is_let_through(source: str):
    assert list(find_in_source(source)) == []


def test_a_worker_gets_harmless_variables_and_named_ones(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "HF_TOKEN",
        "HF_HOME",
        "OPENAI_API_KEY",
        "SETTING",
        "https_proxy",
        "LC_ALL",
        "DB_PASSWORD",
    ):
        monkeypatch.setenv(name, "value")
    found = worker_environment({"OPENAI_API_KEY"}).keys()
    assert {"HF_HOME", "OPENAI_API_KEY", "https_proxy", "LC_ALL", "PATH", "HOME"} <= found
    assert not {"HF_TOKEN", "SETTING", "DB_PASSWORD", "DOOR"} & found
