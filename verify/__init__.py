"""Proofs that no bit went astray between source, converted directory and ranks; shares no code with what it checks."""
