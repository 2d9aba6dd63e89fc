"""Plans: what ships is valid, and a mistake is answered with where and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan import (
    FASTPERSIST_WRITERS,
    MIB,
    PUBLISHED_WRITERS,
    WORKLOADS,
    WRITER_TAGS,
    PlanError,
    handle_defaults,
    load_plan,
    parse_plan,
    shipped_plans,
)

TENSOR = {"workload": "tensor", "writers": ["torch_save"]}


def plan_of(**benchmark: object) -> dict[str, object]:
    return {"name": "mine", "benchmarks": [{**TENSOR, **benchmark}]}


@pytest.mark.parametrize("name", shipped_plans())
def test_every_shipped_plan_loads(name: str) -> None:
    plan = load_plan(name)
    assert plan.name == name
    assert plan.description


def test_quick_covers_every_workload_with_every_published_writer_and_needs_no_gpu() -> None:
    cases = load_plan("quick").cases()
    for workload in WORKLOADS:
        writers = {case.writer for case in cases if case.workload == workload}
        wanted = set(PUBLISHED_WRITERS) - ({"ds_mock"} if workload == "roundtrip" else set())
        assert wanted <= writers, workload
    assert not any(case.options.gpu for case in cases)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (plan_of(optoins={}), ["benchmarks.0.optoins", "did you mean options?"]),
        (plan_of(options={"size_byte": 1}), ["size_byte", "did you mean size_bytes?"]),
        ({**plan_of(), "repetition": 3}, ["repetition", "did you mean repetitions?"]),
        (plan_of(writers=["ds_aoi"]), ["unknown writer 'ds_aoi'", "did you mean ds_aio?"]),
        (plan_of(options={"model": "gpt2-lrage"}), ["unknown model 'gpt2-lrage'", "did you mean gpt2-large?"]),
        (plan_of(options={"size_bytes": -1}), ["size_bytes", "greater than 0"]),
        (plan_of(options={"zero_stage": 4}), ["zero_stage", "less than or equal to 3"]),
        (plan_of(options={"optimizer": True, "half": True}), ["optimizer with half needs gpu"]),
        (plan_of(options={"fused": True}), ["fused needs gpu"]),
        (plan_of(workload="engine", options={"zero_stage": 1}), ["ZeRO 1 to 3", "optimizer"]),
        (plan_of(writers=[]), ["writers"]),
        ({"name": "empty", "benchmarks": []}, ["benchmarks"]),
        (["not", "a", "mapping"], ["must be a mapping"]),
        ({**plan_of(), "case_timeout_seconds": float("nan")}, ["case_timeout_seconds"]),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_near_word(data: object, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(data, "my.yml")
    for word in ["my.yml", *words]:
        assert word in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan({**plan_of(optoins={}), "repetition": 3}, "my.yml")
    assert "optoins" in str(caught.value)
    assert "repetition" in str(caught.value)


def test_an_unknown_plan_suggests_the_near_one_and_lists_all() -> None:
    with pytest.raises(PlanError, match=r"did you mean quick\?.*full, .*quick, standard"):
        load_plan("quik")


def test_a_plan_file_that_is_missing_or_not_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan .*none\.yml: No such file"):
        load_plan(str(tmp_path / "none.yml"))
    broken = tmp_path / "broken.yml"
    broken.write_text("name: [")
    with pytest.raises(PlanError, match=r"broken\.yml is not YAML"):
        load_plan(str(broken))


def test_the_handle_has_the_published_values() -> None:
    assert handle_defaults("engine") == {
        "block_bytes": 8 * MIB,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 2,
    }
    assert handle_defaults("tensor")["overlap_events"] is False
    assert handle_defaults("model")["intra_op_parallelism"] == 1


def test_on_gpu_moves_every_benchmark() -> None:
    plan = load_plan("quick").on_gpu(3)
    assert all(case.options.gpu and case.options.device == 3 for case in plan.cases())


def test_every_fastpersist_writer_has_a_tag() -> None:
    assert set(FASTPERSIST_WRITERS) <= set(WRITER_TAGS)
    assert len(set(WRITER_TAGS.values())) == len(WRITER_TAGS)


def test_two_ways_to_end_a_case_are_one_too_many() -> None:
    with pytest.raises(PlanError, match="two ways to end a case"):
        parse_plan({**plan_of(), "until_stable": True, "sustained_seconds": 60}, "my.yml")
    with pytest.raises(PlanError, match="max_repetitions is below repetitions"):
        parse_plan({**plan_of(), "until_stable": True, "max_repetitions": 2}, "my.yml")


def test_a_changed_plan_is_checked_again() -> None:
    plan = load_plan("quick")
    assert plan.changed({"sustained_seconds": 60.0}).sustained_seconds == 60.0
    with pytest.raises(PlanError, match="two ways to end a case"):
        plan.changed({"sustained_seconds": 60.0, "until_stable": True})
