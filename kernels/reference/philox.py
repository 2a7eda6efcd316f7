"""Random numbers counted, not drawn: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers", 2011)."""

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & MASK, (low >> 32) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: int) -> float:
    """A number in [0, 1) with 53 bits, fixed by a 64-bit seed, a token position and what the number is for."""
    words = philox4x32((position & MASK, position >> 32 & MASK, purpose, 0), (seed & MASK, seed >> 32 & MASK))
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53
