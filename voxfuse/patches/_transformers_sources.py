"""SHA-256 of transformers' sources that the decoder patches absorb, by tested release (``guards.source_sha256``)."""

from __future__ import annotations


def _path(model: str, attributes: str) -> str:
    return f"transformers.models.{model}.modeling_{model}:{attributes}"


SOURCES: dict[str, dict[str, str]] = {
    "4.51.3": {
        _path("qwen2", "Qwen2RMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _path("qwen2", "Qwen2MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("qwen2", "Qwen2Attention.forward"): "cf57bf5da2c6ebf98af6a13851fb6f39293bdf33ebc8027b56e3e7846a53a6c2",
        _path("qwen2", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _path("qwen2", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _path("qwen3", "Qwen3RMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _path("qwen3", "Qwen3MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("qwen3", "Qwen3Attention.forward"): "2849057d8f092feb9b3eba645afb058cc7d638ba4ce9f55fa33ec889b47054d9",
        _path("qwen3", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _path("qwen3", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _path("llama", "LlamaRMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _path("llama", "LlamaMLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("llama", "LlamaAttention.forward"): "2b0201fa616299d92070900971d776c4d69141a17d2e3eb3cd0c3d40f006dcfc",
        _path("llama", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _path("llama", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
    },
    "4.57.3": {
        _path("qwen2", "Qwen2RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _path("qwen2", "Qwen2MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("qwen2", "Qwen2Attention.forward"): "d1c47fbf1aa903498cffe8ef6cba6b8fbd6d3575105c175f2c4a4d4922cb062e",
        _path("qwen2", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _path("qwen2", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _path("qwen3", "Qwen3RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _path("qwen3", "Qwen3MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("qwen3", "Qwen3Attention.forward"): "e93c4edb54f137bef8ed6f8df790912854138deefde3aba5ba3b9ee5515bec82",
        _path("qwen3", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _path("qwen3", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _path("llama", "LlamaRMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _path("llama", "LlamaMLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("llama", "LlamaAttention.forward"): "bd38c4dfb66d9fc4c78ba18dc1f7b0b978413a7387eb023de74b581ff12a5ace",
        _path("llama", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _path("llama", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
    },
    "5.24.0": {
        _path("qwen2", "Qwen2RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _path("qwen2", "Qwen2MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("qwen2", "Qwen2Attention.forward"): "19fc6c09f70ad662329a0359f9c6107f88b0d4c3f27851cda5bb9b00d91c45ae",
        _path("qwen2", "apply_rotary_pos_emb"): "ea234325c15de475147027ac7da4307167d082b13f4c62a7f2921fef4f9e5e87",
        _path("qwen2", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _path("qwen3", "Qwen3RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _path("qwen3", "Qwen3MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("qwen3", "Qwen3Attention.forward"): "fc750afd3f26090d08012f84ca0b6e9f9ce81f9311e0cc05b7066b20118fcff8",
        _path("qwen3", "apply_rotary_pos_emb"): "ea234325c15de475147027ac7da4307167d082b13f4c62a7f2921fef4f9e5e87",
        _path("qwen3", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _path("llama", "LlamaRMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _path("llama", "LlamaMLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _path("llama", "LlamaAttention.forward"): "15034ca19bd84245071d3da0a2c2de7f48556bde58d471625d02c2dff01e2d54",
        _path("llama", "apply_rotary_pos_emb"): "ea234325c15de475147027ac7da4307167d082b13f4c62a7f2921fef4f9e5e87",
        _path("llama", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
    },
}
