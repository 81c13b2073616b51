"""The HTML report in a real Chromium: how fast it opens, what it asks of the network, what axe-core finds.

Needs the extra `browser` and Chromium with its driver; `MOLORA_AXE` may name an axe.min.js to use instead of
the one that comes with axe-selenium-python.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molora_cli.core.counting import summarise
from molora_cli.core.trace import Trace
from molora_cli.views.report import Side, page

pytestmark = pytest.mark.slow
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
HOSTILE = [
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "a\u202eb",
    "a\0b",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install 'molora[browser]'")
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for option in (*OPTIONS, f"--user-data-dir={profile}", "--window-size=1280,1000"):
            options.add_argument(option)
        chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Callable[..., int]:
    """show(side, other=None) -> milliseconds from the start of the navigation to the drawn page.

    Fails for a message on the page's console or a request for anything but the file itself.
    """

    def opened(side: Side, other: Side | None = None) -> int:
        file = tmp_path / "report.html"
        file.write_text(page(side, other), encoding="utf-8")
        browser.get("about:blank")
        browser.get_log("performance")
        browser.get_log("browser")
        browser.get(file.as_uri())
        assert browser.get_log("browser") == []
        asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
        assert [url for url in urls if not url.startswith(("data:", file.as_uri()))] == []
        # two frames later what the script made is on the screen
        drawn = browser.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())))"
        )
        assert browser.execute_script("return document.documentElement.dataset.ready")
        return round(drawn)

    return opened


def _side(n: int, groups: int = 1, *, adapters: int = 4, k: int = 1, name: str = "bundle") -> Side:
    rng = np.random.default_rng(0)
    names = tuple(f"adapter{i}" for i in range(adapters))
    experts = (*names, "__base__")
    vocabulary = 40_000
    pieces = {i: f" word{i}" for i in range(vocabulary)}
    pieces.update(enumerate([*HOSTILE, "\n"]))
    starts = np.arange(0, n, 500)
    trace = Trace(
        token_ids=np.minimum(rng.zipf(1.2, n) - 1, vocabulary - 1),
        starts=starts,
        indices=np.repeat(rng.integers(-1, adapters, (n // 5 + 1, groups, k)), 5, axis=0)[:n].astype(
            np.int16
        ),
        gates=rng.dirichlet(np.ones(k), (n, groups)).astype(np.float32),
        adapters=names,
        scores=np.log(rng.dirichlet(np.ones(len(experts)), (n, groups))).astype(np.float32),
        experts=experts,
        domains=tuple(f"domain {i % 3}" for i in range(len(starts))),
        pieces=pieces,
        meta={"groups": [[g, g + 1] for g in range(groups)]},
        content=rng.random(n) > 0.05,
    )
    return Side(name, trace, summarise(trace))


def _axe() -> str:
    if path := os.environ.get("MOLORA_AXE"):
        return Path(path).read_text(encoding="utf-8")
    pytest.importorskip("axe_selenium_python", reason="no axe-core")
    folder = resources.files("axe_selenium_python") / "node_modules" / "axe-core"
    return (folder / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("groups", [1, 12])
def test_200_000_tokens_open_in_two_seconds(
    browser: Any, show: Callable[..., int], groups: int, record_property: Callable[[str, object], None]
) -> None:
    side = _side(200_000, groups)
    size = len(page(side).encode())
    times = sorted(show(side) for _ in range(3))
    sys.stdout.write(f"\n200 000 tokens, {groups} groups of layers: {size / 1e6:.2f} MB, {times} ms\n")
    record_property("milliseconds", times)
    assert size < 5e6 and times[1] < 2000
    # the text is there a page at a time, and the last page is a click away
    assert 0 < browser.execute_script("return document.querySelectorAll('[role=option]').length") <= 2000
    said = browser.execute_script("return document.body.innerText")
    assert ("Every layer is kept for 5,000 of 200,000 tokens" in said) == (groups > 1)
    assert browser.execute_script("return window.hit") is None
    assert "a\\u202eb" in said and "a\\x00b" in said and "<img src=x" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("case", ["one group", "layers", "two sides"])
def test_axe_finds_nothing_serious(browser: Any, show: Callable[..., int], scheme: str, case: str) -> None:
    axe = _axe()
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    if case == "layers":
        show(_side(900, 6, adapters=9, k=2))
    else:
        show(_side(900, adapters=9), _side(900, adapters=8, name="other") if case == "two sides" else None)
    browser.execute_script("document.querySelectorAll('[role=option]')[3].click()")
    # axe is code: it comes through the debugger, which the page's policy does not concern
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    serious = [
        (v["id"], v["impact"], [(n["html"][:160], n["failureSummary"]) for n in v["nodes"][:3]])
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == [] and len(found["passes"]) > 20


def test_keyboard_reaches_every_token(browser: Any, show: Callable[..., int]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> str:
        for key in keys:
            ActionChains(browser).send_keys(key).perform()
        text: str = browser.execute_script("return document.querySelector('.detail').innerText")
        return text

    show(_side(4500, 3))
    reached = []
    for _ in range(40):
        press(Keys.TAB)
        reached.append(browser.execute_script("return document.activeElement.getAttribute('role')"))
        if reached[-1] == "option":
            break
    assert reached[-1] == "option", reached
    assert "token 1 of text 1, domain 0" in press()
    assert "token 3 of text 1" in press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "token 2 of text 1" in press(Keys.ARROW_LEFT)
    assert "Every group of layers" in press(Keys.ENTER)
    assert "Point at a token" in press(Keys.ESCAPE)
    press(Keys.ARROW_DOWN)
    assert browser.execute_script("return document.activeElement.getAttribute('role')") == "option"
    # the last token of the page, then the next page, and a search that leads to a third
    assert "text 4" in press(Keys.END)
    next_page = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Next')"
    browser.execute_script(f"{next_page}.click()")
    assert "page 2 of 3" in browser.execute_script("return document.querySelector('.status').textContent")
    field = browser.find_element("css selector", "input[type=search]")
    field.send_keys("WORD4", Keys.ENTER)
    assert "word4" in browser.execute_script("return document.activeElement.textContent")


def test_two_traces_turn_together_and_differences_are_marked(browser: Any, show: Callable[..., int]) -> None:
    one, two = _side(4500), _side(4500, name="other")
    two.trace.indices[7] = (one.trace.indices[7] + 2) % 4
    show(one, two)
    marked = browser.execute_script(
        "return [...document.querySelectorAll('.differs')].map((n) => n.dataset.i)"
    )
    assert marked == ["7", "7"]
    next_page = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Next')"
    browser.execute_script(f"{next_page}.click()")
    pages = browser.execute_script(
        "return [...document.querySelectorAll('.status')].map((n) => n.textContent)"
    )
    assert pages == ["page 2 of 3"] * 2


@pytest.mark.parametrize("case", ["empty", "one token", "one adapter"])
def test_small_traces_are_drawn(browser: Any, show: Callable[..., int], case: str) -> None:
    side = _side({"empty": 0, "one token": 1}.get(case, 50), adapters=1 if case == "one adapter" else 2)
    show(side)
    said = browser.execute_script("return document.body.innerText")
    assert ("There is no token." in said) == (case == "empty")
    assert "Where the tokens go" in said and "NaN" not in said and "undefined" not in said
