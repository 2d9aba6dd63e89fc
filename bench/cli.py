"""Every command, thin: parse, call, print, exit code. Logic lives in host, fleet and report."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import bench
from bench.layout import default_runtime_root
from bench.plan import MIB

app = typer.Typer(
    name="bench",
    help="How fast does a node really save a checkpoint, and is what it saves correct?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bench {bench.__version__}")
        raise typer.Exit


ops_app = typer.Typer(help="DeepSpeed's compiled ops: build once, check.", no_args_is_help=True)
app.add_typer(ops_app, name="ops")


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Checkpoint throughput benchmark for GPU nodes."""


Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="Where checkpoints are written and removed again. Default: the array's mount, else a cache folder.",
    ),
]
Root = Annotated[
    Path | None, typer.Option("--root", help="The runtime root with ops and runs. Default: around this venv.")
]
Gpu = Annotated[bool, typer.Option("--gpu", help="Data on the GPU.")]
Device = Annotated[int, typer.Option("--device", min=0, help="Which GPU, counted from 0.")]
NoPatch = Annotated[
    bool,
    typer.Option("--no-patch", help="Install torch's hook only inside this benchmark's processes; no file changes."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print each case and the bytes it would write; write nothing.")]
Writers = Annotated[
    list[str] | None, typer.Option("--writer", help="Only this writer; may be repeated. Default: the published five.")
]
Repetitions = Annotated[int, typer.Option("--repetitions", min=1, help="Counted saves of each writer.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Saves before those, recorded but not counted.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of data and order. Default: drawn and recorded.")]
Zipfile = Annotated[bool, typer.Option("--zipfile", help="torch's zip format. It bypasses the FastPersist hook.")]
IoBufferMb = Annotated[
    int, typer.Option("--io_buffer_mb", "--io-buffer-mb", min=1, help="Size of the I/O buffer, in MiB.")
]
NoStatistics = Annotated[
    bool, typer.Option("--no-statistics", "--no_statistics", help="Do not print the writers' own statistics.")
]
SingleIoBuffer = Annotated[
    bool, typer.Option("--single_io_buffer", "--single-io-buffer", help="One I/O buffer, not two in turns.")
]
BlockMb = Annotated[
    int | None, typer.Option("--block_mb", "--block-mb", min=1, help="Block size of the I/O handle, in MiB.")
]
QueueDepth = Annotated[int | None, typer.Option("--queue_depth", "--queue-depth", min=1, help="Requests in flight.")]
SingleSubmit = Annotated[
    bool | None, typer.Option("--single_submit/--batch_submit", help="Submit requests one by one, or in batches.")
]
OverlapEvents = Annotated[
    bool | None,
    typer.Option("--overlap_events/--no-overlap_events", help="Submit new requests while others complete, or not."),
]
Parallelism = Annotated[
    int | None,
    typer.Option("--intra_op_parallelism", "--intra-op-parallelism", min=1, help="Threads of the I/O handle."),
]
ModelName = Annotated[str, typer.Option("--model", help="tiny-t5, gpt2-large, phi3, phi3-v or llama3-1B.")]
Pretrained = Annotated[
    str | None, typer.Option("--pretrained", help="Weights from a hub name or a folder instead of random ones.")
]
Optimizer = Annotated[bool, typer.Option("--optimizer", help="Save an Adam optimizer's state too.")]
Fused = Annotated[bool, typer.Option("--fused", help="The fused optimizer; needs --gpu.")]
Half = Annotated[bool, typer.Option("--half", help="fp16 weights.")]


@app.command("run")
def run_command(
    plan: Annotated[str, typer.Argument(help="A plan that ships (see bench plans) or a .yml file.")] = "quick",
    folder: Folder = None,
    root: Root = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Default: a new one.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Name of this host in the report.")] = None,
    gpu: Gpu = False,
    device: Device = 0,
    no_patch: NoPatch = False,
    ceiling: Annotated[bool, typer.Option("--ceiling/--no-ceiling", help="Measure the folder with fio first.")] = True,
    seed: Seed = None,
    until_stable: Annotated[
        bool,
        typer.Option("--until-stable", help="Go on, up to a cap, until the last five saves agree within 5 %."),
    ] = False,
    sustained: Annotated[
        float | None,
        typer.Option("--sustained", min=1, help="Each writer saves for so many seconds; the second half is counted."),
    ] = None,
    on_array: Annotated[
        bool, typer.Option("--on-array", help="Refuse a folder that is not on this host's NVMe array.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Run a whole plan on this host and write report.json."""
    from bench.host.command import run_plan
    from bench.plan import load_plan

    chosen = load_plan(plan)
    if gpu:
        chosen = chosen.on_gpu(device)
    changes = {"seed": seed, "until_stable": until_stable or None, "sustained_seconds": sustained}
    chosen = chosen.changed({key: value for key, value in changes.items() if value is not None})
    _end(run_plan(chosen, folder, root, run_id, host, no_patch, ceiling, dry_run, on_array))


@app.command("plans")
def plans_command() -> None:
    """List the plans that ship."""
    from bench.plan import load_plan, shipped_plans

    for name in shipped_plans():
        typer.echo(f"{name:<10} {load_plan(name).description}")


class _Parameters(dict[str, tuple[Any, Any]]):
    """Parameters of a command: name to (annotation, default)."""

    def __or__(self, other: dict[str, tuple[Any, Any]]) -> _Parameters:  # type: ignore[override]
        return _Parameters({**self, **other})


# What the four published benchmarks share, and what those with a model have besides.
_COMMON = _Parameters(
    folder=(Folder, None),
    zipfile=(Zipfile, False),
    gpu=(Gpu, False),
    device=(Device, 0),
    io_buffer_mb=(IoBufferMb, 64),
    no_statistics=(NoStatistics, False),
    single_io_buffer=(SingleIoBuffer, False),
    block_mb=(BlockMb, None),
    queue_depth=(QueueDepth, None),
    single_submit=(SingleSubmit, None),
    overlap_events=(OverlapEvents, None),
    intra_op_parallelism=(Parallelism, None),
    writer=(Writers, None),
    repetitions=(Repetitions, 3),
    warmup=(Warmup, 1),
    seed=(Seed, None),
    no_patch=(NoPatch, False),
    dry_run=(DryRun, False),
    root=(Root, None),
)
_MODEL = (
    _Parameters(
        model=(ModelName, "tiny-t5"),
        pretrained=(Pretrained, None),
        optimizer=(Optimizer, False),
        fused=(Fused, False),
        half=(Half, False),
    )
    | _COMMON
)


def _benchmark(name: str, workload: str, parameters: _Parameters, words: str) -> None:
    """Register one published benchmark as a command; typer reads its options from the signature made here."""

    def command(**given: Any) -> None:
        _single(workload, given)

    command.__doc__ = words
    command.__annotations__ = {key: annotation for key, (annotation, _) in parameters.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, (annotation, default) in parameters.items()
        ]
    )
    app.command(name)(command)


_benchmark(
    "torch-save-tensor",
    "tensor",
    _Parameters(
        mb_size=(
            Annotated[int, typer.Option("--mb_size", "--mb-size", min=1, help="Size of the tensor, in MiB.")],
            1024,
        )
    )
    | _COMMON,
    "A raw tensor through torch.save, by every published writer.",
)
_benchmark("torch-save-model", "model", _MODEL, "A Hugging Face model through torch.save, by every published writer.")
_benchmark(
    "deepspeed-save-model",
    "engine",
    _Parameters(
        zero_stage=(
            Annotated[int, typer.Option("--zero_stage", "--zero-stage", min=0, max=3, help="ZeRO stage.")],
            0,
        ),
        cpu_offload=(
            Annotated[bool, typer.Option("--cpu_offload", "--cpu-offload", help="Optimizer state in host memory.")],
            False,
        ),
    )
    | _MODEL,
    "A model in a DeepSpeed engine through save_checkpoint; also: can training resume from it?",
)
_benchmark(
    "torch-save-load-model",
    "roundtrip",
    _MODEL
    | {
        "safetensors": (Annotated[bool, typer.Option("--safetensors", help="Also save with safetensors.")], False),
        "regular_torch_save": (
            Annotated[
                bool,
                typer.Option("--regular_torch_save", "--regular-torch-save", help="Also save with plain torch.save."),
            ],
            False,
        ),
        "repetitions": (Repetitions, 1),
        "warmup": (Warmup, 0),
    },
    "Save a model with FastPersist, scramble it, load it back: bit-equal tensors and equal logits, or an error.",
)


def _single(workload: str, given: dict[str, Any]) -> NoReturn:
    """Run one benchmark, a plan of its own; ``given`` is what the command line said, by parameter name."""
    from bench.host.command import run_plan
    from bench.plan import PUBLISHED_WRITERS, parse_plan

    if workload == "roundtrip":
        also = ["torch_save"] * given.pop("regular_torch_save") + ["safetensors"] * given.pop("safetensors")
        default_writers = ["ds_aio", *also]
    else:
        default_writers = list(PUBLISHED_WRITERS)
    writers = given.pop("writer") or default_writers
    folder, root, no_patch, dry_run = (given.pop(key) for key in ("folder", "root", "no_patch", "dry_run"))
    plan = {"name": workload} | {key: given.pop(key) for key in ("repetitions", "warmup", "seed")}
    # The plan's names and units for the rest.
    block_mb = given.pop("block_mb")
    options = {
        "io_buffer_bytes": given.pop("io_buffer_mb") * MIB,
        "statistics": not given.pop("no_statistics"),
        "double_buffer": not given.pop("single_io_buffer"),
        "block_bytes": block_mb * MIB if block_mb else None,
    }
    if "mb_size" in given:
        options["size_bytes"] = given.pop("mb_size") * MIB
    benchmark = {"workload": workload, "writers": writers, "options": options | given}
    chosen = parse_plan(plan | {"benchmarks": [benchmark]}, "command line")
    _end(run_plan(chosen, folder, root, None, None, no_patch, False, dry_run))


@app.command("mend-checkpoint")
def mend_checkpoint_command(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to save_checkpoint.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be renamed, rename nothing.")] = False,
) -> None:
    """Give a DeepSpeed fast checkpoint the file names that load_checkpoint looks for (docs/resume.md)."""
    from bench.host.mend import mend_checkpoint

    renames = mend_checkpoint(folder, dry_run)
    for old, new in renames.items():
        typer.echo(f"{'would rename' if dry_run else 'renamed'} {old} to {new.name}")
    if not renames:
        typer.echo(f"nothing to rename below {folder}")


AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON instead of text.")]


@ops_app.command("build")
def ops_build_command(root: Root = None, json_: AsJson = False) -> None:
    """Compile the ops into the cache where they are not there yet, load them and try them."""
    from bench.host import ops_build

    _print_ops(ops_build.build(root or default_runtime_root()), json_)


@ops_app.command("check")
def ops_check_command(root: Root = None, json_: AsJson = False) -> None:
    """Are the ops built, and do they work? Loads them in a fresh process and writes a file with them."""
    from bench.host import ops

    _print_ops(ops.check(root or default_runtime_root()), json_)


def _print_ops(state: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(state.as_dict()))
        return
    did = "compiled" if state.built else "already there"
    typer.echo(f"{', '.join(state.ops)}: {did} in {state.folder} ({state.seconds:.1f} s)\n{state.smoke}")
    lacks = {"gds": "cuFile's headers and library", "fused_adam": "nvcc of torch's CUDA version"}
    for op in state.missing:
        typer.echo(f"{op} could not be built, it needs {lacks[op]} (docs/gds.md); its rows will say so")


if importlib.util.find_spec("paramiko"):  # the controller's environment; a host has no use for these commands
    from bench.fleet.commands import app as fleet_app

    app.add_typer(fleet_app)


def _end(code: int) -> NoReturn:
    raise typer.Exit(code)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"bench: {message}", markup=False)
    sys.exit(1)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 1, never a traceback."""
    if sys.flags.optimize:
        # DeepSpeed's writers do their I/O inside assert statements, which -O removes.
        _fail("refusing to run under python -O or PYTHONOPTIMIZE: DeepSpeed's I/O calls are inside asserts")
    try:
        app()
    except (ValueError, FileNotFoundError, PermissionError) as error:
        _fail(str(error))


if __name__ == "__main__":
    main()
