"""`reward_model`: a Hugging Face sequence-classification model scores prompt and response by its
logit.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from dapo.core.errors import RewardError
from dapo.core.loading import Failure, try_call
from dapo.core.model_files import unusable_weights
from dapo.rewards.verdicts import TokenIds, error_verdict
from dapo.types import Problem, Verdict, content_text


class RewardModelVerifier:
    """Gives a score, neither right nor wrong (set reward.threshold for that).

    The model reads the conversation that ends in the response, or without a chat template the
    prompt's text, a new line, and the response. A text longer than the model's positions is an
    error. A template that reads the clock reads the date of the run's first start.

    Each worker process loads a copy: use reward.workers=1, a reward.memory_gib that fits the model,
    and a reward.timeout_s that suffices for a group on one CPU thread. Loading may take at most a
    minute.
    """

    def __init__(
        self,
        model: str,
        label: int = 0,
        batch_size: int = 8,
        device: str = "cpu",
        dtype: str = "float32",
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Load the model.

        Args:
            model: a directory or Hugging Face id.
            label: index of the logit that is the score.
            batch_size: responses per forward pass.
            device: a torch device.
            dtype: float32, bfloat16 or float16.
            trust_remote_code: run code of the model's repository.
            chat_template_kwargs: variables for the model's own chat template. Those of the policy,
                `data.chat_template_kwargs`, are not used.

        Raises:
            RewardError: an option is invalid, or the model cannot be loaded.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RewardError(
                f"reward_model: batch_size must be a positive integer, got {batch_size!r}"
            )
        if dtype not in ("float32", "bfloat16", "float16"):
            raise RewardError(
                f"reward_model: dtype must be float32, bfloat16 or float16, got {dtype!r}"
            )
        if not isinstance(chat_template_kwargs, Mapping):
            raise RewardError(
                "reward_model: chat_template_kwargs must be a mapping, such as"
                f" {{enable_thinking: false}}, got {chat_template_kwargs!r}"
            )
        loaded = try_call(lambda: _load(model, device, dtype, trust_remote_code))
        if isinstance(loaded, Failure):
            raise RewardError(f"reward_model: loading {model!r} {loaded.reason}")
        self._model, self._tokenizer = loaded
        config = self._model.config
        if not 0 <= label < config.num_labels:
            raise RewardError(
                f"reward_model: label must be 0 to {config.num_labels - 1} for {model!r}, got"
                f" {label!r}"
            )
        if chat_template_kwargs and not self._tokenizer.chat_template:
            raise RewardError(
                f"reward_model: chat_template_kwargs is set, but {model!r} has no chat template;"
                " leave it out"
            )
        self._variables = dict(chat_template_kwargs)
        self.template_time = datetime.now().replace(microsecond=0)
        """The local time that the chat template reads as now; a run sets its own."""
        self._label = label
        self._limit = getattr(config, "max_position_embeddings", None)
        # the model finds a row's last token by the padding behind it, so padding must differ from
        # text
        pad = config.pad_token_id
        can_pad = (
            pad is not None
            and pad == self._tokenizer.pad_token_id
            and pad != self._tokenizer.eos_token_id
        )
        self._batch_size = batch_size if can_pad else 1

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge_group(problem, [response], [()])[0]

    def judge_group(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> list[Verdict]:
        rows = [self._encode(problem, response) for response in responses]
        verdicts = [
            error_verdict(
                f"reward_model: {len(row)} tokens, and the model has {self._limit} positions"
            )
            for row in rows
        ]
        short = [i for i, row in enumerate(rows) if self._limit is None or len(row) <= self._limit]
        for start in range(0, len(short), self._batch_size):
            batch = short[start : start + self._batch_size]
            for i, score in zip(batch, self._scores([rows[i] for i in batch]), strict=True):
                finite = abs(score) < float("inf")
                if finite:
                    verdicts[i] = Verdict(None, score)
                else:
                    verdicts[i] = error_verdict(f"reward_model: a logit {score}")
        return verdicts

    def _encode(self, problem: Problem, response: str) -> list[int]:
        if self._tokenizer.chat_template:
            prompt = problem.prompt
            if isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt}]
            else:
                messages = list(map(dict, prompt))
            text = self._tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}],
                tokenize=False,
                strftime_now=self.template_time.strftime,
                **self._variables,
            )
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if isinstance(problem.prompt, str):
            parts = [problem.prompt]
        else:
            parts = [content_text(m) for m in problem.prompt]
        return list(self._tokenizer("\n".join([*parts, response]))["input_ids"])

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        pad = self._model.config.pad_token_id or 0
        ids = torch.tensor(
            [[*row, *[pad] * (longest - len(row))] for row in rows], device=self._model.device
        )
        mask = torch.tensor(
            [[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._model.device
        )
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits  # [B, labels]
        return [float(score) for score in logits[:, self._label].float().cpu()]


def _load(name: str, device: str, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if (reason := unusable_weights(name)) is not None:
        raise ValueError(f"it {reason}")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        name,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        use_safetensors=True,
    )
    if report["missing_keys"]:
        raise ValueError(
            f"it has no {', '.join(sorted(report['missing_keys']))}: it is not a reward model"
        )
    return model.to(device).eval(), tokenizer
