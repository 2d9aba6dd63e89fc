"""A stand-in for the installed benchmark, where only its start is tested."""

# The same command line and the same status file as the real one.
FAKE = """#!/usr/bin/env python3
import json, os, sys, time
run, plan, _, folder, _, run_id, _, host, *rest = sys.argv[1:]
if "--fail" in rest:
    sys.exit("bench: folder " + folder + " is full")
if "--dry-run" in rest:
    print("would write 1 GiB"); sys.exit(0)
place = os.path.join(os.environ["BENCH_RUNTIME_ROOT"], "runs", run_id)
status = dict(run_id=run_id, host=host, pid=os.getpid(), state="running", session=os.getsid(0),
              argv=sys.argv, folder=os.getcwd(), ops=os.environ.get("BENCH_OPS_CACHE"), plan=open(plan).read())
with open(place + "/part", "w") as file: json.dump(status, file)
os.rename(place + "/part", place + "/status.json")
time.sleep(60)
"""
