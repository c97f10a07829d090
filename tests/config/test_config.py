"""Laws of the configuration: what users type, what they get, and what they are told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo.algo.estimator_table import ESTIMATORS
from dapo.algo.surrogate_table import SURROGATES
from dapo.analysis.check.summary import differences_from_paper, explain
from dapo.config import (
    PRESETS,
    Config,
    build_config,
    dump_config,
    load_config,
    parse_overrides,
)
from dapo.config.option_fields import CONDITIONS, known_about, options_of, section_in
from dapo.config.other_names import GUESSED
from dapo.core.errors import ConfigError
from dapo.start.ignored_options import ignored_options
from dapo.start.resolve import resolve_auto
from docs.generated_pages import options_page, with_methods
from helpers.paths import ROOT
from helpers.tables import for_each_row

SMALL: dict[str, Any] = {"model": "tiny-random", "data": {"train": "builtin:sums"}}


def config(*overrides: str, **sections: Any) -> Config:
    return build_config({**SMALL, **sections}, overrides)


def message(*overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides, **sections)
    return str(caught.value)


# --- defaults and presets


def test_defaults_are_the_papers_values():
    paper = config()
    assert (paper.rollout.prompts_per_step, paper.rollout.group_size) == (512, 16)
    assert (paper.train.minibatch_groups, paper.updates_per_step) == (32, 16)
    assert (paper.rollout.max_response_tokens, paper.overlong.buffer_tokens) == (20480, 4096)
    assert (paper.overlong.mode, paper.overlong.penalty) == ("soft", 1.0)
    assert (paper.loss.clip_low, paper.loss.clip_high, paper.loss.dual_clip) == (0.2, 0.28, None)
    assert (paper.loss.aggregate, paper.loss.kl_coef, paper.loss.entropy_coef) == (
        "token",
        0.0,
        0.0,
    )
    assert (paper.optim.lr, paper.optim.warmup_steps, paper.optim.weight_decay) == (1e-6, 20, 0.1)
    assert (paper.optim.betas, paper.optim.max_grad_norm) == ((0.9, 0.999), 1.0)
    assert paper.rollout.temperature == 1.0
    assert (paper.eval.temperature, paper.eval.top_p) == (1.0, 0.7)
    assert (paper.dynamic_sampling.enabled, paper.max_groups_per_step) == (True, 5120)
    assert paper.advantage.scale == "std"


def test_grpo_preset_is_the_first_row_of_table_1():
    grpo = config(preset="grpo")
    assert not grpo.dynamic_sampling.enabled
    assert grpo.overlong.mode == "off"
    assert (grpo.loss.clip_low, grpo.loss.clip_high) == (0.2, 0.2)
    assert (grpo.loss.aggregate, grpo.loss.kl_coef) == ("sequence", 0.001)


def test_keys_the_user_sets_win_over_the_preset_and_overrides_win_over_the_file():
    mixed = config("loss.clip_high=0.3", preset="grpo", loss={"kl_coef": 0.0, "clip_high": 0.28})
    assert mixed.loss.clip_high == 0.3  # override
    assert mixed.loss.kl_coef == 0.0  # file
    assert mixed.loss.aggregate == "sequence"  # preset
    assert mixed.loss.entropy_coef == 0.0  # default


def test_a_preset_on_the_command_line_replaces_the_one_in_the_file():
    assert config("preset=dapo", preset="grpo").loss == config().loss
    assert config("preset=grpo").loss == config(preset="grpo").loss


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_and_is_not_changed_by_using_it(name):
    before = json.dumps(PRESETS)
    needed = {
        "distill": ["loss.reference.model=big"],
        "sft": ["data.demonstrations=sft.jsonl"],
    }.get(name, [])
    assert config("loss.clip_high=0.5", *needed, preset=name).preset == name
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["loss.surrogate=sapo", "loss.dual_clip=3"],
            "replaces the loss that loss.dual_clip=3.0 bounds",
        ),
        (
            ["loss.surrogate=gspo", "loss.function=a:b"],
            "replaces the loss that loss.function=a:b replaces too",
        ),
        (
            ["loss.engine_correction=0.5", "loss.engine_over_cap=mask"],
            "loss.engine_correction must be at least 1",
        ),
    ],
)
def test_surrogates_and_corrections_that_contradict_each_other_are_refused(options, reason):
    assert reason in message(*options)


def test_options_without_an_effect_under_a_surrogate_are_named():
    several = ("rollout.prompts_per_step=8", "train.minibatch_groups=4")
    (ignored,) = ignored_options(config(*several, "loss.surrogate=sapo", "loss.clip_high=0.3"))
    assert ignored.startswith("loss.clip_high: needs several updates per step")
    assert not list(ignored_options(config(*several, "loss.surrogate=cispo", "loss.clip_high=0.3")))
    (ignored,) = ignored_options(
        config(several[0], "train.minibatch_groups=8", "loss.surrogate=gspo")
    )
    assert ignored.startswith("loss.surrogate: needs several updates per step")


def test_an_unknown_preset_is_refused():
    found = message(preset="gpro")
    assert found.startswith("config: option preset: input should be 'dapo', 'grpo', ")
    assert found.endswith(", got 'gpro'")


# --- overrides


@for_each_row(
    ("override", "section", "option", "value"),
    [
        ("loss.clip_high=0.3", "loss", "clip_high", 0.3),
        ("optim.lr=1e-5", "optim", "lr", 1e-5),
        ("optim.lr=1.0e-5", "optim", "lr", 1e-5),
        ("optim.betas=[0.9,0.95]", "optim", "betas", (0.9, 0.95)),
        ("loss.dual_clip=10", "loss", "dual_clip", 10.0),
        ("loss.dual_clip=null", "loss", "dual_clip", None),
        ("overlong.mode=off", "overlong", "mode", "off"),
        ("overlong.mode=filter", "overlong", "mode", "filter"),
        ("advantage.scale=none", "advantage", "scale", "none"),
        ("advantage.scale=null", "advantage", "scale", "none"),
        ("dynamic_sampling.enabled=false", "dynamic_sampling", "enabled", False),
        ("dynamic_sampling.filter=my.module:keep", "dynamic_sampling", "filter", "my.module:keep"),
        ("reward.verifier=my.module:judge", "reward", "verifier", "my.module:judge"),
        ("log.sinks=[wandb,tensorboard]", "log", "sinks", ["wandb", "tensorboard"]),
        ("data.instruction=Reply with a=b, only.", "data", "instruction", "Reply with a=b, only."),
        ("data.instruction=costs $5", "data", "instruction", "costs $5"),
        ("train.device=cpu", "train", "device", "cpu"),
    ],
)
def test_overrides_are_key_value_with_dots_and_yaml_values(override, section, option, value):
    assert getattr(getattr(config(override), section), option) == value


def test_the_last_of_two_overrides_wins_and_neighbours_stay():
    assert parse_overrides(["loss.clip_high=0.3", "loss.clip_low=0.1", "loss.clip_high=0.4"]) == {
        "loss": {"clip_high": 0.4, "clip_low": 0.1}
    }


def test_an_override_whose_value_is_not_yaml_is_named():
    assert message("optim.betas=[0.9").startswith("override 'optim.betas=[0.9': ")


# --- the model's and data's short forms


def test_a_models_name_alone_is_short_for_its_section():
    assert config(model="m") == config(model={"name": "m"})
    assert config("model.dtype=float32", model="m").model.model_dump() == {
        "name": "m",
        "dtype": "float32",
        "trust_remote_code": False,
        "lora": None,
    }


@pytest.mark.parametrize(
    "overrides", [["model=n", "model.dtype=float64"], ["model.dtype=float64", "model=n"]]
)
def test_naming_another_model_keeps_its_other_options(overrides):
    model = config(*overrides, model={"name": "m", "trust_remote_code": True}).model
    assert (model.name, model.dtype, model.trust_remote_code) == ("n", "float64", True)


@pytest.mark.parametrize(
    "spec",
    [
        "builtin:sums,products",
        "gym:chain_sum",
        "hub:open-r1/DAPO-Math-17k:train",
        "data/train.jsonl",
        "x.parquet",
    ],
)
def test_a_data_source_is_text_or_a_mapping_in_the_file_and_on_the_command_line(spec):
    assert (
        config(data={"train": spec}).data.train == config(f"data.train={spec}").data.train == spec
    )
    mapping = {"gym": {"chain_sum": {"max_terms": 2}}, "size": 2000, "seed": 1}
    typed = "data.train={gym: {chain_sum: {max_terms: 2}}, size: 2000, seed: 1}"
    assert config(data={"train": mapping}).data.train == config(typed).data.train == mapping


def test_another_data_source_replaces_the_old_one_whole():
    old = {"gym": {"chain_sum": {}}, "size": 2000}
    assert config("data.train=builtin:sums", data={"train": old}).data.train == "builtin:sums"
    assert config("data.train={gym: {products: {}}}", data={"train": old}).data.train == {
        "gym": {"products": {}}
    }
    assert config("data.train=builtin:products", data={"train": "x", "eval": "y"}).data.eval == "y"


def test_several_verifiers_are_a_mapping_to_their_weights_and_replace_one():
    assert config("reward.verifier={math: 1, 'my.module:style': 0.5}").reward.verifier == {
        "math": 1.0,
        "my.module:style": 0.5,
    }
    assert (
        config("reward.verifier=gym", reward={"verifier": {"math": 1.0}}).reward.verifier == "gym"
    )


# --- what users are told


def test_a_missing_option_says_what_it_takes():
    with pytest.raises(
        ConfigError, match=r"option data.train is missing. Training problems: a path, hub:NAME"
    ):
        build_config({"model": "m", "data": {}})
    with pytest.raises(ConfigError, match=r"option model.name is missing. The model: an alias"):
        build_config({"model": {"dtype": "float32"}, "data": {"train": "x"}})


def test_all_wrong_options_are_named_at_once():
    text = message("train.num_steps=0", "optim.lr=x", "loss.clip_hihg=1")
    assert [name for name in ("train.num_steps", "optim.lr", "loss.clip_hihg") if name in text] == [
        "train.num_steps",
        "optim.lr",
        "loss.clip_hihg",
    ]
    assert len(text.splitlines()) == 4


def test_sizes_that_do_not_divide_name_both_numbers_and_their_units():
    text = message("rollout.prompts_per_step=48", "train.minibatch_groups=32")
    assert "rollout.prompts_per_step=48 (prompts per step)" in text
    assert "train.minibatch_groups=32 (prompts per optimiser update)" in text
    assert config("rollout.prompts_per_step=64", "train.minibatch_groups=32").updates_per_step == 2


def test_a_minibatch_larger_than_the_batch_is_refused():
    assert "rollout.prompts_per_step=8" in message(
        "rollout.prompts_per_step=8", "train.minibatch_groups=16"
    )


def test_top_p_below_one_is_refused_in_training_and_free_in_evaluation():
    assert config("rollout.top_p=1.0") == config()
    assert "unknown option rollout.top_p; it is fixed to 1" in message("rollout.top_p=0.7")
    assert config("eval.top_p=0.5").eval.top_p == 0.5


def test_a_punished_buffer_longer_than_the_response_is_refused_only_if_it_is_used():
    wrong = "rollout.max_response_tokens=128"
    error_text = message(wrong)
    assert (
        "overlong.buffer_tokens=4096 must not exceed rollout.max_response_tokens=128" in error_text
    )
    assert config(wrong, "overlong.mode=off").rollout.max_response_tokens == 128
    assert config(wrong, "overlong.buffer_tokens=128").overlong.buffer_tokens == 128


def test_a_bound_below_the_batch_is_refused_only_with_dynamic_sampling():
    wrong = "dynamic_sampling.max_groups_per_step=511"
    assert "max_groups_per_step=511 must be at least rollout.prompts_per_step=512" in message(wrong)
    assert not config(wrong, "dynamic_sampling.enabled=false").dynamic_sampling.enabled


def test_a_config_cannot_be_changed_once_it_is_made():
    made = config()
    with pytest.raises(ConfigError, match=r"clip_high: the options .* cannot be changed in place"):
        made.loss.clip_high = 0.5


# --- files


def test_a_file_is_read_with_overrides_over_it(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "preset: grpo\nmodel: m\ndata: {train: a.jsonl, eval: b.jsonl}\noverlong: {mode: off}\n"
    )
    loaded = load_config(path, ["loss.clip_high=0.3"])
    assert (loaded.preset, loaded.model.name, loaded.data.eval) == ("grpo", "m", "b.jsonl")
    assert (loaded.overlong.mode, loaded.loss.clip_high) == ("off", 0.3)


@pytest.mark.parametrize(
    ("text", "error_text"),
    [
        ("model: [", "is not readable as YAML: "),
        ("- a\n- b\n", "must hold options as `name: value`, got a list"),
        ("", "option model is missing"),
        ("model: m\ndata: {train: x}\nlos: {}\n", "unknown option los; did you mean loss?"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, error_text: str):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert error_text in str(caught.value)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config file .*missing.yaml"):
        load_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["preset=grpo"],
        ["preset=grpo", "loss.clip_high=0.28", "overlong.mode=soft"],
        ["overlong.mode=off", "advantage.scale=none", "optim.lr=1e-5", "train.threads=2"],
        ["data.train={gym: {chain_sum: {max_terms: 2}}, size: 2000}", "log.sinks=[wandb]"],
        ["reward.verifier={math: 1, 'a:b': 0.25}", "reward.options={strict: true, names: [a, b]}"],
        ["data.instruction='on: 1\n\"two\" # three'", "data.system=yes, off and null"],
    ],
)
def test_a_dumped_config_loads_as_an_equal_one_and_holds_every_option(
    tmp_path: Path, overrides: list[str]
):
    made = config(*overrides)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(made))
    assert load_config(path) == made
    assert dump_config(load_config(path)) == dump_config(made)
    optional = ("model.lora.", "loss.reference.")  # may be nothing
    names = [name for name, _ in options_of() if not name.startswith(optional)]
    for name in names:
        assert f"{name.split('.')[-1]}:" in path.read_text()


def test_a_whole_mapping_of_options_replaces_the_old_one():
    assert config(
        "reward.options={strict: true}", reward={"options": {"digits": 3}}
    ).reward.options == {"strict": True}


# --- promises to other code


def test_importing_the_config_imports_no_torch_and_no_model_library():
    code = (
        "import sys, dapo.config; print([m for m in ('torch', 'transformers', 'ray', 'vllm') if m"
        " in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("word", ["on", "off"])
def test_chat_template_understands_the_words_on_and_off(word):
    assert config(f"data.chat_template={word}").data.chat_template == word


def test_a_list_that_is_too_short_is_an_error_that_says_so():
    assert "optim.betas" in message("optim.betas=[0.9]")


def test_betas_outside_zero_to_one_are_refused():
    assert "optim.betas" in message("optim.betas=[0.9,1.5]")


def test_a_dotted_key_adds_to_a_mapping_of_options():
    options = config("reward.options.strict=true", reward={"options": {"digits": 3}}).reward.options
    assert options == {"digits": 3, "strict": True}


def test_true_is_not_a_number():
    assert "train.seed" in message("train.seed=true")


def test_an_empty_section_means_its_defaults():
    assert config(loss=None).loss == config().loss


def test_an_empty_section_keeps_what_the_preset_sets():
    assert config(preset="grpo", loss=None).loss == config(preset="grpo").loss
    assert config("preset=grpo", loss=None, overlong=None) == config("preset=grpo")


def test_a_literal_interpolation_survives_the_dump(tmp_path: Path):
    made = config(data={"train": "x", "instruction": "write \\${x}"})
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(made))
    assert load_config(path) == made


@pytest.mark.parametrize(
    ("override", "wrong"), [("loss.zzz=1", "did you mean loss?"), ("typo=1", "did you mean dtype?")]
)
def test_the_nearest_option_is_one_that_can_be_typed(override, wrong):
    assert wrong not in message(override)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("LR=1", "did you mean optim.lr?"),
        ("LOSS.Clip_High=1", "did you mean loss.clip_high?"),
        ("steps=1", "did you mean train.num_steps?"),
        ("stepz=1", "did you mean train.num_steps?"),
        ("temperature=1", "did you mean rollout.temperature or eval.temperature?"),
        ("rewards=math", "did you mean reward.verifier?"),
    ],
)
def test_an_option_is_found_by_its_last_part_its_keyword_in_python_and_in_any_case(
    override: str, answer: str
):
    assert answer in message(override)


def test_a_reward_may_be_written_as_its_verifier():
    base = {"model": "tiny-random", "data": "builtin:sums", "reward": "math"}
    assert build_config(base).reward.verifier == "math"
    assert build_config(base, ["reward=exact", "reward.timeout_s=9"]).reward.verifier == "exact"


def test_groups_are_filtered_by_a_function_or_by_thresholds_on_scores():
    assert config("dynamic_sampling.filter=my:keep").dynamic_sampling.filter == "my:keep"
    found = config(
        "dynamic_sampling.min_spread=1.5", "dynamic_sampling.mean_between=[null, 9]"
    ).dynamic_sampling
    assert (found.min_spread, found.mean_between, found.has_filter) == (1.5, (None, 9), True)
    assert not config().dynamic_sampling.has_filter
    for given, text in (
        (
            ["dynamic_sampling.mean_between=[2, 1]"],
            "the first number must be less than the second, got [2, 1]",
        ),
        (["dynamic_sampling.min_spred=1"], "did you mean dynamic_sampling.min_spread?"),
        (["dynamic_sampling.min_spread=-1"], "greater than or equal to 0"),
        (
            ["dynamic_sampling.filter=my:keep", "dynamic_sampling.min_spread=1"],
            "set the filter or the thresholds",
        ),
        (
            ["dynamic_sampling.filter=my:keep", "dynamic_sampling.metric=score"],
            "which dynamic_sampling.metric=score belongs to; set one of the two",
        ),
    ):
        assert text in message(*given)


@pytest.mark.parametrize("value", ["{min_spread: 1.5}", "{}", "keep"])
def test_a_filter_is_a_function(value: str):
    advice = "expected module:function; thresholds are dynamic_sampling.min_spread and mean_between"
    assert advice in message(f"dynamic_sampling.filter={value}")


@pytest.mark.parametrize(
    ("overrides", "error_text"),
    [
        (
            ["reward.verifier=code", "reward.timeout_s=6"],
            "reward.options.time_s=6 (s) must be less than reward.timeout_s=6",
        ),
        (
            ["reward.verifier=server", "reward.options.total_s=20"],
            "reward.options.total_s=20 (s) must be less than",
        ),
        (
            ["reward.verifier={code: 1.0, regex: 1.0}", "reward.options={code: {time_s: 30}}"],
            "reward.options.code.time_s=30 (s) must be less than reward.timeout_s=10",
        ),
        (
            ["reward.verifier=code", "reward.options.memory_mib=4096"],
            "reward.options.memory_mib=4096 (MiB) must be less than reward.memory_gib=4 (4096 MiB)",
        ),
        (
            ["reward.verifier={code: 1.0, regex: 1.0}", "reward.memory_gib=0.5"],
            "reward.options.code.memory_mib=1024 (MiB) must be less than reward.memory_gib=0.5",
        ),
    ],
)
def test_a_verifier_must_end_before_its_verdict_becomes_an_error(
    overrides: list[str], error_text: str
):
    assert error_text in message(*overrides)
    assert config("reward.verifier=code").reward.timeout_s == 10
    # the limit is that of programs alone
    assert config("reward.verifier=exact", "reward.memory_gib=0.5").reward.memory_gib == 0.5


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["rollout.engine=vllm"], "rollout.engine=native"),
        (["distributed.trainer_ranks=2"], "distributed.trainer_ranks=1 and launcher=local"),
        (["launcher=ray"], "distributed.trainer_ranks=1 and launcher=local"),
        (["rollout.engines=1"], "rollout.engines=0"),
        (["model.dtype=bfloat16"], "model.dtype=float32 or float64, not bfloat16"),
        (["model.dtype=auto"], "model.dtype=float32 or float64, not auto"),
    ],
)
def test_the_engine_s_logprobs_are_pi_old_only_where_it_computes_as_the_trainer_does(
    overrides: list[str], needed: str
):
    with_engine = ["model.dtype=float32", "loss.old_logprobs=engine"]
    text = message(*with_engine, *overrides)
    assert "loss.old_logprobs=engine" in text
    assert needed in text
    assert "set that, loss.engine_correction=tis" in text
    assert "or loss.old_logprobs=policy" in text
    assert config(*with_engine, *overrides, "loss.engine_correction=tis").loss.has_ratio_to_engine
    for dtype in ("float32", "float64"):
        assert config(*with_engine, f"model.dtype={dtype}").loss.old_logprobs == "engine"


@for_each_row(
    ("overrides", "advice"),
    [
        (
            ["loss.engine_ratio=sequence"],
            "set loss.engine_ratio=token, or loss.old_logprobs=policy",
        ),
        (["loss.surrogate=gspo"], "set another surrogate, or loss.old_logprobs=policy"),
        (["loss.engine_correction=1.2"], "set it above 1.28, or loss.old_logprobs=policy"),
        (["loss.engine_correction=1.2", "loss.engine_over_cap=mask"], None),
        (["loss.engine_correction=1.2", "loss.surrogate=sapo"], None),
        (["schedule=async", "rollout.engines=1"], None),
    ],
)
def test_a_capped_ratio_to_the_engine_is_refused_where_it_has_no_sound_meaning(
    overrides: list[str], advice: str | None
):
    given = ["loss.old_logprobs=engine", "loss.engine_correction=tis", *overrides]
    if advice is None:
        assert config(*given).loss.has_ratio_to_engine
    else:
        assert advice in message(*given)


def test_predictions_are_refused_where_eq_11_does_not_decide():
    given = "dynamic_sampling.predict=true"
    assert "enabled=false drops none" in message(given, "dynamic_sampling.enabled=false")
    assert "enabled=false drops none" in message(given, "preset=grpo")
    assert "not those of dynamic_sampling.filter" in message(
        given, "dynamic_sampling.filter=my:keep"
    )
    assert "not those of dynamic_sampling.filter" in message(given, "dynamic_sampling.min_spread=1")
    assert "metric=score keeps others" in message(given, "dynamic_sampling.metric=score")
    assert "dynamic_sampling.predict: true (paper: false)" in list(
        differences_from_paper(config(given))
    )


@pytest.mark.parametrize(
    ("value", "expected"), [("on", True), ("off", False), ("true", True), ("false", False)]
)
def test_predictions_are_on_or_off(value, expected):
    assert config(f"dynamic_sampling.predict={value}").dynamic_sampling.predict is expected


def test_a_loss_of_ones_own_and_a_falling_rate_are_differences_from_the_paper():
    own = config("loss.function=my_losses:reinforce", "optim.schedule=cosine:0.2")
    differing = list(differences_from_paper(own))
    assert "loss.function: my_losses:reinforce (paper: none)" in differing
    assert "optim.schedule: cosine:0.2 (paper: constant)" in differing
    assert list(ignored_options(own)) == []
    (ignored,) = ignored_options(config("loss.function=my_losses:reinforce", "loss.clip_high=0.3"))
    assert ignored.endswith("and loss.surrogate=clip, gspo or cispo (no loss.function)")
    shown = list(explain(config("data.train=builtin:sums", "loss.function=my_losses:reinforce")))
    assert any("my_losses:reinforce, averaged by token" in line for line in shown)
    assert not [line for line in shown if "ratio clipped" in line or "log-ratio" in line]
    assert "expected module:function, for example my_losses:reinforce" in message(
        "loss.function=reinforce"
    )
    both = message("loss.function=my_losses:reinforce", "loss.dual_clip=10")
    assert "loss.dual_clip=10 bounds the ratio of the paper's loss, which loss.function" in both
    assert "train.num_steps=20 leaves no step for that; lower optim.warmup_steps" in message(
        "optim.schedule=linear", "train.num_steps=20"
    )
    for wrong in ("cosine:1.5", "constant:0.1", "cosine:nan", "linear:-0.1", "falling"):
        assert "expected constant, linear or cosine, or with a fraction" in message(
            f"optim.schedule={wrong}"
        )
    assert config("optim.schedule=linear:0").optim.decay == ("linear", 0.0)
    assert config("optim.schedule=cosine").optim.decay == ("cosine", 0.1)
    assert "optim.schedule=cosine:0.05" in message("optim.min_lr_fraction=0.05")


def test_rloo_and_reinforce_pp_take_the_divergence_from_the_reward_by_k1():
    for preset, aggregate in (("rloo", "constant"), ("reinforce_pp", "sequence")):
        found = config(preset=preset)
        assert (found.advantage.estimator, found.loss.aggregate) == (preset, aggregate)
        assert (found.loss.kl_coef, found.loss.kl_in, found.loss.kl_estimator) == (
            0.001,
            "reward",
            "k1",
        )
        assert (found.loss.clip_low, found.loss.clip_high) == (0.2, 0.2)
        assert not found.dynamic_sampling.enabled
        assert found.overlong.mode == "off"
        assert found.loss.has_kl_reward
        assert not found.loss.has_kl_term
        differences = list(differences_from_paper(found))
        assert f"advantage.estimator: {preset} (paper: group)" in differences
        assert "loss.kl_in: reward (paper: loss)" in differences
        assert list(ignored_options(found)) == []


def test_reinforce_pp_with_a_baseline_has_the_divergence_in_the_loss_by_k2():
    found = config(preset="reinforce_pp_baseline")
    assert (found.advantage.estimator, found.loss.aggregate) == (
        "reinforce_pp_baseline",
        "sequence",
    )
    assert (found.loss.kl_coef, found.loss.kl_in, found.loss.kl_estimator) == (0.001, "loss", "k2")
    assert (found.dynamic_sampling.enabled, found.overlong.mode) == (False, "off")
    assert list(ignored_options(found)) == []


def test_an_estimate_where_it_has_no_useful_gradient_is_named():
    def ignored(*overrides: str) -> list[str]:
        return [
            line for line in ignored_options(config(*overrides)) if line.startswith("loss.kl_coef:")
        ]

    assert ignored("loss.kl_coef=0.1") == ignored("loss.kl_coef=0.1", "loss.kl_estimator=k2") == []
    (line,) = ignored("loss.kl_coef=0.1", "loss.kl_estimator=k1")
    assert "gradient of 0 in expectation" in line
    for estimator in ("k2", "k3"):
        (line,) = ignored("loss.kl_coef=0.1", "loss.kl_in=reward", f"loss.kl_estimator={estimator}")
        assert f"{estimator} in the reward has next to no gradient near the reference" in line
    unused = list(ignored_options(config("loss.kl_in=reward", "loss.reference.every=5")))
    assert unused == [
        "loss.reference.*: needs loss.kl_coef above 0",
        "loss.kl_in: needs loss.kl_coef above 0",
    ]


def test_what_sets_the_entropys_weight_twice_or_the_reference_of_adapters_is_refused():
    assert "set one of the two" in message("loss.entropy_target=0.5", "loss.entropy_coef=0.1")
    assert "loss.entropy_target" in message("loss.entropy_target=0")
    assert "loss.reference" in message("loss.reference.every=0")
    adapters = ["model.lora={rank: 2}", "loss.reference.every=5"]
    assert "leave loss.reference out" in message("loss.kl_coef=0.1", *adapters)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("loss.reference=200", "write loss.reference={every: 200}"),
        ("loss.reference=runs/big", "write loss.reference={model: runs/big}"),
        ("loss.reference=8b", "write loss.reference={model: 8b}"),
        (
            "loss.reference=server:http://h:1/v1#big",
            "write loss.reference={server: {url: http://h:1/v1, model: big}}",
        ),
        ("loss.reference=server:big", "write loss.reference={server: {url: big, model: MODEL}}"),
        ("loss.reference={}", "expected exactly one of model, every and server, got none"),
        (
            "loss.reference={model: big, every: 3}",
            (
                "expected exactly one of model, every and server, got loss.reference.model and"
                " loss.reference.every"
            ),
        ),
        (
            "loss.reference.server.url=http://h:1/v1",
            "option loss.reference.server.model is missing",
        ),
    ],
)
def test_a_reference_is_one_of_a_model_a_number_of_steps_and_a_server(given: str, advice: str):
    assert advice in message(given)


def test_the_form_that_the_advice_on_a_reference_names_is_taken_and_replaces_a_stored_one(
    tmp_path: Path,
):
    for given in (
        "{every: 200}",
        "{model: runs/big}",
        "{server: {url: 'http://h:1/v1', model: big}}",
    ):
        made = config("loss.kl_coef=0.1", f"loss.reference={given}")
        path = tmp_path / "config.yaml"
        path.write_text(dump_config(made))
        assert load_config(path) == made
        assert load_config(path, ["loss.reference={every: 7}"]).loss.reference_steps == 7
    made = config("loss.reference.server.url=http://h:1/v1", "loss.reference.server.model=big")
    assert made.loss.server is not None
    assert (made.loss.server.url, made.loss.server.model, made.loss.has_teacher) == (
        "http://h:1/v1",
        "big",
        True,
    )


@for_each_row("name", GUESSED)
def test_an_option_that_one_might_try_is_answered_with_what_to_do(name: str):
    assert name not in {known for known, _ in options_of()}
    assert message(f"{name}=0.5").endswith(f"unknown option {name}; {GUESSED[name]}")


def test_the_page_of_options_is_what_the_options_give():
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == options_page(), (
        "run `make docs`"
    )


def test_the_tables_of_methods_in_losses_md_are_those_of_the_code():
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    assert page == with_methods(page), "run `make docs`"
    assert page.count("<!-- surrogates -->") == page.count("<!-- estimators -->") == 2
    rows = [*SURROGATES.items(), *ESTIMATORS.items()]
    assert all(f"\n| `{name}` | " in page and row.source for name, row in rows)


def test_every_option_is_described_in_full_sentences():
    for name, info in options_of():
        if section_in(info.annotation) is None:
            assert (info.description or "").endswith("."), name


def test_every_condition_of_an_option_names_an_option_or_a_property():
    for name, info in options_of():
        condition = known_about(info).get("only_with", "").partition("=")[0]
        if condition in CONDITIONS or not condition:
            continue
        assert isinstance(config().value_of(condition), str | bool | None), name


def test_every_option_of_the_other_engine_is_reported():
    for engine, override in (
        ("vllm", "rollout.native.slots=8"),
        ("native", "rollout.vllm.python=python3"),
    ):
        other = override.split(".")[1]
        lines = list(ignored_options(config(f"rollout.engine={engine}", override)))
        assert lines == [f"rollout.{other}.*: rollout.engine is {engine}"]


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "expected"),
    [
        (["rollout.engine=vllm"], True, "load"),
        (["rollout.engine=vllm"], False, "history"),
        (["rollout.engine=vllm", "rollout.clock=history"], True, "history"),
        (["rollout.engine=native", "rollout.engines=2"], True, None),
        (["rollout.engine=vllm", "model.dtype=float32", "train.device=cuda"], True, "load"),
    ],
)
def test_only_vllm_on_a_gpu_gives_up_lockstep_and_the_start_reports_it(
    overrides: list[str], on_gpu: bool, expected: str | None
):
    lines: list[str] = []
    sizes = ["train.microbatch_tokens=64", "train.recompute=false"]
    found = resolve_auto(config(*sizes, *overrides), cuda=on_gpu, log=lines.append)
    assert found.rollout.clock == expected
    line = (
        "auto: rollout.clock=load: runs on a GPU are not equal, and vLLM schedules the next step"
        " ahead"
    )
    assert lines == ([line] if expected == "load" else [])


def test_auto_is_settled_by_machine_and_data():
    settled = resolve_auto(config(), cuda=True)
    assert (settled.train.device, settled.model.dtype, settled.reward.verifier) == (
        "cuda",
        "bfloat16",
        "exact",
    )
    assert resolve_auto(settled, cuda=False) == settled
    asked = resolve_auto(
        config("train.device=cpu", "model.dtype=float64", "reward.verifier=math"), cuda=True
    )
    assert (asked.train.device, asked.model.dtype, asked.reward.verifier) == (
        "cpu",
        "float64",
        "math",
    )
    on_ray = resolve_auto(config("launcher=ray", "data.train=gym:gcd"), cuda=False)
    # each machine has its own devices
    assert (on_ray.train.device, on_ray.reward.verifier) == ("auto", "gym")


# --- what people write instead


def test_one_value_where_a_list_is_meant_is_that_list():
    assert config("log.sinks=wandb").log.sinks == ["wandb"]
    assert config("log.sinks=null").log.sinks == []
    assert config("profile.steps=3").profile.steps == [3]


def test_a_data_source_alone_is_short_for_the_training_data(tmp_path: Path):
    assert build_config({"model": "m", "data": "builtin:sums"}).data.train == "builtin:sums"
    both = config("data=train.jsonl", data={"train": "builtin:sums", "eval": "builtin:sums"})
    assert (both.data.train, both.data.eval) == ("train.jsonl", "builtin:sums")


def test_a_value_for_a_section_is_answered_with_an_option_in_it():
    assert (
        "option optim: input should be a section of options, such as optim.lr, got 'adamw'"
        in message("optim=adamw")
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model:\n\tname: m\n", "line 2: a tab, or a sign that cannot begin a value"),
        ("model: a: b\n", "line 1: a colon where no value can begin"),
        ("model: m\nmodel: n\n", "line 2: model is set twice"),
        ("model: m\ndata: x\n\ttrain: 3\n", "line 3: a tab indents the line; indent with spaces"),
        (
            "train:\n  seed: 1\n lr: 2\n",
            "line 3: the indentation differs from that of the lines above",
        ),
        ("a: 1\nmodel: 'x\n", "line 2: a quote is not closed"),
        ("a: 1\ntrain: {seed: 1\nb: 2\n", "line 2: a mapping is not closed"),
        ("model: *x\n", "line 1: a value that begins with `*`"),
    ],
)
def test_a_mistake_in_yaml_is_named_with_its_line(tmp_path: Path, text: str, fault: str):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path} is not readable as YAML: {fault}" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["rollout.group_size=1"], "command line"),
        (["train.minibatch_groups=7"], "command line"),
        (["optim.lr=1e-5"], "config"),
        (["optim.lr=-1"], "command line"),
    ],
)
def test_a_fault_is_blamed_on_the_source_that_sets_the_option(overrides: list[str], where: str):
    rollout = {"prompts_per_step": 8, "group_size": 4 if overrides != ["optim.lr=1e-5"] else 1}
    assert message(*overrides, rollout=rollout, train={"minibatch_groups": 8}).startswith(
        f"{where}: "
    )
