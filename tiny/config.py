"""The tiny model's configuration: the family's structure, every size small.

All matrices that the default recipe quantises split over two ranks in whole 32-row, 16-column tiles.
"""

from __future__ import annotations

from typing import Any

from .vocabulary import TOKEN_ID, VOCABULARY

LAYERS = 8

TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": TOKEN_ID["<|im_end|>"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(LAYERS)],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 32768,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "pad_token_id": TOKEN_ID["<|endoftext|>"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

VISION: dict[str, Any] = {
    "depth": 1,
    "dtype": "bfloat16",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "model_type": "qwen3_5_vision",
    "num_heads": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": TOKEN_ID["<|image_pad|>"],
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "video_token_id": TOKEN_ID["<|video_pad|>"],
    "vision_config": VISION,
    "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
    "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
}

GENERATION: dict[str, Any] = {
    "do_sample": True,
    "eos_token_id": [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]],
    "pad_token_id": TOKEN_ID["<|endoftext|>"],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}

IMAGE_PROCESSOR: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 262144, "shortest_edge": 1024},
    "temporal_patch_size": 2,
}

VIDEO_PROCESSOR: dict[str, Any] = {
    **{key: value for key, value in IMAGE_PROCESSOR.items() if key != "image_processor_type"},
    "video_processor_type": "Qwen3VLVideoProcessor",
}
