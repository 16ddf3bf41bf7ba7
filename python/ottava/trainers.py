"""The trainers of TRL, whose runs are runs of `ottava train`."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

from ._arguments import LoraConfig, TrainerConfig, refuse_twice, translate
from ._data import files_of
from ._defaults import COMMON, DPO, GRPO, KTO, REWARD, SFT
from ._rewards import RewardServer, named_functions, table
from ._table import merged
from .callbacks import early_stopping
from .run import RunTrainer, TrainOutput, state_of


class SFTConfig(TrainerConfig):
    """Arguments of TRL's SFTConfig."""

    trl = {**COMMON, **SFT}
    defaults = {"save_total_limit": 0}


class DPOConfig(TrainerConfig):
    """Arguments of TRL's DPOConfig."""

    trl = {**COMMON, **DPO}
    defaults = {"save_total_limit": 0, "beta": 0.1}


class KTOConfig(TrainerConfig):
    """Arguments of TRL's KTOConfig."""

    trl = {**COMMON, **KTO}
    defaults = {"save_total_limit": 0, "beta": 0.1, "loss_type": "kto"}
    # The other records of the divergence have a fixed order. The order of the steps is another.
    neutral = {"train_sampling_strategy": ("sequential",)}


class RewardConfig(TrainerConfig):
    """Arguments of TRL's RewardConfig."""

    trl = {**COMMON, **REWARD}
    defaults = {"save_total_limit": 0, "learning_rate": 1e-4, "reward_model": True}


class GRPOConfig(TrainerConfig):
    """Arguments of TRL's GRPOConfig."""

    trl = {**COMMON, **GRPO}
    defaults = {"save_total_limit": 0, "num_generations": 8, "max_completion_length": 512}


class Trainer(RunTrainer):
    """A run of the program by the arguments of one of TRL's trainers.

    `model` is a folder or a name of the Hub. `train_dataset` and `eval_dataset` are a data set of the library `datasets`, a list of dictionaries, a path, or a
    list of paths. `processing_class` is a folder with a tokenizer, or a tokenizer of transformers. `peft_config` is a LoraConfig, also PEFT's.

    Errors with ValueError, which names the argument, if the program has no setting for it.
    """

    config: type[TrainerConfig] = TrainerConfig

    def __init__(
        self,
        model: str | os.PathLike[str],
        args: TrainerConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: Any = None,
        **unknown: Any,
    ):
        refuse_others(type(self).__name__, unknown)
        if not isinstance(model, (str, os.PathLike)):
            raise ValueError(f"`model` is a {type(model).__name__}; pass the folder or the name of the model, which the program loads by itself")
        if train_dataset is None:
            raise ValueError("`train_dataset` is missing")
        model = os.path.expanduser(model)
        args = args if args is not None else self.config(f"{model.rstrip('/').split('/')[-1]}-{self.kind()}")
        if not isinstance(args, self.config):
            raise ValueError(f"`args` is a {type(args).__name__}, and {type(self).__name__} takes a {self.config.__name__}")
        adapters = LoraConfig.of(peft_config).translated() if peft_config is not None else {}
        given = {"model_name_or_path": model, **args.translated(), **adapters}
        keys = dict(given)
        folder = Path(args.output_dir) / "data"
        files = {"data.train_files": ("train_dataset", train_dataset), "data.val_files": ("eval_dataset", eval_dataset)}
        named = {key: files_of(name, data, folder) for key, (name, data) in files.items() if data is not None}
        others, overrides = early_stopping(callbacks or [])
        overrides |= {key: paths for key, (paths, _) in named.items()}
        if processing_class is not None:
            overrides["model.tokenizer"] = tokenizer(processing_class, folder)
        overrides |= self.adjust(keys, named["data.train_files"][1])
        if eval_dataset is not None:
            # Arguments that need validation data are checked with a name, which the files of the script replace.
            keys |= {"dataset_name": "the/data", "dataset_test_split": "test"}
        toml = translate(self.config.__name__, keys)
        if list(args.settings.items()):
            default = self.config(args.output_dir).translated()
            of_columns = {name: value for name, value in keys.items() if name not in given}
            without = translate(self.config.__name__, {**default, **of_columns, "model_name_or_path": "a/model"})
            refuse_twice(type(self).__name__, args.settings, toml, without, overrides)
        settings = {**overrides, **{key: value for key, value in args.settings.items() if key != "output_dir"}}
        self.prepare(args.output_dir, merged(toml, settings), args, state_of(args.settings, args.arguments, 3.0), others)

    @classmethod
    def kind(cls) -> str:
        return cls.__name__.replace("Trainer", "")

    def adjust(self, keys: dict[str, Any], columns: set[str]) -> dict[str, Any]:
        """Changes the keys by what the columns of the data are, and returns settings that no key has."""
        return {}


class SFTTrainer(Trainer):
    """Fine-tunes on texts, chats, or prompts with completions."""

    config = SFTConfig

    def adjust(self, keys: dict[str, Any], columns: set[str]) -> dict[str, Any]:
        # What TRL counts in the loss depends on the columns. Of paths, the program's own rule holds: answers count, prompts do not.
        if {"prompt", "completion"} <= columns:
            keys.setdefault("completion_only_loss", True)
            unused = "assistant_only_loss"
        else:
            if columns & {"messages", "conversations"}:
                keys.setdefault("assistant_only_loss", False)
            unused = "completion_only_loss"
        if columns and keys.get(unused) is False:
            del keys[unused]
        return {}


class DPOTrainer(Trainer):
    """Trains on pairs of preferences. The reference model is the model that the run starts from."""

    config = DPOConfig


class KTOTrainer(Trainer):
    """Trains on completions with labels. The reference model is the model that the run starts from."""

    config = KTOConfig


class RewardTrainer(Trainer):
    """Trains a reward model on pairs of preferences, from a language model or a reward model."""

    config = RewardConfig


class GRPOTrainer(Trainer):
    """Reinforcement learning. A reward is a function, which is called as TRL calls it, the folder of a reward model, or a table of docs/rewards.md."""

    config = GRPOConfig

    def __init__(self, model: str | os.PathLike[str], reward_funcs: Any, args: TrainerConfig | None = None, **others: Any):
        is_one = reward_funcs is None or callable(reward_funcs) or isinstance(reward_funcs, (str, os.PathLike, Mapping))
        self.reward_funcs: Sequence[Any] = [reward_funcs] if is_one else list(reward_funcs)
        if not self.reward_funcs:
            raise ValueError("`reward_funcs` has no reward")
        functions = [reward for reward in self.reward_funcs if not isinstance(reward, (str, os.PathLike, Mapping))]
        self.functions = named_functions(functions)
        super().__init__(model, args, **others)

    def adjust(self, keys: dict[str, Any], columns: set[str]) -> dict[str, Any]:
        group = keys["num_generations"]
        functions = iter(self.functions)
        rewards = [reward_of(reward, group, functions) for reward in self.reward_funcs]
        weights = keys.pop("reward_weights", None) or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            raise ValueError(f"GRPOConfig: `reward_weights` has {len(weights)} numbers for {len(rewards)} rewards")
        for reward, weight in zip(rewards, weights):
            reward.setdefault("weight", float(weight))
        # The translated file needs some reward. The table of the rewards replaces it.
        keys["reward_funcs"] = ["a/reward"]
        return {"reinforcement.rewards": rewards}

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None, *, gpus: int | None = None) -> TrainOutput:
        self.server = RewardServer(self.functions, self.state)
        try:
            return super().train(resume_from_checkpoint, gpus=gpus)
        except RuntimeError as error:
            raise error from self.server.failure
        finally:
            self.server.close()

    def environment(self) -> dict[str, str]:
        return self.server.environment()


def reward_of(reward: Any, group: int, names: Iterator[str]) -> dict[str, Any]:
    """The table of a reward. A function has the next name."""
    if isinstance(reward, Mapping):
        return dict(reward)
    if isinstance(reward, (str, os.PathLike)):
        return {"type": "model", "path": os.path.expanduser(reward)}
    return table(next(names), group)


def tokenizer(given: Any, folder: Path) -> str:
    """The folder of a tokenizer. A tokenizer of transformers is written into a folder that is named by its content, so no earlier run changes."""
    if isinstance(given, (str, os.PathLike)):
        return os.path.expanduser(given)
    if not hasattr(given, "save_pretrained"):
        raise ValueError(f"`processing_class` is a {type(given).__name__}; pass a folder with a tokenizer, or a tokenizer of transformers")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", suffix=".part", dir=folder) as part:
        written = Path(part) / "tokenizer"
        given.save_pretrained(str(written))
        digest = hashlib.sha256()
        for path in sorted(path for path in written.rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(written)}\n{path.stat().st_size}\n".encode() + path.read_bytes())
        found = folder / f"tokenizer-{digest.hexdigest()[:16]}"
        try:
            written.rename(found)
        except OSError:
            # An earlier run or another rank has written it.
            if not found.is_dir():
                raise
    return str(found)


def refuse_others(owner: str, others: Mapping[str, Any]) -> None:
    """Errors with ValueError if an argument has a value."""
    given = [name for name, value in others.items() if value is not None and value != (None, None) and value != []]
    if given:
        raise ValueError(f"{owner} has no argument {', '.join(f'`{name}`' for name in given)}: a run has files and settings, no objects of Python")
