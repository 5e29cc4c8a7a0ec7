"""The report in a headless Chromium, from the file system: no error, no request, search, and the width of a phone."""

from pathlib import Path

import pytest

from kimivl_lab.report import __main__ as report

from .browser import browser

__all__ = ["browser"]

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
LESSON = "20_position_embedding"  # wide tables, formulas and code


@pytest.fixture(scope="module")
def folder(browser, tmp_path_factory):
    """The report of one lesson as it was saved, with its solution, the glossary and the other texts."""
    out = tmp_path_factory.mktemp("report")
    assert report.main(["--saved", "--only", LESSON, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_opens_without_an_error_or_a_request_and_fits_the_width(browser, folder, size):
    pages = sorted(folder.glob("*.html"))
    assert len(pages) >= 4
    for page in pages:
        browser.open(page, **size)
        assert browser.problems == [] and browser.requests == [page.resolve().as_uri()]
        assert browser.value("document.documentElement.scrollWidth") <= size["width"], page.name
        wide = "e => e.getBoundingClientRect().right > innerWidth && !e.closest('pre, table, .formula')"
        cut = browser.value(
            f"[...document.querySelectorAll('main *')].filter({wide}).map(e => e.outerHTML.slice(0, 90))"
        )
        assert cut == [], "cut off at the right, and nothing scrolls"


def test_a_page_that_asks_for_something_or_fails_is_seen(browser, tmp_path):
    """The browser of these tests tells errors and requests; and the report's policy stops a request."""
    page = tmp_path / "page.html"
    page.write_text("<img src='missing.png'><script>console.error('no'); nothing.here</script>")
    browser.open(page)
    assert len(browser.problems) >= 3 and Path(browser.requests[-1]).name == "missing.png"
    policy = (Path(report.__file__).parent / "base.html.j2").read_text().split('content="default-src')[1].split('"')[0]
    page.write_text(
        f'<meta http-equiv="Content-Security-Policy" content="default-src{policy}"><img src="http://127.0.0.1:9/a.png">'
    )
    browser.open(page)
    assert any("Content Security Policy" in problem for problem in browser.problems)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_search_finds_headings_of_all_pages(browser, folder, size):
    browser.open(folder / "index.html", **size)
    assert browser.value("document.getElementById('contents').open") == (size is DESKTOP)
    browser.press("/", "/")
    for letter in "InterPOL biCUBic":
        browser.press(letter, letter)
    shown = "[...document.querySelectorAll('#contents li')].filter(e => e.offsetHeight).map(e => e.textContent.trim())"
    assert browser.value(shown) == ["bicubic interpolation"]
    browser.value("document.querySelector('#search').value = 'interpolation matrix one'")
    browser.value("document.querySelector('#search').dispatchEvent(new Event('input'))")
    assert browser.value(shown) == ["Predict: one line of the interpolation matrix"]
    browser.value("document.querySelector('#search').value = 'no such heading'")
    browser.value("document.querySelector('#search').dispatchEvent(new Event('input'))")
    assert browser.value(shown) == [] and browser.value("document.querySelector('#found').textContent") == "0 headings"


def test_a_link_to_a_term_leads_to_its_heading(browser, folder):
    browser.open(folder / f"{LESSON}.html", **PHONE)
    link = browser.value("document.querySelector('main a[href^=\"GLOSSARY.html#\"]').getAttribute('href')")
    browser.open(folder / "GLOSSARY.html", "#" + link.split("#")[1], **PHONE)
    top = browser.value("document.querySelector(':target').getBoundingClientRect().top")
    assert 0 <= top < PHONE["height"] / 2
