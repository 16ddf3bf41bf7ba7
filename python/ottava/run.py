"""A run of the program, as an object."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple

from ._binary import find_binary
from ._process import Training, checkpoints_of
from .callbacks import Callbacks, TrainerState
from .settings import Run


class TrainOutput(NamedTuple):
    """The end of a run: its last step, the mean loss of its steps, and its last metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class RunTrainer:
    """A run by the settings of its file. Errors with ValueError if the settings have no `output_dir`."""

    def __init__(self, run: Run, *, callbacks: Iterable[Any] | None = None):
        if not run.output_dir:
            raise ValueError("`output_dir` of the settings is missing")
        folder = os.path.expanduser(run.output_dir)
        self.prepare(folder, dataclasses.replace(run, output_dir=folder).toml(), run, state_of(run, {}, 1.0), callbacks)

    def prepare(self, folder: str, toml: str, args: Any, state: TrainerState, callbacks: Iterable[Any] | None) -> None:
        """Sets the run up: the text of its file, and its callbacks."""
        # A script may change its folder before the run starts, or while it runs. Relative paths start from the folder of now.
        self.cwd, self.binary = os.getcwd(), os.path.abspath(find_binary())
        self.folder, self.toml, self.args, self.state = Path(self.cwd, folder), toml, args, state
        self.described = self.description()
        self.result: Mapping[str, Any] = {}
        self.callbacks = Callbacks(callbacks or [], args, state)
        self.callbacks.call("on_init_end")

    def description(self) -> Any:
        """What the arguments say. A change after the trainer was created would have no effect."""
        return self.args.toml() if isinstance(self.args, Run) else (self.args.translated(), self.args.settings.toml())

    def add_callback(self, callback: Any) -> None:
        """Adds a callback."""
        self.callbacks.add(callback)

    def environment(self) -> dict[str, str]:
        """Variables of the program."""
        return {}

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None, *, gpus: int | None = None) -> TrainOutput:
        """Trains until the end, and returns the last metrics. `gpus` are GPUs of this machine; the default is one.

        `resume_from_checkpoint` is True for the newest checkpoint of the run, or the folder of a checkpoint. Errors with
        [`OttavaError`](ottava.OttavaError) and the text of the program if the run fails.
        """
        if self.description() != self.described:
            raise ValueError("`args` has changed since the trainer was created, and the run does not; create the trainer after the change")
        self.folder.mkdir(parents=True, exist_ok=True)
        # The file has its name once the run has begun, so a refused start changes nothing. Each rank of a launcher has such a file, with the same text.
        file = self.folder / f".trainer-{secrets.token_hex(8)}.part"
        try:
            file.write_text(self.toml, "utf-8")
            return self.train_by(file, resume_from_checkpoint, gpus)
        finally:
            file.unlink(missing_ok=True)

    def train_by(self, file: Path, resume_from_checkpoint: bool | str | os.PathLike[str] | None, gpus: int | None) -> TrainOutput:
        arguments = [str(file)]
        if resume_from_checkpoint:
            arguments.append("--resume" if resume_from_checkpoint is True else f"--resume={os.path.abspath(os.path.expanduser(resume_from_checkpoint))}")
        if gpus is not None:
            arguments += ["--gpus", str(gpus)]
        began = time.monotonic()
        # Of older steps, callbacks have heard before. A new run also has step 0, the evaluation before training.
        heard = self.step_of(resume_from_checkpoint) if resume_from_checkpoint else -1
        training = Training(self.folder, file, arguments, self.callbacks, self.environment(), heard, self.cwd, self.binary)
        self.result = training.follow()
        return self.finish(training, time.monotonic() - began)

    def step_of(self, checkpoint: bool | str | os.PathLike[str]) -> int:
        """The step of a checkpoint that a run resumes from."""
        if isinstance(checkpoint, bool):
            return max(checkpoints_of(self.folder), default=0)
        number = Path(checkpoint).name.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def finish(self, training: Training, seconds: float) -> TrainOutput:
        losses, steps = training.losses, len(training.losses)
        metrics: dict[str, Any] = {key: value for key, value in self.last_evaluation().items() if key not in ("step", "epoch")}
        metrics["train_runtime"] = seconds
        metrics["train_steps_per_second"] = steps / seconds
        metrics["train_loss"] = sum(losses) / steps if steps else float("nan")
        if self.state.epoch is not None:
            metrics["epoch"] = self.state.epoch
        best = self.result.get("best_checkpoint")
        self.state.best_model_checkpoint = os.path.join(self.cwd, best) if best else None
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self.callbacks.call("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def last_evaluation(self) -> dict[str, Any]:
        """The last evaluation in the log, with `step`; {} if there is none."""
        evaluations = (entry for entry in reversed(self.state.log_history) if "eval_loss" in entry and "train_runtime" not in entry)
        return dict(next(evaluations, {}))

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Copies the model of the last checkpoint (the best one, with `load_best_model_at_end`) into a folder, by default `output_dir`. Only on rank 0."""
        if not self.state.is_world_process_zero:
            return
        steps = checkpoints_of(self.folder)
        if not steps:
            raise ValueError("there is no model to save: the run has saved no checkpoint")
        checkpoint = self.state.best_model_checkpoint or self.folder / "checkpoints" / f"checkpoint-{max(steps)}"
        folder = Path(output_dir).expanduser() if output_dir is not None else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(checkpoint).iterdir():
            # The state of the training, and the hashes of all files of the checkpoint, are no parts of a model.
            if path.is_file() and path.name != "manifest.json":
                copy = folder / path.name
                # A run has links to the weights of its newest checkpoint there.
                if copy.is_symlink():
                    copy.unlink()
                shutil.copy2(path, copy)


def state_of(run: Run, arguments: Mapping[str, Any], epochs: float) -> TrainerState:
    """The state of a run before its start. `epochs` are the passes over the data without a setting."""
    training, logging = run.training, run.logging
    steps = training.max_steps if training and training.max_steps is not None else arguments.get("max_steps", -1)
    if training and training.num_train_epochs is not None:
        epochs = training.num_train_epochs
    return TrainerState(
        num_train_epochs=float(arguments.get("num_train_epochs", epochs)) if steps < 0 else None,
        logging_steps=logging.logging_steps if logging and logging.logging_steps else arguments.get("logging_steps", 10),
        is_world_process_zero=os.environ.get("RANK", "0") == "0", is_local_process_zero=os.environ.get("LOCAL_RANK", "0") == "0",
    )  # fmt: skip
