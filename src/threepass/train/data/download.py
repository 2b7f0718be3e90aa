"""Downloads: checked against a checksum, resumed where they broke off, from the first mirror that answers."""

import os
import sys
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..extras import require

TIMEOUT = 20  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """A file on the net: its place below the data folder, its mirrors and md5, and what to unpack if it is a tar."""

    path: str
    urls: tuple[str, ...]
    md5: str
    unpack: tuple[str, ...] = ()


def download(remote: Remote, folder: Path) -> None:
    """Puts the file, or the files unpacked from it, below the folder; each appears there whole or not at all."""
    target = folder / remote.path
    _retrieve(remote, target)
    if remote.unpack:
        _unpack(target, remote.unpack, folder)
        target.unlink()


def _retrieve(remote: Remote, target: Path) -> None:
    pooch = require("pooch", "downloading data")
    http_error = require("urllib3.exceptions", "downloading data").HTTPError
    part = target.with_name(target.name + ".part")
    failures = []
    # Two rounds: the second goes on where a connection broke, or anew where a checksum was wrong.
    for url in remote.urls * 2:
        try:
            pooch.retrieve(url, f"md5:{remote.md5}", target.name, target.parent, downloader=partial(_resume, part=part))
            return
        except (OSError, http_error, ValueError) as error:  # requests' errors are OSErrors, a wrong checksum ValueError
            failures.append(f"{url}: {error}")
    lines = "\n".join(f"  - {failure}" for failure in failures)
    raise ConnectionError(
        f"could not download {target.name}:\n{lines}\n"
        f"Run the same command again to resume, or put the file into {target.parent} yourself."
    )


def _resume(url: str, output: str, _: Any, part: Path) -> None:
    """Pooch's downloader: appends what is missing to the .part file, and turns it into `output` when it is whole."""
    requests = require("requests", "downloading data")
    have = part.stat().st_size if part.exists() else 0
    # identity, and raw bytes below: a .gz must arrive as it is, not unzipped on the way.
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code != 416:  # 416: there is nothing after what we have; the checksum tells whether it is all
            answer.raise_for_status()
            if answer.status_code != 206:  # a server without ranges starts from the beginning
                have = 0
            length = answer.headers.get("Content-Length")
            with part.open("ab" if have else "wb") as file, _bar() as bar:
                task = bar.add_task(part.stem, completed=have, total=length and have + int(length))
                for chunk in answer.raw.stream(1 << 16, decode_content=False):
                    bar.advance(task, file.write(chunk))
    os.replace(part, output)


def _bar() -> Any:
    progress = require("rich.progress", "downloading data")
    console = require("rich.console", "downloading data").Console(stderr=True)
    columns = ("{task.description}", progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    return progress.Progress(*columns, console=console, disable=not sys.stderr.isatty())


def _unpack(archive: Path, wanted: tuple[str, ...], folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for name in wanted:
            member = tar.extractfile(name)
            assert member is not None, f"{name} is no file in {archive}"  # the checksum vouches for it
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_name(target.name + ".part")
            fresh.write_bytes(member.read())
            os.replace(fresh, target)
