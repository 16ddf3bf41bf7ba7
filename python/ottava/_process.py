"""The program as a process: its messages, its end, and its metrics while it trains."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

from ._binary import find_binary
from .callbacks import Callbacks, TrainerControl

POLL_SECONDS = 0.05
STOPPED = 75
STOPPED_EARLY = 130
# The program prints this at the first signal. A second signal would end it without a checkpoint.
STOPPING = "stopping; "
# A signal to all processes of a job reaches the program too, and the line above arrives within this time.
NOTICE_SECONDS = 1.0
# After a second signal, the program ends at once, or it is killed after this time.
KILL_SECONDS = 10.0
WATCH = str(Path(__file__).resolve().with_name("_watch.py"))


class OttavaError(RuntimeError):
    """The program ended with an error. The text is the program's own."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code of the program; docs/reliability.md lists them. Below 0, the signal that killed it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OttavaError, (str(self), self.exit_code)


def output_of(*arguments: str) -> str:
    """What the program prints for these arguments. Errors with [`OttavaError`]."""
    done = subprocess.run([find_binary(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        raise OttavaError(message_of(lines, done.returncode), done.returncode)
    return done.stdout.decode("utf-8")


def message_of(lines: list[str], code: int) -> str:
    """The error among the last lines of the program: what begins with `error: ` or `stopped: `, or all lines. For a signal, its name."""
    if code < 0:
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        guess = " (out of memory?)" if -code == signal.SIGKILL else ""
        return "\n".join([f"the program was killed by {name}{guess}", *lines[-3:]])
    at = max((at for at, line in enumerate(lines) if line.startswith(("error: ", "stopped: "))), default=None)
    return "\n".join(lines[at:] if at is not None else lines[-3:]).removeprefix("error: ") if lines else "the program ended without a message"


class Follower:
    """Reads the lines of `metrics.jsonl` that a run adds. After a rollback, steps come again, with other numbers."""

    def __init__(self, folder: Path):
        self.path, self.mark = folder / "metrics.jsonl", folder / "run.json"
        # The program replaces run.json once the metrics of a resumed run end at its checkpoint.
        self.before = self.identity()
        self.offset, self.file = 0, -1
        self.seen: dict[int, int] = {}

    def identity(self) -> tuple[int, int] | None:
        try:
            stat = self.mark.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def lines(self) -> Iterator[dict[str, Any]]:
        """The new whole lines."""
        if self.identity() == self.before:
            return
        self.before = (-1, -1)
        try:
            file = open(self.path, "rb")
        except OSError:
            return
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self.file or stat.st_size < self.offset:
                self.file, self.offset = stat.st_ino, 0
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                metrics = json.loads(line)
                if self.seen.get(metrics["step"]) != hash(line):
                    self.seen[metrics["step"]] = hash(line)
                    yield metrics


def checkpoints_of(folder: Path) -> dict[int, tuple[int, int]]:
    """The complete checkpoints of a run: the step of each, and what changes when a checkpoint is written again."""
    found = {}
    for path in folder.glob("checkpoints/checkpoint-*"):
        number = path.name[len("checkpoint-") :]
        try:
            stat = (path / "manifest.json").stat()
        except OSError:
            continue
        if number.isdigit():
            found[int(number)] = (stat.st_ino, stat.st_mtime_ns)
    return found


# The runs in progress, for the end of this process.
ACTIVE: set[Training] = set()


@atexit.register
def stop_all() -> None:
    """Stops the programs of runs that other threads still follow, and waits for their checkpoints."""
    runs = [run for run in ACTIVE if run.owner == os.getpid()]
    for run in runs:
        run.is_stopped = True
        run.ask_to_stop()
    for run in runs:
        run.process.wait()


class Training:
    """A process of `ottava train`, followed until its end. `file` is the file of the run, which becomes `trainer.toml`. `cwd` is the folder that relative
    paths start from.
    """

    process: subprocess.Popen[bytes]
    # Stops the program if this process is killed. A signal at the death of the parent (PR_SET_PDEATHSIG) would be sent once for each thread of the parent.
    watch: subprocess.Popen[bytes]

    def __init__(self, folder: Path, file: Path, arguments: list[str], callbacks: Callbacks, environment: dict[str, str], heard: int, cwd: str, binary: str):
        self.folder, self.file, self.callbacks, self.state = folder, file, callbacks, callbacks.state
        self.arguments, self.environment, self.cwd, self.binary = arguments, environment, cwd, binary
        self.follower = Follower(folder)
        self.saved = checkpoints_of(folder)
        self.losses: list[float] = []
        self.interval: list[dict[str, Any]] = []
        # The last step of which callbacks have heard in an earlier start.
        self.heard = heard
        self.began = self.is_stopped = False
        self.owner = os.getpid()
        # When the first signal or error came, and when the program is killed after the second one.
        self.failed_at: float | None = None
        self.kill_at: float | None = None
        # Whether the program has been asked to stop, by this process or by another one.
        self.asked = threading.Event()
        callbacks.control = TrainerControl()
        self.tail: collections.deque[str] = collections.deque(maxlen=60)
        self.output: list[bytes] = []
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self.forward_messages, self.read_output)]

    def start(self) -> None:
        """Starts the program. Ctrl-C on a terminal reaches all processes of its session, and a second signal would end the run at once. So the program has
        its own session.
        """
        self.process = subprocess.Popen(
            [self.binary, "train", *self.arguments, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, cwd=self.cwd, env={**os.environ, **self.environment},
        )  # fmt: skip
        ACTIVE.add(self)
        self.watch = subprocess.Popen(
            [sys.executable, "-I", "-S", WATCH, str(self.process.pid)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        for thread in self.threads:
            thread.start()

    def forward_messages(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as messages:
            for line in messages:
                text = line.decode("utf-8", "replace")
                self.tail.append(text.rstrip("\n"))
                if text.startswith(STOPPING):
                    self.asked.set()
                try:
                    sys.stderr.write(text)
                    sys.stderr.flush()
                except Exception:  # noqa: BLE001, S110
                    # Nobody may read the messages any more. The program would wait for ever if its pipe were full.
                    pass

    def read_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.output.append(output.read())

    def follow(self) -> dict[str, Any]:
        """Runs the program until its end, and returns its result. A signal to this process, or an error of a callback, stops the run first."""
        restore = self.handle_signals()
        try:
            failure = self.until_the_end()
        finally:
            if hasattr(self, "process") and self.process.poll() is None:
                # A signal has arrived between the start and the loop. The end of this process waits for the program.
                self.ask_to_stop()
            else:
                ACTIVE.discard(self)
            restore()
        for thread in self.threads:
            thread.join()
        try:
            self.watch.communicate(b".")
        except OSError:
            # Nothing is left to watch.
            self.watch.wait()
        if failure is not None:
            raise failure
        code = self.process.returncode
        if code != 0 and not (self.is_stopped and code in (STOPPED, STOPPED_EARLY)):
            raise OttavaError(message_of(list(self.tail), code).replace(str(self.file), "trainer.toml"), code)
        if code == 0 and not self.began and self.state.is_world_process_zero:
            raise OttavaError(f"the program ended, but {self.folder} has no new run: was the folder moved?", code)
        return json.loads(b"".join(self.output) or b"{}") or {}

    def until_the_end(self) -> BaseException | None:
        """Returns the error that stopped the run."""
        failure: BaseException | None = None
        self.start()
        while True:
            try:
                ended = self.process.poll() is not None
                if failure is None:
                    self.began = self.began or self.begin()
                    self.read_metrics()
                    self.announce_checkpoints()
                    self.stop_if_asked()
                if ended:
                    return failure
                self.pass_on()
                time.sleep(POLL_SECONDS)
            except BaseException as error:  # noqa: BLE001
                if failure is None:
                    failure, self.failed_at = error, time.monotonic()
                else:
                    self.end_now()

    def pass_on(self) -> None:
        """Asks the program to stop if a signal to this process has not reached it, and kills the program if it does not end."""
        now = time.monotonic()
        if self.failed_at is not None and now > self.failed_at + NOTICE_SECONDS:
            self.ask_to_stop()
        if self.kill_at is not None and now > self.kill_at:
            self.process.kill()

    def ask_to_stop(self) -> None:
        """Asks the program to stop with a checkpoint, unless it already says that it stops."""
        if not self.asked.is_set():
            self.asked.set()
            self.process.send_signal(signal.SIGTERM)

    def end_now(self) -> None:
        """Ends the program without a checkpoint: by a second signal. The two signals are different, because equal ones may become one."""
        self.kill_at = self.kill_at or time.monotonic() + KILL_SECONDS
        self.process.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGTERM)
        self.asked.set()

    def handle_signals(self) -> Any:
        """Turns signals that would end this process into exceptions. Returns what undoes this."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def end(number: int, _: Any) -> None:
            raise SystemExit(128 + number)

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, end)

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    def begin(self) -> bool:
        """Once the run has begun: reads its number of steps, and tells the callbacks."""
        if self.follower.identity() == self.follower.before:
            return False
        try:
            self.state.max_steps = json.loads((self.folder / "run.json").read_text("utf-8"))["max_steps"]
        except (OSError, ValueError, KeyError):
            return False
        # All ranks have read the file.
        self.file.replace(self.folder / "trainer.toml")
        self.callbacks.call("on_train_begin")
        return True

    def stop_if_asked(self) -> None:
        if self.callbacks.control.should_training_stop and not self.is_stopped:
            self.is_stopped = True
            self.ask_to_stop()

    def read_metrics(self) -> None:
        for line in self.follower.lines():
            step = line.pop("step")
            if "tokens" in line:
                line["num_tokens"] = line.pop("tokens")
            self.drop_from(step)
            evaluation = {key: value for key, value in line.items() if key.startswith("eval_")}
            metrics = {key: value for key, value in line.items() if key not in evaluation}
            is_old = step <= self.heard
            self.state.global_step = step
            if self.state.num_train_epochs and self.state.max_steps:
                self.state.epoch = step / self.state.max_steps * self.state.num_train_epochs
            if metrics:
                self.add_step(step, metrics, is_old)
            if evaluation:
                self.add_log(step, evaluation)
                if not is_old:
                    self.callbacks.call("on_evaluate", metrics=evaluation)

    def drop_from(self, step: int) -> None:
        """Drops what the run has taken back: logs from `step` on."""
        if step <= self.state.global_step:
            self.interval = []
            history = self.state.log_history
            history[:] = [entry for entry in history if entry["step"] < step]

    def add_step(self, step: int, metrics: dict[str, Any], is_old: bool) -> None:
        self.interval.append(metrics)
        if not is_old:
            self.losses += [metrics["loss"]] if metrics.get("loss") is not None else []
            self.callbacks.call("on_step_end")
        if step % self.state.logging_steps == 0:
            logs = means(self.interval)
            self.interval = []
            self.add_log(step, logs)
            if not is_old:
                self.callbacks.call("on_log", logs=logs)

    def add_log(self, step: int, logs: dict[str, Any]) -> None:
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": step})

    def announce_checkpoints(self) -> None:
        for step, identity in sorted(checkpoints_of(self.folder).items()):
            if self.saved.get(step) != identity:
                self.saved[step] = identity
                self.callbacks.call("on_save", dataclasses.replace(self.state, global_step=step))


def means(interval: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of several steps as one: means, and the last value where a mean says nothing."""
    last = ("learning_rate", "grad_norm", "num_tokens", "peak_memory_bytes", "loss_scale")
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for metrics in interval for key in metrics):
        values = [metrics[key] for metrics in interval if metrics.get(key) is not None]
        if values:
            found[key] = values[-1] if key in last else sum(values) / len(values)
    return found
