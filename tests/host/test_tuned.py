"""torch.save with torch's own quick settings: taken where this torch has them, and put back."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from bench.host.writers import torch_save_tuned
from bench.host.writers.torch_save_tuned import tuned


def test_the_crc_is_off_inside_and_what_it_was_outside(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    with tuned(pinned_copies=False) as settings:
        assert settings == {"crc32": False, "pinned_copies": False}
        assert torch.serialization.get_crc32_options() is False
        torch.save(torch.arange(50_000), tmp_path / "without.pt")
    assert torch.serialization.get_crc32_options() is before
    torch.save(torch.arange(50_000), tmp_path / "with.pt")

    def crc(path: Path) -> list[int]:
        return [entry.CRC for entry in zipfile.ZipFile(path).infolist() if "/data/" in entry.filename]

    assert crc(tmp_path / "without.pt") != crc(tmp_path / "with.pt")
    assert torch.equal(torch.load(tmp_path / "without.pt"), torch.arange(50_000))


def test_settings_come_back_after_an_error() -> None:
    before = torch.serialization.get_crc32_options()
    with pytest.raises(RuntimeError, match="broke"), tuned(pinned_copies=True):
        raise RuntimeError("broke")
    assert torch.serialization.get_crc32_options() is before


def test_pinned_copies_are_taken_where_torch_has_them_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        use_pinned_memory_for_d2h = False

    config = Config()
    monkeypatch.setattr(torch_save_tuned, "_save_config", lambda: config)
    with tuned(pinned_copies=True) as settings:
        assert settings["pinned_copies"] is True
        assert config.use_pinned_memory_for_d2h is True
    assert config.use_pinned_memory_for_d2h is False
    with tuned(pinned_copies=False):
        assert config.use_pinned_memory_for_d2h is False


def test_a_torch_without_these_settings_saves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.serialization, "set_crc32_options")
    monkeypatch.setattr(torch_save_tuned, "_save_config", lambda: None)
    with tuned(pinned_copies=True) as settings:
        assert settings == {"crc32": True, "pinned_copies": False}
