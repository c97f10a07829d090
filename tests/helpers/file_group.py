"""Files in the place of NCCL: a trainer's end of a group, and an engine that receives from it as
vLLM does.
"""

import base64
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.errors import EngineError
from dapo.engines.engine import Capabilities

WAIT_S = 2.0


class FileGroup:
    """Rank 0.

    Its id is the folder in which the others appear, and to which it writes each broadcast once.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = parent / f"group-{len(list(parent.glob('group-*')))}"
        self._folder.mkdir()
        self.unique_id = str(self._folder).encode().ljust(128, b"\0")
        self.is_aborted = False
        self._count = 0

    def connect(self, size: int) -> None:
        wait_for(lambda: len(list(self._folder.glob("rank-*"))) == size - 1)

    def broadcast(self, buffer: Any) -> None:
        path = self._folder / f"broadcast-{self._count}"
        path.with_suffix(".tmp").write_bytes(buffer.numpy().tobytes())
        path.with_suffix(".tmp").rename(path)
        self._count += 1

    def abort(self) -> None:
        self.is_aborted = True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody came")
        time.sleep(0.005)


class ReceivingEngine(ScriptedEngine):
    """Answers with a checksum of its weights: how they came is not seen.

    Behaves like vLLM's engine, and fails like it.

    `fault` is "connect", or one of "raise", "die" and "hang" in the second chunk that the first
    process receives; a failure in the middle closes the engine.
    """

    def __init__(self, folder: str, processes: int = 1, fault: str | None = None) -> None:
        super().__init__(lambda request: ([self.checksum % 197, self.how], "stop"))
        self._folder = Path(folder)
        self._processes = processes
        self._fault = fault
        self.checksum = self.how = self._received = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(receiver=self)

    def load_weights(self, weights: Any, version: int) -> None:
        super().load_weights(weights, version)
        self.checksum = 0
        import torch

        for name, tensor in weights.named_tensors():
            self._add(name, tensor.view(torch.uint8).numpy().tobytes())
        self.how = 0

    def connect_weights(self, info: Mapping[str, Any]) -> None:
        assert self._version is not None, "the old weights must be in use"
        with (self._folder / "connected").open("a") as file:
            file.write(f"{info['rank_offset']} of {info['world_size']}\n")
        if self._fault == "connect":
            raise EngineError("no such interface")
        group = Path(base64.b64decode(info["nccl_unique_id_b64"]).rstrip(b"\0").decode())
        for i in range(self._processes):
            (group / f"rank-{info['rank_offset'] + i}").touch()
        self._group = group
        self._broadcasts = 0

    def receive_weights(self, update: Mapping[str, Any], layout: Any, version: int | None) -> None:
        if layout is not None:
            self._version = None
            self.checksum = 0
        self._received += 1
        mark = self._folder / "mark"
        if self._received == 2 and self._fault is not None and not mark.exists():
            mark.touch()
            if self._fault == "raise":
                self.close()
                raise EngineError("illegal memory access")
            os._exit(3) if self._fault == "die" else time.sleep(600)
        path = self._group / f"broadcast-{self._broadcasts}"
        wait_for(path.exists)
        self._broadcasts += 1
        content = path.read_bytes()
        width = {"float32": 4, "bfloat16": 2}
        for name, dtype, shape in zip(
            update["names"], update["dtype_names"], update["shapes"], strict=True
        ):
            size = width[dtype]
            for length in shape:
                size *= length
            self._add(name, content[:size])
            content = content[size:]
        assert content == b""
        if version is not None:
            super().load_weights(None, version)
            self._version = version
            self.how = 1

    def _add(self, name: str, content: bytes) -> None:
        self.checksum = zlib.crc32(name.encode() + content, self.checksum)
