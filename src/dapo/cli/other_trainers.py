"""Names the trainer of a file that has options of TRL or AReaL and trains without rewards.

Such a file shares its model, batch and learning rate with the trainer on rewards, and would become
a run that nobody asked for.
"""

import re

from dapo.config.other_names import OTHERS, Peer
from dapo.libs.foreign_options import Reading

_OF_REWARDS = {
    "epsilon",
    "epsilon_high",
    "max_completion_length",
    "num_generations",
    "num_iterations",
    "reward_funcs",
    "reward_weights",
    "scale_rewards",
    "steps_per_generation",
    "use_vllm",
}
"""Options of TRL's GRPOConfig, and of `trl grpo`, that its other trainers have not."""
_OF_OTHERS = (
    "center_rewards_coefficient",
    "desirable_weight",
    "label_smoothing",
    "lmbda",
    "max_length",
    "precompute_ref_log_probs",
    "reference_free",
    "response_length",
    "rpo_alpha",
    "total_episodes",
    "truncation_mode",
    "undesirable_weight",
)
"""Options of TRL's other trainers that GRPOConfig has not."""
_OTHERS = (
    "bco",
    "cpo",
    "dpo",
    "gkd",
    "kto",
    "nash_md",
    "online_dpo",
    "orpo",
    "ppo",
    "prm",
    "reward",
    "reward_modeling",
    "rloo",
    "xpo",
)
"""The programs of TRL's other trainers: `trl dpo`, `dpo.py`."""
_OF_LLAMA_FACTORY = {
    "cutoff_len",
    "finetuning_type",
    "infer_backend",
    "lora_target",
    "stage",
    "template",
}


def other_trainer(peer: Peer | None, reading: Reading, *, is_supervised: bool) -> str | None:
    """Return what else a file is for, as the end of a sentence; None: a trainer that is read.

    `is_supervised` files are of TRL's or verl's supervised trainer by their other options.
    """
    options = reading.options
    if len(_OF_LLAMA_FACTORY & options.keys()) > 1:
        stage = options.get("stage", "none")
        return f"LLaMA-Factory (stage={stage})"
    # its options have TRL's names, and other defaults
    if "rlhf_type" in options or re.search(r"\bswift \w+`$", reading.command):
        command = f" of {reading.command}" if reading.command else ""
        return f"the trainer{command} of ms-swift"
    if is_supervised:
        return None
    if peer == "areal":
        kind = options.get("train_dataset.type")
        is_of_rewards = kind in (None, "rl")
        return None if is_of_rewards else f"AReaL's trainer of train_dataset.type={kind}"
    if peer != "trl" or _OF_REWARDS & options.keys():
        return None
    if reading.program_name in _OTHERS:
        return f"the trainer of {reading.command}"
    name = next((name for name in _OF_OTHERS if name in options), None)
    is_of_trl = [key in _OF_OTHERS or bool(OTHERS["trl"].rows_of(key)) for key in options]
    # other systems share a few names with TRL
    if name is None or 2 * sum(is_of_trl) < len(options):
        return None
    return f"another trainer of TRL ({name}={options[name]})"


def names_no_trainer(peer: Peer, reading: Reading) -> bool:
    """Whether a file of TRL could as well be one of its supervised trainer."""
    is_of_rewards = "grpo" in reading.command or _OF_REWARDS & reading.options.keys()
    return peer == "trl" and not is_of_rewards
