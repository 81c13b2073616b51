"""Folders that appear whole: replaced in one step, also behind a link, and put back where that step broke."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from molora_cli.core.bundle import writing
from molora_cli.core.bundle.writing import new_folder, tidy


def write(target: Path, text: str) -> None:
    with new_folder(target, force=True, own_file="own") as folder:
        (folder / "own").write_text(text)


def test_a_reader_always_finds_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "made"
    write(target, "0")
    if not writing._exchange(target, target):
        pytest.skip("this disk cannot exchange two folders")
    lost, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                target.stat()
            except FileNotFoundError as error:
                lost.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, 31):
            write(target, str(number))
    finally:
        stop.set()
        reader.join()
    assert not lost
    assert (target / "own").read_text() == "30"
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_link_to_a_folder_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(writing, "_exchange", lambda one, other: False)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "made")
    write(tmp_path / "there" / "made", "old")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "made" / "own").read_text() == "new"
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["made"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "there"]


def test_a_failure_keeps_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "made", "old")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "made", force=True, own_file="own"):
        raise ZeroDivisionError
    assert (tmp_path / "made" / "own").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_what_a_dead_writer_moved_aside_returns(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above every process id of Linux
    aside = tmp_path / f".made.old-{dead}-abc"
    write(aside, "old")
    (tmp_path / f".made.tmp-{dead}-abc").mkdir()
    tidy(tmp_path / "made")
    assert (tmp_path / "made" / "own").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["made"]
