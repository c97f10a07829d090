"""Laws of our safetensors files: the library reads what we wrote, and the noted checksum is that of the file."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dapo.core.files import crc32_of, is_checksum_sidecar, pop_checksum_sidecar
from dapo.policy.tensor_file import write_tensors

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def some(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) % 251 - 100).to(dtype)


@pytest.mark.parametrize("sizes", [(1,), (0, 3), (1000, 1, 77), (2**21, 5), (2**21 - 30, 2**22 + 1)])
def test_the_library_reads_every_size_to_the_bit(tmp_path: Path, sizes: tuple[int, ...]):
    """Around the pieces of 8 MiB too, in which float32 has 2**21."""
    tensors = {f"layer.{i}": some(size, torch.float32) for i, size in enumerate(sizes)}
    path = tmp_path / "t.safetensors"
    write_tensors(path, tensors)
    found = load_file(path)
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_types_shapes_and_strange_layouts(tmp_path: Path):
    tensors = {str(dtype): some(24, dtype).view(2, 3, 4) for dtype in TYPES}
    tensors |= {"turned": some(6, torch.float32).view(2, 3).T, "scalar": torch.tensor(1.5), 'ä"\n': torch.zeros(1)}
    write_tensors(tmp_path / "t", tensors)
    with safe_open(tmp_path / "t", framework="pt") as file:
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name), tensor)


def test_the_noted_checksum_is_that_of_the_file(tmp_path: Path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": some(3_000_000, torch.float32)})
    note = next(each for each in tmp_path.iterdir() if is_checksum_sidecar(each))
    assert pop_checksum_sidecar(path) == crc32_of(path)
    assert not note.exists()
    assert pop_checksum_sidecar(path) is None


def test_no_tensors_are_a_file_too(tmp_path: Path):
    write_tensors(tmp_path / "t", {})
    assert load_file(tmp_path / "t") == {}


def test_a_place_that_takes_nothing_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        write_tensors(tmp_path / "gone" / "t", {"a": some(4, torch.float32)})
    assert caught.value.filename.endswith("gone/t")
    if Path("/dev/full").exists():
        with pytest.raises(OSError) as full:
            write_tensors(Path("/dev/full"), {"a": some(4, torch.float32)})
        assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "/dev/full")
