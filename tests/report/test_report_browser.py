"""A run's page in a browser: an instance is picked, values are hovered over, and what it is without JavaScript."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from projections import GAP, T, evaluation, optimum, write_folder

from snarenet.report import write_report

pytest.importorskip("matplotlib")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'snarenet[test]'")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ORDER = [1, 4, 2, 0, 3]  # of GAP, the largest first

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver: on Debian, apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_folder(tmp_path_factory.mktemp("run"), evaluation()))


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Page]:
    """The page as first opened; afterwards the console is empty and nothing but the page was asked for."""
    browser.get(file.as_uri())
    yield Page(browser)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url for url in sent if not url.startswith("data:")} == {file.as_uri()}


class Page:
    """What a reader does and sees."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def point(self, element: Any) -> ActionChains:
        """The pointer on an element, which is scrolled to."""
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        return ActionChains(self.browser, duration=20).move_to_element(element)

    def lines(self, table: str) -> dict[str, list[str]]:
        """The cells that a table displays, by the headings of its lines."""
        rows = self.all(f"{table} tbody tr, {table}#numbers tr")
        cells = [row.find_elements(By.CSS_SELECTOR, "th, td") for row in rows]
        return {first.text: [cell.text for cell in others] for first, *others in cells}


def assert_shows(page: Page, k: int) -> None:
    """The page displays the k-th instance of ORDER, whose numbers are known."""
    t, (value, multipliers) = T[ORDER[k]], optimum(T[ORDER[k]])
    assert page.find("#numbers caption").text == f"Instance {ORDER[k]}, rank {k + 1}"
    numbers = page.lines("#numbers")
    assert float(numbers["gap f(y̌) − f*"][0]) == pytest.approx(GAP[ORDER[k]], rel=1e-3)
    assert float(numbers["objective f(y̌)"][0]) == pytest.approx(((value - [t, 0, 0]) ** 2).sum() / 2, rel=1e-3)
    assert float(numbers["largest violation of ŷ"][0]) == pytest.approx(abs(t), rel=1e-3)
    moves = page.lines("#moves")
    for j, y in enumerate(value):
        shown = [float(text) for text in moves[f"y{j}"][:3]]
        hat = t if j == 0 else 0.0
        assert shown == pytest.approx([hat, y, y - hat], rel=1e-3, abs=1e-6)
    rows = page.lines("#rows")
    assert rows["g0"][0] == "= 0"
    assert float(rows["g0"][2]) == pytest.approx(abs(t), rel=1e-3)
    assert float(rows["g0"][4]) == pytest.approx(multipliers[0], rel=1e-3)
    if abs(t) > 1.5:
        assert rows["g1"][:3] == ["-1 to 1", f"{t:g}", f"{abs(t) - 1:g}"]
        assert float(rows["g1"][4]) == pytest.approx(multipliers[1], rel=1e-3)
    assert [mark.get_attribute("data-pick") for mark in page.all(".picked")] == [str(k)]


def test_the_worst_is_picked_first(page: Page) -> None:
    assert "Pick one with the slider" in page.find("#how").text
    assert_shows(page, 0)


def test_buttons_and_keys(page: Page) -> None:
    page.find("#next").click()
    assert_shows(page, 1)
    page.find("#rank").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert_shows(page, 3)
    page.find("#previous").click()
    assert_shows(page, 2)
    page.find("#rank").send_keys(Keys.END)
    page.find("#next").click()  # there is none
    assert_shows(page, 4)


def test_click_in_the_figure(page: Page) -> None:
    page.point(page.find("[data-pick='2']")).click().perform()
    assert_shows(page, 2)
    assert page.find("#tip").text == f"instance {ORDER[2]}, rank 3: gap 2.00e-1"


def test_hover(page: Page) -> None:
    bars = page.all(".marks rect")
    assert not page.find("#tip").is_displayed()
    page.point(bars[0]).perform()
    assert page.find("#tip").is_displayed()
    assert re.fullmatch(r".* to .*: \d instances?, at or above the reference", page.find("#tip").text)
    page.point(page.find("h1")).perform()
    assert not page.find("#tip").is_displayed()


def test_fits_a_phone(page: Page) -> None:
    command, phone = page.browser.execute_cdp_cmd, {"width": 390, "height": 844, "deviceScaleFactor": 2}
    command("Emulation.setDeviceMetricsOverride", phone | {"mobile": True})
    try:
        assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        command("Emulation.clearDeviceMetricsOverride", {})


def test_without_javascript(browser: Any, file: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(file.as_uri())
        page = Page(browser)
        assert "To pick one takes JavaScript." in page.find("#instance").text
        assert not page.find("#picked").is_displayed()
        assert len(page.all("figure img")) == 4
        assert len(page.all(".marks title")) == len(page.all(".marks > *")) > 5
        assert "Gap to the reference" in page.find("main").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
