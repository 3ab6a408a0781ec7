"""The attention viewer: weights as bytes, the data of the page, tokens as text, and what is refused."""

import base64
import json
import re
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.analysis import AttentionMap, attention_page, attention_view
from jaxformer.analysis.eight_bits import eight_bits


def distributions(*shape, seed=0, causal=False):
    """Random softmax rows of many temperatures, float32."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=shape) * draw.uniform(0.1, 9, (*shape[:-1], 1))
    if causal:
        logits = np.where(np.tri(*shape[-2:], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def read_page(html):
    """The facts of a page, and its bytes."""
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', html, re.S)[1])
    return facts, np.frombuffer(zlib.decompress(base64.b64decode(re.search(r'id="weights">(.*?)<', html)[1])), np.uint8)


def test_bytes_of_distributions_sum_to_255_and_are_off_by_less_than_one():
    weights = distributions(2, 3, 41, 37)
    weights[0, 1, 5] = 0
    weights[1, 2, 7] = np.eye(37)[11]
    weights[1, 0, 3] = 1 / 37
    stored = eight_bits(weights)
    assert not stored.scales.any()
    sums = stored.values.astype(int).sum(-1)
    assert sums[0, 1, 5] == 0
    assert (np.delete(sums.reshape(-1), 41 + 5) == 255).all()
    assert np.abs(stored.weights() - weights).max() < 1 / 255
    assert stored.values[1, 2, 7, 11] == 255
    assert set(stored.values[1, 0, 3]) == {6, 7}


def test_largest_remainders_get_the_units_that_are_left():
    # 255 times the weights are 76.5, 127.5 - .3, 51.3: rounded down 254, and the one left over goes to the first.
    weights = np.array([76.5, 127.2, 51.3], np.float64)[None, None, None] / 255
    assert eight_bits(weights).values.tolist() == [[[[77, 127, 51]]]]
    masked = distributions(1, 1, 9, 9, causal=True)
    assert (eight_bits(masked).values[masked == 0] == 0).all()


def test_weights_that_are_no_distribution_keep_their_sign_and_a_scale_of_their_head():
    weights = np.random.default_rng(3).normal(size=(2, 3, 5, 7)).astype(np.float32)
    weights[1, 2] = 0
    stored = eight_bits(weights)
    largest = np.abs(weights).max((2, 3))
    np.testing.assert_array_equal(stored.scales, largest)
    assert (np.abs(stored.weights() - weights).max((2, 3)) <= largest / 254 * 1.001).all()
    assert eight_bits(2 * distributions(1, 1, 4, 5)).scales.all()


def test_heads_of_other_layers_leave_a_distribution_as_it_is():
    weights = distributions(3, 2, 5, 7)
    weights[1] -= 0.2
    weights[2, 0, 4, 6] += 3
    stored = eight_bits(weights)
    assert (stored.scales > 0).tolist() == [[False, False], [True, True], [True, False]]
    plain = stored.scales == 0
    assert (stored.values[plain].sum(-1, dtype=int) == 255).all()
    assert np.abs(stored.weights() - weights)[plain].max() < 1 / 255
    facts, _ = read_page(attention_view(weights).html)
    np.testing.assert_allclose(facts["maps"][0]["scales"], stored.scales, rtol=1e-5)


def test_units_of_equal_weights_are_spread_over_the_row():
    values = eight_bits(np.full((1, 1, 40, 1020), 1 / 1020, np.float32)).values[0, 0]
    assert (values.sum(-1, dtype=int) == 255).all()
    quarters = values.reshape(40, 4, 255).sum(-1, dtype=int)
    assert quarters.min() > 55
    assert quarters.max() < 73
    assert values.sum(0, dtype=int).max() < 20, "a column has units in every row"


def test_the_page_holds_the_maps_and_loads_nothing():
    maps = {
        "encoder": AttentionMap(distributions(1, 2, 5, 5), tuple("vwxyz"), tuple("vwxyz")),
        "cross": AttentionMap(distributions(3, 4, 7, 5, seed=1), tuple("abcdefg"), tuple("vwxyz")),
    }
    html = attention_view(maps).html
    facts, values = read_page(html)
    first, second = facts["maps"]
    assert (first["rows"], first["layers"], first["heads"], first["offset"]) == (list("vwxyz"), [0], [0, 1], 0)
    assert (second["rows"], second["columns"], second["offset"]) == (list("abcdefg"), list("vwxyz"), 50)
    cross = values[50:].reshape(3, 4, 7, 5)
    np.testing.assert_array_equal(cross, eight_bits(maps["cross"].weights).values)
    assert [part["title"] for part in facts["parts"]] == ["encoder", "decoder to encoder"]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|<link|src=", html)
    assert "default-src 'none'" in html


def test_tokens_are_text_whatever_they_hold(tmp_path):
    tokens = ("</script><script>alert(1)</script>", "<b>", "&amp;", "\u202e", "天", "שלום", "😀", "\n", "{{title}}", "")
    view = attention_view(distributions(1, 1, 10, 10), tokens, title="<i>&")
    facts, _ = read_page(view.html)
    assert facts["maps"][0]["rows"] == list(tokens)
    assert view.html.count("<script") == 3
    assert "<title>&lt;i&gt;&amp;</title>" in view.html
    view.save(tmp_path / "view.html")
    assert (tmp_path / "view.html").read_text(encoding="utf-8") == view.html
    frame = view._repr_html_()
    assert frame.startswith("<iframe")
    assert 'sandbox="allow-scripts"' in frame
    assert "<script" not in frame


def test_what_is_larger_than_a_page_is_windowed(monkeypatch):
    monkeypatch.setattr(attention_page, "MOST_WEIGHTS", 1700)
    length = 151
    weights = np.zeros((2, 2, length, length), np.float32)
    weights[:, :, np.arange(length), np.arange(length)] = 0.25
    weights[:, :, :, 3] += 0.75
    facts, values = read_page(attention_view(weights).html)
    shown = facts["maps"][0]
    size = len(shown["rows"])
    assert size == len(shown["columns"]) == 20  # 4 heads of 20 x 20 are 1600, of 21 x 21 1764
    assert (shown["firstRow"], shown["totalRows"]) == (0, length)
    facts, values = read_page(attention_view(weights, window=(100, 110)).html)
    shown = facts["maps"][0]
    assert shown["rows"] == shown["columns"] == list(map(str, range(100, 110)))
    # Whole rows were rounded: what is outside of the window is missing from their sums.
    np.testing.assert_array_equal(values.reshape(2, 2, 10, 10), np.broadcast_to(64 * np.eye(10), (2, 2, 10, 10)))
    near_the_end = read_page(attention_view(weights, window=(149, 165)).html)[0]["maps"][0]
    assert (near_the_end["rows"][-1], near_the_end["firstRow"]) == ("150", 135)


def test_layers_and_heads_keep_their_numbers():
    weights = distributions(5, 6, 3, 4)
    view = attention_view(weights, layers=[4, 1], heads=(5,))
    np.testing.assert_array_equal(view.maps["attention"].weights, weights[[4, 1]][:, [5]])
    facts, _ = read_page(view.html)
    assert (facts["maps"][0]["layers"], facts["maps"][0]["heads"]) == ([4, 1], [5])


def test_a_pair_of_texts_is_shown_side_by_side():
    facts, _ = read_page(attention_view(distributions(1, 1, 9, 9), second=4).html)
    parts = {part["title"]: (part.get("rows"), part.get("columns")) for part in facts["parts"]}
    assert parts == {
        "both texts": (None, None),
        "text A to text A": ([0, 4], [0, 4]),
        "text A to text B": ([0, 4], [4, 9]),
        "text B to text A": ([4, 9], [0, 4]),
        "text B to text B": ([4, 9], [4, 9]),
    }
    facts, _ = read_page(attention_view(distributions(1, 1, 9, 9), second=4, window=(0, 3)).html)
    assert [part["title"] for part in facts["parts"]] == ["both texts", "text A to text A"]


def test_arrays_of_other_ranks_and_lists_of_layers_are_one_map():
    weights = distributions(2, 3, 5, 5)
    lists = [layer[None] for layer in weights]
    for given, expected in ((weights[0], weights[:1]), (weights[0, 0], weights[:1, :1]), (lists, weights)):
        np.testing.assert_array_equal(attention_view(given, list("abcde")).maps["attention"].weights, expected)
    assert attention_view(weights, list("abcde")).maps["attention"].columns == tuple("abcde")


def test_numbers_of_every_dtype_are_weights():
    for dtype in (bool, np.int32, np.float16, np.float64, jnp.bfloat16):
        view = attention_view(jnp.eye(4, dtype=dtype) if dtype is jnp.bfloat16 else np.eye(4, dtype=dtype))
        np.testing.assert_array_equal(view.maps["attention"].weights, np.eye(4, dtype=np.float32)[None, None])


def test_rows_of_a_window_keep_their_numbers(monkeypatch):
    weights = distributions(2, 3, 4, 50)
    names = tuple(map(str, range(50)))
    shown = AttentionMap(weights, names[30:34], names, layers=(5, 6), heads=(0, 2, 4), first_row=30, total_rows=50)
    facts, values = read_page(attention_view(shown, heads=[4, 0]).html)
    expected = {
        "firstRow": 30,
        "totalRows": 50,
        "firstColumn": 0,
        "totalColumns": 50,
        "layers": [5, 6],
        "heads": [4, 0],
    }
    assert expected.items() <= facts["maps"][0].items()
    assert facts["maps"][0]["rows"] == ["30", "31", "32", "33"]
    np.testing.assert_array_equal(values.reshape(2, 2, 4, 50), eight_bits(weights[:, [2, 0]]).values)
    monkeypatch.setattr(attention_page, "MOST_WEIGHTS", 2 * 3 * 4 * 10)
    (facts,) = read_page(attention_view(shown).html)[0]["maps"]
    assert (facts["firstRow"], facts["firstColumn"], len(facts["rows"]), len(facts["columns"])) == (30, 30, 4, 10)


def test_bertviz_gets_its_arguments():
    weights = distributions(2, 3, 5, 5)
    given = attention_view(weights, list("abcde"), second=2).bertviz()
    assert given["tokens"] == list("abcde")
    assert given["sentence_b_start"] == 2
    assert [layer.shape for layer in given["attention"]] == [(1, 3, 5, 5)] * 2
    np.testing.assert_array_equal(given["attention"][1][0], weights[1])
    maps = {
        "encoder": AttentionMap(distributions(1, 2, 5, 5), tuple("vwxyz"), tuple("vwxyz")),
        "decoder": AttentionMap(distributions(1, 2, 3, 3), tuple("bc."), tuple("abc")),
        "cross": AttentionMap(distributions(1, 2, 3, 5), tuple("bc."), tuple("vwxyz")),
    }
    given = attention_view(maps).bertviz(lambda array: array.tolist())
    assert set(given) == {f"{name}_attention" for name in maps} | {"encoder_tokens", "decoder_tokens"}
    assert (given["encoder_tokens"], given["decoder_tokens"]) == (list("vwxyz"), list("abc"))
    assert given["cross_attention"][0] == maps["cross"].weights[0][None].tolist()
    with pytest.raises(ValueError, match="other columns than rows"):
        attention_view(distributions(1, 2, 3, 5)).bertviz()


def test_what_can_t_be_shown_is_refused():
    weights = distributions(2, 3, 5, 5)
    shown = AttentionMap(weights, tuple("abcde"), tuple("abcde"))
    for given, options, message in (
        (weights, {"tokens": list("abc")}, "tokens has 3 texts; must be 5"),
        (weights, {"tokens": "abcde"}, "tokens='abcde' must be a sequence of texts"),
        (shown, {"tokens": list("abcde")}, "tokens can't be given with a map"),
        (weights[None], {}, r"weights has shape \(1, 2, 3, 5, 5\)"),
        ([weights[0], weights[1, :, :4]], {}, "they must be equal"),
        ({}, {}, "must hold an AttentionMap by name"),
        (AttentionMap(weights, ("a",), tuple("abcde")), {}, "1 rows and 5 columns"),
        (np.full((2, 2), np.nan), {}, "not finite"),
        (np.array([["a"]]), {}, "dtype"),
        (np.array([[1j]]), {}, "dtype complex128; must be real numbers"),
        (weights, {"layers": [2]}, r"layers=\(2,\) must be numbers in \[0, 1\] of the map 'attention'"),
        (weights, {"heads": []}, r"heads=\[\] must be numbers from 0 on, at least one"),
        (weights, {"window": (3, 3)}, r"window=\(3, 3\)"),
        (weights, {"window": (5, 9)}, "begins behind the 5 tokens"),
        (weights, {"second": 5}, r"second=5 must be in \[1, 4\]"),
        (weights, {"height": 0}, "height=0 must be a number of pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_view(given, **options)
