"""Kokoro's patches on its real classes: Decoder, Generator and KModel, by class and by instance."""

import copy
import gc
import importlib.util
import io
import pickle

import pytest
import torch

import voxfuse
from voxfuse.patches._kokoro_import import load_kokoro

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")

STYLE = 16
ISTFTNET = {
    "resblock_kernel_sizes": [3, 7],
    "upsample_rates": [4, 2],
    "upsample_initial_channel": 32,
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "upsample_kernel_sizes": [8, 4],
    "gen_istft_n_fft": 20,
    "gen_istft_hop_size": 5,
}
EAGER = {"adain_conv_block", "adain_leaky_relu", "stft_polar", "istft_polar", "sine_source"}  # what needs no graph
SPECTRAL = ["stft_polar", "istft_polar", "sine_source"]


@pytest.fixture
def istftnet():
    load_kokoro()
    import kokoro.istftnet

    return kokoro.istftnet


def generator(istftnet):
    return istftnet.Generator(STYLE, **ISTFTNET).eval()


def speak(generator, frames=12):
    """Generator output on fixed inputs with fixed noise; upstream draws the noise."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        x, s, f0 = torch.randn(1, 32, frames), torch.randn(1, STYLE), torch.rand(1, frames) * 200 + 80
        return generator(x, s, f0)


def snr_db(value, baseline):
    return (10 * torch.log10(baseline.square().sum() / (value - baseline).square().sum())).item()


def kmodel(tmp_path):
    """A KModel of small shapes and random weights, through upstream's own constructor."""
    load_kokoro()
    from kokoro.model import KModel

    torch.save({}, tmp_path / "no-weights.pth")
    config = {
        "vocab": {"a": 1, "b": 2}, "n_token": 8, "hidden_dim": 512, "style_dim": 128, "n_layer": 1, "max_dur": 4,
        "dropout": 0.2, "text_encoder_kernel_size": 5, "n_mels": 80,
        "plbert": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1,
                   "max_position_embeddings": 64, "embedding_size": 16},
        "istftnet": ISTFTNET | {"upsample_initial_channel": 512},
    }  # fmt: skip
    return KModel(repo_id="hexgrad/Kokoro-82M", config=config, model=str(tmp_path / "no-weights.pth")).eval()


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize(("block", "calls"), [("adain_conv_block", 13), ("adain_snake", 6)])
def test_a_bare_generator_by_class(istftnet, backend, block, calls):
    model = generator(istftnet)
    baseline = speak(model)
    with voxfuse.apply_patches("kokoro", include=[block], policy="all", backend=backend) as patches:
        assert snr_db(speak(model), baseline) > 90
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == block)
        blocks = len(model.noise_res) + len(model.resblocks)
        assert (receipt.status, receipt.calls, dict(receipt.fallbacks)) == ("applied", calls * blocks, {})
    assert torch.equal(speak(model), baseline), "revert did not restore upstream"


@pytest.mark.parametrize("fusion", SPECTRAL)
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_spectra_and_source_of_a_bare_generator(istftnet, backend, fusion):
    """The frames at both ends are symmetric, so that rounding decides between a phase of pi and -pi there, and the
    network makes another sound of either: between the ends the audio is the same."""
    model = generator(istftnet)
    baseline = speak(model, 40)
    with voxfuse.apply_patches("kokoro", include=[fusion], policy="all", backend=backend) as patches:
        audio = speak(model, 40)
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == fusion)
        assert (receipt.status, receipt.calls, dict(receipt.fallbacks)) == ("applied", 1, {})
    middle = slice(baseline.shape[-1] // 4, -baseline.shape[-1] // 4)
    assert snr_db(audio[..., middle], baseline[..., middle]) > 40
    assert torch.equal(speak(model, 40), baseline), "revert did not restore upstream"


def test_without_graphs_and_with_two_fusions_for_one_block_the_receipts_say_so(istftnet):
    with voxfuse.apply_patches("kokoro", policy="all", backend="reference") as patches:
        receipts = {(receipt.fusion, receipt.target): receipt for receipt in patches.receipts}
    reasons = {fusion: receipt.reason for (fusion, _), receipt in receipts.items() if receipt.status == "skipped"}
    assert reasons == {
        "decoder_graph": "runs with backend triton, not reference",
        "text_graph": "runs with backend triton, not reference",
        "adain_snake": "fusion adain_conv_block serves this target",
    }


def test_a_bare_decoder_uses_all_fusions(istftnet):
    decoder = istftnet.Decoder(512, 128, 80, **(ISTFTNET | {"upsample_initial_channel": 512})).eval()

    def decode():
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(5)
            asr, f0, n, s = torch.randn(1, 512, 6), torch.rand(1, 12) * 200, torch.randn(1, 12), torch.randn(1, 128)
            return decoder(asr, f0, n, s)

    baseline = decode()
    with voxfuse.apply_patches("kokoro", policy="all", backend="reference") as patches:
        assert snr_db(decode(), baseline) > 80
        assert {receipt.fusion for receipt in patches.receipts if receipt.calls} == EAGER


def test_one_kmodel_among_two(tmp_path):
    patched, other = kmodel(tmp_path), kmodel(tmp_path)
    style = torch.randn(1, 256)

    def speak(model):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return model("ab", style)

    before = speak(patched), speak(other)
    with voxfuse.apply_patches(patched, policy="all", backend="reference") as patches:
        assert snr_db(speak(patched), before[0]) > 80
        calls = {receipt.fusion: receipt.calls for receipt in patches.receipts if receipt.status == "applied"}
        assert set(calls) == EAGER and all(calls.values())
        assert torch.equal(speak(other), before[1])
        after = {receipt.fusion: receipt.calls for receipt in patches.receipts if receipt.status == "applied"}
        assert after == calls, "the other model was patched"
    assert torch.equal(speak(patched), before[0])


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_the_text_graph_is_left_alone_without_a_gpu(tmp_path, backend):
    for target in ("kokoro", kmodel(tmp_path)):
        with voxfuse.apply_patches(target, policy="all", backend=backend) as patches:
            (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "text_graph")
            assert (receipt.status, receipt.reason) == ("skipped", f"runs with backend triton, not {backend}")


def test_an_instance_keeps_its_behaviour_in_copies_pickles_and_state(istftnet):
    model = generator(istftnet)
    baseline, text, keys = speak(model), repr(model), list(model.state_dict())
    with voxfuse.apply_patches(model, policy="all", exclude=SPECTRAL, backend="reference") as patches:
        assert (repr(model), list(model.state_dict())) == (text, keys)
        calls = sum(receipt.calls for receipt in patches.receipts)
        assert snr_db(speak(copy.deepcopy(model)), baseline) > 90
        assert sum(receipt.calls for receipt in patches.receipts) > calls, "a copy lost its patches"
        assert snr_db(speak(pickle.loads(pickle.dumps(model))), baseline) > 90


def test_new_weights_another_dtype_and_back(istftnet):
    model = generator(istftnet)
    other = generator(istftnet)
    expected = speak(other)
    with voxfuse.apply_patches(model, include=["adain_snake"], policy="all", backend="interpreter") as patches:
        speak(model)
        file = io.BytesIO()
        torch.save(other.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))
        assert snr_db(speak(model), expected) > 90
        (snake,) = (receipt for receipt in patches.receipts if receipt.fusion == "adain_snake")
        assert not snake.fallbacks
        block = model.resblocks[0].double()
        channels = block.alpha1[0].shape[1]
        x, s = torch.randn(1, channels, 30, dtype=torch.float64), torch.randn(1, STYLE, dtype=torch.float64)
        with torch.no_grad():
            fused = block(x, s)
            patches.revert()
            torch.testing.assert_close(fused, block(x, s))
        (reason,) = next(r for r in patches.receipts if r.fusion == "adain_snake").fallbacks
        assert "float64" in reason


def test_an_exception_leaves_the_model_usable(istftnet):
    model = generator(istftnet)
    baseline = speak(model)
    with voxfuse.apply_patches(model, policy="all", exclude=SPECTRAL, backend="reference"):
        with pytest.raises((RuntimeError, ValueError)), torch.no_grad():
            model.resblocks[0](torch.randn(1, 3, 10), torch.randn(1, STYLE))
        assert snr_db(speak(model), baseline) > 90


def test_a_block_with_another_activation_runs_upstream_and_says_so(istftnet):
    block = istftnet.AdainResBlk1d(8, 8, STYLE, actv=torch.nn.SiLU()).eval()
    x, s = torch.randn(1, 8, 20), torch.randn(1, STYLE)
    with torch.no_grad():
        baseline = block(x, s)
        with voxfuse.apply_patches(block, policy="all", backend="reference") as patches:
            assert torch.equal(block(x, s), baseline)
    (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "adain_leaky_relu")
    assert (receipt.calls, dict(receipt.fallbacks)) == (0, {"the activation is SiLU, expected LeakyReLU": 1})


@pytest.mark.parametrize("fusion", ["adain_snake", "adain_conv_block"])
def test_training_with_gradients_still_trains(istftnet, fusion):
    block = istftnet.AdaINResBlock1(8, 3, (1, 3, 5), STYLE)
    x, s = torch.randn(2, 8, 20), torch.randn(2, STYLE)
    block(x, s).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    with voxfuse.apply_patches(block, include=[fusion], policy="all", backend="interpreter") as patches:
        block(x, s).square().mean().backward()
    for parameter, gradient in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    (reason,) = next(receipt for receipt in patches.receipts if receipt.fusion == fusion).fallbacks
    assert "gradient" in reason


@pytest.mark.parametrize(("fusion", "calls"), [("adain_snake", 6), ("adain_conv_block", 13)])
def test_a_patched_block_compiles_into_one_graph(istftnet, fusion, calls):
    block = istftnet.AdaINResBlock1(8, 3, (1, 3, 5), STYLE).eval()
    x, s = torch.randn(1, 8, 20), torch.randn(1, STYLE)
    with torch.no_grad():
        baseline = block(x, s)
        with voxfuse.apply_patches("kokoro", include=[fusion], policy="all", backend="interpreter") as patches:
            compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
            assert snr_db(compiled(x, s), baseline) > 90
            assert next(receipt for receipt in patches.receipts if receipt.fusion == fusion).calls == calls
            del compiled
            torch._dynamo.reset()
            gc.collect()  # a live compiled copy would make the revert warn


def test_a_source_with_other_sines_runs_upstreams_code(istftnet):
    class Silence(torch.nn.Module):
        def forward(self, f0):
            return f0.new_zeros(*f0.shape[:2], 9), torch.zeros_like(f0), torch.zeros_like(f0)

    model = generator(istftnet)
    model.m_source.l_sin_gen = Silence()
    expected = speak(model)
    with voxfuse.apply_patches(model, include=["sine_source"], backend="reference") as patches:
        assert torch.equal(speak(model), expected)
    (receipt,) = [receipt for receipt in patches.receipts if receipt.fusion == "sine_source"]
    assert dict(receipt.fallbacks) == {"the sines come from Silence, expected upstream's SineGen": 1}
