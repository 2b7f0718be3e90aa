"""The version of threepass that runs."""

from importlib import metadata


def code_version() -> str:
    try:
        return metadata.version("threepass")
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+source"
