"""Pictures of the page under load, from `pageserve serve` with the bundled model and a small pool.

    python -m tests.server.screenshots [--out docs]

Eight clients keep asking for stories, half of them with a common prefix, while a headless Chromium asks for several
samples. Writes page-light.png, page-dark.png and page-phone.png, the phone's at two pixels per pixel.
"""

import argparse
import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server.serving import serving_process

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NUM_BLOCKS = 640
NUM_CLIENTS = 8
TRIES = 6
QUESTION = "Tell me a story about a fox and a lighthouse."
HEROES = ("fox", "owl", "bear", "mouse", "robot", "girl", "boy", "whale")
COMMON = "Once upon a time, in a small house at the edge of a large forest, not far from the sea, there lived a "


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Clients that ask for one story after the other until the end."""
    ended = threading.Event()

    def ask_on(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            for round_number in range(1000):
                start = COMMON if number % 2 else f"In year {round_number} of the {HEROES[number]}, there was a "
                body = {"model": "pageserve", "prompt": start + HEROES[number], "max_tokens": 260 + 40 * number}
                client.post("/v1/completions", json=body | {"ignore_eos": True, "temperature": 0.8})
                if ended.is_set():
                    return

    threads = [threading.Thread(target=ask_on, args=(i,)) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def visit(browser: Browser, url: str, **options) -> Page:
    page = browser.new_context(**options).new_page()
    page.goto(url)
    expect(page.locator("#health")).to_have_attribute("data-phase", "ready")
    return page


def ask(page: Page, samples: int) -> None:
    page.click("#parameters-button")
    page.fill("#n", str(samples))
    page.fill("[name=max_tokens]", "400")
    page.click("#parameters-button")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    expect(page.locator(".table").last.locator("li").nth(3)).to_be_visible()


def picture_light(browser: Browser, url: str) -> Page:
    """The memory runs full: stories of the tour beside those of other clients, and three samples."""
    page = visit(browser, url, viewport={"width": 1440, "height": 900}, color_scheme="light")
    ask(page, 3)
    page.click("[data-tour=fill]")
    expect(page.locator("#callout-steps")).to_contain_text("evicted")
    return page


def picture_dark(browser: Browser, url: str) -> Page:
    """The block table of one sample in the spotlight."""
    page = visit(browser, url, viewport={"width": 1440, "height": 900}, color_scheme="dark")
    page.click("[data-tour=samples]")
    shared = page.locator(".table").last.locator("li").first
    expect(shared.locator("xpath=../li[4]")).to_be_visible()
    shared.hover()
    expect(page.locator("#inspector")).to_contain_text("Block")
    return page


def picture_phone(browser: Browser, url: str) -> Page:
    viewport = {"width": 360, "height": 740}
    page = visit(browser, url, viewport=viewport, device_scale_factor=2, color_scheme="light", has_touch=True)
    ask(page, 2)
    return page


def first_success(take: Callable[[Browser, str], Page], browser: Browser, url: str) -> Page:
    """Stories end when they like; one that was too short for the picture is asked for again."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(AssertionError):
            return take(browser, url)
    return take(browser, url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    out = parser.parse_args().out
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit("There is no Chromium here (Debian: apt install chromium).")
    out.mkdir(exist_ok=True)
    expect.set_options(timeout=25_000)
    with serving_process("--num-blocks", str(NUM_BLOCKS)) as (url, _), load(url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, take in (("light", picture_light), ("dark", picture_dark), ("phone", picture_phone)):
            page = first_success(take, browser, url)
            page.screenshot(path=out / f"page-{name}.png")
            page.context.close()
            print(out / f"page-{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
