"""The report as a person meets it, in a real browser."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest

from rondo.report.data import gather
from rondo.report.page import render
from tests.browser.conftest import ARTIFACTS
from tests.runs import EVIL, RecordedRun, recorded

pytestmark = pytest.mark.heavy

SIZES = {"laptop": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run, other = recorded(folder / "mine", periods=8, groups=24), recorded(folder / "other", "synchronous", periods=8)
    path = folder / "report.html"
    path.write_text(render(gather(run, against=other)), encoding="utf-8")
    return path


@contextmanager
def opened(browser, url, *, size="laptop", theme="light"):
    """The page, and a record of what it complained about and whom it asked; both must stay empty."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    assert said == []
    if url.startswith("file:"):
        assert [one for one in asked if not one.startswith(("data:", url))] == []
    context.close()


@pytest.fixture
def page(browser, report):
    with opened(browser, report.as_uri()) as page:
        yield page


def view(page):
    return page.evaluate("[R.page.view.from, R.page.view.to, R.page.view.end]")


def test_it_opens_without_a_complaint_and_says_what_happened(page):
    assert "Generation and training overlapped for" in page.locator("h1").inner_text()
    assert "Periodic is 1.00 times as fast as synchronous" in page.locator("#comparison").inner_text()
    assert page.locator(".timeline canvas").count() == 2
    assert page.locator("#account .lane").count() == 6
    assert page.locator(".curve").count() >= 4


def test_the_timeline_zooms_by_button_key_and_drag_and_both_timelines_together(page):
    assert view(page)[:2] == [0, view(page)[2]]
    page.get_by_role("button", name="Zoom in").click()
    assert view(page)[1] - view(page)[0] == pytest.approx(view(page)[2] / 2)
    page.locator(".timeline canvas").first.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert view(page)[1] - view(page)[0] == pytest.approx(view(page)[2] / 4)
    page.keyboard.press("0")
    assert view(page)[:2] == [0, view(page)[2]]
    canvas = page.locator(".timeline canvas").last
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 40, steps=4)
    page.mouse.up()
    assert view(page)[1] - view(page)[0] == pytest.approx(view(page)[2] * 200 / (box["width"] - 76), rel=0.05)
    page.screenshot(path=ARTIFACTS / "report-zoomed.png")


def test_a_group_is_found_by_keyboard_and_by_pointing_with_where_it_was_trained(page):
    canvas = page.locator(".timeline canvas").first
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    page.keyboard.press("n")
    assert "prefill 250 ms, decode 500 ms" in page.locator("#said").inner_text()
    assert page.evaluate("R.page.timelines[0].chosen.group.group") == 0
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    place = page.evaluate(
        "(() => { const t = R.page.timelines[0], g = t.groups[3], p = t.place.engines[g.engine];"
        " return [t.x((g.sent + g.arrived) / 2), p.top + (g.row + 0.5) * p.row] })()"
    )
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + place[0], box["y"] + place[1])
    assert "group 3" in page.locator("#tip").inner_text()
    page.screenshot(path=ARTIFACTS / "report-hover.png")


def test_other_periods_are_a_key_a_slider_or_a_bar_away(page):
    shown = page.locator("#period-name")
    page.locator(".timeline canvas").first.focus()
    page.keyboard.press("PageUp")
    before = shown.inner_text()
    page.get_by_role("button", name="Later period").click()
    assert int(shown.inner_text()) == int(before) + 1
    page.locator("#account-periods g.period").nth(2).click()
    assert shown.inner_text() == "2"


def test_samples_are_filtered_by_words_period_and_reward(page):
    count = page.locator("#samples-count")
    whole = int(count.inner_text().split()[-1])
    page.get_by_label("Words in prompt or response").fill("FIRST?")
    assert int(count.inner_text().split()[0]) == 16  # the two responses to the first prompt of eight periods
    assert page.locator("#samples mark").first.inner_text() == "first?"
    page.locator("#samples-period").select_option("3")
    assert int(count.inner_text().split()[0]) == 2
    page.locator("#samples-reward").select_option("1")
    assert int(count.inner_text().split()[0]) == 1
    page.get_by_label("Words in prompt or response").fill("nothing like this")
    assert "No sample fits" in page.locator("#samples").inner_text()
    page.get_by_label("Words in prompt or response").fill("")
    page.locator("#samples-period").select_option("")
    page.locator("#samples-reward").select_option("")
    assert int(count.inner_text().split()[0]) == whole


def test_a_response_that_holds_a_script_is_shown_as_text_and_does_nothing(page):
    page.get_by_label("Words in prompt or response").fill("</script>")
    shown = page.locator("#samples pre.completion").first
    assert shown.text_content() == EVIL
    assert page.title() == "mine · Rondo"
    assert page.locator("#samples img").count() == 0
    assert EVIL.split("<!--")[0].strip() in page.locator("#config").text_content()  # the config is text, too


def test_dark_and_light_follow_the_system_until_the_button_says_otherwise(browser, report):
    def paper(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with opened(browser, report.as_uri(), theme="dark") as dark, opened(browser, report.as_uri()) as light:
        assert paper(dark) != paper(light)
        light.locator("#theme").click()
        assert paper(light) == paper(dark)
        light.reload()
        assert paper(light) == paper(dark)  # it is remembered
        light.keyboard.press("t")
        assert paper(light) != paper(dark)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_sticks_out_at_any_width(browser, report, size, theme):
    with opened(browser, report.as_uri(), size=size, theme=theme) as page:
        page.screenshot(path=ARTIFACTS / f"report-{size}-{theme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def wait_for(condition, page):
    """Playwright's own waiting evaluates text, which the page forbids."""
    for _ in range(150):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError("waited in vain")


def test_a_live_page_updates_itself(browser, tmp_path):
    run = RecordedRun(tmp_path / "run")
    command = [sys.executable, "-m", "rondo", "report", str(run.folder), "--live"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split(" at ")[1].split()[0]
        with opened(browser, url) as page:
            assert "Waiting for the first period" in page.locator("h1").inner_text()
            run.live()
            wait_for(lambda: "overlapped" in page.locator("h1").inner_text(), page)
            run.live()
            wait_for(lambda: page.evaluate("R.data.runs[0].metrics.length") == 2, page)
            assert page.locator("#period-name").inner_text() == "1"
            assert page.locator("#live").is_visible()
    finally:
        server.terminate()
        server.wait(timeout=20)
        server.stdout.close()
