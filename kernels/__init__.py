"""One function per operation of the model: the torch reference, and the float64 oracle that judges it."""
