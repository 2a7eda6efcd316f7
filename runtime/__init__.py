"""Serving: the engine of one rank, the ties between ranks, and the proxy in front of them."""
