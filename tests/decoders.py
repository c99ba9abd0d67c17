"""transformers' real decoders with tiny random weights, and upstream's prefill of rows padded on the left."""

import torch

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tiny(name, layers=1, implementation="eager", **changes):
    import transformers

    config = getattr(transformers, f"{name}Config")(**(SIZES | {"num_hidden_layers": layers} | changes))
    config._attn_implementation = implementation
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are not one, and attention that is not flat
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def prefill(model, prompts):
    """Upstream's cache, the logits of the last token [rows, vocabulary] and the lengths, of lists of tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    return out.past_key_values, out.logits[:, -1], [len(prompt) for prompt in prompts]
