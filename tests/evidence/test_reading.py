"""What is read off the ledger: filters, why a fusion is on or off, stale verdicts, the page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from verdicts import FUSION, H200, gate, measured, verdict

from voxfuse.commands.ledger import page
from voxfuse.evidence import ledger, listing, render, stale, why
from voxfuse.fusions.registry import FUSIONS
from voxfuse.records import GateVerdict, MicroVerdict, from_json, to_json

ROOT = Path(__file__).parents[2]
SNAKE = FUSIONS["adain_snake"]
LOSS = verdict(eager_us=8.0, voxfuse_us=10.0, measured_at="2026-11-02T10:00:00Z")
[GATE] = [
    entry.verdict
    for entry in ledger.load([ledger.SHIPPED])
    if isinstance(entry.verdict, GateVerdict) and entry.verdict.fusions == ("adain_leaky_relu", "adain_snake")
]
GATE = msgspec.structs.replace(GATE, environment=H200)


def entries(*verdicts: ledger.Verdict) -> list[ledger.Entry]:
    return [ledger.Entry(ROOT / f"{index}.json", item) for index, item in enumerate(verdicts)]


@pytest.mark.parametrize(
    ("narrowed", "taken"),
    [
        ({}, (True, True, True)),
        ({"fusion": "adain_snake"}, (True, True, True)),
        ({"fusion": "adain_leaky_relu"}, (False, False, True)),
        ({"stack": "kokoro"}, (True, True, True)),
        ({"stack": "mimi"}, (False, False, False)),
        ({"gpu": "h200"}, (True, True, True)),
        ({"gpu": "9.0"}, (True, True, True)),
        ({"gpu": "9"}, (False, False, False)),
        ({"outcome": "loss"}, (False, True, False)),
        ({"outcome": "win"}, (True, False, False)),
        ({"outcome": "pass"}, (False, False, True)),
        ({"outcome": "loss", "fusion": "adain_leaky_relu"}, (False, False, False)),
    ],
)
def test_filters(narrowed: dict[str, str], taken: tuple[bool, ...]) -> None:
    takes = listing.Filter(**narrowed).takes
    assert tuple(takes(item) for item in (measured(), LOSS, GATE)) == taken


def test_why_on_gives_the_verdicts_that_it_rests_on() -> None:
    found = why.explain(SNAKE, "kokoro", "0.9.4", "9.0", entries(LOSS, measured(), GATE))
    assert not found.acceptance.accepted  # entries are ordered by the ledger; the rule looks at the dates
    assert "lost to eager" in found.acceptance.reason and found.to_settle == "voxfuse judge --stack kokoro"
    newer = msgspec.structs.replace(measured(), measured_at="2026-11-03T10:00:00Z")
    found = why.explain(SNAKE, "kokoro", "0.9.4", "9.0", entries(LOSS, newer, GATE))
    assert found.acceptance.accepted and found.to_settle == ""
    assert [(ground.judge, ground.outcome) for ground in found.grounds] == [("micro", "win"), ("gate", "pass")]
    assert "2.00× [" in found.grounds[0].detail and "guards passed" in found.grounds[1].detail


def test_why_on_a_gpu_without_records_shows_the_others_and_how_to_settle_it() -> None:
    found = why.explain(SNAKE, "kokoro", "0.9.4", "8.9", entries(measured(), GATE))
    assert found.acceptance.accepted and "no record for compute capability 8.9" in found.acceptance.reason
    assert len(found.grounds) == 2 and found.to_settle == "voxfuse judge --stack kokoro"
    assert why.explain(SNAKE, "kokoro", "0.9.4", "8.9", []).grounds == ()


def here(**changes: object) -> object:
    return msgspec.structs.replace(H200, **{"commit": "b" * 40, **changes})


THEN = verdict(environment=msgspec.structs.replace(H200, commit="a" * 7))


@pytest.mark.parametrize(
    ("now", "same", "found"),
    [
        ({"commit": "a" * 40}, None, ()),  # a record may hold the short form
        ({}, True, ()),
        ({}, False, ("commit aaaaaaa then, bbbbbbb now: its kernels, fusions or patches changed",)),
        ({}, None, ("commit aaaaaaa then, bbbbbbb now: git cannot tell what changed",)),
        ({"commit": "a" * 40 + "-dirty"}, False, ("commit aaaaaaa then, aaaaaaa-dirty now: its kernels",)),
        ({"commit": None}, None, ()),
        ({"commit": None, "voxfuse": "0.2.0"}, None, ("voxfuse 0.1.0 then, 0.2.0 now",)),
        ({"torch": "2.14.0"}, True, ("torch 2.13.0 then, 2.14.0 now",)),
        ({"triton": "3.8.0", "torch": "2.14.0"}, True, ("torch 2.13.0", "Triton 3.7.1 then, 3.8.0 now")),
    ],
)
def test_what_makes_a_verdict_stale(now: dict[str, str], same: bool | None, found: tuple[str, ...]) -> None:
    changes = stale.changes(THEN, here(**now), lambda then, there: same)  # type: ignore[arg-type]
    assert len(changes) == len(found)
    assert all(change.startswith(start) for change, start in zip(changes, found, strict=True))


def test_only_the_newest_verdict_of_a_case_on_this_gpu_can_be_stale() -> None:
    old = verdict(environment=msgspec.structs.replace(H200, torch="2.11.0"))
    new = verdict(measured_at="2026-11-05T10:00:00Z")
    ada = verdict(environment=msgspec.structs.replace(H200, torch="2.11.0", compute_capability="8.9"))
    now = H200
    assert stale.stale(entries(old, ada), now, "9.0")[0].changes == ("torch 2.11.0 then, 2.13.0 now",)
    assert stale.stale(entries(new, old, ada), now, "9.0") == []
    assert stale.stale(entries(old), now, None) == []


def test_git_tells_whether_the_judged_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        options = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *options, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        git("add", "-A")
        git("commit", "-qm", "x")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    monkeypatch.setattr(stale, "CHECKOUT", tmp_path)
    stale._git_same.cache_clear()
    first, docs = commit("voxfuse/kernels/a.py"), commit("README.md")
    assert stale.git_same_sources(first[:7], docs) is True
    kernel = commit("voxfuse/kernels/a.py")
    assert stale.git_same_sources(first, kernel) is False
    assert stale.git_same_sources(kernel, kernel + "-dirty") is True
    (tmp_path / "voxfuse/kernels/a.py").write_text("edited")
    stale._git_same.cache_clear()
    assert stale.git_same_sources(kernel, kernel + "-dirty") is False
    for unknown in ("f" * 40, "--output=x", "main", "", kernel + "-dirty"):
        assert stale.git_same_sources(unknown, kernel) is None
    assert not (tmp_path / "x").exists()


def test_the_page_has_wins_and_losses_and_what_was_not_judged() -> None:
    other = msgspec.structs.replace(SNAKE, name="unjudged")
    wrong = msgspec.structs.replace(THEN, wrong="error 2e-3", ratios=(), arms=(), case=LOSS.case)
    text = render.render(entries(measured(), LOSS, wrong, GATE), [SNAKE, other], ROOT)
    assert "1 wins, 0 neutral, 1 losses against eager" in text and "; 1 wrong." in text
    assert "| loss 0.80× [" in text and "| win 2.00× [" in text and "**wrong**: error 2e-3" in text
    assert "| adain_snake | kokoro 0.9.4 | same-precision | off |" in text  # the loss is newer than the win
    assert "No record of: unjudged" in text and "[large](0.json)" in text
    assert render.render([], [other], ROOT).endswith("No record of: unjudged. They are off unless asked for.\n")


def test_the_page_in_the_repository_is_current() -> None:
    """``voxfuse ledger render`` writes it anew after a record was added."""
    assert (ROOT / "EVIDENCE.md").read_text(encoding="utf-8") == page(ROOT)


def test_records_written_before_arithmetic_was_counted_still_read() -> None:
    data = to_json(measured()).replace(b'"flop": 0,\n', b"")
    assert b'"flop"' not in data and from_json(data, MicroVerdict) == measured()


def test_a_fusion_that_only_a_gate_judged_is_judged_and_cells_stay_cells() -> None:
    graph = msgspec.structs.replace(FUSION, name="graph", graph=True)
    verdict = gate("fail", fusions=("graph",), reasons=("a|b\nc",))
    text = render.render([ledger.Entry(Path("x.json"), verdict)], [graph, FUSION], Path.cwd())
    assert "No record of: adain_snake." in text and "**fail**: a/b c |" in text
