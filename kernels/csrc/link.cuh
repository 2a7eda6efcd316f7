// Words that another processor writes or reads: every access is volatile, 8 bytes at once, and goes to memory. The host
// emulation of the tests has its own of this file.
#pragma once

using Word = unsigned long long; // payload in the low half, step in the high half: a word is this step's or it is not

__device__ __forceinline__ Word look(const Word *address) {
    Word word;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

__device__ __forceinline__ void push(Word *address, unsigned payload, unsigned step) {
    const Word word = static_cast<Word>(step) << 32 | payload;
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

// State that this device's own kernels, earlier or at the same time, write.
__device__ __forceinline__ unsigned current(const unsigned *address) {
    return *static_cast<const volatile unsigned *>(address);
}
__device__ __forceinline__ void set(unsigned *address, unsigned value) {
    *static_cast<volatile unsigned *>(address) = value;
}

// Makes what this thread has written seen by the host.
__device__ __forceinline__ void publish() { __threadfence_system(); }

// Nanoseconds of a clock of wall time. Its steps may be a microsecond.
__device__ __forceinline__ Word nanoseconds() {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
