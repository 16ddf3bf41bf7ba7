// Returns the bits of a float as a number with the order of floats. The two zeros are equal.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float float_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key);
}

// Returns floor(2^ONE · 2^x) for x <= 0. The operations are the operations of cpu.rs, so both give the same number.
__device__ __forceinline__ u64 weight(float x) {
    if (!(x >= -ONE)) return 0;
    const float n = floorf(x + 0.5f), f = x - n;
    float p = 1.540353e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.618129e-3f;
    p = p * f + 5.550411e-2f;
    p = p * f + 2.402265e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return (u64)(p * __uint_as_float((u32)((int)n + 127 + ONE) << 23));
}

// The row from which a token is drawn.
struct Row {
    const float* x;
    int V;
    float largest, scale;
    u64 least;  // the smallest weight that min-p leaves
    __device__ __forceinline__ u64 weigh(float value) const {
        const u64 w = weight((value - largest) * scale);
        return w < least ? 0 : w;
    }
};

constexpr float LOG2_E = 1.44269504f;
constexpr double LN_2 = 0.693147180559945309;

struct LargerKey { __device__ u32 operator()(u32 a, u32 b) const { return a > b ? a : b; } };

// Calls `of` with the columns of a row of V elements that threads `thread`, `thread` + `threads`, … read, and with their elements. Each thread reads four
// neighbouring elements at a time, so that more bytes are on their way.
template <typename F> __device__ __forceinline__ void each(const float* x, int V, int thread, int threads, F of) {
    const int whole = ((u64)x % 16 == 0) ? V / 4 : 0;
#pragma unroll 2
    for (int c = thread; c < whole; c += threads) {
        const float4 four = ((const float4*)x)[c];
        of(4 * c, four.x), of(4 * c + 1, four.y), of(4 * c + 2, four.z), of(4 * c + 3, four.w);
    }
    for (int c = 4 * whole + thread; c < V; c += threads) of(c, x[c]);
}

// Sums N values per thread over the block. All threads get the sums. Sums are exact, so their order does not matter.
template <int N> __device__ __forceinline__ void block_sums(u64* sums) {
    __shared__ u64 warps[N][32];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        u64 sum = sums[i];
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
        if (threadIdx.x % 32 == 0) warps[i][threadIdx.x / 32] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        sums[i] = 0;
        for (int w = 0; w < blockDim.x / 32; w++) sums[i] += warps[i][w];
    }
}

// Returns 1 with COUNT, otherwise the weight of an element.
template <bool COUNT> __device__ __forceinline__ u64 measure(const Row& row, float x) { return COUNT ? 1 : row.weigh(x); }

// Returns the sum of the elements above `key`.
template <bool COUNT> __device__ u64 above(const Row& row, u32 key) {
    u64 sum[1] = {0};
    each(row.x, row.V, threadIdx.x, blockDim.x, [&](int, float x) {
        if (key_of(x) > key) sum[0] += measure<COUNT>(row, x);
    });
    block_sums<1>(sum);
    return sum[0];
}

// Returns the largest key for which the elements from this key on sum to at least `wanted`. The key is at least `low`, for which this must be true.
// Each pass over the row divides the range by eight.
template <bool COUNT> __device__ u32 search(const Row& row, u64 low, u64 wanted) {
    u64 high = (u64)key_of(row.largest) + 1;
    while (high - low > 1) {
        const u64 step = (high - low + 7) / 8;
        u64 sums[7] = {};
        each(row.x, row.V, threadIdx.x, blockDim.x, [&](int, float x) {
            const u64 key = key_of(x);
            if (key < low + step) return;
            const u64 m = measure<COUNT>(row, x);
#pragma unroll
            for (int i = 0; i < 7; i++) if (key >= low + (i + 1) * step) sums[i] += m;
        });
        block_sums<7>(sums);
        int reached = 0;
        for (int i = 0; i < 7; i++) if (sums[i] >= wanted) reached = i + 1;
        const u64 next = low + (reached + 1) * step;
        low += reached * step;
        high = next < high ? next : high;
    }
    return (u32)low;
}

// The structs of mod.rs.
struct RowDraw {
    u64 uniform, top_p, least;
    u32 top_k;
    float scale, repetition, presence, frequency;
    u32 start, end, greedy;
};
struct Change {
    u32 token;
    int count;
    float bias;
    u32 unused;
};

// One block per row. Threads stride over its V columns. In the last pass, each warp has a piece of the row. `words` has a RowDraw for each row, then
// the changes. Log-probabilities are of the distribution of the draw if `of_draw`, else of the unchanged logits.
extern "C" __global__ void __launch_bounds__(1024) sample(int* tokens, float* logprobs, const float* logits, float* adjusted,
                                  const RowDraw* words, int V, int of_draw) {
    const int r = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const float* x = logits + (u64)r * V;
    const RowDraw how = words[r];
    const Change* changes = (const Change*)(words + gridDim.x);

    bool finite = true;
    u32 best = 0;
    each(x, V, threadIdx.x, blockDim.x, [&](int, float value) {
        finite &= (__float_as_uint(value) & 0x7FFFFFFF) < 0x7F800000;
        best = max(best, key_of(value));
    });
    if (!__syncthreads_and(finite)) {
        if (threadIdx.x == 0) tokens[r] = -1, logprobs[r] = 0.0f;
        return;
    }
    const Row plain = {x, V, float_of(block_reduce(best, LargerKey())), LOG2_E, 0};

    Row row = plain;
    row.scale = how.scale;
    row.least = how.least;
    if (how.start < how.end) {
        float* y = adjusted + (u64)r * V;
        for (int c = threadIdx.x; c < V; c += blockDim.x) y[c] = x[c];
        __syncthreads();
        for (u32 i = how.start + threadIdx.x; i < how.end; i += blockDim.x) {
            const Change change = changes[i];
            float value = x[change.token];
            if (change.count >= 0) value = value > 0.0f ? value / how.repetition : value * how.repetition;
            if (change.count > 0) value -= how.presence + how.frequency * (float)change.count;
            y[change.token] = value + change.bias;
        }
        __syncthreads();
        best = 0;
        for (int c = threadIdx.x; c < V; c += blockDim.x) best = max(best, key_of(y[c]));
        row.x = y;
        row.largest = float_of(block_reduce(best, LargerKey()));
    }

    // The candidates: all elements above `key`, whose weights sum to `mass`, and the first `ties` columns with that key.
    u32 key = 0;
    u64 ties = 0, mass = 0;
    if (how.top_k == 1) {
        key = key_of(row.largest), ties = 1;
    } else {
        if (how.top_k > 0 && how.top_k < V) {
            key = search<true>(row, 0, how.top_k);
            ties = how.top_k - above<true>(row, key);
        }
        mass = above<false>(row, key);
        if (how.top_p != ~0ull) {
            const u64 wanted = __umul64hi(how.top_p, mass + ties * row.weigh(float_of(key))) + 1;
            if (mass >= wanted) {
                key = search<false>(row, (u64)key + 1, wanted);
                mass = above<false>(row, key);
            }
            const u64 w = row.weigh(float_of(key));
            ties = w ? (wanted - mass + w - 1) / w : 0;
        }
    }
    const u64 tied = row.weigh(float_of(key));
    const u64 kept = mass + ties * tied;
    const u64 target = __umul64hi(how.uniform, kept);

    // The row and the sum of weights that the log-probability is of.
    Row scored = of_draw ? row : plain;
    if (how.greedy) scored.scale = LOG2_E, scored.least = 0;
    const double total = (double)(of_draw && !how.greedy ? kept : above<false>(scored, 0));

    // Finds the piece of the row in which the cumulated weights reach the target, then the column.
    __shared__ u64 masses[32], equals[32];
    // Pieces begin at multiples of four elements.
    const int piece = (V + 4 * warps - 1) / (4 * warps) * 4, start = min(warp * piece, V), end = min(start + piece, V);
    u64 m = 0, e = 0;
    each(row.x + start, end - start, lane, 32, [&](int, float value) {
        const u32 k = key_of(value);
        if (k > key) m += row.weigh(value);
        e += k == key;
    });
    for (int offset = 16; offset > 0; offset /= 2) {
        m += __shfl_xor_sync(0xFFFFFFFF, m, offset);
        e += __shfl_xor_sync(0xFFFFFFFF, e, offset);
    }
    if (lane == 0) masses[warp] = m, equals[warp] = e;
    __syncthreads();
    if (warp > 0) return;
    u64 left = target, free = ties;
    int p = 0;
    for (; p < warps - 1; p++) {
        const u64 taken = min(equals[p], free), here = masses[p] + taken * tied;
        if (left < here) break;
        left -= here, free -= taken;
    }
    int token = -1;
    for (int first = p * piece; first < V && token < 0; first += 32) {
        const int c = first + lane;
        const u32 k = c < V ? key_of(row.x[c]) : 0;
        const u32 same = __ballot_sync(0xFFFFFFFF, c < V && k == key);
        const bool kept = c < V && (k > key || (k == key && __popc(same & ((1u << lane) - 1)) < free));
        u64 sum = kept ? row.weigh(row.x[c]) : 0;
        for (int offset = 1; offset < 32; offset *= 2) {
            const u64 before = __shfl_up_sync(0xFFFFFFFF, sum, offset);
            if (lane >= offset) sum += before;
        }
        const u32 reached = __ballot_sync(0xFFFFFFFF, sum > left);
        if (reached) token = first + __ffs(reached) - 1;
        left -= __shfl_sync(0xFFFFFFFF, sum, 31);
        free -= min((u64)__popc(same), free);
    }
    if (lane > 0) return;
    token = max(token, 0);
    tokens[r] = token;
    const float gap = scored.x[token] - scored.largest;
    const double x_token = of_draw && !how.greedy ? (double)(gap * how.scale) * LN_2 : (double)gap;
    logprobs[r] = (float)(x_token - log(total / (double)(1ull << ONE)));
}
