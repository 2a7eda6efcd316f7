"""One function per operation of the model: the torch reference, and the float64 oracle that judges it."""

import numpy as numpy  # before torch, which swallows an interrupt in the middle of importing it, and lives with half of it
