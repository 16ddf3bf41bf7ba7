// Turns eight pairs; `turn` is 1 or -1.
__device__ __forceinline__ void turn8(Eight<X>& first, Eight<X>& second, const Eight<float>& cos, const Eight<float>& sin, float turn) {
    float u[8], v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float a = load(first.at[i]), b = load(second.at[i]), s = sin.at[i] * turn;
        u[i] = a * cos.at[i] - b * s;
        v[i] = b * cos.at[i] + a * s;
    }
    first = pack8<X>(u);
    second = pack8<X>(v);
}

#ifndef FORMAT
__device__ __forceinline__ void turn1(X& first, X& second, float cos, float sin, float turn) {
    const float a = load(first), b = load(second), s = sin * turn;
    store(&first, a * cos - b * s);
    store(&second, b * cos + a * s);
}

// Grid over rows; threads stride over the pairs of its rotated heads, eight at a time where rows are aligned.
extern "C" __global__ void __launch_bounds__(256) rope(X* x, const float* table, int width, int heads, int dim, int seq_len, int start, float turn) {
    X* row = x + (u64)blockIdx.x * width;
    const float* angles = table + (u64)(start + blockIdx.x % seq_len) * dim;
    const int half = dim / 2;
    if (half % 8 == 0 && width % 8 == 0 && aligned(x, table)) {
        const int eights = half / 8;
#pragma unroll 2
        for (int p = threadIdx.x; p < heads * eights; p += blockDim.x) {
            X* at = row + p / eights * dim + p % eights * 8;
            Eight<X> first = load8(at), second = load8(at + half);
            turn8(first, second, load8(angles + p % eights * 8), load8(angles + half + p % eights * 8), turn);
            store8(at, first);
            store8(at + half, second);
        }
        return;
    }
    for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
        X* at = row + p / half * dim + p % half;
        turn1(at[0], at[half], angles[p % half], angles[half + p % half], turn);
    }
}

// The largest absolute value of the turned matrix, of which nothing is written. Blocks take every gridDim-th row.
extern "C" __global__ void __launch_bounds__(256) rope_amax(float* amax, const X* __restrict__ x, const float* __restrict__ table, int rows,
                                                            int width, int heads, int dim, int seq_len, int start, float turn) {
    const int half = dim / 2, turned = heads * dim;
    const bool wide = half % 8 == 0 && width % 8 == 0 && aligned(x, table);
    float largest = 0.0f;
    for (int t = blockIdx.x; t < rows; t += gridDim.x) {
        const X* row = x + (u64)t * width;
        const float* angles = table + (u64)(start + t % seq_len) * dim;
        if (wide) {
            const int eights = half / 8;
#pragma unroll 2
            for (int p = threadIdx.x; p < heads * eights; p += blockDim.x) {
                const X* at = row + p / eights * dim + p % eights * 8;
                Eight<X> first = load8(at), second = load8(at + half);
                turn8(first, second, load8(angles + p % eights * 8), load8(angles + half + p % eights * 8), turn);
                largest = fmaxf(largest, fmaxf(largest8(first), largest8(second)));
            }
#pragma unroll 2
            for (int c = turned + 8 * threadIdx.x; c < width; c += 8 * blockDim.x) largest = fmaxf(largest, largest8(load8(row + c)));
        } else {
            for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
                const X* at = row + p / half * dim + p % half;
                X first = at[0], second = at[half];
                turn1(first, second, angles[p % half], angles[half + p % half], turn);
                largest = fmaxf(largest, fmaxf(fabsf(load(first)), fabsf(load(second))));
            }
            for (int c = turned + threadIdx.x; c < width; c += blockDim.x) largest = fmaxf(largest, fabsf(load(row[c])));
        }
    }
    block_raise(amax, largest);
}
#else
// Eights of the turned matrix, each with the eight that it is paired with.
struct Turned {
    const X* x;
    const float* table;
    int columns, heads, dim, seq_len, start;
    float turn;
    struct Raw { Eight<X> own, other; Eight<float> cos, sin; float sign; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        const X* from = x + (u64)row * columns + column;
        Raw raw = {load8(from)};
        raw.sign = 0.0f;
        if (column < heads * dim) {
            const int half = dim / 2, pair = column % half;
            const float* angles = table + (u64)(start + row % seq_len) * dim + pair;
            const bool first = column % dim < half;
            raw.other = load8(first ? from + half : from - half);
            raw.cos = load8(angles);
            raw.sin = load8(angles + half);
            raw.sign = first ? -turn : turn;
        }
        return raw;
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw) const {
        if (raw.sign == 0.0f) return raw.own;
        float v[8];
        // The bits of `turn8`: subtracting is adding the negative.
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = load(raw.own.at[i]) * raw.cos.at[i] + load(raw.other.at[i]) * (raw.sin.at[i] * raw.sign);
        return pack8<X>(v);
    }
};

// Two tiles side by side, so that the table is read once for both. A thread does eight pairs of a row of each.
__device__ __forceinline__ void rope_pairs(const Destination& to, const Turned& from) {
    Tile* tiles = tiles_of_the_launch;
    const int row0 = first_row(), half = from.dim / 2, pair = threadIdx.x % 8 * 8, rotated = from.heads * from.dim;
    const int first = pair / half * from.dim + pair % half;
    const float scale = *to.scale;
    const auto put = [&](int tile, int row, int column, uint2 eight) {
        *(uint2*)tiles[tile].at(row, column / 4) = eight;
        column += (blockIdx.x * 2 + tile) * TILE;
        if (to.codes && row0 + row < padded(to.rows) && column < padded(to.columns))
            *(uint2*)(to.codes + (u64)(row0 + row) * to.pitch + column) = eight;
    };
    Seen seen;
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < TILE; row += 32) {
        Eight<X> a[2], b[2];
        Eight<float> cos, sin;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int column = (blockIdx.x * 2 + k) * TILE + first;
            if (row0 + row >= to.rows || column >= to.columns) continue;
            const X* at = from.x + (u64)(row0 + row) * to.columns + column;
            a[k] = load8(at);
            b[k] = load8(at + half);
        }
        if (row0 + row < to.rows && (blockIdx.x * 2 * TILE + first) < rotated) {
            const float* angles = from.table + (u64)(from.start + (row0 + row) % from.seq_len) * from.dim + pair % half;
            cos = load8(angles);
            sin = load8(angles + half);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int column = (blockIdx.x * 2 + k) * TILE + first;
            uint2 eight[2] = {};
            if (row0 + row < to.rows && column < to.columns) {
                if (column < rotated) turn8(a[k], b[k], cos, sin, from.turn);
                float v[2][8];
                unpack8(a[k], v[0]);
                unpack8(b[k], v[1]);
                eight[0] = encode8<FORMAT>(v[0], scale, seen);
                eight[1] = encode8<FORMAT>(v[1], scale, seen);
            }
            put(k, row, first, eight[0]);
            put(k, row, first + half, eight[1]);
        }
    }
    measure(to, seen);
    for (int k = 0; k < 2; k++) TileCast<FORMAT>(to, tiles[k], seen, row0, (blockIdx.x * 2 + k) * TILE).flush();
}

// 256 threads, on a grid (W / 256, T / 128) for one scale per tensor, else (W / 128, T / 128). `dim` is 16, 32, 64 or 128 and so
// divides a tile; W is a multiple of `dim`.
extern "C" __global__ void __launch_bounds__(256, 3)
    rope_codes(const X* x, const float* table, int heads, int dim, int seq_len, int start, float turn, const __grid_constant__ Destination to) {
    const Turned from = {x, table, to.columns, heads, dim, seq_len, start, turn};
    if constexpr (SHARING == PerTensor) rope_pairs(to, from);
    else quantize_tile<2>(to, from);
}
#endif
