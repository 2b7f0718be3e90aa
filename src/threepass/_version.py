"""Which threepass runs: its version, and the commit of its source tree."""

import os
import subprocess
from importlib import metadata
from pathlib import Path


def code_version() -> str:
    try:
        return metadata.version("threepass")
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+source"


def commit() -> str | None:
    """The commit of the source tree, from $THREEPASS_COMMIT or git; None if neither knows it."""
    if named := os.environ.get("THREEPASS_COMMIT"):
        return named
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
