"""`dapo convert`, and the answers to options of verl, AReaL and TRL: values arrive, and nothing is
passed over.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.cli import convert
from dapo.config import Config, build_config
from dapo.config.option_fields import options_of
from dapo.config.other_names import COUNTERPARTS, OTHERS, TITLES, Peer, called_elsewhere
from dapo.core.errors import ConfigError
from helpers.commands import run
from helpers.paths import ROOT

ANY = {"model": "tiny-random", "data": {"train": "builtin:sums"}}
NAMES: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "their_options.json").read_text()
)
"""Names of options as their projects have them: a list for each file or class that was read."""

RECIPE = r"""#!/usr/bin/env bash
set -xeuo pipefail
NNODES=${NNODES_OF_NOBODY:-8}                     # a comment
MODELS=${MODELS_OF_NOBODY:-"/models"}
MODEL=${MODEL_OF_NOBODY:-"${MODELS}/Qwen2.5-7B"}
max_prompt=$((1024 * 2))
max_response=$((1024 * 8))
max_tokens=$(((max_prompt + max_response) * 2))
bsz=64
adv='grpo'
EXTRA=(
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.ppo_epochs=3     # in an array
)
EXTRA+=( actor_rollout_ref.actor.grad_clip=0.5 )

ray job submit --working-dir "${PWD}" -- python3 -m recipe.dapo.main_dapo \
    data.train_files="['/data/train.parquet']" \
    data.val_files="/data/${adv}.parquet" \
    data.truncation='left' \
    data.max_prompt_length=${max_prompt} \
    data.max_response_length=$max_response \
    data.train_batch_size=${bsz} \
    data.gen_batch_size=$((bsz * 3)) \
    actor_rollout_ref.rollout.n=8 \
    algorithm.adv_estimator=${adv} \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    # actor_rollout_ref.actor.clip_ratio_high=0.4 \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.max_num_gen_batches=5 \
    actor_rollout_ref.model.path="${MODEL}" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${max_tokens} \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    custom_reward_function.overlong_buffer.enable=True \
    custom_reward_function.overlong_buffer.len=512 \
    trainer.logger='["console","wandb"]' \
    trainer.nnodes="${NNODES}" \
    trainer.total_training_steps=200 \
    trainer.experiment_name="run-$(date +%s)" \
    trainer.test_freq=5 "${EXTRA[@]}" 2>&1 | tee log.txt
"""
TRL_SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

BATCH = 16


def format_reward(completions, **kwargs):
    raise AssertionError("the script was run")


dataset = load_dataset("json", data_files="train.jsonl")["train"]
args = GRPOConfig(
    num_generations=8, per_device_train_batch_size=2 * BATCH, gradient_accumulation_steps=2, steps_per_generation=8,
    learning_rate=2e-6, max_steps=400, num_iterations=2, loss_type="dapo", mask_truncated_completions=True,
    epsilon_high=0.28, generation_kwargs={"top_k": 5}, seed=chosen_seed(), reward_weights=[1.0, 0.5],
)
GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=dataset, reward_funcs=[accuracy_reward, format_reward]
).train()
"""
AREAL = """
experiment_name: gsm8k
seed: 1
actor:
  path: Qwen/Qwen2.5-1.5B
  dtype: bfloat16
  eps_clip: 0.3
  kl_ctl: 0.0
  ppo_n_minibatches: 4
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  optimizer: {type: adam, lr: 1.7e-5, beta1: 0.9, beta2: 0.95}
  max_new_tokens: ${gconfig.max_new_tokens}
gconfig: {n_samples: 4, max_new_tokens: 1024, min_new_tokens: 0, greedy: false}
rollout: {max_head_offpolicyness: 2}
train_dataset: {path: openai/gsm8k, batch_size: 128}
"""


def converted(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str], *, code: int = 0
) -> tuple[Config, str]:
    """The configuration that `dapo convert` prints for a file, and its text."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    found, out, err = run(capsys, "convert", str(tmp_path / name))
    assert found == code, out + err
    return build_config(yaml.safe_load(out)), out


def test_a_script_of_verl_with_variables_arithmetic_arrays_and_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, text = converted(tmp_path, "run.sh", RECIPE, capsys)
    assert (config.model.name, config.data.train, config.data.eval) == (
        "/models/Qwen2.5-7B",
        "/data/train.parquet",
        "/data/grpo.parquet",
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 8192)
    assert (
        config.rollout.prompts_per_step,
        config.train.minibatch_groups,
        config.rollout.group_size,
    ) == (64, 16, 8)
    assert (
        config.train.microbatch_tokens,
        config.train.passes_per_step,
        config.train.num_steps,
    ) == (20480, 3, 200)
    assert config.dynamic_sampling.max_groups_per_step == 5 * 3 * 64
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.dual_clip) == (0.2, 0.28, 3.0)
    assert (config.optim.lr, config.optim.max_grad_norm, config.optim.weight_decay) == (
        2e-6,
        0.5,
        0.01,
    )
    assert (config.overlong.mode, config.overlong.buffer_tokens, config.log.sinks) == (
        "soft",
        512,
        ["wandb"],
    )
    assert (config.eval.temperature, config.rollout.engine) == (0.0, "vllm")  # verl's defaults
    assert "#   data.truncation=left" in text
    assert "#   trainer.experiment_name=run-$(date +%s)" in text
    typed = re.findall(r"^ +\+?([a-z_]+\.[\w.]+)=", RECIPE, flags=re.MULTILINE)
    assert len(typed) > 25
    assert [name for name in typed if name not in text] == []


def test_a_script_of_trl_is_read_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, text = converted(tmp_path, "train.py", TRL_SCRIPT, capsys, code=3)
    assert (config.model.name, config.data.train) == ("Qwen/Qwen2.5-0.5B-Instruct", "train.jsonl")
    assert config.reward.verifier == {
        "trl.rewards:accuracy_reward": 1.0,
        "my_code:format_reward": 0.5,
    }
    assert "Move these functions, with what they use, to my_code.py" in text
    # 32 x 8 responses / 8; 32 x 2 responses per update; 8 / 2 updates in each of two passes
    assert (config.rollout.prompts_per_step, config.train.minibatch_groups) == (32, 8)
    assert (config.train.passes_per_step, config.updates_per_step, config.train.num_steps) == (
        2,
        8,
        50,
    )
    assert (config.overlong.mode, config.loss.aggregate, config.dynamic_sampling.enabled) == (
        "filter",
        "token",
        False,
    )
    assert (config.optim.decay, config.optim.weight_decay) == (("linear", 0), 0)
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert (
        "# Set train.seed yourself: the value is known only when the script runs:\n#  "
        " seed=chosen_seed()" in text
    )
    assert '#   generation_kwargs={"top_k": 5}' in text


def test_a_yaml_of_areal_and_of_verl_and_of_trls_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, text = converted(tmp_path, "areal.yaml", AREAL, capsys)
    assert config.data.train == {"hub": "openai/gsm8k", "config": "main", "split": "train"}
    assert config.rollout.prompts_per_step == 128
    assert (config.train.minibatch_groups, config.train.seed, config.schedule) == (32, 1, "async")
    assert config.max_staleness == 2
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.engine_correction) == (
        0.3,
        0.3,
        5.0,
    )
    assert (config.optim.betas, config.overlong.mode) == ((0.9, 0.95), "off")
    assert "#   actor.max_new_tokens=1024" in text
    verl = {
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 4}},
        "data": {"train_files": "a.parquet"},
    }
    config, _ = converted(tmp_path, "verl.yaml", yaml.safe_dump(verl), capsys)
    assert (config.rollout.group_size, config.advantage.estimator) == (4, "gae")  # verl's default
    trl = {
        "model_name_or_path": "m",
        "dataset_name": "a/b",
        "learning_rate": 1e-5,
        "reward_funcs": ["accuracy_reward"],
    }
    config, _ = converted(tmp_path, "trl.yaml", yaml.safe_dump(trl), capsys)
    assert (config.data.train, config.reward.verifier) == (
        "hub:a/b:train",
        "trl.rewards:accuracy_reward",
    )
    assert (config.overlong.mode, config.rollout.max_response_tokens) == ("off", 512)


@pytest.mark.parametrize(
    ("norms", "estimator", "scale"),
    [
        ("reward_norm: {mean_level: group, std_level: group}", "group", "std"),
        ("reward_norm: {mean_level: group, std_level: null}", "group", "none"),
        (
            "reward_norm: {mean_level: group, mean_leave1out: true, std_level: null}",
            "rloo",
            None,
        ),
        ("reward_norm: {mean_level: group, std_level: batch}", "reinforce_pp_baseline", None),
        (
            "reward_norm: {mean_level: group, std_level: null}\n"
            "  adv_norm: {mean_level: batch, std_level: batch}",
            "reinforce_pp_baseline",
            None,
        ),
        ("adv_norm: {mean_level: batch, std_level: batch}", "reinforce_pp", None),
        ("reward_norm: {mean_level: batch, std_level: batch}", "reinforce_pp", None),
        ("adv_norm: {mean_level: batch, std_level: batch}", "gae", None),
    ],
)
def test_the_baseline_of_areal_is_that_of_its_norms_and_critic(
    tmp_path: Path,
    norms: str,
    estimator: str,
    scale: str | None,
    capsys: pytest.CaptureFixture[str],
):
    text = AREAL.replace("  kl_ctl: 0.0\n", f"  kl_ctl: 0.0\n  {norms}\n")
    if estimator == "gae":
        text += "critic: {path: other}\n"
    config, out = converted(tmp_path, "a.yaml", text, capsys)
    assert config.advantage.estimator == estimator
    assert scale in (None, config.advantage.scale)
    assert "std_level=null" not in out


def test_a_second_normalisation_of_areal_is_named_as_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    norms = (
        "  reward_norm: {mean_level: group, std_level: group}\n"
        "  adv_norm: {mean_level: batch, std_level: batch}\n"
    )
    text = AREAL.replace("  kl_ctl: 0.0\n", f"  kl_ctl: 0.0\n{norms}")
    _, out = converted(tmp_path, "a.yaml", text, capsys)
    assert "#   actor.adv_norm.mean_level=batch\n#   actor.adv_norm.std_level=batch\n" in out


def test_a_divergence_of_areal_is_in_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, _ = converted(tmp_path, "a.yaml", AREAL.replace("kl_ctl: 0.0", "kl_ctl: 0.01"), capsys)
    assert (config.loss.kl_coef, config.loss.kl_in, config.loss.kl_estimator) == (
        0.01,
        "reward",
        "k1",
    )
    config, _ = converted(tmp_path, "a.yaml", AREAL, capsys)
    assert (config.loss.kl_coef, config.loss.kl_in) == (0.0, "loss")


def test_a_teacher_of_areal_is_an_algorithm_without_a_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    teacher = "teacher: {path: big, rl_loss_weight: 1.0, distill_loss_weight: 0.005}\n"
    _, out = converted(tmp_path, "a.yaml", AREAL + teacher, capsys, code=4)
    assert "teacher.path=big has no counterpart" in out


def test_what_a_file_leaves_empty_is_answered_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    theirs = {
        "actor_rollout_ref": {"model": {"path": "m"}, "actor": {}, "rollout": {"n": 4}},
        "data": {"train_files": "a.parquet"},
    }
    theirs |= {"reward_model": {}, "ray_init": None, "trainer": {"nnodes": None}}
    _, text = converted(tmp_path, "a.yaml", yaml.safe_dump(theirs), capsys)
    assert (
        "# A section of options, which sets none:\n#   actor_rollout_ref.actor={}\n#  "
        " reward_model={}\n" in text
    )
    assert "# Null, as if they were not set:\n#   ray_init=null\n#   trainer.nnodes=null\n" in text
    with pytest.raises(ConfigError) as caught:
        build_config(ANY | {"gconfig": {}, "actor": {"optimizer": {}, "path": "m"}})
    answer = (
        "no option here for gconfig={}, actor.optimizer={}: a section of options, which sets none"
    )
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "error_text"),
    [
        ("a.py", "print(1)\n", "there is no call of GRPOConfig or GRPOTrainer"),
        ("a.py", "def f(:\n", "is not readable (invalid syntax"),
        (
            "a.yaml",
            "a: 1\nb: {c: 2}\n",
            "has 0 options of verl, AReaL or TRL; expected a shell script",
        ),
        (
            "a.yaml",
            "model: m\ndata: builtin:sums\ntrain: {seed: 3}\n",
            "has the options of this system, not of another; dapo check",
        ),
        (
            "a.yaml",
            "model: m\ndata: {train: {hub: a/b, split: train, prompt: question}}\n",
            "has the options of this system, not of another; dapo check",
        ),
        # a single name that this system has too
        (
            "a.sh",
            "python3 -m verl.trainer.main_generation model.path=m data.path=a.parquet"
            " rollout.temperature=1.0 rollout.top_k=50\n",
            "(it runs verl.trainer.main_generation) has 0 options of verl, AReaL or TRL",
        ),
        ("a.sh", "echo 'hello\n", "No closing quotation"),
        ("rl.toml", "max_steps = 20\n", "is TOML, as prime-rl's configurations are, which are not"),
        (
            "a.sh",
            "uv run rl @ rl.toml --max-steps 20\n",
            "a.sh (it runs prime-rl, whose options are not read) has 0 options of verl",
        ),
        ("a.sh", "ls -l\n", "has 0 options of verl, AReaL or TRL"),
        (
            "a.sh",
            "python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --n_samples_per_prompt 8\n",
            "a.sh (it runs openrlhf.cli.train_ppo_ray) has 0 options of verl, AReaL or TRL",
        ),
    ],
)
def test_a_file_that_cannot_be_converted_says_why(
    tmp_path: Path, name: str, text: str, error_text: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, out, err = run(capsys, "convert", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert error_text in err
    assert "Traceback" not in err


SHARED = "model_name_or_path: m\ndataset_name: a/b\nlearning_rate: 1e-5\n"


@pytest.mark.parametrize(
    ("name", "text", "trainer"),
    [
        ("a.yaml", f"{SHARED}stage: sft\ntemplate: qwen3\n", "LLaMA-Factory (stage=sft)"),
        (
            "a.yaml",
            f"{SHARED}stage: sft\ncutoff_len: 2048\npacking: true\n",
            "LLaMA-Factory (stage=sft)",
        ),
        (
            "a.sh",
            "llamafactory-cli train --stage dpo --template qwen3 --model_name_or_path m\n",
            "LLaMA-Factory (stage=dpo)",
        ),
        (
            "a.sh",
            "trl dpo --model_name_or_path m --dataset_name a/b --beta 0.1\n",
            "the trainer of `trl dpo`",
        ),
        (
            "a.sh",
            "accelerate launch scripts/kto.py --model_name_or_path m --dataset_name a/b\n",
            "the trainer of `accelerate launch scripts/kto.py`",
        ),
        (
            "a.sh",
            "swift sft --model m --lora_rank 8 --learning_rate 1e-4\n",
            "the trainer of `swift sft` of ms-swift",
        ),
        (
            "a.sh",
            "swift rlhf --rlhf_type grpo --model m --num_generations 8 --learning_rate 1e-6\n",
            "the trainer of `swift rlhf` of ms-swift",
        ),
        (
            "a.yaml",
            "rlhf_type: grpo\nmodel: m\nnum_generations: 8\nlearning_rate: 1.0e-6\n",
            "the trainer of ms-swift",
        ),
        ("a.yaml", f"{SHARED}beta: 0.1\nmax_length: 512\n", "another trainer of TRL"),
        (
            "a.yaml",
            AREAL.replace("batch_size: 128", "batch_size: 128, type: sft"),
            "AReaL's trainer of train_dataset.type=sft",
        ),
    ],
)
def test_a_file_of_a_trainer_without_rewards_is_refused_by_its_name(
    tmp_path: Path, name: str, text: str, trainer: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_text(text)
    code, out, err = run(capsys, "convert", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert f"{name} is for {trainer}" in " ".join(err.split())
    assert "which is not read" in err


def test_a_file_that_names_no_trainer_says_what_it_is_taken_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    note = "# Taken as follows:\n#   one process trains"
    taken = "no option names a trainer: the file is taken as one of `trl grpo`"
    _, text = converted(tmp_path, "a.yaml", SHARED, capsys)
    assert taken in text
    assert note in text
    _, text = converted(tmp_path, "a.yaml", f"{SHARED}num_generations: 4\n", capsys)
    assert taken not in text
    arguments = "--model_name_or_path m --dataset_name a/b"
    for command in (f"trl grpo {arguments}", f"python grpo.py {arguments}"):
        _, text = converted(tmp_path, "a.sh", f"{command}\n", capsys)
        assert taken not in text
    _, text = converted(
        tmp_path, "a.yaml", AREAL.replace("batch_size: 128", "batch_size: 128, type: rl"), capsys
    )
    assert "data:" in text


@pytest.mark.parametrize(
    ("options", "code", "error_text"),
    [
        (
            "",
            1,
            "the converted configuration does not load yet: config:\n  option model is missing",
        ),
        ("$MORE", 1, "option model is missing"),
        ("algorithm.adv_estimator=remax", 4, "no such algorithm here"),
    ],
)
def test_a_configuration_that_does_not_load_is_printed_with_a_code_of_its_own(
    tmp_path: Path, options: str, code: int, error_text: str, capsys: pytest.CaptureFixture[str]
):
    text = "python3 -m main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.n=4 "
    (tmp_path / "a.sh").write_text(text + options)
    code_of_command, out, err = run(capsys, "convert", str(tmp_path / "a.sh"))
    assert code_of_command == code
    assert error_text in err
    assert yaml.safe_load(out)["rollout"]["group_size"] == 4


def test_the_page_has_each_exit_code():
    page = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    section = page.partition("## `dapo convert`")[2].partition("\n## ")[0]
    codes = [convert.SUCCESS, convert.FAULT, 2, convert.NOT_WHOLE, convert.NO_ALGORITHM]
    assert [int(code) for code in re.findall(r"^\| (\d) \|", section, re.M)] == codes


def test_a_script_cannot_make_the_reader_work_for_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = (
        "x=$((9**9**9**9))\npython3 data.train_batch_size=$x actor_rollout_ref.model.path=m"
        " data.train_files=a"
    )
    text += " actor_rollout_ref.rollout.n=4\n"
    _, printed = converted(tmp_path, "a.sh", text, capsys, code=3)
    assert "#   data.train_batch_size=$((9**9**9**9))" in printed


def test_a_secret_of_the_environment_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = (
        "python3 actor_rollout_ref.model.path=$HF_TOKEN data.train_files=a.parquet"
        " data.train_batch_size=8\n"
    )
    (tmp_path / "a.sh").write_text(text)
    _, out, err = run(capsys, "convert", str(tmp_path / "a.sh"))
    assert "hf_secret" not in out + err
    assert "#   actor_rollout_ref.model.path=$HF_TOKEN" in out


@pytest.mark.parametrize(
    ("peer", "source"), [(peer, source) for peer in TITLES for source in NAMES[peer]]
)
def test_each_option_of_the_files_that_the_pages_name_is_in_the_table(peer: Peer, source: str):
    names = NAMES[peer][source]
    assert [name for name in names if not OTHERS[peer].rows_of(name)] == []
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{len(names)}\b[^.]*{re.escape(source)}", " ".join(page.split())), (
        len(names),
        source,
    )


@pytest.mark.parametrize("peer", TITLES)
def test_formulas_and_defaults_name_options_of_the_table(peer: Peer):
    ours = {name for name, _ in options_of()}
    helpers = {
        name
        for name, value in OTHERS[peer].defaults.items()
        if isinstance(value, str) and value.startswith("= ")
    }
    for name in OTHERS[peer].defaults.keys() - helpers:
        assert OTHERS[peer].rows_of(name), name
    for row in COUNTERPARTS[peer]:
        assert not row.formula or row.ours, row
        assert ours.issuperset(option.partition("=")[0] for option in row.ours)


def test_all_options_of_another_system_are_answered_in_one_message_each_with_its_value():
    names = NAMES["verl"]["recipe/dapo/run_dapo_qwen2.5_32b.sh"]
    typed = [name for name in names if name not in ("data.train_files",)]
    with pytest.raises(ConfigError) as caught:
        build_config(ANY, [*(f"{name}=3" for name in typed), "algorithm.adv_estimator=rloo"])
    text = str(caught.value)
    assert [name for name in typed if name not in text] == []
    for answer in (
        "verl's actor_rollout_ref.rollout.n=3 is rollout.group_size=3 here",
        "verl's algorithm.adv_estimator=rloo is advantage.estimator=rloo here",
        (
            "verl's algorithm.filter_groups.max_num_gen_batches=3 is"
            " dynamic_sampling.max_groups_per_step=9 here"
        ),
        "dapo convert FILE translates a file of them",
    ):
        assert answer in text
    assert text.count("dapo show docs coming_from shows a run of verl") == 1


def test_a_whole_yaml_of_areal_is_answered_leaf_by_leaf():
    theirs = yaml.safe_load(AREAL)
    with pytest.raises(ConfigError) as caught:
        build_config(ANY | theirs)
    for answer in (
        "AReaL's actor.eps_clip=0.3 is loss.clip_low=0.3 here",
        "AReaL's gconfig.n_samples=4 is rollout.group_size=4 here",
        (
            "AReaL's rollout.max_head_offpolicyness=2 is max_staleness=2 and schedule=async and"
            " rollout.engines=1 here"
        ),
        "no option here for gconfig.min_new_tokens=0, gconfig.greedy=false",
        "actor.optimizer.type=adam",
    ):
        assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "answer"),
    [
        (
            "mask_truncated_completions",
            True,
            "TRL's mask_truncated_completions=true is overlong.mode=filter here",
        ),
        (
            "actor_rollout_ref.actor.use_kl_loss",
            False,
            "actor.use_kl_loss=false is loss.kl_coef=0 here",
        ),
        (
            "loss_type",
            "dapo",
            "TRL's loss_type=dapo is loss.surrogate=clip and loss.aggregate=token here",
        ),
        ("loss_type", "vespo", "has no option here"),
        ("trainer.test_freq", 7, "verl's trainer.test_freq=7 is train.eval_every=7 here"),
        ("max_steps", 7, "TRL's max_steps=7 is train.num_steps=7 here"),
        ("learning_rate", 2e-6, "is optim.lr=2e-06 here"),
        (
            "vllm_mode",
            "colocate",
            "TRL's vllm_mode=colocate has no option here: engines have their own processes",
        ),
    ],
)
def test_values_of_theirs_are_in_the_answer(option: str, value: Any, answer: str):
    assert answer in str(called_elsewhere(option, value))


VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m"
    " actor_rollout_ref.rollout.n=8 data.train_batch_size=64"
    " actor_rollout_ref.actor.ppo_mini_batch_size=32 "
)
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.mark.parametrize(
    "option",
    [
        "algorithm.adv_estimator=remax",
        "algorithm.adv_estimator=of_tomorrow",
        f"{LOSS}=kl_cov",
        f"{LOSS}=geo_mean",
        "algorithm.rollout_correction.rollout_rs=geometric",
    ],
)
def test_an_algorithm_without_a_counterpart_stops_above_the_configuration(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.sh").write_text(VERL + option)
    code, out, err = run(capsys, "convert", str(tmp_path / "a.sh"))
    assert code == 4
    assert f"no such algorithm here: {option} has no counterpart" in err
    assert f"#   {option}" in out.partition("\nmodel:")[0]


def test_options_that_could_not_be_read_are_named_above_and_no_value_is_called_a_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, text = converted(tmp_path, "a.sh", f"{VERL} $NOBODY_SETS_IT", capsys, code=3)
    assert "#   line 1: $NOBODY_SETS_IT" in text.partition("\nmodel:")[0]
    assert "the default of" not in text
    assert config.rollout.group_size == 8


def test_a_configuration_that_verl_starts_from_and_that_is_not_its_own_is_named_as_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("ppo_megatron_trainer.yaml", "ppo_trainer"):
        converted(tmp_path, "a.sh", f"{VERL} --config-path=config --config-name={name}", capsys)
    for name in ("gsm8k_multiturn_grpo", "$NOBODY_SETS_IT"):
        _, text = converted(tmp_path, "a.sh", f"{VERL} --config-name={name}", capsys, code=3)
        head = text.partition("\nmodel:")[0]
        assert f"the options in the configuration {name} (--config-name)" in head
        assert "the default of" not in text


def test_a_trainer_that_is_not_verls_own_is_named_as_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for program in ("-m recipe.dapo.main_dapo", "verl/trainer/main_ppo.py"):
        script = VERL.replace("-m verl.trainer.main_ppo", program)
        converted(tmp_path, "a.sh", script, capsys)
    for program in ("recipe.flowrl.main_flowrl", "recipe.sppo.main_sppo"):
        script = VERL.replace("verl.trainer.main_ppo", program)
        _, text = converted(tmp_path, "a.sh", script, capsys, code=3)
        head = text.partition("\nmodel:")[0]
        assert f"the code of {program}, which may train in its own way" in head


WARMUP = "actor_rollout_ref.actor.optim.lr_warmup_steps"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (f"{WARMUP}_ratio=0.1 trainer.total_training_steps=205", 20),
        (f"{WARMUP}_ratio=0.1 {WARMUP}=7 trainer.total_training_steps=205", 7),
        (f"{WARMUP}_ratio=0.1 {WARMUP}=7", 7),
        (f"{WARMUP}_ratio=0.0", 0),
        ("", 0),
    ],
)
def test_a_share_of_warm_up_steps_is_their_number(
    tmp_path: Path, options: str, steps: int, capsys: pytest.CaptureFixture[str]
):
    config, _ = converted(tmp_path, "a.sh", VERL + options, capsys)
    assert config.optim.warmup(config.train.num_steps) == steps


@pytest.mark.parametrize(
    ("rewards", "options"),
    [
        ("reward_funcs: [accuracy, format]", ["reward_funcs"]),
        ("reward_funcs: [accuracy_reward, get_soft_overlong_punishment]", ["reward_funcs"]),
        ("reward_funcs: org/Judge-0.5B", ["reward_funcs"]),
        (
            "reward_funcs: accuracy_reward\nreward_model_name_or_path: org/judge",
            ["reward_model_name_or_path"],
        ),
    ],
)
def test_a_reward_of_trl_that_is_no_function_by_its_module_is_left_to_a_person(
    tmp_path: Path, rewards: str, options: list[str], capsys: pytest.CaptureFixture[str]
):
    _, out = converted(tmp_path, "a.yaml", f"{SHARED}{rewards}\n", capsys, code=3)
    head = out.partition("\nmodel:")[0]
    assert "# Set reward.verifier yourself" in head
    for option in options:
        assert f"#   {option}=" in head
    has_function = "reward_funcs" not in options
    assert ("reward" in yaml.safe_load(out)) == has_function


def test_the_column_of_prompts_and_the_system_message_arrive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = (
        "model_name_or_path: m\ndataset_name: a/b\ndataset_prompt_column: problem\n"
        "system_prompt: Think.\ntorch_dtype: bfloat16\nnum_generations: 4\n"
    )
    config, text = converted(tmp_path, "a.yaml", recipe, capsys)
    assert config.data.train == {"hub": "a/b", "split": "train", "prompt": "problem"}
    assert (config.data.system, config.model.dtype) == ("Think.", "bfloat16")
    assert "the table does not" not in text

    files = "data.val_files=b.parquet data.prompt_key="
    config, _ = converted(tmp_path, "a.sh", f"{VERL} {files}question", capsys)
    assert config.data.eval == {"path": "b.parquet", "prompt": "question"}
    config, _ = converted(tmp_path, "a.sh", f"{VERL} {files}prompt", capsys)
    assert config.data.eval == "b.parquet"
    several = "data.train_files=['x.parquet','y.parquet'] data.prompt_key=question"
    config, _ = converted(tmp_path, "a.sh", f"{VERL} {several}", capsys)
    assert config.data.train == {
        "mix": {
            "x": {"path": "x.parquet", "prompt": "question"},
            "y": {"path": "y.parquet", "prompt": "question"},
        }
    }


def test_the_cap_of_areal_arrives_by_both_spellings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = AREAL.replace("behav_imp_weight_cap: 5.0", "behave_imp_weight_cap: 4.0")
    config, _ = converted(tmp_path, "a.yaml", text, capsys)
    assert config.loss.engine_correction == 4.0


def test_flags_of_trl_may_have_dashes_and_a_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = (
        "trl grpo --model-name-or-path m --dataset_name a/b --num-generations=4"
        " --learning-rate 2e-5 --no_gradient_checkpointing --no-bf16\n"
    )
    config, text = converted(tmp_path, "a.sh", command, capsys)
    assert (config.model.name, config.rollout.group_size) == ("m", 4)
    assert (config.optim.lr, config.train.recompute) == (2e-5, False)
    assert config.model.dtype == "float32"
    assert "the table does not" not in text


def test_rewards_of_trls_command_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rewards = "reward_funcs: [think_format_reward, mine.rewards.short]\nreward_weights: [1, 0.5]\n"
    config, _ = converted(tmp_path, "a.yaml", SHARED + rewards, capsys)
    assert config.reward.verifier == {
        "trl.rewards:think_format_reward": 1.0,
        "mine.rewards:short": 0.5,
    }
    text = f"{SHARED}num_generations: 4\nreward_model_name_or_path: org/judge\n"
    config, _ = converted(tmp_path, "a.yaml", text, capsys)
    assert (config.reward.verifier, config.reward.options) == (
        "reward_model",
        {"model": "org/judge"},
    )


WARMUP_OF_AREAL = "optimizer: {warmup_steps_proportion: "


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        # 2 updates per batch: 8 accumulated of 16 in each; 21 updates there, 11 steps
        ("warmup_ratio: 0.1\nmax_steps: 205\n", 10),
        ("warmup_steps: 0.1\nmax_steps: 205\n", 10),
        ("warmup_ratio: 0.1\nwarmup_steps: 6\nmax_steps: 205\n", 3),
        ("warmup_ratio: null\n", 0),
        ("", 0),
    ],
)
def test_a_share_of_trls_updates_is_a_share_of_steps_rounded_down(
    tmp_path: Path, text: str, steps: int, capsys: pytest.CaptureFixture[str]
):
    batch = "num_generations: 4\nsteps_per_generation: 16\ngradient_accumulation_steps: 8\n"
    config, _ = converted(tmp_path, "a.yaml", SHARED + batch + text, capsys)
    assert config.optim.warmup(config.train.num_steps) == steps


@pytest.mark.parametrize(
    ("optimizer", "total", "steps"), [(0.1, 205, 20), (0.001, 205, 0), (0.001, None, 0)]
)
def test_a_share_of_areals_steps_becomes_their_number(
    tmp_path: Path,
    optimizer: float,
    total: int | None,
    steps: int,
    capsys: pytest.CaptureFixture[str],
):
    text = AREAL.replace("optimizer: {", f"{WARMUP_OF_AREAL}{optimizer}, ")
    if total:
        text += f"total_train_steps: {total}\n"
    config, _ = converted(tmp_path, "a.yaml", text, capsys)
    assert config.optim.warmup(config.train.num_steps) == steps
    config, _ = converted(tmp_path, "a.yaml", AREAL, capsys)
    assert config.optim.warmup(config.train.num_steps) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", f"{SHARED}num_generations: 4\nwarmup_ratio: 0.1\n"),
        ("a.yaml", f"{SHARED}num_generations: 4\nwarmup_steps: 0.1\n"),
        ("a.yaml", AREAL.replace("optimizer: {", f"{WARMUP_OF_AREAL}0.1, ")),
        ("a.sh", f"{VERL} {WARMUP}_ratio=0.1 trainer.total_epochs=15"),
        ("a.sh", "trl sft --model_name_or_path m --dataset_name a/b --warmup_ratio 0.1"),
    ],
)
def test_a_share_of_a_length_in_epochs_stays_a_share(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
):
    config, out = converted(tmp_path, name, text, capsys)
    assert yaml.safe_load(out)["optim"]["warmup_ratio"] == 0.1
    assert "warmup_steps" not in yaml.safe_load(out)["optim"]
    resolved = config.with_steps_of_epochs(300 * config.rows_per_step)
    assert resolved.optim.warmup(resolved.train.num_steps) == resolved.train.num_steps // 10


SCHEDULE_OF_VERL = "actor_rollout_ref.actor.optim."
SCHEDULE_OF_TRL = "model_name_or_path: m\ndataset_name: a/b\nnum_generations: 4\n"


@pytest.mark.parametrize(
    ("name", "text", "schedule"),
    [
        # a cosine falls to 0 there, and to a tenth here where no fraction is named
        ("a.sh", f"{{verl}} {SCHEDULE_OF_VERL}lr_scheduler_type=cosine", "cosine:0"),
        ("a.sh", f"{{verl}} {SCHEDULE_OF_VERL}warmup_style=cosine", "cosine:0"),
        (
            "a.sh",
            f"{{verl}} {SCHEDULE_OF_VERL}lr_scheduler_type=cosine"
            f" {SCHEDULE_OF_VERL}min_lr_ratio=0.05",
            "cosine:0.05",
        ),
        ("a.sh", f"{{verl}} {SCHEDULE_OF_VERL}lr_scheduler_type=constant", "constant"),
        ("a.yaml", AREAL.replace("type: adam", "lr_scheduler_type: linear"), "linear:0"),
        (
            "a.yaml",
            AREAL.replace("type: adam", "lr_scheduler_type: cosine, min_lr_ratio: 0.2"),
            "cosine:0.2",
        ),
        (
            "a.yaml",
            f"{SCHEDULE_OF_TRL}lr_scheduler_type: cosine_with_min_lr\n"
            "lr_scheduler_kwargs: {min_lr_rate: 0.3}\n",
            "cosine:0.3",
        ),
        (
            "a.yaml",
            f"{SCHEDULE_OF_TRL}lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 2.0e-6\n"
            "lr_scheduler_kwargs: {min_lr: 1.0e-6}\n",
            "cosine:0.5",
        ),
    ],
)
def test_a_schedule_keeps_the_rate_that_it_ends_at(
    tmp_path: Path, name: str, text: str, schedule: str, capsys: pytest.CaptureFixture[str]
):
    config, _ = converted(tmp_path, name, text.replace("{verl}", VERL), capsys)
    assert config.optim.schedule == schedule


IN_LOSS = "actor_rollout_ref.actor.use_kl_loss=True"
IN_REWARD = "algorithm.use_kl_in_reward=True"
OF_LOSS = "actor_rollout_ref.actor.kl_loss_type"


@pytest.mark.parametrize(
    ("options", "estimator", "place"),
    [
        (f"{IN_LOSS} {OF_LOSS}=mse algorithm.kl_penalty=kl", "k2", "loss"),
        (f"algorithm.kl_penalty=kl {IN_LOSS} {OF_LOSS}=low_var_kl", "k3", "loss"),
        (IN_REWARD, "k1", "reward"),
        (f"{IN_REWARD} {OF_LOSS}=low_var_kl", "k1", "reward"),
        (f"{IN_REWARD} algorithm.kl_penalty=low_var_kl", "k3", "reward"),
    ],
)
def test_the_estimator_of_verls_divergence_is_that_of_its_place(
    tmp_path: Path, options: str, estimator: str, place: str, capsys: pytest.CaptureFixture[str]
):
    config, _ = converted(tmp_path, "a.sh", f"{VERL} {options}", capsys)
    assert (config.loss.kl_estimator, config.loss.kl_in) == (estimator, place)


ADAPTER_OF_VERL = "actor_rollout_ref.model.lora"


@pytest.mark.parametrize(
    ("options", "adapter"),
    [
        (f"{ADAPTER_OF_VERL}_rank=8 {ADAPTER_OF_VERL}_alpha=24", (8, 24)),
        (f"{ADAPTER_OF_VERL}_rank=8", (8, 16)),
        (
            f"{ADAPTER_OF_VERL}.rank=8 {ADAPTER_OF_VERL}.alpha=24 {ADAPTER_OF_VERL}.dropout=0",
            (8, 24),
        ),
        (f"{ADAPTER_OF_VERL}_rank=0 {ADAPTER_OF_VERL}_alpha=24", None),
        ("", None),
    ],
)
def test_an_adapter_of_verl_arrives_by_both_names_and_is_off_at_rank_0(
    tmp_path: Path,
    options: str,
    adapter: tuple[int, int] | None,
    capsys: pytest.CaptureFixture[str],
):
    script = f"{VERL} algorithm.adv_estimator=grpo {options}"
    config, text = converted(tmp_path, "a.sh", script, capsys)
    lora = config.model.lora
    assert (lora and (lora.rank, lora.alpha)) == adapter
    assert "the table does not" not in text


def test_a_lower_bound_of_cispo_that_bounds_nothing_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bounds = "actor_rollout_ref.actor.clip_ratio_low=10 actor_rollout_ref.actor.clip_ratio_high=0.2"
    config, text = converted(tmp_path, "a.sh", f"{VERL} {LOSS}=cispo {bounds}", capsys)
    assert (config.loss.surrogate, config.loss.clip_high) == ("cispo", 0.2)
    assert "#   actor_rollout_ref.actor.clip_ratio_low=10" in text
    assert "clip_low: 10" not in text
    # another loss has this bound, and here it is refused
    (tmp_path / "a.sh").write_text(f"{VERL} {bounds}")
    assert run(capsys, "convert", str(tmp_path / "a.sh"))[0] == 1


TURNS = "actor_rollout_ref.rollout.multi_turn."


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (f"{TURNS}enable=True", 3),
        (f"{TURNS}tool_config_path=tools.yaml", 3),
        (f"{TURNS}enable=True {TURNS}interaction_config_path=user.yaml", 3),
        (f"{TURNS}enable=False {TURNS}tool_config_path=tools.yaml", 0),
        (f"{TURNS}enable=False", 0),
        (f"{TURNS}tool_config_path=null", 0),
    ],
)
def test_tools_of_verl_are_left_to_a_person_by_name(
    tmp_path: Path, options: str, code: int, capsys: pytest.CaptureFixture[str]
):
    _, text = converted(tmp_path, "a.sh", VERL + options, capsys, code=code)
    head = text.partition("\nmodel:")[0]
    assert ("# Set environment or agent yourself" in head) == (code == 3)
    if code == 3:
        assert f"#   {options.split()[-1]}" in head


SFT_OF_VERL = r"""
torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \
    data.train_files=train.parquet data.val_files=test.parquet \
    data.prompt_key=extra_info data.response_key=extra_info \
    +data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \
    optim.lr=1e-4 data.train_batch_size=64 model.partial_pretrain=m trainer.total_training_steps=30
"""
SFT_OF_TRL = """
from trl import SFTConfig, SFTTrainer
args = SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=30)
SFTTrainer(model="m", args=args, train_dataset="train.jsonl").train()
"""


def test_scripts_that_imitate_demonstrations_become_the_preset_sft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, text = converted(tmp_path, "sft.sh", SFT_OF_VERL, capsys)
    assert (config.preset, config.schedule, config.model.name) == ("sft", "supervised", "m")
    assert (config.optim.lr, config.optim.schedule) == (1e-4, "cosine:0")
    assert (config.train.minibatch_groups, config.train.num_steps) == (64, 30)
    assert yaml.safe_load(text)["data"]["demonstrations"] == {
        "path": "train.parquet",
        "prompt": "extra_info.question",
        "answer": "extra_info.answer",
    }
    assert "#   data.val_files=test.parquet" in text

    config, text = converted(tmp_path, "sft.py", SFT_OF_TRL, capsys)
    assert (config.preset, config.schedule, config.model.name) == ("sft", "supervised", "m")
    assert (config.optim.lr, config.optim.schedule) == (2e-5, "linear:0")
    assert (config.train.minibatch_groups, config.train.num_steps) == (8, 30)
    assert yaml.safe_load(text)["data"]["demonstrations"] == "train.jsonl"

    command = "trl sft --model_name_or_path m --dataset_name a/b --max_steps 30\n"
    config, text = converted(tmp_path, "sft.sh", command, capsys)
    assert (config.preset, config.train.num_steps) == ("sft", 30)
    assert yaml.safe_load(text)["data"]["demonstrations"] == "hub:a/b:train"


def test_the_rest_of_a_supervised_command_of_trl_arrives_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = (
        "trl sft --model_name_or_path m --dataset_name a/b --max_steps 200 --use_peft --lora_r 8"
        " --lora_alpha 24 --warmup_ratio 0.05 --save_steps 50 --save_total_limit 3 --bf16"
        " --gradient_checkpointing --adam_beta2 0.95 --lr_scheduler_type cosine_with_min_lr"
        " --lr_scheduler_kwargs '{\"min_lr_rate\": 0.2}' --assistant_only_loss\n"
    )
    config, text = converted(tmp_path, "a.sh", command, capsys)
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (8, 24)
    assert (config.model.dtype, config.train.recompute) == ("bfloat16", True)
    assert (config.train.save_every, config.train.keep_checkpoints) == (50, 3)
    assert (config.optim.betas, config.optim.schedule) == ((0.9, 0.95), "cosine:0.2")
    assert (config.optim.warmup_ratio, config.train.seed) == (0.05, 42)
    assert "the table does not" not in text


def test_verls_two_supervised_trainers_have_their_own_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = "data.train_files=a.parquet trainer.total_training_steps=50 trainer.save_freq=10"
    newer = f"torchrun -m verl.trainer.sft_trainer model.path=m {options}"
    config, text = converted(tmp_path, "a.sh", newer, capsys)
    assert yaml.safe_load(text)["data"]["demonstrations"] == "a.parquet"  # of conversations
    assert (config.optim.lr, config.optim.schedule) == (1e-3, "constant")
    assert (config.optim.betas, config.optim.warmup_steps) == ((0.9, 0.999), 0)
    assert (config.train.save_every, config.train.seed) == (10, 1)
    decay = " optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 optim.lr_warmup_steps_ratio=0.2"
    config, _ = converted(tmp_path, "a.sh", newer + decay, capsys)
    assert (config.optim.schedule, config.optim.warmup_ratio) == ("cosine:0.1", 0.2)

    older = f"torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m {options}"
    config, text = converted(tmp_path, "a.sh", older, capsys)
    demonstrations = {"path": "a.parquet", "prompt": "question", "answer": "answer"}
    assert yaml.safe_load(text)["data"]["demonstrations"] == demonstrations
    assert (config.optim.lr, config.optim.schedule) == (1e-5, "cosine:0")
    assert (config.optim.betas, config.optim.warmup_ratio) == ((0.9, 0.95), 0.1)


def test_an_adapter_of_trls_command_keeps_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    adapter = "num_generations: 4\nuse_peft: true\nlora_r: 8\nlora_alpha: 24\n"
    config, text = converted(tmp_path, "a.yaml", SHARED + adapter, capsys)
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (8, 24)
    assert text.count("lora:") == 1


@pytest.mark.parametrize(
    ("text", "is_supervised"),
    [
        ("model_name_or_path: m\ndataset_name: a/b\nlearning_rate: 1e-4\npacking: true\n", True),
        ("model_name_or_path: m\ndataset_name: a/b\ncompletion_only_loss: true\n", True),
        (
            "model: {partial_pretrain: m}\ndata: {train_files: a.parquet}\noptim: {lr: 1.0e-5}\n",
            True,
        ),
        # options of both, and one of the trainer with rewards
        (
            "model_name_or_path: m\ndataset_name: a/b\nnum_generations: 4\npadding_free: true\n",
            False,
        ),
        ("model_name_or_path: m\ndataset_name: a/b\nlearning_rate: 1e-4\n", False),
    ],
)
def test_a_yaml_file_is_of_the_supervised_trainer_where_an_option_is_of_that_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, is_supervised: bool
) -> None:
    config, _ = converted(tmp_path, "file.yaml", text, capsys)
    assert (config.preset == "sft") == is_supervised


def test_conversations_of_verls_supervised_trainer_have_no_column_of_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = (
        "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet"
        " data.multiturn.enable=true model.partial_pretrain=m trainer.total_training_steps=30\n"
    )
    _, text = converted(tmp_path, "a.sh", script, capsys)
    assert yaml.safe_load(text)["data"]["demonstrations"] == "a.parquet"


def test_a_warm_start_in_a_script_of_grpo_sets_none_of_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = BATCH.format(size=8, group=4) + SFT_OF_TRL
    config, _ = converted(tmp_path, "a.py", script, capsys)
    assert (config.preset, config.rollout.prompts_per_step) == ("dapo", 2)


def test_a_reward_model_of_verl_judges_here_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = f"{VERL} reward_model.model.path=a/b reward_model.enable="
    config, _ = converted(tmp_path, "a.sh", f"{script}True", capsys)
    assert config.reward.verifier == "reward_model"
    assert config.reward.options == {"model": "a/b"}
    own = "custom_reward_function.path=r.py custom_reward_function.name=f"
    config, text = converted(tmp_path, "a.sh", f"{script}True {own}", capsys)
    assert (config.reward.verifier, config.reward.options) == ("r:f", {})
    assert "#   reward_model.enable=true" in text
    config, text = converted(tmp_path, "a.sh", f"{script}False", capsys)
    assert config.reward.verifier != "reward_model"
    assert "#   reward_model.model.path=a/b" in text
    assert "#   reward_model.enable=false" in text


@pytest.mark.parametrize("loss", ["gspo", "sapo", "cispo"])
def test_a_dual_clip_that_verl_does_not_use_with_a_loss_is_left_out_by_name(
    tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
):
    config, text = converted(
        tmp_path, "a.sh", f"{VERL} {LOSS}={loss} actor_rollout_ref.actor.clip_ratio_c=10", capsys
    )
    assert (config.loss.surrogate, config.loss.dual_clip) == (loss, None)
    assert "#   actor_rollout_ref.actor.clip_ratio_c=10" in text


def test_variables_of_the_chat_template_arrive_from_both_systems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    option = "+data.apply_chat_template_kwargs.enable_thinking=False"
    config, _ = converted(tmp_path, "a.sh", f"{VERL} {option}", capsys)
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    trl = {
        "model_name_or_path": "m",
        "dataset_name": "a/b",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    config, _ = converted(tmp_path, "trl.yaml", yaml.safe_dump(trl), capsys)
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


BATCH = """
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(per_device_train_batch_size={size}, num_generations={group})
GRPOTrainer(model="m", args=args, train_dataset="d.jsonl", reward_funcs="r:f").train()
"""


def test_a_batch_that_needs_several_processes_asks_for_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.py").write_text(BATCH.format(size=16, group=14))
    code, out, err = run(capsys, "convert", str(tmp_path / "a.py"))
    assert (code, "prompts_per_step:" in out) == (1, False)
    assert "dapo convert --processes N" in err
    code, out, err = run(capsys, "convert", str(tmp_path / "a.py"), "--processes", "7")
    assert (code, yaml.safe_load(out)["rollout"]["prompts_per_step"]) == (0, 8), err


def test_unsloth_raises_the_batch_to_the_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, _ = converted(
        tmp_path, "a.py", f"import unsloth{BATCH.format(size=1, group=6)}", capsys
    )
    assert config.rollout.prompts_per_step == 1


def test_a_notebook_is_read_without_its_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cells = [
        ["!pip install \\\n", "  trl\n", "import os"],
        ["%%bash\n", "ls"],
        BATCH.format(size=8, group=4),
    ]
    picture = {"data": {"image/png": "A" * 2 * convert.MAX_BYTES}}
    notebook = {
        "cells": [{"cell_type": "code", "source": cell, "outputs": [picture]} for cell in cells]
    }
    config, _ = converted(tmp_path, "a.ipynb", json.dumps(notebook), capsys)
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (2, 4)


def test_a_program_around_verl_is_converted_and_its_own_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own = [f"rllm.option_{i}={i}" for i in range(20)]
    _, out = converted(tmp_path, "a.sh", VERL + " ".join(own), capsys)
    assert all(f"#   {option}" in out for option in own)
    (tmp_path / "b.sh").write_text(f"run data.train_files=a data.seed=1 {' '.join(own)}")
    code, _, err = run(capsys, "convert", str(tmp_path / "b.sh"))
    assert (code, "has 2 options of verl" in err) == (2, True)


def test_a_list_with_an_interpolation_is_known_only_to_the_other_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = "data: {train_files: ['${oc.env:NOBODY}/a']}\nactor_rollout_ref: {rollout: {n: 4}}\n"
    (tmp_path / "a.yaml").write_text(text)
    code, out, _ = run(capsys, "convert", str(tmp_path / "a.yaml"))
    assert (code, "data.train_files=" in out) == (1, True)


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (f"{CORRECTION}.bypass_mode=true {CORRECTION}.loss_type=reinforce", 4),
        (f"{CORRECTION}.bypass_mode=true {CORRECTION}.loss_type=ppo_clip", 0),
        (f"{CORRECTION}.loss_type=reinforce", 0),
        ("algorithm.gamma=0.99", 4),
        ("algorithm.gamma=1.0", 0),
    ],
)
def test_another_loss_of_verl_is_no_detail_where_it_has_an_effect(
    tmp_path: Path, options: str, code: int, capsys: pytest.CaptureFixture[str]
):
    script = f"{VERL} algorithm.adv_estimator=grpo {options}"
    converted(tmp_path, "a.sh", script, capsys, code=code)


@pytest.mark.parametrize(
    ("name", "estimator"), [("grpo_vectorized", "group"), ("rloo_vectorized", "rloo")]
)
def test_a_vectorized_estimator_of_verl_is_the_estimator(
    tmp_path: Path, name: str, estimator: str, capsys: pytest.CaptureFixture[str]
):
    config, _ = converted(tmp_path, "a.sh", f"{VERL} algorithm.adv_estimator={name}", capsys)
    assert config.advantage.estimator == estimator


def test_the_keywords_of_a_reward_function_of_verl_are_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for prefix in ("", "reward."):
        own = f"{prefix}custom_reward_function"
        options = f"{own}.path=recipe/mine/r.py +{own}.reward_kwargs.penalty=0.5"
        script = f"{VERL} algorithm.adv_estimator=grpo {options} +{own}.reward_kwargs.base=2"
        config, _ = converted(tmp_path, "a.sh", script, capsys)
        assert config.reward.verifier == "recipe.mine.r:compute_score"
        assert config.reward.options == {"penalty": 0.5, "base": 2}


@pytest.mark.parametrize(
    ("path", "verifier"),
    [
        ("r.py", "r:f"),
        ("./recipe/r.py", "recipe.r:f"),
        ("/home/me/recipe/r.py", "r:f"),
        ("../recipe/r.py", "r:f"),
        ("my-recipe/r.py", "r:f"),
        ("pkg://recipe.r", "recipe.r:f"),
    ],
)
def test_the_file_of_a_reward_function_of_verl_is_named_as_a_module(
    tmp_path: Path, path: str, verifier: str, capsys: pytest.CaptureFixture[str]
):
    own = f"custom_reward_function.path={path} custom_reward_function.name=f"
    script = f"{VERL} algorithm.adv_estimator=grpo {own}"
    config, _ = converted(tmp_path, "a.sh", script, capsys)
    assert config.reward.verifier == verifier


def test_the_fully_asynchronous_trainer_of_verl_has_a_batch_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its documentation: the engine takes new weights after `trigger_parameter_sync_step` fetches
    of `require_batches` x `ppo_mini_batch_size` prompts; by default 4 and 1.
    """
    options = VERL.replace("data.train_batch_size=64", "data.train_batch_size=0")
    options = options.replace("main_ppo", "fully_async_main") + "algorithm.adv_estimator=grpo"
    options += " rollout.total_rollout_steps=2560 rollout.test_freq=5"
    config, _ = converted(tmp_path, "a.sh", options, capsys)
    assert (config.rollout.prompts_per_step, config.train.minibatch_groups) == (128, 32)
    assert (config.train.num_steps, config.train.eval_every) == (20, 5)
    assert config.schedule == "async"
    more = "async_training.require_batches=2 async_training.trigger_parameter_sync_step=1"
    more += " async_training.staleness_threshold=0"
    config, _ = converted(tmp_path, "a.sh", f"{options} {more}", capsys)
    assert (config.rollout.prompts_per_step, config.train.num_steps) == (64, 40)
    assert config.schedule == "sync"


def trl_file(**options: object) -> str:
    named = {
        "model_name_or_path": "m",
        "dataset_name": "a/b",
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "reward_funcs": ["rewards.f"],
    }
    return yaml.safe_dump(named | options)


def test_the_bound_of_cispo_is_one_less_than_that_of_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = trl_file(loss_type="cispo", epsilon=0.2, epsilon_high=5.0, max_steps=9)
    config, _ = converted(tmp_path, "a.yaml", text, capsys)
    loss = config.loss
    assert (loss.surrogate, loss.clip_high, loss.aggregate) == ("cispo", 4.0, "token")
    config, _ = converted(
        tmp_path, "a.yaml", trl_file(epsilon_high=0.3, max_steps=9, loss_type="dapo"), capsys
    )
    assert (config.loss.surrogate, config.loss.clip_high) == ("clip", 0.3)


def test_an_interval_of_trl_below_one_is_a_share_of_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shares = {"save_steps": 0.05, "eval_steps": 0.1}
    text = trl_file(**shares, max_steps=400, gradient_accumulation_steps=2, num_iterations=2)
    config, _ = converted(tmp_path, "a.yaml", text, capsys)
    # two updates a batch
    assert (config.train.save_every, config.train.eval_every) == (10, 20)
    _, text = converted(tmp_path, "a.yaml", trl_file(**shares), capsys, code=3)
    assert "# Set train.save_every yourself" in text
    assert "#   eval_steps=0.1" in text


@pytest.mark.parametrize(
    ("name", "text", "length"),
    [
        ("a.sh", f"{VERL} trainer.total_epochs=15", {"epochs": 15}),
        ("a.sh", VERL, {"epochs": 30}),
        ("a.yaml", trl_file(num_train_epochs=0.5), {"epochs": 0.5}),
        ("a.yaml", trl_file(), {"epochs": 3}),
        ("a.yaml", trl_file(max_steps=16), {"num_steps": 16}),
        ("a.yaml", trl_file(max_steps=16, num_train_epochs=2), {"num_steps": 16}),
        ("a.sh", f"{VERL} trainer.total_training_steps=9 trainer.total_epochs=2", {"num_steps": 9}),
        (
            "a.sh",
            "trl sft --model_name_or_path m --dataset_name a/b --num_train_epochs 2",
            {"epochs": 2},
        ),
        ("a.sh", "trl sft --model_name_or_path m --dataset_name a/b", {"epochs": 3}),
        (
            "a.sh",
            "trl sft --model_name_or_path m --dataset_name a/b --max_steps 7",
            {"num_steps": 7},
        ),
    ],
)
def test_the_length_of_a_run_is_in_steps_or_in_epochs_as_there(
    tmp_path: Path,
    name: str,
    text: str,
    length: dict[str, float],
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / name).write_text(text)
    _, out, _ = run(capsys, "convert", str(tmp_path / name))
    options = yaml.safe_load(out)["train"]
    assert {key: options[key] for key in ("epochs", "num_steps") if key in options} == length


OWN_REWARDS = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward


def right(completions, **kwargs):
    raise AssertionError("the script was run")


def main():
    trainer = GRPOTrainer(
        model="m", reward_funcs={rewards}, args=GRPOConfig(max_steps=9), train_dataset="t.jsonl"
    )
    trainer.train()


{start}
"""


@pytest.mark.parametrize(
    ("start", "is_moved"),
    [
        ("main()", True),
        ("if 1:\n    main()", True),
        ('if __name__ == "__main__":\n    main()', False),
    ],
)
@pytest.mark.parametrize(
    ("rewards", "verifier"),
    [
        ("right", "{}:right"),
        ("[right, accuracy_reward]", {"{}:right": 1, "trl.rewards:accuracy_reward": 1}),
    ],
)
def test_rewards_of_a_script_that_would_train_when_it_is_imported_are_to_be_moved(
    tmp_path: Path,
    start: str,
    is_moved: bool,
    rewards: str,
    verifier: Any,
    capsys: pytest.CaptureFixture[str],
):
    script = OWN_REWARDS.format(rewards=rewards, start=start)
    config, text = converted(tmp_path, "own.py", script, capsys, code=3 if is_moved else 0)
    module = "my_code" if is_moved else "own"
    expected = verifier
    if isinstance(verifier, dict):
        expected = {name.format(module): weight for name, weight in verifier.items()}
    else:
        expected = verifier.format(module)
    assert config.reward.verifier == expected
    assert ("Move these functions, with what they use, to my_code.py" in text) == is_moved
    assert "another GRPOTrainer" not in text


EPISODES = """
from trl import GRPOConfig, GRPOTrainer


class Game:
    def reset(self, **columns):
        raise AssertionError("the script was run")
{reward}

def add(a: int, b: int) -> int:
    return a + b


def short(completions, **columns):
    return [0.0 for _ in completions]


GRPOTrainer(
    model="m", train_dataset="t.jsonl", args=GRPOConfig(max_steps=9), {arguments}
)
"""
GET_REWARD = """
    def get_reward(self):
        return 1.0
"""


@pytest.mark.parametrize(
    ("arguments", "reward", "environment", "tools", "verifier"),
    [
        ("environment_factory=Game", GET_REWARD, "e:Game", (), "auto"),
        (
            "environment_factory=Game, reward_funcs=short",
            GET_REWARD,
            "e:Game",
            (),
            {"environment": 1.0, "e:short": 1.0},
        ),
        ("environment_factory=Game, reward_funcs=short", "", "e:Game", (), "e:short"),
        ("tools=[add], reward_funcs=[short]", "", None, ("e:add",), "e:short"),
    ],
)
def test_the_environment_and_the_tools_of_trl_arrive(
    tmp_path: Path,
    arguments: str,
    reward: str,
    environment: str | None,
    tools: tuple[str, ...],
    verifier: Any,
    capsys: pytest.CaptureFixture[str],
):
    script = EPISODES.format(arguments=arguments, reward=reward)
    config, _ = converted(tmp_path, "e.py", script, capsys)
    assert (config.environment.name, config.environment.tools) == (environment, tools)
    assert config.reward.verifier == verifier


def test_several_environments_of_trl_have_no_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = EPISODES.format(arguments='environment_factory={"a": Game}', reward="")
    (tmp_path / "e.py").write_text(script)
    code, _, err = run(capsys, "convert", str(tmp_path / "e.py"))
    assert code == 4
    assert "environment_factory=" in err


def test_two_splits_that_are_loaded_at_once_are_two_data_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    splits = 'train, test = load_dataset("a/b", "main", split=["train[:5%]", "test[:5%]"])'
    call = (
        'GRPOTrainer("m", "f.f", GRPOConfig(max_steps=9), train_dataset=train, eval_dataset=test)'
    )
    script = f"from datasets import load_dataset\n{splits}\n{call}\n"
    config, _ = converted(tmp_path, "a.py", script, capsys)
    assert config.data.train == {"hub": "a/b", "config": "main", "split": "train[:5%]"}
    assert config.data.eval == {"hub": "a/b", "config": "main", "split": "test[:5%]"}


def test_a_few_names_that_trl_has_too_make_no_file_of_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own = {"pretrain": "m", "rollout_batch_size": 64, "prompt_length": 9, "adv_estimator": "grpo"}
    shared = {"max_steps": 500, "save_steps": 100, "response_length": 4096}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(own | shared))
    code, _, err = run(capsys, "convert", str(tmp_path / "a.yaml"))
    assert code == 2
    assert "a.yaml has 2 options of verl, AReaL or TRL" in err


PROGRAM = """
from dataclasses import dataclass
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config


@dataclass
class ScriptArguments:
    corpus: str = "nobody/nothing"
    penalty: float = 0.0


def right(completions, answer, **kwargs):
    return [0.0 for completion in completions]


def main():
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.temperature = 1.0
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=right,
        args=training_args,
        train_dataset=load_dataset(script_args.corpus, split="train"),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
ARGPARSE = """
import argparse
from trl import GRPOConfig, GRPOTrainer


def right(completions, **kwargs):
    return [0.0 for completion in completions]


parser = argparse.ArgumentParser()
parser.add_argument("--corpus", default="none.jsonl")
parser.add_argument("--rate", type=float, default=1e-6)
parser.add_argument("--model_name_or_path", default="none")
args = parser.parse_args()
if __name__ == "__main__":
    GRPOTrainer(
        model=args.model_name_or_path,
        reward_funcs=right,
        args=GRPOConfig(learning_rate=args.rate, num_generations=4),
        train_dataset=args.corpus,
    ).train()
"""


def repository(folder: Path, program: str, command: str) -> Path:
    """A launch script with the program, the options and the launcher's file that it names."""
    files = {
        "src/grpo.py": program,
        "recipes/demo.yaml": (
            "model_name_or_path: org/model\ncorpus: org/rows\nlearning_rate: 2.0e-05\n"
            "num_generations: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
            "num_train_epochs: 2\nwarmup_ratio: 0.1\nuse_peft: true\nlora_r: 8\n"
        ),
        "recipes/launcher.yaml": "num_processes: 6\n",
        "scripts/run.sh": f"#!/bin/bash\n{command}\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / "scripts" / "run.sh"


def test_a_command_of_trl_is_read_with_the_files_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = (
        "accelerate launch --config_file recipes/launcher.yaml src/grpo.py"
        " --config recipes/demo.yaml --learning_rate 5e-6 --penalty 0.5"
    )
    found, out, err = run(capsys, "convert", str(repository(tmp_path, PROGRAM, command)))
    assert found == 0, out + err
    config = build_config(yaml.safe_load(out))
    assert (config.model.name, config.data.train) == ("org/model", "hub:org/rows:train")
    assert config.reward.verifier == "grpo:right"
    # the command's own options hold before those of the file
    assert config.optim.lr == 5e-6
    # six processes of four responses, accumulated twice, in groups of four
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (12, 4)
    assert (config.train.epochs, config.optim.warmup_ratio) == (2, 0.1)
    assert config.model.lora is not None
    assert config.model.lora.rank == 8
    assert "taken as absent" not in out
    # what the script's own class takes is its own
    assert "penalty" not in out
    assert "corpus" not in out.replace("hub:org/rows", "")


def test_the_arguments_of_a_program_are_those_of_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = "python src/grpo.py --corpus mine.jsonl --rate 3e-6 --model_name_or_path org/other"
    found, out, err = run(capsys, "convert", str(repository(tmp_path, ARGPARSE, command)))
    assert found == 0, out + err
    config = build_config(yaml.safe_load(out))
    assert (config.model.name, config.data.train) == ("org/other", "mine.jsonl")
    assert config.optim.lr == 3e-6


def test_a_file_that_is_not_there_stays_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = "accelerate launch src/other.py --config recipes/none.yaml --max_steps 3"
    _, out, _ = run(capsys, "convert", str(repository(tmp_path, PROGRAM, command)))
    assert "#   the options in the file recipes/none.yaml (config)" in out
    assert yaml.safe_load(out)["train"]["num_steps"] == 3


def test_rows_that_a_script_holds_out_are_not_those_that_it_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program = PROGRAM.replace(
        'train_dataset=load_dataset(script_args.corpus, split="train")',
        'train_dataset=parts["train"], eval_dataset=parts["test"]',
    ).replace(
        "    trainer = ",
        '    rows = load_dataset(script_args.corpus, split="train")\n'
        "    parts = rows.train_test_split(test_size=0.1)\n    trainer = ",
    )
    command = "accelerate launch src/grpo.py --config recipes/demo.yaml"
    _, out, _ = run(capsys, "convert", str(repository(tmp_path, program, command)))
    assert yaml.safe_load(out)["data"]["train"] == "hub:org/rows:train"
    assert "eval" not in yaml.safe_load(out)["data"]
    assert "data.eval is left out: the script holds out a part of the training rows" in out
    assert "rows.train_test_split(test_size=0.1) changes the rows of train_dataset" in out


def test_a_command_of_verl_is_read_with_the_configuration_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "examples" / "mt"
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults: [ppo_trainer, more, _self_]\n"
        "data: {max_prompt_length: 700, max_response_length: 300, train_batch_size: 64}\n"
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: '${data.train_batch_size}'}}\n"
    )
    (folder / "run.sh").write_text(
        'HERE="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$HERE/examples/mt/config"'
        " --config-name=mine data.max_response_length=400 data.train_files=a.parquet"
        " actor_rollout_ref.model.path=m\n"
    )
    found, out, err = run(capsys, "convert", str(folder / "run.sh"))
    assert found == 3, out + err
    assert "#   the options of more in mine.yaml" in out
    assert "config-name" not in out
    config = build_config(yaml.safe_load(out))
    lengths = (config.data.max_prompt_tokens, config.rollout.max_response_tokens)
    assert lengths == (700, 400)
    assert (config.rollout.prompts_per_step, config.train.minibatch_groups) == (64, 64)
    (folder / "config" / "mine.yaml").unlink()
    _, out, _ = run(capsys, "convert", str(folder / "run.sh"))
    assert "#   the options in the configuration mine (--config-name)" in out


def test_a_supervised_script_is_read_with_the_arguments_of_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program = (
        PROGRAM.replace("GRPO", "SFT")
        .replace("        reward_funcs=right,\n", "")
        .replace("    training_args.temperature = 1.0\n", "")
    )
    command = "accelerate launch src/grpo.py --config recipes/demo.yaml --learning_rate 5e-6"
    path = repository(tmp_path, program, command)
    recipe = tmp_path / "recipes" / "demo.yaml"
    recipe.write_text(recipe.read_text().replace("num_generations: 4\n", ""))
    found, out, err = run(capsys, "convert", str(path))
    assert found == 0, out + err
    config = build_config(yaml.safe_load(out))
    assert (config.preset, config.model.name) == ("sft", "org/model")
    assert yaml.safe_load(out)["data"]["demonstrations"] == "hub:org/rows:train"
    assert (config.optim.lr, config.optim.warmup_ratio, config.train.epochs) == (5e-6, 0.1, 2)
    assert config.train.minibatch_groups == 8
