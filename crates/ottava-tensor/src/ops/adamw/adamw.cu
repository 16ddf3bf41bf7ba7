// AdamW for many parameters in one launch.

// Tables of `PARTS` and `CAST_PARTS` parameters (cuda.rs). `end` is the number of blocks of this parameter and of the preceding parameters.
struct Part {
    Tensors of;
    float* amax;
    u32 rows, columns;
    u32 end, offset;        // in units of SLICE_UNIT elements
};
struct Parts { Part at[PARTS]; };

struct CastPart {
    Tensors of;
    unsigned char *codes, *transposed;
    float* scale_inv;
    union {
        const float* scale;             // one given scale per tensor
        float* transposed_scale_inv;    // scales of blocks
    };
    int rows, columns;
    u32 slot, end;
};
struct CastParts { CastPart at[CAST_PARTS]; };

// The number of threads per block, as in cuda.rs.
constexpr u32 THREADS = 256;
// The minimum number of blocks per multiprocessor. Formats with many bytes per element profit more from registers for loads in flight than from
// occupancy.
constexpr int BLOCKS = sizeof(G) + sizeof(W) + sizeof(M) + sizeof(V) <= 8 ? 3 : 2;

// The elements that a block updates: `chunk` elements of a parameter, or of one row if moments are expanded and rows do not consist of whole groups.
struct Piece {
    const Part& part;
    u64 row, length, start, end;
    bool together;

    __device__ __forceinline__ static Piece of(const Parts& parts, u64 chunk) {
        int t = 0;
        while (blockIdx.x >= parts.at[t].end) t++;
        const Part& part = parts.at[t];
        const bool whole = MOMENTS != Expanded || part.columns % 128 == 0;
        const u64 length = whole ? (u64)part.rows * part.columns : part.columns, across = (length + chunk - 1) / chunk;
        const u64 block = blockIdx.x - (t > 0 ? parts.at[t - 1].end : 0), start = block % across * chunk;
        return {part, block / across, length, start, min(start + chunk, length), aligned(part.of) && (whole || part.columns % 8 == 0)};
    }
    // Calls `each` for all eights of this thread and prefetches the next eight. All threads make the same number of calls.
    template <class Each> __device__ __forceinline__ void walk(const Each& each) const {
        if (together && (u32)(end - start) % (8 * THREADS) == 0) walk<true>(each);
        else walk<false>(each);
    }
    // In a `WHOLE` piece, all eights exist and are aligned.
    template <bool WHOLE, class Each> __device__ __forceinline__ void walk(const Each& each) const {
        Raw next;
        if (place<WHOLE>(start).valid > 0) fetch(next, part.of, place<WHOLE>(start));
        for (u64 first = start; first < end; first += 8 * THREADS) {
            const Raw raw = next;
            const u64 second = first + 8 * THREADS;
            if (second < end && place<WHOLE>(second).valid > 0) fetch(next, part.of, place<WHOLE>(second));
            each(raw, place<WHOLE>(first));
        }
    }
    // Returns the position of this thread's eight. `first` is the position of thread 0's eight.
    template <bool WHOLE> __device__ __forceinline__ Place place(u64 first) const {
        const u64 at = first + 8 * threadIdx.x;
        const int valid = WHOLE ? 8 : at < end ? min(end - at, 8ull) : 0;
        return {row * length + at, row * ((length + 127) / 128) + at / 128, valid, WHOLE || together && valid == 8};
    }
};

// Returns the maximum over a warp of non-negative values.
__device__ __forceinline__ float warp_max(float x) { return __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(x))); }

// Raises the amaxes of the new weights and moments, which determine their scales. For most weights, an upper bound makes the division unnecessary.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) adamw_amaxes(const float* norm, const Scalars* scalars, u64 chunk, const __grid_constant__ Parts parts) {
    if (!finite(*norm)) return;
    const Piece piece = Piece::of(parts, chunk);
    const Tensors& of = piece.part.of;
    Amaxes& to = *of.amaxes;
    const Update how = update_of(of, *scalars, *norm);
    const auto known_weight = [&] { return SCALED_W ? *(volatile const float*)&to.weight : 0.0f; };
    float m = 0.0f, v = 0.0f, known = known_weight();
    piece.walk([&](const Raw& raw, const Place& place) {
        const bool any = place.valid > 0;
        float g[8];
        Values x = {};
        if (any) decode_moments(raw, how, g, x.m, x.v);
        if (any) moments8(g, how, x.m, x.v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            m = fmaxf(m, fabsf(x.m[i]));
            v = fmaxf(v, fabsf(x.v[i]));
        }
        if (!SCALED_W) return;
        const float bound = bound_of_weights(largest8(raw.w) * how.scale, largest_ratio8(x.m, x.v), how);
        const bool may_be_largest = any && !(bound < known);
        // Read one eight ahead, to hide the latency.
        known = known_weight();
        if (!__any_sync(0xFFFFFFFF, may_be_largest)) return;
        if (any) update8(raw, x, of, place, how);
        float w = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) w = fmaxf(w, fabsf(x.w[i]));
        w = warp_max(w);
        if (threadIdx.x % 32 == 0) raise(&to.weight, w);
    });
    if (!SCALED_M) return;
    m = warp_max(m);
    v = warp_max(v);
    if (threadIdx.x % 32 < 2) raise(threadIdx.x % 2 ? &to.v : &to.m, threadIdx.x % 2 ? v : m);
}

// Stores the new inverse scales, in a separate launch because updates read the old ones. One thread per parameter.
extern "C" __global__ void adamw_powers(const float* norm, int count, const __grid_constant__ Parts parts) {
    if (!finite(*norm) || threadIdx.x >= count) return;
    const Tensors& of = parts.at[threadIdx.x].of;
    const Amaxes& seen = *of.amaxes;
    if (SCALED_W) *of.scale = power_back(seen.weight, LARGEST_WEIGHT);
    if (SCALED_M) *of.m_scale = power_back(seen.m, LARGEST_M);
    if (SCALED_M) *of.v_scale = power_back(seen.v, LARGEST_V);
}

// Updates `chunk` elements of a parameter per block, a multiple of eight. Raises the amax of the weights if requested.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) adamw(const float* norm, const Scalars* scalars, u64 chunk, const __grid_constant__ Parts parts) {
    if (!finite(*norm)) return;
    const Piece piece = Piece::of(parts, chunk);
    const Tensors& of = piece.part.of;
    Update how = update_of(of, *scalars, *norm);
    how.offset = (u64)SLICE_UNIT * piece.part.offset;
    float largest = 0.0f;
    piece.walk([&](const Raw& raw, const Place& place) {
        const bool any = place.valid > 0;
        Values x = {};
        if (any) update8(raw, x, of, place, how);
        const Eight<X> read = write(x, of, place, any, how);
        if (any && piece.part.amax) largest = fmaxf(largest, largest8(read));
    });
    block_raise(piece.part.amax, largest);
}

// Updates a tile of a matrix. Each thread updates eight elements of every 16th row. `WHOLE` tiles are inside the matrix and aligned.
// These kernels are bound by instructions at the clock of a loaded GPU, so their common case has no instructions for partial eights.
template <bool WHOLE>
__device__ __forceinline__ void update_tile(const Tensors& of, const TileCast<FORMAT>& tile, const Update& how, bool together) {
    const Destination& to = tile.to;
    const int column = tile.column0 + eight_column(), valid_columns = WHOLE ? 8 : max(min(to.columns - column, 8), 0);
    const float scale = given_scale(to);
    const auto place = [&](int sweep) {
        const int row = tile.row0 + tile_row(sweep), valid = WHOLE || row < to.rows ? valid_columns : 0;
        return Place{(u64)row * to.columns + column, (u64)row * ((to.columns + TILE - 1) / TILE) + column / TILE, valid, WHOLE || together && valid == 8};
    };
    // Prefetches the next row.
    Raw next;
    const auto fetch_row = [&](int sweep) {
        if (sweep < 8 && place(sweep).valid > 0) fetch(next, of, place(sweep));
    };
    fetch_row(0);
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep++) {
        const Raw raw = next;
        const Place here = place(sweep);
        fetch_row(sweep + 1);
        Values x = {};
        if (here.valid > 0) update8(raw, x, of, here, how);
        tile.cast(tile_row(sweep), eight_column(), write(x, of, here, here.valid > 0, how), scale);
    }
}

// Updates a tile of a matrix per block and casts its new weights.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
adamw_cast(const float* norm, const Scalars* scalars, float* amax, u64* saturated, u64* underflowed, u64* elements,
           float epsilon, float bound, int power_of_two, const __grid_constant__ CastParts parts) {
    if (!finite(*norm)) return;
    int t = 0;
    while (blockIdx.x >= parts.at[t].end) t++;
    const CastPart& part = parts.at[t];
    const Tensors& of = part.of;
    const Update how = update_of(of, *scalars, *norm);
    Destination to = {part.codes, part.transposed, part.scale_inv, nullptr, amax + part.slot, saturated + part.slot, underflowed + part.slot,
                      elements + part.slot};
    to.rows = part.rows;
    to.columns = part.columns;
    to.pitch = padded_length(part.columns);
    to.transposed_pitch = padded_length(part.rows);
    if constexpr (SHARING == PerTensor) {
        to.scale = part.scale;
    } else {
        // Rows of scales are padded to multiples of 4.
        to.scale_pitch = (part.columns + 4 * TILE - 1) / (4 * TILE) * 4;
        to.transposed_scale_pitch = (part.rows + 4 * TILE - 1) / (4 * TILE) * 4;
        to.transposed_scale_inv = part.transposed_scale_inv;
        to.epsilon = epsilon;
        to.bound = bound;
        to.power_of_two = power_of_two;
    }
    const int block = blockIdx.x - (t > 0 ? parts.at[t - 1].end : 0), across = max((to.columns + TILE - 1) / TILE, 1);
    const int row0 = block / across * TILE, column0 = block % across * TILE;
    const bool together = to.columns % 8 == 0 && aligned(of);
    Seen seen;
    const TileCast<FORMAT> tile = {to, tiles_of_the_launch[0], seen, row0, column0};
    if (together && row0 + TILE <= to.rows && column0 + TILE <= to.columns) update_tile<true>(of, tile, how, true);
    else update_tile<false>(of, tile, how, together);
    tile.finish();
    measure(to, seen, block == 0, [&] { tile.flush(); });
}
