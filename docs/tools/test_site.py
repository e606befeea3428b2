"""The built site in a real browser: every page, wide and narrow, light and dark.

Run it with ``pytest docs/tools``; it builds the site first, or takes the one in the folder that
``MINILORA_SITE`` names. It needs Chromium: the system's, or Playwright's own
(``playwright install chromium``).
"""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from minilora.graphs import GraphDispatcher
from minilora.ops import KernelMeta

ROOT = Path(__file__).resolve().parents[2]
LOOKS = {
    f"{name}, {scheme}": (width, scheme)
    for name, width in {"wide": 1280, "narrow": 320}.items()
    for scheme in ("light", "dark")
}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("MINILORA_SITE"):
        return Path(given)
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    subprocess.run(command, cwd=ROOT, check=True)
    return built


@pytest.fixture(scope="session")
def host(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Browser, host: str) -> Iterator[Page]:
    context = browser.new_context(base_url=host)
    yield context.new_page()
    context.close()


def addresses(folder: Path) -> list[str]:
    """Return every page of the site, as a path below its root."""
    found = (path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html"))
    return sorted(f"{path}/".removeprefix("./") for path in found)


# What a page shows, asked in the page itself.
LOOK = """() => ({
  broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  raw: [...document.querySelectorAll(".arithmatex")].map(e => e.textContent),
  empty: [...document.querySelectorAll("figure svg")]
    .filter(s => !s.getBBox().width || !s.getAttribute("aria-label")).length,
  ids: [...document.querySelectorAll("[id]")].map(e => e.id),
  links: [...document.links].map(a => a.href),
})"""


@pytest.fixture(scope="session")
def seen(browser: Browser, host: str, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Open every page in every look; return what each showed, by look and address."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for look, (width, scheme) in LOOKS.items():
        size = {"width": width, "height": 900}
        page = browser.new_page(base_url=host, color_scheme=scheme, viewport=size)
        errors, asked = list[str](), list[str]()
        page.on("console", lambda m, e=errors: e.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error, e=errors: e.append(str(error)))
        page.on("request", lambda request, a=asked: a.append(request.url))
        found[look] = {}
        for address in addresses(folder):
            errors.clear()
            asked.clear()
            page.goto(address)
            palette = page.get_attribute("body", "data-md-color-scheme")
            assert palette == {"light": "default", "dark": "slate"}[scheme]
            shown = page.evaluate(LOOK)
            found[look][address] = {**shown, "errors": list(errors), "asked": list(asked)}
        page.close()
    return found


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_whole(seen: Any, host: str, look: str) -> None:
    assert len(seen[look]) > 20
    for address, shown in seen[look].items():
        assert not shown["errors"], address
        assert not shown["broken"], address
        assert not shown["raw"], f"{address}: a formula was not rendered"
        assert not shown["empty"], f"{address}: a figure shows nothing, or has no name"
        assert shown["wider"] <= 0, f"{address} is wider than the window by {shown['wider']}"
        elsewhere = [url for url in shown["asked"] if not url.startswith((host, "data:", "blob:"))]
        assert not elsewhere, f"{address} asks another host"


def test_no_link_or_anchor_is_dead(seen: Any, host: str, folder: Path) -> None:
    pages = seen["wide, light"]
    dead = []
    for address, shown in pages.items():
        for link in set(shown["links"]):
            if not link.startswith(host):
                continue
            path, _, anchor = link.removeprefix(host).partition("#")
            target = folder / path
            is_there = (target / "index.html" if target.is_dir() else target).is_file()
            if not is_there or (anchor and anchor not in pages.get(path, {"ids": [anchor]})["ids"]):
                dead.append((address, link))
    assert not dead


def test_no_id_comes_twice(seen: Any) -> None:
    for address, shown in seen["wide, light"].items():
        ids = [name for name in shown["ids"] if not name.startswith("__")]
        assert len(ids) == len(set(ids)), address


def test_search_finds_padding(page: Page) -> None:
    page.goto("")
    page.keyboard.press("/")  # the theme's key for the search
    page.keyboard.type("padding")
    page.wait_for_selector(".md-search-result__item")
    assert "padding" in page.inner_text(".md-search-result__list").lower()


def test_the_palette_can_be_changed(page: Page) -> None:
    page.goto("")
    before = page.get_attribute("body", "data-md-color-scheme")
    page.click("label[title='Switch to dark mode']")
    assert page.get_attribute("body", "data-md-color-scheme") != before


# ---- the interactive page


def test_the_explorer_shows_the_running_example(page: Page) -> None:
    page.goto("choose-a-graph/")
    verdict = page.inner_text(".verdict")
    assert "FULL graph of 4 rows and 2 groups. 1 row and 0 groups are padding." in verdict
    tables = page.inner_text(".meta")
    for values in ("[2, -1, 0, -1]", "[2, 0, 1, 3]", "[0, 2, -1, -1]", "[0, 1, 2, 2, 2]"):
        assert values in tables
    assert page.inner_text(".key.chosen") == "4\N{MULTIPLICATION SIGN}2"


def test_a_request_is_edited_by_typing(page: Page) -> None:
    page.goto("choose-a-graph/")
    page.focus("[aria-label='new tokens of request 0']")
    page.keyboard.press("Control+A")
    page.keyboard.type("12")
    assert "14 rows, 2 adapters, with a prefill" in page.inner_text(".verdict")
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    assert "from 1 to 64 new tokens" in page.inner_text(".verdict")
    page.keyboard.type("1")
    page.focus("[aria-label='adapter of request 1']")
    page.keyboard.type("slot 1")
    assert "3 rows, 3 adapters, decode only" in page.inner_text(".verdict")


def test_the_focus_stays_when_a_request_goes(page: Page) -> None:
    page.goto("choose-a-graph/")
    for _ in range(2):
        page.click(".requests li:last-child button")
        assert page.evaluate("document.activeElement.tagName") == "BUTTON"
    assert page.locator(".requests li").count() == 1


def test_the_explorer_with_the_keyboard_alone(page: Page) -> None:
    page.goto("choose-a-graph/")
    page.focus("[data-preset=prefill]")
    page.keyboard.press("Enter")
    assert "the PIECEWISE graph of 8 rows and 4 groups" in page.inner_text(".verdict")
    page.focus("[name=graph_mode]")
    page.keyboard.type("none")
    assert "runs eagerly" in page.inner_text(".verdict")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("capture_sizes", "4, 2", "must ascend"),
        ("capture_sizes", "one", "whole numbers"),
        ("capture_sizes", "64", "over 32"),
        ("max_loras", "1", "a slot that does not exist"),
        ("max_loras", "12", "max_loras must be a whole number from 1 to 8"),
        ("max_num_seqs", "", "max_num_seqs must be a whole number"),
        ("max_num_seqs", "-3", "from 1 to 512"),
        ("max_num_seqs", "2", "at most max_num_seqs=2"),
        ("max_num_batched_tokens", "2", "at most max_num_batched_tokens=2"),
    ],
)
def test_the_explorer_says_what_is_wrong(page: Page, field: str, value: str, says: str) -> None:
    page.goto("choose-a-graph/")
    page.fill(f"[name={field}]", value)
    assert says in page.inner_text(".verdict")
    assert page.is_hidden(".result")


MODES = ("full", "piecewise", "full_and_piecewise", "none")
OPTIONS = [
    {"graph_mode": mode, "max_loras": n, "specialize_lora": two, "specialize_active_lora": by_count}
    for mode, n, two, by_count in itertools.product(
        MODES, (0, 1, 3, 4), (True, False), (True, False)
    )
]
LIMITS: list[dict[str, Any]] = [
    {"max_num_seqs": 8, "max_num_batched_tokens": 32, "capture_sizes": None},
    {"max_num_seqs": 1, "max_num_batched_tokens": 1, "capture_sizes": None},
    {"max_num_seqs": 7, "max_num_batched_tokens": 600, "capture_sizes": None},
    {"max_num_seqs": 4, "max_num_batched_tokens": 8, "capture_sizes": [1, 3]},
    {"max_num_seqs": 300, "max_num_batched_tokens": 320, "capture_sizes": None},
]


def in_javascript(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options by the names of dispatch.js."""
    words = (name.split("_") for name in options)
    names = (first + "".join(word.title() for word in rest) for first, *rest in words)
    return dict(zip(names, options.values(), strict=True))


def some_steps(options: dict[str, Any]) -> list[tuple[int, int, bool]]:
    """Return steps of every kind: rows, adapters, uniform."""
    seqs, tokens = options["max_num_seqs"], options["max_num_batched_tokens"]
    rows = [n for n in (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 257, 272, 300, 512, 600) if n <= tokens]
    return [
        (n, adapters, uniform)
        for n, uniform in itertools.product(rows, (True, False))
        for adapters in range(min(options["max_loras"], n, seqs) + 1)
        if not uniform or n <= seqs
    ]


def test_the_page_and_the_dispatcher_agree(page: Page) -> None:
    page.goto("choose-a-graph/")
    cases, want = [], []
    for options, limits in itertools.product(OPTIONS, LIMITS):
        options = options | limits
        dispatcher, steps = GraphDispatcher(**options), some_steps(options)
        cases.append([in_javascript(options), steps])
        found = [dispatcher.dispatch(*step) for step in steps]
        chosen = [
            [k.mode.name, k.descriptor.num_tokens, k.descriptor.num_active_loras] for k in found
        ]
        keys = {
            f"{k.mode.name} {k.descriptor.num_tokens} {k.descriptor.num_active_loras}"
            for k in dispatcher.keys
        }
        want.append([chosen, sorted(keys)])
    got = page.evaluate(
        """async (cases) => {
          const { captureKeys, dispatch } = await import("/assets/dispatch.js");
          return cases.map(([options, steps]) => {
            const keys = captureKeys(options);
            const chosen = steps.map((step) => {
              const { mode, rows, groups } = dispatch(options, keys, ...step);
              return [mode, rows, groups];
            });
            const all = Object.entries(keys).flatMap(([mode, sizes]) =>
              [...sizes].flatMap(([rows, counts]) => counts.map((n) => `${mode} ${rows} ${n}`)));
            return [chosen, all.sort()];
          });
        }""",
        cases,
    )
    assert sum(len(steps) for _, steps in cases) > 5000
    for case, one, other in zip(cases, got, want, strict=True):
        assert json.dumps(one) == json.dumps(other), case


MAPPINGS = [
    [2, -1, 0], [], [0], [-1, -1], [3, 3, 3], [3, 2, 1, 0], [-1, 1, -1, 1, 0], [2] * 9 + [0],
]  # fmt: skip


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_the_page_and_the_tables_agree(page: Page, mapping: list[int]) -> None:
    page.goto("choose-a-graph/")
    meta = KernelMeta(max_tokens=12, max_loras=4)
    meta.prepare(mapping, num_tokens_padded=12, num_active_loras=4)
    script = """async ([mapping, rows, most]) => {
      const { kernelMeta } = await import("/assets/dispatch.js");
      return kernelMeta(mapping, rows, most);
    }"""
    for name, values in page.evaluate(script, [mapping, 12, 4]).items():
        assert values == getattr(meta, name).tolist(), name
