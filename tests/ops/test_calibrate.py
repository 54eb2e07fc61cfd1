"""What calibrations keep on disk and share between ranks; tests/faults and tests/gpu measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from in_threads import in_threads

from torch_cubin import __main__ as cli
from torch_cubin._drop_in import aten_kernels, calibrate
from torch_cubin._native import library
from torch_cubin._pytorch import process_group

LINES = [
    calibrate.Line("product", "bfloat16", 1.25),
    calibrate.Line("product", "float32", 0.5),
    calibrate.Line("attention", "float16", 1.0),
]
ROWS = [
    {"kinds": ["product"], "dtypes": ["bfloat16"]},
    {"kinds": ["attention"], "dtypes": ["float16"]},
]


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[int]:
    """The GPUs that were measured; the cache is empty."""
    found: list[int] = []

    def measure(index: int) -> list[calibrate.Line]:
        found.append(index)
        return LINES

    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "_measure", measure)
    monkeypatch.setattr(library, "device", lambda index: {"name": "GPU", "driver": "1"})
    return found


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "calibration").glob("*.json"))


def test_quick_kinds_are_served() -> None:
    assert calibrate.rows(LINES) == ROWS


def test_it_is_measured_once_for_gpu_driver_and_kernels(measured, monkeypatch, tmp_path) -> None:
    assert [calibrate.lines_of(0), calibrate.lines_of(1)] == [LINES, LINES]
    assert measured == [0]
    monkeypatch.setattr(library, "device", lambda index: {"name": "GPU", "driver": "2"})
    calibrate.lines_of(0)
    assert measured == [0, 0]
    assert len(kept(tmp_path)) == 2
    calibrate.lines_of(0, again=True)
    assert measured == [0, 0, 0]


def test_the_command_shows_a_table(measured, monkeypatch, capsys) -> None:
    shipped: list[dict] = []
    monkeypatch.setattr(aten_kernels, "shipped_rows", lambda gpu="": shipped)
    assert cli.main(["calibrate"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "GPU, driver 1"
    assert [line.split() for line in said[3:6]] == [
        ["product", "bfloat16", "1.25", "yes"],
        ["product", "float32", "0.50", "no"],
        ["attention", "float16", "1.00", "yes"],
    ]
    shipped.append({"kinds": ["product"], "dtypes": ["float32"], "measured": "a file"})
    assert cli.main(["calibrate"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in said[3:6]] == ["no", "yes", "no"]
    assert said[-1].endswith("measured before: a file")
    assert measured == [0]
    assert cli.main(["calibrate", "--again"]) == 0
    assert measured == [0, 0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"facts": 1, "lines": []}', b"\xff", b"["])
def test_a_damaged_file_is_measured_anew(content: bytes, measured, tmp_path) -> None:
    calibrate.lines_of(0)
    (path,) = kept(tmp_path)
    good = path.read_bytes()
    path.write_bytes(content)
    assert calibrate.lines_of(0) == LINES
    assert measured == [0, 0]
    assert path.read_bytes() == good


def test_without_a_folder_every_process_measures(measured, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CACHE", "0")
    assert calibrate.lines_of(0) == LINES
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path / "file"))
    assert calibrate.lines_of(0) == LINES
    assert measured == [0, 0]


def test_of_many_at_once_one_measures(measured, tmp_path) -> None:
    in_threads(calibrate.lines_of, [(0,)] * 8)
    assert measured == [0]


def test_ranks_share_the_table_of_rank_0(measured, monkeypatch) -> None:
    store: dict[str, str] = {}
    monkeypatch.setattr(process_group, "publish", store.__setitem__)
    monkeypatch.setattr(process_group, "published", lambda key, seconds: store.get(key))
    monkeypatch.setattr(process_group, "rank", lambda: 0)
    assert calibrate._shared(0) == ROWS
    monkeypatch.setattr(calibrate, "lines_of", None)  # the others measure nothing
    monkeypatch.setattr(process_group, "rank", lambda: 1)
    assert calibrate._shared(1) == ROWS
    store.clear()
    with pytest.raises(RuntimeError, match=r"\[internal\].*rank 0"):
        calibrate._shared(1)


@pytest.fixture
def answers(monkeypatch) -> dict[int, str]:
    """What the library was given, without a GPU."""
    given: dict[int, str] = {}
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(library, "set_calibrated_speed", given.__setitem__)
    return given


def test_the_library_gets_the_rows(measured, answers) -> None:
    assert calibrate.calibrate(3) == 1
    assert json.loads(answers[3]) == {"rows": ROWS}
    assert calibrate.known_rows(3) == ROWS
    del calibrate._rows[3]


def test_a_capture_is_asked_again(measured, answers, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert calibrate.calibrate(3) == 0
    assert (measured, answers) == ([], {})


def test_a_failure_is_a_warning(answers, monkeypatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(calibrate, "lines_of", fail)
    with pytest.warns(RuntimeWarning, match="no memory"):
        assert calibrate.calibrate(3) == 1
    assert answers == {}
