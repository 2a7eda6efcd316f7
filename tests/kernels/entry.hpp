// What the tests call of the emulated sources.
extern "C" int size_of_task() { return sizeof(Task); }

extern "C" int emulate_linear(void (*kernel)(Task), int blocks, int threads, const Task *task, int count,
                              const size_t *ranges) {
    set_ranges(count, ranges);
    overlapping = true;
    const int stray = emulate(blocks, 1, threads, [=] { kernel(*task); });
    overlapping = false;
    return stray;
}

extern "C" int emulate_dequantise(void (*kernel)(Matrix, unsigned short *, int, int, int, float), int blocks,
                                  const Matrix *matrix, unsigned short *out, int groups, int first_band, int bands,
                                  float factor, int count, const size_t *ranges) {
    set_ranges(count, ranges);
    return emulate(blocks, 1, 128, [=] { kernel(*matrix, out, groups, first_band, bands, factor); });
}
