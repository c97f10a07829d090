"""Laws of loading a sharded model: each rank reads its own rows, and holds what it would of the
whole model.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo.core.errors import ConfigError
from dapo.policy.hf_io import rows_of_rank
from dapo.policy.model import LoadedModel, load_for_sharding, load_model
from helpers.tiny_models import SERVED, tiny_model
from helpers.tiny_policies import loaded


def saved(name: str, folder: Path) -> Path:
    """A tiny model of a family as a directory."""
    model = tiny_model(name)
    model.save_pretrained(folder)
    loaded(model).tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", SERVED)
def test_a_meta_model_has_the_names_ties_and_buffers_of_the_model_itself(
    family: str, tmp_path: Path
) -> None:
    folder = saved(family, tmp_path)
    whole = load_model(str(folder), dtype=torch.bfloat16)
    found = load_for_sharding(str(folder), dtype=torch.bfloat16)
    assert all(weight.is_meta for weight in found.model.parameters())
    assert found.stop_ids == whole.stop_ids
    assert found.model.dtype == whole.model.dtype == torch.bfloat16
    assert not found.model.training
    shapes = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in one.named_tensors()}
        for one in (found, whole)
    ]
    assert shapes[0] == shapes[1]
    assert [len(list(one.model.parameters())) for one in (found, whole)] == [
        len(found.stored.files)
    ] * 2
    buffers = dict(found.model.named_buffers())
    assert buffers
    for name, buffer in whole.model.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_the_rows_of_all_ranks_are_the_whole_weight_once(ranks: int, tmp_path: Path) -> None:
    folder = saved("tied llama", tmp_path)
    stored = load_for_sharding(str(folder), dtype=torch.float32).stored
    read = 0
    for name, weight in load_file(folder / "model.safetensors").items():
        parts = [stored.rows(name, rows_of_rank(len(weight), rank, ranks)) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), weight)
        assert [len(part) for part in parts if len(part)] == [
            len(part) for part in weight.chunk(ranks)
        ]
        read += sum(part.nbytes for part in parts)
    assert read == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(names.values()):
        save_file(
            {n: weights[n] for n in names if names[n] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = load_for_sharding(str(folder), dtype=torch.float32).stored
    assert {name: path.name for name, path in stored.files.items()} == names
    assert all(
        torch.equal(stored.rows(name, slice(None)), weight) for name, weight in weights.items()
    )


def of_other_names(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({f"old.{n}": t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})


def of_other_shapes(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("change", [of_other_names, of_other_shapes])
def test_what_the_files_hold_otherwise_is_left_to_transformers_with_its_errors(
    change: object, tmp_path: Path
) -> None:
    folder = saved("llama", tmp_path)
    change(folder)
    with pytest.raises(ConfigError, match=r"incomplete|cannot be loaded"):
        load_for_sharding(str(folder), dtype=torch.float32)


def test_a_tied_head_that_is_stored_too_is_left_to_transformers(tmp_path: Path) -> None:
    folder = saved("tied llama", tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
        path,
        {"format": "pt"},
    )
    found: LoadedModel = load_for_sharding(str(folder), dtype=torch.float32)
    assert found.stored is None
    assert not any(weight.is_meta for weight in found.model.parameters())
