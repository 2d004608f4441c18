"""The explorer in a real browser: dragged, typed into, shared and restored; it displays what the library computes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'snarenet[test]'")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
PAGE = (Path(__file__).parents[2] / "docs/explorer/index.html").as_uri()

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver: on Debian, apt-get install chromium chromium-driver",
)

TOL = 1e-9


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1440,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """The page as first opened; afterwards the console is empty and nothing was asked of a network."""
    opened = Page(browser)
    opened.open()
    yield opened
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in sent if not url.startswith(("file:", "data:"))] == []
    assert len(sent) > 10  # it was listened to


class Page:
    """What a visitor does and sees."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def open(self, hash: str = "") -> None:
        self.browser.get("about:blank")
        self.browser.get(PAGE + hash)
        self.wait(lambda: self.browser.find_elements(By.CSS_SELECTOR, "[data-answer=repair]"))

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.browser, 20, poll_frequency=0.05).until(lambda _: condition())

    def settle(self) -> None:
        """Two frames, and the address after that."""
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 200)))"
        )

    def point(self, selector: str) -> list[float]:
        """The exact numbers behind a displayed point, after a look at what is displayed."""
        element = self.find(selector)
        exact = [float(entry) for entry in element.get_attribute("data-value").split(",")]
        displayed = [float(entry) for entry in re.findall(r"\d+\.?\d*", element.text)]
        assert displayed == pytest.approx([abs(entry) for entry in exact], abs=0.051)
        return exact

    def drag(self, handle: str, right: int, down: int) -> None:
        chain = ActionChains(self.browser, duration=50).click_and_hold(self.find(handle))
        chain.move_by_offset(right // 2, down // 2).move_by_offset(right - right // 2, down - down // 2)
        chain.release().perform()
        self.settle()

    def hat(self) -> list[float]:
        numbers = re.findall(r"-?\d+\.?\d*", self.find("#handle-hat").get_attribute("aria-valuetext"))
        return [float(number) for number in numbers]


def run(code: str) -> dict[str, Any]:
    """The program that the page shows, run as it stands."""
    before, names = torch.get_default_dtype(), {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "the page's program", "exec"), names)
    finally:
        torch.set_default_dtype(before)
    return names


def assert_as_in_the_library(page: Page) -> None:
    """The displayed y̌, steps and gradient are those of the program beside them."""
    names = run(page.find("#code").text)
    solution, gradient = names["solution"], names["y"].grad[0].tolist()
    assert page.point("[data-answer=repair]") == pytest.approx(solution.value[0].tolist(), abs=TOL)
    size = 1 + max(abs(entry) for entry in gradient)
    assert page.point("[data-gradient=repair]") == pytest.approx(gradient, abs=TOL * size)
    row = page.find("#answers tbody tr")
    assert row.find_elements(By.TAG_NAME, "td")[-1].text == str(solution.steps.item())


def test_drag(page: Page) -> None:
    """ŷ follows the mouse, the display follows ŷ, and the library agrees at every stop."""
    for right, down in [(120, 40), (60, 180), (-150, 160)]:
        before = page.hat()
        page.drag("#handle-hat", right, down)
        scale = page.find("#plane").size["height"] / 6.4
        assert page.hat() == pytest.approx([before[0] + right / scale, before[1] - down / scale], abs=0.02)
        assert_as_in_the_library(page)


def test_drag_target(page: Page) -> None:
    """The target changes the gradient, and not the answer."""
    value, gradient = page.point("[data-answer=repair]"), page.point("[data-gradient=repair]")
    page.drag("#handle-target", -100, 120)
    assert page.point("[data-answer=repair]") == value
    assert page.point("[data-gradient=repair]") != gradient
    assert_as_in_the_library(page)


def test_arrow_keys(page: Page) -> None:
    before = page.hat()
    page.find("#handle-hat").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.SHIFT, Keys.ARROW_DOWN)
    page.settle()
    assert page.hat() == pytest.approx([before[0] + 0.1, before[1] - 0.005], abs=1e-9)
    assert_as_in_the_library(page)


def test_touch(page: Page) -> None:
    """A finger on ŷ drags it on a narrow screen, where nothing is wider than the screen."""
    command = page.browser.execute_cdp_cmd
    command("Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True})
    command("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        page.open()
        assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 390
        spot = "const {x, y, width, height} = document.querySelector('#handle-hat .grip').getBoundingClientRect();"
        x, y = page.browser.execute_script(f"{spot} return [x + width / 2, y + height / 2]")
        before = page.hat()
        command("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
        for share in (0.5, 1.0):
            touch = {"x": x + 80 * share, "y": y + 100 * share}
            command("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [touch]})
        command("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        page.settle()
        scale = page.find("#plane").size["height"] / 6.4
        assert page.hat() == pytest.approx([before[0] + 80 / scale, before[1] - 100 / scale], abs=0.02)
        assert_as_in_the_library(page)
    finally:
        command("Emulation.setTouchEmulationEnabled", {"enabled": False})
        command("Emulation.clearDeviceMetricsOverride", {})


def test_presets(page: Page) -> None:
    """Every guided example shows what the library computes; fields get ready."""
    buttons = page.browser.find_elements(By.CSS_SELECTOR, "#presets button")
    assert len(buttons) >= 6
    for button in buttons:
        button.click()
        page.settle()
        assert button.get_attribute("aria-pressed") == "true"
        assert len(page.find("#story").text) > 100
        if "Nearest" not in page.find("#code").text:  # there the library's start is another method, near the same point
            assert_as_in_the_library(page)
        kind = page.find("#field-kind").get_attribute("value")
        if kind != "none":
            page.wait(lambda kind=kind: page.find("#field").get_attribute("data-done") == kind)


def test_sets(page: Page) -> None:
    """Every set of the catalogue, from the same prediction, under another loss."""
    page.open("#hat=1.1,2.3&loss=linear&damping=schedule&begin=1&ratio=0.5")
    options = page.browser.find_elements(By.CSS_SELECTOR, "#set option:not([value=own])")
    assert len(options) >= 10
    for option in options:
        option.click()
        page.settle()
        assert_as_in_the_library(page)


def test_nearest_start(page: Page) -> None:
    """On curved rows the start at the nearest point is the library's as well."""
    page.open("#set=torus&hat=1.7,1.9&start=nearest")
    assert_as_in_the_library(page)
    assert page.point("[data-answer=nearest]") == pytest.approx(page.point("[data-answer=repair]"), abs=TOL)


def test_link_restores(page: Page) -> None:
    """The address holds the state: opened anew, everything is as it was."""
    page.find("#set option[value=slab]").click()
    page.find("input[name=damping][value=constant]").click()
    page.find("input[name=rows][value=all]").click()
    page.find("input[name=loss][value=distance]").click()
    page.drag("#handle-hat", 37, 91)
    page.find("[aria-label='show DC3']").click()
    page.settle()
    seen = [page.find(selector).text for selector in ("#answers", "#rows", "#code", "#words", "#shown")]
    address = page.browser.current_url
    assert address.startswith(PAGE + "#")
    page.open(address[len(PAGE) :])
    assert [page.find(selector).text for selector in ("#answers", "#rows", "#code", "#words", "#shown")] == seen
    assert not page.find("[aria-label='show DC3']").is_selected()
    page.settle()
    assert page.browser.current_url == address


def test_own_formula(page: Page) -> None:
    """Rows of one's own; what cannot be read is said beside the field and leaves the last set in place."""
    field = page.find("#formula")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("y >= exp(x) - 2\nx*y + abs(x) <= 1\n-x + y/2 <= 1")
    page.settle()
    assert page.find("#error").text == ""
    assert page.find("#set").get_attribute("value") == "own"
    assert len(page.browser.find_elements(By.CSS_SELECTOR, "#rows tbody tr")) == 3
    assert_as_in_the_library(page)
    value = page.point("[data-answer=repair]")
    field.send_keys(" + sin(")
    page.settle()
    assert page.find("#error").text.startswith("Line 3: ")
    assert field.get_attribute("aria-invalid") == "true"
    assert page.point("[data-answer=repair]") == value


def test_steps(page: Page) -> None:
    """The slider below the chart goes back to where the repair began."""
    scrub = page.find("#scrub")
    last = int(scrub.get_attribute("max"))
    assert last > 3
    assert page.find("#shown").text == f"step {last} of {last}"
    scrub.send_keys(Keys.HOME)
    page.settle()
    assert page.find("#shown").text == f"step 0 of {last} · λ = 10"
    assert "violated above, used" in page.find("#rows").text
