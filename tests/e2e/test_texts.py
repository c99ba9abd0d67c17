"""The committed English text set."""

import importlib.util
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

from voxfuse.e2e.texts import load_texts

# The American English part of Kokoro's alphabet (misaki's documentation, EN_PHONES.md), less the optional ɾ and ʔ.
AMERICAN = "AIOWYbdfhijklmnpstuvwzæðŋɑɔəɛɜɡɪɹʃʊʌʒʤʧˈˌθᵊᵻT"
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_texts.py"


@pytest.fixture(scope="module")
def texts():
    return load_texts()


def test_enough_texts_numbered_in_order(texts):
    assert len(texts) >= 220
    assert [text.id for text in texts] == [f"en-{number:03d}" for number in range(1, len(texts) + 1)]
    assert len({text.text for text in texts}) == len(texts)


def test_every_kind_is_there_and_is_what_it_says(texts):
    kinds = Counter(tag for text in texts for tag in text.tags)
    assert set(kinds) == {"short", "medium", "long", "numbers", "names"}
    assert min(kinds.values()) >= 20
    for text in texts:
        words = len(text.text.split())
        (size,) = set(text.tags) & {"short", "medium", "long"}
        assert {"short": words <= 2, "medium": 3 <= words < 30, "long": words >= 30}[size], text


def test_every_phoneme_of_american_english_is_spoken_at_least_ten_times(texts):
    counts = Counter(symbol for text in texts for symbol in text.phonemes)
    assert {symbol for symbol in AMERICAN if counts[symbol] < 10} == set()


def test_phonemes_fit_the_model(texts):
    assert all(0 < len(text.phonemes) <= 510 for text in texts)


@pytest.mark.weights
def test_phonemes_are_in_the_alphabet_of_the_weights(texts):
    from voxfuse.e2e.weights import kokoro

    vocabulary = kokoro.find("jm_kumo").config["vocab"]
    assert {symbol for text in texts for symbol in text.phonemes} - vocabulary.keys() == set()


@pytest.mark.parametrize("count", [10, 20, 40, 100])
def test_a_prefix_is_a_mix(texts, count):
    """Each kind has its share of the first N, to within one text."""
    prefix = load_texts(count)
    assert prefix == texts[:count]
    for kind in ("short", "long", "numbers", "names"):
        share = sum(kind in text.tags for text in texts) * count / len(texts)
        assert abs(sum(kind in text.tags for text in prefix) - share) <= 1.5, kind


@pytest.mark.parametrize("limit", [0, -1, 10_000])
def test_impossible_limits_are_refused(limit):
    with pytest.raises(ValueError, match=f"asked for {limit}"):
        load_texts(limit)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hibari") is None, reason="needs the G2P of hibari-tts")
def test_committed_phonemes_are_what_the_script_makes(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check"])
    with pytest.raises(SystemExit) as status:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert status.value.code == 0
