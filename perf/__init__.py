"""Measuring: quality of a checkpoint, and what the bytes and the clocks say."""

import numpy as numpy  # before torch, which swallows an interrupt in the middle of importing it, and lives with half of it
