"""The merged trace follows the trace event format as Perfetto's importer reads it (docs/getting-started/other-formats.md and
src/trace_processor/importers/json of google/perfetto): it keeps what it cannot place out of the view, without an error."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from ssdtrain.tools.report.exports import merge_traces
from tests.telemetry.test_trace import traced

Event = dict[str, Any]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file that `ssdtrain report --trace` writes of two ranks."""
    directory = tmp_path_factory.mktemp("trace")
    for rank in (0, 1):
        traced(directory, "2-3", steps=3, rank=rank, in_flight="128KiB")
    assert merge_traces(directory, directory / "trace.json") == [0, 1]
    return (directory / "trace.json").read_text()


@pytest.fixture(scope="module")
def events(text: str) -> list[Event]:
    found: list[Event] = json.loads(text)["traceEvents"]
    return found


def nanoseconds(microseconds: float) -> int:
    """As the importer rounds a number."""
    return round(microseconds * 1000)


def test_it_is_strict_json_with_the_events_in_one_array(text: str) -> None:
    def unknown(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=unknown)
    assert isinstance(found["traceEvents"], list) and found["displayTimeUnit"] in ("ms", "ns")
    assert text.startswith('{"traceEvents":')  # the format is recognised by its beginning


def test_every_event_has_the_fields_of_its_phase(events: list[Event]) -> None:
    assert {event["ph"] for event in events} == {"X", "C", "M"}  # no flows, whose ends would have to match
    for event in events:
        assert type(event["name"]) is str and event["name"], event
        for number in ("pid", "tid"):
            assert type(event[number]) is int and 0 <= event[number] < 2**32, event
        # A list as a value makes older versions drop the event.
        assert all(type(value) in (str, int, float) for key, value in event.items() if key != "args"), event
        if event["ph"] == "M":
            continue
        assert type(event["ts"]) in (int, float) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert type(event["dur"]) in (int, float) and event["dur"] >= 0, event
        else:
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())


def test_every_process_and_track_has_a_name(events: list[Event]) -> None:
    processes = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    threads = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert all(type(e["args"]["name"]) is str and e["args"]["name"] for e in [*processes, *threads])
    assert sorted(e["pid"] for e in processes) == [0, 1]
    named = [(e["pid"], e["tid"]) for e in threads]
    assert len(set(named)) == len(named)
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(named)
    # Names come first: an importer that reads in order knows a track before its events.
    kinds = [e["ph"] == "M" for e in events if e["pid"] == 0]
    assert kinds == sorted(kinds, reverse=True)


def test_spans_of_a_track_nest_to_the_nanosecond(events: list[Event]) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for index, event in enumerate(events):
        if event["ph"] == "X":
            began = nanoseconds(event["ts"])
            tracks[event["pid"], event["tid"]].append((began, index, began + nanoseconds(event["dur"])))
    for found in tracks.values():
        around: list[int] = []  # ends of the spans that are open
        for began, _, ended in sorted(found):  # by time, then as they are in the file
            while around and around[-1] <= began:
                around.pop()
            assert not around or ended <= around[-1]
            around.append(ended)
