"""The report in headless Chromium: no error, no request, search, comparison and filters by keyboard alone, and contrast.

Needs the system's Chromium and the extra 'browser' (make install-browser); skips, saying so, without.
"""

import json
import pathlib
import shutil

import pytest

from coevo_jax.report.collect import collect
from coevo_jax.report.page import page as make_page

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra 'browser' is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra 'browser' is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u202eabc"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> pathlib.Path:
    """A page of a run of the tiny model, one of whose completions is markup."""
    from train_support import run

    folder = tmp_path_factory.mktemp("report") / "run"
    run(folder, "schedule.cycles=2", "schedule.k=3", "data.prompts=tiny")
    path = sorted((folder / "rollouts").glob("*_policy.jsonl"))[0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["completion"] = rows[0]["question"] = HOSTILE
    rows[0]["record"] = "hostile"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "report.html"
    out.write_text(make_page([collect(folder, 10**7, 10_000)], "a run"))
    return out


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(params=["light", "dark"])
def opened(request, browser, report):
    """(page, its errors, its requests)."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=request.param)
    page, errors, requests = context.new_page(), [], []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("h2")
    yield page, errors, requests
    context.close()


def press_until(page, selector, key="Tab", most=80):
    """Press a key until the element has the focus."""
    for _ in range(most):
        if page.evaluate("s => document.activeElement && document.activeElement.matches(s)", selector):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{selector} can't be reached with {key}")


def wait_for(page, condition, seconds=10):
    """Until a JavaScript expression is true. The page's own policy forbids the browser's way, which evaluates strings in it."""
    for _ in range(int(seconds * 20)):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def test_opens_without_errors_or_requests_and_draws(opened, report):
    page, errors, requests = opened
    assert page.locator("svg path").count() >= 8
    for tab in ("curves", "browse", "rubrics", "alarms", "overview"):
        page.click(f"#tab-{tab}")
    assert errors == [] and requests == [report.as_uri()]


def test_a_question_is_found_and_two_updates_compared_by_keyboard_alone(opened):
    page, errors, _ = opened
    press_until(page, "#tab-overview")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-browse", "aria-selected") == "true"
    words = page.evaluate("RUNS[0].questions.find(q => q.updates.length > 1).text")
    press_until(page, "#search")
    page.keyboard.type(words)
    assert page.locator("#questions button[data-question]").count() >= 1
    press_until(page, "#questions button[data-question]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#question")
    assert page.inner_text("#question") == words
    left = page.locator("#left")
    if left.locator("option").count() > 1:
        press_until(page, "#left")
        before = left.input_value()
        page.keyboard.press("ArrowDown")
        wait_for(page, f"document.getElementById('left').value !== '{before}'")
        assert page.locator(".crit li").count() >= 2
    assert errors == []


def test_a_filter_shows_only_its_rows(opened):
    page, errors, _ = opened
    page.click("#tab-browse")
    everything = page.evaluate("RUNS[0].questions.length")
    page.select_option("#filter", "invalid")
    wanted = page.evaluate("RUNS[0].questions.filter(q => q.flags.includes('invalid')).length")
    assert 0 < wanted < everything and page.inner_text("#said") == f"{wanted} questions"
    page.click("#questions button[data-question] >> nth=0")
    page.wait_for_selector(".row:visible")
    shown = page.locator(".row").count()
    assert shown and page.locator(".row:has(.tag:text-is('invalid'))").count() == shown
    assert errors == []


def test_markup_in_a_completion_is_text(opened):
    page, errors, _ = opened
    page.click("#tab-browse")
    page.fill("#search", "window.hacked")
    page.click("#questions button[data-question] >> nth=0")
    page.wait_for_selector("#question")
    assert page.inner_text("#question") == HOSTILE.replace("\u202e", "\u27e8U+202E\u27e9")
    assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0 and errors == []


def test_searching_the_texts_finds_what_the_question_does_not_say(opened):
    page, errors, _ = opened
    page.click("#tab-browse")
    words = page.evaluate("(async () => (await rowsOf(0, 3))[0].completion)()")
    page.fill("#search", words[:40])
    page.click("#deep")
    wait_for(page, "found !== null")
    assert page.evaluate("found.hits.has(3)") and page.locator("#questions button[data-question='3']").count() == 1
    assert errors == []


def test_contrast_names_and_roles_pass_a_checker(opened):
    page, _, _ = opened
    for tab in ("overview", "curves", "browse", "rubrics", "alarms"):
        page.click(f"#tab-{tab}")
        if tab == "browse":
            page.click("#questions button[data-question] >> nth=0")
            page.wait_for_selector(".row:visible")
        found = axe.Axe().run(page)
        bad = [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found.response["violations"]]
        assert bad == [], tab


def test_a_phone_needs_no_sideways_scrolling(browser, report):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(report.as_uri())
    for tab in ("overview", "curves", "browse", "rubrics", "alarms"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    page.close()
