"""Without a network the hub is not waited for: its client answers from the cache at once."""

import time

import pytest
from huggingface_hub import constants

from dapo.config.data_spec import HubSource
from dapo.core.errors import ConfigError, DataError
from dapo.core.loading import reading_hub
from dapo.core.model_files import require_hub_model
from dapo.data.sources.readers import read_hub_rows
from helpers.tables import for_each_row

NO_HOST = "http://no-such-host.invalid"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may use the network, and no proxy is set."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@for_each_row(
    ["endpoint", "proxy", "is_offline"],
    [
        (NO_HOST, "", True),
        (f"{NO_HOST}:8080/hub", "", True),
        (NO_HOST, "http://127.0.0.1:9", False),
        ("http://127.0.0.1:9", "", False),
        ("https://localhost", "", False),
    ],
)
def test_only_a_host_without_address_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, proxy: str, is_offline: bool
):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("http_proxy", proxy)
    with reading_hub():
        assert constants.is_offline_mode() == is_offline
    assert not constants.is_offline_mode()


def test_what_is_not_in_the_cache_is_refused_at_once_with_the_command_that_loads_it(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("datasets")
    monkeypatch.setattr(constants, "ENDPOINT", NO_HOST)
    # between its attempts the client sleeps
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    with pytest.raises(ConfigError) as model_error:
        require_hub_model("nobody/nothing")
    with pytest.raises(DataError) as data_error:
        list(read_hub_rows(HubSource("nobody/nothing", "train", "main")))
    assert "hf download nobody/nothing" in str(model_error.value)
    assert "load_dataset('nobody/nothing', 'main')" in str(data_error.value)
    assert "the Hugging Face hub was not reached" in str(data_error.value)
