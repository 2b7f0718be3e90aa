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
    assert project["requires-python"] == ">=" + ".".join(map(str, versions.OLDEST))


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
    monkeypatch.setattr(versions.sys, "version_info", (3, 11, 7))
    counts = {"2.11": 0, "2.10": 3}
    monkeypatch.setattr(versions, "run", lambda version, selection: {"failed": counts[version]})
    assert versions.main(["2.11"]) == 0
    assert versions.main(["2.10"]) == 1
    assert list(json.loads(versions.RESULTS.read_text()).items()) == [("2.10", {"failed": 3}), ("2.11", {"failed": 0})]
    counts["2.10"] = 0
    assert versions.main(["2.10"]) == 0
    assert json.loads(versions.RESULTS.read_text())["2.10"] == {"failed": 0}


def test_another_python_has_an_entry_and_an_environment_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "pins", lambda: "")
    monkeypatch.setattr(versions, "run", lambda version, selection: {"python": str(versions.python_with(version))})
    made = []
    monkeypatch.setattr(
        versions.venv, "create", lambda place, with_pip: (place.mkdir(parents=True), made.append(place))
    )
    monkeypatch.setattr(versions.subprocess, "run", lambda command, check: None)
    for python in [(3, 11, 7), (3, 12, 1), (3, 12, 3)]:
        monkeypatch.setattr(versions.sys, "version_info", python)
        versions.record("2.13", versions.run("2.13", []))
    assert [place.name for place in made] == ["torch-2.13", "torch-2.13-python-3.12"]
    assert list(json.loads(versions.RESULTS.read_text())) == ["2.13", "2.13-python-3.12"]


def test_part_of_the_suite_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "run", lambda version, selection: {"failed": len(selection)})
    assert versions.main(["2.11", "--", "tests/core/test_grid.py"]) == 1
    assert not versions.RESULTS.exists()
