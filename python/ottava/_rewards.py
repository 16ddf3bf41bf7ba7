"""Reward functions of a script, called while the program trains.

The program starts `_reward_client.py` as the command of a reward (docs/rewards.md). The client passes each request on to this process, by a socket whose
path is in a variable. So the settings of a run do not depend on the process, and the run resumes in another one.
"""

from __future__ import annotations

import inspect
import json
import os
import socketserver
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable, Sequence

VARIABLE = "OTTAVA_PYTHON_REWARDS"
CLIENT = str(Path(__file__).resolve().with_name("_reward_client.py"))
COMPLETIONS = 64
LONGEST_SECONDS = 86_400.0


def table(function: Callable[..., Any], group: int) -> dict[str, Any]:
    """The reward of the settings that calls `function` for whole groups of completions."""
    if inspect.iscoroutinefunction(function) or not callable(function):
        raise ValueError(f"`reward_funcs`: {function!r} is no plain function, no path of a reward model and no table of a reward")
    name = getattr(function, "__name__", type(function).__name__)
    return {
        "type": "command", "name": name, "command": [sys.executable, CLIENT, name], "batch_size": group * max(1, COMPLETIONS // group),
        "timeout": LONGEST_SECONDS, "attempts": 1,
    }  # fmt: skip


class RewardServer:
    """Answers the requests of clients with the functions, one request at a time."""

    def __init__(self, functions: Sequence[Callable[..., Any]], state: Any):
        self.functions = {table(function, 1)["name"]: function for function in functions}
        if len(self.functions) < len(functions):
            raise ValueError("`reward_funcs`: two functions have one name; metrics need a name of each")
        self.state, self.lock = state, threading.Lock()
        self.failure: BaseException | None = None
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
                reply = {"rewards": self.score(self.functions[name], request["samples"])}
        except BaseException as error:  # noqa: BLE001
            self.failure = self.failure or error
            reply = {"error": f"the reward function `{name}` raised {type(error).__name__}: {error}"}
        return json.dumps({"id": request["id"], **reply}).encode() + b"\n"

    def score(self, function: Callable[..., Any], samples: list[dict[str, Any]]) -> list[float | None]:
        """The rewards of samples. The function is called as TRL calls it: with lists of prompts, completions and columns of the data."""
        records = [sample.get("record") or {} for sample in samples]
        columns = dict.fromkeys(key for record in records for key in record)
        arguments = {key: [record.get(key) for record in records] for key in columns}
        arguments["prompts"] = [sample["prompt"] for sample in samples]
        arguments["completions"] = [completion_of(sample) for sample in samples]
        arguments["completion_ids"] = [sample["completion_ids"] for sample in samples]
        arguments["trainer_state"] = self.state
        for name in ("prompt", "completion"):
            arguments.pop(name, None)
        scores = list(function(**arguments))
        if len(scores) != len(samples):
            raise ValueError(f"{len(scores)} rewards were returned for {len(samples)} completions")
        return [None if score is None else float(score) for score in scores]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()


def completion_of(sample: dict[str, Any]) -> Any:
    """A text, or a message of the assistant if the prompt is a list of messages."""
    text = sample["completion"]
    return text if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": text}]
