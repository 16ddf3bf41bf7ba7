// Rows of tokens by slot. `pair_of` is -1 in rows of no choice; the token of choice `pair` is `pair / K`; `slot_of` is -1 for choices without
// a row. `weights` may be null.

// Eight values of a row, times the weight of its choice.
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
    const int* pair_of;
    const float* weights;
    int K, columns;
    bool wide;
    struct Raw { Eight<X> values; float weight; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        Raw raw = {{}, 1.0f};
        const int pair = pair_of[row];
        if (pair < 0) return raw;
        raw.values = fetch8(x + (u64)(pair / K) * columns + column, columns - column, wide);
        if (weights) raw.weight = weights[pair];
        return raw;
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int, int) const {
        return weights ? weighed(raw.values, raw.weight) : raw.values;
    }
};

// Grid (columns / 128, rows / 128) of the padded matrix, 256 threads.
extern "C" __global__ void __launch_bounds__(256, 4)
    gather_codes(const X* x, const int* pair_of, const float* weights, int K, const __grid_constant__ Destination to) {
    quantize_tile<HOLDS ? 4 : 8>(to, Gathered{x, pair_of, weights, K, to.columns, to.columns % 8 == 0 && aligned(x)});
}

// Blocks of padded rows.
extern "C" __global__ void __launch_bounds__(1024, 1)
    gather_rows(const X* x, const int* pair_of, const float* weights, int K, const __grid_constant__ Destination to) {
    if constexpr (SHARING != PerRow) return;
    start_row();
    const Gathered from = {x, pair_of, weights, K, to.columns, true};
    const int row = cast_row_number();
    Eight<X> values[ROW_EIGHTS] = {};
#pragma unroll
    for (int k = 0; k < ROW_EIGHTS; k++)
        if (row < to.rows && row_column(k) < to.columns) values[k] = from.values(from.fetch(row, row_column(k)), 0, 0);
    cast_row(to, values);
}
#else
__device__ __forceinline__ int padded128(int n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Grid of experts, of which number `first` is the first.
extern "C" __global__ void __launch_bounds__(1024) count_slots(int* counts, const int* ids, int pairs, int first) {
    start_successors();
    wait_for_predecessors();
    int n = 0;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) n += ids[i] == first + (int)blockIdx.x;
    n = block_sum(n);
    if (threadIdx.x == 0) counts[blockIdx.x] = n;
}

// Grid of experts, 32 warps. A block lists the choices of its expert in order, eight candidates per thread at a time; the first block also
// marks those of experts outside the grid.
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
        // All threads have finished with the previous sums.
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

// Grid of rows; threads stride over channels.
extern "C" __global__ void gather(X* y, const X* x, const int* pair_of, const float* weights, int K, int C) {
    start_successors();
    wait_for_predecessors();
    const int pair = pair_of[blockIdx.x], token = pair / K;
    const float weight = weights && pair >= 0 ? weights[pair] : 1.0f;
    X* const to = y + (u64)blockIdx.x * C;
    const X* const from = x + (u64)token * C;
    const int eights = C % 8 == 0 && aligned(y, x) ? C / 8 : 0;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        Eight<X> e = {};
        if (pair >= 0) e = load8(from + 8 * g);
        store8(to + 8 * g, weights ? weighed(e, weight) : e);
    }
    for (int c = 8 * eights + threadIdx.x; c < C; c += blockDim.x) store(&to[c], pair < 0 ? 0.0f : load(from[c]) * weight);
}

// Grid of rows; threads stride over words of 16 codes, and over the scales of a row, which are `rows` apart, or `tokens` in `from_scales`.
extern "C" __global__ void gather_quantized(uint4* codes, float* scales, const uint4* from, const float* from_scales, const int* pair_of, int K,
                                            int words, int blocks, int rows, int tokens) {
    const int row = blockIdx.x, pair = pair_of[row], token = pair / K;
    for (int w = threadIdx.x; w < words; w += blockDim.x)
        codes[(u64)row * words + w] = pair < 0 ? make_uint4(0, 0, 0, 0) : from[(u64)token * words + w];
    for (int b = threadIdx.x; b < blocks; b += blockDim.x)
        scales[(u64)b * rows + row] = pair < 0 ? 1.0f : from_scales[(u64)b * tokens + token];
}

// Each block takes every gridDim-th row.
extern "C" __global__ void __launch_bounds__(256) gather_amax(float* amax, const X* x, const int* pair_of, const float* weights, int rows, int K, int C) {
    const int eights = C % 8 == 0 && aligned(x) ? C / 8 : 0;
    float largest = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const int pair = pair_of[row];
        if (pair < 0) continue;
        const float weight = weights ? weights[pair] : 1.0f;
        const X* const from = x + (u64)(pair / K) * C;
        for (int g = threadIdx.x; g < eights; g += blockDim.x) largest = fmaxf(largest, largest8(weighed(load8(from + 8 * g), weight)));
        for (int c = 8 * eights + threadIdx.x; c < C; c += blockDim.x) {
            X y;
            store(&y, load(from[c]) * weight);
            largest = fmaxf(largest, fabsf(load(y)));
        }
    }
    block_raise(amax, largest);
}

// Grid of tokens; threads stride over channels. Choices are added in order.
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
#endif
