"""report.json is somebody else's input: whatever is in it, one clear error or a sound report."""

from __future__ import annotations

import json
import random

import pytest
from synthetic import report

from bench.results import ReportError, parse_host_report

WHOLE = json.dumps(report())


def changed(path: str, value: str) -> str:
    """The report with the JSON text ``value`` at a dotted path."""
    data = report()
    place = data
    *way, last = path.split(".")
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = "@@"
    return json.dumps(data).replace('"@@"', value)


def test_a_whole_report_is_read():
    assert parse_host_report(WHOLE, "report.json").host == "gpu-node-1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        (WHOLE[:-40], "was it cut off"),
        (b"\xff\xfe" + WHOLE.encode(), "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        ("[]", "holds a list"),
        ("null", "holds a NoneType"),
        (changed("schema_version", "2"), "schema version 2, this bench reads version 1"),
        (changed("cases.0.samples.0.ack_seconds", "NaN"), "NaN is not a number"),
        (changed("cases.0.statistics", '{"x": -Infinity}'), "-Infinity is not a number"),
        (changed("cases.0.statistics", '{"x": 1e999}'), "1e999 is too large"),
        (changed("cases.0.payload_bytes", "1" * 5000), "not JSON"),
        (changed("cases.0.payload_bytes", "1" * 400), "payload_bytes"),
        (changed("cases.0.payload_bytes", "1.5"), "payload_bytes"),
        (changed("cases.0.payload_bytes", "-1"), "payload_bytes"),
        (changed("cases.0.samples.0.durable_seconds", "1e300"), "durable_seconds"),
        (changed("cases.0.durable_bytes_per_second", "1e300"), "durable_bytes_per_second"),
        (changed("cases.0.status", '"splendid"'), "cases.0.status"),
        (changed("cases.0.options", "[" * 40 + "]" * 40), "nested deeper than 16"),
        (changed("finished_at", '"yesterday"'), "finished_at"),
        (changed("run_id", '"../../etc"'), "run_id"),
        (json.dumps({**report(), "extra": 1}), "extra"),
    ],
)
def test_nonsense_is_refused_with_its_place(text, words):
    with pytest.raises(ReportError) as caught:
        parse_host_report(text, "report.json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("report.json")


def test_random_damage_is_an_error_or_a_sound_report_never_a_crash():
    chance = random.Random(20261129)
    refused = 0
    for _ in range(400):
        text = list(WHOLE)
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(len(text))
            text[place : place + chance.choice([0, 1, 30])] = chance.choice(
                ['"', "{", "]", "9" * 30, "\x00", "null", ""]
            )
        try:
            parse_host_report("".join(text), "report.json")
        except ReportError:
            refused += 1
    assert refused > 200
