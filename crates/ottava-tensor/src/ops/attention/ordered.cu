// Causal attention of whole documents in the order of sums of attention_order.cuh, for 16-bit types and heads of a multiple of 16 channels up to DIM. A row
// has the bits that attention over a cache in X gives its token.
//
// S = Q·Kᵀ and O += P·V are computed by mma.m16n8k16. Rows are queries: up to ROWS queries of a block share a key head, and a warp has 16 of them. In
// comments, g = lane / 4 and t = lane % 4, as in the PTX ISA, "Matrix Fragments for mma.m16n8k16". A lane has the rows g and g + 8 of its warp.
// - Lane t of a row of Q or K has the pieces t, t + 4 and so on of 16 bytes. So products have the channels of `paged_attention/tensor_cores.cuh`.
// - The accumulator of S becomes P, the first operand of P·V, in 16 bits.
// A block copies the keys and values of a stream to shared memory while it multiplies with the keys and values of the stream before.

#define WARPS 8
#define ROWS (16 * WARPS)
// The numbers of 16-byte pieces of a key, of tiles of 16 tokens in a unit, of tokens in a unit, of streams in a part, and of units in a stream of a part.
#define PIECES (DIM / 8)
#define TILES (DIM <= 64 ? 2 : 1)
#define UNIT (16 * TILES)
#define STREAMS 4
#define UNITS 4
#define STREAM (UNIT * UNITS)
#define PART (STREAM * STREAMS)
// The bytes of the keys, or of the values, of a stream.
#define STAGE (STREAM * DIM * 2)

// A document, and the queries of a tile of it.
struct Tile { int start, length, first; };

// Finds the tile of a block. Document d has the tiles from `at[d] / together + d` on, so that the document of a tile is found by its number.
__device__ __forceinline__ Tile find(const int* at, int documents, int seq_len, int together, int tile) {
    if (!at) {
        const int of_sequence = (seq_len + together - 1) / together;
        return {tile / of_sequence * seq_len, seq_len, tile % of_sequence * together};
    }
    int low = 0, high = documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (at[middle] / together + middle <= tile) low = middle;
        else high = middle;
    }
    return {at[low], at[low + 1] - at[low], (tile - at[low] / together - low) * together};
}

// Copies 16 bytes to shared memory, or zeros if `is_read` is false.
__device__ __forceinline__ void copy_piece(u32 to, const void* from, bool is_read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_read ? 16 : 0) : "memory");
}
__device__ __forceinline__ uint4 shared_piece(u32 from) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(from) : "memory");
    return words;
}
// Returns the second operands of two products, for the channels of a piece and of the next piece: 16 tokens of values.
__device__ __forceinline__ void load_values(u32 (&b)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
}
// Return the place of a piece in a row of keys or of values. The pieces that lanes read at once are in different banks.
__device__ __forceinline__ int key_place(int row, int piece) { return row * DIM * 2 + (piece ^ (row & 1) << 2) * 16; }
__device__ __forceinline__ int value_place(int row, int piece) { return row * DIM * 2 + (piece ^ (row & 7)) * 16; }

// Grid (tiles · key heads). `heads` is the number of query heads. `group` query heads share a key head, and tiles have `together` tokens. With `by_token`, `lse` is
// [tokens, heads]; otherwise it is [sequences, heads, seq_len].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) ordered_attention(
    X* o, float* lse, const X* q, const X* k, const X* v, int q_stride, int k_stride, int v_stride, int seq_len, const int* cu_seqlens,
    int documents, int heads, int group, int together, int dim, int by_token, float scale, int window, float cap) {
    extern __shared__ __align__(16) char memory[];
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
    const int kv_heads = heads / group, kv = blockIdx.x % kv_heads;
    // Tiles with many keys come first.
    const Tile tile = find(cu_seqlens, documents, seq_len, together, (gridDim.x - 1 - blockIdx.x) / kv_heads);
    const int count = min(together, tile.length - tile.first);
    if (count <= 0) return;
    const u32 keys = shared_address(memory), values = keys + 2 * STAGE;
    float4* const total = (float4*)(memory + 4 * STAGE) + threadIdx.x;

    // The two rows of this lane: the token in the document, the number of tokens that it sees, or 0 beyond the tile, and the queries.
    int tokens[2], limits[2], query_heads[2];
    u32 queries[2][PIECES];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = warp * 16 + g + 8 * r, token = row / group;
        const bool is_row = token < count;
        tokens[r] = tile.first + token, limits[r] = is_row ? tokens[r] + 1 : 0, query_heads[r] = kv * group + row % group;
        const X* const from = q + (u64)(tile.start + tokens[r]) * q_stride + query_heads[r] * dim;
#pragma unroll
        for (int j = 0; j < PIECES / 4; j++) {
            const int channel = (j * 4 + t) * 8;
            uint4 words = make_uint4(0, 0, 0, 0);
            if (is_row && channel < dim) words = *(const uint4*)(from + channel);
            queries[r][j * 4] = words.x, queries[r][j * 4 + 1] = words.y, queries[r][j * 4 + 2] = words.z, queries[r][j * 4 + 3] = words.w;
        }
    }
    // The keys that the block reads, and the first key and the last key that all rows of the warp see.
    const int seen = tile.first + count, base = window ? max(0, tile.first + 1 - window) / UNIT * UNIT : 0;
    const int first_row = warp * 16, last_row = min(warp * 16 + 15, count * group - 1);
    const bool has_rows = first_row <= last_row;
    const int least = has_rows ? tile.first + first_row / group + 1 : 0, most_seen = has_rows ? tile.first + last_row / group + 1 : 0;
    const int from_all = window ? max(0, most_seen - window) : 0, from_any = window ? max(0, least - window) : 0;

    // Stream `s`, counted from the first token, has units in the part s / STREAMS.
    const int first_stream = base / PART * STREAMS, streams = (seen + PART - 1) / PART * STREAMS;
    auto unit_of = [&](int s, int n) { return s / STREAMS * PART + (n * STREAMS + s % STREAMS) * UNIT; };
    auto copy_stream = [&](int s) {
        if (s < streams) {
            const u32 to = (s & 1) * STAGE;
#pragma unroll
            for (int n = 0; n < UNITS; n++) {
                const int unit = unit_of(s, n);
                if (unit >= seen || unit + UNIT <= base) continue;
#pragma unroll
                for (int i = 0; i < UNIT * PIECES / (32 * WARPS); i++) {
                    const int at = i * 32 * WARPS + threadIdx.x, row = at / PIECES, piece = at % PIECES;
                    // Values after the last token must be finite.
                    const u64 token = tile.start + min(unit + row, seen - 1);
                    const int channel = piece * 8;
                    copy_piece(keys + to + key_place(n * UNIT + row, piece), k + token * k_stride + kv * dim + channel, channel < dim);
                    copy_piece(values + to + value_place(n * UNIT + row, piece), v + token * v_stride + kv * dim + channel, channel < dim);
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    // The weighted values of a part, and for both rows the largest score and the sum of powers, of the part and of all parts before.
    float of_part[DIM / 8][4] = {}, part_most[2] = {-INFINITY, -INFINITY}, part_sum[2] = {};
    float total_most[2] = {-INFINITY, -INFINITY}, total_sum[2] = {};
    copy_stream(first_stream);
#pragma unroll 1
    for (int s = first_stream; s < streams; s++) {
        copy_stream(s + 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        float weighted[DIM / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sums[2][2] = {};
        const u32 stage = (s & 1) * STAGE;
#pragma unroll 1
        for (int n = 0; n < UNITS; n++) {
            const int unit = unit_of(s, n);
            if (unit >= most_seen || unit + UNIT <= from_any) continue;
            // Columns are tokens: 8 i + 2 t and 8 i + 2 t + 1 of tile u.
            float scores[TILES][2][4] = {};
#pragma unroll
            for (int u = 0; u < TILES; u++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = n * UNIT + u * 16 + i * 8 + g;
#pragma unroll
                    for (int j = 0; j < PIECES / 4; j++) {
                        const uint4 key = shared_piece(keys + stage + key_place(row, j * 4 + t));
                        const u32 b[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const int w = j * 4 + half * 2;
                            const u32 a[4] = {queries[0][w], queries[1][w], queries[0][w + 1], queries[1][w + 1]};
                            multiply(X(), scores[u][i], a, b + half * 2);
                        }
                    }
                }
            }
            const bool is_seen_by_all = unit + UNIT <= least && unit >= from_all;
            float factors[2], bases[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = largest[r];
#pragma unroll
                for (int u = 0; u < TILES; u++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& score = scores[u][e / 2][r * 2 + e % 2];
                        score *= scale;
                        if (cap > 0.0f) score = capped(score, cap);
                        const int position = unit + u * 16 + e / 2 * 8 + 2 * t + e % 2;
                        if (!is_seen_by_all && (position >= limits[r] || (window && position < limits[r] - window))) score = -INFINITY;
                        most = fmaxf(most, score);
                    }
                }
                for (int bits = 1; bits < 4; bits *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, bits));
                bases[r] = base_of(most);
                factors[r] = power(largest[r] - bases[r]);
                largest[r] = most;
                sums[r][0] *= factors[r], sums[r][1] *= factors[r];
            }
            u32 p[TILES][4];
#pragma unroll
            for (int u = 0; u < TILES; u++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float low = power(scores[u][i][r * 2] - bases[r]), high = power(scores[u][i][r * 2 + 1] - bases[r]);
                        sums[r][0] += low, sums[r][1] += high;
                        p[u][i * 2 + r] = pair_of(X(), low, high);
                    }
                }
            }
            if (__any_sync(FULL, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
                for (int c = 0; c < DIM / 8; c++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) weighted[c][e] *= factors[e / 2];
                }
            }
#pragma unroll
            for (int u = 0; u < TILES; u++) {
#pragma unroll
                for (int c = 0; c < DIM / 8; c += 2) {
                    u32 b[4];
                    const int row = n * UNIT + u * 16 + lane % 16;
                    load_values(b, values + stage + value_place(row, c + lane / 16));
                    multiply(X(), weighted[c], p[u], b);
                    multiply(X(), weighted[c + 1], p[u], b + 2);
                }
            }
        }
        // All warps have read the stage, which the next copies overwrite.
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = sums[r][0] + sums[r][1];
            for (int bits = 1; bits < 4; bits *= 2) sum += __shfl_xor_sync(FULL, sum, bits);
            const Join join(part_most[r], largest[r]);
            part_most[r] = join.most, part_sum[r] = join(part_sum[r], sum);
#pragma unroll
            for (int c = 0; c < DIM / 8; c++) {
                of_part[c][r * 2] = join(of_part[c][r * 2], weighted[c][r * 2]);
                of_part[c][r * 2 + 1] = join(of_part[c][r * 2 + 1], weighted[c][r * 2 + 1]);
            }
        }
        if (s % STREAMS != STREAMS - 1) continue;
        const Join joins[2] = {Join(total_most[0], part_most[0]), Join(total_most[1], part_most[1])};
        const bool is_first = s / STREAMS == first_stream / STREAMS, is_last = s + 1 == streams;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            total_most[r] = joins[r].most, total_sum[r] = joins[r](total_sum[r], part_sum[r]);
            part_most[r] = -INFINITY, part_sum[r] = 0.0f;
        }
#pragma unroll
        for (int c = 0; c < DIM / 8; c++) {
            const float4 before = is_first ? make_float4(0, 0, 0, 0) : total[c * 32 * WARPS];
            float* const own = of_part[c];
            const float4 all = make_float4(joins[0](before.x, own[0]), joins[0](before.y, own[1]), joins[1](before.z, own[2]), joins[1](before.w, own[3]));
            if (!is_last) {
                total[c * 32 * WARPS] = all;
                own[0] = own[1] = own[2] = own[3] = 0.0f;
                continue;
            }
            own[0] = all.x, own[1] = all.y, own[2] = all.z, own[3] = all.w;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (limits[r] == 0) continue;
        const int token = tile.start + tokens[r], head = query_heads[r];
        const float inverse = 1.0f / total_sum[r];
        X* const out = o + ((u64)token * heads + head) * dim;
#pragma unroll
        for (int c = 0; c < DIM / 8; c++) {
            const int channel = c * 8 + 2 * t;
            if (channel < dim) *(u32*)(out + channel) = pair_of(X(), of_part[c][r * 2] * inverse, of_part[c][r * 2 + 1] * inverse);
        }
        const u64 at = by_token ? (u64)token * heads + head : ((u64)(token / seq_len) * heads + head) * seq_len + token % seq_len;
        if (t == 0) lse[at] = 0.693147181f * total_most[r] + logf(total_sum[r]);
    }
}
