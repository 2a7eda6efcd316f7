// The words between two ranks, emulated: stands in for link.cuh. The peer is another thread of this process.
#pragma once
#include <sched.h>
#include <time.h>

using Word = unsigned long long;

inline Word look(const Word *address) {
    if (!inside(address, sizeof(Word))) {
        ++stray;
        return 0;
    }
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline void push(Word *address, unsigned payload, unsigned step) {
    if (inside(address, sizeof(Word))) {
        __atomic_store_n(address, Word(step) << 32 | payload, __ATOMIC_RELAXED);
    } else {
        ++stray;
    }
}
inline unsigned current(const unsigned *address) { return read(address); }
inline void set(unsigned *address, unsigned value) { write(address, value); }
inline void publish() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline Word nanoseconds() {
    sched_yield(); // the clock is read while waiting
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return Word(now.tv_sec) * 1000000000 + now.tv_nsec;
}
