"""Puts a run together: the only file that names concrete classes."""

import copy
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from dapo.config import Config, DataSpec, build_config, dump_config, load_config
from dapo.data.problems import load_problems, remove_overlap, spec_name, unique_problems
from dapo.data.prompts import PromptEncoder
from dapo.data.stream import ProblemStream
from dapo.engines.engine import RolloutEngine
from dapo.engines.native.engine import NativeEngine
from dapo.errors import CheckpointError, ConfigError, DapoError, DataError
from dapo.evaluation import EvaluationPlan, evaluate
from dapo.explain import resolved_verifier
from dapo.policy.model import LoadedModel, export_model, load_model
from dapo.policy.policy import Policy
from dapo.rewards.pool import VerifierPool
from dapo.rollout import DynamicSampler, sampling_plan
from dapo.run import RunDirectory, machine_manifest
from dapo.telemetry.console import ProgressDisplay, final_report
from dapo.telemetry.plots import plot_curves
from dapo.telemetry.sinks import JsonlSink, Sink, TensorBoardSink, TrackioSink, WandbSink
from dapo.telemetry.tracker import Tracker
from dapo.train import Parts, Progress, restore, summarise, train
from dapo.types import Group, Problem

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass
class Inputs:
    """What a run reads: all of it is checked before anything is written."""

    loaded: LoadedModel
    encoder: PromptEncoder
    train: list[Problem]
    held_out: list[Problem]
    notes: list[str]
