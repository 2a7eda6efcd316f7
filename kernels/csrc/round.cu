// The bookkeeping of a decode round, so that the host need not know a round's numbers before the next one starts.
//
// A round reads what the last one left with the draft layer (rows `kept`), drafts token by token, verifies a token and its
// drafts in one pass, and moves on. `round_rows` says before each pass which rows it has, `round_advance` what became of
// them. Sequence s of a round is lane order[s]; its rows stand together, kRows a sequence, unused ones last.
// docs/kernels/round.md.
#include "common.cuh"

constexpr int kPage = 64;
constexpr int kMostRows = 6;   // a token and its drafts
constexpr int kMaxDrafts = 5;
constexpr int kReport = 8;
constexpr int kStops = 8;
constexpr int kThreads = 256;
enum { kKept = 0, kDraft = 1, kVerify = 2 };

// What the device knows of each lane; int [lanes] unless said otherwise.
struct Lanes {
    int *lengths;           // tokens whose keys, values and states are in place
    int *limits;            // tokens of prompt and answer together at most; 0: the lane rests
    const int *prompts;     // tokens of the prompt
    const int *edges;       // [3, lanes]: rotary position of the prompt's last token
    const int *shifts;      // rotary position less index, of tokens behind the prompt
    const int *tables;      // [lanes, pages]
    const int *stops;       // [lanes, kStops]: tokens that end the answer, -1: none
    int *kept;              // rows that the draft layer has not read, the last ones: 1 .. kMostRows
    int *next;              // [lanes, kMostRows]: the token behind each of them; the last is the newest token
};

// Drafts as they are drawn: [drafts, sequences, kMaxDrafts + 1], the first of each counts; [drafts, sequences].
struct Draws {
    int *tokens, *produced;
    double *chance;
};

// One pass: its rows [T], and what is decided behind it [R].
struct Pass {
    int *tokens, *positions, *slots, *places;     // positions: [3, T]; places: index of the token, -1: not used
    int *homes;                                   // row of `hidden` [lanes * kMostRows, width] that belongs to each
    int *lanes, *starts, *counts, *firsts;        // [sequences]
    int *tables;                                  // [sequences, pages]
    int *picked;                                  // [sequences]: last used row
    int *row_lanes, *drafted, *drafts, *sources;  // [R]; drafted: [R, kMaxDrafts]
    double *chances;                              // [R]
    int *deciding, *deciding_firsts, *deciding_counts; // [sequences]
    long long *deciding_positions;
};

// kind kKept: rows kept for the draft layer, and the decision on the first draft; kDraft: one row, draft `step` - 1, and
// the decision on draft `step`; kVerify: the newest token and its drafts, and the decision on all. rows: of the pass, a
// sequence. window: pages of context that the pass attends to, besides the newest; 0: all. Places and starts count from the
// first of them. certain: drafts were given or are greedy. copies: fill the pass's tables, too. Grid: (sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    round_rows(const int *order, Lanes lanes, Draws draws, Pass pass, int *produced, int all_lanes, int pages, int kind,
               int step, int rows, int drafts, int window, int certain, int copies) {
    const int sequence = blockIdx.x, sequences = gridDim.x, total = sequences * rows;
    const int own = read(order + sequence);
    const int length = own < 0 ? 0 : read(lanes.lengths + own);
    const int wanted = own < 0 ? 0 : min(1 + drafts, read(lanes.limits + own) - length - 1); // rows to verify
    const int lane = wanted > 0 ? own : -1;
    const int kept = lane < 0 ? 0 : read(lanes.kept + lane);
    // Drafts that are drawn already and stand one behind the other.
    const int most = kind == kVerify ? wanted - 1 : min(step, wanted - 1);
    int known[kMaxDrafts];
    int drawn = 0;
    bool going = lane >= 0 && kind != kKept;
#pragma unroll
    for (int i = 0; i < kMaxDrafts; ++i) {
        known[i] = -1;
        if (going && i < most) {
            const int place = i * sequences + sequence;
            const int token = read(draws.produced + place) > 0 ? read(draws.tokens + place * (kMaxDrafts + 1)) : -1;
            going = token >= 0;
            known[i] = token;
            drawn += going;
        }
    }
    const bool drafting = lane >= 0 && kind != kVerify && drawn == step && step < wanted - 1;
    const int count = kind == kKept ? min(kept, rows) : kind == kDraft ? drafting : lane < 0 ? 0 : 1 + drawn;
    const int start = kind == kKept ? length - kept : kind == kDraft ? length - 1 + step : length;

    const int hidden_pages = window > 0 ? max(0, length / kPage - window) : 0;

    const int row = threadIdx.x;
    if (row < rows) {
        const int index = sequence * rows + row, place = start + row;
        const bool used = row < count;
        int token = 0, slot = -1, position[3] = {0, 0, 0};
        if (used) {
            token = kind == kKept ? read(lanes.next + lane * kMostRows + row)
                    : row == 0 && kind == kVerify ? read(lanes.next + lane * kMostRows + kept - 1) : -1;
            if (token < 0) {
                const int draft = kind == kDraft ? step - 1 : row - 1;
#pragma unroll
                for (int i = 0; i < kMaxDrafts; ++i) {
                    token = i == draft ? known[i] : token;
                }
            }
            const int page = place / kPage;
            if (page < pages) {
                const int number = read(lanes.tables + static_cast<size_t>(lane) * pages + page);
                slot = number < 0 ? -1 : number * kPage + place % kPage;
            }
            const bool inside = place < read(lanes.prompts + lane);
#pragma unroll
            for (int axis = 0; axis < 3; ++axis) {
                position[axis] = inside ? read(lanes.edges + axis * all_lanes + lane) : place + read(lanes.shifts + lane);
            }
        }
        write(pass.tokens + index, token);
        write(pass.slots + index, slot);
        write(pass.places + index, used ? place - hidden_pages * kPage : -1);
        write(pass.homes + index, used ? lane * kMostRows + row : 0);
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            write(pass.positions + axis * total + index, position[axis]);
        }
    }
    const int deciding_rows = kind == kVerify ? rows : 1;
    if (row < deciding_rows) {
        const int index = sequence * deciding_rows + row;
        const bool used = kind == kVerify ? row < count : drafting;
        const int standing = kind == kVerify ? row : step; // drafts before this row's token
        write(pass.row_lanes + index, used ? lane : -1);
        int draft = -1;
#pragma unroll
        for (int i = 0; i < kMaxDrafts; ++i) {
            write(pass.drafted + index * kMaxDrafts + i, used && i < standing ? known[i] : -1);
            draft = i == row ? known[i] : draft;
        }
        const bool judged = kind == kVerify && used && row < drawn;
        write(pass.drafts + index, judged ? draft : -1);
        write(pass.sources + index, judged && !certain ? row * sequences + sequence : -1);
        write(pass.chances + index, judged && !certain ? read(draws.chance + row * sequences + sequence) : 1.0);
    }
    if (threadIdx.x == 0) {
        const bool decided = kind == kVerify ? count > 0 : drafting;
        write(pass.lanes + sequence, count > 0 ? lane : -1);
        write(pass.starts + sequence, start - hidden_pages * kPage);
        write(pass.counts + sequence, count);
        write(pass.firsts + sequence, sequence * rows);
        write(pass.picked + sequence, sequence * rows + max(count - 1, 0));
        write(pass.deciding + sequence, decided ? lane : -1);
        write(pass.deciding_firsts + sequence, sequence * deciding_rows);
        write(pass.deciding_counts + sequence, kind == kVerify ? count : 1);
        write(pass.deciding_positions + sequence, static_cast<long long>(length + 1 + (kind == kVerify ? 0 : step)));
        write(produced + sequence, 0); // of the decision behind this pass, which may be left out
    }
    if (copies && lane >= 0) {
        const int filled = min(pages, (length + rows + kPage) / kPage);
        for (int page = hidden_pages + threadIdx.x; page < filled; page += kThreads) {
            write(pass.tables + static_cast<size_t>(sequence) * pages + page - hidden_pages,
                  read(lanes.tables + static_cast<size_t>(lane) * pages + page));
        }
    }
}

// Behind the decision on a verification pass. tokens: [sequences, kMaxDrafts + 1], produced: [sequences], as decided; 0:
// the logits were not finite, and the lane rests. It rests, too, behind a token that ends its answer; what was decided
// beyond does not count. accepted: [lanes], of the delta rule, or null: this was no pass through the layers. wide: FP32
// [sequences * rows, width], the hidden states; those that stand go to hidden [lanes, kMostRows, width]. report:
// [sequences + 1, kReport]: produced, drafts judged (-1: the lane rested before), tokens; in the last row the sum of
// `overflows` [counters]. Grid: (sequences * rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    round_advance(Lanes lanes, Pass pass, const int *tokens, const int *produced, int *accepted, const float *wide,
                  float *hidden, int width, int rows, const int *overflows, int counters, int *report) {
    const int sequence = blockIdx.x / rows, row = blockIdx.x % rows, sequences = gridDim.x / rows;
    const int lane = read(pass.lanes + sequence);
    const int made = lane < 0 ? 0 : read(produced + sequence);
    if (row < made) {
        const float4 *from = reinterpret_cast<const float4 *>(wide) + static_cast<size_t>(blockIdx.x) * (width / 4);
        float4 *to = reinterpret_cast<float4 *>(hidden) + static_cast<size_t>(lane * kMostRows + row) * (width / 4);
        for (int quad = threadIdx.x; quad < width / 4; quad += kThreads) {
            write(to + quad, read(from + quad));
        }
    }
    if (row == 0 && threadIdx.x == 0) {
        int *own = report + sequence * kReport;
        int taken = 0;
        bool ended = made == 0;
        for (int i = 0; i < kMostRows; ++i) {
            const int token = i < made ? read(tokens + sequence * (kMaxDrafts + 1) + i) : -1;
            write(own + 2 + i, token);
            if (i < made && !ended) {
                write(lanes.next + lane * kMostRows + i, token);
                ++taken;
                for (int stop = 0; stop < kStops; ++stop) {
                    ended |= token == read(lanes.stops + lane * kStops + stop);
                }
            }
        }
        write(own, made);
        write(own + 1, lane < 0 ? -1 : read(pass.counts + sequence) - 1);
        if (taken > 0) {
            write(lanes.lengths + lane, read(lanes.lengths + lane) + taken);
            write(lanes.kept + lane, taken);
            if (accepted) {
                write(accepted + lane, taken);
            }
        }
        if (lane >= 0 && ended) {
            write(lanes.limits + lane, 0);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < counters; ++i) {
            sum += read(overflows + i);
        }
        write(report + sequences * kReport, sum);
    }
}

// Logits of a reduced head to their tokens' places: values FP32 [rows, count], rows value_stride apart, to out
// [rows, vocabulary]. Grid: (count / kThreads rounded up, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    round_scatter(const float *values, int value_stride, const int *ids, int count, float *out, int vocabulary) {
    const int index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= count) {
        return;
    }
    const int id = read(ids + index);
    if (id >= 0 && id < vocabulary) {
        write(out + static_cast<size_t>(blockIdx.y) * vocabulary + id,
              read(values + static_cast<size_t>(blockIdx.y) * value_stride + index));
    }
}
