#!/usr/bin/env python3
"""Checks that a page of `ottava monitor` keeps its memory while it stays open and its run grows.

usage: scripts/check_monitor_memory.py OTTAVA [MINUTES]       (60 by default; needs chromium and `pip install websockets`)

Trains a small model for some steps, stops the process, and appends two lines of metrics per second, as a run of 120 steps per minute would.
Chromium has the page open; after a collection of garbage, the size of its heap and the number of its nodes are read every two minutes. Fails if
the heap of the last quarter exceeds that of the second quarter by more than a tenth and by more than the data that came in between.
"""

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0"]
PER_SECOND = 2
BETWEEN = 120  # seconds between two samples


def main():
    program, minutes = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"output_dir={run}", "max_steps=1000000", "logging_steps=5", "val_set_size=0", "device=cpu"]
        train = subprocess.Popen(
            [program, "train", "configs/quickstart.toml", *(x for setting in settings for x in ("--set", setting))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text("utf-8").count("\n") < 10:
            time.sleep(0.5)
        train.send_signal(signal.SIGSTOP)
        monitor = subprocess.Popen([program, "monitor", str(run), "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        browser = None
        try:
            address = next(found[0] for line in monitor.stdout if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)))
            browser = subprocess.Popen(
                ["chromium", *FLAGS, f"--user-data-dir={folder}/browser", address], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
            port = next(found[0] for line in browser.stderr if (found := re.findall(r"ws://127\.0\.0\.1:(\d+)", line)))
            watch(port, address, metrics, minutes)
        finally:
            for process in (browser, monitor, train):
                if process:
                    process.kill()
                    process.wait()


def watch(port, address, metrics, minutes):
    pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
    page = next(page for page in pages if page["url"].startswith(address))
    last = json.loads(metrics.read_text("utf-8").splitlines()[-1])
    samples, appended, start = [], 0, time.monotonic()
    with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
        number = 0

        def call(method):
            nonlocal number
            number += 1
            socket.send(json.dumps({"id": number, "method": method}))
            while (answer := json.loads(socket.recv(timeout=60))).get("id") != number:
                pass
            return answer["result"]

        call("Performance.enable")
        while (passed := time.monotonic() - start) < minutes * 60:
            with metrics.open("a", encoding="utf-8") as file:
                for _ in range(int(passed * PER_SECOND) - appended):
                    last["step"] += 1
                    last["loss"] *= 0.9999
                    appended += 1
                    file.write(json.dumps(last) + "\n")
            if passed >= len(samples) * BETWEEN:
                call("HeapProfiler.collectGarbage")
                values = {value["name"]: value["value"] for value in call("Performance.getMetrics")["metrics"]}
                samples.append((values["JSHeapUsedSize"], values["Nodes"]))
                print(f"{passed / 60:5.1f} min  {appended:6} lines  heap {samples[-1][0] / 1e6:6.2f} MB  nodes {samples[-1][1]:.0f}", flush=True)
            time.sleep(0.5)
    quarter = max(len(samples) // 4, 1)
    second, fourth = (statistics.median(heap for heap, _ in part) for part in (samples[quarter : 2 * quarter], samples[-quarter:]))
    data = PER_SECOND * 60 * minutes / 2 * len(json.dumps(last))
    print(f"heap in the second quarter {second / 1e6:.2f} MB, in the fourth {fourth / 1e6:.2f} MB")
    if fourth > 1.1 * second and fourth - second > data:
        sys.exit("the page keeps memory")


if __name__ == "__main__":
    main()
