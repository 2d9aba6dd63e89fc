"""torch.distributed.checkpoint: a folder that is compared tensor by tensor, and harm to any of its files found out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.host.randomness import fill_random_
from bench.host.verify import compare
from bench.host.workloads.base import NotVerifiedError, Saved
from bench.host.writers import dcp, make_writer
from bench.host.writers.base import WriterContext
from bench.plan import Options

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def model() -> dict[str, object]:
    weights = {f"layer.{n}": fill_random_(torch.empty(1000 + n), n) for n in range(20)}
    return {"model": weights, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}}


def save(folder: Path, obj: object) -> tuple[dcp.Dcp, Saved]:
    writer = make_writer("dcp", WriterContext("model", Options(), torch.device("cpu"), folder, 512))
    assert isinstance(writer, dcp.Dcp)
    writer.prepare()
    return writer, writer.save(obj, folder / "checkpoint")


def test_a_folder_of_files_is_saved_and_loads_as_a_user_would(tmp_path: Path) -> None:
    obj = model()
    writer, saved = save(tmp_path, obj)
    assert len(saved.files) > 1
    assert all(file.parent == tmp_path / "checkpoint" for file in saved.files)
    digest = writer.verify(obj, saved)
    assert digest is not None
    assert len(digest) == 64
    loaded = writer.load(tmp_path / "checkpoint")
    compare(obj["model"], loaded["model"])
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.1


def test_memory_stays_flat_while_it_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obj = model()
    writer, saved = save(tmp_path, obj)
    monkeypatch.setattr(dcp, "BATCH_BYTES", 8000)
    sizes = []
    read = dcp._read

    def counted(into: dict[str, object], path: Path) -> None:
        sizes.append(sum(value.nbytes for value in into.values() if isinstance(value, torch.Tensor)))
        read(into, path)

    monkeypatch.setattr(dcp, "_read", counted)
    writer.verify(obj, saved)
    assert len(sizes) > 5
    assert max(sizes) < 3 * 8000


def test_a_flipped_bit_in_any_data_file_is_found_out(tmp_path: Path) -> None:
    obj = {"weights": fill_random_(torch.empty(50_000), 3)}
    writer, saved = save(tmp_path, obj)
    (data,) = [file for file in saved.files if file.stat().st_size > 100_000]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(NotVerifiedError, match="weights differs"):
        writer.verify(obj, saved)


def test_other_names_and_another_dtype_are_found_out(tmp_path: Path) -> None:
    obj = {"a": torch.ones(4)}
    writer, saved = save(tmp_path, obj)
    with pytest.raises(NotVerifiedError, match="other names"):
        writer.verify({"b": torch.ones(4)}, saved)
    with pytest.raises(NotVerifiedError, match="dtype"):
        writer.verify({"a": torch.ones(4, dtype=torch.float16)}, saved)
