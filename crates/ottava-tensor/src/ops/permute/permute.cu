// Gathers rows of tokens by slot. `pair_of` is -1 for rows without a choice; the token of choice `pair` is `pair / K`. `slot_of` is -1 for choices
// without a row. `weights` may be null.

// Returns eight values of a row, multiplied by the weight of its choice.
template <class T> __device__ __forceinline__ Eight<T> weighed(const Eight<T>& e, float weight) {
    float v[8];
    unpack8(e, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= weight;
    return pack8<T>(v);
}

#ifdef FORMAT
struct Gathered {
    const X* x;
    // For the rows of the tile, which begins at `row0`: the tokens (-1 for rows without a choice), and the weights of the choices, or null.
    const int* token_of;
    const float* weight_of;
    int row0, columns;
    bool wide;
    typedef Eight<X> Raw;
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        const int token = token_of[row - row0];
        if (token < 0) return {};
        return fetch8(x + (u64)(u32)token * (u32)columns + column, columns - column, wide);
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int row, int) const { return weight_of ? weighed(raw, weight_of[row - row0]) : raw; }
    __device__ __forceinline__ bool is_copy() const { return !weight_of; }
    __device__ __forceinline__ const X* address(int row, int column) const {
        const int token = token_of[row - row0];
        return token < 0 ? nullptr : x + ((u64)(u32)token * (u32)columns + column);
    }
};
template <> constexpr bool MAY_COPY<Gathered> = true;

// Grid (tiles along rows, tiles along columns), 256 threads. Neighbouring blocks have the same columns. L2 then holds these columns of all tokens,
// and the rows of tokens are read once for each choice.
extern "C" __global__ void __launch_bounds__(256, 5)
    gather_codes(const X* x, const int* pair_of, const float* weights, int K, const __grid_constant__ Destination to) {
    __shared__ int token_of[TILE];
    __shared__ float weight_of[TILE];
    const int row0 = blockIdx.x * TILE, row = row0 + threadIdx.x;
    if (skips(to, row0, row0 == 0 && blockIdx.y == 0)) return;
    if (threadIdx.x < TILE) {
        const int pair = row < to.rows ? pair_of[row] : -1;
        token_of[threadIdx.x] = pair < 0 ? -1 : pair / K;
        weight_of[threadIdx.x] = weights && pair >= 0 ? weights[pair] : 0.0f;
    }
    // With per-row scales, `cast_tile` has a barrier before it reads values.
    if (SHARING != PerRow) __syncthreads();
    const Gathered from = {x, token_of, weights ? weight_of : nullptr, row0, to.columns, to.columns % 8 == 0 && aligned(x)};
    quantize_tile<2>(to, from, row0, blockIdx.y * TILE);
}

// Casts one row. The grid has the blocks of all padded rows.
template <int EIGHTS>
__device__ __forceinline__ void gathered_row(const X* x, const int* pair_of, const float* weights, int K, const Destination& to) {
    if constexpr (SHARING != PerRow) return;
    start_row();
    if (skips_row(to)) return;
    const int row = cast_row_number(), pair = row < to.rows ? pair_of[row] : -1;
    Eight<X> values[EIGHTS] = {};
    if (pair >= 0) {
#pragma unroll
        for (int k = 0; k < EIGHTS; k++) {
            const int column = row_column<EIGHTS>(k);
            if (column >= to.columns) continue;
            values[k] = load8(x + (u64)(pair / K) * to.columns + column);
            if (weights) values[k] = weighed(values[k], weights[pair]);
        }
    }
    cast_row(to, values);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    gather_few_rows(const X* x, const int* pair_of, const float* weights, int K, const __grid_constant__ Destination to) {
    gathered_row<1>(x, pair_of, weights, K, to);
}
extern "C" __global__ void __launch_bounds__(1024, 2)
    gather_rows(const X* x, const int* pair_of, const float* weights, int K, const __grid_constant__ Destination to) {
    gathered_row<ROW_EIGHTS>(x, pair_of, weights, K, to);
}
#else
__device__ __forceinline__ int padded128(int n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// The slots of choices are placed in three launches, because the order of the choices of an expert is the order of their numbers: the choices of each
// chunk of PLACED choices are counted, the counts of preceding chunks are added, and each chunk places its choices. One chunk takes one launch. A
// choice of an expert outside of `first_expert` to `first_expert + experts` has no slot.
#define WARPS (PLACED / 256)
extern __shared__ int of_experts[];

// The choices of a thread: number k of a warp's part of a chunk is 32 k + lane. `before` counts the earlier choices of the same expert in this part.
struct Choices { int expert[8], before[8]; };

// Reads the choices of a thread, and adds them to the warp's counts of experts, which are zero before.
__device__ __forceinline__ Choices count_part(int* counts, const int* ids, int first, int pairs, int first_expert, int experts) {
    const int lane = threadIdx.x % 32;
    Choices of;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int at = first + 32 * k + lane, id = at < pairs ? ids[at] - first_expert : -1;
        of.expert[k] = id < experts ? id : -1;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int expert = max(of.expert[k], -1);
        const u32 same = __match_any_sync(0xFFFFFFFF, expert), earlier = same & ((1u << lane) - 1);
        of.before[k] = __popc(earlier) + (expert >= 0 ? counts[expert] : 0);
        __syncwarp();
        if (expert >= 0 && earlier == 0) counts[expert] += __popc(same);
        __syncwarp();
    }
    return of;
}

// Counts the choices of a chunk. Returns the choices of this thread. Afterwards `of_experts` has the counts of each warp, `[WARPS, experts]`.
__device__ __forceinline__ Choices count_chunk(const int* ids, int pairs, int first_expert, int experts) {
    for (int i = threadIdx.x; i < WARPS * experts; i += blockDim.x) of_experts[i] = 0;
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const Choices of = count_part(of_experts + warp * experts, ids, blockIdx.x * PLACED + 256 * warp, pairs, first_expert, experts);
    __syncthreads();
    return of;
}

// Writes the offsets of groups with these counts. One warp.
__device__ __forceinline__ void place_groups(int* offsets, const int* counts, int experts) {
    int end = 0;
    for (int start = 0; start < experts; start += 32) {
        const int e = start + threadIdx.x, size = e < experts ? padded128(counts[e]) : 0;
        int upto = size;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFF, upto, step);
            if (threadIdx.x >= step) upto += other;
        }
        if (e < experts) offsets[e] = end + upto - size;
        end += __shfl_sync(0xFFFFFFFF, upto, 31);
    }
    if (threadIdx.x == 0) offsets[experts] = end;
}

// Writes the slots of the choices of a thread. `of_experts` has the first slot of each warp and expert.
__device__ __forceinline__ void place_part(int* slot_of, int* pair_of, const Choices& of, int experts, int pairs) {
    const int warp = threadIdx.x / 32, first = blockIdx.x * PLACED + 256 * warp + threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int pair = first + 32 * k, expert = of.expert[k];
        if (pair >= pairs) continue;
        const int slot = expert < 0 ? -1 : of_experts[warp * experts + expert] + of.before[k];
        slot_of[pair] = slot;
        if (slot >= 0) pair_of[slot] = pair;
    }
}

// Replaces the counts of warps by the first slots of warps, for the chunk that begins at slot `starts[e]` of each expert. All threads.
__device__ __forceinline__ void start_warps(const int* starts, int experts) {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int at = starts[e];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int count = of_experts[w * experts + e];
            of_experts[w * experts + e] = at;
            at += count;
        }
    }
    __syncthreads();
}

// Marks the padding of groups. A block marks every gridDim-th group.
__device__ __forceinline__ void mark_padding(int* pair_of, const int* offsets, const int* counts, int experts) {
    for (int e = blockIdx.x; e < experts; e += gridDim.x)
        for (int row = offsets[e] + counts[e] + threadIdx.x; row < offsets[e + 1]; row += blockDim.x) pair_of[row] = -1;
}

// Grid (chunks). `of_chunks` is `[chunks, experts]`.
extern "C" __global__ void __launch_bounds__(32 * WARPS) count_slots(int* of_chunks, const int* ids, int pairs, int first_expert, int experts) {
    start_successors();
    wait_for_predecessors();
    count_chunk(ids, pairs, first_expert, experts);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int count = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) count += of_experts[w * experts + e];
        of_chunks[(u64)blockIdx.x * experts + e] = count;
    }
}

// Replaces the counts of chunks by the first slots of chunks. One block.
extern "C" __global__ void __launch_bounds__(1024) scan_slots(int* offsets, int* counts, int* of_chunks, int chunks, int experts) {
    start_successors();
    wait_for_predecessors();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int count = 0;
#pragma unroll 8
        for (int c = 0; c < chunks; c++) count += of_chunks[(u64)c * experts + e];
        counts[e] = count;
    }
    __syncthreads();
    if (threadIdx.x < 32) place_groups(offsets, counts, experts);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int at = offsets[e];
#pragma unroll 8
        for (int c = 0; c < chunks; c++) {
            const u64 chunk = (u64)c * experts + e;
            const int count = of_chunks[chunk];
            of_chunks[chunk] = at;
            at += count;
        }
    }
}

// Grid (chunks). `of_chunks` has the first slots of chunks.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    place_slots(int* slot_of, int* pair_of, const int* ids, const int* offsets, const int* counts, const int* of_chunks, int pairs, int first_expert, int experts) {
    start_successors();
    wait_for_predecessors();
    const Choices of = count_chunk(ids, pairs, first_expert, experts);
    start_warps(of_chunks + (u64)blockIdx.x * experts, experts);
    place_part(slot_of, pair_of, of, experts, pairs);
    mark_padding(pair_of, offsets, counts, experts);
}

// Places the choices of one chunk. One block.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    place_few_slots(int* offsets, int* counts, int* slot_of, int* pair_of, const int* ids, int pairs, int first_expert, int experts) {
    start_successors();
    wait_for_predecessors();
    const Choices of = count_chunk(ids, pairs, first_expert, experts);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int count = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) count += of_experts[w * experts + e];
        counts[e] = count;
    }
    __syncthreads();
    if (threadIdx.x < 32) place_groups(offsets, counts, experts);
    __syncthreads();
    start_warps(offsets, experts);
    place_part(slot_of, pair_of, of, experts, pairs);
    mark_padding(pair_of, offsets, counts, experts);
}

// Sets the rows after the last group to zero. Grid-stride loop over elements.
extern "C" __global__ void clear_unused_rows(X* x, const int* end, int rows, int columns) {
    const u64 first = (u64)*end * columns, all = (u64)rows * columns;
    for (u64 i = first + grid_start(); i < all; i += grid_step()) store(x + i, 0.0f);
}

// Grid (rows / GATHERED_ROWS, columns / GATHERED_COLUMNS), 256 threads. Each thread has eight columns of some rows. Neighbouring blocks have the same
// columns, which stay in L2 for all tokens.
#define LANES (GATHERED_COLUMNS / 8)
#define ROWS_AT_ONCE (256 / LANES)
extern "C" __global__ void __launch_bounds__(256) gather(X* y, const X* x, const int* pair_of, const float* weights, const int* end, int rows, int K, int C) {
    start_successors();
    wait_for_predecessors();
    if (is_unused(end, blockIdx.x * GATHERED_ROWS)) return;
    const int first = blockIdx.x * GATHERED_ROWS + threadIdx.x / LANES, column = blockIdx.y * GATHERED_COLUMNS + threadIdx.x % LANES * 8;
    if (column >= C) return;
    const bool wide = C % 8 == 0 && aligned(y, x);
    Eight<X> values[GATHERED_ROWS / ROWS_AT_ONCE] = {};
    float weight[GATHERED_ROWS / ROWS_AT_ONCE] = {};
#pragma unroll
    for (int i = 0; i < GATHERED_ROWS / ROWS_AT_ONCE; i++) {
        const int row = first + i * ROWS_AT_ONCE, pair = row < rows ? pair_of[row] : -1;
        if (pair < 0) continue;
        values[i] = fetch8(x + (u64)(pair / K) * C + column, C - column, wide);
        if (weights) weight[i] = weights[pair];
    }
#pragma unroll
    for (int i = 0; i < GATHERED_ROWS / ROWS_AT_ONCE; i++) {
        const int row = first + i * ROWS_AT_ONCE;
        if (row < rows) put8(y + (u64)row * C + column, weights ? weighed(values[i], weight[i]) : values[i], C - column, wide);
    }
}

// Grid (rows). Threads stride over words of 16 codes, and over the scales of a row. Scales of a row are `rows` elements apart, and `tokens` elements
// in `from_scales`.
extern "C" __global__ void gather_quantized(uint4* codes, float* scales, const uint4* from, const float* from_scales, const int* pair_of, int K,
                                            const int* end, int words, int blocks, int rows, int tokens) {
    if (is_unused(end, blockIdx.x)) return;
    const int row = blockIdx.x, pair = pair_of[row], token = pair / K;
    for (int w = threadIdx.x; w < words; w += blockDim.x)
        codes[(u64)row * words + w] = pair < 0 ? make_uint4(0, 0, 0, 0) : from[(u64)token * words + w];
    for (int b = threadIdx.x; b < blocks; b += blockDim.x)
        scales[(u64)b * rows + row] = pair < 0 ? 1.0f : from_scales[(u64)b * tokens + token];
}

// Raises the amaxes of all rows, of each row and of each column of the result of `gather`. Pointers may be null. Rounding keeps the order of values.
// So the largest value of a token times its largest weight is the largest value of its rows, and tokens are read once. Grid (columns / 2048, tokens /
// MEASURED_TOKENS), 256 threads with eight columns each.
#define AT_ONCE 8
extern "C" __global__ void __launch_bounds__(256) gather_amaxes(float* amax, float* row_amax, float* column_amax, const X* x, const int* slot_of,
                                                                const float* weights, int tokens, int K, int C) {
    // For each token: its largest weight (0 without a row), and the amax of each warp's columns.
    __shared__ float heaviest[MEASURED_TOKENS], of_warps[MEASURED_TOKENS][8];
    __shared__ alignas(16) float columns[2048];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = 8 * (blockIdx.x * 256 + threadIdx.x), first = blockIdx.y * MEASURED_TOKENS;
    const int count = min(MEASURED_TOKENS, tokens - first);
    const bool wide = C % 8 == 0 && aligned(x);
    for (int t = threadIdx.x; t < MEASURED_TOKENS; t += 256) {
        float most = 0.0f;
        for (int k = 0; k < K && t < count; k++) {
            const u64 pair = (u64)(first + t) * K + k;
            if (slot_of[pair] >= 0) most = fmaxf(most, weights ? fabsf(weights[pair]) : 1.0f);
        }
        heaviest[t] = most;
    }
    __syncthreads();
    Eight<X> of_columns = {};
#pragma unroll 1
    for (int t = 0; t < count; t += AT_ONCE) {
        Eight<X> values[AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (t + i < count && column < C) values[i] = fetch8(x + (u64)(first + t + i) * C + column, C - column, wide);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const u32 largest = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(largest8(values[i])));
            if (lane == 0) of_warps[t + i][warp] = __uint_as_float(largest);
            if (heaviest[t + i] > 0.0f) of_columns = larger8(of_columns, weights ? weighed(values[i], heaviest[t + i]) : values[i]);
        }
    }
    block_raise(amax, largest8(of_columns));
    // Column amaxes pass through shared memory, so that their atomics are coalesced.
    if (column_amax) {
        float v[8];
        unpack8(of_columns, v);
        store8(columns + 8 * threadIdx.x, pack8<f32>(v));
    }
    __syncthreads();
    for (int i = threadIdx.x, c = blockIdx.x * 2048 + i; column_amax && i < 2048 && c < C; i += 256, c += 256) raise(column_amax + c, fabsf(columns[i]));
    if (!row_amax) return;
    for (int i = threadIdx.x; i < count * K; i += 256) {
        const u64 pair = (u64)first * K + i;
        const int slot = slot_of[pair];
        if (slot < 0) continue;
        float largest = 0.0f;
        for (int w = 0; w < 8; w++) largest = fmaxf(largest, of_warps[i / K][w]);
        X y;
        store(&y, largest * (weights ? fabsf(weights[pair]) : 1.0f));
        if (load(y) > 0.0f) atomicMax((u32*)row_amax + slot, __float_as_uint(load(y)));
    }
}

// Grid (tokens). Threads stride over channels. Choices are added in order.
extern "C" __global__ void combine(X* y, const X* z, const int* slot_of, const float* weights, const X* addend, int K, int C) {
    start_successors();
    wait_for_predecessors();
    const u64 t = blockIdx.x;
    const int eights = C % 8 == 0 && aligned(y, z, addend) ? C / 8 : 0;
    slot_of += t * K;
    if (weights) weights += t * K;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        float sum[8] = {};
#pragma unroll 4
        for (int k = 0; k < K; k++) {
            const float weight = weights ? weights[k] : 1.0f;
            const int slot = slot_of[k];
            Eight<X> e = {};
            if (slot >= 0) e = load8(z + (u64)slot * C + 8 * g);
            float v[8];
            unpack8(e, v);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += weight * v[i];
        }
        if (addend) {
            float v[8];
            unpack8(load8(addend + t * C + 8 * g), v);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += v[i];
        }
        store8(y + t * C + 8 * g, pack8<X>(sum));
    }
    for (int c = 8 * eights + threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0.0f;
        for (int k = 0; k < K; k++) {
            const int slot = slot_of[k];
            if (slot >= 0) sum += (weights ? weights[k] : 1.0f) * load(z[(u64)slot * C + c]);
        }
        store(&y[t * C + c], addend ? sum + load(addend[t * C + c]) : sum);
    }
}

// One thread per choice.
extern "C" __global__ void weight_gradient(float* dweights, const float* dots, const int* slot_of, const float* weights, int pairs) {
    for (u64 i = grid_start(); i < pairs; i += grid_step()) {
        const int slot = slot_of[i];
        dweights[i] = slot < 0 || weights[i] == 0.0f ? 0.0f : dots[slot] / weights[i];
    }
}

// One block per choice. Threads stride over channels.
extern "C" __global__ void gathered_weight_gradient(float* dweights, const X* z, const X* x, const int* slot_of, int K, int C) {
    const int pair = blockIdx.x, slot = slot_of[pair];
    float sum = 0.0f;
    for (int c = threadIdx.x; slot >= 0 && c < C; c += blockDim.x) sum += load(z[(u64)slot * C + c]) * load(x[(u64)(pair / K) * C + c]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) dweights[pair] = sum;
}
#endif
