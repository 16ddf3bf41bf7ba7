// Sums over the ranks of a group, whose GPUs write to each other's memory over NVLink.
//
// A line of 128 bytes has 15 words of eight bytes with values, and the number of the call. NVLink does not divide a line that one instruction of a warp
// stores, so a reader that sees the number of the call has the words of this call: lines need no fences and no flags. This is the protocol LL128 of NCCL.
//
// Each block has its own region of the inboxes, and its own number of calls. A call has as many lines as fit into the region, so a block makes several calls
// for a large sum. Consecutive calls use different halves. A block begins to send the lines of call i + 2 when it has received the lines of call i + 1. Each
// other rank sent these when it had read all lines of call i. So no rank reads this half any longer.

#define VALUES (8 / (int)sizeof(X)) // of a word
#define WORDS 15                    // of a line
#define STEP (THREADS / 8)          // lines of a block that are processed at once
#define LINES (STEP * EACH)         // of a call of a block

union Word {
    u64 bits;
    X values[VALUES];
};
// The words of a thread: word number `at` and the next one.
struct Pair {
    Word a, b;
};
// Tensors of n values as words. The last word may have fewer values.
template <class T> struct Words {
    T* x;
    u64 n;
    bool is_aligned;
    __device__ __forceinline__ bool is_whole(u64 at) const { return is_aligned && (at + 1) * VALUES <= n; }
    __device__ __forceinline__ Word read(u64 at) const {
        Word word = {};
        if (is_whole(at)) word.bits = *(const u64*)(x + at * VALUES);
        else
            for (int i = 0; i < VALUES; i++)
                if (at * VALUES + i < n) word.values[i] = x[at * VALUES + i];
        return word;
    }
    __device__ __forceinline__ void write(u64 at, Word word) const {
        if (is_whole(at)) *(u64*)(x + at * VALUES) = word.bits;
        else
            for (int i = 0; i < VALUES; i++)
                if (at * VALUES + i < n) x[at * VALUES + i] = word.values[i];
    }
};
template <class T> __device__ __forceinline__ Words<T> words_of(T* x, u64 n) { return {x, n, aligned(x)}; }

// The lines of a rank's inbox that `source` writes for this block: where this thread writes and reads.
__device__ __forceinline__ ulonglong2* place(u64 inbox, u64 call, int source, int ranks) {
    return (ulonglong2*)inbox + (((call & 1) * ranks + source) * BLOCKS + blockIdx.x) * (8 * LINES) + threadIdx.x;
}
__device__ __forceinline__ void send(ulonglong2* to, Pair pair) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(pair.a.bits), "l"(pair.b.bits) : "memory");
}
// Waits for the lines of a call. Called by all threads of a warp, of which those with `wants` have a line.
__device__ __forceinline__ Pair receive(const ulonglong2* from, u64 call, bool wants, bool has_number) {
    Pair pair = {};
    do
        if (wants) asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.a.bits), "=l"(pair.b.bits) : "l"(from) : "memory");
    while (__any_sync(0xFFFFFFFF, wants && has_number && pair.b.bits != call));
    return pair;
}
__device__ __forceinline__ void add(float (&sum)[VALUES], Word word, bool is_first) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) sum[i] = is_first ? load(word.values[i]) : sum[i] + load(word.values[i]);
}
__device__ __forceinline__ Word rounded(const float (&sum)[VALUES]) {
    Word word;
#pragma unroll
    for (int i = 0; i < VALUES; i++) store(&word.values[i], sum[i]);
    return word;
}

// Computes y = addend + the sum of x over the ranks, added in their order and rounded once.
extern "C" __global__ void __launch_bounds__(THREADS) sum_in_one_shot(X* y, const X* x, const X* addend, u64* calls, const u64* inboxes, int rank, int ranks, u64 n) {
    start_successors();
    const u64 words = (n + VALUES - 1) / VALUES, lines = (words + WORDS - 1) / WORDS, each = (lines + gridDim.x - 1) / gridDim.x;
    const u64 last = min((blockIdx.x + 1) * each, lines), own = inboxes[rank];
    const int lane = threadIdx.x % 8;
    const bool has_number = lane == 7; // instead of a second word
    const auto part = words_of(x, n), addends = words_of(addend, n);
    const auto sums = words_of(y, n);
    wait_for_predecessors();
    u64 call = calls[blockIdx.x];
#pragma unroll 1
    for (u64 first = blockIdx.x * each; first < last; first += LINES) {
        const u64 end = min(first + LINES, last);
        call++;
        Pair mine[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u64 line = first + i * STEP + threadIdx.x / 8, at = line * WORDS + 2 * lane;
            if (line >= end) continue;
            mine[i].a = part.read(at);
            if (has_number) mine[i].b.bits = call;
            else mine[i].b = part.read(at + 1);
            for (int other = 1; other < ranks; other++) send(place(inboxes[(rank + other) % ranks], call, rank, ranks) + i * THREADS, mine[i]);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            // Uniform in the block.
            if (first + i * STEP >= end) break;
            const u64 line = first + i * STEP + threadIdx.x / 8, at = line * WORDS + 2 * lane;
            const bool wants = line < end;
            float a[VALUES], b[VALUES];
            for (int source = 0; source < ranks; source++) {
                Pair pair = mine[i];
                if (source != rank) pair = receive(place(own, call, source, ranks) + i * THREADS, call, wants, has_number);
                add(a, pair.a, source == 0), add(b, pair.b, source == 0);
            }
            if (!wants) continue;
            if (addend) add(a, addends.read(at), false), add(b, has_number ? Word{} : addends.read(at + 1), false);
            sums.write(at, rounded(a));
            if (!has_number) sums.write(at + 1, rounded(b));
        }
        // All threads have read the lines of this call, and the number of calls.
        __syncthreads();
    }
    if (threadIdx.x == 0) calls[blockIdx.x] = call;
}
