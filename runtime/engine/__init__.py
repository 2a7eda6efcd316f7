"""One rank: its share of the model, its caches, sampling, speculation and the scheduler of its lanes."""
