"""Reports a run to real servers of MLflow and Trackio, and writes a file for Weights & Biases. Kills and resumes the run, stops the servers for a while,
and compares what the trackers have with metrics.jsonl.

usage: check_trackers.py OTTAVA
"""

import http.server
import json
import os
import pathlib
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib

import tiny_run
from mlflow.tracking import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record

ottava = str(pathlib.Path(sys.argv[1]).resolve())
folder = pathlib.Path(tempfile.mkdtemp())
tiny_run.write(folder)
MLFLOW, TRACKIO, WANDB = 5601, 5602, 5603
os.environ.update(
    MLFLOW_TRACKING_URI=f"http://127.0.0.1:{MLFLOW}", TRACKIO_SERVER_URL=f"http://127.0.0.1:{TRACKIO}", TRACKIO_WRITE_TOKEN="key",
    TRACKIO_DIR=str(folder / "trackio"), GRADIO_ANALYTICS_ENABLED="False", MLFLOW_DISABLE_TELEMETRY="true", WANDB_ERROR_REPORTING="false",
)  # fmt: skip


def start(command, url):
    """Starts a server, and waits until it answers."""
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return server
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{command[0]} does not answer at {url}")


def stop(servers):
    """Ends servers with the processes that they have started."""
    for server in servers:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def mlflow():
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(MLFLOW), "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    return start([*command, "--serve-artifacts", "--artifacts-destination", str(folder / "artifacts")], f"http://127.0.0.1:{MLFLOW}/health")


def trackio():
    code = f"import trackio; trackio.show(open_browser=False, block_thread=True, share=False, server_port={TRACKIO}, host='127.0.0.1')"
    return start([sys.executable, "-c", code], f"http://127.0.0.1:{TRACKIO}/")


ARGS = [
    ottava, "train", "run.toml", "--set", 'report_to=["mlflow","trackio","wandb"]', "--set", "project=words", "--set", "run_name=first",
    "--set", 'report_files=["loss.svg"]', "--set", "save_steps=100",
]  # fmt: skip


def train(*more):
    done = subprocess.run([*ARGS, *more], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def metrics():
    """Returns the steps and losses of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def records(path):
    """Returns the records of a file of Weights & Biases: the log format of LevelDB after a header of seven bytes."""
    data = path.read_bytes()
    assert data[:7] == b":W&B\xe1\xbe\x00", data[:7]
    at, found, part = 7, [], b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        content = data[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + content) == crc
        part += content
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(part)
            found, part = [*found, record], b""
        at += 7 + length
    return found


class FakeWandb(http.server.BaseHTTPRequestHandler):
    """A server that accepts what `wandb sync` sends."""

    sent = []

    def do_POST(self):  # noqa: N802
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-encoding") == "gzip":
            body = zlib.decompress(body, 31)
        FakeWandb.sent.append((self.path, body.decode(errors="replace")))
        project = {"name": "words", "entity": {"name": "me"}}
        bucket = {"id": "UnVuOg==", "name": "id", "displayName": "first", "description": "", "config": "{}", "sweepName": None, "project": project, "historyLineCount": 0}
        viewer = {"id": "me", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        data = {"upsertBucket": {"bucket": bucket, "inserted": True}, "viewer": viewer, "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None},
                "createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}  # fmt: skip
        answer = json.dumps({"data": data, "exitcode": None, "limits": {}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *_):
        pass


servers = []
try:
    servers = [mlflow(), trackio()]
    # A run that is killed, and resumed: the checkpoint of step 2 is the last.
    train("--set", "max_steps=2")
    child = subprocess.Popen([*ARGS, "--resume", "--set", "max_steps=100000"], cwd=folder, stderr=subprocess.DEVNULL)
    while max(metrics()) < 40:
        time.sleep(0.05)
    child.kill()
    child.wait()
    # The servers are gone for a whole start of the run, and come back for the next one.
    stop(servers)
    log = train("--resume", "--set", "max_steps=20")
    assert "gets metrics later" in log, log
    servers = [mlflow(), trackio()]
    train("--resume", "--set", "max_steps=30")
    expected = metrics()
    assert max(expected) == 30

    client = MlflowClient()
    experiment = client.get_experiment_by_name("words")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1, "every start is in the same run"
    run = runs[0]
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    assert run.data.params["training.max_steps"] == "2" and run.data.tags["changed.training.max_steps"] == "30"
    history = client.get_metric_history(run.info.run_id, "loss")
    found = {}
    for metric in sorted(history, key=lambda metric: metric.timestamp):
        found[metric.step] = metric.value
    assert {step: found.get(step) for step in expected} == expected, "MLflow lacks losses"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["loss.svg"]
    assert not any(str(folder) in value for value in run.data.params.values()), "a folder was sent"

    with sqlite3.connect(next((folder / "trackio").rglob("words.db"))) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY timestamp").fetchall()
        names = database.execute("SELECT COUNT(DISTINCT run_name) FROM metrics").fetchone()
    assert names == (1,), names
    found = {step: json.loads(text).get("loss") for step, text in rows}
    assert {step: found.get(step) for step in expected} == expected, "Trackio lacks losses"

    files = list((folder / "run/wandb").rglob("*.wandb"))
    assert len(files) == 1, files
    all_records = records(files[0])
    kinds = [record.WhichOneof("record_type") for record in all_records]
    assert kinds[0] == "run" and kinds[-1] == "exit" and set(kinds[1:-1]) == {"history"}, kinds
    assert all_records[0].run.project == "words" and all_records[0].run.display_name == "first"
    values = [{item.key: json.loads(item.value_json) for item in record.history.item} for record in all_records[1:-1]]
    assert {value["_step"]: value["loss"] for value in values if "loss" in value} == expected, "the file has other steps"

    fake = http.server.ThreadingHTTPServer(("127.0.0.1", WANDB), FakeWandb)
    threading.Thread(target=fake.serve_forever, daemon=True).start()
    env = dict(os.environ, WANDB_BASE_URL=f"http://127.0.0.1:{WANDB}", WANDB_API_KEY="0" * 40, WANDB_ENTITY="me")
    wandb = [sys.executable, "-m", "wandb", "sync", str(files[0].parent)]
    done = subprocess.run(wandb, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    streamed = "".join(body for path, body in FakeWandb.sent if "file_stream" in path)
    assert '\\"_step\\":30' in streamed or '"_step": 30' in streamed, done.stderr + done.stdout + str([path for path, _ in FakeWandb.sent])
    print("4 cases, 4 hold")
finally:
    stop(servers)
