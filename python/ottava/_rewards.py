"""Reward functions of a script, called while the program trains.

The program starts `_reward_client.py` as the command of a reward (docs/rewards.md). The client passes each request on to this process, by a socket whose
path is in a variable. So the settings of a run do not depend on the process, and the run resumes in another one.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import socketserver
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from .callbacks import TrainerState

VARIABLE = "OTTAVA_PYTHON_REWARDS"
CLIENT = str(Path(__file__).resolve().with_name("_reward_client.py"))
COMPLETIONS = 64
LONGEST_SECONDS = 86_400.0


def named_functions(functions: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The functions by their names. A second function with a name gets a number. Errors with ValueError if one is no plain function."""
    named: dict[str, Callable[..., Any]] = {}
    for function in functions:
        if hasattr(function, "forward") and hasattr(function, "parameters"):
            raise ValueError(f"`reward_funcs`: a {type(function).__name__} is a model; pass its folder, which the program loads by itself")
        if inspect.iscoroutinefunction(function) or not callable(function):
            raise ValueError(f"`reward_funcs`: {function!r} is no plain function, no path of a reward model and no table of a reward")
        name = getattr(function, "__name__", type(function).__name__)
        numbers = (f"{name}-{number}" for number in range(2, len(functions) + 2))
        named[next(free for free in (name, *numbers) if free not in named)] = function
    return named


def table(name: str, group: int) -> dict[str, Any]:
    """The reward of the settings that calls the function `name` for whole groups of completions."""
    return {
        "type": "command", "name": name, "command": [sys.executable, CLIENT, name], "batch_size": group * max(1, COMPLETIONS // group),
        "timeout": LONGEST_SECONDS, "attempts": 1,
    }  # fmt: skip


class RewardServer:
    """Answers the requests of clients with the functions, one request at a time."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], state: TrainerState):
        self.functions = functions
        self.state, self.lock = state, threading.Lock()
        self.failure: BaseException | None = None
        self.has_warned = False
        # The path of a socket has at most about a hundred bytes.
        self.folder = tempfile.TemporaryDirectory(prefix="ottava-", dir="/tmp")
        rewards = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                name = self.rfile.readline().decode().strip()
                for line in self.rfile:
                    self.wfile.write(rewards.answer(name, line))
                    self.wfile.flush()

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self.path = os.path.join(self.folder.name, "rewards")
        self.server = Server(self.path, Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        return {VARIABLE: self.path}

    def answer(self, name: str, line: bytes) -> bytes:
        request = json.loads(line)
        reply: dict[str, Any]
        try:
            with self.lock:
                rewards, metrics = self.score(self.functions[name], request["samples"])
            reply = {"rewards": rewards, "metrics": metrics}
        except BaseException as error:  # noqa: BLE001
            self.failure = self.failure or error
            reply = {"error": f"the reward function `{name}` raised {type(error).__name__}: {error}"}
        return json.dumps({"id": request["id"], **reply}).encode() + b"\n"

    def score(self, function: Callable[..., Any], samples: list[dict[str, Any]]) -> tuple[list[float | None], dict[str, float]]:
        """The rewards of samples, and the metrics that the function logs. The function is called as TRL calls it: with lists of prompts, completions and
        columns of the data.
        """
        records = [sample.get("record") or {} for sample in samples]
        columns = dict.fromkeys(key for record in records for key in record)
        arguments: dict[str, Any] = {key: [record.get(key) for record in records] for key in columns}
        metrics: dict[str, list[float]] = {}
        arguments["prompts"] = [sample["prompt"] for sample in samples]
        arguments["completions"] = [completion_of(sample) for sample in samples]
        arguments["completion_ids"] = [sample["completion_ids"] for sample in samples]
        # The state of this process may be some steps older than the completions.
        arguments["trainer_state"] = dataclasses.replace(self.state, global_step=samples[0]["step"])
        arguments["log_metric"] = lambda name, value: metrics.setdefault(name, []).append(float(value))
        arguments["log_extra"] = self.ignore_columns
        for name in ("prompt", "completion"):
            arguments.pop(name, None)
        scores = list(function(**arguments))
        if len(scores) != len(samples):
            raise ValueError(f"{len(scores)} rewards were returned for {len(samples)} completions")
        return [score_of(score) for score in scores], {name: sum(values) / len(values) for name, values in metrics.items()}

    def ignore_columns(self, column: str, values: Any) -> None:
        """The `log_extra` of TRL."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn("`log_extra` of a reward function has no effect: runs log no table of completions", stacklevel=2)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()


def completion_of(sample: dict[str, Any]) -> Any:
    """A text, or a message of the assistant if the prompt is a list of messages."""
    text = sample["completion"]
    return text if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": text}]


def score_of(score: Any) -> float | None:
    """A reward. None and NaN say that a completion is not scored."""
    number = math.nan if score is None else float(score)
    if math.isinf(number):
        raise ValueError(f"a reward is {number}; return a finite number, or None for a completion that is not scored")
    return None if math.isnan(number) else number
