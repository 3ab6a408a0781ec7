"""The attention page in a real Chromium: it draws, and its numbers are numpy's, by pointer and by keyboard."""

import re
import time

import numpy as np
import pytest

from jaxformer.analysis import AttentionMap, attention_view
from jaxformer.analysis.eight_bits import eight_bits

READY = "return document.documentElement.dataset.ready === 'true'"
AFTER = "return performance.getEntriesByName('ready')[0].startTime"
DRAWN = "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
INK = """
const canvas = document.getElementById(arguments[0]);
const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
return pixels.filter((value, i) => i % 4 === 3 && value > 0).length;
"""
STORED = """
return facts.maps.map((map) => map.layers.map((_, l) => map.heads.map((_, h) => map.rows.map((_, i) =>
  map.columns.map((_, j) => weightOf(map, l, h, i, j))))));
"""
TOKENS = ("<bos>", " the", "天", "שלום", "</script><script>hacked = 1</script>", "<b>&amp;", "😀", "\n")


def distributions(*shape, seed=0):
    logits = np.random.default_rng(seed).normal(0, 2, shape)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


WEIGHTS = distributions(2, 3, 8, 8)


@pytest.fixture
def show(chromium, tmp_path):
    """Opens a view as a file."""

    def opened(view):
        view.save(tmp_path / "view.html")
        chromium.get(f"file://{tmp_path / 'view.html'}")
        settle(chromium, READY)
        return chromium

    yield opened
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def settle(browser, until=DRAWN):
    """Waits until the page is ready, and what was asked for is drawn."""
    limit = time.monotonic() + 60
    while not browser.execute_script(until):
        assert time.monotonic() < limit, browser.page_source[-2000:]
        time.sleep(0.02)
    browser.execute_script(DRAWN)


def press(browser, *keys, held=None):
    from selenium.webdriver.common.action_chains import ActionChains

    actions = ActionChains(browser, duration=0)
    if held is not None:
        actions.key_down(held)
    actions.send_keys(*keys)
    if held is not None:
        actions.key_up(held)
    actions.perform()
    settle(browser)


def point(browser, selector):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser, duration=0).move_to_element(find(browser, selector)).perform()
    settle(browser)


def click(browser, selector):
    find(browser, selector).click()
    settle(browser)


def find(browser, selector):
    return browser.find_element("css selector", selector)


def numbers(browser, axis):
    """The numbers beside the tokens of one side; 0 where there is none."""
    texts = [item.get_attribute("textContent") for item in browser.find_elements("css selector", f"#{axis} .number")]
    return np.array([float(text or 0) for text in texts])


def readout(browser):
    return find(browser, "#readout").text


def test_the_page_draws_its_tokens_as_text_and_loads_nothing(show):
    browser = show(attention_view(WEIGHTS, TOKENS, title="a <title>"))
    assert browser.execute_script(INK, "links") > 1000
    shown = [item.get_attribute("textContent") for item in browser.find_elements("css selector", "#rows .text")]
    assert shown == ["<bos>", "␣the", "天", "שלום", TOKENS[4], "<b>&amp;", "😀", "⏎"]
    assert find(browser, "h1").text == "a <title>"
    assert browser.execute_script("return typeof hacked") == "undefined"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    blocked = "return fetch('data:text/plain,x').then(() => 'loaded', () => 'blocked')"
    assert browser.execute_script(blocked) == "blocked"
    browser.get_log("browser")  # what the policy says of that is no fault of the page


def test_the_page_holds_the_weights_that_numpy_computed(show):
    signed = np.random.default_rng(5).normal(size=(1, 2, 3, 4)).astype(np.float32)
    maps = {
        "attention": AttentionMap(WEIGHTS, TOKENS, TOKENS),
        "factors": AttentionMap(signed, tuple("abc"), tuple("wxyz")),
    }
    first, second = (np.array(values) for values in show(attention_view(maps)).execute_script(STORED))
    np.testing.assert_allclose(first, eight_bits(WEIGHTS).weights(), atol=1e-6)
    np.testing.assert_allclose(first.sum(-1), 1, atol=1e-12)
    assert np.abs(first - WEIGHTS).max() < 1 / 255
    assert np.abs(second - signed).max() <= np.abs(signed).max() / 254 * 1.001


def test_pointing_at_a_token_shows_its_weights(show):
    browser = show(attention_view(WEIGHTS, TOKENS))
    whole = browser.execute_script(INK, "links")
    click(browser, '#chips [data-head="2"]')
    point(browser, '#rows [data-index="3"]')
    assert np.abs(numbers(browser, "columns") - WEIGHTS[0, 2, 3]).max() < 1 / 255 + 0.0005
    assert 0 < browser.execute_script(INK, "links") < whole
    strongest = int(WEIGHTS[0, 2, 3].argmax())
    value = eight_bits(WEIGHTS).weights()[0, 2, 3, strongest]
    told = readout(browser)
    assert told.startswith("layer 0 · head 2 · “שלום” looks at")
    assert f"{value:.3f}" in told
    point(browser, '#columns [data-index="5"]')
    assert np.abs(numbers(browser, "rows") - WEIGHTS[0, 2, :, 5]).max() < 1 / 255 + 0.0005
    assert "“<b>&amp;” is looked at by" in readout(browser)
    click(browser, "#chips .every")
    point(browser, '#rows [data-index="3"]')
    assert np.abs(numbers(browser, "columns") - WEIGHTS[0, :, 3].mean(0)).max() < 1 / 255 + 0.0005


def test_keys_choose_views_layers_heads_and_tokens(show):
    from selenium.webdriver.common.keys import Keys

    browser = show(attention_view(WEIGHTS, TOKENS, layers=[0, 1]))
    press(browser, "]", ".", "2")
    assert readout(browser).startswith("layer 1 · head 0")
    press(browser, ".", Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    value = float(find(browser, "#readout .value").text)
    assert abs(value - WEIGHTS[1, 1, 1, 0]) < 1 / 255 + 0.0005
    assert readout(browser).endswith("row 1, column 0")
    assert browser.execute_script(INK, "cells") > 1000
    press(browser, "3", Keys.ARROW_UP, Keys.ARROW_RIGHT)
    assert find(browser, "#heads button.current").get_attribute("aria-label") == "layer 0, head 2"
    assert len(browser.find_elements("css selector", "#heads canvas")) == 6
    press(browser, Keys.ENTER)
    assert readout(browser).startswith("layer 0 · head 2")
    assert find(browser, "#tab-matrix").get_attribute("aria-selected") == "true"
    press(browser, "a", "1", Keys.ARROW_UP)
    assert readout(browser).startswith("layer 0 · mean of 3 heads · “⏎” looks at")
    press(browser, Keys.ESCAPE)
    assert "point at a token" in readout(browser)


def test_pointing_at_the_matrix_names_the_cell(show):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser = show(attention_view(WEIGHTS[0, 0], list("abcdefgh")))
    click(browser, "#tab-matrix")
    cell, left, top = browser.execute_script("return [matrix.cell, matrix.left, matrix.top]")
    canvas = find(browser, "#cells")
    x, y = left + 4.5 * cell - canvas.size["width"] / 2, top + 6.5 * cell - canvas.size["height"] / 2
    ActionChains(browser, duration=0).move_to_element_with_offset(canvas, int(x), int(y)).perform()
    settle(browser)
    assert re.search(r"“g” → “e” (\d\.\d+)", readout(browser)), readout(browser)
    assert abs(float(find(browser, "#readout .value").text) - WEIGHTS[0, 0, 6, 4]) < 1 / 255 + 0.0005
    press(browser, Keys.ARROW_UP)
    assert "“f” → “e”" in readout(browser)
    browser.execute_script("document.querySelector('main').click()")
    settle(browser)
    assert "point at a token" in readout(browser)


def test_parts_of_pairs_and_of_encoder_decoders_can_be_chosen(show):
    from selenium.webdriver.support.select import Select

    browser = show(attention_view(WEIGHTS, TOKENS, second=3))
    Select(find(browser, "#part")).select_by_visible_text("text B to text A")
    settle(browser)
    count = {axis: len(browser.find_elements("css selector", f"#{axis} li")) for axis in ("rows", "columns")}
    assert count == {"rows": 5, "columns": 3}
    cross = AttentionMap(distributions(1, 2, 4, 6), tuple("abcd"), tuple("uvwxyz"))
    browser = show(attention_view({"encoder": AttentionMap(WEIGHTS, TOKENS, TOKENS), "cross": cross}))
    press(browser, "]")
    Select(find(browser, "#part")).select_by_visible_text("decoder to encoder")
    settle(browser)
    click(browser, '#chips [data-head="1"]')
    point(browser, '#rows [data-index="2"]')
    assert np.abs(numbers(browser, "columns") - cross.weights[0, 1, 2]).max() < 1 / 255 + 0.0005
    assert readout(browser).startswith("layer 0 · head 1")


def test_long_texts_are_windowed(show):
    weights = np.zeros((1, 1, 300, 300), np.float32)
    weights[0, 0, np.arange(300), np.maximum(np.arange(300) - 5, 0)] = 1
    browser = show(attention_view(weights, window=(20, 290)))
    assert len(browser.find_elements("css selector", "#rows li")) == 128
    assert "The page holds rows 20 to 289 of 300" in find(browser, "#windows").text
    slide = "const s = document.getElementById('firstRow'); s.value = 142; s.dispatchEvent(new Event('input'))"
    browser.execute_script(slide)
    settle(browser)
    assert find(browser, "#rows .index").get_attribute("textContent") == "162"
    assert find(browser, "#columns .index").get_attribute("textContent") == "162"
    browser.execute_script("choose({ row: 0 })")
    settle(browser)
    assert "nothing that the page holds" in readout(browser)


def test_keys_reach_every_token_of_a_long_text_and_both_sides(show):
    from selenium.webdriver.common.keys import Keys

    weights = np.zeros((1, 1, 300, 300), np.float32)
    weights[0, 0, np.arange(300), np.maximum(np.arange(300) - 5, 0)] = 1
    browser = show(attention_view(weights))
    press(browser, *[Keys.ARROW_UP] * 2, *[Keys.ARROW_DOWN] * 4)
    assert "“130” looks at “125” 1.000" in " ".join(readout(browser).split())
    seen = [item.get_attribute("data-index") for item in browser.find_elements("css selector", "#rows li")]
    assert (seen[0], seen[-1]) == ("3", "130")
    assert "3 to 130" in find(browser, "#windows").text
    chosen = "const box = document.querySelector('#rows .chosen').getBoundingClientRect(); return [box.top, box.bottom]"
    top, bottom = browser.execute_script(chosen)
    assert 0 <= top < bottom <= browser.execute_script("return innerHeight")
    press(browser, *[Keys.ARROW_DOWN] * 3, held=Keys.SHIFT)
    assert "“5” is looked at by “10” 1.000" in " ".join(readout(browser).split())
    browser.execute_script("choose({ row: 8 })")
    press(browser, "2", *[Keys.ARROW_UP] * 9, *[Keys.ARROW_LEFT] * 9)
    assert readout(browser).endswith("row 0, column 0")
    assert "0 to 127" in find(browser, "#windows").text
    assert float(find(browser, "#readout .value").text) == 1


def test_heads_that_are_no_distribution_leave_the_others_as_they_are(show):
    weights = WEIGHTS.copy()
    weights[1] -= 0.3
    browser = show(attention_view(weights, TOKENS))
    stored = np.array(browser.execute_script(STORED)[0])
    np.testing.assert_allclose(stored[0].sum(-1), 1, atol=1e-12)
    assert np.abs(stored[0] - weights[0]).max() < 1 / 255
    assert np.abs(stored[1] - weights[1]).max() <= np.abs(weights[1]).max() / 254 * 1.001
    click(browser, '#chips [data-head="1"]')
    press(browser, "]")
    point(browser, '#rows [data-index="2"]')
    assert np.abs(numbers(browser, "columns") - weights[1, 1, 2]).max() < 1 / 254 + 0.0005


def test_light_and_dark_follow_the_reader(show):
    background = "return getComputedStyle(document.body).backgroundColor"
    emulate = "Emulation.setEmulatedMedia"
    browser = show(attention_view(WEIGHTS, TOKENS))
    seen = {}
    for scheme in ("dark", "light"):
        browser.execute_cdp_cmd(emulate, {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        settle(browser)
        seen[scheme] = browser.execute_script(background)
    assert seen["dark"] != seen["light"]
    press(browser, "d")
    assert browser.execute_script(background) == seen["dark"]
    browser.execute_cdp_cmd(emulate, {"features": []})


def test_a_notebook_shows_it_in_a_frame(chromium, tmp_path):
    (tmp_path / "notebook.html").write_text(f"<body>{attention_view(WEIGHTS, TOKENS)._repr_html_()}", encoding="utf-8")
    chromium.get(f"file://{tmp_path / 'notebook.html'}")
    chromium.switch_to.frame(0)
    settle(chromium, READY)
    assert chromium.execute_script(INK, "links") > 1000
    chromium.switch_to.default_content()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "causal"])
def test_a_large_model_opens_and_stays_under_12_megabytes(kind, show, tmp_path, capsys):
    weights = distributions(24, 16, 128, 128)
    if kind == "causal":
        weights *= np.tri(128, dtype=np.float32)
        weights /= weights.sum(-1, keepdims=True)
    view = attention_view(weights)
    view.save(tmp_path / "view.html")
    begun = time.monotonic()
    browser = show(view)
    seen, ready = time.monotonic() - begun, browser.execute_script(AFTER) / 1000
    size = (tmp_path / "view.html").stat().st_size
    with capsys.disabled():
        print(f"\n24 x 16 x 128, {kind}: ready after {ready:.2f} s (seen from here {seen:.2f} s), {size / 1e6:.2f} MB")
    assert size < 12e6
    press(browser, "3")
    assert len(browser.find_elements("css selector", "#heads canvas")) == 384
