// Stores of one card into memory that another card, or the host, holds: do they arrive, how soon, how fast.
// Accesses are volatile and of 8 bytes: on Volta only those become visible to a peer while a kernel runs.

using Word = unsigned long long;

__device__ __forceinline__ Word now() {
    Word time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// A word that differs with its place and the seed in all its bytes.
__device__ __forceinline__ Word varied(int index, int seed) {
    Word word = (static_cast<Word>(static_cast<unsigned>(seed)) << 32) | static_cast<unsigned>(index);
    word = (word ^ (word >> 31)) * 0x7FB5D329728EA185ULL;
    word = (word ^ (word >> 27)) * 0x81DADEF4BC2DD44DULL;
    return word ^ (word >> 33);
}

extern "C" __global__ void link_store(volatile Word *to, int count, int seed) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        to[i] = varied(i, seed);
    }
}

// Counts the words that are not those of `link_store`.
extern "C" __global__ void link_check(const volatile Word *at, int count, int seed, int *wrong) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        if (at[i] != varied(i, seed)) {
            atomicAdd(wrong, 1);
        }
    }
}

// One thread a card: the leader writes round r into `theirs` and waits for it in `mine`, the other answers.
// result: rounds done, nanoseconds from the end of the first round; ends after `budget_ms` whatever the other does.
extern "C" __global__ void link_ping(
    const volatile Word *mine, volatile Word *theirs, Word *result, int rounds, int leads, int budget_ms) {
    const Word begin = now();
    const Word budget = 1000000ULL * static_cast<Word>(budget_ms);
    Word first = begin;
    int done = 0;
    for (int round = 1; round <= rounds; ++round) {
        if (leads) {
            *theirs = static_cast<Word>(round);
        }
        while (*mine != static_cast<Word>(round) && now() - begin < budget) {
        }
        if (*mine != static_cast<Word>(round)) {
            break;
        }
        if (!leads) {
            *theirs = static_cast<Word>(round);
        }
        done = round;
        if (round == 1) {
            first = now();
        }
    }
    result[0] = static_cast<Word>(done);
    result[1] = now() - first;
}
