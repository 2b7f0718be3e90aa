"""The program `threepass`, also as `python -m threepass`."""

from typing import NoReturn


def run_and_exit() -> NoReturn:
    try:
        from .cli import main
    except ImportError as error:
        if error.name == "cyclopts":
            error = ImportError("the command line needs cyclopts: pip install 'threepass[train]'")
        raise SystemExit(f"threepass: {error}") from error
    raise SystemExit(main())


if __name__ == "__main__":
    run_and_exit()
