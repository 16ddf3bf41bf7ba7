"""Ottava from Python: trainers by the names of TRL, and the settings of a run as dataclasses. The program `ottava` trains, in a process of its own.

    from ottava import LoraConfig, SFTConfig, SFTTrainer

    adapters = LoraConfig(r=16, target_modules="all-linear")
    SFTTrainer("Qwen/Qwen3-0.6B", SFTConfig("runs/sft", max_steps=100), train_dataset="chats.jsonl", peft_config=adapters).train()
"""

from importlib.metadata import PackageNotFoundError, version

from ._arguments import LoraConfig
from ._binary import find_binary
from ._process import OttavaError
from .callbacks import TrainerCallback, TrainerControl, TrainerState
from .run import RunTrainer, TrainOutput
from .settings import Run
from .trainers import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

try:
    __version__ = version("ottava")
except PackageNotFoundError:
    # The module of a checkout, without the metadata of a wheel.
    __version__ = "0+unknown"

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LoraConfig",
    "OttavaError",
    "RewardConfig",
    "RewardTrainer",
    "Run",
    "RunTrainer",
    "SFTConfig",
    "SFTTrainer",
    "TrainOutput",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "find_binary",
]
