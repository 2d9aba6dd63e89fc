"""Does our figure agree with the bare mechanism, run by hand?

    <bench_runtime_root>/venv/bin/python tests/crosscheck.py [--folder F] [--mb-size 256] [--rounds 15]

For torch_save and ds_aio two processes save the same kind of tensor in turns, in one run: a case of the
benchmark, as ``bench run`` drives it, and a few lines without any of our harness: open, torch.save, close,
fsync, a stopwatch. Printed are both medians with their scaled MAD and the median of the ratios pair by
pair; exit code 1 when that median is further from 1 than the noise of the pairs allows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import layout, stats
from bench.host.child import CaseSpec
from bench.host.children import CaseProcess
from bench.plan import MIB, Case, Options

LIMIT_SECONDS = 300
# The ratio's own uncertainty: this many scaled MADs of the pairs, over the root of their number, and a floor.
SIGMAS = 3.0
FLOOR = 0.03


def bare(writer: str, size: int, folder: Path, root: Path) -> None:
    """The mechanism by hand: one save for every line on standard input, its seconds on standard output."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what DeepSpeed prints must not come between the figures
    import torch

    from bench.host import deepspeed_cpu, ops  # makes FastFileWriter work without a GPU; times nothing

    tensor = torch.empty(size, dtype=torch.uint8).random_(256)
    if writer == "ds_aio":
        ops.activate(root)
        deepspeed_cpu.install()
        from deepspeed.io import FastFileWriter, FastFileWriterConfig
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load(verbose=False).aio_handle(8 * MIB, 8, False, False, 1)
        buffer = deepspeed_cpu.locked_buffer(handle, 64 * MIB)
    print("ready", file=stdout)
    for number, _ in enumerate(sys.stdin):
        path = folder / f"bare-{number}.pt"
        os.sync()
        start = time.perf_counter()
        if writer == "ds_aio":
            file = FastFileWriter(str(path), FastFileWriterConfig(handle, buffer, double_buffer=True))
            torch.save(tensor, file, _use_new_zipfile_serialization=False)
            file.close()
        else:
            torch.save(tensor, path, _use_new_zipfile_serialization=False)
        for name in (path, folder):
            descriptor = os.open(name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        seconds = time.perf_counter() - start
        path.unlink()
        print(seconds, file=stdout)


def pairs(writer: str, size: int, folder: Path, root: Path, rounds: int) -> list[tuple[float, float]]:
    """Seconds of the benchmark and of the bare mechanism, in turns; the first pair is a warm-up and left out."""
    case = Case(workload="tensor", writer=writer, options=Options(size_bytes=size))
    ours = CaseProcess(CaseSpec(case=case, seed=1, folder=folder, root=root), folder / "case.log")
    theirs = subprocess.Popen(
        [sys.executable, __file__, "--bare", writer, "--mb-size", str(size // MIB), "--folder", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def sample_ours() -> float:
        ours.command("sample", check=False)
        ours.event(LIMIT_SECONDS)
        return float(ours.event(LIMIT_SECONDS)["durable_seconds"])

    def sample_theirs() -> float:
        theirs.stdin.write("\n")
        theirs.stdin.flush()
        return float(theirs.stdout.readline())

    try:
        ours.command("prepare")
        ours.event(LIMIT_SECONDS)
        theirs.stdout.readline()
        found = []
        for number in range(rounds + 1):
            if number % 2:  # who comes first changes, so that neither always writes after the other
                mine = sample_ours()
                found.append((mine, sample_theirs()))
            else:
                hand = sample_theirs()
                found.append((sample_ours(), hand))
        return found[1:]
    finally:
        theirs.kill()
        ours.kill()


def main() -> int:
    """Run both writers; 0 when they agree, 1 when one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; default: a new folder below the benchmark's")
    parser.add_argument("--mb-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size, root = arguments.mb_size * MIB, layout.default_runtime_root()
    if arguments.bare:
        bare(arguments.bare, size, arguments.folder, root)
        return 0
    base = arguments.folder or layout.default_bench_folder()
    base.mkdir(parents=True, exist_ok=True)
    agree = True
    print(f"{arguments.mb_size} MiB, {arguments.rounds} pairs in turns, seconds until durable")
    print(f"{'writer':<12} {'bench':>16} {'by hand':>16}   ratio of pairs")
    with tempfile.TemporaryDirectory(dir=base, prefix="crosscheck-") as folder:
        for writer in ("torch_save", "ds_aio"):
            found = pairs(writer, size, Path(folder), root, arguments.rounds)
            ratios = [ours / theirs for ours, theirs in found]
            allowed = max(FLOOR, SIGMAS * stats.scaled_mad(ratios) / len(ratios) ** 0.5)
            within = abs(stats.median(ratios) - 1) <= allowed
            agree &= within
            columns = [
                f"{stats.median(values):.3f} +- {stats.scaled_mad(values):.3f}" for values in zip(*found, strict=True)
            ]
            print(
                f"{writer:<12} {columns[0]:>16} {columns[1]:>16}   {stats.median(ratios):.3f}, "
                f"{'agree' if within else 'DIFFER'} (noise allows 1 +- {allowed:.3f})"
            )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
