"""report.html in headless Chromium: it draws what the results say, sorts, and asks nobody for anything."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from shardlab.sweep.page import write_page
from shardlab.sweep.results import Results, read_results
from tests.sweep.folders import GIB, MIB, ended, write_finished_sweep, write_jobs, write_large_sweep

PHONE, DESKTOP = 390, 1400  # CSS pixels
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
IN_COLUMN = """const header = [...document.querySelectorAll("th")].find(th => th.innerText.startsWith(arguments[0]));
return [...document.querySelectorAll("tbody tr")].map(row => row.cells[header.cellIndex].dataset.value);"""
PLOTTED = """return document.getElementById(arguments[0]).data.map(
  ({name, x, y, base, customdata, text}) => ({name, x, y, base, customdata, text}));"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        reason = "needs Chromium: apt-get install chromium chromium-driver"
        if os.environ.get("SHARDLAB_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Results]:
    """Sweeps whose reports are written."""
    folder = tmp_path_factory.mktemp("reports")
    sweeps = {
        "finished": write_finished_sweep(folder / "finished"),
        "large": write_large_sweep(folder / "large"),
        "plans": write_finished_sweep(folder / "plans", mode="plan"),
        "failed": write_jobs(folder / "failed", [("seed=1", ended("failed", "KeyError"))]),
    }
    results = {name: read_results(sweep) for name, sweep in sweeps.items()}
    for each in results.values():
        write_page(each)
    return results


@pytest.fixture
def opened(chromium, reports) -> Iterator[Callable[..., Results]]:
    """Opens a report; at the end, checks that no script failed and nothing was asked of any network."""

    def open_report(name: str, *, width: int = DESKTOP) -> Results:
        results = reports[name]
        address = f"file://{results.folder}/report.html"
        if chromium.current_url != address:  # a page takes a while to open: tests in a row share it
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
            chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            chromium.get_log("performance")  # so far: of Chromium's own pages
            chromium.get(address)
            assert requests(chromium) == [address]
        return results

    yield open_report
    assert chromium.get_log("browser") == []
    assert requests(chromium) == []


def requests(browser: webdriver.Chrome) -> list[str]:
    """What was asked for since this was asked last; Chromium's own start page left out."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("data:", "blob:", "chrome:"))]


def plotted(browser: webdriver.Chrome, plot: str) -> list[dict[str, Any]]:
    return browser.execute_script(PLOTTED, plot)


def shown(browser: webdriver.Chrome, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def test_the_points_are_the_results_and_the_line_is_the_front(chromium, opened):
    results = opened("finished")
    front, points = plotted(chromium, "front-plot")
    rows = {row["job"]: row for row in results.completed}
    assert sorted(points["customdata"]) == sorted(rows)
    for job, x, y in zip(points["customdata"], points["x"], points["y"], strict=True):
        assert (x * MIB, y) == (rows[job]["memory.allocated_peak_bytes"], rows[job]["perf.tokens_per_s"])
    assert list(zip(front["x"], front["y"], strict=True)) == [(40, 5200), (80, 5900)]
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#front-plot .scatterlayer .point")) == 4  # and they are drawn
    assert points["text"] == ["<b>2, advised</b>", "<b>1</b>", "3", "0"]
    assert shown(chromium, "h1").startswith("Use job 2 (sharding=no_shard precision=fp32 accumulation=none)")
    assert shown(chromium, ".command") == (
        "torchrun --nproc-per-node 2 train.py sharding=no_shard precision=fp32 accumulation=none train.global_batch=32"
    )


def test_bars_and_curves_are_drawn(chromium, opened):
    opened("finished")
    totals: dict[tuple[int, str], float] = {}
    for trace in plotted(chromium, "memory-plot"):
        for (job, kind), begin, length in zip(trace["customdata"], trace["base"], trace["x"], strict=True):
            assert begin == pytest.approx(totals.get((job, kind), 0))  # each begins where the one before it ends
            totals[job, kind] = begin + length
    measured, predicted = {2: 80, 1: 40, 3: 70, 0: 50, 4: 90}, {2: 81, 1: 41, 3: 71, 0: 51}
    expected = {(job, "measured"): mib for job, mib in measured.items()}
    assert totals == pytest.approx(expected | {(job, "predicted"): mib for job, mib in predicted.items()})
    assert len(plotted(chromium, "communication-plot")) == 3
    assert [trace["name"] for trace in plotted(chromium, "loss-plot")] == ["job 2", "job 1", "job 3", "job 0"]
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#loss-plot .scatterlayer .js-line")) == 4
    for plot, mark in (("memory-plot", ".bars .point"), ("communication-plot", ".bars .point")):
        assert chromium.find_elements(By.CSS_SELECTOR, f"#{plot} {mark}")


def test_the_table_sorts_by_any_column_with_what_is_not_known_last(chromium, opened):
    opened("finished")

    def header(name: str):
        return next(th for th in chromium.find_elements(By.CSS_SELECTOR, "th") if th.text.startswith(name))

    speed = header("tokens/s")
    assert chromium.execute_script(IN_COLUMN, "tokens/s")[:4] == ["5900.0", "5200.0", "5100.0", "4800.0"]
    speed.find_element(By.TAG_NAME, "button").click()
    assert chromium.execute_script(IN_COLUMN, "tokens/s") == ["4800.0", "5100.0", "5200.0", "5900.0", "", "", "", ""]
    assert speed.get_attribute("aria-sort") == "ascending"
    speed.find_element(By.TAG_NAME, "button").click()
    assert chromium.execute_script(IN_COLUMN, "tokens/s") == ["5900.0", "5200.0", "5100.0", "4800.0", "", "", "", ""]
    assert speed.get_attribute("aria-sort") == "descending"
    status = header("status")
    status.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)  # without a mouse
    assert chromium.execute_script(IN_COLUMN, "status") == ["completed"] * 4 + ["failed", "killed", "oom", "skipped"]
    assert (speed.get_attribute("aria-sort"), status.get_attribute("aria-sort")) == (None, "ascending")
    header("predicted").find_element(By.TAG_NAME, "button").click()  # of unlike lengths, as numbers
    sizes = [int(text) for text in chromium.execute_script(IN_COLUMN, "predicted") if text]
    assert sizes == [n * MIB for n in (41, 51, 71, 81, 120)]


def test_failures_are_shown_as_text(chromium, opened):
    opened("finished")
    text = shown(chromium, "#failures")
    assert (
        "job 6: failed\nsharding=no_shard precision=fp32 accumulation=reduce_last\n"
        'rank 0: KeyError: "<no> such & sample"' in text
    )
    assert "job 7: skipped" in text
    chromium.find_element(By.CSS_SELECTOR, "#failures summary").click()
    assert "error: rank 1: RuntimeError: can't allocate memory" in shown(chromium, "#failures details pre")
    run = shown(chromium, "#run")
    assert "python train.py -m sharding=full_shard,no_shard" in run
    assert "2.13.0+cpu" in run
    assert "2 x CPU" in run


def test_a_large_sweep_on_a_phone(chromium, opened):
    results = opened("large", width=PHONE)
    assert chromium.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [PHONE, PHONE]
    _, points = plotted(chromium, "front-plot")
    rows = {row["job"]: row for row in results.completed}
    assert len(points["customdata"]) == len(rows) == 48
    for job, x, y in zip(points["customdata"], points["x"], points["y"], strict=True):
        assert x * GIB == pytest.approx(rows[job]["memory.reserved_peak_bytes"])
        assert y == rows[job]["perf.tokens_per_s"]
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#front-plot .scatterlayer .point")) == 48

    def jobs_with_bars():
        return len({job for trace in plotted(chromium, "memory-plot") for job, _ in trace["customdata"]})

    assert jobs_with_bars() == 12
    more = chromium.find_element(By.ID, "memory-more")
    assert more.text == "show all 60"
    more.click()
    assert (jobs_with_bars(), more.text) == (60, "show the first 12 only")
    chromium.find_element(By.CSS_SELECTOR, "#colour option[value='train.micro_batch']").click()
    assert "train.micro_batch\n1\n2\n4\n8" in shown(chromium, "#encoding-legend").replace(" ", "\n")
    smallest = chromium.execute_script(
        "return Math.min(...[...document.querySelectorAll('text, p, td, button, label')].filter(e => e.textContent)"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 12


def test_plans_are_held_against_the_capacity(chromium, opened):
    opened("plans")
    peaks, capacity = plotted(chromium, "front-plot")
    assert list(zip(peaks["customdata"], peaks["y"], strict=True)) == [(1, 41), (0, 51), (3, 71), (2, 81)]
    assert set(capacity["y"]) == {75}
    assert not chromium.find_element(By.ID, "loss").is_displayed()
    assert not chromium.find_element(By.ID, "encoding").is_displayed()
    assert shown(chromium, "h1").startswith("3 of 4 plans fit")


def test_a_sweep_where_nothing_completed(chromium, opened):
    opened("failed", width=PHONE)
    assert shown(chromium, "#comparison").endswith("No job completed whose throughput was measured.")
    assert [chromium.find_element(By.ID, name).is_displayed() for name in ("memory", "loss", "communication")] == [
        False
    ] * 3
    assert "KeyError" in shown(chromium, "#failures")
    assert len(chromium.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1
