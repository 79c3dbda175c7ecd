"""The page of ``plimsoll watch --serve`` in a real browser: headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from test_schemas import SMALL_RUN, Say, say

__all__ = ["say"]

#: Steps of the run that a page shows when it is opened. The others come later.
SHOWN_STEPS = 12
STEPS = 24
#: Least contrast of text (WCAG 2.1, level AA).
MIN_CONTRAST = 4.5
#: Returns the least contrast between the color of a text and the color behind it, with that text.
LEAST_CONTRAST = """() => {
  const channels = (color) => color.match(/[0-9.]+/g).map(Number);
  const luminance = (color) => {
    const [red, green, blue] = channels(color).slice(0, 3).map((channel) => {
      const share = channel / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  let least = [Infinity, ""];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!hasText || !element.checkVisibility()) continue;
    const [light, dark] = [getComputedStyle(element).color, behind(element)].map(luminance).sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < least[0]) least = [contrast, `${element.tagName}.${element.className}: ${element.textContent}`];
  }
  return least;
}"""


class GrowingRun:
    """A run folder whose events come later, served by the real program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = (folder.parent / "run" / "events.jsonl").read_text().splitlines(keepends=True)
        folder.mkdir()
        shutil.copy(folder.parent / "run" / "plan.json", folder)
        self.written = 0
        self.write_until(SHOWN_STEPS)

    def step(self, number: int) -> dict[str, Any]:
        """Returns the event of a step."""
        events = map(json.loads, self.lines)
        found: dict[str, Any] = next(event for event in events if event.get("event") == "step" and event["step"] == number)
        return found

    def write_until(self, step: int | None) -> None:
        """Writes the events up to a step; all if it is ``None``."""
        with (self.folder / "events.jsonl").open("a") as log:
            while self.written < len(self.lines):
                event = json.loads(self.lines[self.written])
                log.write(self.lines[self.written])
                self.written += 1
                if step is not None and event.get("event") == "step" and event["step"] == step:
                    break


@pytest.fixture
def run(say: Say, tmp_path: Path) -> GrowingRun:
    steps = ["--set", f"train.steps={STEPS}", "--set", "train.eval_every=6", "--set", "train.save_every=12"]
    say("train", "--quiet", "--set", "run.dir=run", "--devices", "virtual:a=400MiB", *SMALL_RUN, *steps)
    return GrowingRun(tmp_path / "live")


@pytest.fixture
def address(command: Path, run: GrowingRun) -> Iterator[str]:
    words: list[str | Path] = [command, "watch", run.folder, "--serve", "127.0.0.1:0", "--interval", "0.2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[1]
        server.terminate()


@pytest.fixture
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium's sandbox needs a user other than root.
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            yield browser


def opened(browser: Browser, address: str, problems: list[str], **look: Any) -> Page:
    """Opens the page. Requests to other sites, console errors and exceptions are added to ``problems``."""
    page = browser.new_context(**look).new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((f"{address}/", "data:")) else problems.append(request.url))
    page.goto(f"{address}/")
    expect(page.locator("#connection")).to_have_text("live")
    return page


def focus_by_tab(page: Page, label: str) -> None:
    """Presses Tab until the element whose label begins so has the focus."""
    for _ in range(50):
        page.keyboard.press("Tab")
        if str(page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")).startswith(label):
            return
    raise AssertionError(f"no element with the label {label!r} can be reached")


def exponential(number: float) -> str:
    """Formats a number like the page: one decimal, and the exponent without leading zeros."""
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def count(number: float) -> str:
    """Formats a count like the page: in ones, thousands, millions or billions."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.{2 if number < 10 * scale else 1}f} {unit}"
    return f"{number:.0f}"


# Name of each plot on the page, and its value at a step event as the page shows it.
PLOTS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("loss", lambda event: f"{event['loss']:.4f}"),
    ("learning rate", lambda event: exponential(event["learning_rate"])),
    ("gradient norm", lambda event: f"{event['norm']:.2f}"),
    ("tokens/s", lambda event: count(event["tokens"] / event["seconds"])),
]


def test_page_follows_the_run_and_the_keyboard(browser: Browser, address: str, run: GrowingRun) -> None:
    problems: list[str] = []
    page = opened(browser, address, problems)
    loss = page.get_by_role("img", name="loss from step")
    figures = page.locator("#figures")
    expect(figures).to_contain_text(f"step{SHOWN_STEPS} of {STEPS}")
    expect(figures).to_contain_text(f"loss{run.step(SHOWN_STEPS)['loss']:.4f}")
    plan = json.loads((run.folder / "plan.json").read_text())
    expect(page.locator("#plan-figures")).to_contain_text("parallelism")
    expect(page.locator("#workers li")).to_have_count(len(plan.get("team", [])) or 1)
    expect(page.locator("#workers li").first).to_contain_text(f"{plan['devices'][0]['name']}: ")
    # Each step of each plot is reached by keys, and shows the digits of its event.
    for number, (name, value) in enumerate(PLOTS):
        focus_by_tab(page, f"{name} from step")
        expect(page.get_by_role("img", name=f"{name} from step")).to_be_focused()
        page.keyboard.press("Home")
        for step in range(1, SHOWN_STEPS + 1):
            expect(page.locator("#plots output").nth(number)).to_have_text(f"step {step}: {value(run.step(step))}")
            page.keyboard.press("ArrowRight")
    readout = page.locator("#plots output").first
    points = loss.locator("path").get_attribute("d")
    assert points is not None and len(points.replace("M", "L").split("L")) == SHOWN_STEPS + 1
    # The table of a device opens by a key and stays open as the run goes on.
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    run.write_until(None)
    expect(page.locator("#state")).to_have_text("done")
    expect(figures).to_contain_text(f"loss{run.step(STEPS)['loss']:.4f}")
    expect(readout).to_have_text(f"step {SHOWN_STEPS}: {run.step(SHOWN_STEPS)['loss']:.4f}")
    expect(page.locator("#feed li").first).to_be_visible()
    planned = json.loads((run.folder / "plan.json").read_text())["devices"][0]["by_category"]
    # The run has used as many bytes of each category as planned; both stand side by side.
    for category, size in planned.items():
        shown = f"{category}{size / 2**20:.2f} MiB{size / 2**20:.2f} MiB" if size >= 2**20 else category
        expect(page.locator("table").first).to_contain_text(shown)
    assert problems == []


def test_map_shows_the_plan_over_a_step(browser: Browser, address: str, run: GrowingRun) -> None:
    problems: list[str] = []
    page = opened(browser, address, problems)
    device = json.loads((run.folder / "plan.json").read_text())["devices"][0]
    timeline = device["timeline"]
    peak = max(point["bytes"] for point in timeline)
    assert peak + device["charges_bytes"] == device["peak_bytes"]
    sentence = page.locator(".map:not(.memory) p").first
    expect(sentence).to_contain_text(f"Predicted peak {device['peak_bytes'] / 2**20:.2f} MiB in the ")
    bands = page.locator(".map:not(.memory) path.band:not([d=''])")
    assert bands.count() == len({name for point in timeline for name, size in point["by_category"].items() if size}) + 1
    focus_by_tab(page, "arena of virtual:a over one step")
    page.keyboard.press("Home")
    readout = page.locator(".map:not(.memory) output").first
    for number, point in enumerate(timeline, start=1):
        held = (point["bytes"] + device["charges_bytes"]) / 2**20
        expect(readout).to_contain_text(f"moment {number} of {len(timeline)}: {held:.2f} MiB ")
        layer = f"layer {point['layer']}, " if "layer" in point else ""
        expect(readout).to_contain_text(f"{layer}at {point['op'].replace('product', 'matrix product')}")
        page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    expect(readout).to_contain_text(f"moment {len(timeline)} of")
    # The line of the measured memory has the bytes of the events.
    measured = [event for event in map(json.loads, run.lines[: run.written]) if event.get("memory")]
    focus_by_tab(page, "memory of virtual:a from step")
    page.keyboard.press("Home")
    held = measured[0]["memory"][0]["held_bytes"] / 2**20
    expect(page.locator(".memory output").first).to_have_text(f"step {measured[0]['step']}: measured {held:.2f} MiB")
    assert problems == []


#: Makes the page take itself for one in a background tab.
HIDE = """() => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
SHOW = 'delete document.hidden; document.dispatchEvent(new Event("visibilitychange"));'


@contextmanager
def served(command: Path, folder: Path, at: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serves a run folder, and gives the server and its URL."""
    words: list[str | Path] = [command, "watch", folder, "--serve", at, "--interval", "0.2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().split()[1]
        finally:
            server.terminate()


def test_hidden_page_shows_the_end_of_the_run(browser: Browser, command: Path, run: GrowingRun) -> None:
    with served(command, run.folder, "127.0.0.1:0") as (server, url):
        problems: list[str] = []
        page = opened(browser, url, problems)
        with page.expect_request(f"{url}/api/events/last"):
            page.evaluate(HIDE)
        page.wait_for_timeout(300)
        run.write_until(None)
        server.terminate()
        expect(page.locator("#connection")).to_have_text("the run has ended")
        expect(page.locator("#state")).to_have_text("done")
        page.evaluate(SHOW)
        expect(page.locator("#connection")).to_have_text("the run has ended")
        assert problems == []


def test_page_says_that_another_run_is_shown(browser: Browser, command: Path, run: GrowingRun) -> None:
    with served(command, run.folder, "127.0.0.1:0") as (server, url):
        page = opened(browser, url, [])
        focus_by_tab(page, "loss from step")
        page.keyboard.press("Home")
        expect(page.locator("#plots output").first).not_to_be_empty()
        expect(page.locator("#other-run")).to_be_hidden()
        server.kill()
        expect(page.locator("#connection")).to_contain_text("no connection")
    with served(command, run.folder.parent / "run", url.removeprefix("http://")):
        expect(page.locator("#other-run")).to_contain_text("Another run", timeout=20_000)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#plots output").first).to_be_empty()


@pytest.mark.parametrize(("scheme", "size"), [("light", (1200, 1600)), ("dark", (1200, 1600)), ("light", (360, 800))])
def test_page_is_readable(browser: Browser, address: str, scheme: str, size: tuple[int, int]) -> None:
    problems: list[str] = []
    page = opened(browser, address, problems, color_scheme=scheme, viewport=ViewportSize(width=size[0], height=size[1]))
    page.locator("summary").first.click()
    expect(page.locator("table").first).to_be_visible()
    contrast, text = page.evaluate(LEAST_CONTRAST)
    assert contrast >= MIN_CONTRAST, text
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert problems == []


def test_warnings_and_recommendations_are_shown(browser: Browser, address: str) -> None:
    page = browser.new_context().new_page()
    snapshot = page.request.get(f"{address}/api/snapshot").json()
    command = "plimsoll train run.toml --set recipe.micro_batch=8"
    snapshot["warnings"] = ["cuda:1: clocks reduced: <b>power</b> limit"]
    snapshot["recommendations"] = [{"text": "1.11 x as fast", "command": command, "bytes": 0, "speedup": 1.11}]
    stream = f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n"
    page.route("**/api/events", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    page.goto(f"{address}/")
    expect(page.locator("#warnings li")).to_have_text("cuda:1: clocks reduced: <b>power</b> limit")
    expect(page.locator("#recommendations p")).to_have_text("1.11 x as fast")
    expect(page.locator("#recommendations code")).to_have_text(command)


def test_token_opens_the_page(browser: Browser, command: Path) -> None:
    words: list[str | Path] = [command, "watch", "--serve", "0.0.0.0:0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        port = server.stdout.readline().split()[1].rsplit(":", 1)[1]
        token = next(line.split()[1] for line in server.stderr if line.startswith("token: "))
        page = browser.new_context().new_page()
        response = page.goto(f"http://127.0.0.1:{port}/")
        assert response is not None and response.status == 401
        page.keyboard.type("0")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Token")).to_have_value("")
        page.keyboard.type(token)
        page.keyboard.press("Enter")
        expect(page.locator("#devices article").first).to_contain_text("cpu")
        assert token not in page.url and page.evaluate("document.cookie") == ""
        server.terminate()
