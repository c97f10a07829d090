"""How long decoding and an update take on a GPU, from stated costs: what moves, what is computed, what is launched.

The costs come from arithmetic and from a reading of the code and of public measurements: no GPU has confirmed them.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, gcd, log
from statistics import NormalDist

from dapo.cli.check.hardware_profile import HardwareProfile
from dapo.config import Config
from dapo.policy.model_dimensions import ModelDimensions

GB = 10**9
MICROSECOND = 1e-6
KERNELS_AROUND_LAYERS = 60  # embedding, last norm, head, sampling
LOGIT_BYTES = 30  # bytes that move per logit of an update: logits, probabilities, gradients, forward and backward
SAMPLING_BYTES = 22  # bytes that move per logit from the head to the token
FORWARD_SHARE = 1 / 3.5  # of an update's attention: its backward takes two and a half times as long


@dataclass(frozen=True)
class DecodeKind:
    """How an engine decodes, as far as it costs time besides arithmetic and the bytes that it must read."""

    kernels_per_layer: int
    has_graphs: bool
    """A step's kernels are launched together, not one by one from Python."""
    reads_longest: bool
    """A step reads each sequence's cache up to the length of the longest."""
    step_us: float
    """Microseconds of the host per step in which the GPU waits."""
    row_us: float
    """The same per sequence: bookkeeping, and a generator per sequence where each has its own seed."""


NATIVE = DecodeKind(kernels_per_layer=20, has_graphs=False, reads_longest=False, step_us=3000, row_us=0)
VLLM = DecodeKind(kernels_per_layer=12, has_graphs=True, reads_longest=False, step_us=2000, row_us=1)
SEEDED_ROW_US = 10  # each sequence draws from a generator of its own


def decode_kind(config: Config) -> DecodeKind:
    """How the engine of a configuration decodes on a GPU."""
    if config.rollout.engine == "native":
        return NATIVE
    row_us = SEEDED_ROW_US if config.rollout.reproducible else VLLM.row_us
    return replace(VLLM, has_graphs=not config.rollout.vllm.eager, row_us=row_us)


@dataclass(frozen=True)
class Decoding:
    """Decode steps of one engine on `gpus` GPUs."""

    dimensions: ModelDimensions
    element_bytes: int
    profile: HardwareProfile
    kind: DecodeKind
    gpus: int = 1

    def step_seconds(self, rows: float, mean_length: float, longest: float) -> float:
        """Seconds for one token of each of `rows` sequences; lengths count the prompt.

        The host issues kernels while the GPU computes: the slower of the two counts, then the host's own part.
        """
        on_gpu = self._products(rows) + self._attention(rows, mean_length, longest) + self._elementwise(rows)
        issue = 0.0 if self.kind.has_graphs else self._kernels * self.profile.issue_us * MICROSECOND
        serial = (self.kind.step_us + rows * self.kind.row_us) * MICROSECOND
        return max(on_gpu, issue) + serial

    @property
    def _kernels(self) -> int:
        return self.dimensions.layers * self.kind.kernels_per_layer + KERNELS_AROUND_LAYERS

    @property
    def _bandwidth(self) -> float:
        return self.gpus * self.profile.bandwidth_gb_s * GB

    def _products(self, rows: float) -> float:
        read = self.element_bytes * self.dimensions.parameters / self._bandwidth
        rate = self.gpus * self.profile.tflops * 1e12 * self.profile.generate_utilisation
        return max(read, 2 * rows * self.dimensions.parameters / rate)

    def _attention(self, rows: float, mean_length: float, longest: float) -> float:
        length = longest if self.kind.reads_longest else mean_length
        read = rows * length * self.dimensions.cache_bytes(self.element_bytes)
        return read / (self._bandwidth * self.profile.attention_utilisation)

    def _elementwise(self, rows: float) -> float:
        sampling = SAMPLING_BYTES * rows * self.dimensions.vocabulary / self._bandwidth
        return self._kernels * self.profile.kernel_us * MICROSECOND + sampling


@dataclass(frozen=True)
class GenerationTime:
    """Seconds of a generation phase, while requests wait for slots and afterwards; tokens made in it."""

    full_s: float
    draining_s: float
    tokens: int
    longest: int

    @property
    def total_s(self) -> float:
        return self.full_s + self.draining_s


def response_lengths(number: int, mean: float, spread: float, limit: int) -> list[int]:
    """Log-normal lengths of `number` responses around a mean, cut at the limit, in an order that mixes them."""
    lengths = NormalDist(log(mean) - spread**2 / 2, spread)
    stride = next(s for s in range(round(0.618 * number), 2 * number + 2) if gcd(s, number) == 1)
    ranks = ((i * stride) % number for i in range(number))
    return [max(1, min(limit, round(exp(lengths.inv_cdf((rank + 0.5) / number))))) for rank in ranks]


def generation_time(
    lengths: list[int], prompt: float, slots: int, step_seconds: Callable[[float, float, float], float]
) -> GenerationTime:
    """The phase in which an engine makes responses of these lengths, of which `slots` run at a time.

    `step_seconds` takes the number of running sequences, their mean length and that of the longest.
    """
    waiting, now, seconds = len(lengths), 0, [0.0, 0.0]
    running: list[tuple[int, int]] = []  # (step at which it ends, step at which it began)
    order: deque[int] = deque()  # the beginnings, the oldest first; those that have ended may still be there
    ended: Counter[int] = Counter()
    starts = 0
    while waiting or running:
        while waiting and len(running) < slots:
            heapq.heappush(running, (now + lengths[-waiting], now))
            order.append(now)
            starts += now
            waiting -= 1
        end, begun = heapq.heappop(running)
        if end > now:
            rows = len(running) + 1
            half_way = prompt + (now + end) / 2
            taken = step_seconds(rows, half_way - starts / rows, half_way - order[0])
            seconds[not waiting] += (end - now) * taken
        now = end
        starts -= begun
        ended[begun] += 1
        while order and ended[order[0]]:
            ended[order.popleft()] -= 1
    return GenerationTime(seconds[0], seconds[1], sum(lengths), max(lengths))


@dataclass(frozen=True)
class UpdateKind:
    """What an update costs besides its products and the bytes of its activations."""

    padding: float = 1.0
    """How many times the attention of the tokens is computed, masked and padded positions included."""
    head_kernels: int = 22
    """Kernels per chunk of the head."""
    chunk_tokens: int = 2048
    """Tokens that go through the head at a time."""
    gradient_moves: int = 3
    """How often a chunk's gradient of the head's weights is read or written."""


@dataclass(frozen=True)
class UpdateTime:
    """Seconds per token of an update on a GPU, by part."""

    dimensions: ModelDimensions
    element_bytes: int
    profile: HardwareProfile
    activation_bytes: float
    """Bytes per token that are kept without recomputation."""
    length: float
    """Keys that a token attends to, on average."""
    kind: UpdateKind = UpdateKind()

    def parts(self, *, recompute: bool) -> dict[str, float]:
        """Of forward and backward; with `recompute` the layers' forward twice."""
        head = {"head": self._head()}
        of_layers = {
            "products": 3 * self._product(),
            "element-wise": self._elementwise(),
            "attention": self._attention(),
        }
        if recompute:
            of_layers["recomputation"] = self._product() + self._elementwise() / 3 + self._attention() * FORWARD_SHARE
        return of_layers | head

    def forward_seconds(self) -> float:
        """Of a forward pass without gradient."""
        return self._product() + self._elementwise() / 3 + self._attention() * FORWARD_SHARE + self._head() / 2

    def utilisation(self, *, recompute: bool) -> float:
        """The share of the GPU's limit that 6 FLOP per parameter and token are."""
        flop = 6 * self.dimensions.parameters
        return flop / (sum(self.parts(recompute=recompute).values()) * self.profile.tflops * 1e12)

    def _product(self) -> float:
        return 2 * self.dimensions.parameters / (self.profile.tflops * 1e12 * self.profile.train_utilisation)

    def _elementwise(self) -> float:
        return self.profile.moves_per_activation * self.activation_bytes / (self.profile.bandwidth_gb_s * GB)

    def _attention(self) -> float:
        flop = 4 * self.dimensions.layers * self.dimensions.heads * self.dimensions.head_dim * self.length
        rate = self.profile.tflops * 1e12 * self.profile.train_utilisation
        return self.kind.padding * flop / FORWARD_SHARE / rate

    def _head(self) -> float:
        """Logits with their probabilities and gradients, the gradient of the head's weights, and what is launched."""
        kind, vocabulary = self.kind, self.dimensions.vocabulary
        gradient = kind.gradient_moves * self.element_bytes * vocabulary * self.dimensions.hidden / kind.chunk_tokens
        moved = LOGIT_BYTES * vocabulary + gradient
        launched = kind.head_kernels * self.profile.launch_us * MICROSECOND / kind.chunk_tokens
        return moved / (self.profile.bandwidth_gb_s * GB) + launched
