"""Cases and arms of what stands around a decode step: samplers as upstream draws, a cache longer than what it holds."""

import pytest
import torch
from cosyvoice_sampling import nucleus_size, ras_sampling
from torch.nn.functional import scaled_dot_product_attention as sdpa

from voxfuse.kernels._op import Run
from voxfuse.microbench import bench, decode_arms, step_arms
from voxfuse.microbench.arms import contest, operation_of
from voxfuse.microbench.cases import load_cases
from voxfuse.microbench.step_arms import UpstreamRas
from voxfuse.microbench.timer import HostClock

CPU = torch.device("cpu")
REFERENCE = Run("reference", "test")


def made_of(judged):
    return contest(judged.fusion, judged.case, CPU, HostClock(), REFERENCE, {"launch_floor_us": 1.0}, "eager")


def noise_of(*shape):
    return torch.empty(shape).exponential_()


@pytest.mark.parametrize("repeated", [False, True])
def test_the_eager_arm_of_ras_sampling_is_upstreams(repeated):
    drawn = set()
    for seed in range(20):
        scores = torch.randn(50, generator=torch.Generator().manual_seed(seed)).mul(3).log_softmax(dim=0)
        decoded = scores.topk(10).indices.tolist() if repeated else [48] * 10
        torch.manual_seed(seed)
        expected = ras_sampling(scores, decoded)
        torch.manual_seed(seed)
        size = nucleus_size(scores.softmax(dim=0).sort(descending=True).values, 0.8, 25)
        nucleus = torch.cat([noise_of(1, size), torch.ones(1, 25 - size)], dim=1)
        inputs = scores[None], torch.tensor([decoded]), nucleus, noise_of(1, 50), 0.8, 1.0, True
        ((token, again),) = UpstreamRas().reference(*inputs).tolist()
        assert token == expected
        drawn.add(again)
        assert torch.equal(UpstreamRas()(*inputs, run=REFERENCE), torch.tensor([[token, again]]))
    assert repeated == (1 in drawn)


@pytest.mark.parametrize("stack", ["cosyvoice2", "cosyvoice3"])
def test_ras_sampling_is_judged_by_the_wall_beside_a_compiled_chain_without_waits(stack):
    (judged,) = (judged for judged in load_cases(stack) if judged.fusion == "ras_sampling")
    assert operation_of("ras_sampling", judged.case).timed == judged.case.parameters["timed"] == "wall"
    (found,) = bench.run([judged], bench.bench_for(CPU, 30, lambda: 1e9), {}, lambda verdict: None)
    assert found.verdict is not None and found.verdict.wrong is None
    arms = {arm.name: arm for arm in found.verdict.arms}
    assert arms["eager"].gpu_us and arms["voxfuse"].gpu_us and arms["compile"].gpu_us
    assert arms["compile"].error_fp64 == 0.0


def test_another_token_is_wrong():
    (judged,) = (judged for judged in load_cases("cosyvoice2") if judged.fusion == "ras_sampling")
    made = made_of(judged)
    token = made.eager(*made.sets[0])
    assert not torch.equal(made.seen(token + torch.tensor([[1, 0]])), made.seen(token))
    assert torch.equal(made.seen(token), made.seen(made.voxfuse(*made.sets[0])))


def test_a_static_caches_rest_is_there_and_is_not_read():
    name = "Qwen2-0.5B 14/2 heads, 1 rows, 200 of 256 keys"
    (judged,) = (judged for judged in load_cases("transformers") if judged.case.name == name)
    made = made_of(judged)
    _, k, v, lengths, mask, _ = made.sets[0]
    assert k.shape[2] == int(lengths) == 200 and mask.shape[3] == 256
    before, peer = made.voxfuse(*made.sets[0]), made.baselines["torch"](*made.sets[0])
    for part in (k, v):
        rest = part.as_strided((1, 2, 56, 64), part.stride(), part.storage_offset() + 200 * 64)
        assert rest.abs().sum() > 0
        rest.fill_(1e3)
    assert torch.equal(made.voxfuse(*made.sets[0]), before)
    torch.testing.assert_close(made.baselines["torch"](*made.sets[0]), peer)
    torch.testing.assert_close(peer, before, rtol=2e-2, atol=2e-2)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None):
    """flash-attn's, of [rows, tokens, heads, head_dim]."""
    held = k_cache.shape[1] if cache_seqlens is None else int(cache_seqlens[0])
    k, v = (part[:, :held].transpose(1, 2) for part in (k_cache, v_cache))
    return sdpa(q.transpose(1, 2), k, v, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def single_decode_with_kv_cache(q, k, v, kv_layout, sm_scale):
    """flashinfer's, of q [heads, head_dim] and k, v [kv_heads, keys, head_dim]."""
    assert kv_layout == "HND" and q.dim() == 2 and k.dim() == 3
    return sdpa(q[None, :, None], k[None], v[None], scale=sm_scale, enable_gqa=True)[0, :, 0]


def rmsnorm(x, weight, eps):
    """flashinfer's, of matrices."""
    assert x.dim() == 2
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("Qwen2-0.5B 14/2 heads, 1 rows, 200 of 256 keys", step_arms.flash_static(flash_attn_with_kvcache)),
        ("Qwen2-0.5B 14/2 heads, 1 rows, 64 keys", decode_arms.flash_attention(flash_attn_with_kvcache)),
        ("Qwen2-0.5B 14/2 heads, 1 rows, 64 keys", decode_arms.flashinfer_decode(single_decode_with_kv_cache)),
        ("Qwen2-0.5B norm 896, 1 rows, fp32", decode_arms.flashinfer_norm(rmsnorm)),
    ],
)
def test_arms_of_libraries_that_are_not_installed_call_them_as_they_are_called(name, arm):
    (judged,) = (judged for judged in load_cases("transformers") if judged.case.name == name)
    made = made_of(judged)
    torch.testing.assert_close(arm(*made.sets[0]), made.eager(*made.sets[0]), rtol=2e-2, atol=2e-2)


def test_every_decode_kernel_has_a_case_with_arms():
    judged = {
        judged.case.parameters.get("operation", judged.fusion)
        for stack in ("transformers", "cosyvoice2", "cosyvoice3")
        for judged in load_cases(stack)
    }
    wanted = {"rms_norm", "swiglu", "qk_norm_rope", "qk_norm_rope_cached", "gqa_attention", "static_attention"}
    wanted |= {"small_attention", "skinny_gemm", "skinny_swiglu", "embedding_sum", "sample", "ras_sampling"}
    assert wanted <= judged
