"""The fragmentation view in a real browser: what is drawn is what the token layer holds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import pytest

from tests.deploy.conftest import obtain
from tests.service.browser import Browser, chromium
from tests.service.conftest import ADMIN_KEY
from tests.service.ui_server import BLOCK_SIZE, Engines, PoolEngine, UiServer

pytestmark = pytest.mark.browser

LEVELS = 8
EXPECTED = re.compile(
    r"net::ERR_(CONNECTION_\w+|EMPTY_RESPONSE|INCOMPLETE_CHUNKED_ENCODING|SOCKET_NOT_CONNECTED)"
    r"|\(Precondition"
)
"""What the browser notes where a test stops the server, in the middle of an answer perhaps, or
sends an old version."""
PIXEL = """(i, dx, dy) => {
  const {cell, columns} = document.getElementById('map').vtokenMap.drawn;
  const x = (i % columns) * cell + dx, y = Math.floor(i / columns) * cell + dy;
  const data = document.getElementById('map').getContext('2d').getImageData(x, y, 1, 1).data;
  return '#' + [...data.slice(0, 3)].map((v) => v.toString(16).padStart(2, '0')).join('');
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    obtain(lambda: chromium()[0])
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def engine() -> PoolEngine:
    engine = PoolEngine()
    engine.fill()
    return engine


@pytest.fixture
def page(browser: Browser, engine: PoolEngine) -> Iterator[tuple[Browser, UiServer]]:
    """The page, logged in; light, and without a complaint of the browser at the end."""
    server = UiServer(engine)
    browser.prefer("light")
    browser.leave()
    browser.open(server.url)
    log_in(browser, ADMIN_KEY)
    browser.wait_for("document.getElementById('map').vtokenMap.drawn")
    browser.wait_for("document.querySelectorAll('.field').length")
    yield browser, server
    server.stop()
    assert [p for p in browser.problems if not EXPECTED.search(p)] == []


def log_in(browser: Browser, key: str) -> None:
    browser.type("#key", key)
    browser.press("Enter", 13)


def colours(browser: Browser) -> dict[str, str]:
    """The custom properties of the page in the present scheme, as written in its style."""
    names = [*(f"u{i}" for i in range(LEVELS)), "moving", "page", "panel", "text", "muted"]
    names += ["link", "error", "ideal", "excess", "edge", "strong-line", "line"]
    read = "(n) => getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()"
    return {name: browser.run(f"({read})({json.dumps(name)})") for name in names}


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio as WCAG 2 defines it."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def pixel(browser: Browser, cell: int, dx: int, dy: int) -> str:
    return str(browser.run(f"({PIXEL})({cell}, {dx}, {dy})"))


def wait_for_redraw(browser: Browser) -> None:
    browser.run("document.getElementById('map').vtokenMap.drawn = null")
    browser.wait_for("document.getElementById('map').vtokenMap.drawn")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_block_has_the_colour_of_its_utilisation(page, engine, scheme):
    """Pixels of the canvas against the token layer, block by block, in both schemes."""
    browser, _ = page
    browser.prefer(scheme)
    wait_for_redraw(browser)
    have, drawn = colours(browser), engine.ask("blocks", max_cells=4096)
    levels = set()
    for i, held in enumerate(drawn["held"]):
        if drawn["shared"][i]:
            continue  # the hatch may lie on any pixel
        expected = have["page"]
        if held:
            level = min(LEVELS - 1, drawn["live"][i] * LEVELS // BLOCK_SIZE)
            expected = have[f"u{level}"]
            levels.add(level)
        # a pixel beside the centre, where free blocks have the mark of cached content
        got = pixel(browser, i, 4, 4)
        assert got == (expected if held else "#000000"), (i, drawn["live"][i])
    assert len(levels) >= 3, "the test's pool has too little variety"


def test_shared_is_hatched_and_moving_is_framed(page, engine):
    """Two colours inside a shared block; the frame's colour around a moving one, and only there."""
    browser, _ = page
    have, drawn = colours(browser), engine.ask("blocks", max_cells=4096)
    for i in range(drawn["num_blocks"]):
        if drawn["shared"][i]:
            row = {pixel(browser, i, x, 9) for x in range(3, 15)}
            assert len(row) > 1, i
        framed = pixel(browser, i, 8, 1) == have["moving"]
        assert framed == bool(drawn["moving"][i]), i
    assert sum(drawn["shared"]) == 4
    assert sum(drawn["moving"]) > 10


def test_numbers_and_table_are_the_engines(page, engine):
    """F, retained and ideal as text; requests in the order of their blocks."""
    browser, _ = page
    pool = engine.layer.pool_state()
    numbers = browser.text("#numbers")
    assert f"{pool['waste_ratio']:.2f}" in numbers
    for name in ("retained_blocks", "ideal_blocks", "free_blocks", "live_tokens", "dead_tokens"):
        assert str(pool[name]) in numbers.split()
    rows = browser.run("[...document.querySelectorAll('#requests tbody tr')].map(r => r.innerText)")
    assert [row.split()[0] for row in rows] == ["half", "sparse", "whole"]
    assert rows[1].split()[3:8] == ["500", "33", "467", "32", "3"]
    widths = browser.run(
        "[...document.querySelectorAll('#requests rect')].map(r => +r.getAttribute('width'))"
    )
    assert widths[2] / (widths[2] + widths[3]) == pytest.approx(3 / 32)


def test_map_can_be_read_with_the_keyboard(page, engine):
    """Arrow keys move over the blocks and a sentence tells each."""
    browser, _ = page
    browser.run("document.getElementById('map').focus()")
    browser.press("ArrowRight", 39)
    assert browser.text("#map-readout") == "Block 1: 16 of 16 slots live, shared."
    browser.press("ArrowRight", 39)
    assert browser.text("#map-readout").startswith("Block 2: ")
    browser.press("End", 35)
    assert browser.text("#map-readout") == "Block 200: free."
    moving = engine.ask("blocks", max_cells=4096)["moving"].index(1)
    for _ in range(199 - moving):
        browser.press("ArrowLeft", 37)
    assert browser.text("#map-readout").endswith("in relocation.")


def test_everything_has_an_accessible_name(page):
    """In the tree that screen readers get: fields, buttons, pictures, regions."""
    browser, _ = page
    browser.wait_for("document.querySelectorAll('.charts svg').length == 2")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "button", "checkbox", "combobox", "image", "region", "form", "table"}
    seen = set()
    for node in nodes:
        role = node.get("role", {}).get("value")
        if node.get("ignored") or role not in roles or role == "table":
            continue
        seen.add(role)
        assert node.get("name", {}).get("value"), node
    assert {"textbox", "button", "checkbox", "combobox", "image", "region"} <= seen
    assert browser.run("document.getElementById('map').tabIndex") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(page, scheme):
    """Text 4.5:1, marks 3:1, and the scale rises evenly in lightness, whatever the hue is."""
    browser, _ = page
    browser.prefer(scheme)
    have = colours(browser)
    for text in ("text", "muted", "link", "error", "ideal", "excess", "moving"):
        for ground in ("page", "panel"):
            assert contrast(have[text], have[ground]) >= 4.5, (text, ground)
    for mark in ("edge", "strong-line"):
        assert contrast(have[mark], have["page"]) >= 3
    scale = [luminance(have[f"u{i}"]) ** (1 / 3) for i in range(LEVELS)]
    steps = [b - a for a, b in itertools.pairwise(scale)]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
    assert max(map(abs, steps)) < 3.5 * min(map(abs, steps))
    assert have["u0"] != have["page"]


def points(browser: Browser, chart: str) -> list[int]:
    """Number of points of each run of the first line."""
    runs = browser.run(
        f"[...document.querySelectorAll('{chart} .first')].filter(e => e.tagName != 'text')"
        ".map(e => e.getAttribute('points')?.split(' ').length ?? 1)"
    )
    return list(runs)


def test_lost_connection_is_told_and_leaves_a_gap(page):
    """Says since when, greys out, and does not draw a line over the time without readings."""
    browser, server = page
    browser.wait_for("document.querySelector('#chart-waste polyline.first')")
    server.stop()
    browser.wait_for("document.body.classList.contains('stale')")
    status = browser.text("#status")
    assert re.match(r"Disconnected since .*\d:\d\d:\d\d.*: the server cannot be reached", status)
    assert "Showing the reading of" in status
    assert re.fullmatch(r"For \d+ s\.", browser.text("#age"))
    assert "grayscale" in browser.run("getComputedStyle(document.getElementById('map')).filter")
    server.start()
    browser.wait_for("!document.body.classList.contains('stale')")
    assert browser.text("#status") == "Connected."
    assert browser.text("#age").startswith("Read ")
    browser.wait_for("document.querySelectorAll('#chart-waste polyline.first').length == 2")
    assert len(points(browser, "#chart-waste")) == 2
    assert len(points(browser, "#chart-blocks")) == 2


def test_line_stands_where_its_value_is(page, engine):
    """F's last point, read back from the picture's coordinates."""
    browser, _ = page
    browser.wait_for("document.querySelector('#chart-waste polyline.first')")
    line = browser.run(
        "document.querySelector('#chart-waste polyline.first').getAttribute('points')"
    )
    grid = browser.run(
        "[...document.querySelectorAll('#chart-waste line.grid')].map(l => +l.getAttribute('y1'))"
    )
    y = float(line.split()[-1].split(",")[1])
    zero, _, one = grid
    assert (zero - y) / (zero - one) == pytest.approx(engine.layer.occupancy.waste_ratio, abs=0.01)


def test_wrong_key_is_refused_and_not_kept(browser, engine):
    """The message stands beside the field, and nothing is shown."""
    server = UiServer(engine)
    browser.open(server.url)
    assert browser.text("#status") == "Not connected."
    log_in(browser, "wrong")
    browser.wait_for("document.getElementById('login-error').textContent")
    assert browser.run("document.getElementById('view').hidden")
    assert browser.run("sessionStorage.length") == 0
    server.stop()


@pytest.mark.parametrize(
    ("door", "reason"), [({"keys": ()}, "admin is closed"), ({"mode": "off"}, "mode off")]
)
def test_page_says_why_there_is_nothing_to_see(browser, engine, door, reason):
    """No key is configured, or no token layer runs: another key would not help."""
    server = UiServer(engine, **door)
    browser.open(server.url)
    log_in(browser, ADMIN_KEY)
    browser.wait_for("document.getElementById('status').classList.contains('lost')")
    assert reason in browser.text("#status")
    assert browser.run("document.getElementById('login').hidden")
    assert browser.run("document.getElementById('view').hidden")
    server.stop()


def set_field(browser: Browser, name: str, value: str) -> None:
    browser.type(f"#field-{name}", value)


def test_policy_form_changes_what_was_changed(page, engine):
    """One field, sent with the version that was shown; the form then shows the new version."""
    browser, _ = page
    set_field(browser, "theta_f", "0.4")
    browser.press("Enter", 13)
    browser.wait_for("document.getElementById('policy-message').innerText.includes('in force')")
    assert engine.layer.config.theta_f == 0.4
    sent = [payload for op, payload in engine.calls if op == "set_policy"]
    assert sent[0]["changes"] == {"theta_f": 0.4}
    assert sent[0]["expected_version"] == 1
    assert browser.text("#policy-version") == "(version 2)"
    assert browser.run("document.getElementById('field-theta_f').value") == "0.4"


def test_refused_value_is_told_at_its_field(page, engine):
    """With the bound; nothing changed."""
    browser, _ = page
    set_field(browser, "theta_f", "1.5")
    browser.click("#policy button[type=submit]")
    browser.wait_for("document.getElementById('field-theta_f-error').textContent")
    assert "0 <= theta_f < 1" in browser.text("#field-theta_f-error")
    assert browser.run("document.getElementById('field-theta_f').hasAttribute('aria-invalid')")
    assert engine.layer.policy_version == 1
    browser.problems.clear()  # the browser notes each 422


def test_change_of_somebody_else_is_not_overwritten(page, engine):
    """What is being edited stays, the message says so, and the old version is refused."""
    browser, _ = page
    set_field(browser, "theta_f", "0.4")
    engine.ask("set_policy", changes={"theta_f": 0.1}, by="somebody else")
    browser.wait_for("document.getElementById('policy-message').innerText.includes('version 2')")
    assert browser.run("document.getElementById('field-theta_f').value") == "0.4"
    browser.click("#policy button[type=submit]")
    browser.wait_for("document.getElementById('policy-message').innerText.includes('Not applied')")
    assert engine.layer.config.theta_f == 0.1
    browser.click("#policy-reset")
    browser.wait_for("document.getElementById('field-theta_f').value == '0.1'")
    assert "somebody else" in browser.text("#policy-history")


def test_preview_changes_nothing(page, engine):
    """The engine's answer is shown: what differs, and what each request would lose."""
    browser, _ = page
    set_field(browser, "budget_tokens", "128")
    browser.click("#policy-preview")
    browser.wait_for("!document.getElementById('policy-effect').hidden")
    effect = browser.text("#policy-effect")
    assert effect.startswith("budget_tokens: 1024 → 128\n3 running requests would lose ")
    assert all(f"  {name}: none" in effect for name in ("whole", "half", "sparse"))
    assert engine.layer.policy_version == 1


def test_large_pool_is_summed_up(browser):
    """100 000 blocks in at most 4096 cells, of which each says how many blocks it is."""
    engine = PoolEngine(num_blocks=100_000)
    engine.fill()
    server = UiServer(engine)
    browser.open(server.url)
    log_in(browser, ADMIN_KEY)
    browser.wait_for("document.getElementById('map').vtokenMap.drawn")
    assert browser.run("document.getElementById('map').vtokenMap.drawn.map.held.length") == 4000
    assert "One cell is 25 neighbouring blocks" in browser.text("#map-summary")
    browser.run("document.getElementById('map').focus()")
    browser.press("ArrowRight", 39)
    assert browser.text("#map-readout").startswith("Blocks 1 to 25: 25 held, 400 of 400 slots live")
    server.stop()


def test_blocks_of_another_engine_are_chosen_with_the_keyboard(browser, engine):
    """Each engine's numbers stand beside its name; the map is of the chosen one, and says so. One
    that is gone is told, and the first engine's map comes in its place."""
    engines = Engines(engine, PoolEngine(num_blocks=100))
    server = UiServer(engines)
    browser.leave()
    browser.open(server.url)
    log_in(browser, ADMIN_KEY)
    browser.wait_for("document.getElementById('map').vtokenMap.drawn")
    assert browser.text("#map-summary").startswith("Engine 0: 93 of 200 blocks")
    labels = browser.text("#engines").splitlines()
    retained = engine.layer.pool_state()["retained_blocks"]
    assert f"{retained} blocks retained, 107 of 200 free" in labels[1]
    assert "Engine 1" in labels[2]
    assert "0 blocks retained, 100 of 100 free" in labels[2]
    browser.run("document.querySelector('#engines input:checked').focus()")
    browser.press("ArrowDown", 40)
    browser.wait_for("document.getElementById('map-summary').innerText.startsWith('Engine 1: ')")
    assert "0 of 100 blocks" in browser.text("#map-summary")
    assert browser.run("document.activeElement.value") == "1"
    engines.parts.pop()
    browser.wait_for("document.getElementById('engines-note').innerText")
    assert browser.text("#engines-note") == "Engine 1 is gone; this is engine 0."
    browser.wait_for("document.getElementById('engines').hidden")
    assert "93 of 200 blocks" in browser.text("#map-summary")
    assert browser.run("!document.body.classList.contains('stale')")
    assert all("422" in problem for problem in browser.problems)
    server.stop()


def test_one_engine_needs_no_choice(page):
    """Nothing is shown to choose from."""
    browser, _ = page
    assert browser.run("document.getElementById('engines').hidden")
    assert not browser.text("#map-summary").startswith("Engine")
