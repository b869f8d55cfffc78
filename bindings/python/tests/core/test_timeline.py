"""Tests of the timeline and the flight recorder: Perfetto's own Python package reads the timelines."""

import json
import os
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

RINGRUN = os.environ.get("RINGRUN") or shutil.which("ringrun")
PROGRAM = """
import os, signal, sys, time
import numpy as np, ringtrain
group = ringtrain.init()
for step in range(40):
    values = np.ones(1000 * (step + 1), np.float32)
    group.all_reduce(values, "sum")
if sys.argv[1] == "fail" and group.rank == 1:
    group.abort("on purpose")
if sys.argv[1] == "hang" and group.rank == 1:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
if sys.argv[1] != "succeed":
    group.barrier()
print(group.write_timeline())
"""


@dataclass
class Slice:
    track: str
    name: str
    begin: int
    end: int
    values: dict[str, Any] = field(default_factory=dict)


def run(folder: Path, *arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    if RINGRUN is None:
        pytest.fail("ringrun is not on PATH")
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    command = [RINGRUN, "-n", "2", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment)


def value_of(annotation: Any) -> Any:
    return getattr(annotation, annotation.WhichOneof("value"))


def read_slices(content: bytes) -> tuple[dict[int, list[Slice]], dict[int, dict[str, Any]]]:
    """Returns the slices and the description of each rank. Checks that the slices of each track are nested."""
    messages = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        reason="NOT TESTED: timelines, because the package perfetto is not installed",
    )
    trace = messages.Trace.FromString(content)
    tracks: dict[int, tuple[int, str]] = {}
    slices: dict[int, list[Slice]] = defaultdict(list)
    descriptions: dict[int, dict[str, Any]] = {}
    open_slices: dict[int, list[Slice]] = defaultdict(list)
    ranks: dict[int, int] = {}
    times: dict[int, int] = defaultdict(int)
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id > 0
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in ranks | tracks
            if track.HasField("process"):
                ranks[track.uuid] = track.process.pid - 1
            else:
                tracks[track.uuid] = (ranks[track.parent_uuid], track.name)
            continue
        event = packet.track_event
        assert packet.timestamp >= times[event.track_uuid], "events of a track are in the order of time"
        times[event.track_uuid] = packet.timestamp
        values = {annotation.name: value_of(annotation) for annotation in event.debug_annotations}
        if event.type == messages.TrackEvent.TYPE_INSTANT:
            descriptions[ranks[event.track_uuid]] = values
            continue
        rank, name = tracks[event.track_uuid]
        if event.type == messages.TrackEvent.TYPE_SLICE_BEGIN:
            part = Slice(name, event.name, packet.timestamp, packet.timestamp, values)
            slices[rank].append(part)
            open_slices[event.track_uuid].append(part)
        else:
            assert event.type == messages.TrackEvent.TYPE_SLICE_END
            open_slices[event.track_uuid].pop().end = packet.timestamp
    assert not any(open_slices.values())
    return slices, descriptions


def check_alignment(slices: dict[int, list[Slice]], descriptions: dict[int, dict[str, Any]]) -> int:
    """Checks that all ranks execute the collective with the same number at the same time. Returns the number of collectives."""
    # The errors of two ranks add up. An error is some microseconds, but on a busy machine the shortest round trip may take a
    # millisecond.
    error_ns = 2000 * max(description["clock_error_us"] for description in descriptions.values())
    assert error_ns <= 10_000_000
    collectives: dict[tuple[int, int], dict[int, Slice]] = defaultdict(dict)
    for rank, parts in slices.items():
        for part in parts:
            if part.name == "all_reduce":
                collectives[part.values["group"], part.values["sequence"]][rank] = part
    for number, parts in collectives.items():
        assert parts.keys() == slices.keys(), number
        assert len({part.values["call"] for part in parts.values()}) == 1, number
        # An all-reduce ends on no rank before it has begun on every rank.
        begin, end = max(part.begin for part in parts.values()), min(part.end for part in parts.values())
        assert begin <= end + error_ns, f"all-reduce {number} begins {begin - end} ns after it has ended on another rank"
    return len(collectives)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_perfetto_reads_the_timeline_of_a_training_run(tmp_path: Path, transport: str) -> None:
    options = ["--timeline", "t", "--epochs", 2, "--report", "report.json", "--transport", transport]
    done = run(tmp_path, "ringtrain", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    slices, descriptions = read_slices((tmp_path / "t").read_bytes())
    assert sorted(slices) == sorted(descriptions) == [0, 1]
    assert check_alignment(slices, descriptions) > report["steps"]
    for rank in slices:
        training = [part for part in slices[rank] if part.track == "training"]
        names = {"data", "forward and backward", "sum and update", "optimizer", "wait", "evaluation"}
        assert names <= {part.name for part in training}
        steps = {part.values["step"] for part in training if part.name == "sum and update"}
        assert steps == set(range(1, report["steps"] + 1))
        if rank == 0:
            # The report has the times of rank 0. The parts of the steps make up almost all of this time.
            times = report["step_times"]
            total = sum(times[part] for part in ("compute_seconds", "exposed_communication_seconds", "data_seconds"))
            parts = [part for part in training if part.name in ("data", "forward and backward", "sum and update")]
            seconds = sum(part.end - part.begin for part in parts) / 1e9
            assert 0.7 * total < seconds < 1.01 * total
        data = [part for part in slices[rank] if part.track == "communication"]
        assert all(part.values["result"] == "completed" for part in data)
        assert {part.values["bytes"] for part in data if part.name == "all_reduce"} - {0}
        steps = [part for part in slices[rank] if part.track == "steps"]
        assert {"send", "reduce"} <= {part.name for part in steps} <= {"send", "receive", "reduce"}
        # Over links, a step names the peer and the bytes of one call.
        sent = sum(part.values["bytes"] for part in steps if part.name == "send" and "peer" in part.values)
        if transport == "tcp":
            assert sent > sum(part.values["bytes"] for part in data) / 4
        description = descriptions[rank]
        assert (description["rank"], description["ranks"], description["operations_left_out"]) == (rank, 2, 0)


def test_a_python_program_writes_its_timeline_or_the_parts_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"RING_TIMELINE": "t", "RING_FLIGHT_RECORDER": "flight"}
    done = run(tmp_path, "python", "program.py", "succeed", **variables)
    assert done.returncode == 0, done.stderr
    assert "timeline t: " in done.stdout and not any((tmp_path / "flight").iterdir())
    slices, descriptions = read_slices((tmp_path / "t").read_bytes())
    assert check_alignment(slices, descriptions) == 40
    reductions = [part for part in slices[1] if part.name == "all_reduce"]
    assert [part.values["bytes"] for part in reductions] == [4000 * (step + 1) for step in range(40)]
    assert all(part.values["line"].endswith("program.py:7") for part in reductions)

    (tmp_path / "t").unlink()
    done = run(tmp_path, "python", "program.py", "fail", **variables)
    assert done.returncode != 0
    assert not (tmp_path / "t").exists()
    parts = sorted(tmp_path.glob("t.rank.*"))
    assert len(parts) == 2, done.stderr
    slices, descriptions = read_slices(b"".join(part.read_bytes() for part in parts))
    assert check_alignment(slices, descriptions) == 40
    for rank in range(2):
        record = json.loads((tmp_path / "flight" / f"rank.{rank}.json").read_text())
        assert "on purpose" in record["reason"] and record["operations_total"] == 40 + (rank != 1)
        assert [operation["sequence"] for operation in record["operations"]][:40] == list(range(40))


def test_sigterm_makes_python_programs_write_their_records(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path, "python", "program.py", "hang", RING_FLIGHT_RECORDER="flight")
    assert done.returncode != 0
    for rank in range(2):
        record = json.loads((tmp_path / "flight" / f"rank.{rank}.json").read_text())
        # Rank 0 may get the signal before it calls the barrier. It may also notice that rank 1 has ended before it handles its
        # own signal, and then the barrier has failed.
        results = [operation["result"] for operation in record["operations"]]
        assert results.count("completed") >= 40, record
        assert results.count("active") + results.count("failed") <= (rank != 1), record
        assert record["reason"] == "the process got SIGTERM" or " was lost" in record["reason"], record
