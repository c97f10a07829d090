"""Laws of weights files: written tensor by tensor, read by the safetensors library, shared by a
machine's processes.
"""

import gc
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from contracts.launcher_contract import Weights
from dapo.core.errors import EngineError
from dapo.distributed.weight_files import PIECE_BYTES, WeightsFile, host_pieces, write_weights
from dapo.types import WeightLayout
from helpers.fork_server import ForkServer

TENSORS_AT_A_TIME = 2
"""The one that is written, and the one that its source makes meanwhile."""


def tensors() -> dict[str, Tensor]:
    """Of several types and sizes, some not contiguous, one empty, one without dimensions."""
    made = {
        "half": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "wide": torch.arange(5, dtype=torch.float64),
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 7, dtype=torch.float16),
        "odd": torch.ones(1, dtype=torch.bfloat16),
    }
    return made | {"head": made["transposed"]}


def test_the_safetensors_library_reads_what_was_streamed(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_weights(path, Weights(tensors()), 7)
    found = load_file(path)
    expected = {name: tensor for name, tensor in tensors().items() if name != "head"}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    file = WeightsFile(path, 7)
    assert file.layout().shapes == {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    assert file.layout().tied == {"head": "transposed"}
    assert torch.equal(dict(file.named_tensors())["head"], tensors()["transposed"])
    assert os.listdir(tmp_path) == ["weights.safetensors"]


@dataclass
class CountingSource:
    """Makes each tensor when it is read, and counts how many live at a time."""

    count: int = 5
    most: int = 0
    alive: list["weakref.ref[Tensor]"] = field(default_factory=list)

    def layout(self) -> WeightLayout:
        return WeightLayout({f"w{i}": ("float32", (1000, 5)) for i in range(self.count)})

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i in range(self.count):
            made = torch.full((1000, 5), float(i))
            self.alive.append(weakref.ref(made))
            gc.collect()
            self.most = max(self.most, sum(one() is not None for one in self.alive))
            yield f"w{i}", made


def test_no_more_than_two_tensors_are_there_at_a_time(tmp_path: Path) -> None:
    source = CountingSource()
    write_weights(tmp_path / "w.safetensors", source, 1)
    assert source.most <= TENSORS_AT_A_TIME
    found = dict(WeightsFile(tmp_path / "w.safetensors", 1).named_tensors())
    assert [found[f"w{i}"].unique().item() for i in range(source.count)] == list(
        range(source.count)
    )


@pytest.mark.parametrize("size", [1, 3, 64])
def test_pieces_that_pass_through_two_buffers_are_the_tensors_bytes(size: int) -> None:
    """As through pinned memory; each piece is valid until the next is asked for."""
    given = [(100 * i, torch.arange(7 * i, dtype=torch.uint8)) for i in range(4)]
    found = bytearray(400)
    for start, piece in host_pieces(
        given, staging=[torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    ):
        assert len(piece) <= size
        found[start : start + len(piece)] = piece
    expected = bytearray(400)
    for start, tensor in given:
        expected[start : start + len(tensor)] = tensor.numpy().tobytes()
    assert found == expected


def test_a_large_tensor_in_main_memory_goes_in_pieces_without_a_copy() -> None:
    large = torch.zeros(PIECE_BYTES + 8, dtype=torch.uint8)
    addresses = [
        torch.frombuffer(piece, dtype=torch.uint8).data_ptr()
        for _, piece in host_pieces([(0, large)])
    ]
    assert addresses == [large.data_ptr(), large.data_ptr() + PIECE_BYTES]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": torch.ones(2)}, r"'b'.* is missing"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, r"expected \('b', .*\(2,\).* got .*\(3,\)"),
        ({"b": torch.ones(2), "a": torch.ones(2)}, r"expected \('a', .* got \('b'"),
        ({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, r"expected None, got \('c'"),
    ],
)
def test_a_source_that_is_not_what_its_layout_says_is_refused(
    given: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    class Wrong(Weights):
        def layout(self) -> WeightLayout:
            return WeightLayout(dict.fromkeys("ab", ("float32", (2,))))

    with pytest.raises(EngineError, match=message):
        write_weights(tmp_path / "w.safetensors", Wrong(given), 1)
    assert not list(tmp_path.iterdir())


def test_weights_that_find_no_room_are_an_error_and_leave_nothing(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    log = tmp_path / "log"
    folder.mkdir()
    program = (
        "import pathlib, resource, torch; from contracts.launcher_contract import Weights;from"
        " dapo.core.errors import EngineError; from dapo.distributed.weight_files import"
        " write_weights;resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\npath, weights"
        f" = pathlib.Path({str(folder)!r}) / 'w.safetensors', Weights({{'a':"
        " torch.ones(9999)})\ntry: write_weights(path, weights, 1)\nexcept EngineError as error:"
        " print(error)"
    )
    code, _ = fork_server.run(program, program="helpers.commands:run_code", output=log)
    assert code == 0
    assert "cannot be published" in log.read_text()
    assert "File too large" in log.read_text()
    assert not list(folder.iterdir())
