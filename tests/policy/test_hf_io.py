"""Laws of safetensors files and of named weights: exact contents, and errors that name the file."""

import errno
import json
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dapo.policy.hf_io import (
    NamedWeights,
    layout_of,
    write_shards_of_weights,
    write_tensors,
)

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def some(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) % 251 - 100).to(dtype)


def test_types_shapes_and_unusual_strides_come_back_to_the_bit(tmp_path: Path):
    tensors = {str(dtype): some(24, dtype).view(2, 3, 4) for dtype in TYPES}
    tensors |= {
        "transposed": some(6, torch.float32).view(2, 3).T,
        "scalar": torch.tensor(1.5),
        'ä"\n': torch.zeros(1),
    }
    tensors |= {"empty": torch.zeros(0, 3)}
    write_tensors(tensors, tmp_path / "t")
    with safe_open(tmp_path / "t", framework="pt") as file:
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_file_without_tensors_can_be_read_by_others_and_replaces_one_with(tmp_path: Path):
    write_tensors({"a": torch.ones(3)}, tmp_path / "t")
    write_tensors({}, tmp_path / "t")
    assert load_file(tmp_path / "t") == {}
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o644


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_is_an_os_error_with_code_and_path(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        write_tensors({"a": some(4, torch.float32)}, tmp_path / "absent" / "t")
    assert caught.value.filename.endswith("absent/t")
    with pytest.raises(OSError) as full, file_size_limit(10_000):
        write_tensors({"a": some(100_000, torch.float32)}, tmp_path / "t")
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(tmp_path / "t"))
    assert list(tmp_path.iterdir()) == []


def test_a_tied_weight_follows_the_one_it_is_stored_with():
    a = torch.zeros(1)
    b = torch.ones(1)
    weights = NamedWeights(
        lambda: {"a": a, "b": b}.items(), layout_of({"a": a, "b": b}, {"head": "a"})
    )
    for _ in range(2):
        assert list(weights.named_tensors()) == [("a", a), ("head", a), ("b", b)]


def test_weights_are_cut_into_files_with_an_index_and_no_two_files_are_in_memory(tmp_path: Path):
    shard_bytes = 1300
    tensors = {f"w{i}": some(100 * (1 + i % 3), torch.float32) for i in range(8)}
    tensors["large"] = some(600, torch.float32)  # 2,400 bytes: a file of its own
    alive: list[weakref.ref[torch.Tensor]] = []

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            held = [weight.nbytes for each in alive if (weight := each()) is not None]
            assert sum(held) <= shard_bytes + 400
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy

    assert write_shards_of_weights(read(), tmp_path, shard_bytes=shard_bytes) == torch.float32
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file_name in files:
        part = load_file(tmp_path / file_name)
        size = sum(each.nbytes for each in part.values())
        assert size <= shard_bytes or list(part) == ["large"]
        assert dict.fromkeys(part, file_name).items() <= index["weight_map"].items()
        found |= part
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
