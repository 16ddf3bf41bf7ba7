"""Arguments of TRL and PEFT as a run's file. `ottava import` translates them; this module only says what the values of Python mean."""

from __future__ import annotations

import enum
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, Mapping

from ._defaults import COMMON
from ._process import OttavaError, output_of
from ._table import scalar, statements, written
from .settings import Run

# Arguments of TRL that `ottava import` does not know, at the values that ask for what every run does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "shuffle_dataset": (False,), "train_sampling_strategy": ("random",), "use_cache": (False,), "disable_dropout": (True, False),
    "eval_delay": (0,), "prediction_loss_only": (False, True), "include_for_metrics": ([],), "batch_eval_metrics": (False,),
    "eval_do_concat_batches": (True,), "eval_use_gather_object": (False,), "save_on_each_node": (False,), "enable_jit_checkpoint": (False,),
    "log_on_each_node": (True, False), "log_level_replica": ("warning",), "skip_memory_metrics": (True,), "length_column_name": ("length",),
    "restore_callback_states_from_checkpoint": (False,), "local_rank": (-1,), "use_adaptive_entropy": (False,),
    "entropy_coef_min": (0.0,), "entropy_coef_max": (1.0,), "entropy_coef_delta": (0.005,), "entropy_target": (0.2,),
}  # fmt: skip
# The same of PEFT.
NEUTRAL_OF_ADAPTERS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True,), "inference_mode": (False,), "peft_type": ("LORA",), "lora_bias": (False,), "use_qalora": (False,),
    "task_type": ("CAUSAL_LM", "SEQ_CLS"), "ensure_weight_tying": (False,), "layer_replication": ([],), "trainable_token_indices": ([], {}),
    "megatron_core": ("megatron.core",), "loftq_config": ({},), "exclude_modules": ([],), "rank_pattern": ({},), "alpha_pattern": ({},),
    "use_rslora": (False,), "use_dora": (False,), "fan_in_fan_out": (False,), "runtime_config": ({"ephemeral_gpu_offload": False},),
}  # fmt: skip

DTYPES = {"dtype", "torch_dtype"}


class TrainerConfig:
    """Arguments by the names of TRL. `settings` are further settings, of which TRL has no argument, such as the recipe of FP8.

    An argument can be assigned until a trainer is created. An argument without a value reads as TRL's default.
    """

    # What TRL's trainer has without the argument, where the translated file would have something else.
    defaults: Mapping[str, Any] = {}
    # More arguments at values that ask for what every run of this trainer does.
    neutral: Mapping[str, tuple[Any, ...]] = {}
    # The defaults of TRL.
    trl: Mapping[str, Any] = COMMON

    output_dir: str
    settings: Run
    arguments: dict[str, Any]

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, *, settings: Run | None = None, **arguments: Any):
        self.arguments = {}
        self.output_dir = "trainer_output" if output_dir is None else os.fspath(output_dir)
        self.settings = Run() if settings is None else settings
        for name, value in arguments.items():
            setattr(self, name, value)
        self.check_folder()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "output_dir":
            if not os.fspath(value):
                raise ValueError("`output_dir` is empty; name the folder of the run")
            value = os.path.expanduser(value)
        if name == "settings" and not isinstance(value, Run):
            raise ValueError(f'`settings` is a {type(value).__name__}; write a Run, such as Run(precision=Precision(recipe="fp8-delayed"))')
        if name in ("output_dir", "settings", "arguments"):
            super().__setattr__(name, value)
        elif value is not None:
            self.arguments[name] = plain(value)
        elif name == "max_length":
            raise ValueError("`max_length` is None: rows have a length; write the number of tokens of the longest document")
        elif self.trl.get(name) is not None and name != "report_to":
            raise ValueError(f"{type(self).__name__}: `{name}` is None; write a value, or leave the argument out for TRL's default, {self.trl[name]!r}")
        else:
            self.arguments.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("output_dir", "settings", "arguments"):
            raise AttributeError(name)
        if name in self.arguments:
            return self.arguments[name]
        if name == "bf16":
            return not self.fp16
        if name in self.trl:
            return self.trl[name]
        raise AttributeError(f"{type(self).__name__} has no argument `{name}`")

    def check_folder(self) -> None:
        other = self.settings.output_dir
        if other is not None and os.path.expanduser(other) != self.output_dir:
            raise ValueError("`settings.output_dir` is another folder than `output_dir`; leave it out")

    def translated(self) -> dict[str, Any]:
        """The arguments as keys of a file of TRL."""
        self.check_folder()
        keys = {**self.defaults, **self.arguments, "output_dir": self.output_dir}
        keys = {name: value for name, value in keys.items() if value not in NEUTRAL.get(name, ()) + tuple(self.neutral.get(name, ()))}
        if "model_init_kwargs" in keys and (self.bf16 or self.fp16):
            # Weights in F32 are the master weights, which every run has. The switches say in which type TRL computes.
            keys["model_init_kwargs"] = {name: value for name, value in keys["model_init_kwargs"].items() if name not in DTYPES or value != "float32"}
        if DTYPES & set(keys.get("ref_model_init_kwargs", {})):
            raise ValueError(f"{type(self).__name__}: `ref_model_init_kwargs.dtype`: the reference model has the type of the model; leave the argument out")
        if keys.get("bf16") is False and not keys.get("fp16"):
            # Without both switches, TRL computes in the type of the weights.
            del keys["bf16"]
            keys["fp32"] = True
        # Only packed rows have a strategy, and a strategy says by itself that rows are packed.
        keys.pop("packing" if keys.get("packing") and "packing_strategy" in keys else "packing_strategy", None)
        if keys.get("eval_strategy") == "steps":
            keys.setdefault("eval_steps", keys.get("logging_steps", 10))
        return keys


def plain(value: Any) -> Any:
    """`value` as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value).rpartition(".")[2]
    return scalar(value)


def translate(owner: str, keys: Mapping[str, Any]) -> str:
    """The TOML of a run for the keys of a file of TRL.

    Errors with ValueError if Ottava has no setting for a key, and with [`OttavaError`] if the objective is not known. Warns of keys that have no effect.
    """
    with tempfile.TemporaryDirectory(prefix="ottava-") as folder:
        path = Path(folder) / f"{owner}.json"
        try:
            path.write_text(json.dumps(keys, indent=0), "utf-8")
        except TypeError as error:
            raise ValueError(f"{owner}: an argument is no number, text, list or table: {error}") from None
        try:
            found = json.loads(output_of("import", str(path), "--json"))
        except OttavaError as error:
            raise ValueError(str(error).replace(str(path), owner)) from None
    problems = [reason_of(owner, note) for note in found["refused"]]
    if not found["toml"].splitlines()[0].endswith(" of TRL by `ottava import`."):
        problems.append(f"{owner}: the arguments are of several trainers; write TRL's names")
    if problems:
        raise ValueError("\n".join(problems))
    for note in found["needless"]:
        name = name_of(note)
        if keys.get(name.split(".")[0]) not in (False, None, "no", "none", [], {}):
            warnings.warn(reason_of(owner, note), stacklevel=4)
    return str(found["toml"]).replace(str(path), owner)


def refuse_twice(owner: str, settings: Run, toml: str, default: str, others: Mapping[str, Any]) -> None:
    """Errors with ValueError if a setting has one value in `settings` and another value by an argument. `toml` is the translated file, `default` is the
    translated file without the arguments of the script, and `others` are settings by objects, such as data sets.
    """
    given, without = keys_of(toml), keys_of(default)
    for key, value in settings.items():
        is_given = key in given and given[key] != without.get(key) and not is_same(given[key], written(value))
        if key != "output_dir" and (is_given or key in others):
            raise ValueError(f"{owner}: `settings` and an argument both set `{key}`; leave one of them out")


def is_same(one: str, other: str) -> bool:
    """Whether two values of TOML are equal, also as numbers."""
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def keys_of(toml: str) -> dict[str, str]:
    """The settings of a translated file, with their values. A line with a comment is a default, or is made of several arguments."""
    found, table = {}, ""
    for line in statements(toml):
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif " = " in line and "  # " not in line:
            name, _, value = line.partition(" = ")
            found[table + name] = value
    return found


NOTE = re.compile(r"^.*?\.json:(?:\d+:)? `([^`]+)`: (.*)$", re.DOTALL)


def name_of(note: str) -> str:
    found = NOTE.match(note)
    return found[1] if found else note


def reason_of(owner: str, note: str) -> str:
    """A note of `ottava import` without its file."""
    found = NOTE.match(note)
    return f"{owner}: `{found[1]}`: {found[2]}" if found else f"{owner}: {note}"


class LoraConfig:
    """Adapters, by the names of PEFT's LoraConfig and with its defaults. PEFT chooses `target_modules` by the family of a model; here it is required."""

    arguments: dict[str, Any]
    # PEFT's names, for which a file of TRL has others.
    names = {"modules_to_save": "lora_modules_to_save", "fan_in_fan_out": "lora_fan_in_fan_out", "target_parameters": "lora_target_parameters"}

    def __init__(self, r: int = 8, target_modules: Any = None, lora_alpha: float = 8, **arguments: Any):
        super().__setattr__("arguments", {})
        for name, value in {"r": r, "target_modules": target_modules, "lora_alpha": lora_alpha, **arguments}.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "r" and (value is None or value < 1):
            raise ValueError(f"LoraConfig: `r` is {value}, and adapters have a rank of 1 or more")
        self.arguments[name] = plain(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "arguments" or name not in self.arguments:
            raise AttributeError(f"LoraConfig has no argument `{name}`")
        return self.arguments[name]

    @classmethod
    def of(cls, config: Any) -> LoraConfig:
        """`config`, which may also be a LoraConfig of PEFT."""
        if isinstance(config, cls):
            return config
        if type(config).__name__ != "LoraConfig" or not hasattr(config, "to_dict"):
            raise ValueError(f"`peft_config`: {type(config).__name__} is no LoraConfig; adapters are LoRA's")
        # What PEFT notes of itself, and a size that only `use_qalora` reads.
        return cls(**{name: value for name, value in config.to_dict().items() if name not in ("peft_version", "qalora_group_size")})

    def translated(self) -> dict[str, Any]:
        """The arguments as keys of a file of TRL."""
        if not self.arguments["target_modules"]:
            raise ValueError('LoraConfig: name `target_modules`, such as "all-linear" or ["q_proj", "v_proj"]')
        keys: dict[str, Any] = {"use_peft": True, "lora": {}}
        for name, value in self.arguments.items():
            if value is None or value in NEUTRAL_OF_ADAPTERS.get(name, ()):
                continue
            if name in self.names:
                keys[self.names[name]] = value
            else:
                keys["lora"][name] = value
        return keys
