// Attention on tensor cores, for 16-bit activations, heads of a multiple of 16 channels up to DIM, and blocks of 16 tokens or a larger power of
// two.
//
// Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ are computed by mma.m16n8k16. Its 8 columns are queries that share a key head. Its 16 rows are tokens in the first
// product and channels in the second. The bytes in flight limit the speed of a multiprocessor (tiles.cuh). Lanes have keys and values in pieces of 16
// bytes:
// - The order of channels in a product of 16 channels is arbitrary. So the four lanes of a row of K hold neighbouring pieces of the row, and Q has the same
//   permutation.
// - The accumulator of Sᵀ becomes Pᵀ in 16 bits. Transposed by `movmatrix`, it is the second operand of Vᵀ·Pᵀ.
// - A lane of Vᵀ holds the same piece of four tokens and interleaves their elements. The rows of Vᵀ are the channels in this order.
//
// Most instructions run only once in decoding. So loops outside of the contractions are not unrolled, and divisions are avoided.
// In comments, g = lane / 4 and t = lane % 4, as in the PTX ISA, "Matrix Fragments for mma.m16n8k16".

__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
    return y;
}
__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The type in which elements are multiplied. Codes are multiplied as halves, which represent them exactly.
template <class T> struct Operand { typedef T Type; };
template <> struct Operand<e4m3> { typedef f16 Type; };
typedef Operand<KV>::Type M;

// Returns the elements 2i and 2i + 1 of a piece.
template <class T> __device__ __forceinline__ u32 pair_in(const Piece& p, int i) { return p.words[i]; }
template <> __device__ __forceinline__ u32 pair_in<e4m3>(const Piece& p, int i) { return halves<e4m3>(p.words[i / 2] >> (i % 2 * 16)); }
// Pairs the elements 2i of two pieces, and the elements 2i + 1 of both pieces.
template <class T> __device__ __forceinline__ void interleave(const Piece& a, const Piece& b, int i, u32* even, u32* odd) {
    *even = __byte_perm(a.words[i], b.words[i], 0x5410);
    *odd = __byte_perm(a.words[i], b.words[i], 0x7632);
}
template <> __device__ __forceinline__ void interleave<e4m3>(const Piece& a, const Piece& b, int i, u32* even, u32* odd) {
    const u32 codes = __byte_perm(a.words[i / 2], b.words[i / 2], i % 2 ? 0x7362 : 0x5140);
    *even = halves<e4m3>(codes);
    *odd = halves<e4m3>(codes >> 16);
}

// The number of products of 16 channels for a lane's pieces of V.
#define V_ROWS (V_PIECES * EACH / 2)

// Stores four elements, rounded once.
__device__ __forceinline__ void store4(X* to, float4 v) {
    union { uint2 words; X at[4]; } e;
    store(&e.at[0], v.x), store(&e.at[1], v.y), store(&e.at[2], v.z), store(&e.at[3], v.w);
    *(uint2*)to = e.words;
}
__device__ __forceinline__ float4 scaled(float4 v, float by) { return make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }

// The result of a column over some of its keys: four channels, the base, and the sum of powers.
struct Result {
    float4 out;
    float base, sum;
    // Joins the result over later keys, with the base and the sum of powers `stat`.
    __device__ __forceinline__ void join(float4 v, float2 stat) {
        const Join join(base, stat.x);
        out = make_float4(join(out.x, v.x), join(out.y, v.y), join(out.z, v.z), join(out.w, v.w));
        base = join.base, sum = join(sum, stat.y);
    }
};
// The result over no keys.
__device__ __forceinline__ Result no_result() { return {make_float4(0, 0, 0, 0), -INFINITY, 0.0f}; }

// The number of parts of a context that a thread reads at a time.
#define AHEAD 8

// Returns the number of tokens of a split of a context: the smallest multiple of `rounds` times STRIDE for which there are at most SPLITS splits.
__device__ __forceinline__ int split_of(int context, int rounds) {
    const int least = rounds * STRIDE; // a power of two
    return (context + least * SPLITS - 1 >> __ffs(least * SPLITS) - 1) * least;
}

// Computes attention for a tile of up to `together` new tokens of a sequence, and for up to C query heads that share a key head. There are up to C =
// 8·N columns.
//
// A block reads one split of the context, part by part. The warps divide each part. If `part` is 0, a split is a part, and its size depends on the batch.
// Otherwise parts have `part` tokens and begin at multiples of `part`, so that the order of sums (attention_order.cuh) depends only on the context of a
// token. If a tile does not contain all new tokens of its sequence, it has one split. If a tile has several splits, blocks write the results of parts, and
// the block that finishes last joins them in order. `parts` is [sequences, key heads · chunks, most_parts, columns, dim]. `stats` is [sequences, key heads
// · chunks, most_parts, columns, 2] and has the base and the sum of powers. `arrived` is [sequences, key heads · chunks] and is reset to zero.
//
// Grid (tiles + sequences · (splits - 1), key heads, chunks of `most` of the `group` query heads that share a key head). The first splits of all
// tiles come first, then further splits. Consecutive blocks compute the key heads of one tile, whose keys and values are neighbours in memory. The
// start of a block is latency-bound, so it avoids divisions if a tile is one token.
template <int N, class Tiles>
__device__ __forceinline__ void attend(X* o, Lse lse, float* parts, float* stats, u32* arrived, const X* qkv, const typename Tiles::Cache& cache, const X* sinks,
                                       Batch batch, int tokens, int group, int most, int dim, int together, int most_splits, int rounds, int part, int most_parts,
                                       float scale, Bounds bounds) {
    start_successors();
    // The shuffle tells the compiler that all lanes take the same branches, which saves registers.
    const int C = 8 * N, lane = threadIdx.x % 32, warp = __shfl_sync(FULL, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
    const int kv_heads = gridDim.y, heads = kv_heads * group;
    // Tiles are not blockIdx.y, because only x may exceed 65,535.
    const u32 order = blockIdx.y * gridDim.x + blockIdx.x;
    const int kv = order % kv_heads, block = order / kv_heads;
    const int skip = blockIdx.z * most, count = min(most, group - skip);
    const int further = block - ((int)gridDim.x - batch.sequences * (most_splits - 1));
    const int number_of_split = further < 0 ? 0 : (u32)further / (u32)batch.sequences + 1;
    const Place place = further < 0 ? batch.find(block, together) : batch.at(further - (number_of_split - 1) * batch.sequences);
    const int sequence = place.sequence, start = place.start;
    const bool padding = sequence == batch.sequences;
    const int stop = padding ? tokens : place.stop;
    const int first = start + (further < 0 ? (block - batch.first_tile(place, together)) * together : 0);
    const int rows_of_tile = min(together, stop - first), columns = rows_of_tile * count;
    if (columns <= 0) return;

    // Column n is head n % count of token n / count. If a tile has one token, it is token 0. For so few columns, the product gives the exact
    // quotient.
    const int inverse = together > 1 ? 65535 / count + 1 : 0;
    auto token_of = [&](int n) { return n * inverse >> 16; };
    const int first_head = kv * group + skip, width = (heads + 2 * kv_heads) * dim, quads = dim / 4;
    X* const out = o + ((u64)first * heads + first_head) * dim;
    auto store_column = [&](int n, int channel, float4 v) { store4(out + (token_of(n) * (heads - count) + n) * dim + channel, v); };
    auto for_quads = [&](auto work) {
#pragma unroll 1
        for (int i = threadIdx.x; i < columns * (DIM / 4); i += 32 * WARPS) {
            if (i % (DIM / 4) < quads) work(i / (DIM / 4), i % (DIM / 4));
        }
    };
    if (padding) {
        wait_for_predecessors();
        for_quads([&](int column, int quad) { store_column(column, quad * 4, make_float4(0, 0, 0, 0)); });
        return;
    }
    // The number of tokens that the first token of the tile sees, and the number that the last token sees.
    const int least = place.seen_by(first), seen = least + rows_of_tile - 1;
    // The first key of the first 16-token tile that a token of the tile sees. Blocks before it may belong to other sequences by now.
    const int base = bounds.first(least) / 16 * 16;
    const int origin = part ? base / part * part : base;
    const int split = stop - start <= together ? split_of(place.context - origin, rounds) : seen - origin;
    const int splits = seen - origin <= split ? 1 : (seen - origin + split - 1) / split;
    const int begin = origin + number_of_split * split, end = min(seen, begin + split);
    if (begin >= end) return;

    const int part_size = part ? part : split;
    auto walk_from = [&](int from) {
        return Walk(batch, sequence, kv, kv_heads, max(from, base / STRIDE * STRIDE), min(end, from + part_size), base, warp, lane);
    };
    Tiles tiles(walk_from(begin), cache);
    // Keys and values of earlier passes are in the cache even before the predecessors end.
    const bool is_old = tiles.tile < tiles.walk.end && min(tiles.tile + TILES * 16, end) <= place.cached;
    if (!is_old) wait_for_predecessors();
    if (tiles.tile < tiles.walk.end) tiles.start();
    if (is_old) wait_for_predecessors();

    // The queries, the second operand: column g of each group of eight columns. Halves are divided by a power of two, so that no half overflows.
    u32 q[N][K_PIECES * EACH / 2];
    float scales[N][2];
    int limits[N][2];
#pragma unroll
    for (int j = 0; j < N; j++) {
        const int n = j * 8 + g;
        const X* const from = qkv + (u64)(first + token_of(n)) * width + (first_head + n - token_of(n) * count) * dim;
        float largest = 0.0f;
#pragma unroll
        for (int e = 0; e < K_PIECES * EACH / 8; e++) {
            if (IsCodes<KV>::value) {
                const int channel = (e * 8 / EACH * 4 + t) * EACH + e * 8 % EACH;
                Eight<X> eight = {};
                if (n < columns && channel < dim) eight = load8(from + channel);
                const uint4 words = eight.words[0];
                q[j][e * 4] = words.x, q[j][e * 4 + 1] = words.y, q[j][e * 4 + 2] = words.z, q[j][e * 4 + 3] = words.w;
                largest = fmaxf(largest, largest8(eight));
            } else {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int channel = e * 32 + half * 16 + t * 4;
                    const uint2 words = n < columns && channel < dim ? *(const uint2*)(from + channel) : make_uint2(0, 0);
                    q[j][e * 4 + 2 * half] = words.x, q[j][e * 4 + 2 * half + 1] = words.y;
                }
            }
        }
        u32 exponent = 127;
        if (IsCodes<KV>::value) {
            for (int bits = 1; bits < 4; bits *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, bits));
            exponent = min(max(__float_as_uint(largest) >> 23, 1u), 253u);
            const float divisor = __uint_as_float((254 - exponent) << 23);
#pragma unroll
            for (int i = 0; i < K_PIECES * EACH / 2; i++) {
                const X low = {(unsigned short)q[j][i]}, high = {(unsigned short)(q[j][i] >> 16)};
                q[j][i] = pair_of(M(), load(low) * divisor, load(high) * divisor);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = j * 8 + 2 * t + c;
            scales[j][c] = scale * __uint_as_float(__shfl_sync(FULL, exponent, (2 * t + c) * 4) << 23);
            limits[j][c] = column < columns ? least + token_of(column) : 0;
        }
    }

    // Stores four channels of a column from its result over all of its keys.
    auto store_result = [&](int column, int quad, Result result) {
        const int head = first_head + column - token_of(column) * count;
        if (sinks) result.sum += sink_power(sinks[head], result.base);
        store_column(column, quad * 4, scaled(result.out, 1.0f / result.sum));
        if (quad == 0 && lse.values) lse.store(first + token_of(column), head, heads, result.base, result.sum);
    };
    const int chunk = kv * gridDim.z + blockIdx.z, room = together * most;
    const u64 parts_begin = (u64)(sequence * kv_heads * gridDim.z + chunk) * most_parts * room;
    // The results of the warps, and of all earlier parts if the tile has one split. Rows are four floats longer than DIM, for fewer bank conflicts.
    typedef float4 Sums[WARPS][C][DIM / 4 + 1];
    __shared__ float2 shared_stats[WARPS * C];
    typedef float4 Totals[C][DIM / 4];
    __shared__ float2 total_stats[2][C];
    int number = part ? number_of_split * (split / part_size) : number_of_split;
#pragma unroll 1
    for (int from = begin;; number++) {
        // For the columns 2t and 2t + 1 of each group of eight: the base, the sum of this lane's powers, and the weighted values.
        float bases[N][2], sums[N][2] = {}, weighted[N][V_ROWS][4] = {};
#pragma unroll
        for (int j = 0; j < N; j++) bases[j][0] = bases[j][1] = -INFINITY;
#pragma unroll 1
        for (; tiles.tile < tiles.walk.end; tiles.next()) {
            const int tile = tiles.tile;
            tiles.wait_for_keys();
            // Rows are the tokens g and g + 8 of a tile. Columns are as above.
            float scores[TILES][N][4] = {};
#pragma unroll
            for (int u = 0; u < TILES; u++) {
#pragma unroll
                for (int i = 0; i < K_PIECES * EACH / 4; i++) {
                    const int j = i * 4 / EACH, pair = i * 2 % (EACH / 2);
                    const Piece upper = tiles.key(u, 0, j), lower = tiles.key(u, 1, j);
                    const u32 a[4] = {pair_in<KV>(upper, pair), pair_in<KV>(lower, pair), pair_in<KV>(upper, pair + 1), pair_in<KV>(lower, pair + 1)};
#pragma unroll
                    for (int n = 0; n < N; n++) multiply(M(), scores[u][n], a, &q[n][2 * i]);
                }
            }
            float key_scales[TILES][2] = {}, value_scales[TILES][2] = {};
            if (IsCodes<KV>::value) {
#pragma unroll
                for (int u = 0; u < TILES; u++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) key_scales[u][i] = tiles.key_scale(u, i), value_scales[u][i] = tiles.value_scale(u, i);
                }
            }
            tiles.start_next_keys();

            u32 p[TILES][N][2];
#pragma unroll
            for (int n = 0; n < N; n++) {
                float factors[2], subtracted[2];
                // The scale of a value is added to the exponent of its power. So powers times scales are at most 1, and no significant half underflows.
                // The base is not less than these raised scores.
                float raises[TILES][2] = {};
#pragma unroll
                for (int u = 0; u < TILES; u++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        // Scales after the last token may be NaN or infinite. Added to the hidden score, -infinity, they would give NaN.
                        if (IsCodes<KV>::value) raises[u][i] = fminf(fmaxf(log2_of(value_scales[u][i]), -149.0f), 128.0f);
                    }
                }
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float most = -INFINITY;
#pragma unroll
                    for (int u = 0; u < TILES; u++) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float& score = scores[u][n][2 * i + c];
                            score = score_of(score, IsCodes<KV>::value ? scales[n][c] * key_scales[u][i] : scales[n][c], bounds.cap);
                            if (bounds.hides(tile + 16 * u + g + 8 * i, limits[n][c])) score = -INFINITY;
                            most = fmaxf(most, score + raises[u][i]);
                        }
                    }
                    for (int bits = 4; bits < 32; bits *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, bits));
                    const float base = fmaxf(bases[n][c], integer_above(most));
                    factors[c] = rise(bases[n][c], base);
                    subtracted[c] = subtrahend(base);
                    bases[n][c] = base;
                    sums[n][c] *= factors[c];
                }
#pragma unroll
                for (int u = 0; u < TILES; u++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float powers[2];
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            const float score = scores[u][n][2 * i + c] - subtracted[c];
                            powers[c] = power(score + raises[u][i]);
                            sums[n][c] += IsCodes<KV>::value ? power(score) : powers[c];
                        }
                        p[u][n][i] = transposed(pair_of(M(), powers[0], powers[1]));
                    }
                }
#pragma unroll
                for (int i = 0; i < V_ROWS; i++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) weighted[n][i][e] *= factors[e % 2];
                }
            }
            tiles.wait_for_values();
#pragma unroll
            for (int u = 0; u < TILES; u++) {
#pragma unroll
                for (int i = 0; i < V_ROWS; i++) {
                    const int j = i * 2 / EACH, pair = i % (EACH / 2);
                    u32 a[4];
                    interleave<KV>(tiles.value(u, 0, j), tiles.value(u, 1, j), pair, &a[0], &a[1]);
                    interleave<KV>(tiles.value(u, 2, j), tiles.value(u, 3, j), pair, &a[2], &a[3]);
#pragma unroll
                    for (int n = 0; n < N; n++) multiply(M(), weighted[n][i], a, p[u][n]);
                }
            }
            tiles.start_next_values();
        }
        from += part_size;
        const bool is_last = from >= end;
        if constexpr (Tiles::HAS_PARTS) {
            if (!is_last) {
                tiles = Tiles(walk_from(from), cache);
                if (tiles.tile < tiles.walk.end) tiles.start();
            }
        }
        // Warps join their results in shared memory.
        Sums& shared_out = tiles.template room_for<Sums>();
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int column = n * 8 + 2 * t + c;
                for (int bits = 4; bits < 32; bits *= 2) sums[n][c] += __shfl_xor_sync(FULL, sums[n][c], bits);
                if (g == 0) shared_stats[warp * C + column] = make_float2(bases[n][c], sums[n][c]);
#pragma unroll
                for (int i = 0; i < V_ROWS; i += 2) {
                    const int channel = (i * 2 / EACH * 8 + g) * EACH + i * 2 % EACH;
                    const float(*w)[4] = &weighted[n][i];
                    if (channel < dim) shared_out[warp][column][channel / 4] = make_float4(w[0][c], w[0][2 + c], w[1][c], w[1][2 + c]);
                }
            }
        }
        __syncthreads();
        for_quads([&](int column, int quad) {
            Result result = no_result();
#pragma unroll
            for (int w = 0; w < WARPS; w++) result.join(shared_out[w][column][quad], shared_stats[w * C + column]);
            if (splits > 1) {
                const u64 at = parts_begin + (u64)number * room + column;
                ((float4*)parts)[at * quads + quad] = result.out;
                if (quad == 0) ((float2*)stats)[at] = make_float2(result.base, result.sum);
                return;
            }
            if constexpr (Tiles::HAS_PARTS) {
                __shared__ Totals totals;
                if (number > 0) {
                    const float2 stat = total_stats[number % 2][column];
                    Result all = {totals[column][quad], stat.x, stat.y};
                    all.join(result.out, make_float2(result.base, result.sum));
                    result = all;
                }
                if (!is_last) {
                    totals[column][quad] = result.out;
                    if (quad == 0) total_stats[(number + 1) % 2][column] = make_float2(result.base, result.sum);
                    return;
                }
            }
            store_result(column, quad, result);
        });
        if (is_last) break;
        __syncthreads();
    }
    if (splits == 1) return;

    __syncthreads();
    __shared__ bool is_last_split;
    if (threadIdx.x == 0) {
        u32* const counter = &arrived[sequence * kv_heads * gridDim.z + chunk];
        is_last_split = count_arrival(counter) == splits - 1;
        if (is_last_split) *counter = 0;
    }
    __syncthreads();
    if (!is_last_split) return;
    const int count_of_parts = (seen - origin + part_size - 1) / part_size;
    for_quads([&](int column, int quad) {
        const u64 first_part = parts_begin + column;
        Result result = no_result();
#pragma unroll 1
        for (int s = 0; s < count_of_parts; s += AHEAD) {
            float4 values[AHEAD];
            float2 of_values[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                // Parts beyond the last part have no weight.
                const u64 at = first_part + (u64)(s + k) * room;
                const bool is_part = s + k < count_of_parts;
                values[k] = is_part ? __ldcg((const float4*)parts + at * quads + quad) : make_float4(0, 0, 0, 0);
                of_values[k] = is_part ? __ldcg((const float2*)stats + at) : make_float2(-INFINITY, 0.0f);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) result.join(values[k], of_values[k]);
        }
        store_result(column, quad, result);
    });
}

// The launch bounds limit registers so that a multiprocessor runs BLOCKS blocks at once.
#define ATTEND(NAME, N, TILES_OF, BLOCKS, CACHE, CACHE_OF_TILES)                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) NAME(                                                      \
        X* o, float* lse, int lse_length, float* parts, float* stats, u32* arrived, const X* qkv, CACHE cache, const float* scale_inv, const X* sinks, \
        const int* query_starts, const int* context_lens, const int* cached_lens, const int* block_tables, int sequences,       \
        int max_blocks, int block_size, int tokens, int group, int most, int dim, int together, int most_splits, int rounds,    \
        int part, int most_parts, float scale BOUNDS) {                                                                                                   \
        const Batch batch = {query_starts, context_lens, cached_lens, block_tables, sequences, max_blocks, block_size};         \
        attend<N, TILES_OF>(o, {lse, lse_length}, parts, stats, arrived, qkv, CACHE_OF_TILES, sinks, batch, tokens, group, most, dim, together, most_splits, rounds, part, most_parts, scale, \
                  BOUNDS_OF_KERNEL);                                                                                            \
    }
#ifdef COPIED
ATTEND(attend_copied, 1, CopiedTiles, 4, const __grid_constant__ TensorMap, (CopiedTiles::Cache{&cache, scale_inv}))
#else
ATTEND(attend_1, 1, LoadedTiles, IsCodes<KV>::value || DIM > 128 ? 2 : 3, const KV*, (LoadedTiles::Cache{cache, scale_inv, dim}))
#if DIM <= 128
ATTEND(attend_2, 2, LoadedTiles, 2, const KV*, (LoadedTiles::Cache{cache, scale_inv, dim}))
#endif
#endif
