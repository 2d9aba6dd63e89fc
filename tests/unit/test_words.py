"""How benchmarks are named for people."""

from __future__ import annotations

from typing import Any

import pytest

from bench.plan import GIB, MIB, load_plan
from bench.words import benchmark_words


@pytest.mark.parametrize(
    ("workload", "options", "size", "words"),
    [
        ("tensor", {"size_bytes": 512 * MIB}, 512 * MIB, "tensor, 512 MiB"),
        ("tensor", {"gpu": True, "device": 3, "zipfile": True}, 0, "tensor, GPU 3, zip format"),
        ("model", {"model": "phi3", "gpu": True}, 15_284_318_208, "model phi3 fp32, GPU, 14.2 GiB"),
        ("model", {"pretrained": "/models/x", "half": True}, GIB, "model /models/x half, 1 GiB"),
        ("engine", {"optimizer": True, "fused": True}, 0, "engine tiny-t5 fp32, fused optimizer, ZeRO 0"),
        ("engine", {"optimizer": True, "zero_stage": 2, "cpu_offload": True}, 0,
         "engine tiny-t5 fp32, optimizer, ZeRO 2, offload"),
        ("tensor", {"queue_depth": 32, "double_buffer": False}, 0, "tensor, queue_depth 32, double_buffer False"),
        ("model\n\x1b[2J", {"model": "a\nb", "zero_stage": 1}, 0, "model [2J a b fp32"),
    ],
)  # fmt: skip
def test_a_benchmark_is_named_by_what_makes_it_different(
    workload: str, options: dict[str, Any], size: int, words: str
) -> None:
    assert benchmark_words(workload, options, size) == words


@pytest.mark.parametrize("name", ["quick", "standard", "full", "gpu"])
def test_no_two_benchmarks_of_a_plan_have_the_same_name(name: str) -> None:
    names = [
        benchmark_words(one.workload, one.options.model_dump(exclude_defaults=True), one.options.size_bytes)
        for one in load_plan(name).benchmarks
    ]
    assert len(set(names)) == len(names)
