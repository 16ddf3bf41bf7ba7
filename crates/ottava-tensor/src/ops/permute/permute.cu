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

// Counts the choices of each expert. Grid (experts); the first expert has number `first`.
extern "C" __global__ void __launch_bounds__(1024) count_slots(int* counts, const int* ids, int pairs, int first) {
    start_successors();
    wait_for_predecessors();
    int n = 0;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) n += ids[i] == first + (int)blockIdx.x;
    n = block_sum(n);
    if (threadIdx.x == 0) counts[blockIdx.x] = n;
}

// Grid (experts), 32 warps. A block lists the choices of its expert in order, testing eight candidates per thread at a time. The first block also
// marks choices of experts outside the grid.
#define EACH 8
extern "C" __global__ void __launch_bounds__(1024)
    place_slots(int* offsets, int* slot_of, int* pair_of, const int* ids, const int* counts, int pairs, int experts, int rows, int first_expert) {
    start_successors();
    wait_for_predecessors();
    __shared__ int of_warps[32];
    const int e = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = counts[e];
    int at = 0;
    for (int g = threadIdx.x; g < e; g += blockDim.x) at += padded128(counts[g]);
    at = block_sum(at);
    const int end = at + padded128(count), until = e == experts - 1 ? rows : end;
    if (threadIdx.x == 0) {
        offsets[e] = at;
        if (e == experts - 1) offsets[experts] = end;
    }
    for (int row = at + count + threadIdx.x; row < until; row += blockDim.x) pair_of[row] = -1;
    for (int start = 0; start < pairs; start += EACH * blockDim.x) {
        const int first = start + EACH * threadIdx.x;
        u32 hits = 0;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (first + k >= pairs) break;
            const int id = ids[first + k] - first_expert;
            if (id == e) hits |= 1u << k;
            if (e == 0 && (id < 0 || id >= experts)) slot_of[first + k] = -1;
        }
        // Here all threads have finished reading the previous sums.
        if (!__syncthreads_or(hits)) continue;
        int before = __popc(hits);
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFF, before, offset);
            if (lane >= offset) before += other;
        }
        if (lane == 31) of_warps[warp] = before;
        __syncthreads();
        int slot = at + before - __popc(hits);
        for (int w = 0; w < 32; w++) {
            if (w < warp) slot += of_warps[w];
            at += of_warps[w];
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (!(hits >> k & 1)) continue;
            slot_of[first + k] = slot;
            pair_of[slot] = first + k;
            slot++;
        }
    }
}

// Grid (rows / GATHERED_ROWS, columns / GATHERED_COLUMNS), 256 threads. Each thread has eight columns of some rows. Neighbouring blocks have the same
// columns, which stay in L2 for all tokens.
#define LANES (GATHERED_COLUMNS / 8)
#define ROWS_AT_ONCE (256 / LANES)
extern "C" __global__ void __launch_bounds__(256) gather(X* y, const X* x, const int* pair_of, const float* weights, int rows, int K, int C) {
    start_successors();
    wait_for_predecessors();
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
                                            int words, int blocks, int rows, int tokens) {
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
