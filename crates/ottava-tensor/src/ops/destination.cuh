// The last stage of every kernel that writes FP8 operands: tiles of 128 x 128 values become codes, row by row from
// registers and column by column through shared memory, and are measured on the way. `FORMAT` is the type of the codes, `SHARING`
// says which values share a scale. Blocks have 256 threads, unless a kernel says otherwise.
enum Sharing { PerTensor, PerRow, Blocks1x128, Blocks128x128 };
#define TILE 128

// What a kernel writes; laid out as `Destination` in quantize/cuda.rs. `codes` and `transposed` may be null; both are padded with
// zeros. One scale per tensor is given. Others follow from the values: of blocks while their tile is in shared memory, of rows and
// columns in a launch of the same kernel before, which `measures` their amaxes and writes nothing else.
struct Destination {
    unsigned char *codes, *transposed;
    float *scale_inv, *transposed_scale_inv, *amax;
    u64 *saturated, *underflowed, *elements;
    const float* scale;
    float *row_amax, *column_amax;
    int rows, columns;
    // From a row of codes, or of scales where those have rows, to the next.
    int pitch, transposed_pitch, scale_pitch, transposed_scale_pitch;
    // Of scales that follow from an amax.
    float epsilon, bound;
    int power_of_two, measures;

    // The columns from F on, of whole tiles, as a destination of their own.
    __device__ __forceinline__ Destination right_of(int F) const {
        Destination right = *this;
        right.columns -= F;
        if (codes) right.codes += F;
        if (transposed) right.transposed += (u64)F * transposed_pitch;
        if (column_amax) right.column_amax += F;
        if (SHARING == PerRow || SHARING == Blocks1x128) right.transposed_scale_inv += F;
        if (SHARING == Blocks1x128) right.scale_inv += (u64)(F / TILE) * scale_pitch;
        if (SHARING == Blocks128x128) {
            right.scale_inv += F / TILE;
            right.transposed_scale_inv += (u64)(F / TILE) * transposed_scale_pitch;
        }
        return right;
    }
};

__device__ __forceinline__ int padded(int n) { return (n + 15) / 16 * 16; }
// Along the dimension that is contracted, blocks are whole.
__device__ __forceinline__ int padded_length(int n) { return SHARING == Blocks1x128 || SHARING == Blocks128x128 ? (n + TILE - 1) / TILE * TILE : padded(n); }

// Largest finite value, and half the smallest positive one, which still rounds to zero.
template <class T> struct Fp8;
template <> struct Fp8<e4m3> { static constexpr float largest = 448.0f, vanishing = 0x1p-10f; };
template <> struct Fp8<e5m2> { static constexpr float largest = 57344.0f, vanishing = 0x1p-17f; };

// Two FP8 codes, `a` in the low byte: to nearest even, saturating, NaN to 0x7F.
template <class T> __device__ __forceinline__ u32 encode(float a, float b);
template <> __device__ __forceinline__ u32 encode<e4m3>(float a, float b) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}
template <> __device__ __forceinline__ u32 encode<e5m2>(float a, float b) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}

// The first `valid` of eight elements; the rest are zero.
template <class T> __device__ __forceinline__ Eight<T> fetch8(const T* p, int valid, bool wide) {
    if (wide) return load8(p);
    Eight<T> e;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        store(&e.at[i], 0.0f);
        if (i < valid) e.at[i] = p[i];
    }
    return e;
}

// What one thread saw.
struct Seen {
    float amax = 0.0f;
    u32 beyond = 0, lost = 0;
};

template <class T> __device__ __forceinline__ uint2 encode8(const float* a) {
    return make_uint2(encode<T>(a[0], a[1]) | encode<T>(a[2], a[3]) << 16,
                      encode<T>(a[4], a[5]) | encode<T>(a[6], a[7]) << 16);
}

// Codes of eight values in two words. Only groups whose extremes tell that something is lost are counted one by one: the
// product by a positive scale keeps their order.
template <class T> __device__ __forceinline__ uint2 encode8(const float* v, float scale, Seen& seen) {
    float a[8], largest = fabsf(v[0]), smallest = fabsf(v[0]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        a[i] = v[i] * scale;
        largest = fmaxf(largest, fabsf(v[i]));
        smallest = fminf(smallest, fabsf(v[i]));
    }
    seen.amax = fmaxf(seen.amax, largest);
    if (largest * scale > Fp8<T>::largest || smallest * scale <= Fp8<T>::vanishing) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            seen.beyond += fabsf(a[i]) > Fp8<T>::largest;
            seen.lost += v[i] != 0.0f && fabsf(a[i]) <= Fp8<T>::vanishing;
        }
    }
    return encode8<T>(a);
}

// The same with a scale for each value, counted only where no other copy is.
template <class T> __device__ __forceinline__ uint2 encode8(const float* v, const float* scales, bool counts, Seen& seen) {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = v[i] * scales[i];
    if (counts) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            seen.amax = fmaxf(seen.amax, fabsf(v[i]));
            seen.beyond += fabsf(a[i]) > Fp8<T>::largest;
            seen.lost += v[i] != 0.0f && fabsf(a[i]) <= Fp8<T>::vanishing;
        }
    }
    return encode8<T>(a);
}

// The codes of a tile, four to a word. Exchanging words by the number of the row's sixteen keeps both ways of access free
// of bank conflicts.
// Where blocks have scales, a tile `HOLDS` its values until it has them, and then their codes in their places: eights of a row are
// exchanged instead of words, and neighbours use other halves.
#define HOLDS (SHARING == Blocks1x128 || SHARING == Blocks128x128)
struct alignas(16) Tile {
    u32 words[TILE * TILE / 4 * (HOLDS ? sizeof(X) : 1)];
    __device__ __forceinline__ Eight<X>* held(int row, int eight) { return (Eight<X>*)words + row * (TILE / 8) + (eight ^ row / 16); }
    __device__ __forceinline__ u32* at(int row, int word) {
        if constexpr (!HOLDS) return words + row * (TILE / 4) + (word ^ (row / 16 * 4));
        const int eight = word / 2;
        return (u32*)held(row, eight) + ((eight ^ eight >> 3) & 1) * 2 + word % 2;
    }
};
// In dynamic shared memory, as many as the kernel needs.
extern __shared__ Tile tiles_of_the_launch[];

// Writes four columns of sixteen rows as rows of sixteen bytes: `word(i)` holds the codes of row i, and the columns' rows in
// `transposed` lie `pitch` bytes apart.
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
        *(uint4*)(transposed + j * pitch) = make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]);
}

// The place in a tile of what a thread takes in `TileCast`: eight columns of every sixteenth row.
__device__ __forceinline__ int eight_column() { return threadIdx.x % 16 * 8; }
__device__ __forceinline__ int tile_row(int sweep) { return sweep * 16 + threadIdx.x / 16; }

// The first row of this block's tiles. From the end of the matrix to its start, since what was written last before is
// likely to be in the cache still.
__device__ __forceinline__ int first_row() { return (gridDim.y - 1 - blockIdx.y) * TILE; }

// As `take_scale`, but for `bound`.
__device__ __forceinline__ float own_scale(const Destination& to, float largest, float amax) {
    const float a = amax < to.epsilon ? to.epsilon : amax;
    if (a == 0.0f || a > 3.402823466e38f) return 1.0f;
    float s = largest / a;
    if (s > 3.402823466e38f) s = to.bound;
    return to.power_of_two ? __uint_as_float(__float_as_uint(s) & 0x7F800000) : s;
}

// Of N rows that sixteen threads share, the largest of row k, in the threads from k * 16 / N on.
template <int N> __device__ __forceinline__ float row_largest(float* largest) {
    int step = 8;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, step /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int k = 0; k < n; k++) {
            const float keep = upper ? largest[k + n] : largest[k], give = upper ? largest[k] : largest[k + n];
            largest[k] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFF, give, step));
        }
    }
#pragma unroll
    for (step = 8 / N; step > 0; step /= 2) largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xFFFFFFFF, largest[0], step));
    return largest[0];
}

// The largest of a tile's column, in the thread of its number, from what each has seen in its eight columns. A barrier for all.
__device__ __forceinline__ float column_largest(const Eight<X>& columns) {
    __shared__ alignas(16) float warps[8][TILE];
    float v[8];
    unpack8(columns, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = fmaxf(fabsf(v[i]), fabsf(__shfl_xor_sync(0xFFFFFFFF, v[i], 16)));
    if (threadIdx.x % 32 < 16) store8(warps[threadIdx.x / 32] + eight_column(), pack8<f32>(v));
    __syncthreads();
    float largest = 0.0f;
    if (threadIdx.x < TILE)
        for (int w = 0; w < 8; w++) largest = fmaxf(largest, warps[w][threadIdx.x]);
    return largest;
}

// A tile of values on its way to codes of type T: first `begin`, then `cast` of all its eights, `finish`, a barrier, and `flush`.
template <class T> struct TileCast {
    const Destination& to;
    Tile& tile;
    Seen& seen;
    const int row0, column0;
    // The one scale, or those of the thread's columns.
    float scales[SHARING == PerRow ? 8 : 1];
    // The largest values seen, with signs that mean nothing: of each column, and of all.
    Eight<X> columns = {};
    float largest = 0.0f;

    __device__ __forceinline__ TileCast(const Destination& to, Tile& tile, Seen& seen, int row0, int column0)
        : to(to), tile(tile), seen(seen), row0(row0), column0(column0) {}

    // Reads the scales that are known. All threads come here.
    __device__ __forceinline__ void begin() {
        if constexpr (SHARING == PerTensor) scales[0] = *to.scale;
        if constexpr (SHARING == PerRow) {
            if (to.measures || !to.transposed) return;
            const int column = column0 + threadIdx.x;
            // All are done with those of another tile.
            __syncthreads();
            column_scales(threadIdx.x < TILE && column < padded(to.columns) ? to.column_amax[column] : 0.0f, scales);
        }
    }

    // Finds the scales of columns from the amax of each, in the thread of its number, and writes their reciprocals: those of this
    // thread's eight columns. A barrier for all.
    __device__ __forceinline__ void column_scales(float amax, float* eight) const {
        __shared__ alignas(16) float all[TILE];
        if (threadIdx.x < TILE) {
            const float scale = own_scale(to, Fp8<T>::largest, amax);
            const int column = column0 + threadIdx.x;
            all[threadIdx.x] = scale;
            if (column < padded(to.columns) && (SHARING == Blocks1x128 || row0 == 0))
                to.transposed_scale_inv[(SHARING == Blocks1x128 ? (u64)(row0 / TILE) * to.transposed_scale_pitch : 0) + column] = 1.0f / scale;
        }
        __syncthreads();
        unpack8(load8(all + eight_column()), eight);
    }

    __device__ __forceinline__ void write_codes(int row, uint2 eight) const {
        const int column = column0 + eight_column();
        row += row0;
        if (to.codes && row < padded(to.rows) && column < padded_length(to.columns))
            *(uint2*)(to.codes + (u64)row * to.pitch + column) = eight;
    }

    // This thread's next N eights, from row `tile_row(sweep)` on. What lies beyond the matrix is zero.
    template <int N> __device__ __forceinline__ void cast(int sweep, const Eight<X>* eights) {
        if constexpr (SHARING == PerTensor) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                const int row = tile_row(sweep + k);
                // Zero even if the scale is infinite.
                uint2 eight = make_uint2(0, 0);
                if (row0 + row < to.rows && column0 + eight_column() < to.columns) {
                    float v[8];
                    unpack8(eights[k], v);
                    eight = encode8<T>(v, scales[0], seen);
                }
                *(uint2*)tile.at(row, eight_column() / 4) = eight;
                write_codes(row, eight);
            }
        } else if constexpr (SHARING == Blocks128x128) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                *tile.held(tile_row(sweep + k), eight_column() / 8) = eights[k];
                largest = fmaxf(largest, largest8(eights[k]));
            }
        } else {
            // Each of the sixteen threads of N rows finds the scale of one.
            const int threads = 16 / N, row = row0 + tile_row(sweep + threadIdx.x % 16 / threads);
            const bool writes = threadIdx.x % threads == 0 && row < padded(to.rows);
            float amax = 0.0f;
            if (SHARING == Blocks1x128 || to.measures) {
                float largest[N];
#pragma unroll
                for (int k = 0; k < N; k++) largest[k] = largest8(eights[k]);
                amax = row_largest<N>(largest);
            }
            if (SHARING == PerRow && to.measures) {
                if (to.row_amax && writes) atomicMax((u32*)to.row_amax + row, __float_as_uint(amax));
#pragma unroll
                for (int k = 0; k < N; k++) columns = larger8(columns, eights[k]);
                return;
            }
            float scale_of_row = 1.0f;
            if (to.codes) {
                if (SHARING == PerRow && row < padded(to.rows)) amax = to.row_amax[row];
                scale_of_row = own_scale(to, Fp8<T>::largest, amax);
                if (writes && (SHARING == Blocks1x128 || column0 == 0))
                    to.scale_inv[(SHARING == Blocks1x128 ? (u64)(column0 / TILE) * to.scale_pitch : 0) + row] = 1.0f / scale_of_row;
            }
#pragma unroll
            for (int k = 0; k < N; k++) {
                float v[8];
                unpack8(eights[k], v);
                const float scale = __shfl_sync(0xFFFFFFFF, scale_of_row, threadIdx.x % 32 / 16 * 16 + k * threads);
                if (to.codes) write_codes(tile_row(sweep + k), encode8<T>(v, scale, seen));
                if (!to.transposed) continue;
                if constexpr (SHARING == PerRow) {
                    *(uint2*)tile.at(tile_row(sweep + k), eight_column() / 4) = encode8<T>(v, scales, !to.codes, seen);
                } else {
                    *tile.held(tile_row(sweep + k), eight_column() / 8) = eights[k];
                    columns = larger8(columns, eights[k]);
                }
            }
        }
    }

    // What needs to have seen the whole tile. All threads come here.
    __device__ __forceinline__ void finish() {
        if constexpr (SHARING == PerRow) {
            if (!to.measures || !to.column_amax) return;
            const float amax = column_largest(columns);
            const int column = column0 + threadIdx.x;
            if (threadIdx.x < TILE && column < to.columns) atomicMax((u32*)to.column_amax + column, __float_as_uint(amax));
        }
        if constexpr (SHARING == Blocks1x128) {
            if (!to.transposed) return;
            float scales[8];
            column_scales(column_largest(columns), scales);
#pragma unroll 2
            for (int k = 0; k < 8; k++) {
                float v[8];
                unpack8(*tile.held(tile_row(k), eight_column() / 8), v);
                *(uint2*)tile.at(tile_row(k), eight_column() / 4) = encode8<T>(v, scales, !to.codes, seen);
            }
        }
        if constexpr (SHARING == Blocks128x128) {
            const float scale = own_scale(to, Fp8<T>::largest, block_max(largest));
            if (threadIdx.x == 0 && row0 < to.rows && column0 < to.columns) {
                const int row = row0 / TILE, column = column0 / TILE;
                if (to.codes) to.scale_inv[(u64)row * to.scale_pitch + column] = 1.0f / scale;
                if (to.transposed) to.transposed_scale_inv[(u64)column * to.transposed_scale_pitch + row] = 1.0f / scale;
            }
#pragma unroll 2
            for (int k = 0; k < 8; k++) {
                float v[8];
                unpack8(*tile.held(tile_row(k), eight_column() / 8), v);
                const uint2 eight = encode8<T>(v, scale, seen);
                *(uint2*)tile.at(tile_row(k), eight_column() / 4) = eight;
                write_codes(tile_row(k), eight);
            }
        }
    }

    // Writes the transpose of a tile that all threads have filled: each thread turns four columns of sixteen rows.
    __device__ __forceinline__ void flush() const {
        if (!to.transposed) return;
        const int sixteen = threadIdx.x % 8, word = threadIdx.x / 8, row = row0 + sixteen * 16, column = column0 + word * 4;
        if (row >= to.transposed_pitch || column >= padded(to.columns)) return;
        turn([&](int i) { return *tile.at(sixteen * 16 + i, word); }, to.transposed + (u64)column * to.transposed_pitch + row, to.transposed_pitch);
    }
};

// Adds what the block saw to the statistics; a barrier for all threads. The `first` block of a matrix writes the rest.
__device__ __forceinline__ void measure(const Destination& to, const Seen& seen, bool first) {
    __shared__ u32 warps[3][32];
    if (to.measures) return;
    const u32 amax = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(seen.amax));
    const u32 beyond = __reduce_add_sync(0xFFFFFFFF, seen.beyond), lost = __reduce_add_sync(0xFFFFFFFF, seen.lost);
    if (threadIdx.x % 32 == 0) {
        warps[0][threadIdx.x / 32] = amax;
        warps[1][threadIdx.x / 32] = beyond;
        warps[2][threadIdx.x / 32] = lost;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    u32 all[3] = {};
    for (int w = 0; w < blockDim.x / 32; w++) {
        all[0] = max(all[0], warps[0][w]);
        all[1] += warps[1][w];
        all[2] += warps[2][w];
    }
    raise(to.amax, __uint_as_float(all[0]));
    if (all[1]) atomicAdd(to.saturated, (u64)all[1]);
    if (all[2]) atomicAdd(to.underflowed, (u64)all[2]);
    if (first) {
        if (SHARING == PerTensor) *to.scale_inv = 1.0f / *to.scale;
        atomicAdd(to.elements, (u64)to.rows * to.columns);
    }
}

// Of a grid that has one matrix.
__device__ __forceinline__ void measure(const Destination& to, const Seen& seen) { measure(to, seen, blockIdx.x == 0 && blockIdx.y == 0); }

// One tile of a source: `fetch(row, column)` reads what eight neighbouring values need, of which only those within the matrix
// count, and `values` computes them. `LOADS` of them are on their way at a time.
template <int LOADS, class Source> __device__ __forceinline__ void quantize_tile(const Destination& to, const Source& source) {
    const int row0 = first_row(), column0 = blockIdx.x * TILE, column = column0 + eight_column();
    Seen seen;
    TileCast<FORMAT> cast(to, tiles_of_the_launch[0], seen, row0, column0);
    cast.begin();
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep += LOADS) {
        typename Source::Raw raw[LOADS];
        Eight<X> eights[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int row = row0 + tile_row(sweep + k);
            if (row < to.rows && column < to.columns) raw[k] = source.fetch(row, column);
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            eights[k] = {};
            if (row0 + tile_row(sweep + k) >= to.rows || column >= to.columns) continue;
            eights[k] = source.values(raw[k]);
            // Padding is zero, whatever the row makes of it.
#pragma unroll
            for (int i = 0; i < 8; i++) if (column + i >= to.columns) store(&eights[k].at[i], 0.0f);
        }
        cast.template cast<LOADS>(sweep, eights);
    }
    cast.finish();
    measure(to, seen);
    cast.flush();
}
