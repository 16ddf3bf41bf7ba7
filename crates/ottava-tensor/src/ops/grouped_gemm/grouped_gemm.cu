// Products of rows that belong to groups, in tiles of SIDE x SIDE. `A` and `B` are the types of the operands, `X` the type of the result.
// Sums have the order of cpu.rs: blocks of 128 terms are summed from zero, and the sums of blocks are added in order.

#define SIDE 64
#define STEP 16
#define TERMS 128

__device__ __forceinline__ float value(f32 x) { return x; }
__device__ __forceinline__ float value(f16 x) { return load(x); }
__device__ __forceinline__ float value(bf16 x) { return load(x); }
__device__ __forceinline__ float value(e4m3 x) { return load(f16{(unsigned short)halves<e4m3>(x.bits)}); }
__device__ __forceinline__ float value(e5m2 x) { return load(f16{(unsigned short)halves<e5m2>(x.bits)}); }

// An operand, with the layout of `side` in cuda.rs. Steps are distances between the elements, and between the scales, of neighbouring rows and of
// neighbouring contracted elements. Without scales, `scale_inv` is null.
template <class T> struct Side {
    const T* x;
    i64 row_step, k_step;
    const float* scale_inv;
    int rows_per_scale, k_per_scale, scale_row_step, scale_k_step;
    __device__ __forceinline__ float at(i64 row, i64 k) const { return value(x[row * row_step + k * k_step]); }
    __device__ __forceinline__ float scale_at(i64 row, i64 k) const {
        return scale_inv[row / rows_per_scale * scale_row_step + k / k_per_scale * scale_k_step];
    }
};

struct Sides { Side<A> a; Side<B> b; };

// The part of an operand that a tile reads: `rows` rows from `row` on, with contracted elements from `k` on.
struct Window { i64 row, k; int rows; };

// Computes the sums of a thread: rows `threadIdx.x / 16 + 16 i`, columns `threadIdx.x % 16 + 16 j`.
__device__ __forceinline__ void multiply(const Side<A>& a, Window of_a, const Side<B>& b, Window of_b, int length, float (&total)[4][4]) {
    __shared__ float rows[SIDE][STEP + 1], columns[SIDE][STEP + 1];
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    const bool scaled = a.scale_inv, by_blocks = scaled && a.scale_k_step;
    for (int block = 0; block < length; block += TERMS) {
        const int end = min(block + TERMS, length);
        float sums[4][4] = {};
        for (int start = block; start < end; start += STEP) {
            for (int i = threadIdx.x; i < SIDE * STEP; i += blockDim.x) {
                // Neighbouring threads read neighbouring elements.
                const bool by_k = a.k_step == 1, b_by_k = b.k_step == 1;
                const int r = by_k ? i / STEP : i % SIDE, k = by_k ? i % STEP : i / SIDE;
                rows[r][k] = r < of_a.rows && start + k < end ? a.at(of_a.row + r, of_a.k + start + k) : 0.0f;
                const int c = b_by_k ? i / STEP : i % SIDE, l = b_by_k ? i % STEP : i / SIDE;
                columns[c][l] = c < of_b.rows && start + l < end ? b.at(of_b.row + c, of_b.k + start + l) : 0.0f;
            }
            __syncthreads();
            for (int k = 0; k < STEP; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) sums[i][j] = __fmaf_rn(rows[row + 16 * i][k], columns[column + 16 * j][k], sums[i][j]);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (by_blocks && row + 16 * i < of_a.rows && column + 16 * j < of_b.rows)
                    sums[i][j] *= a.scale_at(of_a.row + row + 16 * i, of_a.k + block) * b.scale_at(of_b.row + column + 16 * j, of_b.k + block);
                total[i][j] += sums[i][j];
            }
        }
    }
    if (!scaled || by_blocks) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (row + 16 * i < of_a.rows && column + 16 * j < of_b.rows)
                total[i][j] *= a.scale_at(of_a.row + row + 16 * i, of_a.k) * b.scale_at(of_b.row + column + 16 * j, of_b.k);
    }
}

// Grid (N / SIDE, P / SIDE), 256 threads. Groups begin at multiples of 128, so the rows of a tile belong to one group. The matrix of a
// group begins `b_rows` rows and `b_k` contracted elements after the matrix of the preceding group.
extern "C" __global__ void __launch_bounds__(256)
    grouped_gemm(X* y, const int* offsets, const int* counts, int groups, int N, int K, int b_rows, int b_k,
                 const __grid_constant__ Sides of) {
    const int row0 = blockIdx.y * SIDE, column0 = blockIdx.x * SIDE;
    if (is_unused(offsets + groups, row0)) return;
    int ended = 0;
    for (int g = threadIdx.x; g < groups; g += blockDim.x) ended += offsets[g + 1] <= row0;
    const int g = block_sum(ended), valid = min(max(offsets[g] + counts[g] - row0, 0), SIDE);
    float total[4][4] = {};
    if (valid > 0)
        multiply(of.a, {row0, 0, valid}, of.b, {(i64)g * b_rows + column0, (i64)g * b_k, min(SIDE, N - column0)}, K, total);
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (column0 + column + 16 * j < N) store(&y[(u64)(row0 + row + 16 * i) * N + column0 + column + 16 * j], total[i][j]);
}

// Grid (N / SIDE, M / SIDE, groups), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    grouped_wgrad(X* into, const int* offsets, const int* counts, int M, int N, int add, const __grid_constant__ Sides of) {
    const int g = blockIdx.z, row0 = blockIdx.y * SIDE, column0 = blockIdx.x * SIDE, first = offsets[g];
    float total[4][4] = {};
    multiply(of.a, {row0, first, min(SIDE, M - row0)}, of.b, {column0, first, min(SIDE, N - column0)}, counts[g], total);
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            if (row0 + row + 16 * i >= M || column0 + column + 16 * j >= N) continue;
            X* const to = into + ((u64)g * M + row0 + row + 16 * i) * N + column0 + column + 16 * j;
            store(to, add ? total[i][j] + load(*to) : total[i][j]);
        }
    }
}
