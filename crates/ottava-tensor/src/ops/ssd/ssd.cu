// The recurrence of the state space duality. The rows of a state [P, N] do not depend on each other. A block of eight warps holds 32 rows of a head's state
// in registers: a lane has one row, and warp w has the columns w * OWN to (w + 1) * OWN. Tokens are read in tiles, one by each warp.

#define WARPS 8
#define STATE (WARPS * OWN)

// The inputs of all tokens, and the sizes of the heads.
struct Inputs {
    const X *xbc, *dt;
    const float *a_log, *dt_bias, *d;
    int heads, groups, dim, state;
    float least, most;
    __device__ __forceinline__ int group(int head) const { return head / (heads / groups); }
    __device__ __forceinline__ u64 width() const { return (u64)heads * dim + 2 * (u64)groups * state; }
    // The first column of B (0) or C (1) of a group.
    __device__ __forceinline__ int part(int which, int group) const { return heads * dim + (which * groups + group) * state; }
};

// A tile of tokens: B and C, the inputs of the block's rows, time steps and decays.
struct Tile {
    float b[WARPS][STATE], c[WARPS][STATE], x[WARPS][32], dt[WARPS], decay[WARPS];
};

// What a warp reads of its token of the next tile.
struct Fetched {
    float b[STATE / 32], c[STATE / 32], x, dt;
};

// Reads the token of this warp of the tile that begins at row `t`. Rows from `end` on are zeros.
__device__ __forceinline__ void fetch(Fetched& to, const Inputs& of, int t, int end, int head, int p) {
    const int lane = threadIdx.x % 32, row = t + threadIdx.x / 32;
    const bool inside = row < end;
    const X* const x = of.xbc + row * of.width();
#pragma unroll
    for (int j = 0; j < STATE / 32; j++) {
        const bool has = inside && lane + 32 * j < of.state;
        to.b[j] = has ? load(x[of.part(0, of.group(head)) + lane + 32 * j]) : 0.0f;
        to.c[j] = has ? load(x[of.part(1, of.group(head)) + lane + 32 * j]) : 0.0f;
    }
    to.x = inside && p < of.dim ? load(x[head * of.dim + p]) : 0.0f;
    to.dt = inside ? load(of.dt[(u64)row * of.heads + head]) : 0.0f;
}
__device__ __forceinline__ void put(Tile& tile, const Fetched& from, const Inputs& of, int head) {
    const int at = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STATE / 32; j++) tile.b[at][lane + 32 * j] = from.b[j], tile.c[at][lane + 32 * j] = from.c[j];
    tile.x[at][lane] = from.x;
    if (lane > 0) return;
    tile.dt[at] = time_step(from.dt + of.dt_bias[head], of.least, of.most);
    tile.decay[at] = expf(tile.dt[at] * -expf(of.a_log[head]));
}

// A thread's part of a row of a state [P, N]: OWN columns. Elements beyond the state are zero.
struct Place {
    int dim, state, p;
    __device__ __forceinline__ int column(int j) const { return threadIdx.x / 32 * OWN + j; }
    __device__ __forceinline__ bool has(int j) const { return p < dim && column(j) < state; }
    // Four columns at a time, where rows are aligned to 16 bytes: the threads of a warp have different rows.
    __device__ __forceinline__ void read(float (&s)[OWN], const float* from) const {
        if (state % 4 == 0) {
#pragma unroll
            for (int j = 0; j < OWN; j += 4) {
                const float4 four = from && has(j) ? *(const float4*)&from[(u64)p * state + column(j)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                s[j] = four.x, s[j + 1] = four.y, s[j + 2] = four.z, s[j + 3] = four.w;
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < OWN; j++) s[j] = from && has(j) ? from[(u64)p * state + column(j)] : 0.0f;
    }
    __device__ __forceinline__ void write(float* to, const float (&s)[OWN]) const {
        if (state % 4 == 0) {
#pragma unroll
            for (int j = 0; j < OWN; j += 4)
                if (has(j)) *(float4*)&to[(u64)p * state + column(j)] = make_float4(s[j], s[j + 1], s[j + 2], s[j + 3]);
            return;
        }
#pragma unroll
        for (int j = 0; j < OWN; j++)
            if (has(j)) to[(u64)p * state + column(j)] = s[j];
    }
};

// Runs token `i` of a tile, and returns the sum over this thread's columns of the state times C.
__device__ __forceinline__ float step(float (&s)[OWN], const Tile& tile, int i) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * OWN;
    const float decay = tile.decay[i], input = tile.dt[i] * tile.x[i][lane];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        s[j] = s[j] * decay + input * tile.b[i][first + j];
        sum += s[j] * tile.c[i][first + j];
    }
    return sum;
}

// Grid: segments, and with offsets one more for the rows of padding, which become zeros; heads; slices of 32 rows of the states. If `slots` is null, states
// begin at zero and are not kept.
extern "C" __global__ void __launch_bounds__(256) ssd(X* y, const X* xbc, const X* dt, const float* a_log, const float* dt_bias, const float* d,
                                                      const int* at, int count, int rows, float* states, const int* slots, const int* past, int heads,
                                                      int groups, int dim, int state, float least, float most) {
    __shared__ __align__(16) Tile tile;
    __shared__ float sums[WARPS][WARPS][32];
    start_successors();
    wait_for_predecessors();
    const Segments segments = {at, count, rows};
    const Inputs of = {xbc, dt, a_log, dt_bias, d, heads, groups, dim, state, least, most};
    const int head = blockIdx.y, n = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, p = blockIdx.z * 32 + lane;
    const u64 pitch = (u64)heads * dim;
    y += head * dim + p;
    if (n == count) {
        for (int t = segments.at[n] + warp; t < rows; t += WARPS)
            if (p < dim) store(&y[t * pitch], 0.0f);
        return;
    }
    const int first = segments.first(n), end = segments.end(n);
    if (first == end) return;
    const Place place = {dim, state, p};
    float* const of_slot = slots ? states + ((u64)slots[n] * heads + head) * dim * state : nullptr;
    float s[OWN];
    place.read(s, of_slot && past[n] > 0 ? of_slot : nullptr);
    Fetched next;
    fetch(next, of, first, end, head, p);
    for (int t = first; t < end; t += WARPS) {
        __syncthreads();
        put(tile, next, of, head);
        __syncthreads();
        if (t + WARPS < end) fetch(next, of, t + WARPS, end, head, p);
        const int tokens = min(WARPS, end - t);
#pragma unroll 1
        for (int i = 0; i < tokens; i++) sums[i][warp][lane] = step(s, tile, i);
        __syncthreads();
        // A warp adds the sums of a token, in the order of the warps.
        if (warp < tokens && p < dim) {
            float sum = sums[warp][0][lane];
            for (int w = 1; w < WARPS; w++) sum += sums[warp][w][lane];
            store(&y[(t + warp) * pitch], sum + d[head] * tile.x[warp][lane]);
        }
    }
    if (of_slot) place.write(of_slot, s);
}

// The gradients of all tokens: by B and C of each head [T, heads, N], by x in `dxbc`, and sums over the state for each head, [3, T, heads]: the gradients by
// the logarithm of the decay, by the time step of the inputs, and by d. `ssd_combine` reads the sums.
struct Gradients {
    float *db, *dc, *terms;
    X* dxbc;
    u64 rows;
};
__device__ __forceinline__ void add_to(float* to, float x, bool is_first) { *to = is_first ? x : *to + x; }

// Runs a token backward. `after` is the state after the token on entry, and before the token on return. `ds` is the gradient by it. The first slice sets
// gradients, and further slices add to them.
__device__ __forceinline__ void step_back(float (&ds)[OWN], float (&after)[OWN], const float* kept, const Tile& tile, int i, float dy,
                                          float (&sums)[2][WARPS][32], const Inputs& of, const Gradients& to, int row, int head, bool is_first, int p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * OWN;
    const float decay = tile.decay[i], dt = tile.dt[i], x = tile.x[i][lane];
    const u64 at = ((u64)row * of.heads + head) * of.state + first + lane;
    const bool has = lane < OWN && first + lane < of.state;
    float before[OWN], v[OWN], of_input = 0.0f, of_decay = 0.0f;
#pragma unroll
    for (int j = 0; j < OWN; j++) v[j] = after[j] * dy;
    const float dc = sum_by_element(v);
    recall(before, kept);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        ds[j] += dy * tile.c[i][first + j];
        v[j] = ds[j] * (dt * x);
        of_input += ds[j] * tile.b[i][first + j];
        ds[j] *= decay;
        of_decay += ds[j] * before[j];
        after[j] = before[j];
    }
    const float db = sum_by_element(v);
    if (has) add_to(&to.dc[at], dc, is_first), add_to(&to.db[at], db, is_first);
    sums[0][warp][lane] = of_input;
    sums[1][warp][lane] = of_decay;
    __syncthreads();
    if (warp == 0) {
        float input = 0.0f, of_state = 0.0f;
        for (int w = 0; w < WARPS; w++) input += sums[0][w][lane], of_state += sums[1][w][lane];
        if (p < of.dim) store(&to.dxbc[row * of.width() + head * of.dim + p], dt * input + of.d[head] * dy);
        const float terms[3] = {warp_sum(of_state), warp_sum(input * x), warp_sum(dy * x)};
        for (int k = 0; k < 3; k++)
            if (lane == 0) add_to(&to.terms[(k * to.rows + row) * of.heads + head], terms[k], is_first);
    }
    __syncthreads();
}

// Grid: blocks that share the segments, and heads. A block runs all slices of its head one after the other. For each, it runs forward and keeps the states
// before tiles; then, for each tile from the last to the first, it runs forward again and keeps the states before tokens, and runs backward. `before`,
// `gradient` and `dbefore` may be null. `tiles` has a state slice for each tile of each segment, and `tokens` WARPS slices for each block.
extern "C" __global__ void __launch_bounds__(256) ssd_backward(X* dxbc, float* dbefore, float* db, float* dc, float* terms, float* tiles, float* tokens,
                                                               const X* dy, const X* xbc, const X* dt, const float* a_log, const float* dt_bias,
                                                               const float* d, const float* before, const float* gradient, const int* at, int count,
                                                               int rows, int heads, int groups, int dim, int state, float least, float most) {
    __shared__ __align__(16) Tile tile;
    __shared__ float sums[2][WARPS][32];
    const Segments segments = {at, count, rows};
    const Inputs of = {xbc, dt, a_log, dt_bias, d, heads, groups, dim, state, least, most};
    const Gradients to = {db, dc, terms, dxbc, (u64)rows};
    const int head = blockIdx.y, lane = threadIdx.x % 32;
    for (int n = blockIdx.x; n < count; n += gridDim.x) {
        const int first = segments.first(n), end = segments.end(n), of_tiles = (end - first + WARPS - 1) / WARPS;
        const u64 of_state = ((u64)n * heads + head) * dim * state;
        // Each segment has room for one more tile than its rows fill.
        float* const of_segment = tiles + ((u64)(first / WARPS + n) * heads + (u64)head * ((end - first) / WARPS + 1)) * STATE * 32;
        float* const of_block = tokens + ((u64)blockIdx.x * heads + head) * WARPS * STATE * 32;
        for (int slice = 0; slice * 32 < dim; slice++) {
            const int p = slice * 32 + lane;
            const Place place = {dim, state, p};
            float s[OWN], ds[OWN];
            place.read(s, before ? before + of_state : nullptr);
            place.read(ds, gradient ? gradient + of_state : nullptr);
            Fetched next;
            // Runs the tokens of a tile forward.
            auto forward = [&](int of_tile, bool keeps) {
                const int t = first + of_tile * WARPS, tokens = min(WARPS, end - t);
                fetch(next, of, t, end, head, p);
                __syncthreads();
                put(tile, next, of, head);
                __syncthreads();
#pragma unroll 1
                for (int i = 0; i < tokens; i++) {
                    if (keeps) keep(of_block + (u64)i * STATE * 32, s);
                    step(s, tile, i);
                }
            };
            for (int i = 0; i < of_tiles; i++) {
                keep(of_segment + (u64)i * STATE * 32, s);
                forward(i, false);
            }
            for (int i = of_tiles - 1; i >= 0; i--) {
                recall(s, of_segment + (u64)i * STATE * 32);
                forward(i, true);
                const int t = first + i * WARPS;
#pragma unroll 1
                for (int j = min(WARPS, end - t) - 1; j >= 0; j--) {
                    const float of_y = p < dim ? load(dy[((u64)(t + j) * heads + head) * dim + p]) : 0.0f;
                    step_back(ds, s, of_block + (u64)j * STATE * 32, tile, j, of_y, sums, of, to, t + j, head, slice == 0, p);
                }
            }
            if (dbefore) place.write(dbefore + of_state, ds);
        }
    }
}

// Adds the gradients by B and C over the heads of each group, in their order, and computes the gradients by time steps. Replaces `terms` [3, T, heads] by
// the terms of the gradients by a_log, dt_bias and d. Rows of padding become zeros. Grid: rows.
extern "C" __global__ void __launch_bounds__(256) ssd_combine(X* dxbc, X* ddt, float* terms, const float* db, const float* dc, const X* dt,
                                                              const float* a_log, const float* dt_bias, const int* at, int count, int heads, int groups,
                                                              int dim, int state, float least, float most) {
    const Inputs of = {nullptr, dt, a_log, dt_bias, nullptr, heads, groups, dim, state, least, most};
    const u64 row = blockIdx.x, rows = gridDim.x;
    const bool is_padding = at && row >= at[count];
    X* const to = dxbc + row * of.width();
    if (is_padding)
        for (int c = threadIdx.x; c < heads * dim; c += 256) store(&to[c], 0.0f);
    const int each = heads / groups;
    for (int c = threadIdx.x; c < 2 * groups * state; c += 256) {
        const int which = c / (groups * state), group = c / state % groups;
        const float* const from = (which ? dc : db) + (row * heads + group * each) * state + c % state;
        float sum = 0.0f;
        if (!is_padding)
            for (int i = 0; i < each; i++) sum += from[(u64)i * state];
        store(&to[heads * dim + c], sum);
    }
    for (int h = threadIdx.x; h < heads; h += 256) {
        const u64 i = row * heads + h;
        float of_terms[3] = {}, gradient = 0.0f;
        if (!is_padding) {
            const float a = -expf(a_log[h]), raw = load(dt[i]) + dt_bias[h], of_decay = a * terms[i];
            gradient = (of_decay + terms[rows * heads + i]) * slope_of_step(raw, least, most);
            of_terms[0] = time_step(raw, least, most) * of_decay;
            of_terms[1] = gradient;
            of_terms[2] = terms[2 * rows * heads + i];
        }
        store(&ddt[i], gradient);
        for (int k = 0; k < 3; k++) terms[k * rows * heads + i] = of_terms[k];
    }
}
