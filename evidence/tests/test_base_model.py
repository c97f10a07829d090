"""The base model of the experiments: what its corpus says is true where it says so, and none of it
is held out.
"""

import math
import re
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dapo.config import load_config
from dapo.config.data_spec import TaskSource
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptEncoder
from dapo.data.sources.builtin import is_held_out
from dapo.policy.model import load_model
from dapo.policy.policy import Policy
from dapo.rewards.verifiers.exact import ExactVerifier
from dapo.types import Problem, Sample
from evidence import base_model, corpus
from helpers.paths import ROOT
from helpers.tiny_policies import plain_copy, plain_scores

BASE = ROOT / "evidence" / "base.yaml"
TINY = base_model.Recipe(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    updates=2,
    warmup_updates=1,
    problems_per_update=3,
)


def problems(size: int) -> list[Problem]:
    recipe = base_model.Recipe(updates=size, problems_per_update=1)
    return base_model.corpus_problems(load_config(BASE), recipe)


def solutions(size: int) -> list[tuple[Problem, corpus.Solution]]:
    return [
        (problem, corpus.solve(problem, 7, index)) for index, problem in enumerate(problems(size))
    ]


def wrong_steps(problem: Problem, text: str) -> int:
    """The wrong equations, wrong orders and digits that are not those of the question, read from
    the text alone.
    """
    sums = re.findall(r"(\d+)\+(\d+)=(\d+)", text)
    divisions = re.findall(r"(\d+)=(\d+)\*(\d+)\+(\d+)", text)
    wrong = sum(int(a) + int(b) != int(c) for a, b, c in sums)
    wrong += sum(int(n) != int(d) * int(q) + int(r) for n, d, q, r in divisions)
    if problem.source == "sort_digits":
        given = re.findall(r"\d", str(problem.prompt))
        for label, line in re.findall(
            r"^(Check: |Again: )?(\d+(?:, \d+)+)$", text, flags=re.MULTILINE
        ):
            states = line.split(", ")
            digits = given[::-1] if label == "Check: " else given
            for before, state, digit in zip(["", *states[:-1]], states, digits, strict=True):
                assert list(state) == sorted(state)
                wrong += Counter(state) != Counter(before + digit)
    return wrong


def numbers_asked(problem: Problem) -> tuple[object, ...]:
    """The task and its numbers, whatever their order."""
    return problem.source, *sorted(corpus.numbers_of(problem))


def claimed(text: str) -> str | None:
    found = re.findall(r"^Answer: (.*)$", text, flags=re.MULTILINE)
    return found[-1] if found else None


# --- the corpus


def test_a_text_without_slips_is_right_in_every_step_and_in_its_answer():
    checked = 0
    for problem, solution in solutions(700):
        if solution.slips == 0 and solution.ends:
            assert wrong_steps(problem, solution.text) == 0, solution
            if solution.way != "unmarked":
                assert claimed(solution.text) == problem.answer, solution
                checked += 1
    assert checked > 200


def test_every_slip_of_a_text_is_a_wrong_step_or_a_wrong_guess():
    wrong = Counter()
    for problem, solution in solutions(900):
        if solution.slips and solution.ends:
            if steps := wrong_steps(problem, solution.text):
                assert steps == solution.slips, solution
            else:
                assert solution.slips == 1, solution
                assert claimed(solution.text) != problem.answer, solution
            wrong[solution.way, steps > 0] += 1
    assert (
        min(
            wrong["worked", True],
            wrong["checked", True],
            wrong["guessed", False],
            wrong["rambling", False],
        )
        > 5
    )
    assert not wrong["worked", False] + wrong["checked", False] + wrong["guessed", True]


def test_the_ways_of_answering_have_their_shares():
    ways = Counter(solution.way for _, solution in solutions(3000))
    for way, share in corpus.SHARES.items():
        deviation = math.sqrt(3000 * share * (1 - share))
        assert abs(ways[way] - 3000 * share) < 4 * deviation, (way, ways[way])
    assert math.isclose(sum(corpus.SHARES.values()), 1.0)


def test_only_endless_and_too_long_texts_have_no_end():
    for _, solution in solutions(600):
        assert len(solution.text) <= corpus.MAX_CHARACTERS
        if not solution.ends:
            assert solution.way == "rambling" or len(solution.text) == corpus.MAX_CHARACTERS
            assert claimed(solution.text) is None or solution.way == "checked"


def test_no_held_out_problem_is_in_the_corpus():
    config = load_config(BASE)
    held_out = {numbers_asked(p) for p in load_problems(config.data.eval_source, split="eval")}
    learned = problems(1500)
    assert not any(
        is_held_out(p.source, str(p.prompt).partition(" Reply with")[0]) for p in learned
    )
    assert not held_out & {numbers_asked(p) for p in learned}


def test_the_corpus_is_the_same_on_every_machine():
    text = "\n".join(f"{p.prompt} {s.text}" for p, s in solutions(60))
    assert zlib.crc32(text.encode()) == 3454923277
    again = solutions(60)
    assert again == solutions(60)
    assert corpus.solve(again[0][0], 7, 0) != corpus.solve(again[0][0], 7, 1)


def test_the_verifier_reads_what_the_corpus_marks_and_nothing_else():
    config = load_config(BASE)
    assert config.reward.verifier == "exact"
    verify = ExactVerifier(**config.reward.options)
    seen = Counter()
    for problem, solution in solutions(400):
        answer = claimed(solution.text)
        assert verify(problem, solution.text).correct == (answer == problem.answer), solution
        seen[solution.way, answer == problem.answer] += 1
    assert seen["worked", True] > seen["worked", False] > 0
    assert seen["guessed", False] > seen["guessed", True] > 0
    assert not seen["unmarked", True]


# --- the configuration


def test_base_yaml_names_the_cached_model_and_its_limits_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    config = load_config(BASE)
    assert (
        Path(config.model.name)
        == base_model.model_directory()
        == tmp_path / "models" / base_model.NAME
    )
    assert config.updates_per_step == 4
    assert config.train.threads == 1
    loaded = base_model.new_model(TINY)
    encoder = PromptEncoder(loaded.tokenizer, config.data)
    longest = encoder.measure(load_problems(config.data.train_source)[:600])
    limit = config.rollout.max_response_tokens
    assert longest + limit <= loaded.model.config.max_position_embeddings
    assert config.overlong.buffer_tokens < limit < corpus.MAX_CHARACTERS
    assert len(load_problems(config.data.eval_source, split="eval")) >= 300


def test_base_yaml_names_the_users_cache_folder_where_no_variable_does(tmp_path, monkeypatch):
    monkeypatch.delenv("DAPO_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Path(load_config(BASE).model.name) == base_model.model_directory()


def test_training_and_evaluation_ask_the_tasks_that_the_corpus_answers():
    config = load_config(BASE)
    train = config.data.train_source
    held_out = config.data.eval_source
    assert isinstance(train, TaskSource)
    assert isinstance(held_out, TaskSource)
    assert train.tasks == held_out.tasks
    assert set(train.tasks) <= set(corpus.METHODS)
    assert len({train.seed, held_out.seed, base_model.Recipe().seed}) == 3


# --- the model


def test_an_update_follows_the_gradient_of_the_mean_log_probability():
    config = base_model.training_config(TINY)
    loaded = base_model.new_model(TINY)
    minibatch = next(base_model.minibatches(config, TINY, loaded))
    plain = plain_copy(loaded)
    given = Policy(config, loaded).gradient(minibatch, config.loss)
    scores = torch.cat([logprobs for logprobs, _ in plain_scores(plain, minibatch)])
    (-scores.mean()).backward()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(given[name], weight.grad, rtol=1e-3, atol=1e-5)


def test_texts_that_are_cut_off_have_no_end_token():
    config = base_model.training_config(TINY)
    loaded = base_model.new_model(TINY)
    recipe = replace(TINY, updates=12)
    (end,) = loaded.stop_ids
    rows: list[Sample] = [
        row for minibatch in base_model.minibatches(config, recipe, loaded) for row in minibatch
    ]
    texts = [
        (loaded.tokenizer.decode(row.response_ids, skip_special_tokens=True), row) for row in rows
    ]
    assert any(row.response_ids[-1] != end for row in rows)
    for text, row in texts:
        assert (end in row.response_ids) == (row.response_ids[-1] == end)
        if row.response_ids[-1] == end:
            assert len(text) == len(row.response_ids) - 1


def test_the_model_is_made_once_and_anew_where_its_recipe_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    lines: list[str] = []
    folder, origin = base_model.base_model(lines.append, recipe=TINY)
    assert origin["characters"] > 100
    loaded = load_model(str(folder), dtype=torch.float32)
    assert loaded.stop_ids == base_model.new_model(TINY).stop_ids
    first = dict(loaded.model.state_dict())
    count = len(lines)
    assert base_model.base_model(lines.append, recipe=TINY) == (folder, origin)
    assert len(lines) == count  # nothing was trained
    base_model.base_model(lines.append, recipe=TINY, again=True)
    again = load_model(str(folder), dtype=torch.float32).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    _, other = base_model.base_model(lines.append, recipe=replace(TINY, seed=1))
    assert other["recipe"]["seed"] == 1


@pytest.mark.parametrize("way", list(corpus.SHARES))
def test_every_way_of_answering_is_described(way: str):
    assert corpus.WAYS[way].__doc__
