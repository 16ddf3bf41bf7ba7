// Epilogue of every kernel that writes FP8 operands. Casts tiles of 128 x 128 values. Codes are written from registers, transposed codes through
// shared memory, and statistics are collected. `FORMAT` is the type of the codes, `SHARING` the granularity of the scales. Blocks have 256 threads
// unless a kernel says otherwise.
//
// A per-tensor scale is given. Block scales are found while the tile is in shared memory. Rows and columns are longer than a tile, so
// their scales need two launches of the kernel: one compiled with `RowAmaxes`, which only finds the amaxes, and one that casts.
// `MixedBlocks` has 1x128 blocks in the codes and 128x128 blocks in the transposed copy.
enum Sharing { PerTensor, PerRow, RowAmaxes, Blocks1x128, MixedBlocks, Blocks128x128 };
// Whether the rows have scales of 1x128 blocks, the columns have scales of 1x128 blocks, or the columns have scales of 128x128 blocks.
__device__ constexpr bool rows_are_cut(Sharing s) { return s == Blocks1x128 || s == MixedBlocks; }
__device__ constexpr bool columns_are_cut(Sharing s) { return s == Blocks1x128; }
__device__ constexpr bool columns_are_squared(Sharing s) { return s == MixedBlocks || s == Blocks128x128; }

// An output, with the layout of `destination` in quantize/cuda.rs. `codes` and `transposed` may be null. They are padded with zeros.
struct Destination {
    unsigned char *codes, *transposed;
    float *scale_inv, *transposed_scale_inv, *amax;
    u64 *saturated, *underflowed, *elements;
    const float* scale;
    float *row_amax, *column_amax;
    int rows, columns;
    // The distances between rows of codes, and between rows of scales.
    int pitch, transposed_pitch, scale_pitch, transposed_scale_pitch;
    // Parameters of current scaling.
    float epsilon, bound;
    int power_of_two;
    // The end of the last group of rows, or null. Later rows are neither read nor written.
    const int* end;

    // Returns the destination of the columns from F on. F is a multiple of the tile.
    __device__ __forceinline__ Destination right_of(int F) const {
        Destination right = *this;
        right.columns -= F;
        if (codes) right.codes += F;
        if (transposed) right.transposed += (u64)F * transposed_pitch;
        if (column_amax) right.column_amax += F;
        if (SHARING == PerRow || columns_are_cut(SHARING)) right.transposed_scale_inv += F;
        if (columns_are_squared(SHARING)) right.transposed_scale_inv += (u64)(F / TILE) * transposed_scale_pitch;
        if (rows_are_cut(SHARING)) right.scale_inv += (u64)(F / TILE) * scale_pitch;
        if (SHARING == Blocks128x128) right.scale_inv += F / TILE;
        return right;
    }
};

__device__ __forceinline__ int padded(int n) { return (n + 15) / 16 * 16; }
// Whether tiles hold values until block scales are known.
#define HOLDS (SHARING >= Blocks1x128)
// Returns the padded size along the contracted dimension. With block scales, it has whole blocks.
__device__ __forceinline__ int padded_length(int n) { return HOLDS ? (n + TILE - 1) / TILE * TILE : padded(n); }

// The largest input that rounds to zero: half the smallest positive value.
template <class T> struct Underflow;
template <> struct Underflow<e4m3> { static constexpr float bound = 0x1p-10f; };
template <> struct Underflow<e5m2> { static constexpr float bound = 0x1p-17f; };

// The statistics of one thread.
struct Seen {
    float amax = 0.0f;
    u32 beyond = 0, lost = 0;
};

// Count the saturated and the underflowed values among eight. `a` has the scaled values.
template <class T> __device__ __forceinline__ void count_beyond(const float* a, Seen& seen) {
#pragma unroll
    for (int i = 0; i < 8; i++) seen.beyond += fabsf(a[i]) > max_finite<T>();
}
template <class T> __device__ __forceinline__ void count_lost(const float* v, const float* a, Seen& seen) {
#pragma unroll
    for (int i = 0; i < 8; i++) seen.lost += v[i] != 0.0f && fabsf(a[i]) <= Underflow<T>::bound;
}

// Casts without counting, if another copy is counted or the caller counts.
template <class T> __device__ __forceinline__ uint2 encode8_uncounted(const Eight<X>& e, float scale) {
    float v[8];
    unpack8(e, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= scale;
    return encode8<T>(v);
}

// Casts eight values with one scale. Scaling keeps the order of values, so losses are counted only if the largest or smallest of the eight shows a
// loss.
template <class T> __device__ __forceinline__ uint2 encode8(const Eight<X>& e, float scale, Seen& seen) {
    float v[8], a[8];
    unpack8(e, v);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = v[i] * scale;
    const float largest = largest8(e);
    seen.amax = fmaxf(seen.amax, largest);
    if (largest * scale > max_finite<T>()) count_beyond<T>(a, seen);
    if (smallest8(e) * scale <= Underflow<T>::bound) count_lost<T>(v, a, seen);
    return encode8<T>(a);
}

// Limits for a given scale: 16-bit values above `finite` saturate, and values not above `lost` underflow. Each limit is stored as a pair of equal
// values.
struct Limits { u32 finite, lost; };
template <class T> __device__ __forceinline__ Limits limits_of(float scale) {
    if constexpr (sizeof(X) != 2) return {};
    // Returns the largest value that passes a test. If a value passes, all smaller values must pass.
    const auto last = [](const auto& passes) {
        u32 bits = 0;
#pragma unroll 1
        for (u32 bit = 0x4000; bit > 0; bit /= 2)
            if (passes(load(X{(unsigned short)(bits | bit)}))) bits |= bit;
        return bits * 0x10001;
    };
    return {last([=](float v) { return v == v && !(v * scale > max_finite<T>()); }),
            last([=](float v) { return v * scale <= Underflow<T>::bound; })};
}

// Returns the number of 16-bit values whose magnitude is above a limit. `limit` is a pair of equal values. NaN does not count. GPUs that compare
// pairs count in pairs.
#if __CUDA_ARCH__ >= 900
#define COUNT_ABOVE(TYPE, ONES)                                                                                        \
    template <int N> __device__ __forceinline__ u32 count_above(const Eight<TYPE> (&e)[N], u32 limit) {                \
        u32 count = 0;                                                                                                 \
        for (int k = 0; k < N; k++) {                                                                                  \
            const u32 pairs[4] = {e[k].words[0].x, e[k].words[0].y, e[k].words[0].z, e[k].words[0].w};                 \
            for (int i = 0; i < 4; i++)                                                                                \
                asm("{\n.reg .b32 a;\nabs." #TYPE "x2 a, %1;\nset.gt." #TYPE "x2." #TYPE "x2 a, a, %2;\n"              \
                    "fma.rn." #TYPE "x2 %0, a, %3, %0;\n}" : "+r"(count) : "r"(pairs[i]), "r"(limit), "r"(ONES));      \
        }                                                                                                              \
        return load(TYPE{(unsigned short)count}) + load(TYPE{(unsigned short)(count >> 16)});                          \
    }
#else
#define COUNT_ABOVE(TYPE, ONES)                                                                                        \
    template <int N> __device__ __forceinline__ u32 count_above(const Eight<TYPE> (&e)[N], u32 limit) {                \
        const float bound = load(TYPE{(unsigned short)limit});                                                         \
        u32 count = 0;                                                                                                 \
        for (int k = 0; k < N; k++)                                                                                    \
            for (int i = 0; i < 8; i++) count += fabsf(load(e[k].at[i])) > bound;                                      \
        return count;                                                                                                  \
    }
#endif
COUNT_ABOVE(bf16, 0x3F803F80)
COUNT_ABOVE(f16, 0x3C003C00)

// Encodes like `encode8`, but eights of several rows, with one test of their extremes. Rows from `valid` on become zeros, even if the scale is
// infinite.
template <class T, int N>
__device__ __forceinline__ void encode_rows(uint2 (&codes)[N], Eight<X> (&e)[N], int valid, float scale, const Limits& limits, Seen& seen) {
    if (valid < N) {
#pragma unroll
        for (int k = 0; k < N; k++) if (k >= valid) e[k] = {};
    }
    Eight<X> larger = e[0], smaller = e[0];
#pragma unroll
    for (int k = 1; k < N; k++) {
        larger = larger8(larger, e[k]);
        smaller = smaller8(smaller, e[k]);
    }
    const float largest = largest8(larger);
    seen.amax = fmaxf(seen.amax, largest);
    const bool saturates = largest * scale > max_finite<T>(), underflows = smallest8(smaller) * scale <= Underflow<T>::bound;
    if constexpr (sizeof(X) == 2) {
        if (saturates) seen.beyond += count_above(e, limits.finite);
        if (underflows) seen.lost += count_above(e, 0) - count_above(e, limits.lost);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) {
            float a[8];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = e[k].at[i] * scale;
            if (saturates) count_beyond<T>(a, seen);
            if (underflows) count_lost<T>(e[k].at, a, seen);
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) codes[k] = encode8_uncounted<T>(e[k], scale);
    if (valid < N) {
#pragma unroll
        for (int k = 0; k < N; k++) if (k >= valid) codes[k] = make_uint2(0, 0);
    }
}

// Casts with a scale from a measured amax. The scale is negative if the amax saturates.
template <class T> __device__ __forceinline__ uint2 encode8_by_own(const Eight<X>& e, float flagged, Seen& seen) {
    const float scale = fabsf(flagged);
    float v[8], a[8];
    unpack8(e, v);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = v[i] * scale;
    if (flagged < 0.0f && largest8(e) * scale > max_finite<T>()) count_beyond<T>(a, seen);
    if (smallest8(e) * scale <= Underflow<T>::bound) count_lost<T>(v, a, seen);
    return encode8<T>(a);
}

// Casts with the scales of eight columns. Counts losses only if no other copy is counted.
template <class T> __device__ __forceinline__ uint2 encode8_by_columns(const Eight<X>& e, const float* scales, bool counts, Seen& seen) {
    float v[8], a[8];
    unpack8(e, v);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = v[i] * fabsf(scales[i]);
    if (counts) {
        float largest = 0.0f, smallest = fabsf(a[0]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            largest = fmaxf(largest, fabsf(a[i]));
            smallest = fminf(smallest, fabsf(a[i]));
        }
        if (largest > max_finite<T>()) count_beyond<T>(a, seen);
        if (smallest <= Underflow<T>::bound) count_lost<T>(v, a, seen);
    }
    return encode8<T>(a);
}

// A tile in shared memory.
//
// - With known scales, a tile holds codes, four per word. Words are swizzled by row / 16 to avoid bank conflicts in both directions.
// - Otherwise, a tile holds values until block scales are known, and then the transposed codes. Eights of values are swizzled.
//
// Next to the tile are the scales of rows and columns, or partial amaxes: up to 16 per row (one per thread) plus one of padding against bank
// conflicts, and eight per column (one per warp).
#define OF_ROW 17
#define LINES (SHARING == PerRow ? 2 * TILE : SHARING == RowAmaxes ? (OF_ROW + 8) * TILE : 4)
struct alignas(16) Tile {
    float lines[LINES];
    u32 words[SHARING == RowAmaxes ? 4 : TILE * TILE / 4 * (HOLDS ? sizeof(X) : 1)];
    __device__ __forceinline__ Eight<X>* held(int row, int eight) { return (Eight<X>*)words + row * (TILE / 8) + (eight ^ row / 16); }
    __device__ __forceinline__ u32* at(int row, int word) {
        if constexpr (!HOLDS) return words + row * (TILE / 4) + (word ^ (row / 16 * 4));
        const int eight = word / 2;
        return (u32*)held(row, eight) + ((eight ^ eight >> 3) & 1) * 2 + word % 2;
    }
};
// The tiles in dynamic shared memory.
extern __shared__ Tile tiles_of_the_launch[];

// Stores codes. With STREAMED, L2 evicts the codes first.
#ifndef STREAMED
#define STREAMED 0
#endif
template <class V> __device__ __forceinline__ void store_codes(V* p, V value) {
    if (STREAMED) __stcs(p, value);
    else *p = value;
}

// Transposes four columns of 16 rows. `word(i)` returns the codes of row i; rows of `transposed` are `pitch` bytes apart.
template <class Word> __device__ __forceinline__ void turn(const Word& word, unsigned char* transposed, u64 pitch) {
    u32 turned[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 w[4] = {word(4 * k), word(4 * k + 1), word(4 * k + 2), word(4 * k + 3)};
        const u32 low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
        const u32 high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
        turned[0][k] = __byte_perm(low01, low23, 0x5410);
        turned[1][k] = __byte_perm(low01, low23, 0x7632);
        turned[2][k] = __byte_perm(high01, high23, 0x5410);
        turned[3][k] = __byte_perm(high01, high23, 0x7632);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        store_codes((uint4*)(transposed + j * pitch), make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]));
}

// The column and the row of this thread in `TileCast`. A thread has eight columns of every 16th row.
__device__ __forceinline__ int eight_column() { return threadIdx.x % 16 * 8; }
__device__ __forceinline__ int tile_row(int sweep) {
    // From this the compiler derives `sweep` from the row.
    __builtin_assume(threadIdx.x < 256);
    return sweep * 16 + threadIdx.x / 16;
}

// Returns the first row of this block's tiles. Blocks go from the end of the matrix to its start, because the previous kernel's last writes are
// likely in L2. Casts with per-row scales go from the start to the end, because the launch that finds the amaxes has read the start last.
__device__ __forceinline__ int first_row(bool from_start = SHARING == PerRow) {
    return (from_start ? blockIdx.y : gridDim.y - 1 - blockIdx.y) * TILE;
}

__device__ __forceinline__ float given_scale(const Destination& to) { return SHARING == PerTensor ? *to.scale : 1.0f; }

// Returns the scale like `take_scale`, limited to `bound`.
__device__ __forceinline__ float own_scale(const Destination& to, float largest, float amax) {
    const float a = amax < to.epsilon ? to.epsilon : amax;
    if (a == 0.0f || a > 3.402823466e38f) return 1.0f;
    float s = largest / a;
    if (s > 3.402823466e38f) s = to.bound;
    return to.power_of_two ? __uint_as_float(__float_as_uint(s) & 0x7F800000) : s;
}

// Reduces eight rows over 16 threads. Threads 2k and 2k + 1 return the amax of row k. Overwrites `rows`.
__device__ __forceinline__ float row_largest(u32 (&rows)[8]) {
    int step = 8;
#pragma unroll
    for (int n = 4; n > 0; n /= 2, step /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int k = 0; k < n; k++) {
            const u32 keep = upper ? rows[k + n] : rows[k], give = upper ? rows[k] : rows[k + n];
            rows[k] = fold<X>(keep, __shfl_xor_sync(0xFFFFFFFF, give, step));
        }
    }
    return unfolded<X>(fold<X>(rows[0], __shfl_xor_sync(0xFFFFFFFF, rows[0], 1)));
}

// Returns the scale of a row, column or block. The scale is negative if its amax saturates.
template <class T> __device__ __forceinline__ float flagged_scale(const Destination& to, float amax) {
    const float scale = own_scale(to, max_finite<T>(), amax);
    return amax * scale > max_finite<T>() ? -scale : scale;
}

// The scales of the 1x128 blocks of rows and columns, the amaxes of rows, and the amaxes of columns for each warp. All casts of a kernel share them.
struct BlockAmaxes { float of_rows[TILE], of_columns[TILE], row_amaxes[TILE], warps[8][TILE]; };
__device__ __forceinline__ BlockAmaxes& block_amaxes() {
    __shared__ alignas(16) BlockAmaxes amaxes;
    return amaxes;
}

// The cast of a tile to codes of type T. The calls are: `begin`, and a barrier if scales are per row; `cast` for all eights; `finish`; a barrier (the
// barrier of `measure`); and `flush`. A thread casts the same columns in all its rows. A WHOLE tile does not reach beyond the matrix.
template <class T, Sharing SHARED = SHARING, bool WHOLE = false> struct TileCast {
    const Destination& to;
    Tile& tile;
    Seen& seen;
    const int row0, column0;
    // The column amaxes of this thread, for `RowAmaxes`.
    mutable Eight<X> in_columns[2] = {};

    // Returns whether a position of the tile is within the padded codes.
    __device__ __forceinline__ bool fits(int row, int column) const {
        return WHOLE || (row0 + row < padded(to.rows) && column0 + column < padded_length(to.columns));
    }

    __device__ __forceinline__ void write_codes(int row, int column, uint2 eight) const {
        if (to.codes && fits(row, column)) store_codes((uint2*)(to.codes + column0 + column + (u64)(u32)(row0 + row) * (u32)to.pitch), eight);
    }

    // The row or column whose amax or scale this thread finds. Half of the threads have columns, the other half rows.
    struct Line { bool is_row; int at, number, lines; };
    __device__ __forceinline__ Line line() const {
        const bool is_row = threadIdx.x >= TILE;
        const int at = threadIdx.x % TILE;
        return {is_row, at, (is_row ? row0 : column0) + at, is_row ? to.rows : to.columns};
    }

    // Finds the scales of rows and columns from their amaxes.
    __device__ __forceinline__ void begin() const {
        if constexpr (SHARED == PerRow) {
            const Line it = line();
            const float* const amaxes = it.is_row ? to.row_amax : to.column_amax;
            if (!amaxes || it.number >= padded(it.lines)) return;
            const float amax = amaxes[it.number], flagged = flagged_scale<T>(to, amax);
            tile.lines[it.is_row ? it.at : TILE + it.at] = flagged;
            seen.amax = fmaxf(seen.amax, amax);
            // The first tile of a row or column writes the scale of the row or column.
            if ((it.is_row ? column0 : row0) == 0) (it.is_row ? to.scale_inv : to.transposed_scale_inv)[it.number] = 1.0f / fabsf(flagged);
        }
    }

    // Casts eight values (zeros beyond the matrix) at a position of the tile. `scale` is the per-tensor scale, if any.
    __device__ __forceinline__ void cast(int row, int column, const Eight<X>& values, float scale) const {
        if constexpr (SHARED == RowAmaxes) {
            see<1>(row, &values);
        } else if constexpr (HOLDS) {
            *tile.held(row, column / 8) = values;
        } else {
            // Padding is zero even if the scale is infinite.
            uint2 eight = make_uint2(0, 0), turned = make_uint2(0, 0);
            if (WHOLE || (row0 + row < to.rows && column0 + column < to.columns)) {
                float scales[8];
                if constexpr (SHARED == PerTensor) {
                    turned = eight = encode8<T>(values, scale, seen);
                } else if (to.codes && to.transposed) {
                    // The common case, without branches between the two copies.
                    unpack8(load8(tile.lines + TILE + column), scales);
                    eight = encode8_by_own<T>(values, tile.lines[row], seen);
                    turned = encode8_by_columns<T>(values, scales, false, seen);
                } else if (to.codes) {
                    eight = encode8_by_own<T>(values, tile.lines[row], seen);
                } else if (to.transposed) {
                    unpack8(load8(tile.lines + TILE + column), scales);
                    turned = encode8_by_columns<T>(values, scales, true, seen);
                }
            }
            *(uint2*)tile.at(row, column / 4) = turned;
            write_codes(row, column, eight);
        }
    }
    // Casts two eights of a row. Eight threads share a row.
    __device__ __forceinline__ void cast(int row, const int (&columns)[2], const Eight<X> (&values)[2], float scale) const {
        if constexpr (SHARED == RowAmaxes) {
            see<2>(row, values);
        } else {
#pragma unroll
            for (int k = 0; k < 2; k++) cast(row, columns[k], values[k], scale);
        }
    }

    // Finds block scales and casts, or raises the amaxes of rows and columns. Called by all threads. A thread reads only held values that it has
    // written itself or that another thread has written before a barrier. `SPECIALIZES` adds a variant for the common case of both copies: more code,
    // less time.
    template <bool SPECIALIZES = true> __device__ __forceinline__ void finish() const {
        if constexpr (SHARED == RowAmaxes) raise_amaxes<1>({eight_column()});
        if constexpr (SHARED == Blocks128x128) finish_square();
        if constexpr (rows_are_cut(SHARED)) {
            if (SPECIALIZES && to.codes && to.transposed) finish_blocks<true>();
            else finish_blocks<false>();
        }
    }
    __device__ __forceinline__ void finish(const int (&columns)[2]) const {
        if constexpr (SHARED == RowAmaxes) raise_amaxes<2>(columns);
        else finish();
    }

    // Keeps the partial amaxes of the row and the columns of these values.
    template <int EIGHTS> __device__ __forceinline__ void see(int row, const Eight<X>* values) const {
        constexpr int threads = TILE / 8 / EIGHTS;
        float of_row = 0.0f;
#pragma unroll
        for (int k = 0; k < EIGHTS; k++) {
            if (to.column_amax) in_columns[k] = larger8(in_columns[k], values[k]);
            of_row = fmaxf(of_row, largest8(values[k]));
        }
        if (to.row_amax) tile.lines[row * OF_ROW + threadIdx.x % threads] = of_row;
    }
    template <int EIGHTS> __device__ __forceinline__ void raise_amaxes(const int (&columns)[EIGHTS]) const {
        constexpr int threads = TILE / 8 / EIGHTS;
        float* const of_warps = tile.lines + OF_ROW * TILE;
#pragma unroll
        for (int k = 0; k < EIGHTS; k++) {
#pragma unroll
            for (int step = threads; step < 32; step *= 2) in_columns[k] = larger8(in_columns[k], shuffled8(in_columns[k], step));
            float v[8];
            unpack8(in_columns[k], v);
            if (threadIdx.x % 32 < threads) store8(of_warps + threadIdx.x / 32 * TILE + columns[k], pack8<f32>(v));
        }
        __syncthreads();
        const Line it = line();
        float* const amaxes = it.is_row ? to.row_amax : to.column_amax;
        if (!amaxes || it.number >= it.lines) return;
        float amax = 0.0f;
        if (it.is_row) {
#pragma unroll
            for (int i = 0; i < threads; i++) amax = fmaxf(amax, tile.lines[it.at * OF_ROW + i]);
        } else {
#pragma unroll
            for (int w = 0; w < 8; w++) amax = fmaxf(amax, fabsf(of_warps[w * TILE + it.at]));
        }
        atomicMax((u32*)amaxes + it.number, __float_as_uint(amax));
    }

    __device__ __forceinline__ Eight<X> held(int k) const { return *tile.held(tile_row(k), eight_column() / 8); }

    // Writes the scale of a 128x128 block. Called by one thread.
    __device__ __forceinline__ void write_square(float scale, bool of_rows) const {
        if (row0 >= to.rows || column0 >= to.columns) return;
        const int row = row0 / TILE, column = column0 / TILE;
        if (of_rows && to.codes) to.scale_inv[(u64)row * to.scale_pitch + column] = 1.0f / scale;
        if (to.transposed) to.transposed_scale_inv[(u64)column * to.transposed_scale_pitch + row] = 1.0f / scale;
    }

    __device__ __forceinline__ void finish_square() const {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, largest8(held(k)));
        const float amax = block_max(largest), flagged = flagged_scale<T>(to, amax);
        seen.amax = fmaxf(seen.amax, amax);
        if (threadIdx.x == 0) write_square(fabsf(flagged), true);
#pragma unroll 4
        for (int k = 0; k < 8; k++) {
            const uint2 eight = encode8_by_own<T>(held(k), flagged, seen);
            *(uint2*)tile.at(tile_row(k), eight_column() / 4) = eight;
            write_codes(tile_row(k), eight_column(), eight);
        }
    }

    // Casts 1x128 blocks along rows, and 1x128 blocks along columns or 128x128 blocks. With BOTH, both copies are written, otherwise the copies that
    // are not null.
    template <bool BOTH> __device__ __forceinline__ void finish_blocks() const {
        BlockAmaxes& amaxes = block_amaxes();
        float *const of_rows = amaxes.of_rows, *const of_columns = amaxes.of_columns, *const row_amaxes = amaxes.row_amaxes;
        float(&warps)[8][TILE] = amaxes.warps;
        constexpr bool SQUARE = columns_are_squared(SHARED);
        const Line it = line();
        const bool by_rows = BOTH || to.codes, by_columns = BOTH || to.transposed;
        float amax = 0.0f;
        u32 rows[8];
        Eight<X> columns;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const Eight<X> values = held(k);
            rows[k] = folded8(values);
            if (!SQUARE) columns = k > 0 ? larger8(columns, values) : values;
        }
        if (by_rows || SQUARE) {
            const float largest = row_largest(rows);
            if (threadIdx.x % 2 == 0) row_amaxes[tile_row(threadIdx.x % 16 / 2)] = largest;
        }
        if (by_columns && !SQUARE) {
            float v[8];
            unpack8(larger8(columns, shuffled8(columns, 16)), v);
            if (threadIdx.x % 32 < 16) store8(warps[threadIdx.x / 32] + eight_column(), pack8<f32>(v));
        }
        __syncthreads();
        float square = 0.0f;
        if constexpr (SQUARE) {
            const float4 four = ((const float4*)row_amaxes)[threadIdx.x % 32];
            const float of_four = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
            const float amax_of_square = __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(of_four)));
            square = flagged_scale<T>(to, amax_of_square);
            seen.amax = fmaxf(seen.amax, amax_of_square);
            if (threadIdx.x == 0) write_square(fabsf(square), false);
        } else if (!it.is_row && by_columns) {
#pragma unroll
            for (int w = 0; w < 8; w++) amax = fmaxf(amax, fabsf(warps[w][it.at]));
        }
        if (it.is_row && by_rows) amax = row_amaxes[it.at];
        if ((it.is_row ? by_rows : by_columns && !SQUARE) && (WHOLE || (it.number < padded(it.lines) && column0 < to.columns))) {
            const float flagged = flagged_scale<T>(to, amax);
            (it.is_row ? of_rows : of_columns)[it.at] = flagged;
            seen.amax = fmaxf(seen.amax, amax);
            float* const scale_inv = it.is_row ? to.scale_inv : to.transposed_scale_inv;
            const int pitch = it.is_row ? to.scale_pitch : to.transposed_scale_pitch;
            scale_inv[(u64)((it.is_row ? column0 : row0) / TILE) * pitch + it.number] = 1.0f / fabsf(flagged);
        }
        __syncthreads();
        float scales[8];
        if (!SQUARE) unpack8(load8(of_columns + eight_column()), scales);
        unsigned char* codes = to.codes + (u64)(u32)(row0 + tile_row(0)) * (u32)to.pitch + column0 + eight_column();
#pragma unroll(BOTH ? 4 : 2)
        for (int k = 0; k < 8; k++) {
            const Eight<X> values = held(k);
            if (by_rows) {
                const uint2 eight = encode8_by_own<T>(values, of_rows[tile_row(k)], seen);
                if (fits(tile_row(k), eight_column())) store_codes((uint2*)codes, eight);
                codes += 16 * (u64)(u32)to.pitch;
            }
            if (!by_columns) continue;
            uint2 turned;
            if (SQUARE) turned = by_rows ? encode8_uncounted<T>(values, fabsf(square)) : encode8_by_own<T>(values, square, seen);
            else turned = encode8_by_columns<T>(values, scales, !by_rows, seen);
            *(uint2*)tile.at(tile_row(k), eight_column() / 4) = turned;
        }
    }

    // Writes the transpose of a complete tile. Each thread transposes four columns of 16 rows.
    __device__ __forceinline__ void flush() const {
        if (!to.transposed) return;
        const int sixteen = threadIdx.x % 8, word = threadIdx.x / 8, row = row0 + sixteen * 16, column = column0 + word * 4;
        if (row >= to.transposed_pitch || column >= padded(to.columns)) return;
        turn([&](int i) { return *tile.at(sixteen * 16 + i, word); }, to.transposed + (u64)column * to.transposed_pitch + row, to.transposed_pitch);
    }
};

// Adds the block's statistics to the counters, if they are read. Contains a barrier for all threads. To hide the latency of `then`, it runs before
// the first warp reduces the statistics. The `first` block of a matrix also counts the matrix's elements.
template <class Then> __device__ __forceinline__ void measure(const Destination& to, const Seen& seen, bool first, const Then& then) {
    __shared__ u32 warps[3][32];
    if constexpr (SHARING == RowAmaxes) return;
    if (to.amax) {
        const u32 amax = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(seen.amax));
        const u32 beyond = __reduce_add_sync(0xFFFFFFFF, seen.beyond), lost = __reduce_add_sync(0xFFFFFFFF, seen.lost);
        if (threadIdx.x % 32 == 0) {
            warps[0][threadIdx.x / 32] = amax;
            warps[1][threadIdx.x / 32] = beyond;
            warps[2][threadIdx.x / 32] = lost;
        }
    }
    __syncthreads();
    then();
    if (threadIdx.x >= 32) return;
    if (SHARING == PerTensor && first && threadIdx.x == 0) *to.scale_inv = 1.0f / *to.scale;
    if (!to.amax) return;
    const bool is_warp = threadIdx.x < blockDim.x / 32;
    const u32 amax = __reduce_max_sync(0xFFFFFFFF, is_warp ? warps[0][threadIdx.x] : 0);
    const u32 beyond = __reduce_add_sync(0xFFFFFFFF, is_warp ? warps[1][threadIdx.x] : 0);
    const u32 lost = __reduce_add_sync(0xFFFFFFFF, is_warp ? warps[2][threadIdx.x] : 0);
    if (threadIdx.x > 0) return;
    // `raise` is not used here, because reading the amax first would delay the end of the block.
    if (amax) atomicMax((u32*)to.amax, amax);
    if (beyond) atomicAdd(to.saturated, (u64)beyond);
    if (lost) atomicAdd(to.underflowed, (u64)lost);
    if (first) atomicAdd(to.elements, (u64)to.rows * to.columns);
}

// Measures like the function above, for a grid that has one matrix.
template <class Then> __device__ __forceinline__ void measure(const Destination& to, const Seen& seen, const Then& then) {
    measure(to, seen, blockIdx.x == 0 && blockIdx.y == 0, then);
}

// Returns whether the rows from `row` on are unused, so that a block has nothing to cast. The `first` block still writes the scale of a tensor and
// counts the elements.
__device__ __forceinline__ bool skips(const Destination& to, int row, bool first) {
    if (!is_unused(to.end, row)) return false;
    if (SHARING != RowAmaxes && first && threadIdx.x == 0) {
        if (SHARING == PerTensor) *to.scale_inv = 1.0f / *to.scale;
        if (to.amax) atomicAdd(to.elements, (u64)to.rows * to.columns);
    }
    return true;
}

// True for sources with `is_copy()` and `address()`. If `is_copy()` returns true, the values are read at `address(row, column)`, or are zeros if it
// is null.
template <class Source> constexpr bool MAY_COPY = false;

// Casts a tile from a source. Values beyond the matrix are zero. A `WHOLE` tile has no such values.
template <int LOADS, bool WHOLE, class Source>
__device__ __forceinline__ void fill_tile(const TileCast<FORMAT, SHARING, WHOLE>& tile, const Source& source, float scale) {
    const int rows = tile.to.rows, columns = tile.to.columns, column = tile.column0 + eight_column();
#if __CUDA_ARCH__ >= 800
    // Copies unchanged values to the tile without registers, so that the copies of all rows are in flight at once.
    if constexpr (HOLDS && WHOLE && sizeof(X) == 2 && MAY_COPY<Source>) {
        if (source.is_copy()) {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const X* const from = source.address(tile.row0 + tile_row(k), column);
                Eight<X>* const to = tile.tile.held(tile_row(k), eight_column() / 8);
                if (from) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
                else *to = {};
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            return;
        }
    }
#endif
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep += LOADS) {
        typename Source::Raw raw[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int row = tile.row0 + tile_row(sweep + k);
            if (WHOLE || (row < rows && column < columns)) raw[k] = source.fetch(row, column);
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            Eight<X> values = {};
            const int row = tile.row0 + tile_row(sweep + k);
            if (WHOLE || (row < rows && column < columns)) values = source.values(raw[k], row, column);
            // Padding is zero.
            if (!WHOLE && column + 8 > columns) {
#pragma unroll
                for (int i = 0; i < 8; i++) if (column + i >= columns) store(&values.at[i], 0.0f);
            }
            tile.cast(tile_row(sweep + k), eight_column(), values, scale);
        }
    }
}

template <int LOADS, bool WHOLE, class Source>
__device__ __forceinline__ void cast_tile(const Destination& to, const Source& source, int row0, int column0) {
    const float scale = given_scale(to);
    Seen seen;
    const TileCast<FORMAT, SHARING, WHOLE> tile = {to, tiles_of_the_launch[0], seen, row0, column0};
    tile.begin();
    if (SHARING == PerRow) __syncthreads();
    fill_tile<LOADS>(tile, source, scale);
    tile.template finish<WHOLE>();
    measure(to, seen, row0 == 0 && column0 == 0, [&] { tile.flush(); });
}

// Casts one tile of a source. `fetch(row, column)` reads the inputs of eight neighbouring values, and `values(raw, row, column)` computes them.
// Values outside the matrix are ignored. `wide` means that eights are aligned. `LOADS` loads are in flight.
template <int LOADS, class Source>
__device__ __forceinline__ void quantize_tile(const Destination& to, Source source, int row0 = first_row(), int column0 = blockIdx.x * TILE) {
    if (skips(to, row0, row0 == 0 && column0 == 0)) return;
    if (source.wide && row0 + TILE <= to.rows && column0 + TILE <= to.columns) {
        source.wide = true;
        cast_tile<LOADS, true>(to, source, row0, column0);
    } else {
        cast_tile<LOADS, false>(to, source, row0, column0);
    }
}
