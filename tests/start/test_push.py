"""`dapo export RUN DIR --push NAME` uploads the export whole, or says in a sentence why not."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import dapo
from dapo.core.errors import PushFailed
from helpers.commands import run as command
from helpers.fake_hub import FakeHub, fake_hub
from helpers.tables import for_each_row

# the hub's client calls its own HTTP client so
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5"
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    """A hub that the client of this process asks, as a user who is logged in."""
    with pytest.MonkeyPatch.context() as patch, fake_hub(TOKEN) as server:
        # the client reads its environment when it is imported
        patch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server


def test_the_repository_has_the_bytes_of_the_directory_and_nothing_shows_the_token(
    hub: FakeHub, sync_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my-model"
    arguments = ("export", str(sync_run), str(folder), "--push", "pushed", "--private", "--json")
    code, out, err = command(capsys, *arguments)
    assert code == 0, err
    repository = hub.repositories["jane/pushed"]
    assert repository.private
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert repository.files == files
    assert 'model="jane/pushed"' in files["README.md"].decode()
    assert json.loads(out)["address"] == f"{hub.url}/jane/pushed"
    assert TOKEN.encode() not in b"".join([out.encode(), err.encode(), *files.values()])


def test_a_run_in_python_pushes_and_prints_the_address_and_an_open_repository_is_not_private(
    hub: FakeHub, sync_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = dapo.load(sync_run)
    run.export(tmp_path / "one", push="jane/open")
    assert f"published: {hub.url}/jane/open" in capsys.readouterr().out
    assert not hub.repositories["jane/open"].private
    with pytest.raises(dapo.ConfigError, match="jane/open: it exists and is public"):
        run.export(tmp_path / "two", push="jane/open", private=True)
    assert not (tmp_path / "two").exists()
    with pytest.raises(PushFailed, match="may not write to other/m") as failure:
        run.export(tmp_path / "two", push="other/m")
    assert f"hf upload other/m {tmp_path / 'two'} ." in str(failure.value)
    assert (tmp_path / "two" / "model.safetensors").is_file()


@for_each_row(
    ["name", "settings", "token", "code", "message"],
    [
        ("a/b/c", {}, TOKEN, 2, "expected OWNER/NAME, or a NAME of your own"),
        ("m", {"HF_HUB_OFFLINE": True}, TOKEN, 2, "which HF_HUB_OFFLINE=1 forbids"),
        ("m", {}, None, 2, "you are not logged in to the hub; run hf auth login, or set HF_TOKEN"),
        ("m", {}, f"{TOKEN}x", 1, "the hub does not accept the token"),
        ("m", {"ENDPOINT": UNREACHABLE}, TOKEN, 1, f"{UNREACHABLE} was not reached"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    hub: FakeHub,
    sync_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    settings: dict[str, object],
    token: str | None,
    code: int,
    message: str,
):
    folder = tmp_path / "my-model"
    with pytest.MonkeyPatch.context() as patch:
        for setting, value in settings.items():
            patch.setattr(f"huggingface_hub.constants.{setting}", value)
        patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        if token is None:
            patch.delenv("HF_TOKEN")
        else:
            patch.setenv("HF_TOKEN", token)
        stopped, _, err = command(capsys, "export", str(sync_run), str(folder), "--push", name)
    assert (stopped, message in err, len(err.splitlines())) == (code, True, 1), err
    assert TOKEN not in err
    assert not folder.exists()
