// Casts by scales that rows or blocks give themselves. A block of threads holds a tile of 128 x 128 in registers, each thread
// eight neighbours of every sixteenth row: sixteen threads share a row. So one reading gives the blocks along the rows, those
// along the columns for the transposed copy, and the tile itself.
enum Sharing { ROWS, VECTORS, SQUARES };

struct Cast {
    unsigned char *codes, *transposed;
    float *scale_inv, *transposed_scale_inv;
    float* amax;
    u64 *saturated, *underflowed, *elements;
    const X* x;
    const float *row_amax, *column_amax;
    int rows, columns, pitch, transposed_pitch;
    float epsilon, bound;
    int power_of_two;

    // As `take_scale`, but for `bound`.
    __device__ __forceinline__ float scale(float amax) const {
        const float a = amax < epsilon ? epsilon : amax;
        if (a == 0.0f || a > 3.402823466e38f) return 1.0f;
        float s = Fp8<FORMAT>::largest / a;
        if (s > 3.402823466e38f) s = bound;
        return power_of_two ? __uint_as_float(__float_as_uint(s) & 0x7F800000) : s;
    }
};

__device__ __forceinline__ int padded(int n) { return (n + 15) / 16 * 16; }

// The row within the tile of this thread's eight number k, and the first of its columns.
__device__ __forceinline__ int tile_row(int k) { return k * 16 + threadIdx.x / 16; }
__device__ __forceinline__ int eight_column() { return threadIdx.x % 16 * 8; }

// Reads this thread's part of a tile; what lies beyond the matrix is zero.
__device__ __forceinline__ void fetch_tile(Eight<X>* raw, const X* x, int rows, int columns, int row0) {
    const bool wide = columns % 8 == 0 && aligned(x);
    const int column = tile_column();
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int row = row0 + tile_row(k), valid = row < rows ? columns - column : 0;
        raw[k] = fetch8(x + (u64)row * columns + column, valid, wide && valid > 0);
    }
}

// The largest of sixteen threads that share a row.
__device__ __forceinline__ float row_largest(const Eight<X>& raw) {
    float largest = largest8(raw);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, offset));
    return largest;
}

// The largest of each column of a tile, as bits; two barriers for all threads.
__device__ __forceinline__ void column_largest(u32* columns, const Eight<X>* raw) {
    if (threadIdx.x < TILE) columns[threadIdx.x] = 0;
    float largest[8] = {};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float v[8];
        unpack8(raw[k], v);
#pragma unroll
        for (int i = 0; i < 8; i++) largest[i] = fmaxf(largest[i], fabsf(v[i]));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xFFFFFFFF, largest[i], 16));
        if (threadIdx.x % 32 < 16) atomicMax(&columns[eight_column() + i], __float_as_uint(largest[i]));
    }
    __syncthreads();
}

// As `encode8`, with a scale for each value.
__device__ __forceinline__ uint2 encode_columns(const float* v, const float* scale, Seen& seen) {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        a[i] = v[i] * scale[i];
        seen.amax = fmaxf(seen.amax, fabsf(v[i]));
        seen.beyond += fabsf(a[i]) > Fp8<FORMAT>::largest;
        seen.lost += v[i] != 0.0f && fabsf(a[i]) <= Fp8<FORMAT>::vanishing;
    }
    return make_uint2(encode<FORMAT>(a[0], a[1]) | encode<FORMAT>(a[2], a[3]) << 16,
                      encode<FORMAT>(a[4], a[5]) | encode<FORMAT>(a[6], a[7]) << 16);
}

template <Sharing S> __device__ __forceinline__ void cast_tile(const Cast& to) {
    __shared__ Tile tile;
    __shared__ u32 column_amax[TILE];
    const int row0 = first_row(), column = tile_column(), block = row0 / TILE;
    const int padded_rows = padded(to.rows), padded_columns = padded(to.columns);
    Eight<X> raw[8];
    fetch_tile(raw, to.x, to.rows, to.columns, row0);
    float square = 1.0f;
    if (S == SQUARES) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, largest8(raw[k]));
        square = to.scale(block_max(largest));
        if (threadIdx.x == 0) {
            // Rows of scales are padded to multiples of 4.
            const int pitch = (to.columns + 4 * TILE - 1) / (4 * TILE) * 4, transposed_pitch = (to.rows + 4 * TILE - 1) / (4 * TILE) * 4;
            if (to.scale_inv) to.scale_inv[block * pitch + blockIdx.x] = 1.0f / square;
            if (to.transposed_scale_inv) to.transposed_scale_inv[blockIdx.x * transposed_pitch + block] = 1.0f / square;
        }
    }
    Seen seen;
    if (S == SQUARES || to.codes) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int row = row0 + tile_row(k);
            float v[8], scale = square;
            unpack8(raw[k], v);
            if (S == VECTORS) scale = to.scale(row_largest(raw[k]));
            if (S == ROWS) scale = row < padded_rows ? to.scale(to.row_amax[row]) : 1.0f;
            const uint2 eight = encode8(v, scale, seen);
            if (S == SQUARES) *(uint2*)tile.at(tile_row(k), eight_column() / 4) = eight;
            if (row >= padded_rows) continue;
            if (to.codes && column < to.pitch) *(uint2*)(to.codes + (u64)row * to.pitch + column) = eight;
            if (S != SQUARES && threadIdx.x % 16 == 0 && (S == VECTORS || blockIdx.x == 0))
                to.scale_inv[(u64)blockIdx.x * padded_rows + row] = 1.0f / scale;
        }
    }
    if (S != SQUARES && to.transposed) {
        // What was lost is counted once.
        Seen unseen, &lost = to.codes ? unseen : seen;
        float scale[8];
        if (S == VECTORS) column_largest(column_amax, raw);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float largest = 0.0f;
            if (S == VECTORS) largest = __uint_as_float(column_amax[eight_column() + i]);
            if (S == ROWS && column < padded_columns) largest = to.column_amax[column + i];
            scale[i] = to.scale(largest);
            if (threadIdx.x < 16 && column < padded_columns && (S == VECTORS || block == 0))
                to.transposed_scale_inv[(u64)block * padded_columns + column + i] = 1.0f / scale[i];
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float v[8];
            unpack8(raw[k], v);
            *(uint2*)tile.at(tile_row(k), eight_column() / 4) = encode_columns(v, scale, lost);
        }
    }
    const Destination turned = {nullptr, to.transposed, nullptr, to.amax, to.saturated, to.underflowed, to.elements, 1.0f,
                                to.rows, to.columns, to.transposed_pitch, padded_columns};
    measure(turned, seen, false);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) atomicAdd(to.elements, (u64)to.rows * to.columns);
    flush(turned, tile, row0, blockIdx.x * TILE);
}

// Grid (columns / 128, rows / 128) of the padded matrix, 256 threads. Copies that are null are not made, and have no scales.
#define CAST(NAME, SHARING)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME(                                                         \
        unsigned char* codes, unsigned char* transposed, float* scale_inv, float* transposed_scale_inv, float* amax,   \
        u64* saturated, u64* underflowed, u64* elements, const X* x, const float* row_amax, const float* column_amax,  \
        int rows, int columns, int pitch, int transposed_pitch, float epsilon, float bound, int power_of_two) {        \
        cast_tile<SHARING>(Cast{codes, transposed, scale_inv, transposed_scale_inv, amax, saturated, underflowed,      \
                                elements, x, row_amax, column_amax, rows, columns, pitch, transposed_pitch, epsilon,   \
                                bound, power_of_two});                                                                 \
    }
CAST(quantize_rows, ROWS)
CAST(quantize_1x128, VECTORS)
CAST(quantize_128x128, SQUARES)

// Raises the largest absolute value of each row and of each column, from zero; either may be null. Grid as above.
extern "C" __global__ void __launch_bounds__(256, 2) amaxes(float* row_amax, float* column_amax, const X* x, int rows, int columns) {
    __shared__ u32 largest_of_columns[TILE];
    const int row0 = first_row();
    Eight<X> raw[8];
    fetch_tile(raw, x, rows, columns, row0);
    if (row_amax) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float largest = row_largest(raw[k]);
            if (threadIdx.x % 16 == 0 && row0 + tile_row(k) < rows) raise(row_amax + row0 + tile_row(k), largest);
        }
    }
    if (!column_amax) return;
    column_largest(largest_of_columns, raw);
    const int column = blockIdx.x * TILE + threadIdx.x;
    if (threadIdx.x < TILE && column < columns) raise(column_amax + column, __uint_as_float(largest_of_columns[threadIdx.x]));
}
