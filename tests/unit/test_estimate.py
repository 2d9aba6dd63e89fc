"""How much a case writes, before torch is imported; test_models and test_engine measure the same ratios."""

from __future__ import annotations

import pytest

from bench.host.estimate import file_bytes, payload_bytes
from bench.plan import MIB, Case, Options

PARAMETERS = 1_235_814_400  # Llama 3.2 1B, tied weights once


@pytest.mark.parametrize(
    ("workload", "options", "bytes_a_parameter"),
    [
        ("model", {}, 4),
        ("model", {"half": True}, 2),
        ("model", {"optimizer": True}, 12),
        ("model", {"optimizer": True, "half": True, "gpu": True}, 6),
        ("roundtrip", {"optimizer": True, "half": True, "gpu": True}, 6),
        ("engine", {}, 4),
        ("engine", {"optimizer": True}, 12),
        ("engine", {"optimizer": True, "zero_stage": 1}, 16),
        ("engine", {"optimizer": True, "zero_stage": 3}, 12),
        ("engine", {"optimizer": True, "half": True, "gpu": True, "zero_stage": 2}, 14),
    ],
)
def test_bytes_a_parameter(workload: str, options: dict[str, object], bytes_a_parameter: int) -> None:
    case = Case(workload=workload, writer="ds_aio", options=Options(model="llama3-1B", **options))
    assert payload_bytes(case) == bytes_a_parameter * PARAMETERS
    assert file_bytes(case) > bytes_a_parameter * PARAMETERS


def test_a_tensor_is_what_was_asked_and_a_pretrained_model_is_not_known() -> None:
    assert payload_bytes(Case(workload="tensor", writer="direct", options=Options(size_bytes=7 * MIB))) == 7 * MIB
    assert payload_bytes(Case(workload="model", writer="direct", options=Options(pretrained="somewhere"))) is None
    assert file_bytes(Case(workload="tensor", writer="ds_mock")) == 0
