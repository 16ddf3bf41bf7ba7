#!/usr/bin/env python3
"""Tests the Python module `ottava` with the program, on tiny models and data. Needs Python 3.9, and no packages.

usage: check_python.py [BINARY] [TEST]...      (BINARY is the program, by default the one that the module finds; TEST is a name as of unittest)
"""

import ast
import importlib
import importlib.metadata
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
import unittest
import unittest.mock
import warnings
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
# An installed module comes first: the path of this repository is the last one.
sys.path.append(str(SCRIPTS.parent / "python"))
sys.path.insert(0, str(SCRIPTS))

import tiny_run  # noqa: E402

import ottava  # noqa: E402
from ottava._table import Table  # noqa: E402
from ottava.settings import Checkpoint, Data, DataRecords, LrScheduler, Model, Optimizer, Precision, Run, Training  # noqa: E402

RANDOM = Run(model=Model(init="random"))
TEXTS = [{"text": f"line {i * i} of the text"} for i in range(8)]
PAIRS = [{"prompt": f"{i} + {i} = ", "chosen": f"{2 * i}", "rejected": f"{3 * i + 1}"} for i in range(6)]
LABELS = [{"prompt": f"{i} + {i} = ", "completion": f"{2 * i}", "label": i % 2 == 0} for i in range(6)]
PROMPTS = [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(4)]
LN_2 = 0.6931471805599453


def arguments(**others):
    return {"max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False, "max_length": 32, "logging_steps": 1, **others}


class Recorder(ottava.TrainerCallback):
    """Records the events of a run."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append(("log", state.global_step, round(logs["loss"], 6)))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluate", state.global_step, "eval_loss" in metrics))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step))


class StopAt(ottava.TrainerCallback):
    """Asks for a stop at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


class Case(unittest.TestCase):
    """A test in a new folder with the tiny model `model`."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        tiny_run.write(Path(folder.name) / "tiny")
        before = os.getcwd()
        os.chdir(Path(folder.name) / "tiny")
        self.addCleanup(os.chdir, before)
        home = unittest.mock.patch.dict(os.environ, HOME=folder.name)
        home.start()
        self.addCleanup(home.stop)
        # The messages of the program are not part of the output of the tests.
        self.addCleanup(setattr, sys, "stderr", sys.stderr)
        sys.stderr = open(os.devnull, "w")
        self.addCleanup(sys.stderr.close)

    def sft(self, folder, *, callbacks=(), trainer=ottava.SFTTrainer, config=ottava.SFTConfig, data=TEXTS, settings=RANDOM, others=None, **given):
        args = config(folder, settings=settings, **arguments(**given))
        return trainer("model", args=args, train_dataset=data, callbacks=list(callbacks), **(others or {}))


class Runs(Case):
    def test_a_run_tells_its_steps_logs_evaluations_and_checkpoints(self):
        recorder = Recorder()
        trainer = self.sft("out", callbacks=[recorder], logging_steps=2, save_steps=2, others={"eval_dataset": TEXTS[:2]})
        result = trainer.train()
        metrics = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in metrics[1:]]
        events = [event for event in recorder.events if event[0] != "save"]
        self.assertEqual(
            events,
            [("begin", 4), ("evaluate", 0, True), ("step", 1), ("step", 2), ("log", 2, round(sum(losses[:2]) / 2, 6)), ("step", 3), ("step", 4)]
            + [("log", 4, round(sum(losses[2:]) / 2, 6)), ("evaluate", 4, True), ("end", 4)],
        )
        self.assertEqual([event[1] for event in recorder.events if event[0] == "save"], [2, 4])
        history = trainer.state.log_history
        self.assertEqual([entry["step"] for entry in history], [0, 2, 4, 4, 4])
        self.assertEqual(history[1]["num_tokens"], metrics[2]["tokens"])
        self.assertEqual(result.global_step, 4)
        self.assertAlmostEqual(result.training_loss, sum(losses) / 4)
        self.assertEqual(result.metrics["eval_loss"], metrics[4]["eval_loss"])
        self.assertLess(losses[3], losses[0])

    def test_epochs_are_counted(self):
        trainer = self.sft("out", max_steps=-1, num_train_epochs=2)
        trainer.train()
        self.assertEqual([entry["epoch"] for entry in trainer.state.log_history], [0.5, 1.0, 1.5, 2.0, 2.0])

    def test_the_last_model_is_saved_as_a_folder(self):
        trainer = self.sft("out", max_steps=2)
        with self.assertRaisesRegex(ValueError, "saved no checkpoint"):
            trainer.save_model()
        trainer.train()
        trainer.save_model()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            self.assertEqual(Path("out", name).read_bytes(), Path("out/checkpoints/checkpoint-2", name).read_bytes())

    def test_a_stopped_run_resumes_and_ends_as_an_unbroken_run(self):
        stop = StopAt(2)
        first = self.sft("out", callbacks=[stop], max_steps=100_000, lr_scheduler_type="constant")
        before = first.train().global_step
        self.assertGreaterEqual(before, 2)
        stop.step = before + 2
        stopped = first.train(resume_from_checkpoint=True).global_step
        self.assertGreaterEqual(stopped, before + 2)
        given = {"max_steps": stopped + 3, "lr_scheduler_type": "constant"}
        whole, recorder = self.sft("whole", **given), Recorder()
        whole.train()
        # What a killed run has written after its last checkpoint is no part of the resumed run.
        with open("out/metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": stopped + 1, "loss": 99.5}) + "\n")
        second = self.sft("out", callbacks=[recorder], **given)
        second.train(resume_from_checkpoint=True)
        losses = lambda trainer: [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        self.assertEqual(losses(second), losses(whole))
        self.assertFalse([event for event in recorder.events if event[-1] == 99.5])
        # Callbacks hear only of the steps of this start.
        self.assertEqual([event[1] for event in recorder.events if event[0] == "step"], [stopped + 1, stopped + 2, stopped + 3])
        other = self.sft("other", **given)
        other.train(resume_from_checkpoint=f"out/checkpoints/checkpoint-{stopped}")
        self.assertEqual(losses(other), losses(whole))

    def test_an_error_of_the_program_is_an_exception_with_its_text(self):
        self.sft("out", max_steps=1).train()
        with self.assertRaises(ottava.OttavaError) as error:
            self.sft("out", max_steps=1).train()
        self.assertEqual(error.exception.exit_code, 1)
        self.assertTrue(str(error.exception).startswith("out already holds a run"), str(error.exception))
        copy = pickle.loads(pickle.dumps(error.exception))
        self.assertEqual((str(copy), copy.exit_code), (str(error.exception), 1))

    def test_messages_are_read_to_their_end_although_they_cannot_be_written(self):
        class Closed:
            def write(self, text):
                raise BrokenPipeError

        self.sft("out", max_steps=1).train()
        sys.stderr = Closed()
        with self.assertRaisesRegex(ottava.OttavaError, "^out already holds a run"):
            self.sft("out", max_steps=1).train()

    def test_an_error_of_a_callback_stops_the_run_and_is_raised(self):
        class Fails(ottava.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                raise KeyError("mine")

        with self.assertRaisesRegex(KeyError, "mine"):
            self.sft("out", callbacks=[Fails], max_steps=100_000).train()
        self.assertEqual(json.loads(Path("out/run.json").read_text())["end"]["outcome"], "stopped")

    def test_a_script_may_change_its_folder(self):
        here = os.getcwd()

        class Leaves(ottava.TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                os.chdir("/")

        trainer = self.sft("out", callbacks=[Leaves], max_steps=2)
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        self.assertEqual(trainer.train().global_step, 2)
        trainer.save_model(f"{here}/saved")
        os.chdir(here)
        self.assertEqual(os.listdir("elsewhere"), [])
        self.assertTrue(Path("out/checkpoints/checkpoint-2").is_dir() and Path("saved/config.json").is_file())

    def test_a_name_of_a_folder_may_have_any_letter(self):
        for name in ("ü n \u2028\u0085", 'quo"te\n[data]\nseed = 4'):
            with self.subTest(name=name):
                self.assertEqual(self.sft(name, max_steps=1).train().global_step, 1)
                self.assertTrue(Path(name, "checkpoints/checkpoint-1").is_dir())

    def test_a_run_that_is_not_where_it_was_is_an_error(self):
        trainer = self.sft("out", max_steps=1)
        trainer.folder = Path("other").absolute()
        with self.assertRaisesRegex(ottava.OttavaError, "other has no new run"):
            trainer.train()

    def test_a_checkpoint_that_is_written_again_is_announced_again(self):
        self.sft("out", save_steps=2).train()
        recorder = Recorder()
        self.sft("out", save_steps=2, callbacks=[recorder]).train(resume_from_checkpoint="out/checkpoints/checkpoint-2")
        self.assertEqual([event for event in recorder.events if event[0] in ("step", "save")].count(("save", 2)), 0)
        self.assertEqual([event[1] for event in recorder.events if event[0] == "save"], [4])

    def test_settings_write_the_file_of_a_run(self):
        run = Run(
            output_dir='quo"te\n', device="cpu", model=Model(path="model", init="random"), precision=Precision(recipe="fp32"),
            data=Data(train_files=["text.txt"], max_length=16, val_set_size=2, records=DataRecords(text_documents="line", roles={"assistant": ["b", "ü"]})),
            training=Training(max_steps=2, per_device_train_batch_size=2), lr_scheduler=LrScheduler(warmup_steps=0), checkpoint=Checkpoint(save_steps="end"),
        )  # fmt: skip
        result = ottava.RunTrainer(run).train()
        self.assertEqual(result.global_step, 2)
        resolved = Path('quo"te\n/config.toml').read_text("utf-8")
        for line in ('recipe = "fp32"', "max_steps = 2", 'save_steps = "end"'):
            self.assertIn(line, resolved)
        self.assertIn('assistant = ["b", "ü"]', resolved)

    def test_the_module_runs_the_program(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        program = subprocess.run([sys.executable, "-m", "ottava", "--version"], env=environment, stdout=subprocess.PIPE, check=True)
        self.assertRegex(program.stdout.decode(), r"^ottava \d+\.\d+")


class Module(unittest.TestCase):
    def test_the_version_is_the_version_of_the_wheel(self):
        with unittest.mock.patch("importlib.metadata.version", return_value="1.2.3"):
            self.assertEqual(importlib.reload(ottava).__version__, "1.2.3")
        with unittest.mock.patch("importlib.metadata.version", side_effect=importlib.metadata.PackageNotFoundError):
            self.assertEqual(importlib.reload(ottava).__version__, "0+unknown")


class Examples(unittest.TestCase):
    PAGE = SCRIPTS.parent / "docs" / "python.md"

    @unittest.skipUnless(PAGE.is_file(), "the pages are not part of a wheel")
    def test_the_examples_of_the_page_call_what_the_module_has(self):
        blocks = re.findall(r"```python\n(.*?)```", self.PAGE.read_text("utf-8"), re.DOTALL)
        self.assertGreaterEqual(len(blocks), 3)
        for block in blocks:
            nodes = list(ast.walk(ast.parse(block)))
            names = {}
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.module.startswith("ottava"):
                    names.update({alias.name: getattr(importlib.import_module(node.module), alias.name) for alias in node.names})
            for node in nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and issubclass(names.get(node.func.id, object), Table):
                    names[node.func.id](**{keyword.arg: None for keyword in node.keywords})


class Signals(Case):
    SCRIPT = """
import signal, sys, threading
# A shell may have started the tests in the background, without Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = {path!r}
import ottava
from ottava._process import ACTIVE
from check_python import RANDOM, TEXTS, arguments
begun = threading.Event()
class Tells(ottava.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if not begun.is_set():
            print(*[run.process.pid for run in ACTIVE], flush=True)
            begun.set()
def train():
    args = ottava.SFTConfig("out", settings=RANDOM, **arguments(max_steps=100_000))
    ottava.SFTTrainer("model", args=args, train_dataset=TEXTS, callbacks=[Tells]).train()
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
except ottava.OttavaError as error:
    print(str(error).splitlines()[0], flush=True)
"""

    def start(self, call="train()"):
        """Starts a script, and waits until the run has begun. Returns the script and the process of the program."""
        command = [sys.executable, "-c", self.SCRIPT.format(path=sys.path, call=call)]
        script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(script.stdout.close)
        self.addCleanup(script.kill)
        return script, int(script.stdout.readline())

    def stopped(self, seconds):
        """Waits for at most some seconds until the run has ended, with a checkpoint."""
        limit = time.monotonic() + seconds
        while (end := json.loads(Path("out/run.json").read_text()).get("end")) is None and time.monotonic() < limit:
            time.sleep(0.05)
        self.assertEqual((end or {}).get("outcome"), "stopped")
        self.assertTrue(Path(f"out/checkpoints/checkpoint-{end['step']}").is_dir())

    def ended(self, script):
        """Waits for the end of the script, which comes after the end of the run."""
        output, _ = script.communicate(timeout=60)
        self.stopped(0)
        return script.returncode, output.decode().splitlines()[-1:]

    def test_ctrl_c_saves_a_checkpoint_and_is_raised(self):
        script, _ = self.start()
        # A terminal sends Ctrl-C to a whole group of processes.
        os.killpg(script.pid, signal.SIGINT)
        self.assertEqual(self.ended(script), (0, ["interrupted"]))

    def test_a_signal_to_all_processes_of_a_job_saves_a_checkpoint(self):
        for first in (0, 1):
            with self.subTest(first=first):
                script, program = self.start()
                processes = [script.pid, program]
                os.kill(processes[first], signal.SIGTERM)
                os.kill(processes[1 - first], signal.SIGTERM)
                self.assertEqual(self.ended(script)[0], 128 + signal.SIGTERM)
                shutil.rmtree("out")

    def test_the_end_of_the_script_saves_a_checkpoint(self):
        script, _ = self.start()
        os.kill(script.pid, signal.SIGTERM)
        self.assertEqual(self.ended(script)[0], 128 + signal.SIGTERM)

    def test_a_run_of_a_daemon_thread_stops_at_the_end_of_the_script(self):
        script, _ = self.start("threading.Thread(target=train, daemon=True).start(); begun.wait()")
        self.assertEqual(self.ended(script)[0], 0)

    def test_the_program_stops_when_the_script_is_killed(self):
        script, _ = self.start()
        script.kill()
        script.wait(60)
        self.stopped(60)

    def test_a_killed_program_is_an_error_that_names_the_signal(self):
        script, program = self.start()
        os.kill(program, signal.SIGKILL)
        output, _ = script.communicate(timeout=60)
        self.assertEqual(output.decode().splitlines()[-1:], ["the program was killed by SIGKILL (out of memory?)"])


class Arguments(Case):
    def refused(self, words, **given):
        with self.assertRaisesRegex(ValueError, words):
            self.sft("out", **given)
        self.assertFalse(Path("out/run.json").exists())

    def test_arguments_without_a_setting_are_refused_by_name(self):
        self.refused("SFTConfig: `no_such_argument`: this key is not known", no_such_argument=1)
        self.refused("SFTConfig: `optim`: the optimizers are", optim="adafactor")
        self.refused("SFTTrainer has no argument `compute_metrics`", others={"compute_metrics": print})
        self.refused("SFTConfig: `lora.init_lora_weights`", others={"peft_config": ottava.LoraConfig(target_modules="all-linear", init_lora_weights="pissa")})
        self.refused("name `target_modules`", others={"peft_config": ottava.LoraConfig(r=4)})
        self.refused("`max_length` is None", max_length=None)
        self.refused("`args` is a SFTConfig", trainer=ottava.DPOTrainer)
        self.refused("several trainers", sequence_len=8, base_model="model")
        self.refused("record 1 is a str", data=[{"text": "a"}, "b"])
        with self.assertRaisesRegex(ValueError, "pass the folder or the name"):
            ottava.SFTTrainer(object(), train_dataset=TEXTS)

    def test_values_without_a_meaning_are_refused(self):
        self.refused("SFTConfig: `learning_rate` is None", learning_rate=None)
        with self.assertRaisesRegex(ValueError, "`max_completion_length` is None; .* TRL's default, 512"):
            ottava.GRPOConfig("out", max_completion_length=None)
        with self.assertRaisesRegex(ValueError, "`r` is 0"):
            ottava.LoraConfig(r=0, target_modules="all-linear")
        with self.assertRaisesRegex(ValueError, "`output_dir` is empty"):
            ottava.SFTConfig("")
        with self.assertRaisesRegex(ValueError, "`settings` is a dict"):
            ottava.SFTConfig("out", settings={"seed": 1})
        self.refused("record 0, column `when`: .* bytes", data=[{"text": "a", "when": b"x"}])
        self.refused("`reward_funcs` has no reward", trainer=lambda *given, **others: ottava.GRPOTrainer(*given, reward_funcs=[], **others))
        dtype = {"ref_model_init_kwargs": {"dtype": "float32"}}
        self.refused("`ref_model_init_kwargs.dtype`", trainer=ottava.DPOTrainer, config=ottava.DPOConfig, data=PAIRS, **dtype)

    def test_arguments_can_be_assigned_and_read(self):
        args = ottava.SFTConfig("out", settings=RANDOM, **arguments())
        args.max_steps, args.learning_rate, args.output_dir = 9, 0.5, "~/other"
        trainer = ottava.SFTTrainer("model", args=args, train_dataset="data.jsonl")
        for line in ("max_steps = 9", "learning_rate = 0.5"):
            self.assertIn(line, trainer.toml.splitlines())
        self.assertEqual(trainer.folder, Path.home() / "other")
        self.assertEqual((args.max_steps, args.gradient_accumulation_steps, args.push_to_hub, args.eval_steps), (9, 1, False, None))
        self.assertEqual((args.bf16, ottava.SFTConfig().bf16, ottava.SFTConfig(fp16=True).bf16), (False, True, False))
        for name in ("learning_rate", "max_length"):
            with self.assertRaisesRegex(ValueError, f"`{name}` is None"):
                setattr(args, name, None)
        with self.assertRaisesRegex(AttributeError, "has no argument `no_such"):
            args.no_such_argument  # noqa: B018
        adapters = ottava.LoraConfig(target_modules="all-linear", use_dora=None)
        adapters.r = 3
        trainer_of_adapters = self.sft("out", others={"peft_config": adapters})
        self.assertIn("r = 3", trainer_of_adapters.toml.splitlines())
        self.assertEqual((adapters.r, adapters.lora_alpha), (3, 8))
        args.max_steps = 10
        with self.assertRaisesRegex(ValueError, "`args` has changed since the trainer was created"):
            trainer.train()
        self.assertEqual(pickle.loads(pickle.dumps(args)).max_steps, 10)
        args.max_steps, args.settings = 9, Run()
        with self.assertRaisesRegex(ValueError, "`args` has changed"):
            trainer.train()

    def test_a_scalar_of_numpy_is_a_number(self):
        class Scalar(float):
            ndim = 0

            def __repr__(self):
                return f"np.float64({float(self)})"

            def item(self):
                return float(self)

        Scalar.__module__ = "numpy"
        run = Run(model=Model(init="random"), optimizer=Optimizer(weight_decay=Scalar(0.25)))
        lines = self.sft("out", settings=run, learning_rate=Scalar(0.5)).toml.splitlines()
        self.assertEqual([line for line in lines if line in ("learning_rate = 0.5", "weight_decay = 0.25")], ["weight_decay = 0.25", "learning_rate = 0.5"])

    def test_settings_are_keys_of_the_file(self):
        run = Run()
        with self.assertRaisesRegex(AttributeError, "Run has no key `trainning`"):
            run.trainning = Training(max_steps=3)
        with self.assertRaisesRegex(TypeError, "no_such_key"):
            Run(training={"no_such_key": 3})
        with self.assertRaisesRegex(ValueError, "`training` is a int"):
            Run(training=3)
        self.assertEqual(typing.get_type_hints(Run)["training"], typing.Optional[Training])
        run.training = {"max_steps": 3}
        self.assertEqual(run, Run(training=Training(max_steps=3)))

    def test_a_setting_and_an_argument_do_not_contradict_each_other(self):
        for settings, key in [
            (Run(training=Training(max_steps=5)), "training.max_steps"), (Run(data=Data(train_files=["text.txt"])), "data.train_files"),
            (Run(precision=Precision(recipe="bf16")), "precision.recipe"),
        ]:  # fmt: skip
            self.refused(f"SFTTrainer: `settings` and an argument both set `{key}`", settings=settings)
        # The same value twice, and a default of TRL.
        allowed = Run(
            seed=3, training=Training(max_steps=4), checkpoint=Checkpoint(save_total_limit=2), lr_scheduler=LrScheduler(warmup_steps=1),
            optimizer=Optimizer(learning_rate=2e-05),
        )  # fmt: skip
        lines = self.sft("out", settings=allowed, learning_rate=2e-5).toml.splitlines()
        for line in ("seed = 3", "save_total_limit = 2", "warmup_steps = 1", "learning_rate = 2e-05"):
            self.assertEqual([other for other in lines if other.startswith(line.split()[0])], [line])
        self.assertLess(lines.index("seed = 3"), lines.index("[model]"))

    def test_a_run_has_many_files(self):
        # More than what one argument of a program has on Linux.
        Path("texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
        names = ["./" * 100 + "texts.jsonl"] * 700
        self.assertGreater(sum(map(len, names)), 2**17)
        self.assertEqual(self.sft("out", data=names, max_steps=1).train().global_step, 1)

    def test_early_stopping_is_a_setting(self):
        class EarlyStoppingCallback(ottava.TrainerCallback):
            early_stopping_patience, early_stopping_threshold = 3, 0.5

        trainer = self.sft("out", callbacks=[Recorder, EarlyStoppingCallback()])
        self.assertIn("[evaluation]\nearly_stopping_threshold = 0.5\nearly_stopping_patience = 3\n", trainer.toml)
        self.assertEqual(len(trainer.callbacks.list), 1)
        with self.assertRaisesRegex(ValueError, "EarlyStoppingCallback is a setting"):
            trainer.add_callback(EarlyStoppingCallback)

    def test_a_refused_run_changes_nothing(self):
        class Tokenizer:
            text = Path("model/tokenizer.json").read_text()

            def save_pretrained(self, folder):
                os.makedirs(folder)
                Path(folder, "tokenizer.json").write_text(self.text)

        tokenizer = Tokenizer()
        self.sft("out", max_steps=1, others={"processing_class": tokenizer}).train()
        before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
        # The same tokenizer has the same folder.
        self.sft("out", others={"processing_class": tokenizer})
        tokenizer.text += " "
        with self.assertRaisesRegex(ottava.OttavaError, "already holds a run"):
            self.sft("out", max_steps=2, others={"processing_class": tokenizer}).train()
        self.assertEqual({path: path.read_bytes() for path in before}, before)
        texts = [path.read_text() for path in Path("out/data").glob("tokenizer-*/tokenizer.json")]
        self.assertEqual(sorted(texts), [tokenizer.text[:-1], tokenizer.text])
        self.assertEqual([path.name for path in Path("out").rglob("*") if ".part" in path.name], [])

    def test_the_best_model_can_be_loaded_at_the_end(self):
        given = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
        trainer = self.sft("out", others={"eval_dataset": TEXTS[:2]}, **given)
        trainer.train()
        self.assertTrue(Path(trainer.state.best_model_checkpoint).is_dir())

    def test_callbacks_that_a_run_cannot_serve_are_refused(self):
        class Epochs(ottava.TrainerCallback):
            def on_epoch_end(self, args, state, control, **kwargs):
                pass

        class Saves(ottava.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_save = True

        class Predicts(ottava.TrainerCallback):
            on_gpu = True

            def on_predict(self, args, state, control, metrics, **kwargs):
                pass

        self.refused("Epochs.on_epoch_end: runs have no such event", callbacks=[Epochs])
        self.sft("out", callbacks=[Predicts])
        with self.assertRaisesRegex(ValueError, "Saves.on_step_end sets `control.should_save`"):
            self.sft("out", callbacks=[Saves]).train()

    def test_arguments_without_an_effect_warn(self):
        with self.assertWarnsRegex(UserWarning, "SFTConfig: `push_to_hub`: nothing is sent"):
            self.sft("out", push_to_hub=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.sft("out", push_to_hub=False, dataloader_num_workers=0, report_to="none", save_strategy="no", shuffle_dataset=False)

    def test_arguments_mean_what_they_mean_in_trl(self):
        def lines(trainer):
            return [line.split("  #")[0] for line in trainer.toml.splitlines() if "=" in line]

        chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
        completions = [{"prompt": "a", "completion": "b"}]
        for data, given, line in [
            (TEXTS, {}, "learning_rate = 0.00002"), (TEXTS, {}, "save_total_limit = 0"), (TEXTS, {}, 'recipe = "fp32"'),
            (TEXTS, {"eval_strategy": "steps"}, "eval_steps = 1"), (TEXTS, {"packing": True, "packing_strategy": "wrapped"}, 'packing = "wrapped"'),
            (TEXTS, {"packing_strategy": "bfd"}, 'packing = "none"'), (chats, {}, "train_on_inputs = true"),
            (chats, {"assistant_only_loss": True}, "train_on_inputs = false"), (completions, {"assistant_only_loss": False}, "train_on_inputs = false"),
            (completions, {"completion_only_loss": False}, "train_on_inputs = true"), ("a.jsonl", {"completion_only_loss": False}, "train_on_inputs = true"),
        ]:  # fmt: skip
            self.assertIn(line, lines(self.sft("out", data=data, **given)), given)
        self.assertIn('recipe = "bf16"', lines(self.sft("out", bf16=True)))
        self.assertNotIn('recipe = "fp32"', lines(self.sft("out", bf16=None, model_init_kwargs={"dtype": "float32"})))
        dpo = lines(self.sft("out", trainer=ottava.DPOTrainer, config=ottava.DPOConfig, data=PAIRS))
        self.assertIn("learning_rate = 0.000001", dpo)
        reward = lines(self.sft("out", trainer=ottava.RewardTrainer, config=ottava.RewardConfig, data=PAIRS))
        self.assertIn("learning_rate = 0.0001", reward)


class Trainers(Case):
    @classmethod
    def setUpClass(cls):
        """Writes `cls.base`, a folder with weights."""
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.base = str(Path(folder.name) / "base")
        tiny_run.write(Path(folder.name) / "tiny")
        config = Path(folder.name) / "tiny" / "run.toml"
        train = [ottava.find_binary(), "train", str(config), "--set", "max_steps=1", "--set", f"output_dir={folder.name}/run"]
        subprocess.run(train, cwd=config.parent, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.copytree(f"{folder.name}/run/checkpoints/checkpoint-1", cls.base)

    def run_of(self, trainer, config, data, **given):
        others = given.pop("others", {})
        args = config("out", settings=given.pop("settings", None), **arguments(**{"max_steps": 2, **given}))
        made = trainer(self.base, args=args, train_dataset=data, **others)
        made.train()
        return made

    def first_loss(self, *given, **others):
        return self.run_of(*given, **others).state.log_history[0]["loss"]

    def test_adapters_are_saved_as_pefts(self):
        config = ottava.LoraConfig(r=4, lora_alpha=8, target_modules={"q_proj", "v_proj"}, task_type="CAUSAL_LM", bias="none")
        trainer = self.run_of(ottava.SFTTrainer, ottava.SFTConfig, TEXTS, others={"peft_config": config})
        trainer.save_model("adapter")
        saved = json.loads(Path("adapter/adapter_config.json").read_text())
        self.assertEqual((saved["r"], saved["lora_alpha"], sorted(saved["target_modules"])), (4, 8, ["q_proj", "v_proj"]))

    def test_dpo_starts_at_ln_2(self):
        self.assertAlmostEqual(self.first_loss(ottava.DPOTrainer, ottava.DPOConfig, PAIRS), LN_2, places=6)

    def test_kto_starts_at_one_half(self):
        self.assertAlmostEqual(self.first_loss(ottava.KTOTrainer, ottava.KTOConfig, LABELS), 0.5, places=6)

    def test_a_reward_model_learns_pairs(self):
        trainer = self.run_of(ottava.RewardTrainer, ottava.RewardConfig, PAIRS, max_steps=20, learning_rate=1e-2)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.assertLess(losses[-1], losses[0])
        trainer.save_model("reward")
        self.assertIn("ForSequenceClassification", json.loads(Path("reward/config.json").read_text())["architectures"][0])

    def grpo(self, function, data=PROMPTS, **given):
        args = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4, "max_steps": 2}
        config = ottava.GRPOConfig("out", settings=Run(data=Data(max_length=24)), **{**args, "use_cpu": True, "bf16": False, "logging_steps": 1, **given})
        return ottava.GRPOTrainer(self.base, function, config, train_dataset=data)

    def test_functions_of_the_script_are_rewards(self):
        seen = []

        def digits(prompts, completions, completion_ids, answer, **kwargs):
            seen.append((prompts, completions, completion_ids, answer))
            return [float(sum(letter.isdigit() for letter in completion)) for completion in completions]

        trainer = self.grpo([digits, {"type": "length", "target": 2, "distance": 4}], reward_weights=[1.0, 0.5])
        trainer.train()
        logs = trainer.state.log_history[0]
        prompts, completions, ids, answers = seen[0]
        self.assertEqual([len(part) for part in seen[0]], [8] * 4)
        self.assertEqual(prompts[:4], prompts[:1] * 4)
        self.assertEqual(answers, [str(2 * int(prompt.split()[0])) for prompt in prompts])
        self.assertTrue(all(1 <= len(row) <= 4 for row in ids))
        means = sum(sum(letter.isdigit() for letter in completion) for completion in completions) / 8
        self.assertAlmostEqual(logs["rewards/digits/mean"], means, places=5)
        self.assertAlmostEqual(logs["reward"], means + 0.5 * logs["rewards/length/mean"], places=5)

    def test_reward_functions_are_called_as_trl_calls_them(self):
        steps = []

        def half(completions, trainer_state, log_metric, log_extra, **kwargs):
            steps.append(trainer_state.global_step)
            log_metric("lengths/é", sum(map(len, completions)) / len(completions))
            log_extra("texts", completions)
            return [float("nan"), 1.0] * (len(completions) // 2)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = self.grpo([half, lambda completions, **kwargs: [0.0] * len(completions), lambda completions, **kwargs: [2.0] * len(completions)])
            trainer.train()
        logs = trainer.state.log_history[0]
        self.assertEqual(steps, [0, 1])
        self.assertEqual([logs[f"rewards/{name}/mean"] for name in ("half", "<lambda>", "<lambda>-2")], [1.0, 0.0, 2.0])
        self.assertGreater(next(value for name, value in logs.items() if name.endswith("lengths/é")), 0)
        self.assertEqual(len([warning for warning in caught if "log_extra" in str(warning.message)]), 1)

    def test_reward_functions_get_every_letter_in_any_locale(self):
        seen = []

        def é(completions, answer, **kwargs):
            seen.extend(answer)
            return [0.0] * len(completions)

        os.environ["PYTHONIOENCODING"] = "ascii"
        self.addCleanup(os.environ.pop, "PYTHONIOENCODING")
        self.grpo(é, max_steps=1, data=[{"prompt": "a", "answer": "ü"}] * 4).train()
        self.assertEqual(seen, ["ü"] * 8)

    def test_rewards_are_checked_when_the_trainer_is_created(self):
        for reward, words in [(3, "3 is no plain function"), ([None], "None is no plain function")]:
            with self.assertRaisesRegex(ValueError, words):
                self.grpo(reward if isinstance(reward, list) else [reward])
        self.assertIn(f'rewards = [{{ "type" = "model", "path" = "{Path.home()}/reward", "weight" = 1.0 }}]', self.grpo(Path("~/reward")).toml)

    def test_an_error_of_a_reward_function_is_the_cause_of_the_error(self):
        def broken(completions, **kwargs):
            raise ZeroDivisionError("no reward")

        with self.assertRaisesRegex(ottava.OttavaError, "the reward function `broken` raised ZeroDivisionError: no reward") as error:
            self.grpo(broken).train()
        self.assertIsInstance(error.exception.__cause__, ZeroDivisionError)
        self.assertEqual(error.exception.exit_code, 6)
        shutil.rmtree("out")
        with self.assertRaisesRegex(ottava.OttavaError, "the reward function `<lambda>` raised ValueError: a reward is inf"):
            self.grpo(lambda completions, **kwargs: [float("inf")] * len(completions)).train()


def main():
    given = sys.argv[1:]
    if given and not given[0].startswith(("Runs", "Module", "Examples", "Signals", "Arguments", "Trainers", "-")):
        os.environ["OTTAVA_BINARY"] = str(Path(given.pop(0)).resolve())
    began = time.monotonic()
    program = unittest.main(argv=[sys.argv[0], *given], exit=False)
    print(f"{program.result.testsRun} tests of the module {Path(ottava.__file__).parent} in {time.monotonic() - began:.1f} s")
    sys.exit(not program.result.wasSuccessful())


if __name__ == "__main__":
    main()
