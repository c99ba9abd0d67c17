"""Edit counts against hand-counted ones."""

import pytest

from voxfuse.e2e.wer import Edits, corpus_wer, count_edits, macro_wer, normalizer_sha256


@pytest.mark.parametrize(
    ("reference", "hypothesis", "edits", "words"),
    [
        ("The cat sat on the mat.", "the cat sat on the mat", 0, 6),
        ("The cat sat on the mat.", "The hat sat on mat, now.", 3, 6),  # one substituted, one deleted, one inserted
        ("Twenty-three cats", "23 cats", 0, 2),
        ("It's the colour of honey.", "It is the color of honey", 0, 6),
        ("Mr. Smith won't come", "mister smith will not come", 0, 5),
        ("One two three", None, 1, 1),  # the normaliser makes "123" of it: one word, lost
        ("The cat sat", "", 3, 3),
        ("Hmm.", "", 0, 0),  # the normaliser drops fillers
        ("Hmm.", "The cat", 2, 0),
    ],
)
def test_edits(reference, hypothesis, edits, words):
    assert count_edits(reference, hypothesis) == Edits(edits, words)


def test_corpus_counts_each_edit_once_and_macro_each_utterance():
    counts = [Edits(1, 10), Edits(6, 2), Edits(0, 8)]
    assert corpus_wer(counts) == pytest.approx(7 / 20)
    assert macro_wer(counts) == pytest.approx((0.1 + 1.0 + 0.0) / 3)  # capped at 1


def test_no_words_is_an_error():
    with pytest.raises(ValueError, match="at least one reference word"):
        corpus_wer([Edits(2, 0)])
    with pytest.raises(ValueError, match="at least one reference word"):
        macro_wer([])


def test_normaliser_hash_covers_its_sources(monkeypatch):
    first = normalizer_sha256()
    assert len(first) == 64 and first == normalizer_sha256()
    monkeypatch.setattr("voxfuse.e2e.wer.NORMALIZER_FILES", ("english.py",))
    assert normalizer_sha256() != first
