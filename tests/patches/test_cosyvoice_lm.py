"""The patches of CosyVoice2's language model on its real classes: upstream's tokens, from captured steps or without."""

import copy
import threading
from types import SimpleNamespace

import cosyvoice_lm
import pytest
import torch
from cosyvoice_lm import greedy, language_model, speak, speak_bistream
from cosyvoice_sampling import ras_sampling
from fake_arena import FakeArena
from generating import record_graphs

import voxfuse
from voxfuse.kernels._op import Run
from voxfuse.patches import _cosyvoice_lm, _decoding

NO_LANE = "no lane of 1 rows × {}: warm up inside voxfuse.capturing()"
STEPS = 300 - 1  # of ``speak``: five tokens of text, sixty of speech for each; the first comes with the prefill
OPS = 11  # fused operations of a step of two layers


@pytest.fixture(autouse=True)
def whole_masks(monkeypatch):
    cosyvoice_lm.upstream()
    cosyvoice_lm.whole_masks(monkeypatch)


@pytest.fixture
def graphs(monkeypatch):
    return record_graphs(monkeypatch)


def patched(target="cosyvoice2"):
    return voxfuse.apply_patches(target, include=["decode_graph", "ras_sampling"], policy="all", backend="reference")


def receipt(patches, fusion="decode_graph", stack="cosyvoice2"):
    (found,) = (each for each in patches.receipts if (each.fusion, each.stack) == (fusion, stack))
    return found


@pytest.mark.parametrize("sampling", [None, {"top_p": 0.95, "win_size": 4, "tau_r": 0.5}, greedy])
def test_three_hundred_tokens_are_upstreams(sampling):
    model = language_model(sampling=sampling)
    expected = list(speak(model))
    assert len(expected) > 250 and len(set(expected)) > 10, "too few tokens tell little"
    with patched() as patches:
        assert list(speak(model)) == expected
        found = receipt(patches)
        uncaptured = {NO_LANE.format(256): 244, NO_LANE.format(512): STEPS - 244}  # behind 12 tokens of prefill
        assert (found.status, found.fallbacks, found.calls) == ("applied", uncaptured, STEPS * OPS)
        other = receipt(patches, "ras_sampling")
        assert other.calls == 0 and sum(other.fallbacks.values()) >= 300
    assert list(speak(model)) == expected


def test_replays_grow_and_serve_one_generation_after_the_other(graphs):
    model = language_model()
    expected = list(speak(model))
    other = list(speak(model, text=(8, 8, 2), seed=9))
    with patched() as patches:
        with voxfuse.capturing():
            assert list(speak(model)) == expected
        assert list(speak(model, text=(8, 8, 2), seed=9)) == other
        (steps,) = (each for each in graphs if len(each._runners))
        statistics = steps.runner(model.llm.model.model).statistics
        assert (statistics.captures, statistics.replays, statistics.misses) == (2, STEPS + 179, {})
        assert not receipt(patches).fallbacks


def test_by_instance_beside_fused_layers_and_an_untouched_model(graphs):
    model, other = language_model(), language_model()
    expected = list(speak(model))
    with voxfuse.apply_patches(model, policy="all", backend="reference") as patches:
        applied = {each.fusion for each in patches.receipts if each.status == "applied"}
        assert applied == {"decode_graph", "ras_sampling", "rms_norm", "swiglu", "gqa_attention"}
        with voxfuse.capturing():
            assert list(speak(model)) == expected
        assert not receipt(patches).fallbacks and receipt(patches).calls == STEPS * OPS
        assert list(speak(other)) == expected
        assert receipt(patches).calls == STEPS * OPS, "the other model was patched"
        assert list(speak(copy.deepcopy(model))) == expected


def test_interleaved_and_interrupted_generations(graphs):
    model = language_model()
    model.sampling = greedy  # no random stream to share
    expected = [list(speak(model)), list(speak(model, text=(8, 8, 2)))]
    with patched() as patches, voxfuse.capturing():
        first, second = speak(model), speak(model, text=(8, 8, 2))
        begun = [[next(first)], [next(second)]]
        for _ in range(20):
            begun[0].append(next(first))
            begun[1].append(next(second))
        first.close()
        assert begun[0] == expected[0][:21]
        assert begun[1] + list(second) == expected[1]
        assert list(speak(model)) == expected[0]
        assert not receipt(patches).fallbacks
        assert FakeArena.made and len(FakeArena.made) == 2 + 1  # two lanes of 256, one of 512


def test_a_thread_that_the_stack_starts_is_warmed_up_too(graphs):
    model = language_model()
    expected, spoken = list(speak(model)), []
    with patched() as patches:
        with voxfuse.capturing():
            thread = threading.Thread(target=lambda: spoken.extend(speak(model)))
            thread.start()
            thread.join()
        assert spoken == expected and not receipt(patches).fallbacks


def test_bistream_with_text_in_pieces(graphs):
    model = language_model()
    pieces = [(3, 9, 4), (1, 5, 6, 7, 8), (9, 10, 11, 12, 13, 14, 15)]

    def spoken():
        model.sampling_ids = None  # set below: a fill token after every fourth, and an end
        drawn = []

        def sampling_ids(scores, decoded, sampling, ignore_eos=True):
            drawn.append(int(scores[:40].argmax()))
            token = 42 if len(drawn) % 5 == 0 and len(drawn) < 20 else 40 if len(drawn) == 60 else drawn[-1]
            return torch.tensor([token])

        model.sampling_ids = sampling_ids
        return list(speak_bistream(model, pieces))

    expected = spoken()
    assert len(expected) > 40 and len(set(expected)) > 10
    with patched() as patches:
        with voxfuse.capturing():
            assert spoken() == expected
        assert receipt(patches).calls > 30 * OPS and not receipt(patches).fallbacks
        assert len(FakeArena.made) == 1, "the lane was not taken again behind new text"


def test_what_runs_upstream_is_counted():
    model = language_model(sampling=greedy)
    expected = list(speak(model, ratios=(4, 4)))

    def reasons(change):
        changed = copy.deepcopy(model)
        changed.sampling = greedy
        change(changed)
        with patched() as patches:
            list(speak(changed, ratios=(4, 4)))
            assert not receipt(patches).calls
            (reason,) = receipt(patches).fallbacks
            assert receipt(patches).fallbacks[reason] == len(expected) - 1
        return reason

    def adapter(changed):
        attention = changed.llm.model.model.layers[1].self_attn
        attention.q_proj = torch.nn.Sequential(attention.q_proj)

    def hooked(part):
        return lambda changed: part(changed.llm.model).register_forward_hook(lambda *_: None)

    assert "float64" in reasons(lambda changed: changed.double())
    assert "adapters" in reasons(adapter)
    assert "self_attn has a hook" in reasons(hooked(lambda model: model.model.layers[0].self_attn))
    assert "Qwen2ForCausalLM has a forward hook" in reasons(hooked(lambda model: model))
    assert "training mode" in reasons(lambda changed: changed.llm.train())


def test_a_short_mask_that_this_transformers_pads_runs_upstream(monkeypatch):
    """QwenAudio/CosyVoice#1446: upstream is not made to speak otherwise than it does."""
    monkeypatch.undo()
    if not _decoding.pads_short_masks():
        pytest.skip("transformers before 4.53 takes a short mask of ones for whole")
    model = language_model(sampling=greedy)
    expected = list(speak(model, ratios=(4, 4)))
    with patched() as patches:
        assert list(speak(model, ratios=(4, 4))) == expected
        (reason,) = receipt(patches).fallbacks
        assert reason == _decoding.SHORT_MASK and not receipt(patches).calls


def test_sampling_as_the_repositorys_main_branch_defines_it(request):
    """There the end is ruled out by its score, a repeated token by its own, and tokens are integers."""
    import cosyvoice.utils.common

    run = Run("reference", request.node.nodeid)
    build = next(p.build for p in _cosyvoice_lm.PATCHES_OF_CHECKOUT if p.target == _cosyvoice_lm.SAMPLING_IDS)
    sampling_ids = build(None, run)
    model = SimpleNamespace(sampling=cosyvoice.utils.common.ras_sampling, speech_token_size=2)
    tokens, ends = [], []
    for pick in (
        lambda scores, decoded, ignore: sampling_ids(model, scores, decoded, 25, ignore_eos=ignore),
        lambda scores, decoded, ignore: ras_sampling(
            scores.index_fill(0, torch.tensor(2), -torch.inf) if ignore else scores, decoded
        ),
    ):
        torch.manual_seed(8)
        table, decoded = 2.0 * torch.randn(30, 30), []
        table[:, 2] += 2.0
        for index in range(200):
            scores = table[decoded[-1] if decoded else 0].log_softmax(dim=0)
            decoded.append(pick(scores, decoded, index < 100))
        tokens.append(decoded)
        ends.append(torch.rand(3))
    assert tokens[0] == tokens[1] and torch.equal(*ends)
    assert 2 not in tokens[0][:100] and 2 in tokens[0][100:] and len(set(tokens[0])) > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("sampling", [None, greedy])
def test_tokens_and_random_stream_on_a_gpu(sampling):
    model = language_model(sampling=sampling, device="cuda")
    expected = list(speak(model))
    following = torch.rand(3, device="cuda")
    with voxfuse.apply_patches(model, include=["decode_graph", "ras_sampling"]) as patches:
        with voxfuse.capturing():
            assert list(speak(model)) == expected
        assert list(speak(model)) == expected
        assert torch.equal(torch.rand(3, device="cuda"), following), "the generator is not where upstream leaves it"
        found, other = receipt(patches), receipt(patches, "ras_sampling")
        assert (found.calls, found.fallbacks) == (2 * STEPS * OPS, {})
        assert (other.calls, len(other.fallbacks)) == ((2 * 300, 0) if sampling is None else (0, 1))
    assert list(speak(model)) == expected
