"""The engine's CUDA backend: weights in tiles, the model above the kernels, the memory of a card."""
