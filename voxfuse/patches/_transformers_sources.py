"""SHA-256 of transformers' sources that the decoder patches absorb, by tested release (``guards.source_sha256``)."""

from __future__ import annotations


def _of(model: str, attributes: str) -> str:
    return f"transformers.models.{model}.modeling_{model}:{attributes}"


ROTARY = tuple(
    _of(model, f"{name}RotaryEmbedding.forward")  # the same text in all three
    for model, name in (("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("llama", "Llama"))
)
SOURCES: dict[str, dict[str, str]] = {
    "4.51.3": {
        _of("qwen2", "Qwen2Model.forward"): "ebe7af045957082bdfddd74a233198a3ae180f59056ee5d2c5170e3b12437419",
        _of("qwen2", "Qwen2DecoderLayer.forward"): "fad71a96c49a55a0e1f9fd85960e1f7becfa5250c701b2558b617db7ba0aefc2",
        _of(
            "qwen2", "Qwen2RotaryEmbedding.forward"
        ): "873216af9d56f2c4c0971df6a8ed7adbcd144d6f1ca987e7d0f5e88982867da8",
        _of("qwen3", "Qwen3Model.forward"): "606bb1f853414a353acafef6e2190ddf2f4eaed2ff98b989f187fa041de8783e",
        _of("qwen3", "Qwen3DecoderLayer.forward"): "fad71a96c49a55a0e1f9fd85960e1f7becfa5250c701b2558b617db7ba0aefc2",
        _of(
            "qwen3", "Qwen3RotaryEmbedding.forward"
        ): "873216af9d56f2c4c0971df6a8ed7adbcd144d6f1ca987e7d0f5e88982867da8",
        _of("llama", "LlamaModel.forward"): "baa22ee88e4265f71cca1c715f28b6b02ceac1499bb6035c38f2be3f6db3cf5f",
        _of("llama", "LlamaDecoderLayer.forward"): "fad71a96c49a55a0e1f9fd85960e1f7becfa5250c701b2558b617db7ba0aefc2",
        _of(
            "llama", "LlamaRotaryEmbedding.forward"
        ): "873216af9d56f2c4c0971df6a8ed7adbcd144d6f1ca987e7d0f5e88982867da8",
        _of("qwen2", "Qwen2RMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _of("qwen2", "Qwen2MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("qwen2", "Qwen2Attention.forward"): "cf57bf5da2c6ebf98af6a13851fb6f39293bdf33ebc8027b56e3e7846a53a6c2",
        _of("qwen2", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _of("qwen2", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _of("qwen3", "Qwen3RMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _of("qwen3", "Qwen3MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("qwen3", "Qwen3Attention.forward"): "2849057d8f092feb9b3eba645afb058cc7d638ba4ce9f55fa33ec889b47054d9",
        _of("qwen3", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _of("qwen3", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _of("llama", "LlamaRMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _of("llama", "LlamaMLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("llama", "LlamaAttention.forward"): "2b0201fa616299d92070900971d776c4d69141a17d2e3eb3cd0c3d40f006dcfc",
        _of("llama", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _of("llama", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
    },
    "4.57.3": {
        _of("qwen2", "Qwen2Model.forward"): "612742831693cddb306d028be79da24d2a60ed86fc547a5594cac851f4f93cf2",
        _of("qwen2", "Qwen2DecoderLayer.forward"): "e61c75d2243cbdf66e1ea481ce84052efeb6cb01fdf1f161387745ac611e2743",
        _of(
            "qwen2", "Qwen2RotaryEmbedding.forward"
        ): "873216af9d56f2c4c0971df6a8ed7adbcd144d6f1ca987e7d0f5e88982867da8",
        _of("qwen3", "Qwen3Model.forward"): "612742831693cddb306d028be79da24d2a60ed86fc547a5594cac851f4f93cf2",
        _of("qwen3", "Qwen3DecoderLayer.forward"): "e61c75d2243cbdf66e1ea481ce84052efeb6cb01fdf1f161387745ac611e2743",
        _of(
            "qwen3", "Qwen3RotaryEmbedding.forward"
        ): "873216af9d56f2c4c0971df6a8ed7adbcd144d6f1ca987e7d0f5e88982867da8",
        _of("llama", "LlamaModel.forward"): "53cf608a1f9ec3099670c9dc7bca500dc5df88dd63b6caa8f2fd31a4778a7340",
        _of("llama", "LlamaDecoderLayer.forward"): "e61c75d2243cbdf66e1ea481ce84052efeb6cb01fdf1f161387745ac611e2743",
        _of(
            "llama", "LlamaRotaryEmbedding.forward"
        ): "873216af9d56f2c4c0971df6a8ed7adbcd144d6f1ca987e7d0f5e88982867da8",
        _of("qwen2", "Qwen2RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _of("qwen2", "Qwen2MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("qwen2", "Qwen2Attention.forward"): "d1c47fbf1aa903498cffe8ef6cba6b8fbd6d3575105c175f2c4a4d4922cb062e",
        _of("qwen2", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _of("qwen2", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _of("qwen3", "Qwen3RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _of("qwen3", "Qwen3MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("qwen3", "Qwen3Attention.forward"): "e93c4edb54f137bef8ed6f8df790912854138deefde3aba5ba3b9ee5515bec82",
        _of("qwen3", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _of("qwen3", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _of("llama", "LlamaRMSNorm.forward"): "cdbbe12603e777d7097a001fcc5fede6684a0345fcc1c781ad5b0e25414d381f",
        _of("llama", "LlamaMLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("llama", "LlamaAttention.forward"): "bd38c4dfb66d9fc4c78ba18dc1f7b0b978413a7387eb023de74b581ff12a5ace",
        _of("llama", "apply_rotary_pos_emb"): "d1e7d21b55bc5ca988047b17ea15ac7d674428b30073c3e101eb782180a58a25",
        _of("llama", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
    },
    "5.24.0": {
        _of("qwen2", "Qwen2Model.forward"): "4098825e5a45653236e6393a0bf99699e757063b76374a858e4f7d37edd4d50b",
        _of("qwen2", "Qwen2DecoderLayer.forward"): "c58bc6a3bd6504f80a1c705f0cad3f014d25a850ad09610a7fd10bef0255bbb6",
        _of(
            "qwen2", "Qwen2RotaryEmbedding.forward"
        ): "0197c13cb9f7825ae4b93d42cb608bbfcff2413b1481b85c7cab55214203a921",
        _of("qwen3", "Qwen3Model.forward"): "4098825e5a45653236e6393a0bf99699e757063b76374a858e4f7d37edd4d50b",
        _of("qwen3", "Qwen3DecoderLayer.forward"): "c58bc6a3bd6504f80a1c705f0cad3f014d25a850ad09610a7fd10bef0255bbb6",
        _of(
            "qwen3", "Qwen3RotaryEmbedding.forward"
        ): "0197c13cb9f7825ae4b93d42cb608bbfcff2413b1481b85c7cab55214203a921",
        _of("llama", "LlamaModel.forward"): "6ad906eadeb491cd39335a278d79efcfddbfd5b7ae0dbd63e8aae3040b979964",
        _of("llama", "LlamaDecoderLayer.forward"): "c58bc6a3bd6504f80a1c705f0cad3f014d25a850ad09610a7fd10bef0255bbb6",
        _of(
            "llama", "LlamaRotaryEmbedding.forward"
        ): "0197c13cb9f7825ae4b93d42cb608bbfcff2413b1481b85c7cab55214203a921",
        _of("qwen2", "Qwen2RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _of("qwen2", "Qwen2MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("qwen2", "Qwen2Attention.forward"): "19fc6c09f70ad662329a0359f9c6107f88b0d4c3f27851cda5bb9b00d91c45ae",
        _of("qwen2", "apply_rotary_pos_emb"): "ea234325c15de475147027ac7da4307167d082b13f4c62a7f2921fef4f9e5e87",
        _of("qwen2", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _of("qwen3", "Qwen3RMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _of("qwen3", "Qwen3MLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("qwen3", "Qwen3Attention.forward"): "fc750afd3f26090d08012f84ca0b6e9f9ce81f9311e0cc05b7066b20118fcff8",
        _of("qwen3", "apply_rotary_pos_emb"): "ea234325c15de475147027ac7da4307167d082b13f4c62a7f2921fef4f9e5e87",
        _of("qwen3", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
        _of("llama", "LlamaRMSNorm.forward"): "d676bfe9af0e524dad25c11faa7c7c4c625df3d426848208d100949dd659b0a0",
        _of("llama", "LlamaMLP.forward"): "b4e9c2637c7f11724d63cff81b7d6ff8e3db8c2fc1345912c8d9871bd4eebc6a",
        _of("llama", "LlamaAttention.forward"): "15034ca19bd84245071d3da0a2c2de7f48556bde58d471625d02c2dff01e2d54",
        _of("llama", "apply_rotary_pos_emb"): "ea234325c15de475147027ac7da4307167d082b13f4c62a7f2921fef4f9e5e87",
        _of("llama", "rotate_half"): "f714a4b1160c694e270d9191a9f133e53856e2a1c62f5cd2f85740f7c2692397",
    },
}
