"""Measuring: quality of a checkpoint, and what the bytes and the clocks say."""
