// The last stage of every kernel that writes FP8 operands: tiles of 128 x 128 values become codes, row by row from
// registers and column by column through shared memory, and are measured on the way. `FORMAT` is the type of the codes.
// Blocks have 256 threads, unless a kernel says otherwise. `codes` and `transposed` may be null; both are padded with zeros to multiples of 16.
#define TILE 128

// The parameters of a kernel that name a destination, and the destination that they name. A second one has a prefix.
#define DESTINATION_OF(p)                                                                                              \
    unsigned char *p##codes, unsigned char *p##transposed, float *p##scale_inv, float *p##amax, u64 *p##saturated,     \
        u64 *p##underflowed, u64 *p##elements, const float *p##scale, int p##rows, int p##columns, int p##padded_rows, \
        int p##padded_columns
#define THE_DESTINATION_OF(p)                                                                                          \
    { p##codes, p##transposed, p##scale_inv, p##amax, p##saturated, p##underflowed, p##elements, *p##scale, p##rows,   \
      p##columns, p##padded_rows, p##padded_columns }
#define DESTINATION DESTINATION_OF()
#define THE_DESTINATION THE_DESTINATION_OF()

struct Destination {
    unsigned char *codes, *transposed;
    float *scale_inv, *amax;
    u64 *saturated, *underflowed, *elements;
    float scale;
    int rows, columns, padded_rows, padded_columns;
};

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

// Eight values rounded to the storage type, as if written and read again.
__device__ __forceinline__ void round8(float* v) { unpack8(pack8<X>(v), v); }

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

// Codes of eight values in two words. Only groups whose extremes tell that something is lost are counted one by one: the
// product by a positive scale keeps their order.
template <class T = FORMAT> __device__ __forceinline__ uint2 encode8(const float* v, float scale, Seen& seen) {
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
    return make_uint2(encode<T>(a[0], a[1]) | encode<T>(a[2], a[3]) << 16,
                      encode<T>(a[4], a[5]) | encode<T>(a[6], a[7]) << 16);
}

// The codes of a tile, four to a word. Exchanging words by the number of the row's sixteen keeps both ways of access free
// of bank conflicts.
struct alignas(16) Tile {
    u32 words[TILE * TILE / 4];
    __device__ __forceinline__ u32* at(int row, int word) { return words + row * (TILE / 4) + (word ^ (row / 16 * 4)); }
};

// Puts the codes of eight values at (row, column) of the tile at (row0, column0).
__device__ __forceinline__ void put(const Destination& to, Tile& tile, int row0, int column0, int row, int column, uint2 eight) {
    *(uint2*)tile.at(row, column / 4) = eight;
    if (to.codes && row0 + row < to.padded_rows && column0 + column < to.padded_columns)
        *(uint2*)(to.codes + (u64)(row0 + row) * to.padded_columns + column0 + column) = eight;
}

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

// Writes the transpose of a tile that all threads have filled: each thread turns four columns of sixteen rows.
__device__ __forceinline__ void flush(const Destination& to, Tile& tile, int row0, int column0) {
    if (!to.transposed) return;
    const int sixteen = threadIdx.x % 8, word = threadIdx.x / 8, row = row0 + sixteen * 16, column = column0 + word * 4;
    if (row >= to.padded_rows || column >= to.padded_columns) return;
    turn([&](int i) { return *tile.at(sixteen * 16 + i, word); }, to.transposed + (u64)column * to.padded_rows + row, to.padded_rows);
}

// Adds what the block saw to the statistics; a barrier for all threads. The `first` block of a matrix writes the rest.
__device__ __forceinline__ void measure(const Destination& to, const Seen& seen, bool first) {
    __shared__ u32 warps[3][32];
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
        *to.scale_inv = 1.0f / to.scale;
        atomicAdd(to.elements, (u64)to.rows * to.columns);
    }
}

// Of a grid that has one matrix.
__device__ __forceinline__ void measure(const Destination& to, const Seen& seen) { measure(to, seen, blockIdx.x == 0 && blockIdx.y == 0); }

// The first row of this block's tiles. From the end of the matrix to its start, since what was written last before is
// likely to be in the cache still.
__device__ __forceinline__ int first_row() { return (gridDim.y - 1 - blockIdx.y) * TILE; }

// The first of the eight columns that this thread takes of every sixteenth row in `quantize_tile`.
__device__ __forceinline__ int tile_column() { return blockIdx.x * TILE + threadIdx.x % 16 * 8; }

// One tile of a source: `fetch(row, column)` reads what eight neighbouring values need, of which only those within the matrix
// count, and `values` computes them. `LOADS` of them are on their way at a time.
template <int LOADS, class Source> __device__ __forceinline__ void quantize_tile(const Destination& to, const Source& source) {
    __shared__ Tile tile;
    const int row0 = first_row(), column0 = blockIdx.x * TILE, column = threadIdx.x % 16 * 8;
    Seen seen;
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep += LOADS) {
        typename Source::Raw raw[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int row = (sweep + k) * 16 + threadIdx.x / 16;
            if (row0 + row < to.rows && column0 + column < to.columns) raw[k] = source.fetch(row0 + row, column0 + column);
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int row = (sweep + k) * 16 + threadIdx.x / 16;
            uint2 eight = make_uint2(0, 0);
            if (row0 + row < to.rows && column0 + column < to.columns) {
                float v[8];
                source.values(raw[k], v);
                // Padding is zero, whatever the row makes of it.
#pragma unroll
                for (int i = 0; i < 8; i++) if (column0 + column + i >= to.columns) v[i] = 0.0f;
                eight = encode8(v, to.scale, seen);
            }
            put(to, tile, row0, column0, row, column, eight);
        }
    }
    measure(to, seen);
    flush(to, tile, row0, column0);
}
