// STRIP is the number of rows per strip of `rmsnorm_strips` (cuda.rs).

// With CENTERED, these kernels are LayerNorm. Their statistics are T values of rstd, then T means. After the weight, they
// have a bias as argument, which may be null.
#ifndef CENTERED
#define CENTERED 0
#define AND_BIAS
#define BIAS ((const X*)nullptr)
#else
#define AND_BIAS , const X* bias
#define BIAS bias
#endif

// With ADDS_ONE, a normalised value is multiplied by one plus its weight.
#ifndef ADDS_ONE
#define ADDS_ONE 0
#endif
__device__ __forceinline__ float gain(float weight) { return ADDS_ONE ? 1.0f + weight : weight; }

// The statistics that normalise a row. RMSNorm has no mean.
struct Statistics { float rstd, mean; };
__device__ __forceinline__ float rstd_of(float squares, int C, float eps) {
    return 1.0f / sqrtf(squares / C + eps);      // as in cpu.rs; rsqrtf rounds differently
}
__device__ __forceinline__ void put(float* rstd, int rows, int row, Statistics of_row) {
    rstd[row] = of_row.rstd;
    if (CENTERED) rstd[rows + row] = of_row.mean;
}
__device__ __forceinline__ Statistics get(const float* rstd, int rows, int row) {
    return {rstd[row], CENTERED ? rstd[rows + row] : 0.0f};
}
__device__ __forceinline__ float normed(float v, Statistics s) { return (CENTERED ? v - s.mean : v) * s.rstd; }
__device__ __forceinline__ float affine(float v, Statistics s, float weight, float bias) {
    return CENTERED ? fmaf(normed(v, s), weight, bias) : normed(v, s) * gain(weight);
}
__device__ __forceinline__ Eight<X> affine8(const Eight<X>& x, Statistics s, const Eight<X>& weight, const Eight<X>& bias) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = affine(load(x.at[i]), s, load(weight.at[i]), CENTERED ? load(bias.at[i]) : 0.0f);
    return pack8<X>(v);
}
// Returns eight elements of the bias. Without a bias, they are negative zeros, which do not change any sum.
__device__ __forceinline__ Eight<X> bias8(const X* bias, int c, int valid = 8, bool wide = true) {
    if (bias) return fetch8(bias + c, valid, wide);
    Eight<X> none;
#pragma unroll
    for (int i = 0; i < 8; i++) store(&none.at[i], -0.0f);
    return none;
}

// Sums eight channels of a thread.
__device__ __forceinline__ float sum8(const float* v) {
    float sum = v[0];
#pragma unroll
    for (int i = 1; i < 8; i++) sum += v[i];
    return sum;
}
__device__ __forceinline__ float squares8(const float* v, float mean) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float centered = CENTERED ? v[i] - mean : v[i];
        sum = fmaf(centered, centered, sum);
    }
    return sum;
}
// Sums 256 channels by one warp. Every kernel adds these sums in the same order, so statistics are bit-identical for every output.
__device__ __forceinline__ float sum_of_256(float sum) {
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
    return sum;
}

// ROWS is the number of rows that a group of threads processes at a time (eight channels per thread), as in cuda.rs. LANES is the number of lanes of
// a warp per row, and WARPS the maximum number of warps per group.
#define ROWS (8 / (int)sizeof(X))
#define LANES (32 / ROWS)
#define WARPS 32

// Computes `sum_of_256` for ROWS rows at once: the halves of a warp exchange rows. Lane `l` gets the sum of row `l / LANES`.
__device__ __forceinline__ float sums_of_256(float (&v)[ROWS]) {
#pragma unroll
    for (int rows = ROWS / 2, offset = 16; rows > 0; rows /= 2, offset /= 2) {
        const bool upper = threadIdx.x & offset;
#pragma unroll
        for (int k = 0; k < rows; k++) {
            const float kept = upper ? v[k + rows] : v[k], sent = upper ? v[k] : v[k + rows];
            v[k] = kept + __shfl_xor_sync(0xFFFFFFFF, sent, offset);
        }
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], offset);
    return v[0];
}

// Copies eight elements to shared memory asynchronously.
__device__ __forceinline__ void send8(Eight<X>* to, const X* from) {
#pragma unroll
    for (int w = 0; w < sizeof(X) / 2; w++)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(&to->words[w])), "l"((const uint4*)from + w)
                     : "memory");
}

// Return the number of channels in the `i`th 256 channels of a row, and its reciprocal.
__device__ __forceinline__ float channels_of(int i, int C) { return max(0, min(256, C - 256 * i)); }
__device__ __forceinline__ float per_channel_of(int i, int C) { return 1.0f / fmaxf(1.0f, channels_of(i, C)); }

// Returns the statistics of a row from the statistics of each 256 of its channels: the sums of squares or, for LayerNorm, the means and the sums of
// squared distances from these means. LANES neighbouring threads read the same row. LayerNorm merges means and squares as Chan et al. 1983 do,
// relative to the first mean, so that the mean of equal values is exact.
__device__ __forceinline__ Statistics statistics_of(const float* squares, const float* means, int C, float eps) {
    const int parts = (C + 255) / 256;
    if constexpr (CENTERED) {
        const auto of_lanes = [](float v) {
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, offset);
            return v;
        };
        const int first = threadIdx.x % LANES;
        const float pilot = means[0];
        float sum = 0.0f, square = 0.0f;
#pragma unroll 1
        for (int i = first; i < parts; i += LANES) {
            const float distance = means[i] - pilot, weighted = channels_of(i, C) * distance;
            sum += weighted;
            square += fmaf(weighted, distance, squares[i]);
        }
        sum = of_lanes(sum);
        const float shift = sum * (1.0f / C);
        return {rstd_of(fmaf(-sum, shift, of_lanes(square)), C, eps), pilot + shift};
    }
    float total = 0.0f;
    // Reads four sums at a time; sums beyond the last are zero.
    for (int i = 0; i < parts; i += 4) {
        const float4 four = *(const float4*)(squares + i);
        total = total + four.x + four.y + four.z + four.w;
    }
    return {rstd_of(total, C, eps), 0.0f};
}

// The sums of each 256 channels. They are padded so that lanes that read several rows use different banks. They are initially zero.
struct Sums { float squares[ROWS][WARPS + 4], means[CENTERED ? ROWS : 1][WARPS + 4]; };

// A group of whole warps that processes ROWS rows at a time: its barrier and threads, the positions of its sums and of this warp's sum in the block's
// sums, the reciprocal of the number of channels of this warp, and whether this thread has channels.
struct Group {
    int barrier, threads, first, place;
    float per_channel;
    bool mine;
};

// Computes the statistics of ROWS rows of a group. Its first warp writes the statistics of rows from `row0` on that are below `all`. Calls alternate
// two `sums`.
__device__ __forceinline__ void statistics_of_rows(Statistics (&of_rows)[ROWS], float* rstd, int row0, int all, const Eight<X>* rows,
                                                   const Group& group, Sums& sums, int C, float eps) {
    const int lane = threadIdx.x % 32, row = lane / LANES;
    float of_thread[ROWS] = {}, means[ROWS] = {};
    // Each pass unpacks the rows under a separate condition. For unconditional passes, the compiler would keep the unpacked values and spill.
    if constexpr (CENTERED) {
        if (group.mine) {
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                float v[8];
                unpack8(rows[k], v);
                of_thread[k] = sum8(v);
            }
        }
        const float mean = sums_of_256(of_thread) * group.per_channel;
        if (lane % LANES == 0) sums.means[row][group.place] = mean;
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            means[k] = __shfl_sync(0xFFFFFFFF, mean, k * LANES);
            of_thread[k] = 0.0f;
        }
    }
    if (group.mine) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            float v[8];
            unpack8(rows[k], v);
            of_thread[k] = squares8(v, means[k]);
        }
    }
    const float squares = sums_of_256(of_thread);
    if (lane % LANES == 0) sums.squares[row][group.place] = squares;
    asm volatile("bar.sync %0, %1;" ::"r"(group.barrier), "r"(group.threads) : "memory");
    const Statistics s = statistics_of(sums.squares[row] + group.first, sums.means[CENTERED ? row : 0] + group.first, C, eps);
    if (group.place == group.first && lane % LANES == 0 && row0 + row < all) put(rstd, all, row0 + row, s);
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        of_rows[k] = {__shfl_sync(0xFFFFFFFF, s.rstd, k * LANES), CENTERED ? __shfl_sync(0xFFFFFFFF, s.mean, k * LANES) : 0.0f};
}

// Computes `affine8` for ROWS rows in place.
__device__ __forceinline__ void affine_rows(Eight<X> (&x)[ROWS], const Statistics (&s)[ROWS], const Eight<X>& weight,
                                            const Eight<X>& bias) {
    float v[ROWS][8], w[8], b[8] = {};
    unpack8(weight, w);
    if (CENTERED) unpack8(bias, b);
#pragma unroll
    for (int k = 0; k < ROWS; k++) unpack8(x[k], v[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) v[k][i] = affine(v[k][i], s[k], w[i], b[i]);
    }
#pragma unroll
    for (int k = 0; k < ROWS; k++) x[k] = pack8<X>(v[k]);
}

// Clears the sums of a block.
__device__ __forceinline__ void clear(Sums (&sums)[2]) {
    for (int i = threadIdx.x; i < sizeof(sums) / sizeof(float); i += blockDim.x) ((float*)sums)[i] = 0.0f;
    __syncthreads();
}

// The next ROWS rows of a thread's channels, which are prefetched. RMSNorm prefetches them to registers. LayerNorm has no free registers and
// prefetches them to the thread's slots in shared memory.
#if CENTERED
struct Ahead {
    Eight<X>* slots;
    // Sets the slots to zeros, for threads without channels.
    __device__ __forceinline__ void clear() {
        for (int k = 0; k < ROWS; k++) slots[k * blockDim.x] = {};
    }
    __device__ __forceinline__ void fetch(const X* x, int C, int rows) {
        Eight<X>* to = slots;
#pragma unroll
        for (int k = 0; k < ROWS; k++, x += C, to += blockDim.x) if (k < rows) send8(to, x);
    }
    // A thread reads only its own copies, and a warp's accesses to shared memory are in order, so no barrier is needed.
    __device__ __forceinline__ void take(Eight<X> (&now)[ROWS]) const {
        asm volatile("cp.async.wait_all;" ::: "memory");
        const Eight<X>* from = slots;
#pragma unroll
        for (int k = 0; k < ROWS; k++, from += blockDim.x) now[k] = *from;
    }
};
#else
struct Ahead {
    Eight<X> next[ROWS] = {};
    __device__ __forceinline__ Ahead(Eight<X>*) {}
    __device__ __forceinline__ void clear() {}
    __device__ __forceinline__ void fetch(const X* x, int C, int rows) {
#pragma unroll
        for (int k = 0; k < ROWS; k++, x += C) if (k < rows) next[k] = load8(x);
    }
    __device__ __forceinline__ void take(Eight<X> (&now)[ROWS]) const {
#pragma unroll
        for (int k = 0; k < ROWS; k++) now[k] = next[k];
    }
};
#endif

#ifndef FORMAT
// Computes rstd and the amaxes of rmsnorm (tensor, rows, columns; pointers may be null) for aligned rows of C <= 8192 channels, a multiple of 8.
// Column amaxes need one float of dynamic shared memory per column, after the slots of `Ahead`. Persistent blocks process ROWS rows at a time and
// prefetch the next rows.
extern "C" __global__ void __launch_bounds__(1024, 1)
    rmsnorm_amax(float* rstd, float* amax, float* row_amax, float* column_amax, const X* x, const X* weight AND_BIAS, int rows, int C,
                 float eps) {
    __shared__ alignas(16) Sums sums[2];
    extern __shared__ Eight<X> slots_of_the_launch[];
    const int lane = threadIdx.x % 32, c = 8 * threadIdx.x;
    const bool mine = c < C;
    Eight<X> w = {}, b = {}, in_columns = {};
    float largest = 0.0f;
    if (mine) w = load8(weight + c);
    if (mine && CENTERED) b = bias8(BIAS, c);
    Ahead ahead = {slots_of_the_launch + threadIdx.x};
    if (!mine) ahead.clear();
    const auto fetch = [&](int row0) {
        if (mine) ahead.fetch(x + (u64)row0 * C + c, C, rows - row0);
    };
    const Group group = {0, (int)blockDim.x, 0, (int)threadIdx.x / 32, per_channel_of(threadIdx.x / 32, C), mine};
    int turn = 0;
    fetch(blockIdx.x * ROWS);
    clear(sums);
    for (int row0 = blockIdx.x * ROWS; row0 < rows; row0 += gridDim.x * ROWS, turn ^= 1) {
        Eight<X> now[ROWS];
        ahead.take(now);
        fetch(row0 + gridDim.x * ROWS);
        Statistics of_rows[ROWS];
        statistics_of_rows(of_rows, rstd, row0, rows, now, group, sums[turn], C, eps);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (row0 + k >= rows) continue;
            const Eight<X> y = affine8(now[k], of_rows[k], w, b);
            const float of_row = mine ? largest8(y) : 0.0f;
            largest = fmaxf(largest, of_row);
            if (column_amax) in_columns = larger8(in_columns, y);
            if (row_amax) {
                const u32 of_warp = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(of_row));
                if (lane == 0) atomicMax((u32*)row_amax + row0 + k, of_warp);
            }
        }
    }
    if (column_amax) {
        // The atomics are coalesced: neighbouring threads raise neighbouring amaxes.
        float* const columns = (float*)(slots_of_the_launch + CENTERED * ROWS * blockDim.x);
        float v[8];
        unpack8(in_columns, v);
        if (mine) store8(columns + c, pack8<f32>(v));
        __syncthreads();
        for (int i = threadIdx.x; i < C; i += blockDim.x) atomicMax((u32*)column_amax + i, __float_as_uint(fabsf(columns[i])));
    }
    block_raise(amax, largest);
}

// PLACES is the number of slots of a thread. If a row is aligned and short enough, it stays in registers, with eight channels per thread and slot.
#define PLACES 2

// One block per row. `y` and `amax` may be null. `amax` is raised to the amax of y even if y is not written.
extern "C" __global__ void __launch_bounds__(512, sizeof(X) == 2 ? 3 : 2)
    rmsnorm(X* y, float* rstd, float* amax, const X* x, const X* weight AND_BIAS, int C, float eps) {
    const u64 row = (u64)blockIdx.x * C;
    float largest = 0.0f;
    start_successors();
    wait_for_predecessors();
    if (C % 8 == 0 && C <= 8 * PLACES * blockDim.x && aligned(y, x, weight, BIAS)) {
        __shared__ alignas(16) float squares[16 * PLACES], means[CENTERED ? 16 * PLACES : 1];
        Eight<X> v[PLACES], w[PLACES];
#pragma unroll
        for (int k = 0; k < PLACES; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            v[k] = {};
            if (c < C) v[k] = load8(x + row + c);
        }
#pragma unroll
        for (int k = 0; k < PLACES; k++) {
            const int part = threadIdx.x / 32 + k * (blockDim.x / 32), c = 8 * (threadIdx.x + k * blockDim.x);
            float a[8], mean = 0.0f;
            unpack8(v[k], a);
            if ((y || amax) && c < C) w[k] = load8(weight + c);
            if constexpr (CENTERED) {
                mean = sum_of_256(sum8(a)) * per_channel_of(part, C);
                if (threadIdx.x % 32 == 0) means[part] = mean;
            }
            const float of_part = sum_of_256(CENTERED && c >= C ? 0.0f : squares8(a, mean));
            if (threadIdx.x % 32 == 0) squares[part] = of_part;
        }
        for (int part = blockDim.x / 32 * PLACES + threadIdx.x; part < 16 * PLACES; part += blockDim.x) squares[part] = 0.0f;
        __syncthreads();
        const Statistics s = statistics_of(squares, means, C, eps);
        if (threadIdx.x == 0) put(rstd, gridDim.x, blockIdx.x, s);
        if (!y && !amax) return;
#pragma unroll
        for (int k = 0; k < PLACES; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c >= C) continue;
            float a[8], b[8] = {};
            if (CENTERED) unpack8(bias8(BIAS, c), b);
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = affine(load(v[k].at[i]), s, load(w[k].at[i]), b[i]);
            v[k] = pack8<X>(a);
            if (y) store8(y + row + c, v[k]);
            if (amax) largest = fmaxf(largest, largest8(v[k]));
        }
    } else {
        Statistics s = {};
        if constexpr (CENTERED) {
            for (int c = threadIdx.x; c < C; c += blockDim.x) s.mean += load(x[row + c]);
            s.mean = block_sum(s.mean) / C;
        }
        float squares = 0.0f;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            const float v = CENTERED ? load(x[row + c]) - s.mean : load(x[row + c]);
            squares += v * v;
        }
        s.rstd = rstd_of(block_sum(squares), C, eps);
        if (threadIdx.x == 0) put(rstd, gridDim.x, blockIdx.x, s);
        if (!y && !amax) return;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            X out;
            store(&out, affine(load(x[row + c]), s, load(weight[c]), BIAS ? load(BIAS[c]) : -0.0f));
            if (y) y[row + c] = out;
            largest = fmaxf(largest, fabsf(load(out)));
        }
    }
    block_raise(amax, largest);
}

// Reduces the sums of a row over a block with a single barrier. Consecutive calls must alternate `warps`.
__device__ __forceinline__ void row_sums(float* x, float (*warps)[32]) {
#pragma unroll
    for (int n = 0; n <= CENTERED; n++) {
        for (int offset = 16; offset > 0; offset /= 2) x[n] += __shfl_xor_sync(0xFFFFFFFF, x[n], offset);
        if (threadIdx.x % 32 == 0) warps[n][threadIdx.x / 32] = x[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n <= CENTERED; n++) {
        x[n] = warps[n][0];
        for (int w = 1; w < blockDim.x / 32; w++) x[n] += warps[n][w];
    }
}

// Copies eight saved values or codes asynchronously. Exponents, one byte per two threads, are loaded directly.
__device__ __forceinline__ void send8(Eight<X>* to, const Exact<X>& x, u64 row, int c) { send8(to, x.x + row * x.C + c); }
__device__ __forceinline__ Eight<X> sent8(const Exact<X>& x, const Eight<X>* from, u32) { return *from; }
__device__ __forceinline__ u32 exponent_of(const Exact<X>&, u64, int) { return 0; }
__device__ __forceinline__ void send8(Eight<X>* to, const Compressed<X>& x, u64 row, int c) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(x.codes + row * x.C + c) : "memory");
}
__device__ __forceinline__ Eight<X> sent8(const Compressed<X>& x, const Eight<X>* from, u32 exponent) {
    return x.values({load8((const e4m3*)from), exponent});
}
__device__ __forceinline__ u32 exponent_of(const Compressed<X>& x, u64 row, int c) { return x.exponent(row, c); }

// Returns the gradient by one channel, from the sums of a row: the sum of dy · weight · normed and, for LayerNorm, the sum of dy · weight.
__device__ __forceinline__ float dx_of(float d, float weight, float v, Statistics s, const float* sums, int C) {
    const float centered = d * gain(weight) - normed(v, s) * (sums[0] / C);
    return s.rstd * (CENTERED ? centered - sums[CENTERED] / C : centered);
}

// Each block processes every gridDim-th row and writes its partial dweight to its row of `partial`. LayerNorm writes its partial dbias gridDim rows
// below. If `residual` is not null, it is added to dx. If `amax` is not null, it is raised to the amax of the result. A thread has eight channels.
// The next `depth - 1` (1 to 3) rows are prefetched to dynamic shared memory.
template <class Saved>
__device__ __forceinline__ void backward_rows(X* dx, float* partial, float* amax, const X* dy, const Saved& x, const X* weight,
                                              const float* rstd, const X* residual, int rows, int C, int depth) {
    __shared__ float warps[2][1 + CENTERED][32];
    partial += (u64)blockIdx.x * C;
    float* const partial_bias = partial + (u64)gridDim.x * C;
    float largest = 0.0f;
    int turn = 0;
    if (x.wide(C) && C <= 8 * blockDim.x && aligned(dx, partial, dy, weight, residual)) {
        extern __shared__ uint4 rows_of_the_launch[];
        const int c = 8 * threadIdx.x, kinds = residual ? 3 : 2;
        const bool mine = c < C;
        const auto place = [&](int kind, int stage) { return (Eight<X>*)rows_of_the_launch + (stage * kinds + kind) * blockDim.x + threadIdx.x; };
        const auto send = [&](int row, int stage) {
            if (mine && row < rows) {
                const u64 at = (u64)row * C + c;
                send8(place(0, stage), dy + at);
                send8(place(1, stage), x, row, c);
                if (residual) send8(place(2, stage), residual + at);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        Eight<X> w = {};
        float sums[8] = {}, bias_sums[8] = {};
        if (mine) w = load8(weight + c);
        for (int stage = 0; stage < depth - 1; stage++) send(blockIdx.x + stage * gridDim.x, stage);
        Statistics next_s = get(rstd, rows, blockIdx.x);
        u32 next_exponent = mine ? exponent_of(x, blockIdx.x, c) : 0;
        for (int row = blockIdx.x, stage = 0; row < rows; row += gridDim.x, turn ^= 1, stage = stage + 1 < depth ? stage + 1 : 0) {
            const Statistics s = next_s;
            const u32 exponent = next_exponent;
            // Reuses the slot of the previous row. Each thread reads only its own copies.
            send(row + (depth - 1) * gridDim.x, stage > 0 ? stage - 1 : depth - 1);
            if (row + gridDim.x < rows) {
                next_s = get(rstd, rows, row + gridDim.x);
                if (mine) next_exponent = exponent_of(x, row + gridDim.x, c);
            }
            if (depth == 2) asm volatile("cp.async.wait_group 1;" ::: "memory");
            else if (depth == 3) asm volatile("cp.async.wait_group 2;" ::: "memory");
            else asm volatile("cp.async.wait_group 3;" ::: "memory");
            Eight<X> d = {}, v = {};
            if (mine) {
                d = *place(0, stage);
                v = sent8(x, place(1, stage), exponent);
            }
            float sum[1 + CENTERED] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float n = normed(load(v.at[i]), s);
                sum[0] += load(d.at[i]) * gain(load(w.at[i])) * n;
                sums[i] += load(d.at[i]) * n;
                if (CENTERED) {
                    sum[CENTERED] += load(d.at[i]) * load(w.at[i]);
                    bias_sums[i] += load(d.at[i]);
                }
            }
            row_sums(sum, warps[turn]);
            if (!mine) continue;
            float out[8];
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = dx_of(load(d.at[i]), load(w.at[i]), load(v.at[i]), s, sum, C);
            Eight<X> rounded = pack8<X>(out);
            if (residual) {
                const Eight<X> more = *place(2, stage);
                unpack8(rounded, out);
#pragma unroll
                for (int i = 0; i < 8; i++) out[i] += load(more.at[i]);
                rounded = pack8<X>(out);
            }
            store8(dx + (u64)row * C + c, rounded);
            if (amax) largest = fmaxf(largest, largest8(rounded));
        }
        if (mine) store8(partial + c, pack8<f32>(sums));
        if (mine && CENTERED) store8(partial_bias + c, pack8<f32>(bias_sums));
        block_raise(amax, largest);
        return;
    }
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        partial[c] = 0.0f;
        if (CENTERED) partial_bias[c] = 0.0f;
    }
    for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        const X* d = dy + (u64)row * C;
        const Statistics s = get(rstd, rows, row);
        float sum[1 + CENTERED] = {};
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            const float n = normed(load(x.value(row, c)), s);
            sum[0] += load(d[c]) * gain(load(weight[c])) * n;
            partial[c] += load(d[c]) * n;
            if (CENTERED) {
                sum[CENTERED] += load(d[c]) * load(weight[c]);
                partial_bias[c] += load(d[c]);
            }
        }
        row_sums(sum, warps[turn]);
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            X* out = dx + (u64)row * C + c;
            store(out, dx_of(load(d[c]), load(weight[c]), load(x.value(row, c)), s, sum, C));
            if (residual) store(out, load(*out) + load(residual[(u64)row * C + c]));
            largest = fmaxf(largest, fabsf(load(*out)));
        }
    }
    block_raise(amax, largest);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    rmsnorm_backward(X* dx, float* partial, float* amax, const X* dy, const X* x, const X* weight, const float* rstd,
                     const X* residual, int rows, int C, int depth) {
    backward_rows(dx, partial, amax, dy, Exact<X>{x, C}, weight, rstd, residual, rows, C, depth);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    rmsnorm_backward_compressed(X* dx, float* partial, float* amax, const X* dy, const e4m3* codes,
                                const unsigned char* scale_inv, const X* weight, const float* rstd, const X* residual, int rows,
                                int C, int depth) {
    backward_rows(dx, partial, amax, dy, Compressed<X>{codes, scale_inv, C}, weight, rstd, residual, rows, C, depth);
}
#else
// A source in which the weights of a thread's columns are reused for all rows of its tile.
struct Normed {
    const X* x;
    const float* rstd;
    int T, C;
    bool wide;
    Eight<X> weight, bias;
    struct Raw { Eight<X> x; Statistics of_row; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        return {fetch8(x + (u64)row * C + column, C - column, wide), get(rstd, T, row)};
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int, int) const { return affine8(raw.x, raw.of_row, weight, bias); }
};

// Grid (C / 128, T / 128), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 4)
    rmsnorm_codes(const X* x, const X* weight AND_BIAS, const float* rstd, const __grid_constant__ Destination to) {
    const bool wide = to.columns % 8 == 0 && aligned(x, weight, BIAS);
    const int column = blockIdx.x * TILE + eight_column();
    Normed source = {x, rstd, to.rows, to.columns, wide};
    if (column < to.columns) {
        source.weight = fetch8(weight + column, to.columns - column, wide);
        if (CENTERED) source.bias = bias8(BIAS, column, to.columns - column, wide);
    }
    // Goes from the end of the matrix to its start also with per-row scales, because `rmsnorm_amax` has read the end last.
    quantize_tile<4>(to, source, first_row(false));
}

// Computes rstd and casts in one pass, with a scale per row, for rows of C <= 8192 channels, a multiple of 8. One block per padded row.
extern "C" __global__ void __launch_bounds__(1024, 1)
    rmsnorm_rows(float* rstd, const X* x, const X* weight AND_BIAS, float eps, const __grid_constant__ Destination to) {
    if constexpr (SHARING != PerRow) return;
    // The statistics of each 256 channels, as `statistics_of` reads them.
    __shared__ alignas(16) float squares[WARPS + 4], means[CENTERED ? WARPS + 4 : 1];
    start_successors();
    const int C = to.columns, c = row_column<1>(0), warp = threadIdx.x / 32, row = blockIdx.x;
    const bool mine = c < C, inside = row < to.rows;
    Eight<X> values[1] = {}, w = {}, b = {};
    if (mine) w = load8(weight + c);
    if (mine && CENTERED) b = bias8(BIAS, c);
    if (threadIdx.x < WARPS + 4) squares[threadIdx.x] = 0.0f;
    __syncthreads();
    wait_for_predecessors();
    if (mine && inside) values[0] = load8(x + (u64)row * C + c);
    float v[8], mean = 0.0f;
    unpack8(values[0], v);
    if constexpr (CENTERED) {
        mean = sum_of_256(sum8(v)) * per_channel_of(warp, C);
        if (threadIdx.x % 32 == 0) means[warp] = mean;
    }
    const float square = sum_of_256(CENTERED && !mine ? 0.0f : squares8(v, mean));
    if (threadIdx.x % 32 == 0) squares[warp] = square;
    __syncthreads();
    if (inside) {
        const Statistics s = statistics_of(squares, means, C, eps);
        if (threadIdx.x == 0) put(rstd, to.rows, row, s);
        if (mine) values[0] = affine8(values[0], s, w, b);
    }
    cast_row(to, values);
}

// Computes rstd and casts in one pass, with a per-tensor scale, for many rows of C <= 7168 channels, a multiple of 16. Persistent blocks process
// strips of 32 rows, so that writes of the transpose are whole sectors. Groups of threads process ROWS rows of the strip at a time and
// prefetch the next rows. If there is a transpose, dynamic shared memory holds the codes of a strip. For a LayerNorm, it also holds the slots of
// `Ahead`, and the weight and bias of each eight columns.
extern "C" __global__ void __launch_bounds__(1024, 1)
    rmsnorm_strips(float* rstd, const X* x, const X* weight AND_BIAS, float eps, int group_threads,
                   const __grid_constant__ Destination to) {
    extern __shared__ uint4 strip_of_the_launch[];
    if constexpr (SHARING != PerTensor) return;
    // The sums of 8, 4, 2 or 1 groups are next to each other.
    __shared__ alignas(16) Sums sums[2];
    __shared__ Limits limits;
    const int rows = to.rows, columns = to.columns, padded_rows = padded(rows);
    const float scale = *to.scale;
    const int groups = blockDim.x / group_threads, number = threadIdx.x / group_threads, step = groups * ROWS;
    const int c = threadIdx.x % group_threads * 8, first = WARPS / groups * number;
    const bool mine = c < columns;
    const Group group = {1 + number, group_threads, first, first + c / 256, per_channel_of(c / 256, columns), mine};
    // In the lower rows, the halves of each 128 bytes are exchanged, to avoid bank conflicts in the transpose.
    const int pitch = (columns + 127) / 128 * 128;
    const auto at = [&](int row, int column) { return (unsigned char*)strip_of_the_launch + row * pitch + (column ^ row / 16 * 64); };
    Eight<X>* const slots = (Eight<X>*)(strip_of_the_launch + (to.transposed ? STRIP * pitch / 16 : 0));
    Eight<X>* const parameters = slots + ROWS * blockDim.x + c / 8 * 2;
    Eight<X> w = {}, b = {};
    if (mine) w = load8(weight + c);
    if (CENTERED && mine && number == 0) {
        parameters[0] = w;
        parameters[1] = bias8(BIAS, c);
    }
    Ahead ahead = {slots + threadIdx.x};
    if (!mine) ahead.clear();
    const auto fetch = [&](int row0) {
        if (mine && row0 >= 0) ahead.fetch(x + (u64)row0 * columns + c, columns, rows - row0);
    };
    if (threadIdx.x < 32) limits = limits_of<FORMAT>(scale);
    Seen seen;
    // Strips go from the end of the matrix to its start, as in `first_row`.
    int turn_of_sums = 0, strip0 = ((padded_rows - 1) / STRIP - (int)blockIdx.x) * STRIP;
    fetch(strip0 + number * ROWS);
    clear(sums);
    for (; strip0 >= 0; strip0 -= gridDim.x * STRIP) {
#pragma unroll 1
        for (int row = number * ROWS; row < STRIP; row += step, turn_of_sums ^= 1) {
            const int out = strip0 + row;
            Eight<X> now[ROWS];
            ahead.take(now);
            fetch(row + step < STRIP ? out + step : strip0 - (int)gridDim.x * STRIP + number * ROWS);
            Statistics of_rows[ROWS];
            statistics_of_rows(of_rows, rstd, out, rows, now, group, sums[turn_of_sums], columns, eps);
            if (!mine || out >= padded_rows) continue;
            if constexpr (CENTERED) {
                w = parameters[0];
                b = parameters[1];
            }
            affine_rows(now, of_rows, w, b);
            uint2 codes[ROWS];
            encode_rows<FORMAT>(codes, now, rows - out, scale, limits, seen);
            if (to.codes) {
                unsigned char* p = to.codes + (u64)out * columns + c;
#pragma unroll
                for (int k = 0; k < ROWS; k++, p += columns) *(uint2*)p = codes[k];
            }
            if (to.transposed) {
                unsigned char* p = at(row, c);
#pragma unroll
                for (int k = 0; k < ROWS; k++, p += pitch) *(uint2*)p = codes[k];
            }
        }
        if (!to.transposed) continue;
        __syncthreads();
        for (int i = threadIdx.x; i < columns / 2; i += blockDim.x) {
            const int half = i % 2 * 16, column = i / 2 * 4;
            unsigned char* const transposed = to.transposed + (u64)column * padded_rows + strip0 + half;
            if (strip0 + half < padded_rows) turn([&](int k) { return *(const u32*)at(half + k, column); }, transposed, padded_rows);
        }
        __syncthreads();
    }
    measure(to, seen, [] {});
}
#endif
