"""Faults inside a case's process, for tests: PYTHONPATH puts this file before every program's start.

Acts only in ``bench.host.child`` and only as the variable FAULT says.
"""

import os
import subprocess
import sys
import time

FAULT = os.environ.get("FAULT", "")


def exits(*_):
    print("the driver says: no", flush=True)
    os._exit(7)


def hangs(*_):
    time.sleep(3600)


def chatters(save):
    def chatter(self, obj, path):
        subprocess.Popen(["sh", "-c", 'while echo \'{"event": "sampled"}\'; do sleep 0.01; done'])
        return save(self, obj, path)

    return chatter


def step_clock():
    real, steps = time.time, iter(range(10**9))
    time.time = lambda: real() - 1000 * next(steps)


if "bench.host.child" in getattr(sys, "orig_argv", []) and FAULT in ("exit", "hang", "chatter", "clock"):
    from bench.host.writers.torch_save import TorchSave

    if FAULT == "exit":
        TorchSave.save = exits
    elif FAULT == "hang":
        TorchSave.save = hangs
    elif FAULT == "chatter":
        TorchSave.save = chatters(TorchSave.save)
    else:
        step_clock()
