"""The pages in a real browser: no console errors, every figure drawn, working legends, phone and dark mode, saving."""

import base64
import json
import os
import re
import shutil
import time
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from threepass.bench import page as bench
from threepass.models import mlp
from threepass.study import init_study
from threepass.study.compare import by_alpha, by_strength, compare, two_passes
from threepass.study.report import report
from threepass.train.config import Config
from threepass.train.data import load

pytest.importorskip("sklearn")
webdriver = pytest.importorskip("selenium.webdriver", reason="the browser test needs selenium")
BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="the browser test needs chromium and chromedriver")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
FIGURES = [
    *("curve-loss", "curve-error", "curve-input-loss"),
    *("by-strength-error-0", "by-strength-pgd-0", "by-strength-noise-0"),
    *("robust-noise", "robust-fgsm", "robust-pgd"),
    *("training-lr", "training-back-norm", "training-third-norm", "training-cosine", "training-time"),
    *("variance-pass2", "variance-pass3"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    torch.set_num_threads(1)
    variants = [two_passes(), by_alpha(0.1), *(by_strength(s) for s in (0.1, 0.3, 1.0))]
    config = Config(epochs=2, batch_size=128, lr=0.05)
    out = tmp_path_factory.mktemp("runs") / "browser"
    sizes = {"sigmas": (0.0, 0.2), "radii": (0.0, 0.05, 0.1)}
    return compare(load("digits"), lambda: mlp(64, 16, 10), config, variants, 2, out, **sizes) / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser, page, width=1280, scheme="light"):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


def shot(browser, name):
    """A picture of the whole page, where SCREENSHOTS names a folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        with open(os.path.join(folder, f"{name}.png"), "wb") as file:
            file.write(base64.b64decode(taken["data"]))


def test_every_figure_is_drawn_without_errors(browser, page):
    show(browser, page)
    found = browser.execute_script("""
        return [...document.querySelectorAll("figure")].map(figure => [figure.id,
            [...figure.querySelectorAll(".plot > g > .line")].map(line => {
                const box = line.getBoundingClientRect(), frame = figure.getBoundingClientRect();
                return line.getTotalLength() > 20 && box.left >= frame.left && box.right <= frame.right
                    && box.top >= frame.top && box.bottom <= frame.bottom && getComputedStyle(line).stroke !== "none";
            })])""")
    assert [name for name, _ in found] == FIGURES
    for name, lines in found:
        assert len(lines) >= (1 if name.startswith("by-") else 3), name
        assert all(lines), name
    images = browser.execute_script("return [...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(images) == 6 * 8
    assert set(images) == {8}
    assert browser.get_log("browser") == []


def test_legend_toggles_hide_and_show_a_series_everywhere(browser, page):
    show(browser, page)
    look = """
        const shown = [...document.querySelectorAll(`.plot > [data-series="1"]`)].map(g => getComputedStyle(g).display);
        return [document.querySelector(`[data-toggles="1"]`).getAttribute("aria-pressed"), [...new Set(shown)]]"""
    assert browser.execute_script(look) == ["true", ["inline"]]
    button = browser.find_element("css selector", '[data-toggles="1"]')
    button.click()
    assert browser.execute_script(look) == ["false", ["none"]]
    others = 'return getComputedStyle(document.querySelector(`.plot > [data-series="0"]`)).display'
    assert browser.execute_script(others) == "inline"
    button.send_keys(" ")  # by keyboard
    assert browser.execute_script(look) == ["true", ["inline"]]
    for what, part in {"training": ".curves .dashed", "spread": ".band"}.items():
        browser.find_element("css selector", f'[data-what="{what}"]').click()
        hidden = f"return [...document.querySelectorAll('{part}')].every(g => getComputedStyle(g).display === 'none')"
        assert browser.execute_script(hidden)
    assert browser.get_log("browser") == []


def test_cards_of_many_methods_stay_small(browser, page):
    """Four methods with four findings each: on a screen of 1280 pixels they leave most of the first page to figures."""
    show(browser, page)
    heights = browser.execute_script("""
        return [...document.querySelectorAll(".findings > li")].map(card => card.getBoundingClientRect().height)""")
    assert len(heights) == 4
    assert max(heights) < 190
    bottom = "return document.querySelector('.findings').getBoundingClientRect().bottom + scrollY"
    assert browser.execute_script(bottom) < 450


def test_runs_of_one_epoch_without_errors(browser, page, tmp_path):
    run = page.parent / "two-passes" / "seed-0"
    shutil.copytree(run, tmp_path / "one")
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (tmp_path / "one" / "metrics.jsonl").write_text(first + "\n")
    show(browser, report([tmp_path / "one"], tmp_path / "page"))
    assert not browser.find_elements("css selector", "#curve-loss")
    assert browser.find_element("css selector", "#curves").is_displayed()
    assert "0.05" in browser.find_element("css selector", "#dynamics table").text  # the learning rate
    assert browser.get_log("browser") == []


def frame(browser, figure):
    """The numbers along the vertical axis."""
    return browser.execute_script(
        f"return [...document.querySelectorAll('#{figure} .frame text[text-anchor=end]')].map(t => t.textContent)"
    )


def test_axes_follow_what_is_shown(browser, page):
    show(browser, page)
    before = frame(browser, "curve-loss")
    for button in browser.find_elements("css selector", "[data-toggles]")[1:]:
        button.click()
    browser.find_element("css selector", '[data-what="training"]').click()
    alone = frame(browser, "curve-loss")
    assert alone != before  # with one line left, the axis spans what that line does
    browser.find_element("css selector", "#curve-loss [data-axis]").click()
    assert frame(browser, "curve-loss") != alone
    assert browser.find_element("css selector", "#curve-loss [data-axis]").text == "log"
    assert browser.get_log("browser") == []


def test_values_under_the_pointer_in_all_figures_of_the_epochs(browser, page):
    show(browser, page)
    lines = [json.loads(line) for line in (page.parent / "two-passes/seed-0/metrics.jsonl").read_text().splitlines()]
    lines += [json.loads(line) for line in (page.parent / "two-passes/seed-1/metrics.jsonl").read_text().splitlines()]
    move = """
        const plot = document.querySelector("#curve-loss .plot"), box = plot.getBoundingClientRect();
        plot.dispatchEvent(new PointerEvent(arguments[0], {clientX: box.right - 12, clientY: box.top + 50}));
        return [...document.querySelectorAll("figure")].filter(f => f.querySelector(".cross")).map(
            f => [f.id, f.querySelector(".readout").innerText])"""
    shown = dict(browser.execute_script(move, "pointermove"))
    assert set(shown) == {name for name in FIGURES if name.startswith(("curve-", "training-"))}
    mean = sum(m["val_loss"] for m in lines if m["epoch"] == 2) / 2
    heading, first, *_ = shown["curve-loss"].splitlines()
    assert heading == "epoch 2"
    assert first.split("\t")[0] == "two passes"
    assert float(first.split("\t")[1]) == pytest.approx(mean, rel=1e-3)
    assert browser.execute_script(move, "pointerleave") == []
    assert browser.get_log("browser") == []


def test_every_example_image_shows_a_gradient(browser, page):
    """In every column the brightest pixel of some method is the end of the scale."""
    show(browser, page)
    brightest = browser.execute_script("""
        const methods = [...document.querySelectorAll(".examples tbody tr")].slice(1);
        const rows = methods.map(row => [...row.querySelectorAll("img")]);
        const top = image => {
            const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
            [canvas.width, canvas.height] = [8, 8];
            context.drawImage(image, 0, 0);
            return Math.max(...context.getImageData(0, 0, 8, 8).data.filter((_, i) => i % 4 === 1));
        };
        return rows[0].map((_, i) => Math.max(...rows.map(row => top(row[i]))))""")
    assert len(brightest) == 8
    assert min(brightest) == 255


@pytest.fixture(scope="module")
def pages(page, tmp_path_factory):
    """The report, and the pages of bench and init-study."""
    folder = tmp_path_factory.mktemp("pages")
    for file in (Path(__file__).parents[2] / "results" / "bench").glob("*.json"):
        shutil.copy(file, folder)
    init_study.run(folder, depth=3, width=32, batch=2, draws=1)
    return {"report": page, "bench": bench.write(folder), "init": folder / "init-study.html"}


@pytest.mark.parametrize("name", ["report", "bench", "init"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_sticks_out_and_text_can_be_read(browser, pages, name, width, scheme):
    show(browser, pages[name], width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    colours = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    ink, paper = (luminance(colour) for colour in browser.execute_script(colours))
    assert (paper < 0.05) == (scheme == "dark")
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7
    sizes = browser.execute_script("""
        return [...document.querySelectorAll(".plot .frame text")].map(t =>
            parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a)""")
    assert min(sizes) >= 11
    unmarked = browser.execute_script("""
        return [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth + 1)
            .filter(box => !getComputedStyle(box.querySelector("caption span"), "::after").content.includes("Scroll"))
            .length""")
    assert unmarked == 0  # a table that does not fit says so
    assert browser.get_log("browser") == []
    shot(browser, f"{name}-{scheme}-{width}")


@pytest.mark.parametrize("name", ["bench", "init"])
def test_other_pages_show_values_under_the_pointer_and_switch_axes(browser, pages, name):
    show(browser, pages[name])
    moved = browser.execute_script("""
        return [...document.querySelectorAll("figure")].filter(f => f.querySelector(".plot")).map(f => {
            const plot = f.querySelector(".plot"), box = plot.getBoundingClientRect();
            const send = kind => plot.dispatchEvent(
                new PointerEvent(kind, {clientX: (box.left + box.right) / 2, clientY: box.top + 50}));
            send("pointermove");
            const at = [f.querySelector(".cross") !== null, f.querySelector(".readout").innerText];
            send("pointerleave");
            return [...at, f.querySelector(".cross") === null];
        })""")
    assert moved
    for has_cross, values, is_gone in moved:
        assert has_cross
        assert re.search(r"\d", values)
        assert is_gone
    for button in browser.find_elements("css selector", "figure [data-axis]"):
        before = button.text
        button.click()
        assert {before, button.text} == {"linear", "log"}
    assert browser.get_log("browser") == []


def luminance(colour: str) -> float:
    parts = [int(c) / 255 for c in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_figures_can_be_saved(browser, page, tmp_path):
    show(browser, page, scheme="dark")
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.find_element("css selector", '[data-toggles="2"]').click()
    for kind in ("svg", "png"):
        browser.find_element("css selector", f'#curve-loss [data-as="{kind}"]').click()
        wait_for(tmp_path / f"curve-loss.{kind}")
    root = ET.parse(tmp_path / "curve-loss.svg").getroot()
    assert {g.get("data-series") for g in root.findall(".//{*}g[@data-series]")} == {
        "0",
        "1",
        "3",
        "4",
    }  # as on the page
    assert root.get("viewBox") == root.get("data-whole")
    assert "fill:#fff" in root.find("{*}style").text  # a paper is white
    picture = (tmp_path / "curve-loss.png").read_bytes()
    assert int.from_bytes(picture[16:20], "big") == 4 * float(root.get("width"))
    assert browser.get_log("browser") == []


def wait_for(path):
    end = time.monotonic() + 10
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < end, f"{path.name} was not saved"
        time.sleep(0.05)


def test_a_screen_reader_finds_names(browser, page):
    show(browser, page)
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
    for role in ("button", "image", "heading", "table", "rowheader", "columnheader", "region"):
        names = [name for r, name in named if r == role]
        assert names, role
        assert all(names), (role, names)
    buttons = [name for role, name in named if role == "button"]
    assert "two passes" in buttons
    assert "Save PNG of Loss" in buttons
    levels = [n["properties"] for n in tree if n.get("role", {}).get("value") == "heading" and not n.get("ignored")]
    depths = [p["value"]["value"] for properties in levels for p in properties if p["name"] == "level"]
    assert depths[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(depths)), json.dumps(depths)
