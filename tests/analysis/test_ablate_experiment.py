"""Experiment files: what they give, and what is said of those that are wrong before anything
runs.
"""

from pathlib import Path

import pytest

from dapo.analysis.ablate.experiment import Panel, load_experiment, shipped_ladders
from dapo.config import load_config
from dapo.config.option_entries import option_differences
from dapo.core.errors import ConfigError
from helpers.paths import TINY
from helpers.tables import for_each_row

FILE = """
base: {base}
seeds: [3, 1]
set: [train.num_steps=2]
conditions:
  clean: []
  short: [rollout.max_response_tokens=6]
variants:
  GRPO: {{set: [preset=grpo, loss.kl_coef=0]}}
  + clip-higher: {{inherits: GRPO, set: [loss.clip_high=0.28]}}
  + token-level loss: {{inherits: + clip-higher, set: [loss.aggregate=token]}}
baseline: GRPO
plots:
  - {{metric: accuracy, against: [steps, tokens]}}
  - {{metric: loss/entropy, against: seconds}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text.format(base=TINY))
    return path


def test_a_file_gives_a_run_per_seed_condition_and_row_with_seeds_outermost(tmp_path: Path):
    experiment = load_experiment(written(tmp_path, FILE), ["optim.lr=0.001"])
    names = [run.name for run in experiment.runs()]
    assert names[:3] == [
        "clean-GRPO-seed3",
        "clean-clip_higher-seed3",
        "clean-token_level_loss-seed3",
    ]
    assert names[3] == "short-GRPO-seed3"
    assert names[6] == "clean-GRPO-seed1"
    assert len(names) == len(set(names)) == 2 * 2 * 3
    assert experiment.panels == (
        Panel("accuracy", "steps"),
        Panel("accuracy", "tokens"),
        Panel("loss/entropy", "seconds"),
    )
    last = experiment.runs()[5].config
    assert (last.train.seed, last.train.num_steps, last.optim.lr) == (3, 2, 0.001)
    assert (last.rollout.max_response_tokens, last.loss.clip_high, last.loss.aggregate) == (
        6,
        0.28,
        "token",
    )
    assert not last.dynamic_sampling.enabled


def test_a_base_is_looked_for_next_to_the_file_and_then_among_the_shipped_ones(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(TINY.read_text().replace("num_steps: 5", "num_steps: 7"))
    path = tmp_path / "e.yaml"
    path.write_text("{base: base.yaml, seeds: [0], variants: {as it is: []}}")
    assert load_experiment(path).runs()[0].config.train.num_steps == 7
    path.write_text("{base: tiny, seeds: [0], variants: {as it is: []}}")
    assert load_experiment(path).runs()[0].config.train.num_steps == 5


def test_a_later_source_of_options_overrides_an_earlier_one(tmp_path: Path):
    text = FILE.replace(
        "[train.num_steps=2]", "[train.num_steps=2, loss.clip_high=0.5, loss.clip_low=0.5]"
    )
    text = text.replace("clean: []", "clean: [loss.clip_high=0.4, loss.clip_low=0.4]")
    runs = load_experiment(written(tmp_path, text)).runs()
    grpo, higher = (run.config.loss for run in runs[:2])
    assert (grpo.clip_high, higher.clip_high) == (0.4, 0.28)  # the condition, then the variant
    assert {run.config.loss.clip_low for run in runs if run.condition == "clean"} == {0.4}
    assert {run.config.loss.clip_low for run in runs if run.condition == "short"} == {0.5}


def test_claims_are_for_the_tool_that_judges_the_results(tmp_path: Path):
    plain = load_experiment(written(tmp_path, FILE))
    text = FILE + "claims: [{{text: b is more accurate, anything: else}}]\n"
    assert load_experiment(written(tmp_path, text)) == plain


@for_each_row(
    ("old", "new", "message"),
    [
        ("baseline: GRPO", "basline: GRPO", "unknown key 'basline'; did you mean baseline?"),
        (
            "set: [preset=grpo, loss.kl_coef=0]",
            "sets: []",
            "variants: GRPO: unknown key 'sets'; did you mean set?",
        ),
        (
            "  clean: []",
            "  clean: {{inherits: short}}",
            "conditions: clean: unknown key 'inherits'",
        ),
        ("inherits: GRPO", "inherits: + token-level loss", "`inherits` is circular: "),
        (
            "inherits: GRPO",
            "inherits: GRPA",
            "inherits 'GRPA' is not a variant; did you mean GRPO?",
        ),
        ("  + clip-higher: ", "  GRPO: ", "GRPO is set twice"),
        ("  + token-level loss:", "  '* grpo':", "would share one folder"),
        ("  + token-level loss:", "  '+':", "has no letter and no digit"),
        (
            "loss.clip_high=0.28",
            "loss.clip_hihg=0.28",
            "clean, + clip-higher: unknown option loss.clip_hihg",
        ),
        (
            "loss.clip_high=0.28",
            "loss.clip_high=-1",
            "clean, + clip-higher: option loss.clip_high: input should be",
        ),
        (
            "loss.clip_high=0.28",
            "loss.clip_high",
            "variants: + clip-higher: set: override 'loss.clip_high': expected",
        ),
        ("[loss.clip_high=0.28]", "loss.clip_high=0.28", "expected a list of options as text"),
        (
            "rollout.max_response_tokens=6",
            "overlong.mode=soft, overlong.buffer_tokens=99",
            "short, GRPO: overlong.buff",
        ),
        (
            "loss.clip_high=0.28",
            "eval.temperature=0.5",
            "eval.temperature differs from the first row's",
        ),
        (
            "loss.clip_high=0.28",
            "reward.verifier=math",
            "reward.verifier differs from the first row's",
        ),
        (
            "train.num_steps=2",
            "train.seed=2",
            "set: train.seed cannot be set here: `seeds` sets it",
        ),
        ("train.num_steps=2", "train.threads=2", "set: train.threads cannot be set here: `--jobs`"),
        ("train.num_steps=2", "data.eval=null", "data.eval is missing"),
        ("[3, 1]", "[3, 3]", "seeds: 3 is listed twice"),
        ("[3, 1]", "[3, -1]", "seeds: expected a list of integers from 0"),
        ("[3, 1]", "[true]", "seeds: expected a list of integers from 0"),
        (
            "baseline: GRPO",
            "baseline: GRPQ",
            "baseline 'GRPQ' is not a variant; did you mean GRPO?",
        ),
        ("loss/entropy", "loss/entrpy", "no metric 'loss/entrpy'"),
        (
            "against: seconds",
            "against: hours",
            "against must be some of steps, tokens, seconds, got 'hours'",
        ),
        (
            "against: seconds",
            "windows: [[6, 2]]",
            "windows must be pairs of steps, such as [[6, 20]], got [[6, 2]]",
        ),
        ("against: seconds", "windows: 6", "windows must be pairs of steps"),
        ("against: seconds", "window: [6, 20]", "unknown key 'window'; did you mean windows?"),
        ("base: {base}", "base: nowhere.yaml", "no config file nowhere.yaml"),
        ("base: {base}", "", "base is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_before_anything_runs(
    tmp_path: Path, old: str, new: str, message: str
):
    assert old in FILE
    with pytest.raises(ConfigError) as found:
        load_experiment(written(tmp_path, FILE.replace(old, new, 1)))
    assert message in str(found.value)


def test_every_row_that_is_refused_has_a_line(tmp_path: Path):
    text = FILE.replace("loss.clip_high=0.28", "loss.clip_high=-1").replace(
        "loss.aggregate=token", "loss.x=1"
    )
    with pytest.raises(ConfigError) as found:
        load_experiment(written(tmp_path, text))
    lines = str(found.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:] if line.startswith("  clean")] == [
        "clean, + clip-higher",
        "clean, + token-level loss",
    ]


# --- the ladders that come with the package


def changes(ladder: str) -> dict[str, dict[str, list[object]]]:
    """The options in which each row differs from the one that it is compared with."""
    experiment = load_experiment(TINY, ["train.minibatch_groups=2"], ladder=ladder)
    (condition,) = experiment.conditions
    found = {}
    for variant in experiment.variants[1:]:
        previous = experiment.variant(experiment.predecessor(variant) or "")
        pair = [experiment.run(0, condition, each).config for each in (previous, variant)]
        found[variant.name] = option_differences(*pair)
    return found


def test_each_row_of_table_1_changes_exactly_what_the_papers_row_does():
    assert changes("table1") == {
        "+ overlong filtering": {"overlong.mode": ["off", "filter"]},
        "+ clip-higher": {"loss.clip_high": [0.2, 0.28]},
        "+ soft overlong punishment": {"overlong.mode": ["filter", "soft"]},
        "+ token-level loss": {"loss.aggregate": ["sequence", "token"]},
        "+ dynamic sampling (DAPO)": {"dynamic_sampling.enabled": [False, True]},
    }


@pytest.mark.parametrize("preset", ["dapo", "grpo"])
@pytest.mark.parametrize(("ladder", "full"), [("table1", -1), ("leave-one-out", 0)])
def test_the_full_system_of_a_ladder_is_the_papers_whatever_the_configuration_says(
    ladder: str, full: int, preset: str
):
    stated = [
        "loss.kl_coef=0.1",
        "overlong.mode=filter",
        "dynamic_sampling.enabled=false",
        "loss.clip_high=0.5",
    ]
    experiment = load_experiment(TINY, [f"preset={preset}", *stated], ladder=ladder)
    run = experiment.run(0, experiment.conditions[0], experiment.variants[full])
    assert option_differences(run.config, load_config(TINY)) == {}


def test_the_first_row_of_table_1_is_the_preset_grpo_without_its_kl_term():
    experiment = load_experiment(TINY)
    first = experiment.run(0, experiment.conditions[0], experiment.variants[0]).config
    differing = option_differences(first, load_config(TINY, ["preset=grpo"]))
    assert differing == {"preset": ["dapo", "grpo"], "loss.kl_coef": [0.0, 0.001]}


def test_each_row_of_leave_one_out_changes_one_option_of_the_full_system():
    assert all(len(options) == 1 for options in changes("leave-one-out").values())


def test_a_shipped_ladder_is_an_experiment_file_and_its_name_may_stand_for_its_rows(tmp_path: Path):
    for name, path in shipped_ladders().items():
        rows = load_experiment(path).variants
        mine = tmp_path / "mine.yaml"
        mine.write_text(f"{{base: tiny, variants: {name}}}")
        assert load_experiment(mine).variants == rows
        copy = tmp_path / "copy.yaml"
        copy.write_text(path.read_text())
        assert load_experiment(copy).variants == rows


def test_an_experiment_file_takes_no_ladder_and_a_ladder_must_exist(tmp_path: Path):
    with pytest.raises(ConfigError, match="has its own rows"):
        load_experiment(written(tmp_path, FILE), ladder="table1")
    with pytest.raises(ConfigError, match="no ladder 'table2'; did you mean table1"):
        load_experiment(TINY, ladder="table2")
