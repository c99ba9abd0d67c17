"""The text side on the real KModel: its stages padded and mixed, and whole calls replayed, against upstream."""

import importlib.util

import pytest
import torch
from fake_arena import FakeArena
from kmodels import random_kmodel

from voxfuse.fusions import kokoro_text
from voxfuse.fusions.graph_runner import WEIGHTS_REPLACED, capturing, runners
from voxfuse.fusions.kokoro_text import TextRunners, foreign_part, frame_stage, token_stage, unsupported
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import kokoro as patches

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")

CLOSE = 5e-5  # relative RMS: fp32 roundings, which AdaIN of two frames amplifies; a tail that leaks is above 1e-3
REFERENCE = Run("reference", "text test")
STYLE = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_kmodel(tmp_path_factory.mktemp("model"))


def tokens(count, rows=1):
    return torch.randint(1, 8, (rows, count))


def upstream_tokens(model, ids, style):
    """The first half of KModel.forward_with_tokens, by its modules: d, t_en and the durations along the channels."""
    lengths = torch.full((ids.shape[0],), ids.shape[1])
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    d_en = model.bert_encoder(model.bert(ids, attention_mask=(~mask).int())).transpose(-1, -2)
    d = model.predictor.text_encoder(d_en, style, lengths, mask)
    durations = torch.sigmoid(model.predictor.duration_proj(model.predictor.lstm(d)[0])).sum(axis=-1)
    t_en = model.text_encoder(ids, lengths, mask)
    return d.transpose(-1, -2), t_en, durations.unsqueeze(1)


def padded(x, units, fill):
    return torch.cat([x, torch.full((*x.shape[:-1], units - x.shape[-1]), fill)], dim=-1)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_parts_close(value, expected):
    """Each of d, t_en and the durations by itself."""
    for part, other in zip(value.split([other.shape[1] for other in expected], dim=1), expected, strict=True):
        assert relative_rms(part, other) < CLOSE


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_token_stage_padded_equals_upstream_at_every_length(tmp_path, attention):
    model = random_kmodel(tmp_path, attn_implementation=attention)
    assert model.bert.config._attn_implementation == attention and foreign_part(model) is None
    for count in (1, 2, 3, 7, 8, 9, 17, 40, 56):
        ids, style = tokens(count), torch.randn(1, STYLE)
        expected = upstream_tokens(model, ids, style)
        assert_parts_close(token_stage(model, ids.float(), style, None, REFERENCE), expected)
        clean, dirty = (
            token_stage(model, padded(ids.float(), 64, fill), style, torch.tensor([count]), REFERENCE)
            for fill in (0.0, float("nan"))
        )
        assert torch.equal(clean, dirty), "what lies behind the end changed the result"
        assert torch.all(clean[:, :, count:] == 0)
        assert_parts_close(clean[:, :, :count], expected)


@torch.no_grad()
def test_rows_of_mixed_lengths_equal_each_row_alone(model):
    lengths, ids, style = (9, 2, 24, 1), tokens(24, 4), torch.randn(4, STYLE)
    together = token_stage(model, ids.float(), style, torch.tensor(lengths), REFERENCE)
    en = torch.randn(4, 640, 24)
    frames = (9, 2, 24, 3)
    curves = frame_stage(model.predictor, en, style, torch.tensor(frames), REFERENCE)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        assert_parts_close(together[one, :, :length], upstream_tokens(model, ids[one, :length], style[one]))
        assert torch.all(together[row, :, length:] == 0)
        for curve, alone in zip(
            curves[one, :, : 2 * frames[row]].unbind(1),
            model.predictor.F0Ntrain(en[one, :, : frames[row]], style[one]),
            strict=True,
        ):
            assert relative_rms(curve, alone) < CLOSE
        assert torch.all(curves[row, :, 2 * frames[row] :] == 0)


@torch.no_grad()
def test_the_frame_stage_padded_equals_upstream_at_every_length(model):
    for frames in (2, 3, 5, 8, 13, 31, 64):
        en, style = torch.randn(1, 640, frames), torch.randn(1, STYLE)
        expected = torch.stack(model.predictor.F0Ntrain(en, style), dim=1)
        assert relative_rms(frame_stage(model.predictor, en, style, None, REFERENCE), expected) < CLOSE
        clean, dirty = (
            frame_stage(model.predictor, padded(en, 72, fill), style, torch.tensor([frames]), REFERENCE)
            for fill in (0.0, float("nan"))
        )
        assert torch.equal(clean, dirty), "what lies behind the end changed the result"
        assert torch.all(clean[:, :, 2 * frames :] == 0)
        for curve in (0, 1):
            assert relative_rms(clean[:, curve, : 2 * frames], expected[:, curve]) < CLOSE


@torch.no_grad()
def test_the_frame_stage_through_the_kernels(model, request):
    predictor = type(model.predictor)(style_dim=8, d_hid=16, nlayers=1).eval()
    run, en, style = Run("interpreter", request.node.nodeid), torch.randn(1, 24, 5), torch.randn(1, 8)
    expected = torch.stack(predictor.F0Ntrain(en, style), dim=1)
    result = frame_stage(predictor, padded(en, 8, float("nan")), style, torch.tensor([5]), run)
    assert relative_rms(result[:, :, :10], expected) < CLOSE and torch.all(result[:, :, 10:] == 0)
    tally = TALLIES.of(run.receipt)
    assert (tally.calls, dict(tally.fallbacks)) == (2 * (3 * 5 + 1), {})


@pytest.fixture
def anywhere(monkeypatch, request):
    """Runners that take a fake arena on the CPU, on a receipt of the test's own."""
    FakeArena.made = []
    monkeypatch.setattr(kokoro_text, "unsupported", lambda *_: None)
    run = Run("reference", request.node.nodeid)
    return lambda **options: TextRunners(run, arena=FakeArena, **options)


def seeded(speak, *arguments):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return speak(*arguments)


def snr_db(value, baseline):
    noise = (value - baseline).square().sum()
    return (10 * torch.log10(baseline.square().sum() / noise)).item() if noise > 0 else float("inf")


def assert_spoken_as(spoken, expected):
    (audio, durations), (other, expected_durations) = spoken, expected
    assert torch.equal(durations, expected_durations) and durations.dtype == expected_durations.dtype
    assert audio.shape == other.shape and snr_db(audio, other) > 60


def utterance(count):
    return tokens(count), torch.randn(1, 2 * STYLE)


def test_replays_speak_as_upstream_at_any_speed(model, anywhere):
    graphs, seen = anywhere(capture="first_use"), []
    for count, speed in ((12, 1), (3, 0.7), (30, 1.6), (1, 0.2), (2, 0.5), (12, 0.4)):
        ids, ref_s = utterance(count)
        expected = seeded(model.forward_with_tokens, ids, ref_s, speed)
        assert_spoken_as(seeded(graphs.speak, model, ids, ref_s, speed), expected)
        seen += expected[1].flatten().tolist()
    assert len(set(seen)) > 3, "durations that are all alike prove little"
    owners = {runner.owner: runner.statistics for runner in runners(model)}
    assert set(owners) == {model, model.predictor}
    assert (owners[model].replays, owners[model].captures) == (6, 3)
    assert owners[model.predictor].replays == 6


def test_what_is_not_captured_runs_upstreams_code_and_is_counted(model, anywhere, request):
    graphs, (ids, ref_s) = anywhere(), utterance(5)
    state = torch.get_rng_state()
    reason = graphs.speak(model, ids, ref_s)
    assert "no graph of 1 rows × 8" in reason and torch.equal(torch.get_rng_state(), state)
    token_runner = next(runner for runner in runners(model) if runner.owner is model)
    token_runner.warm([(1, 5)], "cpu", torch.float32)
    expected = seeded(model.forward_with_tokens, ids, ref_s)
    assert_spoken_as(seeded(graphs.speak, model, ids, ref_s), expected)
    tally = TALLIES.of(request.node.nodeid)
    frames = kokoro_text.FRAME_BUCKETS.of(int(expected[1].sum()))
    assert [text.partition(":")[0] for text in tally.fallbacks] == [
        "no graph of 1 rows × 8",
        f"no graph of 1 rows × {frames}",
    ] or frames == 8
    assert tally.calls == 1, "the token stage counts once a replay"
    with capturing():
        assert_spoken_as(seeded(graphs.speak, model, ids, ref_s), expected)
    assert tally.calls == 2 + 2 * (3 * 5 + 1)
    assert "outside 1 to 64" in graphs.speak(model, *utterance(65))


def test_two_models_and_new_weights(tmp_path, anywhere, request):
    graphs, one, other = anywhere(capture="first_use"), random_kmodel(tmp_path), random_kmodel(tmp_path, seed=1)
    ids, ref_s = utterance(9)
    for model in (one, other, one):
        assert_spoken_as(seeded(graphs.speak, model, ids, ref_s), seeded(model.forward_with_tokens, ids, ref_s))
    one.load_state_dict(other.state_dict())
    assert_spoken_as(seeded(graphs.speak, one, ids, ref_s), seeded(other.forward_with_tokens, ids, ref_s))
    assert TALLIES.of(request.node.nodeid).fallbacks[WEIGHTS_REPLACED] >= 1


@torch.no_grad()
def test_weights_that_upstream_moves_on_every_call_stay_captured(model, anywhere, request):
    """flatten_parameters, which upstream calls in TextEncoder and DurationEncoder, on a GPU."""
    graphs, (ids, ref_s) = anywhere(capture="first_use"), utterance(9)
    expected = seeded(graphs.speak, model, ids, ref_s)
    for lstm in (model.text_encoder.lstm, *model.predictor.text_encoder.lstms[::2]):
        for weight in lstm.parameters():
            weight.set_(weight.clone())
    again = seeded(graphs.speak, model, ids, ref_s)
    assert torch.equal(again[0], expected[0])
    assert WEIGHTS_REPLACED not in TALLIES.of(request.node.nodeid).fallbacks


def test_the_patch_calls_the_original_where_it_must(model, monkeypatch):
    (patch,) = (patch for patch in patches.KOKORO.patches if patch.fusion.name == "text_graph")
    ids, ref_s = utterance(4)
    refused = patch.build(type(model).forward_with_tokens, Run("reference", "refused text"))
    assert_spoken_as(seeded(refused, model, ids, ref_s, 1.2), seeded(model.forward_with_tokens, ids, ref_s, 1.2))
    assert dict(TALLIES.of("refused text").fallbacks) == {"graphs need a CUDA GPU and backend 'triton'": 1}

    def never(*_):
        raise AssertionError("upstream's code ran")

    FakeArena.made = []
    monkeypatch.setattr(kokoro_text, "unsupported", lambda *_: None)
    monkeypatch.setattr(
        kokoro_text, "TextRunners", lambda run, _: TextRunners(run, capture="first_use", arena=FakeArena)
    )
    replayed = patch.build(never, Run("reference", "replayed text"))
    assert_spoken_as(seeded(replayed, model, ids, ref_s, 1.2), seeded(model.forward_with_tokens, ids, ref_s, 1.2))


def test_calls_that_are_refused(model):
    ids, ref_s = utterance(4)
    assert "need a CUDA GPU" in unsupported(model, Run("triton", "x"), ids, ref_s)
    assert "need a CUDA GPU" in unsupported(model, Run("interpreter", "x"), ids, ref_s)


@torch.no_grad()
def test_parts_that_are_not_upstreams_are_refused_by_name(tmp_path):
    model = random_kmodel(tmp_path)
    assert foreign_part(model) is None
    model.decoder.register_forward_hook(lambda *_: None)
    assert foreign_part(model) is None, "the decoder is called as ever"
    hook = model.bert.encoder.register_forward_hook(lambda *_: None)
    assert foreign_part(model) == "bert.encoder has a forward hook, which a graph would not run"
    hook.remove()
    model.text_encoder.forward = model.text_encoder.forward
    assert foreign_part(model) == "text_encoder.forward was replaced on the instance"
    del model.text_encoder.forward
    plain = type(model.predictor.N[0])
    model.predictor.N[0].__class__ = type("Louder", (plain,), {"__module__": "elsewhere"})
    assert foreign_part(model) == "predictor.N.0 is elsewhere.Louder, whose code a graph would not run"
    model.predictor.N[0].__class__ = plain
    model.predictor.N[1].actv = torch.nn.SiLU()
    assert foreign_part(model) == "predictor.N.1: the activation is SiLU, expected LeakyReLU"
    model.predictor.N[1].actv = torch.nn.LeakyReLU(0.2)
    model.predictor.shared = torch.nn.GRU(640, 256, batch_first=True, bidirectional=True)
    assert foreign_part(model) == "predictor.shared is torch.nn.modules.rnn.GRU, expected torch.nn.modules.rnn.LSTM"


@torch.no_grad()
def test_a_part_that_becomes_foreign_after_the_capture_runs_upstreams_code(tmp_path, anywhere, request):
    model, (ids, ref_s) = random_kmodel(tmp_path), utterance(9)
    graphs, plain = anywhere(capture="first_use"), model.predictor.lstm
    expected = seeded(model.forward_with_tokens, ids, ref_s)
    assert_spoken_as(seeded(graphs.speak, model, ids, ref_s), expected)
    sizes = plain.input_size, plain.hidden_size
    model.predictor.lstm = torch.nn.LSTM(*sizes, num_layers=2, batch_first=True, bidirectional=True)
    reason = graphs.speak(model, ids, ref_s)
    assert isinstance(reason, str) and "predictor.lstm: expected one bidirectional layer" in reason
    assert TALLIES.of(request.node.nodeid).fallbacks[reason] == 1
    model.predictor.lstm = plain
    assert_spoken_as(seeded(graphs.speak, model, ids, ref_s), expected)
