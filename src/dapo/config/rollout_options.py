"""Options of sampling: `rollout`, `dynamic_sampling`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, model_validator

from dapo.algo.sampling import SignalMetric
from dapo.config.engines import ENGINES, OWN_ENGINES, EngineKind
from dapo.config.section import (
    MAX_PROCESSES,
    Auto,
    Float,
    Gibibytes,
    Int,
    Positive,
    Processes,
    Section,
    Tokens,
    option,
)
from dapo.config.vllm_arguments import checked_arguments

if TYPE_CHECKING:
    EngineName: TypeAlias = str
else:
    EngineName = Literal["auto", *ENGINES]

# rollout.native.slots: auto
CPU_SLOTS = 64
GPU_SLOTS = 512

ClockKind: TypeAlias = Literal["history", "load"]


class NativeConfig(Section):
    """Options of the native engine (`rollout.native`)."""

    slots: Annotated[Positive | None, Auto] = option(
        None,
        "Sequences that each engine decodes at a time; responses of a group with equal tokens so"
        f" far count once. none or auto: {CPU_SLOTS} on a CPU; on a GPU as many as its memory has"
        f" room for, at most {GPU_SLOTS}.",
        le=16384,
        unit="sequences",
    )
    kernels: Annotated[dict[str, str] | None, Auto] = option(
        None,
        "CPU kernel (mkl, onednn, compiled or plain) for weights of a shape, {576x1536: onednn};"
        " layers: compiled: fused work between products. none or auto: the fastest of each shape,"
        " timed at the start, and these.",
    )

    def slots_on(self, device_type: str) -> int:
        """Return the value of `slots` on a device, `cpu` or `cuda`."""
        if self.slots is not None:
            return self.slots
        return CPU_SLOTS if device_type == "cpu" else GPU_SLOTS


class VllmConfig(Section):
    """Options of the vLLM engine (`rollout.vllm`)."""

    cache_gib: Annotated[Gibibytes | None, Auto] = option(
        None,
        "Memory for keys and values on each GPU of an engine. none or auto: the engine's share of"
        " the GPU (90 %, divided by the processes on it) minus the weights; 2 on a CPU.",
        unit="GiB",
    )
    tensor_parallel: Processes = option(1, "GPUs per engine.", unit="GPUs")
    python: str | None = option(
        None, "Python interpreter of an environment with vLLM; none: that of the training process."
    )
    options: Annotated[dict[str, Any], AfterValidator(checked_arguments)] = option(
        {},
        "Further arguments of vLLM's EngineArgs, given to it unchanged: {max_num_seqs: 2048,"
        " kv_cache_dtype: fp8}. What is left out has vLLM's default for the GPU. Those that other"
        " options set, and those that would make log-probabilities wrong, are refused.",
    )


class RolloutConfig(Section):
    engine: EngineName = option(
        "auto",
        "The engine that samples responses. auto: vllm on a GPU where it is installed and responses"
        " or the model are long or large enough for it to be faster, else native; chosen at the"
        " start.",
    )
    engines: Int = option(
        0,
        "Engine processes. 0: the training process also samples (vllm always has its own process).",
        ge=0,
        le=MAX_PROCESSES,
        unit="processes",
    )
    clock: Annotated[ClockKind | None, Auto] = option(
        None,
        "When verdicts, answers of environments and new weights (schedule=async) take effect."
        " history: a fixed number of tokens after their cause, and weights when a batch closes;"
        " two runs on CPUs are equal. load: as soon as they arrive; engines get requests by load,"
        " and vllm samples without a seed per request and schedules steps ahead. none or auto:"
        " load for vllm on a GPU, where runs are not equal, else history.",
    )
    native: NativeConfig = option(NativeConfig(), only_with="rollout.engine=native")
    vllm: VllmConfig = option(VllmConfig(), only_with="rollout.engine=vllm")
    options: dict[str, Any] = option(
        {},
        "Options of an engine that another package registers by an entry point of `dapo.engines`.",
        only_with="uses_plugin_engine",
    )
    prompts_per_step: Positive = option(
        512,
        "Informative groups per batch, one for each prompt.",
        paper=512,
        le=10**6,
        unit="prompts",
    )
    group_size: Int = option(
        16,
        "G: responses sampled per prompt; at least 2 where dynamic sampling or the baseline"
        " compares them.",
        paper=16,
        le=10**4,
        unit="responses",
    )
    max_response_tokens: Tokens = option(
        20480,
        "L_max: largest length of a response, including the sampled end token.",
        paper=20480,
        unit="tokens",
    )
    temperature: Float = option(
        1.0, "Temperature of sampling and of log-probabilities.", paper=1.0, gt=0
    )

    @property
    def engine_kind(self) -> EngineKind:
        """The row of the engine; before `auto` is resolved that of native, which runs anywhere."""
        return ENGINES["native" if self.engine == "auto" else self.engine]

    @property
    def slots(self) -> int | None:
        """The sequences that all engines decode at a time; None: no option of the engine says it.

        `start.build.engine_slots` then asks for the engine's default.
        """
        kind = self.engine_kind
        sequences: Any = None
        if self.engine == "vllm":
            sequences = self.vllm.options.get("max_num_seqs")
        elif kind.cache_option is not None and not kind.pages_cache:
            sequences = getattr(self.engine_options, kind.cache_option)
        return sequences * max(1, self.engines) if isinstance(sequences, int) else None

    @property
    def is_reproducible(self) -> bool:
        """True if a resumed run repeats the engine's requests and samples."""
        return self.clock != "load"

    @property
    def engine_options(self) -> Any:
        """The engine's own section; for an engine of another package `rollout.options`."""
        if self.engine == "auto":
            return self.native
        return getattr(self, self.engine) if self.engine in OWN_ENGINES else self.options


def _ordered_bounds(value: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    low, high = value
    if low is not None and high is not None and low >= high:
        raise ValueError("the first number must be less than the second")
    return value


def _function_path(value: str) -> str:
    if ":" not in value or value.startswith("{"):
        raise ValueError(
            "expected module:function; thresholds are dynamic_sampling.min_spread and mean_between"
        )
    return value


class DynamicSamplingConfig(Section):
    enabled: bool = option(
        True, "Train only on groups whose responses differ in reward (Eq. 11).", paper=True
    )
    metric: SignalMetric = option(
        "correct",
        "What Eq. 11 compares where a verdict has both: right or wrong, or the score (partial"
        " credit). Of scores alone it compares these.",
        paper="correct",
        only_with="dynamic_sampling.enabled",
    )
    max_groups_per_step: Positive | None = option(
        None,
        "Largest number of groups judged per step; at that number an incomplete batch trains."
        " none: ten times rollout.prompts_per_step.",
        unit="groups",
    )
    oversampling: Annotated[Float | None, Auto] = option(
        None,
        "Largest share of groups in flight beyond the number that is expected to fill the batch."
        " They begin in free slots only, and no more than fill 95 % of the batches in one wave of"
        " responses. none or auto: 0.25 on a GPU; 0 on a CPU, where each sequence takes its time.",
        only_with="dynamic_sampling.enabled",
        ge=0,
        le=10,
    )
    filter: Annotated[str, AfterValidator(_function_path)] | None = option(
        None,
        "Filter of groups in place of Eq. 11: module:function from a Group to a bool.",
        paper=None,
        only_with="dynamic_sampling.enabled",
    )
    min_spread: Float = option(
        0.0,
        "Smallest spread of a group's scores, the highest minus the lowest, for Eq. 11 to keep it.",
        paper=0.0,
        only_with="dynamic_sampling.enabled",
        ge=0,
    )
    mean_between: Annotated[tuple[Float | None, Float | None], AfterValidator(_ordered_bounds)] = (
        option(
            (None, None),
            "Lower and upper bound, both exclusive, of a group's mean score for Eq. 11 to keep it;"
            " null: no bound.",
            paper=(None, None),
            only_with="dynamic_sampling.enabled",
        )
    )
    predict: bool = option(
        False,
        "Skip problems whose groups are unlikely to carry a signal (Eq. 11), judging by each"
        " problem's history. Success rates are drawn from their posteriors, and a problem is"
        " sampled if its chance of a signal is at least half of the largest one; each is sampled"
        " with a probability of at least 5 %.",
        paper=False,
    )

    @property
    def has_thresholds(self) -> bool:
        """True if scores must also meet `min_spread` or `mean_between`."""
        return self.min_spread > 0 or self.mean_between != (None, None)

    @property
    def has_filter(self) -> bool:
        """True if other criteria than Eq. 11 can drop a group."""
        return self.filter is not None or self.has_thresholds

    @model_validator(mode="after")
    def _thresholds_follow_eq_11(self) -> Self:
        if self.filter is not None and self.has_thresholds:
            raise ValueError(
                f"dynamic_sampling.filter={self.filter} decides in place of Eq. 11, and"
                " dynamic_sampling.min_spread and dynamic_sampling.mean_between apply to groups"
                " that Eq. 11 keeps; set the filter or the thresholds"
            )
        if self.filter is not None and self.metric != "correct":
            raise ValueError(
                f"dynamic_sampling.filter={self.filter} decides in place of Eq. 11, which"
                f" dynamic_sampling.metric={self.metric} belongs to; set one of the two"
            )
        return self
