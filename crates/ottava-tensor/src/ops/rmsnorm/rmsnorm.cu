// Where rows are aligned and short enough, they lie in registers, eight channels per thread and place. The squares of a row
// are added by 256 channels: eight in a thread, those of a warp in pairs, and then the 256s in order. All kernels here
// keep to that order, so that they agree on rstd.
__device__ __forceinline__ float sum_of_256(const float* v) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
    return sum;
}

// As in cpu.rs; rsqrtf rounds differently.
__device__ __forceinline__ float rstd_of(const float* sums, int C, float eps) {
    float sum = 0.0f;
    for (int i = 0; i < (C + 255) / 256; i++) sum += sums[i];
    return 1.0f / sqrtf(sum / C + eps);
}

#ifndef FORMAT
#define PLACES 2
#ifndef ROW_BLOCKS
#define ROW_BLOCKS 3
#endif

// One block per row. Any of `y`, `sum`, `residual` and `amax` may be null: with `residual` the row that is normalised is
// x + residual, which goes to `sum`; `amax` is raised to the largest absolute value of y.
extern "C" __global__ void __launch_bounds__(512, sizeof(X) == 2 ? ROW_BLOCKS : 2)
    rmsnorm(X* y, float* rstd, X* sum, float* amax, const X* x, const X* residual, const X* weight, int C, float eps) {
    const u64 row = (u64)blockIdx.x * C;
    float largest = 0.0f;
    if (C % 8 == 0 && C <= 8 * PLACES * blockDim.x && aligned(y, sum, x, residual, weight)) {
        __shared__ float sums[16 * PLACES];
        Eight<X> v[PLACES], w[PLACES];
#pragma unroll
        for (int k = 0; k < PLACES; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            v[k] = {};
            if (c >= C) continue;
            v[k] = load8(x + row + c);
            if (residual) w[k] = load8(residual + row + c);
        }
#pragma unroll
        for (int k = 0; k < PLACES; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            float a[8];
            unpack8(v[k], a);
            if (residual && c < C) {
#pragma unroll
                for (int i = 0; i < 8; i++) a[i] += load(w[k].at[i]);
                v[k] = pack8<X>(a);
                unpack8(v[k], a);
                store8(sum + row + c, v[k]);
            }
            if (y && c < C) w[k] = load8(weight + c);
            const float total = sum_of_256(a);
            if (threadIdx.x % 32 == 0) sums[(threadIdx.x + k * blockDim.x) / 32] = total;
        }
        __syncthreads();
        const float r = rstd_of(sums, C, eps);
        if (threadIdx.x == 0) rstd[blockIdx.x] = r;
        if (!y) return;
#pragma unroll
        for (int k = 0; k < PLACES; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c >= C) continue;
            float a[8];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = load(v[k].at[i]) * r * load(w[k].at[i]);
            v[k] = pack8<X>(a);
            store8(y + row + c, v[k]);
            if (amax) largest = fmaxf(largest, largest8(v[k]));
        }
    } else {
        const X* in = residual ? sum : x;
        float squares = 0.0f;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            if (residual) store(&sum[row + c], load(x[row + c]) + load(residual[row + c]));
            squares += load(in[row + c]) * load(in[row + c]);
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / C + eps);
        if (threadIdx.x == 0) rstd[blockIdx.x] = r;
        if (!y) return;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            store(&y[row + c], load(in[row + c]) * r * load(weight[c]));
            largest = fmaxf(largest, fabsf(load(y[row + c])));
        }
    }
    block_raise(amax, largest);
}

// The sum of one value per thread with a single barrier: `warps` must be another one than in the call before.
__device__ __forceinline__ float row_sum(float x, float* warps) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < blockDim.x / 32; w++) x += warps[w];
    return x;
}

// Each block takes every gridDim-th row and leaves its part of dweight in its row of `partial`. `residual`, if not null, is
// added to dx. A thread keeps eight channels, and while one row is worked on, the next is on its way.
extern "C" __global__ void __launch_bounds__(1024) rmsnorm_backward(X* dx, float* partial, const X* dy, const X* x, const X* weight,
                                                                    const float* rstd, const X* residual, int rows, int C) {
    __shared__ float warps[2][32];
    partial += (u64)blockIdx.x * C;
    int turn = 0;
    if (C % 8 == 0 && C <= 8 * blockDim.x && aligned(dx, partial, dy, x, weight, residual)) {
        const int c = 8 * threadIdx.x;
        const bool mine = c < C;
        Eight<X> w = {}, next_d = {}, next_v = {};
        float sums[8] = {}, next_r = 0.0f;
        const auto fetch = [&](int row) {
            if (row >= rows) return;
            next_r = rstd[row];
            if (!mine) return;
            next_d = load8(dy + (u64)row * C + c);
            next_v = load8(x + (u64)row * C + c);
        };
        if (mine) w = load8(weight + c);
        fetch(blockIdx.x);
        for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
            const float r = next_r;
            const Eight<X> d = next_d, v = next_v;
            Eight<X> more;
            if (residual && mine) more = load8(residual + (u64)row * C + c);
            fetch(row + gridDim.x);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float normed = load(v.at[i]) * r;
                sum += load(d.at[i]) * load(w.at[i]) * normed;
                sums[i] += load(d.at[i]) * normed;
            }
            const float projection = row_sum(sum, warps[turn]) / C;
            if (!mine) continue;
            float out[8];
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = r * (load(d.at[i]) * load(w.at[i]) - load(v.at[i]) * r * projection);
            Eight<X> rounded = pack8<X>(out);
            if (residual) {
                unpack8(rounded, out);
#pragma unroll
                for (int i = 0; i < 8; i++) out[i] += load(more.at[i]);
                rounded = pack8<X>(out);
            }
            store8(dx + (u64)row * C + c, rounded);
        }
        if (mine) store8(partial + c, pack8<f32>(sums));
        return;
    }
    for (int c = threadIdx.x; c < C; c += blockDim.x) partial[c] = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        const X *d = dy + (u64)row * C, *v = x + (u64)row * C;
        const float r = rstd[row];
        float sum = 0.0f;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            sum += load(d[c]) * load(weight[c]) * (load(v[c]) * r);
            partial[c] += load(d[c]) * (load(v[c]) * r);
        }
        const float projection = row_sum(sum, warps[turn]) / C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            X* out = dx + (u64)row * C + c;
            store(out, r * (load(d[c]) * load(weight[c]) - load(v[c]) * r * projection));
            if (residual) store(out, load(*out) + load(residual[(u64)row * C + c]));
        }
    }
}
#else
struct Normed {
    const X *x, *weight;
    const float* rstd;
    int C;
    bool wide;
    struct Raw { Eight<X> x, weight; float rstd; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        return {fetch8(x + (u64)row * C + column, C - column, wide), fetch8(weight + column, C - column, wide), rstd[row]};
    }
    __device__ __forceinline__ void values(const Raw& raw, float* v) const {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = load(raw.x.at[i]) * raw.rstd * load(raw.weight.at[i]);
        round8(v);
    }
};

// Grid (C / 128, T / 128), 256 threads. For shapes that the kernel below does not take.
extern "C" __global__ void __launch_bounds__(256, 3) rmsnorm_codes(DESTINATION, const X* x, const X* weight, const float* rstd) {
    const Destination to = THE_DESTINATION;
    quantize_tile<4>(to, Normed{x, weight, rstd, columns, columns % 8 == 0 && aligned(x, weight)});
}

#ifndef ROWS
#define ROWS 32
#define COLUMNS 512
#define PER_SM 4
#endif
#define THREADS (COLUMNS / 4)

// Rows from memory to codes in one pass: the blocks of a cluster hold ROWS whole rows in their registers, COLUMNS channels each,
// and exchange the sums of squares. A warp has 256 of the channels of every other row. With `residual`, x + residual is
// normalised, and goes to `sum`. Everything is aligned, C is a multiple of 8, and X has two bytes.
template <int BLOCKS>
__device__ __forceinline__ void rmsnorm_rows(const Destination& to, float* rstd, X* sum, const X* x, const X* residual, const X* weight, float eps) {
    __shared__ u32 words[ROWS][COLUMNS / 4];
    __shared__ float sums[ROWS][BLOCKS * COLUMNS / 256 + 1], rstds[ROWS];
    // Remote memory may be written once all blocks of the cluster have started.
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    const int C = to.columns, row0 = blockIdx.y * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int place = warp % (COLUMNS / 256), first = warp / (COLUMNS / 256);
    const int within = place * 256 + lane * 8, column = blockIdx.x * COLUMNS + within;
    const bool inside = column < C;
    Eight<X> v[ROWS / 2], w = {};
    if (inside) w = load8(weight + column);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = row0 + first + 2 * i;
        v[i] = {};
        if (inside && row < to.rows) v[i] = load8(x + (u64)row * C + column);
    }
    if (residual) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const int row = row0 + first + 2 * i;
            if (!inside || row >= to.rows) continue;
            const Eight<X> more = load8(residual + (u64)row * C + column);
            float a[8];
#pragma unroll
            for (int j = 0; j < 8; j++) a[j] = load(v[i].at[j]) + load(more.at[j]);
            v[i] = pack8<X>(a);
            store8(sum + (u64)row * C + column, v[i]);
        }
    }
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        float a[8];
        unpack8(v[i], a);
        const float total = sum_of_256(a);
        if (lane >= BLOCKS) continue;
        const u32 here = (u32)__cvta_generic_to_shared(&sums[first + 2 * i][blockIdx.x * (COLUMNS / 256) + place]);
        u32 there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(total) : "memory");
    }
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x < ROWS) {
        const float r = rstd_of(sums[threadIdx.x], C, eps);
        rstds[threadIdx.x] = r;
        if (blockIdx.x == 0 && row0 + threadIdx.x < to.rows) rstd[row0 + threadIdx.x] = r;
    }
    __syncthreads();

    Seen seen;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = first + 2 * i;
        uint2 eight = make_uint2(0, 0);
        if (inside && row0 + row < to.rows) {
            const float r = rstds[row];
            float a[8];
#pragma unroll
            for (int j = 0; j < 8; j++) a[j] = load(v[i].at[j]) * r * load(w.at[j]);
            round8(a);
            eight = encode8(a, to.scale, seen);
        }
        // Exchanging words by the row's sixteen keeps the transpose free of bank conflicts.
        *(uint2*)&words[row][within / 4 ^ row / 16 * 16] = eight;
        if (to.codes && row0 + row < to.padded_rows && column < to.padded_columns)
            *(uint2*)(to.codes + (u64)(row0 + row) * to.padded_columns + column) = eight;
    }
    measure(to, seen);
    if (!to.transposed) return;
    // A thread turns four columns of sixteen rows; its neighbour has the next sixteen, if there are more.
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        const int i = k * THREADS + threadIdx.x, sixteen = i % (ROWS / 16) * 16, word = i / (ROWS / 16);
        const int at = blockIdx.x * COLUMNS + word * 4;
        if (at >= to.padded_columns || row0 + sixteen >= to.padded_rows) continue;
        turn16(to.transposed + (u64)at * to.padded_rows + row0 + sixteen, to.padded_rows, [&](int row) {
            return words[sixteen + row][word ^ sixteen];
        });
    }
}

// Grid (BLOCKS, T / ROWS).
#define RMSNORM_ROWS(BLOCKS)                                                                                           \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, PER_SM)                       \
        rmsnorm_rows_##BLOCKS(DESTINATION, float* rstd, X* sum, const X* x, const X* residual, const X* weight, float eps) { \
        const Destination to = THE_DESTINATION;                                                                        \
        if (sizeof(X) == 2) rmsnorm_rows<BLOCKS>(to, rstd, sum, x, residual, weight, eps);                             \
    }
RMSNORM_ROWS(1)
RMSNORM_ROWS(2)
RMSNORM_ROWS(4)
RMSNORM_ROWS(8)
#endif
