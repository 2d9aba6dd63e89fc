"""What decides about DeepSpeed's compiled ops: keys, environments, words. No torch here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.host import cuda, ops, ops_build

CPU = ops.Target("2.6.0", "0.19.8", "3.11", "x86_64", "glibc-2.36", "f1")
CUDA = cuda.Cuda(Path("/cuda"), (Path("/driver"), Path("/cuda/lib64/stubs")), compiler=True, cufile=True)
GPU = replace(CPU, accelerator="cuda", cuda="12.4", capabilities=("9.0",))


@pytest.mark.parametrize(
    "difference",
    [
        {"torch": "2.7.1"},
        {"deepspeed": "0.19.7"},
        {"python": "3.12"},
        {"machine": "aarch64"},
        {"libc": "glibc-2.39"},
        {"cpu_flags": "f2"},
        {"accelerator": "cuda", "cuda": "12.4"},
    ],
)
def test_everything_the_machine_code_depends_on_is_in_the_key(difference: dict[str, str]) -> None:
    assert replace(CPU, **difference).key != CPU.key


def test_gpus_and_cuda_are_in_the_key() -> None:
    assert len({GPU.key, replace(GPU, cuda="12.6").key, replace(GPU, capabilities=("8.0", "9.0")).key}) == 3


def test_a_key_is_a_readable_folder_name() -> None:
    assert CPU.key.startswith("torch2.6.0-ds0.19.8-py3.11-cpu-")
    assert "/" not in replace(GPU, cuda="12.4").key


def test_the_order_of_flags_and_cores_does_not_change_the_key() -> None:
    one = "processor: 0\nmodel name\t: Xeon\nflags\t\t: sse avx2\n"
    assert ops.cpu_flags(one) == ops.cpu_flags(one + one)
    assert ops.cpu_flags(one) != ops.cpu_flags(one.replace("avx2", "avx512f"))


def environment(**inherited: str) -> dict[str, str]:
    return ops_build.build_environment(inherited, GPU, Path("/stage"), Path("/venv"), CUDA)


def test_an_architecture_list_of_the_user_does_not_reach_the_builder() -> None:
    assert environment(TORCH_CUDA_ARCH_LIST="10.0a")["TORCH_CUDA_ARCH_LIST"] == "9.0"
    on_cpu = ops_build.build_environment({"TORCH_CUDA_ARCH_LIST": "10.0a"}, CPU, Path("/s"), Path("/v"), None)
    assert "TORCH_CUDA_ARCH_LIST" not in on_cpu


def test_ops_are_compiled_into_their_own_folder_with_the_environments_ninja() -> None:
    built = environment(PATH="/usr/bin", TORCH_EXTENSIONS_DIR="/elsewhere", DS_BUILD_AIO="1")
    assert built["TORCH_EXTENSIONS_DIR"] == "/stage"
    assert built["PATH"] == "/venv/bin:/usr/bin"
    assert built["CUDA_HOME"] == "/cuda"
    assert "DS_BUILD_AIO" not in built


@pytest.mark.parametrize("name", ["CFLAGS", "CXXFLAGS", "CXX"])
def test_ndebug_never_reaches_the_compiler(name: str) -> None:
    assert environment(**{name: "g++ -O2 -DNDEBUG -DNDEBUG=1 -g"})[name] == "g++ -O2 -g"


def test_an_op_without_its_asserts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "async_io.so"
    path.write_bytes(b"\x7fELF io_submit")
    with pytest.raises(ops.OpsError, match="NDEBUG"):
        ops_build._refuse_without_asserts(path)
    path.write_bytes(b"\x7fELF io_submit __assert_fail")
    ops_build._refuse_without_asserts(path)


@pytest.mark.parametrize(("cpus", "available", "expected"), [(16, 64e9, 16), (64, 8e9, 5), (8, 1e9, 1)])
def test_compilers_do_not_outrun_memory(cpus: int, available: float, expected: int) -> None:
    assert ops_build.jobs(cpus, int(available)) == expected


LOG = """\
[1/12] c++ -MMD -MF deepspeed_py_aio.o.d -DTORCH_EXTENSION_NAME=async_io -c deepspeed_py_aio.cpp
FAILED: deepspeed_py_aio.o
In file included from deepspeed_py_aio.cpp:10:
deepspeed_aio_types.h:8:10: fatal error: libaio.h: No such file or directory
    8 | #include <libaio.h>
compilation terminated.
ninja: build stopped: subcommand failed.
Traceback (most recent call last):
  File "torch/utils/cpp_extension.py", line 2209, in _run_ninja_build
RuntimeError: Error building extension 'async_io'
"""


def test_a_failed_build_shows_the_compilers_words_first() -> None:
    words = ops_build.compiler_words(LOG)
    assert words.startswith("deepspeed_aio_types.h:8:10: fatal error: libaio.h")


def test_words_without_an_error_are_the_end_of_the_log() -> None:
    assert ops_build.compiler_words("one\ntwo\nthree", lines=2) == "two\nthree"


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        (LOG, "libaio-dev"),
        ("undefined reference to `io_pgetevents@LIBAIO_0.5'", "0.3.112 or newer"),
        ("fatal error: Python.h: No such file", "python3-dev"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS=1"),
        ("/bin/sh: 1: c++: not found", "C++ compiler"),
        ("/bin/sh: line 1: g++: command not found", "C++ compiler"),
        ("OSError: CUDA_HOME environment variable is not set.", "CUDA toolkit"),
        ("fatal error: error writing to /tmp/cc.s: No space left on device", "make room"),
    ],
)
def test_a_failed_build_says_what_to_do(log: str, advice: str) -> None:
    assert advice in ops_build.advice(log)


def test_what_a_host_needs_and_what_only_some_rows_want() -> None:
    assert ops_build.ops_for("cpu", None) == (["pin_memory", "async_io"], [])
    needed = ["pin_memory", "async_io", "utils"]
    assert ops_build.ops_for("cuda", CUDA) == (needed, ["gds", "fused_adam"])
    assert ops_build.ops_for("cuda", replace(CUDA, compiler=False)) == (needed, ["gds"])
    assert ops_build.ops_for("cuda", replace(CUDA, cufile=False)) == (needed, ["fused_adam"])


def test_the_drivers_library_is_found_where_the_linker_does_not_look() -> None:
    assert environment(LIBRARY_PATH="/mine")["LIBRARY_PATH"] == "/driver:/cuda/lib64/stubs:/mine"


def test_what_was_built_against_packages_can_load_their_libraries() -> None:
    tree = replace(CUDA, compiler=False)
    made = ops_build.build_environment({"LD_LIBRARY_PATH": "/mine"}, GPU, Path("/stage"), Path("/venv"), tree)
    assert made["LD_LIBRARY_PATH"] == "/cuda/lib64:/mine"
    # A whole toolkit must not come before torch's own libraries.
    assert "LD_LIBRARY_PATH" not in ops_build.build_environment({}, GPU, Path("/stage"), Path("/venv"), CUDA)


def test_half_a_build_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").write_bytes(b"1234")
    assert ops.read_manifest(tmp_path) is None
    manifest = tmp_path / ops.MANIFEST
    manifest.write_text('{"build": "b", "ops": {"async_io": 4}}')
    assert ops.read_manifest(tmp_path) is not None
    (tmp_path / "async_io" / "async_io.so").write_bytes(b"12")
    assert ops.read_manifest(tmp_path) is None
    for broken in ('{"ops": {"async', "[]", '{"ops": 3}'):
        manifest.write_text(broken)
        assert ops.read_manifest(tmp_path) is None


def test_a_lock_left_by_a_killed_process_holds_nobody_up(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = f"""if True:
        import fcntl, time
        file = open({str(lock)!r}, "a")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("held", flush=True)
        time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ops.OpsError, match="time limit"), ops_build._locked(lock, time.monotonic()):
            pass
        holder.kill()
        holder.wait()
    with ops_build._locked(lock, time.monotonic()):
        pass


def test_a_waiting_build_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    order = []
    with ops_build._locked(lock, time.monotonic()):
        waiter = threading.Thread(target=lambda: _enter(lock, order))
        waiter.start()
        time.sleep(0.3)
        order.append("first")
    waiter.join(timeout=20)
    assert order == ["first", "second"]


def _enter(lock: Path, order: list[str]) -> None:
    with ops_build._locked(lock, time.monotonic() + 20):
        order.append("second")


def test_a_build_past_its_time_limit_is_killed_with_its_compilers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"sleep 300 & echo $! > {tmp_path}/pid; echo compiling; wait"
    codes = ops_build.run_logged({log: ["sh", "-c", script]}, os.environ, time.monotonic() + 1, together=1)
    assert codes == {log: None}
    assert log.read_text() == "compiling\n"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the compiler outlived its build")


def test_builds_run_together_each_with_its_own_log(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    # Each of the first two waits for the other: they end only when both run at once.
    meet = f"touch {tmp_path}/$0; until [ -e {tmp_path}/$1 ]; do sleep 0.05; done; echo $0 met $1; exit $2"
    commands = {
        logs[0]: ["sh", "-c", meet, "a", "b", "0"],
        logs[1]: ["sh", "-c", meet, "b", "a", "3"],
        logs[2]: ["sh", "-c", "echo later"],
    }
    assert ops_build.run_logged(commands, os.environ, time.monotonic() + 20, together=2) == dict(
        zip(logs, (0, 3, 0), strict=True)
    )
    assert [log.read_text() for log in logs] == ["a met b\n", "b met a\n", "later\n"]


def test_when_the_needed_ops_fail_nothing_else_is_waited_for(tmp_path: Path) -> None:
    needed, beside, later = (tmp_path / name for name in ("needed.log", "beside.log", "later.log"))
    commands = {needed: ["false"], beside: ["sleep", "300"], later: ["true"]}
    codes = ops_build.run_logged(commands, os.environ, time.monotonic() + 60, together=2)
    assert codes == {needed: 1, beside: None, later: None}
    assert not later.exists()


def test_python_without_asserts_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    for command in (ops_build.build, ops.check, ops.activate):
        with pytest.raises(ops.OpsError, match="PYTHONOPTIMIZE"):
            command(tmp_path)


def test_an_environment_without_torch_says_so(tmp_path: Path) -> None:
    with pytest.raises(ops.OpsError, match="torch is not installed"):
        ops.check(tmp_path)
