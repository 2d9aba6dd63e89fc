"""Random data is incompressible, repeatable and, as weights, finite."""

from __future__ import annotations

import zlib

import pytest
import torch

from bench.host.deepspeed_cpu import cast_to_byte_tensor
from bench.host.randomness import BLOCK_BYTES, RandomBytes, fill_random_, fill_weights_

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2]


def data_of(tensor: torch.Tensor) -> bytes:
    return cast_to_byte_tensor(tensor).numpy().tobytes()


@pytest.fixture(scope="module")
def data() -> bytes:
    return data_of(fill_random_(torch.empty(3 * BLOCK_BYTES + 4096 + 5, dtype=torch.uint8), 7))


def test_does_not_compress(data: bytes) -> None:
    assert len(zlib.compress(data, 6)) >= len(data)


@pytest.mark.parametrize("chunk", [4096, 128 * 1024])
def test_does_not_deduplicate(data: bytes, chunk: int) -> None:
    whole = len(data) // chunk * chunk
    chunks = [data[start : start + chunk] for start in range(0, whole, chunk)]
    assert len(set(chunks)) == len(chunks)


def test_blocks_differ_although_they_share_a_base(data: bytes) -> None:
    first, second = data[:BLOCK_BYTES], data[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert len(zlib.compress(first[:16384] + second[:16384], 9)) >= 32768


def test_every_bit_of_every_byte_is_used(data: bytes) -> None:
    counts = torch.bincount(torch.frombuffer(bytearray(data), dtype=torch.uint8), minlength=256).double()
    assert (counts / counts.mean() - 1).abs().max() < 0.05


def test_two_fills_of_one_stream_share_nothing() -> None:
    stream = RandomBytes(3)
    one, two = (stream.fill_(torch.empty(8192, dtype=torch.uint8)) for _ in range(2))
    assert len(zlib.compress(data_of(one) + data_of(two), 9)) >= 16384


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (13,), (5, 7)], ids=str)
def test_same_seed_same_bytes_and_another_seed_others(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one, again, other = (data_of(fill_random_(torch.empty(shape, dtype=dtype), seed)) for seed in (1, 1, 2))
    assert one == again
    if len(one) >= 8:
        assert one != other


def test_bool_stays_a_bool() -> None:
    assert set(data_of(fill_random_(torch.empty(1000, dtype=torch.bool), 1))) == {0, 1}


def test_slices_and_transposes_are_filled_and_nothing_beside_them() -> None:
    whole = torch.zeros(64, 64, dtype=torch.uint8)
    fill_random_(whole[3:9, 5:50], 1)
    assert whole[3:9, 5:50].float().std() > 50
    assert int(whole.bool().sum()) <= 6 * 45
    odd = torch.zeros(100, dtype=torch.uint8)
    fill_random_(odd[3:90], 1)
    assert not odd[:3].any()
    assert not odd[90:].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weights_are_finite_small_and_hardly_compressible(dtype: torch.dtype) -> None:
    weights = RandomBytes(5).fill_weights_(torch.empty(300_000, dtype=dtype))
    real = (torch.view_as_real(weights) if weights.is_complex() else weights).double()
    assert torch.isfinite(real).all()
    assert real.abs().max() < 2
    assert real.unique().numel() > 60
    data = data_of(weights)
    assert len(zlib.compress(data, 9)) > 0.86 * len(data)


def test_weights_of_a_module_are_repeatable_and_tied_ones_stay_tied() -> None:
    def build() -> torch.nn.Module:
        module = torch.nn.ModuleDict({"a": torch.nn.Linear(20, 30), "b": torch.nn.Linear(20, 30)})
        module["b"].weight = module["a"].weight
        return fill_weights_(module, 11)

    one, again = build(), build()
    assert one["a"].weight is one["b"].weight
    for first, second in zip(one.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(one["a"].bias, one["b"].bias)


def test_weights_must_be_floats() -> None:
    with pytest.raises(ValueError, match="int64"):
        RandomBytes(1).fill_weights_(torch.zeros(3, dtype=torch.int64))
