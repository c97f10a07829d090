"""Bad input by name, each with the exact message that answers it: what was expected, what came, what to do."""

import contextlib
import math
import os
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from dapo.cli.main import main
from dapo.config import build_config, load_config
from dapo.config.data_spec import EXPECTED
from dapo.config.options import options_of
from dapo.core.errors import ConfigError, DapoError, DataError, RewardError
from dapo.core.secrets import mask_options, secret_names
from dapo.data.problems import load_problems
from dapo.rewards import build_verifier
from helpers import paths

TINY = str(paths.TINY)
BASE = {
    "model": "tiny-random",
    "data": {"train": "builtin:sums"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 8},
    "overlong": {"buffer_tokens": 4},
    "train": {"minibatch_groups": 2},
}
ROW = 'one object per line, like {"prompt": "...", "answer": "..."}'

OVERRIDES: dict[str, tuple[Any, ...]] = {
    "unknown option": ("loss.clip_hihg=0.3", "unknown option loss.clip_hihg; did you mean loss.clip_high?"),
    "unknown section": ("lss.clip_high=0.3", "unknown option lss; did you mean loss?"),
    "unknown option, nothing near": (
        "zebra=1",
        (
            "unknown option zebra; known here: preset, model, data, rollout, dynamic_sampling, reward, "
            "audit, overlong, advantage, loss, optim, critic, train, eval, launcher, schedule, distributed, log, "
            "profile"
        ),
    ),
    "option of another section": ("rollout.lr=1", "unknown option rollout.lr; did you mean optim.lr?"),
    "section given a value": ("loss=3", "option loss: input should be a section of options, got 3"),
    "text for a number": (
        "optim.lr=fast",
        ("option optim.lr: input should be a valid number, unable to parse string as a number, got 'fast'"),
    ),
    "truth for a number": ("optim.lr=true", "option optim.lr: expected a number, got True"),
    "fraction for a count": (
        "rollout.group_size=2.5",
        ("option rollout.group_size: input should be a valid integer, got a number with a fractional part, got 2.5"),
    ),
    "NaN": ("optim.lr=.nan", "option optim.lr: input should be a finite number, got nan"),
    "infinite": ("rollout.temperature=.inf", "option rollout.temperature: input should be a finite number, got inf"),
    "negative temperature": (
        "rollout.temperature=-1",
        "option rollout.temperature: input should be greater than 0, got -1",
    ),
    "zero steps": ("train.num_steps=0", "option train.num_steps: input should be greater than 0, got 0"),
    "negative count": ("train.num_steps=-5", "option train.num_steps: input should be greater than 0, got -5"),
    "list for text": ("data.system=[a,b]", "option data.system: input should be a valid string, got ['a', 'b']"),
    "group of one": (
        "rollout.group_size=1",
        "rollout.group_size must be at least 2 to compare responses with each other, got 1",
    ),
    "sizes that do not divide": (
        "train.minibatch_groups=3",
        (
            "rollout.prompts_per_step=4 (prompts per step) must be a multiple of train.minibatch_groups=3 "
            "(prompts per optimiser update)"
        ),
    ),
    "top_p in training": (
        "rollout.top_p=0.9",
        (
            "unknown option rollout.top_p; it is fixed to 1, because the trainer's log-probabilities describe the "
            "whole distribution; leave it out (eval.top_p is free)"
        ),
    ),
    "buffer beyond the response": (
        "overlong.buffer_tokens=9",
        ("overlong.buffer_tokens=9 must not exceed rollout.max_response_tokens=8; lower it or set overlong.mode=off"),
    ),
    "bound below the batch": (
        "dynamic_sampling.max_groups_per_step=3",
        (
            "dynamic_sampling.max_groups_per_step=3 must be at least rollout.prompts_per_step=4, or no batch "
            "could ever be full"
        ),
    ),
    "clip over one": ("loss.clip_low=1.5", "option loss.clip_low: input should be less than 1, got 1.5"),
    "unknown word": (
        "loss.aggregate=tokens",
        ("option loss.aggregate: input should be 'token', 'group', 'sequence' or 'constant', got 'tokens'"),
    ),
    "unknown preset": (
        "preset=grop",
        "option preset: input should be 'dapo', 'grpo', 'dr_grpo', 'gspo', 'cispo', 'sapo', 'ppo', 'rloo' or "
        "'reinforce_pp', got 'grop'",
    ),
    "unknown engine": ("rollout.engine=vlm", "option rollout.engine: input should be 'native' or 'vllm', got 'vlm'"),
    "unknown sink": (
        "log.sinks=[tensorbord]",
        ("option log.sinks.0: input should be 'tensorboard', 'wandb' or 'trackio', got 'tensorbord'"),
    ),
    "beta of one": ("optim.betas=[0.9,1.0]", "option optim.betas.1: input should be less than 1, got 1.0"),
    "three betas": (
        "optim.betas=[0.9,0.99,0.999]",
        ("option optim.betas: tuple should have at most 2 items after validation, not 3, got [0.9, 0.99, 0.999]"),
    ),
    "override without a value": (
        "loss.clip_high",
        "override 'loss.clip_high': expected key=value, for example loss.clip_high=0.3",
    ),
    "override without a key": ("=3", "override '=3': expected key=value, for example loss.clip_high=0.3"),
    "override with an empty part": (
        "loss..clip_high=3",
        "override 'loss..clip_high=3': expected key=value, for example loss.clip_high=0.3",
    ),
    "override that is no YAML": (
        "loss.clip_high=[1",
        (
            "override 'loss.clip_high=[1': while parsing a flow sequence in \"<unicode string>\", line 1, "
            "column 1 did not find expected ',' or ']' in \"<unicode string>\", line 2, column 1"
        ),
    ),
    "interpolation of nothing": (
        "optim.lr=${no.such}",
        "Interpolation key 'no.such' not found full_key: optim.lr object_type=dict",
    ),
    "weight that is text": (
        "reward.verifier={math: heavy}",
        (
            "option reward.verifier.math: input should be a valid number, unable to parse string as a number, "
            "got 'heavy'"
        ),
    ),
    "secret in the options": (
        "reward.options.api_key=abc",
        (
            "reward.options.api_key looks like a secret, and options are written to config.yaml and to "
            "trackers; have the verifier read an environment variable, which its processes inherit, and give "
            "at most the variable's name: reward.options.api_key_env=NAME"
        ),
    ),
}
FILES: dict[str, tuple[Any, ...]] = {
    "config with a number of 5,000 digits": (
        "train: {num_steps: " + "9" * 5000 + "}",
        "{dir}/c.yaml is not readable as YAML: Exceeds the limit (4300 digits) for integer string conversion: value "
        "has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    "config that is nested 40 deep": ("a: " + "[" * 40 + "]" * 40, "{dir}/c.yaml: values are nested more than 32 deep"),
    "config that is nested too deep": (
        "a: " + "[" * 100 + "]" * 100,
        "{dir}/c.yaml is not readable as YAML: values are nested more than 32 deep",
    ),
    "config is a list": ("- a\n- b\n", "{dir}/c.yaml must hold options as `name: value`, got a list"),
    "config is text": (
        "hello",
        (
            "{dir}/c.yaml:\n  option model is missing. For example model=smollm2-135m-instruct.\n  option data "
            "is missing. For example data.train=builtin:sums.\n  unknown option hello; known here: preset, "
            "model, data, rollout, dynamic_sampling, reward, audit, overlong, advantage, loss, optim, critic, train, "
            "eval, launcher, schedule, distributed, log, profile"
        ),
    ),
    "config is no YAML": (
        "model: [a\n",
        (
            '{dir}/c.yaml is not readable as YAML: while parsing a flow sequence in "{dir}/c.yaml", line 1, '
            "column 8 did not find expected ',' or ']' in \"{dir}/c.yaml\", line 2, column 1"
        ),
    ),
    "config with a tab": (
        "model:\n\tname: x\n",
        (
            "{dir}/c.yaml is not readable as YAML: while scanning for the next token found character that "
            'cannot start any token in "{dir}/c.yaml", line 2, column 1'
        ),
    ),
    "config with NUL": (
        "model: a\x00b\n",
        (
            "{dir}/c.yaml is not readable as YAML: unacceptable character #x0000: control characters are not "
            'allowed in "{dir}/c.yaml", position 8'
        ),
    ),
    "config in Latin-1": (b"model: caf\xe9", "{dir}/c.yaml is not UTF-8 (byte 0xe9); save the file as UTF-8"),
    "config of bytes": (bytes(range(128, 256)), "{dir}/c.yaml is not UTF-8 (byte 0x80); save the file as UTF-8"),
    "config with a duplicate key": (
        "model: a\nmodel: b\n",
        (
            '{dir}/c.yaml is not readable as YAML: while constructing a mapping in "{dir}/c.yaml", line 1, '
            'column 1 found duplicate key model in "{dir}/c.yaml", line 2, column 1'
        ),
    ),
    "config with a Python tag": (
        "model: !!python/object/apply:os.system ['echo x']\n",
        (
            "{dir}/c.yaml is not readable as YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.system' in \"{dir}/c.yaml\", line 1, column 8"
        ),
    ),
    "config that is empty": (
        "",
        (
            "{dir}/c.yaml:\n  option model is missing. For example model=smollm2-135m-instruct.\n  option data "
            "is missing. For example data.train=builtin:sums."
        ),
    ),
    "config of aliases without end": (
        "model: &a [*a]\n",
        (
            "{dir}/c.yaml is not readable as YAML: YAML recursive aliases are not supported. in "
            '"{dir}/c.yaml", line 1, column 8'
        ),
    ),
}
LONG = "n" * 300
SPECS: dict[str, tuple[Any, ...]] = {
    "size beyond all bounds": (
        {"builtin": "sums", "size": 10**12},
        "data source builtin: size must be at most 1000000, got 1000000000000",
    ),
    "size of a file beyond all bounds": (
        {"path": "a.jsonl", "size": 10**30},
        f"data source path: size must be at most 1000000000, got {10**30}",
    ),
    "seed beyond all bounds": (
        {"builtin": "sums", "seed": 10**30},
        f"data source builtin: seed must be at most {2**63 - 1}, got {10**30}",
    ),
    "number": (3, "data source 3 is a int; " + EXPECTED),
    "empty": ("  ", "the data source is empty; " + EXPECTED),
    "unknown kind": ("hubb:x", "data source 'hubb:x': unknown kind 'hubb', did you mean hub?; " + EXPECTED),
    "no task": ("builtin:", "data source builtin: no task is named; write for example builtin:sums,products"),
    "unknown task": ("builtin:sumz", "builtin: no task sumz; did you mean sums?"),
    "task twice": ("builtin:sums,sums", "data source builtin: task sums is named twice; each takes part once"),
    "unknown option of a task": (
        {"builtin": {"sums": {"term": 3}}},
        "builtin task sums: unknown option 'term'; did you mean terms?",
    ),
    "option out of range": (
        {"builtin": {"sums": {"terms": 99}}},
        "builtin task sums: terms must be an integer from 2 to 16, got 99",
    ),
    "low above high": ({"builtin": {"sums": {"low": 9, "high": 3}}}, "builtin task sums: low=9 must be below high=3"),
    "two kinds": ({"path": "a", "hub": "b"}, "data source: both path and hub; " + EXPECTED),
    "no kind": ({"size": 3}, "data source: the keys size; " + EXPECTED),
    "misspelled key": (
        {"path": "a.jsonl", "promt": "q"},
        ("data source path: unknown option 'promt'; did you mean prompt?"),
    ),
    "size zero": (
        {"builtin": "sums", "size": 0},
        "data source builtin: size must be an integer of at least 1, got 0",
    ),
    "size text": (
        {"builtin": "sums", "size": "many"},
        "data source builtin: size must be an integer of at least 1, got 'many'",
    ),
    "size below the tasks": (
        {"builtin": "sums,gcd", "size": 1},
        "data source builtin: size=1 is less than the 2 tasks it names",
    ),
    "negative seed": (
        {"builtin": "sums", "seed": -1},
        "data source builtin: seed must be an integer of at least 0, got -1",
    ),
    "missing file": ("{dir}/none.jsonl", "no data file {dir}/none.jsonl; the folder holds no data file"),
    "missing folder": ("{dir}/no/none.jsonl", "no data file {dir}/no/none.jsonl; the folder {dir}/no does not exist"),
    "folder": ("{dir}", "{dir} is a folder; expected one file: it holds no data file"),
    "NUL in the path": ("a\x00b.jsonl", "no data file a\x00b.jsonl; the folder holds no data file"),
    "path too long": (
        "a" * 5000 + ".jsonl",
        ("data file aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...: File name too long"),
    ),
    "no gym task": (
        "gym:chain_summ",
        ("gym: reasoning-gym has no task chain_summ; did you mean chain_sum or decimal_chain_sum?"),
    ),
}
ROWS: dict[str, tuple[Any, ...]] = {
    "empty file": ("", " is empty; expected at least one problem with prompt and answer"),
    "blank lines": ("\n\n", " is empty; expected at least one problem with prompt and answer"),
    "cut JSON": (
        '{"prompt": "1+1", "answer": "2"}\n{"prompt": ',
        (
            ", line 2: not valid JSON (Expecting value at column 12); expected one object per line, like "
            '{"prompt": "...", "answer": "..."}'
        ),
    ),
    "list": ("[1]", ", line 1: expected " + ROW + ", got a list"),
    "text": ('"hello"', ", line 1: expected " + ROW + ", got a str"),
    "NaN": ("NaN", ", line 1: expected " + ROW + ", got a float"),
    "not UTF-8": (
        b'{"prompt": "caf\xe9", "answer": "2"}',
        ", line 1: not UTF-8 (byte 0xe9 at column 16); save the file as UTF-8",
    ),
    "UTF-16": (
        '{"prompt": "a", "answer": "2"}'.encode("utf-16"),
        ", line 1: not UTF-8 (byte 0xff at column 1); save the file as UTF-8",
    ),
    "deep": (
        "[" * 100_000,
        (
            ", line 1: JSON that cannot be read (maximum recursion depth exceeded while decoding a JSON array "
            'from a unicode string); expected one object per line, like {"prompt": "...", "answer": "..."}'
        ),
    ),
    "huge number": (
        '{"prompt": "a", "answer": ' + "9" * 5000 + "}",
        (
            ", line 1: JSON that cannot be read (Exceeds the limit (4300 digits) for integer string "
            "conversion: value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit); "
            'expected one object per line, like {"prompt": "...", "answer": "..."}'
        ),
    ),
    "no prompt": (
        '{"answer": "2"}',
        (
            ", line 1: no prompt; expected a column prompt, question or problem, columns here: answer; name "
            "yours with {path: FILE, prompt: COLUMN}"
        ),
    ),
    "no answer": (
        '{"prompt": "2"}',
        (
            ", line 1: no answer; expected a column reward_model.ground_truth, answer, solution, ground_truth "
            "or target, columns here: prompt; name yours with {path: FILE, answer: COLUMN}"
        ),
    ),
    "a key that occurs twice": (
        '{"prompt": "1+1", "answer": "2", "answer": "3"}',
        ", line 1: the key 'answer' occurs twice in one object; remove one of them",
    ),
    "a key that occurs twice in a column": (
        '{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1", "answer": "2", "x": [{"y": 1, "y": 2}]}',
        ", line 2: the key 'y' occurs twice in one object; remove one of them",
    ),
    "empty object": (
        "{}",
        (
            ", line 1: no prompt; expected a column prompt, question or problem, columns here: (none); name "
            "yours with {path: FILE, prompt: COLUMN}"
        ),
    ),
    "prompt empty": (
        '{"prompt": " ", "answer": "2"}',
        ", line 1: prompt is empty; expected the question as a string or messages",
    ),
    "prompt null": (
        '{"prompt": null, "answer": "2"}',
        ", line 1: prompt is null; expected the question as a string or messages",
    ),
    "prompt number": (
        '{"prompt": 3, "answer": "2"}',
        ", line 1: prompt must be a string or a list of messages, got int 3",
    ),
    "prompt object": (
        '{"prompt": {"text": "a"}, "answer": "2"}',
        ", line 1: prompt must be a string or a list of messages, got dict {'text': 'a'}",
    ),
    "answer null": (
        '{"prompt": "a", "answer": null}',
        (", line 1: answer is null; every problem needs a reference answer: fill it in or drop the row"),
    ),
    "answer empty": (
        '{"prompt": "a", "answer": ""}',
        (", line 1: answer is empty; every problem needs a reference answer: fill it in or drop the row"),
    ),
    "answer truth": (
        '{"prompt": "a", "answer": true}',
        (", line 1: answer must be a string or a number, got bool True; write the reference answer as a string"),
    ),
    "answer list": (
        '{"prompt": "a", "answer": ["2"]}',
        (", line 1: answer must be a string or a number, got list ['2']; write the reference answer as a string"),
    ),
    "answer infinite": (
        '{"prompt": "a", "answer": Infinity}',
        (", line 1: answer must be a string or a number, got float inf; write the reference answer as a string"),
    ),
    "messages empty": (
        '{"prompt": [], "answer": "2"}',
        ", line 1: prompt is empty; expected at least one message with content",
    ),
    "message text": (
        '{"prompt": ["a"], "answer": "2"}',
        ", line 1: prompt, message 1: expected a mapping with role and content, got str 'a'",
    ),
    "message without role": (
        '{"prompt": [{"content": "a"}], "answer": "2"}',
        (", line 1: prompt, message 1: expected a mapping with role and content, got the keys content"),
    ),
    "message with a picture": (
        '{"prompt": [{"role": "user", "content": [{"type": "image", "path": "/etc/passwd"}]}], "answer": "2"}',
        (", line 1: prompt, message 1: content must be a string, got list [{'type': 'image', 'path': '/etc/passwd'}]"),
    ),
    "message null": (
        '{"prompt": [{"role": "user", "content": null}], "answer": "2"}',
        ", line 1: prompt, message 1: content must be a string, got NoneType None",
    ),
    "role number": (
        '{"prompt": [{"role": 3, "content": "a"}], "answer": "2"}',
        ", line 1: prompt, message 1: role must be a string, got int 3",
    ),
    "assistant last": (
        '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "2"}',
        (", line 1: prompt: the last message is the assistant's; a prompt ends where the model is to answer"),
    ),
    "lone surrogate in prompt": (
        '{"prompt": "a\\ud800", "answer": "2"}',
        (", line 1: prompt: character 2 is half of a surrogate pair ('\\ud800'), not text; write the text in UTF-8"),
    ),
    "lone surrogate in answer": (
        '{"prompt": "a", "answer": "\\udfff"}',
        (", line 1: answer: character 1 is half of a surrogate pair ('\\udfff'), not text; write the text in UTF-8"),
    ),
    "lone surrogate in role": (
        '{"prompt": [{"role": "\\ud800", "content": "a"}], "answer": "2"}',
        (
            ", line 1: prompt, message 1: role: character 1 is half of a surrogate pair ('\\ud800'), not text; "
            "write the text in UTF-8"
        ),
    ),
    "lone surrogate in a field": (
        '{"prompt": "a", "answer": "2", "x": ["\\ud800"]}',
        (", line 1: x: character 1 is half of a surrogate pair ('\\ud800'), not text; write the text in UTF-8"),
    ),
    "lone surrogate in a field's name": (
        '{"prompt": "a", "answer": "2", "\\ud800": 1}',
        (
            ", line 1: a column's name: character 1 is half of a surrogate pair ('\\ud800'), not text; write "
            "the text in UTF-8"
        ),
    ),
    "lone surrogate in a nested name": (
        '{"prompt": "a", "answer": "2", "x": {"\\ud800": 1}}',
        (
            ", line 1: x: a column's name: character 1 is half of a surrogate pair ('\\ud800'), not text; "
            "write the text in UTF-8"
        ),
    ),
}
REWARDS: dict[str, tuple[Any, ...]] = {
    "unknown": (
        "maths",
        {},
        (
            "unknown verifier 'maths'; did you mean math? known: choice, code, exact, gsm8k, gym, json_schema, "
            "math, math_dapo, regex, reward_model, server, or your own function as module:function"
        ),
    ),
    "none": ({}, {}, ("no verifier: expected a name, module:function, or a mapping of several to their weights")),
    "NaN weight": ({"math": float("nan")}, {}, "the weight of verifier math must be a finite number, got nan"),
    "unknown option": ("math", {"strict": True}, "verifier math has no option 'strict'; it has none"),
    "bad option": (
        "exact",
        {"extract": "all"},
        "exact: extract must be one of none, answer_line, last_number, final, got 'all'",
    ),
    "no module": (
        "no_such_module:f",
        {},
        ("'no_such_module:f': there is no module 'no_such_module' in {dir} or among the installed packages"),
    ),
    "no function": (
        "dapo.rewards.examples:has_digits",
        {},
        (
            "'dapo.rewards.examples:has_digits': module dapo.rewards.examples has no 'has_digits'; did you "
            "mean has_digit?"
        ),
    ),
    "no name": ("json:", {}, "'json:': expected module:function, for example my_rewards:brevity"),
    "not callable": ("math:pi", {}, "'math:pi' is not callable: it is a float"),
    "options of another": (
        {"math": 1, "exact": 1},
        {"extract": "final"},
        (
            "options of 'extract', which is not among the verifiers (math, exact); with several verifiers, "
            "options are given as {verifier: {option: value}}"
        ),
    ),
    "NUL": ("a\x00b:c", {}, "'a\\x00b:c': there is no module 'a\\x00b' in {dir} or among the installed packages"),
    "surrogate": ("\ud800:c", {}, "'\\ud800:c': there is no module '\\ud800' in {dir} or among the installed packages"),
}
SHORT = "n" * 60
TOO_LONG = f"error: {SHORT}...: File name too long"
TOO_LONG_ROOT = f"error: /{SHORT[1:]}...: File name too long"
TOO_LONG_HIDDEN = f"error: .{SHORT[1:]}...: File name too long"
COMMANDS = {
    "unknown command": ("trian", "Error: No such command 'trian'. Did you mean 'train'?"),
    "no config": ("train", "Error: Missing argument 'CONFIG.yaml'."),
    "unknown flag": ("train {tiny} --rundir x", "Error: No such option: --rundir (Possible options: --run-dir)"),
    "eval without data": (
        "eval tiny-random",
        "error: dapo eval needs --data SOURCE: only a run knows the problems that it was evaluated on",
    ),
    "text for a count": (
        "eval tiny-random --data builtin:sums --samples-per-problem many",
        "Error: Invalid value for '--samples-per-problem': Input should be a valid integer, unable to parse string as "
        "an integer",
    ),
    "no samples": (
        "eval tiny-random --data builtin:sums --samples-per-problem 0",
        "Error: Invalid value for '--samples-per-problem': Input should be greater than or equal to 1",
    ),
    "output in no folder": (
        "eval tiny-random --data builtin:sums --output no/such/out.json",
        "error: --output no/such/out.json: there is no directory no/such",
    ),
    "no such model": ("eval /no/such --data builtin:sums", "error: model '/no/such': there is no such directory"),
    "model without weights": (
        "eval {nomodel} --data builtin:sums",
        "error: model '{nomodel}' has no weights: expected one of *.safetensors, pytorch_model*.bin in the directory",
    ),
    "model that is a file": (
        "eval {file} --data builtin:sums",
        "error: model '{file}' is not a Hugging Face model directory: it has no config.json",
    ),
    "empty mapping as data": (
        "eval tiny-random --data {}",
        "error: data source: the keys (none); " + EXPECTED,
    ),
    "run without a checkpoint": (
        "eval {emptyrun} --data builtin:sums",
        "error: {emptyrun} has no checkpoint yet, so there is nothing to evaluate",
    ),
    "resume of nothing": (
        "resume no/such/run",
        "error: no run directory no/such/run; expected one that `dapo train` made",
    ),
    "resume of a file": ("resume {file}", "error: no run directory {file}; expected one that `dapo train` made"),
    "resume of a folder": (
        "resume {full}",
        "error: {full} is not a run directory: it has no config.yaml and no manifest.json",
    ),
    "resume of half a run": ("resume {halfrun}", "error: {halfrun} is not a run directory: it has no config.yaml"),
    "resume with a misspelled option": (
        "resume {emptyrun} lr=3",
        "error: command line: unknown option lr; did you mean optim.lr?",
    ),
    "export without a checkpoint": (
        "export {emptyrun} out",
        "error: {emptyrun} has no checkpoint yet, so there is nothing to export",
    ),
    "export of a step that is not there": (
        "export {emptyrun} out --step 7",
        "error: {emptyrun} has no checkpoint of step 7; there are: none",
    ),
    "check of nothing": (
        "check none.yaml",
        "error: no config file none.yaml; expected a YAML file, or one that comes with dapo: "
        "dapo_32b, gsm8k_0.5b, quickstart, tiny",
    ),
    "run directory with other files": (
        "train {tiny} --run-dir {full}",
        "error: {full} is not empty and holds no run (found a); choose a new or empty --run-dir",
    ),
    "run directory that is a file": (
        "train {tiny} --run-dir {file}",
        "error: cannot create the run directory {file}: File exists",
    ),
    "system message without a template": (
        "train {tiny} data.system=hello",
        "error: data.system is set, but the model's tokenizer has no chat template; leave it out, or put it into "
        "data.instruction",
    ),
    "filter without a function": (
        "train {tiny} dynamic_sampling.filter=json",
        "error: dynamic_sampling.filter='json': expected module:function, for example my_rewards:brevity",
    ),
    "filter that is no function": (
        "train {tiny} dynamic_sampling.filter=math:pi",
        "error: dynamic_sampling.filter='math:pi' is not callable: it is a float",
    ),
    "filter that is not there": (
        "train {tiny} dynamic_sampling.filter=no_such:f",
        "error: dynamic_sampling.filter='no_such:f': there is no module 'no_such' in {dir} or among the installed "
        "packages",
    ),
    "prompts that are all too long": (
        "train {tiny} data.max_prompt_tokens=1",
        "error: all 64 prompts are longer than data.max_prompt_tokens=1; the shortest has 42 tokens",
    ),
    "responses beyond the model": (
        "train {tiny} rollout.max_response_tokens=5000",
        "error: a prompt of 44 tokens and a response of 5000 exceed the 4096 positions of tiny-random; lower "
        "rollout.max_response_tokens (or eval.max_response_tokens) or data.max_prompt_tokens",
    ),
    "an option that would take the process down": (
        "train {tiny} rollout.native.slots=1000000000000",
        "error: command line: option rollout.native.slots: input should be less than or equal to 16384, "
        "got 1000000000000",
    ),
    "more threads than any machine has": (
        "train {tiny} train.threads=1000000000",
        "error: command line: option train.threads: input should be less than or equal to 4096, got 1000000000",
    ),
    "a number of problems that nobody can count": (
        'data stats {"builtin":"sums","size":1000000000000}',
        "error: data source builtin: size must be at most 1000000, got 1000000000000",
    ),
    "an option that is nested too deep": (
        "train {tiny} reward.options=" + "[" * 500 + "]" * 500,
        "error: override reward.options: values are nested more than 32 deep",
    ),
    "an option with too many dots": (
        "train {tiny} " + ".".join(["a"] * 500) + "=1",
        "error: override " + ".".join(["a"] * 500) + ": values are nested more than 32 deep",
    ),
    "a config file of a name that is too long": ("train " + LONG, TOO_LONG),
    "a run directory of a name that is too long": (
        "train {tiny} --run-dir " + LONG,
        f"error: cannot create the run directory {LONG}: File name too long",
    ),
    "a run of a name that is too long": ("resume " + LONG, TOO_LONG),
    "an export to a name that is too long": ("export {emptyrun} " + LONG, TOO_LONG),
    "a model to evaluate of a name that is too long": (f"eval {LONG} --data builtin:sums", TOO_LONG),
    "a model of a name that is too long": ("train {tiny} model.name=/" + LONG, TOO_LONG_ROOT),
    "data of a name that is too long": (f"data stats {LONG}.jsonl", TOO_LONG),
    "imported data of a name that is too long": (f"data import builtin:sums {LONG}.jsonl", TOO_LONG),
    "a result whose temporary name would be too long": (
        f"eval tiny-random --data builtin:sums --output {'n' * 245}",
        TOO_LONG_HIDDEN,
    ),
    "a result that is a directory": (
        "eval tiny-random --data builtin:sums --output {full}",
        "error: --output {full} is a directory; expected the name of a file to write",
    ),
    "data that is a pipe": (
        "data stats {pipe}",
        "error: {pipe} is not a regular file but a pipe, a socket or a device; expected a file of problems",
    ),
    "a config that is a pipe": (
        "train {pipe}",
        "error: no config file {pipe}; expected a YAML file, or one that comes with dapo: "
        "dapo_32b, gsm8k_0.5b, quickstart, tiny",
    ),
    "an argument that is not UTF-8": ("train \udcff", "error: the argument '\\udcff' is not UTF-8"),
    "a NUL in a path": ("train a\0b.yaml", "Error: Invalid value for 'CONFIG.yaml': Value error, embedded null byte"),
}


def answered(act: Callable[[], object], kind: type[DapoError], folder: Path, message: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert str(caught.value).replace(str(folder), "{dir}") == message
    assert caught.value.exit_code == 2


OF_SEVERAL_OPTIONS = {
    *("group of one", "sizes that do not divide", "buffer beyond the response"),
    *("bound below the batch", "interpolation of nothing", "weight that is text", "secret in the options"),
}
"""Which may stand in the file as well as on the command line."""


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_bad_option_is_answered(tmp_path: Path, name: str):
    override, message = OVERRIDES[name]
    if not override.startswith(("=", "loss.clip_high", "loss..")):
        message = f"{'config' if name in OF_SEVERAL_OPTIONS else 'command line'}: {message}"
    answered(lambda: build_config(BASE, [override]), ConfigError, tmp_path, message)


KINDS = {name: set(re.findall(r"\w+", repr(info.annotation))) for name, info in options_of()}
NUMBERS = [name for name, kinds in KINDS.items() if {"int", "float"} & kinds and not {"list", "dict", "tuple"} & kinds]
MADE_OR_WAITED_FOR = (
    *("slots", "threads", "workers", "engines", "ranks", "size", "groups", "tokens", "rank", "steps", "_s", "_gib"),
    *("_per_step", "_per_problem", "sequences", "parallel", "per_process", "every", "checkpoints"),
)


def test_every_number_among_the_options_is_found():
    assert len(NUMBERS) == 54
    assert {"rollout.native.slots", "train.threads", "reward.timeout_s", "eval.max_response_tokens"} <= set(NUMBERS)


@pytest.mark.parametrize("value", [10**12, 10**30, "1e308", -1, ".nan", ".inf"])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_takes_an_option_beyond_what_can_be_computed_with(name: str, value: object):
    taken: float | None = None
    with contextlib.suppress(ConfigError):
        config = build_config(BASE, ["model.lora={}", "dynamic_sampling.filter={}", f"{name}={value}"])
        taken = reduce(getattr, name.split("."), config)
    if taken is not None:
        assert math.isfinite(taken)
        assert taken >= 0 or name == "reward.threshold"
        assert not isinstance(taken, int) or taken < 2**63
        assert not name.endswith(MADE_OR_WAITED_FOR)  # of which all these values are refused


def test_several_errors_are_reported_at_once(tmp_path: Path):
    answered(
        lambda: build_config({"optim": {"lr": "fast"}}, ["train.num_steps=0"]),
        ConfigError,
        tmp_path,
        "config:\n"
        "  option model is missing. For example model=smollm2-135m-instruct.\n"
        "  option data is missing. For example data.train=builtin:sums.\n"
        "  option optim.lr: input should be a valid number, unable to parse string as a number, got 'fast'\n"
        "  option train.num_steps: input should be greater than 0, got 0",
    )


@pytest.mark.parametrize("name", FILES)
def test_a_bad_config_file_is_answered(tmp_path: Path, name: str):
    content, message = FILES[name]
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    answered(lambda: load_config(path), ConfigError, tmp_path, message)


def test_a_config_that_is_a_folder_or_absent_is_answered(tmp_path: Path):
    hint = "expected a YAML file, or one that comes with dapo: dapo_32b, gsm8k_0.5b, quickstart, tiny"
    answered(lambda: load_config(tmp_path), ConfigError, tmp_path, f"{{dir}} is a folder; {hint}")
    answered(lambda: load_config(tmp_path / "x"), ConfigError, tmp_path, f"no config file {{dir}}/x; {hint}")


@pytest.mark.parametrize("name", SPECS)
def test_a_bad_data_source_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    if "gym" in name:
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    spec, message = SPECS[name]
    spec = spec.replace("{dir}", str(tmp_path)) if isinstance(spec, str) else spec
    answered(lambda: load_problems(spec), DataError, tmp_path, message)


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_answered_with_its_file_and_line(tmp_path: Path, name: str):
    content, message = ROWS[name]
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    answered(lambda: load_problems(str(path)), DataError, tmp_path, f"{{dir}}/d.jsonl{message}")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "a.xlsx",
            b"q,a",
            "{dir}/a.xlsx: expected a file that ends in .jsonl, .parquet, .csv, .tsv or .json, got '.xlsx'",
        ),
        ("a", b"", "{dir}/a: expected a file that ends in .jsonl, .parquet, .csv, .tsv or .json, got 'no ending'"),
        ("d.parquet", b"", "{dir}/d.parquet: not readable as Parquet (Parquet file size is 0 bytes)"),
        (
            "d.parquet",
            b"hello",
            "{dir}/d.parquet: not readable as Parquet (Parquet file size is 5 bytes, smaller than the minimum file "
            "footer (8 bytes))",
        ),
    ],
)
def test_a_file_of_another_kind_is_answered(tmp_path: Path, file: str, content: bytes, message: str):
    (tmp_path / file).write_bytes(content)
    answered(lambda: load_problems(str(tmp_path / file)), DataError, tmp_path, message)


@pytest.mark.parametrize("name", REWARDS)
def test_a_bad_verifier_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    verifier, options, message = REWARDS[name]
    answered(lambda: build_verifier(verifier, options=options), RewardError, tmp_path, message)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_command_exits_with_2_and_one_message_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    paths = made(tmp_path) | {"tiny": TINY, "dir": tmp_path}

    def filled(text: str) -> str:
        for key, path in paths.items():
            text = text.replace(f"{{{key}}}", str(path))
        return text

    before = sorted(tmp_path.rglob("*"))
    command, message = COMMANDS[name]
    with pytest.raises(SystemExit) as stopped:
        main([filled(word) for word in command.split(" ")])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert "Traceback" not in out + err
    assert [line for line in err.splitlines() if line.strip()][-1] == filled(message)
    run_dir = {tmp_path / "runs"}
    assert set(tmp_path.rglob("*")) - run_dir <= set(before)


def made(folder: Path) -> dict[str, Path]:
    """Things in the way."""
    paths = {name: folder / name for name in ("file", "full", "nomodel", "halfrun", "emptyrun")}
    paths["file"].write_text("x")
    for name in ("full", "nomodel", "halfrun", "emptyrun"):
        paths[name].mkdir()
    (paths["full"] / "a").write_text("x")
    paths["pipe"] = folder / "pipe.jsonl"
    os.mkfifo(paths["pipe"])
    (paths["nomodel"] / "config.json").write_text('{"model_type": "llama"}')
    (paths["halfrun"] / "manifest.json").write_text("{}")
    (paths["emptyrun"] / "manifest.json").write_text("{}")
    (paths["emptyrun"] / "config.yaml").write_text(Path(TINY).read_text())
    (paths["emptyrun"] / "lock").write_text("")
    return paths


def test_there_are_well_over_sixty_cases():
    tables: list[dict[str, Any]] = [OVERRIDES, FILES, SPECS, ROWS, REWARDS, COMMANDS]
    assert sum(map(len, tables)) >= 140


def test_what_is_named_like_a_secret_is_refused_and_its_value_is_not_repeated():
    secrets = {"api_key", "key", "openaiApiKey", "token", "hf_token", "access-token", "password", "client_secret"}
    harmless = {"stop_token", "eos_token", "max_tokens", "answer_key", "tokenizer", "api_key_env", "secretary"}
    options = dict.fromkeys(secrets | harmless, "v4lue")
    assert set(secret_names(options)) == secrets
    assert {name for name, value in mask_options(options).items() if value != "v4lue"} == secrets
    assert list(secret_names({"math": {"auth": {"password": "x"}}})) == ["math.auth.password"]
    assert list(secret_names({"api_key": "", "token": 3, "password": None})) == []
    with pytest.raises(ConfigError) as caught:
        build_config(BASE, ["reward.options.api_key=v4lue"])
    assert "v4lue" not in str(caught.value)
