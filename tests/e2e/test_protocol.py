"""Protocol files: shipped ones are sound, others are refused by name, and every word of them is in the hash."""

import json

import pytest

from voxfuse.e2e.protocol import SHIPPED, declare, load_protocol, seed_of
from voxfuse.e2e.statistics import share_upper
from voxfuse.e2e.texts import load_texts
from voxfuse.e2e.wer import count_edits


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_protocols_load_with_reasons(name):
    declared = load_protocol(name)
    assert declared.protocol.name == name
    assert {"fidelity", "wer", "rows", "throughput"} <= set(declared.protocol.comment)
    assert declared.protocol.wer.confidence == 0.95 and declared.protocol.wer.resamples == 10_000


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_protocol_can_pass_when_no_utterance_differs(name):
    """Otherwise it would be inconclusive for ever."""
    protocol = load_protocol(name).protocol
    texts = load_texts(protocol.sentences)
    words = sum(count_edits(text.text, None).words for text in texts) / len(texts)
    high = share_upper(0, len(texts), 1 - protocol.wer.confidence) * protocol.wer.edits_per_change / words
    assert 100 * high < protocol.wer.margin_pp


def test_full_judges_enough_to_claim():
    protocol = load_protocol("full").protocol
    assert protocol.sentences >= 200 and protocol.throughput.pairs >= protocol.throughput.claim_pairs >= 10
    assert protocol.wer.extension_repetitions > 0 and protocol.throughput.leave_one_out_pairs > 0


def test_override_of_sentences_is_in_name_and_hash():
    full, short = load_protocol("full"), load_protocol("full", sentences=6)
    assert short.protocol.sentences == 6 and short.protocol.name == "full[sentences=6]"
    assert short.sha256 != full.sha256
    assert load_protocol("full", sentences=full.protocol.sentences) == full


def test_hash_ignores_layout_and_sees_every_value(tmp_path):
    declared = load_protocol("smoke")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dict(reversed(declared.content.items())), indent=7))
    assert load_protocol(str(path)).sha256 == declared.sha256
    changed = {**declared.content, "comment": {**declared.content["comment"], "wer": "because"}}
    assert declare(changed).sha256 != declared.sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sentences": 0}, r"\$\.sentences"),
        ({"unknown": 1}, "unknown"),
        ({"seed": "x"}, r"\$\.seed"),
        ({"fidelity": None}, r"\$\.fidelity"),
    ],
)
def test_what_is_no_protocol_is_refused(tmp_path, change, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**load_protocol("smoke").content, **change}))
    with pytest.raises(ValueError, match=message):
        load_protocol(str(path))


def test_unknown_names_and_bad_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected one of smoke, full"):
        load_protocol("fast")
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_protocol(str(tmp_path / "torn.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="not a protocol"):
        load_protocol(str(tmp_path / "list.json"), sentences=3)
    (tmp_path / "huge.json").write_text(" " * (2 << 20))
    with pytest.raises(ValueError, match="at most"):
        load_protocol(str(tmp_path / "huge.json"))


def test_seeds_differ_by_utterance_and_repetition_and_never_change():
    protocol = load_protocol("smoke").protocol
    seeds = {seed_of(protocol, f"t{index}", repetition) for index in range(50) for repetition in range(3)}
    assert len(seeds) == 150 and all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(protocol, "t0", 0) == seed_of(protocol, "t0", 0)
