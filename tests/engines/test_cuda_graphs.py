"""Recorded decode steps: the same tokens as without, whatever comes and goes; a stand-in records on the CPU."""

from collections.abc import Callable

import pytest
import torch
from test_engine_native import group, run

from dapo.config import load_config
from dapo.core.errors import ConfigError
from dapo.engines.native import graphs
from dapo.engines.native.engine import NativeEngine
from dapo.engines.native.graphs import graph_capturer
from helpers.tiny_models import ModelWeights, tiny_model


class CpuGraphCapturer:
    """Like a CUDA graph it reads and writes the same memory at each replay; unlike one it runs the Python again."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.captured += 1
        result = torch.empty_like(step())
        return lambda: result.copy_(step()), result


@pytest.fixture(autouse=True)
def fine_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short run meets several shapes, several times."""
    monkeypatch.setattr(graphs, "ROWS", 4)
    monkeypatch.setattr(graphs, "LENGTH", 8)


@pytest.mark.parametrize("name", ["llama", "qwen2 with windows", "gemma3"])
@pytest.mark.parametrize("slots", [3, 6, 64])
def test_recorded_steps_give_the_tokens_of_plain_ones(name: str, slots: int) -> None:
    requests = [
        *group("a", 5, max_new_tokens=40),
        *group("b", 7, prompt_ids=(3, 4, 5, 6, 7, 8), max_new_tokens=20, stop_ids=(50, 150)),
        *group("c", 4, prompt_ids=(9,), max_new_tokens=60, stop_ids=(60,)),
    ]
    plain = run(NativeEngine(tiny_model(name), slots=slots), requests)
    capturer = CpuGraphCapturer()
    engine = NativeEngine(tiny_model(name), slots=slots, capturer=capturer)
    for version in (0, 1):  # slots are freed in between, and the weights are loaded anew
        captured = run(engine, requests)
        assert {i: g.token_ids for i, g in captured.items()} == {i: g.token_ids for i, g in plain.items()}
        for i, generation in captured.items():
            assert generation.logprobs == pytest.approx(plain[i].logprobs, abs=1e-5)
        engine.load_weights(ModelWeights(tiny_model(name)), version + 1)
    made = engine._forward
    assert made is not None
    assert made.graphs is not None
    assert made.graphs.replays > capturer.captured > 3


def test_graphs_without_a_gpu_are_refused_in_words() -> None:
    assert load_config("configs/tiny.yaml", []).rollout.cuda_graphs is False
    assert graph_capturer(torch.device("cpu"), enabled=False) is None
    with pytest.raises(ConfigError, match="cuda_graphs=true needs a CUDA device, but the engine computes on cpu"):
        graph_capturer(torch.device("cpu"), enabled=True)
