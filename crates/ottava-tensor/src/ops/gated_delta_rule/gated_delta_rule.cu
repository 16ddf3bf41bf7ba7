// The recurrence of the gated delta rule. The columns of a state do not depend on each other. A block of eight warps holds 32 columns of a head's
// state in registers: a lane has one column, and warp w has the rows w * ROWS to (w + 1) * ROWS. Tokens are read in tiles of TOKENS.

#define WARPS 8
#define KEYS (WARPS * ROWS)
// The number of elements of a query or key that a lane reads.
#define OWN (KEYS / 32)

// The inputs of all tokens, and the sizes of the heads.
struct Inputs {
    const X* qkv;
    const float *g, *beta;
    int key_heads, heads, keys, values;
    __device__ __forceinline__ int key_head(int head) const { return head / (heads / key_heads); }
    __device__ __forceinline__ u64 width() const { return 2 * (u64)key_heads * keys + (u64)heads * values; }
    // The first column of the queries (0) or keys (1) of a key head, and of the values of a head.
    __device__ __forceinline__ int part(int which, int key_head) const { return (which * key_heads + key_head) * keys; }
    __device__ __forceinline__ int value(int head) const { return 2 * key_heads * keys + head * values; }
};

// A tile of tokens: normalised queries and keys, their products, values of the block's columns, and gates.
struct Tile {
    float q[TOKENS][KEYS], k[TOKENS][KEYS], v[TOKENS][COLUMNS], qk[TOKENS], decay[TOKENS], beta[TOKENS];
};

// What a warp reads of two tokens of the next tile.
struct Fetched {
    float q[2][OWN], k[2][OWN], v[2], g[2], beta[2];
};

// Reads the tokens `2 * warp` and `2 * warp + 1` of the tile that begins at row `t`. Rows from `end` on are zeros.
__device__ __forceinline__ void fetch(Fetched& to, const Inputs& of, int t, int end, int head, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = t + threadIdx.x / 32 * 2 + i;
        const bool inside = row < end;
        const X* const x = of.qkv + row * of.width();
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const bool has = inside && lane + 32 * j < of.keys;
            to.q[i][j] = has ? load(x[of.part(0, of.key_head(head)) + lane + 32 * j]) : 0.0f;
            to.k[i][j] = has ? load(x[of.part(1, of.key_head(head)) + lane + 32 * j]) : 0.0f;
        }
        to.v[i] = inside && column < of.values ? load(x[of.value(head) + column]) : 0.0f;
        to.g[i] = inside ? of.g[(u64)row * of.heads + head] : 0.0f;
        to.beta[i] = inside ? of.beta[(u64)row * of.heads + head] : 0.0f;
    }
}

// Normalises what `fetch` has read, and writes it to the tile.
__device__ __forceinline__ void put(Tile& tile, const Fetched& from, int keys, float eps) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = threadIdx.x / 32 * 2 + i;
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN; j++) qq += from.q[i][j] * from.q[i][j], kk += from.k[i][j] * from.k[i][j], qk += from.q[i][j] * from.k[i][j];
        const float of_q = 1.0f / sqrtf(warp_sum(qq) + eps) / sqrtf(keys), of_k = 1.0f / sqrtf(warp_sum(kk) + eps);
        qk = warp_sum(qk) * of_q * of_k;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            tile.q[at][lane + 32 * j] = from.q[i][j] * of_q;
            tile.k[at][lane + 32 * j] = from.k[i][j] * of_k;
        }
        tile.v[at][lane] = from.v[i];
        if (lane == 0) tile.qk[at] = qk, tile.decay[at] = expf(from.g[i]), tile.beta[at] = from.beta[i];
    }
}

// The sums of the warps for each column, for every second token.
struct Sums { float2 warps[2][WARPS][COLUMNS]; };
// Adds over the warps, in their order. Called by all threads of the block; `turn` alternates.
__device__ __forceinline__ float2 sum_of_warps(Sums& sums, int turn, float a, float b) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sums.warps[turn][warp][lane] = make_float2(a, b);
    __syncthreads();
    float2 sum = sums.warps[turn][0][lane];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const float2 other = sums.warps[turn][w][lane];
        sum.x += other.x;
        sum.y += other.y;
    }
    return sum;
}

// A thread's column of a state [keys, values]: ROWS rows. Elements beyond the state are zero.
struct Place {
    int keys, values, column;
    __device__ __forceinline__ int row(int j) const { return threadIdx.x / 32 * ROWS + j; }
    __device__ __forceinline__ bool has(int j) const { return row(j) < keys && column < values; }
    __device__ __forceinline__ void read(float (&s)[ROWS], const float* from) const {
#pragma unroll
        for (int j = 0; j < ROWS; j++) s[j] = from && has(j) ? from[(u64)row(j) * values + column] : 0.0f;
    }
    __device__ __forceinline__ void write(float* to, const float (&s)[ROWS]) const {
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            if (has(j)) to[(u64)row(j) * values + column] = s[j];
    }
};

// Runs a token: decays the state, and adds the key times the difference. Returns the sums of the decayed state times the key and the query.
__device__ __forceinline__ float2 project(float (&s)[ROWS], const Tile& tile, int i, Sums& sums) {
    const float decay = tile.decay[i];
    const float *const q = tile.q[i] + threadIdx.x / 32 * ROWS, *const k = tile.k[i] + threadIdx.x / 32 * ROWS;
    float of_k = 0.0f, of_q = 0.0f;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        s[j] *= decay;
        of_k = __fmaf_rn(s[j], k[j], of_k);
        of_q = __fmaf_rn(s[j], q[j], of_q);
    }
    return sum_of_warps(sums, i % 2, of_k, of_q);
}
__device__ __forceinline__ void write_to(float (&s)[ROWS], const Tile& tile, int i, float d) {
    const float* const k = tile.k[i] + threadIdx.x / 32 * ROWS;
#pragma unroll
    for (int j = 0; j < ROWS; j++) s[j] = __fmaf_rn(k[j], d, s[j]);
}

// Grid: segments, and with offsets one more for the rows of padding, which become zeros; heads; slices of COLUMNS columns. If `slots` is null, states
// begin at zero and are not kept.
extern "C" __global__ void __launch_bounds__(256) gated_delta_rule(X* o, const X* qkv, const float* g, const float* beta, const int* at, int count,
                                                                   int rows, float* states, const int* slots, const int* past,
                                                                   int key_heads, int heads, int keys, int values, float eps) {
    __shared__ __align__(16) Tile tile;
    __shared__ Sums sums;
    start_successors();
    wait_for_predecessors();
    const Segments segments = {at, count, rows};
    const Inputs of = {qkv, g, beta, key_heads, heads, keys, values};
    const int head = blockIdx.y, n = blockIdx.x, lane = threadIdx.x % 32, column = blockIdx.z * COLUMNS + lane;
    const u64 pitch = (u64)heads * values;
    o += head * values + column;
    if (n == count) {
        for (int t = segments.at[n] + threadIdx.x / 32; t < rows; t += WARPS)
            if (column < values) store(&o[t * pitch], 0.0f);
        return;
    }
    const int first = segments.first(n), end = segments.end(n);
    if (first == end) return;
    const Place place = {keys, values, column};
    float* const state = slots ? states + ((u64)slots[n] * heads + head) * keys * values : nullptr;
    float s[ROWS];
    place.read(s, state && past[n] > 0 ? state : nullptr);
    Fetched next;
    fetch(next, of, first, end, head, column);
    for (int t = first; t < end; t += TOKENS) {
        __syncthreads();
        put(tile, next, keys, eps);
        __syncthreads();
        if (t + TOKENS < end) fetch(next, of, t + TOKENS, end, head, column);
        const int tokens = min(TOKENS, end - t);
#pragma unroll 1
        for (int i = 0; i < tokens; i++) {
            const float2 sum = project(s, tile, i, sums);
            const float d = tile.beta[i] * (tile.v[i][lane] - sum.x);
            write_to(s, tile, i, d);
            if (threadIdx.x < 32 && column < values) store(&o[(t + i) * pitch], __fmaf_rn(d, tile.qk[i], sum.y));
        }
    }
    if (state) place.write(state, s);
}

// Where backward keeps states of a slice: before each tile of the segment, and before each token of a tile.
struct Kept {
    float *tiles, *tokens;
    __device__ __forceinline__ float* tile(int i) const { return tiles + (u64)i * KEYS * COLUMNS; }
    __device__ __forceinline__ float* token(int i) const { return tokens + (u64)i * KEYS * COLUMNS; }
};

// The gradients of all tokens: by normalised queries and keys of each head [T, heads, keys], by values in `dqkv`, and by the gates [T, heads].
struct Gradients {
    float *dq, *dk, *dg, *dbeta;
    X* dqkv;
};

// The sums over the columns of the block for the gradients of the gates.
struct GateSums { float beta, g[WARPS]; };

// Runs a token backward. `after` is the state after the token on entry, and before the token on return. `ds` is the gradient by it. The first slice
// sets gradients, and further slices add to them.
__device__ __forceinline__ void step_back(float (&ds)[ROWS], float (&after)[ROWS], const Kept& kept, const Tile& tile, int i, float difference,
                                          float d_o, Sums& sums, GateSums& gates, const Inputs& of, const Gradients& to, int row, int head,
                                          bool is_first, int column) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *const q = tile.q[i] + warp * ROWS, *const k = tile.k[i] + warp * ROWS, beta = tile.beta[i], decay = tile.decay[i];
    float before[ROWS], v[ROWS], of_k = 0.0f;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        v[j] = after[j] * d_o;
        ds[j] += q[j] * d_o;
        of_k += ds[j] * k[j];
    }
    const u64 at = ((u64)row * of.heads + head) * of.keys + warp * ROWS + lane;
    const bool has = lane < ROWS && warp * ROWS + lane < of.keys;
    const float dq = sum_by_element(v);
    if (has) to.dq[at] = is_first ? dq : to.dq[at] + dq;
    const float dd = sum_of_warps(sums, i % 2, of_k, 0.0f).x, dv = beta * dd, d = beta * difference;
    recall(before, kept.token(i));
    float dg = 0.0f;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        const float decayed = before[j] * decay;
        v[j] = ds[j] * d - decayed * dv;
        ds[j] -= k[j] * dv;
        dg += ds[j] * decayed;
        ds[j] *= decay;
        after[j] = before[j];
    }
    const float dk = sum_by_element(v), of_beta = warp_sum(dd * difference), of_g = warp_sum(dg);
    if (has) to.dk[at] = is_first ? dk : to.dk[at] + dk;
    if (warp == 0 && column < of.values) store(&to.dqkv[row * of.width() + of.value(head) + column], dv);
    if (lane == 0) gates.g[warp] = of_g;
    if (threadIdx.x == 0) gates.beta = of_beta;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) sum += gates.g[w];
        const u64 gate = (u64)row * of.heads + head;
        to.dg[gate] = is_first ? sum : to.dg[gate] + sum;
        to.dbeta[gate] = is_first ? gates.beta : to.dbeta[gate] + gates.beta;
    }
}

// Grid: blocks that share the segments, and heads. A block runs all slices of its head one after the other. For each, it runs forward and keeps the
// states before tiles; then, for each tile from the last to the first, it runs forward again and keeps the states before tokens, and runs backward.
// `before`, `gradient` and `dbefore` may be null. `tiles` has a state slice for each tile of each segment, `tokens` TOKENS
// slices for each block.
extern "C" __global__ void __launch_bounds__(256) gated_delta_rule_backward(
    X* dqkv, float* dg, float* dbeta, float* dbefore, float* dq, float* dk, float* tiles, float* tokens, const X* d_o, const X* qkv, const float* g,
    const float* beta, const float* before, const float* gradient, const int* at, int count, int rows, int key_heads, int heads, int keys,
    int values, float eps) {
    __shared__ __align__(16) Tile tile;
    __shared__ Sums sums;
    __shared__ GateSums gates;
    __shared__ float differences[TOKENS][COLUMNS];
    const Segments segments = {at, count, rows};
    const Inputs of = {qkv, g, beta, key_heads, heads, keys, values};
    const Gradients to = {dq, dk, dg, dbeta, dqkv};
    const int head = blockIdx.y, lane = threadIdx.x % 32;
    for (int n = blockIdx.x; n < count; n += gridDim.x) {
        const int first = segments.first(n), end = segments.end(n);
        const u64 state = ((u64)n * heads + head) * keys * values;
        // Each segment has room for one more tile than its rows fill.
        const u64 kept_tiles = ((u64)(first / TOKENS + n) * heads + (u64)head * ((end - first) / TOKENS + 1)) * KEYS * COLUMNS;
        const Kept kept = {tiles + kept_tiles, tokens + ((u64)blockIdx.x * heads + head) * TOKENS * KEYS * COLUMNS};
        for (int slice = 0; slice * COLUMNS < values; slice++) {
            const int column = slice * COLUMNS + lane;
            const Place place = {keys, values, column};
            float s[ROWS], ds[ROWS];
            place.read(s, before ? before + state : nullptr);
            place.read(ds, gradient ? gradient + state : nullptr);
            Fetched next;
            const int count_of_tiles = (end - first + TOKENS - 1) / TOKENS;
            // Runs the tokens of a tile forward.
            auto forward = [&](int of_tile, bool keeps) {
                const int t = first + of_tile * TOKENS, n = min(TOKENS, end - t);
                fetch(next, of, t, end, head, column);
                __syncthreads();
                put(tile, next, keys, eps);
                __syncthreads();
#pragma unroll 1
                for (int i = 0; i < n; i++) {
                    if (keeps) keep(kept.token(i), s);
                    const float difference = tile.v[i][lane] - project(s, tile, i, sums).x;
                    write_to(s, tile, i, tile.beta[i] * difference);
                    if (keeps && threadIdx.x < 32) differences[i][lane] = difference;
                }
            };
            for (int i = 0; i < count_of_tiles; i++) {
                keep(kept.tile(i), s);
                forward(i, false);
            }
            for (int i = count_of_tiles - 1; i >= 0; i--) {
                recall(s, kept.tile(i));
                forward(i, true);
                __syncthreads();
                const int t = first + i * TOKENS;
#pragma unroll 1
                for (int j = min(TOKENS, end - t) - 1; j >= 0; j--) {
                    const float d = column < values ? load(d_o[((u64)(t + j) * heads + head) * values + column]) : 0.0f;
                    step_back(ds, s, kept, tile, j, differences[j][lane], d, sums, gates, of, to, t + j, head, slice == 0, column);
                }
            }
            if (dbefore) place.write(dbefore + state, ds);
        }
    }
}

// Adds the gradients by normalised queries (part 0) and keys (part 1) over the heads of a key head, and returns to the projections. A warp has one
// query or key. Rows of padding become zeros, in all parts. Grid: rows; the warps of a block share the queries and keys of its row.
extern "C" __global__ void __launch_bounds__(256) gated_delta_rule_units(X* dqkv, float* dg, float* dbeta, const float* dq, const float* dk,
                                                                        const X* qkv, const int* at, int count, int key_heads, int heads, int keys,
                                                                        int values, float eps) {
    const Inputs of = {qkv, nullptr, nullptr, key_heads, heads, keys, values};
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = heads / key_heads;
    const u64 width = of.width();
    if (at && row >= at[count]) {
        for (u64 c = threadIdx.x; c < width; c += 256) store(&dqkv[row * width + c], 0.0f);
        for (int h = threadIdx.x; h < heads; h += 256) dg[(u64)row * heads + h] = dbeta[(u64)row * heads + h] = 0.0f;
        return;
    }
    for (int unit = warp; unit < 2 * key_heads; unit += WARPS) {
        const int which = unit / key_heads, h = unit % key_heads;
        const u64 at_unit = row * width + of.part(which, h);
        const float* const d = (which ? dk : dq) + ((u64)row * heads + h * group) * keys;
        const float factor = which ? 1.0f : 1.0f / sqrtf(keys);
        float x[OWN], sums[OWN], square = 0.0f, dot = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int c = lane + 32 * j;
            x[j] = c < keys ? load(qkv[at_unit + c]) : 0.0f;
            sums[j] = 0.0f;
            for (int i = 0; i < group; i++) sums[j] += c < keys ? d[(u64)i * keys + c] : 0.0f;
            square += x[j] * x[j];
        }
        const float rstd = 1.0f / sqrtf(warp_sum(square) + eps);
#pragma unroll
        for (int j = 0; j < OWN; j++) dot += x[j] * rstd * factor * sums[j];
        dot = warp_sum(dot);
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int c = lane + 32 * j;
            if (c < keys) store(&dqkv[at_unit + c], rstd * (factor * sums[j] - x[j] * rstd * dot));
        }
    }
}
