"""Loads the model of a run, and checks its end tokens and its teacher."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.data.prompts import PromptEncoder, TurnEnd
from dapo.policy.model import (
    LoadedModel,
    device_of,
    load_model,
    load_teacher,
    require_same_vocabulary,
)
from dapo.training.teacher_server import teacher_server


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
            f" response may have {longest}; lower data.max_prompt_tokens or"
            " rollout.max_response_tokens"
        )
    if config.loss.teacher == config.model.name:
        return [f"the teacher {teacher.name} is the model that trains: the divergence begins at 0"]
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


def device_for_inputs(config: Config, *, training: bool) -> str:
    """Return the device for the controller's copy of the weights; on `meta` they take no memory.

    With engines in separate processes the controller samples nothing: in an evaluation it only
    sends the weights, and in training the policy may be elsewhere too.
    """
    if not config.engine_processes:
        return device_of(config.train.device)
    if not training:
        return "cpu"
    return "meta" if config.uses_trainer_group else device_of(config.train.device)


def read_model(config: Config, device: str) -> LoadedModel:
    """Load the config's model; on the device `meta` without its weights."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    return load_model(
        config.model.name,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        trust_remote_code=config.model.trust_remote_code,
    )
