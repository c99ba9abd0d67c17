"""KModels with random weights, through upstream's own constructor."""

import torch

from voxfuse.patches._kokoro_import import load_kokoro

SMALL_ISTFTNET = {
    "resblock_kernel_sizes": [3, 7],
    "upsample_rates": [4, 2],
    "upsample_initial_channel": 512,
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "upsample_kernel_sizes": [8, 4],
    "gen_istft_n_fft": 20,
    "gen_istft_hop_size": 5,
}
# Few layers and narrow where upstream lets them be: Decoder fixes the 512 of hidden_dim, forward_with_tokens the style.
SMALL = {
    "n_token": 8, "hidden_dim": 512, "style_dim": 128, "n_layer": 2, "max_dur": 4, "dropout": 0.2,
    "text_encoder_kernel_size": 5, "n_mels": 80,
    "plbert": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2,
               "max_position_embeddings": 64, "embedding_size": 16},
    "istftnet": SMALL_ISTFTNET,
}  # fmt: skip
RELEASED = SMALL | {
    "n_token": 178, "n_layer": 3, "max_dur": 50,
    "plbert": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048, "num_hidden_layers": 12,
               "max_position_embeddings": 512},
    "istftnet": {
        "resblock_kernel_sizes": [3, 7, 11], "upsample_rates": [10, 6], "upsample_initial_channel": 512,
        "resblock_dilation_sizes": [[1, 3, 5]] * 3, "upsample_kernel_sizes": [20, 12],
        "gen_istft_n_fft": 20, "gen_istft_hop_size": 5,
    },
}  # fmt: skip


def random_kmodel(folder, config=SMALL, seed=0, spread=8, **plbert):
    """Kokoro's KModel in eval mode; token i is the character chr(33 + i). ``plbert`` overrides bert's settings.

    ``spread``: by how much the weights of the duration projection are multiplied, for tokens of unlike durations.
    """
    load_kokoro()
    from kokoro.model import KModel

    path = folder / "no-weights.pth"
    torch.save({}, path)
    config = config | {"plbert": config["plbert"] | plbert, "vocab": {chr(33 + i): i for i in range(config["n_token"])}}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = KModel(repo_id="hexgrad/Kokoro-82M", config=config, model=str(path)).eval()
        with torch.no_grad():
            for name, parameter in model.predictor.named_parameters():
                if name.endswith(("norm.weight", "norm.bias")):  # upstream's initial ones hide a mistake
                    parameter.normal_(float(name.endswith("weight")), 0.3)
            model.predictor.duration_proj.linear_layer.weight.mul_(spread)
    return model
