"""The family: Qwen3.5 / 3.6 / 3.8 dense. Configuration, closed inventory of tensors, partition table."""
