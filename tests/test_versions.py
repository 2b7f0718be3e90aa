"""What `make test-versions` runs, and what it writes down."""

import json
import re
import tomllib

import pytest
import versions


def test_the_promised_versions_are_run():
    project = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (re.fullmatch(r"torch>=([\d.]+)", d).group(1) for d in project["dependencies"])
    newest = re.search(r"^torch==(\d+\.\d+)", (versions.ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    assert versions.VERSIONS[0] == oldest
    assert versions.VERSIONS[-1] == newest


def test_other_packages_are_those_of_the_tests():
    pins = re.findall("^([a-zA-Z][^=]*)==", versions.pins(), re.MULTILINE)
    known = re.findall("^([a-zA-Z][^=]*)==", (versions.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {*known} - {*pins} == {"torch", "triton"}
    assert "torch-geometric" in pins


def test_a_version_that_is_not_promised_is_refused():
    with pytest.raises(SystemExit, match=r"2\.10, .*: 1\.0"):
        versions.main(["2.11", "1.0"])


def test_outcomes_are_kept_by_version(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    counts = {"2.11": 0, "2.10": 3}
    monkeypatch.setattr(versions, "run", lambda version, selection: {"failed": counts[version]})
    assert versions.main(["2.11"]) == 0
    assert versions.main(["2.10"]) == 1
    assert list(json.loads(versions.RESULTS.read_text()).items()) == [("2.10", {"failed": 3}), ("2.11", {"failed": 0})]
    counts["2.10"] = 0
    assert versions.main(["2.10"]) == 0
    assert json.loads(versions.RESULTS.read_text())["2.10"] == {"failed": 0}


def test_part_of_the_suite_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "run", lambda version, selection: {"failed": len(selection)})
    assert versions.main(["2.11", "--", "tests/core/test_grid.py"]) == 1
    assert not versions.RESULTS.exists()
