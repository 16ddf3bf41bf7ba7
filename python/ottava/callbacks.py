"""What a script learns about a run: callbacks, the state of the run, and its log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable

EVENTS = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


class TrainerCallback:
    """A base of callbacks. Each method gets the arguments, the state and the control of the run, and may return the control.

    The program trains in its own process: a callback hears of a step when the step is over, and the run does not wait for the callback.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the trainer was created."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before the first step of this start of the run."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After each step."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After every `logging_steps` steps; `logs` has the metrics, means over these steps."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After each evaluation; `metrics` has its results. Every run with validation data evaluates before its first step and after its last."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """When a checkpoint is complete; `state.global_step` is its step."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the end of the run."""


@dataclass
class TrainerState:
    """Where a run is."""

    global_step: int = 0
    """The last step."""
    max_steps: int = 0
    """All steps of the run; 0 before the program has counted them."""
    epoch: float | None = None
    """Passes over the data so far; None if the run has a number of steps."""
    num_train_epochs: float | None = None
    """All passes over the data; None if the run has a number of steps."""
    logging_steps: int = 10
    """Steps between two entries of `log_history`."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """The logs and evaluations, each with `step`."""
    best_model_checkpoint: str | None = None
    """The best checkpoint, after a run with `load_best_model_at_end`."""
    is_world_process_zero: bool = True
    """Whether this process is rank 0."""
    is_local_process_zero: bool = True
    """Whether this process is rank 0 of its machine."""


@dataclass
class TrainerControl:
    """What a callback asks of a run. Only a stop can be asked."""

    should_training_stop: bool = False
    """Ends the run after the step in progress, with a checkpoint."""
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class Callbacks:
    """The callbacks of a trainer."""

    def __init__(self, callbacks: Iterable[Any], args: Any, state: TrainerState):
        self.args, self.state, self.control = args, state, TrainerControl()
        self.list: list[Any] = []
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Adds a callback, or a callback of a class. Errors with ValueError if it waits for an event that no run has."""
        callback = callback() if isinstance(callback, type) else callback
        if is_early_stopping(callback):
            raise ValueError("EarlyStoppingCallback is a setting of a run: pass it to a trainer of TRL's names, or set `evaluation.early_stopping_patience`")
        for name in dir(callback):
            is_method = name.startswith("on_") and callable(getattr(callback, name))
            # A run predicts nothing, so on_predict is never missed.
            if is_method and name not in (*EVENTS, "on_predict") and not is_of_base(callback, name):
                raise ValueError(f"{type(callback).__name__}.{name}: runs have no such event; the events are {', '.join(EVENTS)}")
        self.list.append(callback)

    def call(self, event: str, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Calls all callbacks. Errors with ValueError if a callback asks for something that a run cannot do."""
        for callback in self.list:
            method = getattr(callback, event, None)
            answer = method(self.args, state or self.state, self.control, **kwargs) if method else None
            self.control = self.control if answer is None else answer
            for wish in ("should_epoch_stop", "should_save", "should_evaluate", "should_log"):
                if getattr(self.control, wish, False):
                    setattr(self.control, wish, False)
                    raise ValueError(
                        f"{type(callback).__name__}.{event} sets `control.{wish}`: a run that trains can only be stopped; set `save_steps`, "
                        "`eval_steps` and `logging_steps` before the run"
                    )


def is_of_base(callback: Any, name: str) -> bool:
    """Whether the method `name` is the empty one of a base class called TrainerCallback."""
    owner = next((base for base in type(callback).__mro__ if name in vars(base)), None)
    return owner is not None and owner.__name__ == "TrainerCallback"


def is_early_stopping(callback: Any) -> bool:
    """Whether the callback is the EarlyStoppingCallback of transformers."""
    return type(callback).__name__ == "EarlyStoppingCallback" and hasattr(callback, "early_stopping_patience")


def early_stopping(callbacks: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The callbacks without an EarlyStoppingCallback, and the settings that do the same."""
    made = [callback() if isinstance(callback, type) else callback for callback in callbacks]
    settings: dict[str, Any] = {}
    for callback in filter(is_early_stopping, made):
        settings["evaluation.early_stopping_patience"] = callback.early_stopping_patience
        settings["evaluation.early_stopping_threshold"] = float(callback.early_stopping_threshold or 0.0)
    return [callback for callback in made if not is_early_stopping(callback)], settings
