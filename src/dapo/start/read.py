"""The third step of a start: reads the model, and checks that the data fits it, before anything is
written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from dapo.config import Config, ModelConfig
from dapo.config.lengths import length_as_sum, lower_lengths
from dapo.config.training_options import TrainConfig
from dapo.core.errors import ConfigError, DataError
from dapo.data.prompts import PromptEncoder, TurnEnd
from dapo.data.sources.rows import prompt_text
from dapo.distributed.launch import use_expandable_segments
from dapo.environments.agents.pool import AgentPool
from dapo.environments.pool import EnvironmentPool
from dapo.policy.gpu_layers import layer_notes
from dapo.policy.model import (
    LoadedModel,
    device_of,
    load_model,
    load_teacher,
    require_same_vocabulary,
)
from dapo.policy.varlen_attention import padded_attention_notes
from dapo.start.check import UserCode
from dapo.start.episodes import AgentEpisodes, Episodes, episodes_of
from dapo.start.resolve import Resolved, device_for_inputs, resolve_engine
from dapo.start.rows import RunData
from dapo.training.demonstrations import Answer, AnswerEncoder, encode_answers
from dapo.training.teacher_server import teacher_server
from dapo.types import Problem


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a run, from which it is built without asking the options again."""

    config: Config  # resolved for this machine and this model
    code: UserCode
    loaded: LoadedModel
    encoder: PromptEncoder
    train: list[Problem]
    held_out: list[Problem]
    notes: list[str]
    episodes: Episodes | AgentEpisodes | None = None
    # copies of each held-out problem in the file, if all problems have equally many; else 1
    copies: int = 1
    answers: Mapping[str, Answer] = field(default_factory=dict)  # of demonstrations, by id


def read(
    resolved: Resolved, data: RunData, *, on_progress: Callable[[int, int], None] | None = None
) -> Inputs:
    """Load the model, and check that the problems fit it.

    Args:
        resolved: the options for this machine, and the user's code.
        data: the problems, which `read_data` has read.
        on_progress: gets the number of prompts that are encoded, and of all.

    Raises DataError, or ConfigError.
    """
    config = resolved.config
    training = resolved.training
    problems = data.train
    held_out = data.held_out
    notes = [*data.notes]
    loaded, encoder, about_model, episodes = read_model_and_encoder(
        config, resolved.code.environment, training=training
    )
    notes += about_model
    answers: Mapping[str, Answer] = {}
    if episodes is not None:
        held_out = episodes.with_prompts(held_out)
        problems = problems if config.is_supervised else episodes.with_prompts(problems)
    notes += encoder.notes([*problems, *held_out])
    if training:
        problems = drop_long(
            problems, encoder, notes, kind="training prompts", on_progress=on_progress
        )
    if training and config.is_supervised:
        problems, answers = _encode(problems, config, loaded, encoder, notes)
    if held_out:
        held_out = drop_long(held_out, encoder, notes, kind="evaluation prompts")
    response_tokens = config.rollout.max_response_tokens
    evaluated_tokens = config.eval.max_response_tokens
    if held_out and evaluated_tokens is not None:
        response_tokens = max(response_tokens, evaluated_tokens) if training else evaluated_tokens
    # demonstrations are measured with their answers
    sampled = held_out if training and config.is_supervised else [*problems, *held_out]
    if sampled:
        require_fit(sampled, encoder, loaded, config, response_tokens)
    config = resolve_engine(config, loaded.model)
    if training and config.train.epochs is not None:
        epochs = config.train.epochs
        config = config.with_steps_of_epochs(len(problems))
        notes.append(
            f"{config.train.num_steps} steps: {len(problems):,} rows x {epochs:g} epochs /"
            f" {config.rows_per_step} rows a step; {config.optim.warmup(config.train.num_steps)} of warm-up"
        )
    return Inputs(
        config,
        resolved.code,
        loaded,
        encoder,
        problems,
        held_out,
        [*notes, *resolved.notes],
        episodes,
        data.copies,
        answers,
    )


def _encode(
    demonstrations: Sequence[Problem],
    config: Config,
    loaded: LoadedModel,
    encoder: PromptEncoder,
    notes: list[str],
) -> tuple[list[Problem], Mapping[str, Answer]]:
    """Encode the answers of demonstrations, note those left out, and return the others."""
    encode = AnswerEncoder(
        loaded.tokenizer, config.data, encoder, history=config.environment.history
    )
    limit = config.rollout.max_response_tokens
    encoded, answers, dropped = encode_answers(demonstrations, encode, max_tokens=limit)
    if dropped:
        notes.append(f"{dropped} demonstrations left out: longer than rollout.max_response_tokens")
    encoded = _with_positions(encoded, answers, loaded, encoder, notes)
    if len({prompt_text(demonstration.prompt) for demonstration in encoded}) == 1 < len(encoded):
        notes.append(f"all {len(encoded)} demonstrations answer the same problem")
    return encoded, answers


def _with_positions(
    demonstrations: Sequence[Problem],
    answers: Mapping[str, Answer],
    loaded: LoadedModel,
    encoder: PromptEncoder,
    notes: list[str],
) -> list[Problem]:
    """Leave out demonstrations with more tokens than the model has positions; note their number.

    Raises DataError if all have more.
    """
    limit = positions_of(loaded)
    if limit is None:
        return list(demonstrations)
    fitting = []
    for demonstration in demonstrations:
        answer = answers[demonstration.id]
        if encoder.length(demonstration) + len(answer.token_ids) <= limit:
            fitting.append(demonstration)
    dropped = len(demonstrations) - len(fitting)
    if demonstrations and not fitting:
        raise DataError(
            f"all {dropped:,} demonstrations, prompt and response together, are longer than the"
            f" {limit} positions of {loaded.name}"
        )
    if dropped:
        notes.append(
            f"{dropped} demonstrations left out: longer than the {limit} positions of {loaded.name}"
        )
    return fitting


def positions_of(loaded: LoadedModel) -> int | None:
    """Return the tokens of the longest sequence of a model; None if its files name no limit."""
    return getattr(loaded.model.config, "max_position_embeddings", None)


def drop_long(
    problems: Sequence[Problem],
    encoder: PromptEncoder,
    notes: list[str],
    *,
    kind: str = "prompts",
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Drop problems with prompts above `data.max_prompt_tokens`, and note their number."""
    short_problems, dropped = encoder.split_by_length(problems, on_progress=on_progress)
    if dropped:
        notes.append(f"{dropped} {kind} left out: longer than data.max_prompt_tokens")
    return short_problems


def require_fit(
    problems: Sequence[Problem],
    encoder: PromptEncoder,
    loaded: LoadedModel,
    config: Config,
    response_tokens: int,
) -> None:
    """Check that the longest prompt and a response, or an episode, have room in the model.

    Args:
        problems: the problems, whose prompts are encoded.
        encoder: encodes them.
        loaded: the model.
        config: the options, with the observations of an episode.
        response_tokens: the most tokens that are sampled for one response.

    Raises ConfigError with the terms of the sum, and the largest one to lower.
    """
    sampled_tokens = response_tokens
    response_tokens += config.max_observed_tokens
    limit = positions_of(loaded)
    if limit is None:
        return
    prompt_tokens = encoder.measure(problems, above=limit - response_tokens)
    if prompt_tokens + response_tokens <= limit:
        return
    if not config.max_observed_tokens:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens and a response of {response_tokens} exceed the"
            f" {limit} positions of {loaded.name}; lower rollout.max_response_tokens (or"
            " eval.max_response_tokens) or data.max_prompt_tokens"
        )
    raise ConfigError(
        f"a prompt of {prompt_tokens} tokens and an episode of {response_tokens} exceed the {limit}"
        f" positions of {loaded.name}; {length_as_sum(config, sampled_tokens)};"
        f" {lower_lengths(config, sampled_tokens, prompt_tokens)}"
    )


def read_model_and_encoder(
    config: Config, environment: EnvironmentPool | AgentPool | None, *, training: bool
) -> tuple[LoadedModel, PromptEncoder, list[str], Episodes | AgentEpisodes | None]:
    """Load the model, its stop ids, prompt encoder and notes, and render the environment.

    The last is None without `environment`. Raises ConfigError or DataError.
    """
    assert (environment is None) != config.plays_episodes, "the environment is started"
    if training and not config.uses_trainer_group and config.train.device == "cuda":
        use_expandable_segments(config)
    loaded = read_model(config.model, config.train, device_for_inputs(config, training=training))
    episodes: Episodes | AgentEpisodes | None = None
    if environment is None:
        encoder = PromptEncoder(loaded.tokenizer, config.data)
    else:
        positions = positions_of(loaded)
        episodes = episodes_of(config, loaded.tokenizer, environment, positions=positions)
        encoder = episodes.encoder
    notes = turn_end_notes(loaded.tokenizer, loaded.stop_ids, encoder.turn_end)
    if training and config.has_kl and config.loss.has_teacher:
        notes += teacher_notes(config, loaded)
    if training:
        # a controller may have no GPU itself
        device = (
            device_of(config.train.device) if config.train.device == "auto" else config.train.device
        )
        if device == "cuda" and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
        else:
            capability = None
        dtype = getattr(torch, config.model.dtype)
        notes += padded_attention_notes(dtype, device, capability)
        notes += layer_notes(device)
    return stop_at_turn_end(loaded, encoder), encoder, notes, episodes


def teacher_notes(config: Config, loaded: LoadedModel) -> list[str]:
    """Check that the model of `loss.reference` can score the policy's responses; note what differs.

    Its weights are not read. Raises ConfigError for another vocabulary, and for too few positions.
    """
    if config.loss.server is not None:
        teacher_server(config.loss.server).require_vocabulary(loaded.tokenizer)
        return []
    teacher = load_teacher(config, device="meta", dtype=loaded.model.dtype)
    require_same_vocabulary(loaded, teacher)
    positions = getattr(teacher.model.config, "max_position_embeddings", None)
    longest = (
        config.data.max_prompt_tokens
        + config.rollout.max_response_tokens
        + config.max_observed_tokens
    )
    if positions is not None and positions < longest:
        raise ConfigError(
            f"loss.reference.model={teacher.name} has {positions} positions, and a prompt with its"
            f" response may have {longest};"
            f" {lower_lengths(config, config.rollout.max_response_tokens, config.data.max_prompt_tokens)}"
        )
    if config.loss.teacher == config.model.name:
        return [f"the teacher {teacher.name} is the model that trains: the divergence starts at 0"]
    if teacher.tokenizer.chat_template == loaded.tokenizer.chat_template:
        return []
    return [
        f"the teacher {teacher.name} has another chat template than {loaded.name}; it reads"
        f" {loaded.name}'s prompts"
    ]


def stop_at_turn_end(loaded: LoadedModel, encoder: PromptEncoder) -> LoadedModel:
    """Add the token that the chat template puts after an assistant's turn to the model's stop ids.

    Raises ConfigError if neither the model's files nor the template name a token that ends a
    response.
    """
    turn_end = encoder.turn_end.token_id if encoder.turn_end is not None else None
    stop_ids = {*loaded.stop_ids, *([] if turn_end is None else [turn_end])}
    if not stop_ids:
        raise ConfigError(
            f"model {loaded.name!r} names no end token, and its chat template puts none after an"
            " assistant's turn: set eos_token_id in its generation_config.json, or responses"
            " never end"
        )
    return replace(loaded, stop_ids=tuple(sorted(stop_ids)))


def turn_end_notes(
    tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], turn_end: TurnEnd | None
) -> list[str]:
    """Note how responses end if the template and the model's `stop_ids` differ."""
    if turn_end is None:
        return []
    end_tokens = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in stop_ids) or "none"
    if turn_end.token_id is None:
        return [
            "the chat template puts no special token after an assistant's turn, but"
            f" {turn_end.text[:40]!r}: only the end tokens of the model's files ({end_tokens}) end"
            " a response, and others may run to the length limit"
        ]
    name = repr(tokenizer.convert_ids_to_tokens(turn_end.token_id))
    notes = []
    if turn_end.token_id not in stop_ids:
        notes.append(
            f"responses also stop at {name}, which ends an assistant's turn; the model's files name"
            f" {end_tokens}"
        )
    if turn_end.text_before:
        notes.append(
            f"the chat template ends an assistant's turn with {turn_end.text[:40]!r}, no single"
            f" special token: responses stop at {name} and include the text before it"
        )
    return notes


def read_model(model: ModelConfig, train: TrainConfig, device: str) -> LoadedModel:
    """Load the model of a run; on the device `meta` without its weights."""
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    return load_model(
        model.name,
        dtype=getattr(torch, model.dtype),
        device=device,
        trust_remote_code=model.trust_remote_code,
    )


def read_model_and_prompts(config: Config, device: str) -> tuple[LoadedModel, PromptEncoder]:
    """Load the model, and encode the prompts of single responses."""
    loaded = read_model(config.model, config.train, device)
    encoder = PromptEncoder(loaded.tokenizer, config.data)
    return stop_at_turn_end(loaded, encoder), encoder
