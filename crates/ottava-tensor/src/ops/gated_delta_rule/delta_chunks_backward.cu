// The backward of the chunks: the gradients by states from chunk to chunk (`delta_state_gradients`), and all other gradients of each chunk
// (`delta_gradients`). With the gradients dO by the output and dS by the state after the chunk, and M o G etc. elementwise:
//
// dN = P' dO + e^(b_last - b) K dS, dS before = e^(b_last) dS + (e^b Q)' dO - W' dN,
// X = T' dN, Y = -T' (dN S'), dP = tril(dO N'), M = dP o G, Z = e^(b_last - b) N dS', dL = -tril(X U' + Y W', -1), B = beta dL o G;
// dQ = e^b dO S' + M K, dK = M' Q + Z + B K + B' K + beta e^b Y, dV = beta X,
// dbeta = rows(dL o G o K K') + <X, V> + e^b <Y, K>,
// db = <e^b dO S', Q> + (rows - columns)(dP o P + B o K K') + <Y, beta e^b K> - <Z, K>; db of the last row adds sum <Z, K> + e^(b_last) <S, dS>.

// Shared memory of `delta_state_gradients`: stages (queries, keys, W, P and dO), then panels that are written to device memory: dS and dN.
#define STAGE (8 * PANEL)
#define STAGE_W KEYS_IMAGE
#define STAGE_P (6 * PANEL)
#define STAGE_DO (7 * PANEL)
#define AT_STATE (STAGES * STAGE)
#define AT_NEW (AT_STATE + SLICE)
#define AT_GATES (AT_NEW + PANEL)

// The segment, head and slice of a block of `delta_state_gradients`, and what it reads and writes.
struct GradientsOf {
    SegmentChunks segment;
    int slice, heads;
    u64 head;
    const bf16* d_o;
    u8 *kept_gradients, *kept_dn, *shared;
};

// Runs the chunks of a segment backward. The warp group holds dS transposed: dN' = (dS' K') e^(b_last - b) + dO' P, and before the chunk
// dS' <- e^(b_last) dS' + (dO' e^b) Q - dN' W.
__device__ __forceinline__ void run_back(float (&ds)[2][32], const GradientsOf& of, Ring& ring) {
    u8* const shared = of.shared;
    const u32 base = shared_address(shared);
    for (int i = 0; i < of.segment.count; i++) {
        const int stage = i % STAGES;
        const u32 at_stage = base + stage * STAGE;
        const float* const b = (const float*)(shared + AT_GATES) + stage * CHUNK;
        float sums[32], factors[16], shares[16];
        Left<128> state;
        state.set(ds[0]);
        state.set(ds[1], 64);
        ring.wait_until_full(i);
        const float whole = b[CHUNK - 1], decay = decay_of(whole);
#pragma unroll
        for (int j = 0; j < 32; j++) ds[0][j] *= decay, ds[1][j] *= decay;
        product_of<PANEL>(sums, state, at_stage + AT_K, false);
        Left<64> d_o, scaled, dn;
        d_o.read_transposed(shared + stage * STAGE + STAGE_DO);
        set_columns(shares, b, [&](float b) { return decay_of(whole - b); });
        set_columns(factors, b, decay_of);
#pragma unroll
        for (int j = 0; j < 16; j++) scaled.at[j] = pair(low(d_o.at[j]) * factors[j / 2 * 2], high(d_o.at[j]) * factors[j / 2 * 2 + 1]);
        wait_for_products<0>(sums);
        scale_columns(sums, shares);
        product_of<0>(sums, d_o, at_stage + STAGE_P, true);
        product_of<0>(ds[0], scaled, at_stage, true);
        product_of<0>(ds[1], scaled, at_stage + PANEL, true);
        wait_for_products<2>(sums);
        dn.set(sums);
        product_of<0, -1>(ds[0], dn, at_stage + STAGE_W, true);
        product_of<0, -1>(ds[1], dn, at_stage + STAGE_W + PANEL, true);
        // One thread writes panels after all have written them to shared memory.
        if (threadIdx.x == 0) wait_for_reads();
        sync_group(1, 128);
        state.write_transposed(shared + AT_STATE);
        dn.write_transposed(shared + AT_NEW);
        show_copies_what_was_written();
        sync_group(1, 128);
        if (threadIdx.x == 0) {
            const u64 panel = ((of.segment.first + of.segment.count - 1 - i) * (u64)of.heads + of.head) * 2 + of.slice;
            write_bytes(of.kept_gradients + panel * SLICE, shared + AT_STATE, SLICE);
            write_bytes(of.kept_dn + panel * PANEL, shared + AT_NEW, PANEL);
            end_of_writes();
        }
        wait_for_products<0>(ds[0]);
        hold(ds[1]);
        ring.release(i);
    }
    if (threadIdx.x == 0) wait_for_writes();
}

// Copies the chunks of a segment, from the last to the first. Called by a warp: one thread copies images, and all threads copy rows of `d_o`, in pieces
// that arrive at the same barrier.
__device__ __forceinline__ void copy_back(const GradientsOf& of, Ring& ring, const u8* keys, const u8* heads_images, const float* gates, int key_heads) {
    const u64 key_head = of.head / (of.heads / key_heads), pitch = (u64)of.heads * 128;
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < of.segment.count; i++) {
        const int in_segment = of.segment.count - 1 - i, rows = of.segment.rows(in_segment);
        const u64 c = of.segment.first + in_segment, panel = c * of.heads + of.head;
        u64* const full = ring.wait_until_empty(i);
        u8* const to = of.shared + i % STAGES * STAGE;
        if (lane == 0) {
            barrier_expect(full, STAGE - PANEL + CHUNK * 4);
            copy_bytes(to + AT_K, keys + (c * key_heads + key_head) * KEYS_IMAGE + AT_K, 2 * PANEL, full);
            copy_bytes(of.shared + AT_GATES + i % STAGES * CHUNK * 4, gates + panel * 2 * CHUNK, CHUNK * 4, full);
            copy_bytes(to + STAGE_P, heads_images + panel * HEAD_IMAGE + AT_P, PANEL, full);
            copy_bytes(to, keys + (c * key_heads + key_head) * KEYS_IMAGE, 2 * PANEL, full);
            copy_bytes(to + STAGE_W, heads_images + panel * HEAD_IMAGE, 2 * PANEL, full);
        }
        const bf16* const from = of.d_o + of.segment.row(in_segment) * pitch + lane % 8 * 8;
#pragma unroll
        for (int r = lane / 8; r < CHUNK; r += 4) copy_piece(to + STAGE_DO + in_panel(r, lane % 8 * 8), from + min(r, rows - 1) * pitch, r < rows);
        copies_arrive_at(full);
    }
}

// Runs the chunks of a segment backward for 64 columns of a head's values. Writes the gradient by the state after each chunk, and dN, as panels. Begins
// with `gradient`, and writes `dbefore`, both [N, H, 128, 128], unless they are null. A warp group computes; one more warp copies chunks. Grid:
// segments, heads, two slices.
extern "C" __global__ void __launch_bounds__(160) delta_state_gradients(u8* kept_gradients, u8* kept_dn, float* dbefore, const bf16* d_o, const u8* keys,
                                                                        const u8* heads_images, const float* gates, const float* gradient,
                                                                        const int2* chunks, const int2* segments, int key_heads, int heads) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Ring ring;
    const int slice = blockIdx.z, head = blockIdx.y, n = blockIdx.x;
    const u64 of_state = ((u64)n * heads + head) * 128 * 128;
    const GradientsOf of = {chunks_of(segments[n], chunks), slice, heads, (u64)head, d_o + head * 128 + slice * 64, kept_gradients, kept_dn, shared};
    ring.start(1 + 32);
    if (threadIdx.x >= 128) {
        copy_back(of, ring, keys, heads_images, gates, key_heads);
        return;
    }
    float ds[2][32];
    read_state(ds, gradient ? gradient + of_state : nullptr, slice);
    run_back(ds, of, ring);
    if (dbefore) write_state(dbefore + of_state, ds, slice);
}

// Shared memory of `delta_gradients`.
#define OF_KEYS 0                           // queries and keys
#define OF_W KEYS_IMAGE                     // W and U
#define OF_T (OF_W + 4 * PANEL)
#define OF_NEW (OF_T + PANEL)               // N: a panel of each slice
#define OF_DN (OF_NEW + 2 * PANEL)          // dN, later Y
#define OF_S (OF_DN + 2 * PANEL)            // the state before the chunk: a panel of each slice
#define OF_DS (OF_S + 2 * SLICE)            // the gradient by the state after the chunk
#define OF_DO (OF_DS + 2 * SLICE)
#define OF_X (OF_DO + 2 * PANEL)
#define OF_R (OF_X + 2 * PANEL)             // dN S', later M and B

// Sums of each row over the columns of a warp group, for both warp groups, and what one warp group alone computes.
struct RowSums {
    float b[2][CHUNK];       // of db, without what the last row adds
    float beta[2][CHUNK];    // of dbeta
    float z[2][CHUNK];       // <Z, K>
    float columns[2][4][CHUNK]; // sums over the rows of a warp, of dP o P and of B o K K'
    float states[8];        // <S, dS> of each warp
};

// Multiplies by G, for elements on and below the diagonal (`below` of 0) or below it (1); others become zero.
__device__ __forceinline__ void decay_lower(float (&d)[32], const float* b, int below) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = d[4 * j + 2 * h + e];
                x = row(h) >= column(j) + e + below ? x * decay_of(b[row(h)] - b[column(j) + e]) : 0.0f;
            }
}
// The final sums of the gates of a chunk and head, and dg as reverse cumulative sum. Called by one warp; a lane has two rows.
__device__ __forceinline__ void write_gates(float* dg, float* dbeta, const RowSums& sums, float whole, int heads, int rows) {
    const int lane = threadIdx.x % 32;
    float db[2], of_z = 0.0f, states = 0.0f;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = 2 * lane + k;
        const float z = sums.z[0][i] + sums.z[1][i];
        db[k] = sums.b[0][i] + sums.b[1][i] - z;
        for (int w = 0; w < 4; w++) db[k] -= sums.columns[0][w][i] + sums.columns[1][w][i];
        of_z += z;
    }
    for (int w = 0; w < 8; w++) states += sums.states[w];
    // The last row adds the sum over all rows: a cumulative sum from the last row adds it to each.
    const float last = warp_sum(of_z) + decay_of(whole) * states;
    db[1] += after_lane(db[0] + db[1]) + last;
    db[0] += db[1];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = 2 * lane + k;
        if (i < rows) {
            dg[(u64)i * heads] = db[k];
            dbeta[(u64)i * heads] = sums.beta[0][i] + sums.beta[1][i];
        }
    }
}

// Writes zeros as the gradients of the rows from `first` on, for a key head.
__device__ __forceinline__ void clear_padding(bf16* dqkv, float* dg, float* dbeta, int first, int rows, int key_head, int key_heads, int heads) {
    const u64 width = 128 * (2 * (u64)key_heads + heads);
    const int in_group = heads / key_heads;
    for (int t = first; t < rows; t++) {
        for (int c = threadIdx.x; c < 128 * (2 + in_group); c += blockDim.x) {
            const int part = c / 128, head = part < 2 ? part * key_heads + key_head : 2 * key_heads + key_head * in_group + part - 2;
            store(&dqkv[t * width + head * 128 + c % 128], 0.0f);
        }
        if (threadIdx.x < in_group) {
            const u64 gate = (u64)t * heads + key_head * in_group + threadIdx.x;
            dg[gate] = dbeta[gate] = 0.0f;
        }
    }
}

// Computes the gradients of a chunk's rows for a key head. Grid: chunks, and one more for the rows of padding; key heads. Each warp group has 64 columns of results with 128 columns.
extern "C" __global__ void __launch_bounds__(256) delta_gradients(bf16* dqkv, float* dg, float* dbeta, const bf16* d_o, const bf16* qkv, const u8* keys,
                                                                  const u8* heads_images, const u8* kept_states, const u8* kept_values,
                                                                  const u8* kept_gradients, const u8* kept_dn, const float* gates, const float* rstd,
                                                                  const int2* chunks, const int* at, int count, int all_rows, int key_heads,
                                                                  int heads) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ float b[CHUNK], beta[CHUNK];
    __shared__ RowSums of;
    __shared__ u64 full;
    const int key_head = blockIdx.y, in_group = heads / key_heads, group = uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
    const u64 width = 128 * (2 * (u64)key_heads + heads), pitch = (u64)heads * 128;
    if (blockIdx.x == gridDim.x - 1) {
        if (at) clear_padding(dqkv, dg, dbeta, at[count], all_rows, key_head, key_heads, heads);
        return;
    }
    const int2 rows = chunks[blockIdx.x];
    if (rows.y == 0) return;
    const u32 base = uniform(shared_address(shared));
    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barriers_are_initialized();
    }
    __syncthreads();
    float dq[32] = {}, dk[32] = {};
    for (int i = 0; i < in_group; i++) {
        const int head = key_head * in_group + i;
        const u64 at = (u64)blockIdx.x * heads + head;
        // Everything of the head before this one has been read.
        __syncthreads();
        if (threadIdx.x == 0) {
            const int bytes = (i == 0 ? KEYS_IMAGE : 0) + 4 * PANEL + PANEL + 4 * PANEL + 4 * SLICE;
            barrier_expect(&full, bytes);
            if (i == 0) copy_bytes(shared + OF_KEYS, keys + ((u64)blockIdx.x * key_heads + key_head) * KEYS_IMAGE, KEYS_IMAGE, &full);
            copy_bytes(shared + OF_W, heads_images + at * HEAD_IMAGE, 4 * PANEL, &full);
            copy_bytes(shared + OF_T, heads_images + at * HEAD_IMAGE + AT_T, PANEL, &full);
            copy_bytes(shared + OF_NEW, kept_values + at * 2 * PANEL, 2 * PANEL, &full);
            copy_bytes(shared + OF_DN, kept_dn + at * 2 * PANEL, 2 * PANEL, &full);
            copy_bytes(shared + OF_S, kept_states + at * 2 * SLICE, 2 * SLICE, &full);
            copy_bytes(shared + OF_DS, kept_gradients + at * 2 * SLICE, 2 * SLICE, &full);
        }
        if (threadIdx.x < CHUNK) b[threadIdx.x] = gates[at * 2 * CHUNK + threadIdx.x];
        else if (threadIdx.x < 2 * CHUNK) beta[threadIdx.x - CHUNK] = gates[at * 2 * CHUNK + threadIdx.x];
#pragma unroll
        for (int p = 0; p < CHUNK / 16; p++) {
            const int r = p * 16 + threadIdx.x / 16, column = threadIdx.x % 16 * 8;
            const bf16* const from = d_o + (rows.x + min(r, rows.y - 1)) * pitch + head * 128 + column;
            copy_piece(shared + OF_DO + column / 64 * PANEL + in_panel(r, column % 64), from, r < rows.y);
        }
        wait_for_copies();
        show_copies_what_was_written();
        __syncthreads();
        barrier_wait(&full, i % 2);
        const float e[2] = {decay_of(b[row(0)]), decay_of(b[row(1)])}, beta_of[2] = {beta[row(0)], beta[row(1)]}, whole = b[CHUNK - 1];
        float x[32], y[32], other[32], of_b[2], of_beta[2];
        // X of rows of padding is zero, so any values may be multiplied with it.
        const bf16* const v = qkv + rows.x * width + (2 * key_heads + head) * 128 + group * 64;
        u32 values[2][8];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < 8; j++) values[h][j] = *(const u32*)(v + min(row(h), rows.y - 1) * width + column(j));
        // X, and R = dN S'.
        product<64, 0, 0>(x, base + OF_T, base + OF_DN + group * PANEL, false);
        product<128, PANEL, SLICE>(y, base + OF_DN, base + OF_S + group * PANEL, false);
        wait_for_products<0>(x);
        hold(y);
        put_panel(shared + OF_X + group * PANEL, x);
        put_panel(shared + OF_R + group * PANEL, y);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) sum += x[4 * j + 2 * h] * low(values[h][j]) + x[4 * j + 2 * h + 1] * high(values[h][j]);
            of_beta[h] = over_row(sum);
        }
        scale_rows(x, beta_of[0], beta_of[1]);
        write_rows(dqkv + rows.x * width + (2 * key_heads + head) * 128 + group * 64, width, rows.y, x);
        show_copies_what_was_written();
        __syncthreads();
        // Y, in the place of dN.
        product<64, 0, 0, -1>(y, base + OF_T, base + OF_R + group * PANEL, false);
        wait_for_products<0>(y);
        put_panel(shared + OF_DN + group * PANEL, y);
        get_panel(other, shared + OF_KEYS + AT_K + group * PANEL);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float dot = row_dot(y, other, h) * e[h];
            of_beta[h] += dot;
            of_b[h] = dot * beta_of[h];
        }
        scale_rows(y, e[0] * beta_of[0], e[1] * beta_of[1]);
#pragma unroll
        for (int j = 0; j < 32; j++) dk[j] += y[j];
        show_copies_what_was_written();
        __syncthreads();
        // The first warp group computes M, the second B; R has been read.
        if (group == 0) {
            product<128, PANEL, PANEL>(x, base + OF_DO, base + OF_NEW, false);
            const u8* const p = heads_images + at * HEAD_IMAGE + AT_P;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 two = *(const u32*)(p + in_panel(row(h), column(j)));
                    other[4 * j + 2 * h] = low(two), other[4 * j + 2 * h + 1] = high(two);
                }
            wait_for_products<0>(x);
#pragma unroll
            for (int h = 0; h < 2; h++) of_b[h] += row_dot(x, other, h);
            column_sums(of.columns[0][warp % 4], x, other);
            decay_lower(x, b, 0);
            put_panel(shared + OF_R, x);
        } else {
            product<128, PANEL, PANEL>(other, base + AT_K, base + AT_K, false);
            product<128, PANEL, PANEL, -1>(x, base + OF_X, base + OF_W + AT_U, false);
            product<128, PANEL, PANEL, -1>(x, base + OF_DN, base + OF_W, true);
            wait_for_products<0>(x);
            hold(other);
            decay_lower(x, b, 1);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float dot = row_dot(x, other, h);
                of_beta[h] += dot;
                of_b[h] += dot * beta_of[h];
            }
            scale_rows(x, beta_of[0], beta_of[1]);
            column_sums(of.columns[1][warp % 4], x, other);
            put_panel(shared + OF_R + PANEL, x);
        }
        show_copies_what_was_written();
        __syncthreads();
        // dQ and dK.
        product<128, PANEL, SLICE>(x, base + OF_DO, base + OF_S + group * PANEL, false);
        product<128, PANEL, SLICE>(y, base + OF_NEW, base + OF_DS + group * PANEL, false);
        wait_for_products<0>(x);
        hold(y);
        scale_rows(x, e[0], e[1]);
        scale_rows(y, decay_of(whole - b[row(0)]), decay_of(whole - b[row(1)]));
        get_panel(other, shared + OF_KEYS + group * PANEL);
#pragma unroll
        for (int h = 0; h < 2; h++) of_b[h] += row_dot(x, other, h);
        get_panel(other, shared + OF_KEYS + AT_K + group * PANEL);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float dot = row_dot(y, other, h);
            if (threadIdx.x % 4 == 0) {
                of.z[group][row(h)] = dot;
                of.b[group][row(h)] = of_b[h];
                of.beta[group][row(h)] = of_beta[h];
            }
        }
#pragma unroll
        for (int j = 0; j < 32; j++) dq[j] += x[j], dk[j] += y[j];
        product<64, PANEL, 0>(dq, base + OF_R, base + AT_K + group * PANEL, true);
        product<64, 0, 0>(dk, base + OF_R, base + group * PANEL, true);
        product<64, PANEL, 0>(dk, base + OF_R + PANEL, base + AT_K + group * PANEL, true);
        product<64, 0, 0>(dk, base + OF_R + PANEL, base + AT_K + group * PANEL, true);
        float of_states = 0.0f;
        for (int p = threadIdx.x; p < 4 * SLICE / 2 / 16; p += 256) {
            const uint4 s = *(const uint4*)(shared + OF_S + p * 16), d = *(const uint4*)(shared + OF_DS + p * 16);
            of_states += low(s.x) * low(d.x) + high(s.x) * high(d.x) + low(s.y) * low(d.y) + high(s.y) * high(d.y);
            of_states += low(s.z) * low(d.z) + high(s.z) * high(d.z) + low(s.w) * low(d.w) + high(s.w) * high(d.w);
        }
        of_states = warp_sum(of_states);
        if (threadIdx.x % 32 == 0) of.states[warp] = of_states;
        wait_for_products<0>(dq);
        hold(dk);
        __syncthreads();
        if (warp == 0) write_gates(dg + (u64)rows.x * heads + head, dbeta + (u64)rows.x * heads + head, of, whole, heads, rows.y);
    }
    // From the normalised queries and keys y to the projections, with their reciprocal lengths: rstd (factor d - y / factor <y, d>).
    const float* const of_rows = rstd + ((u64)blockIdx.x * key_heads + key_head) * 2 * CHUNK;
    float y[32];
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; which++) {
        get_panel(y, shared + OF_KEYS + (2 * which + group) * PANEL);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float dot = row_dot(y, which ? dk : dq, h);
            if (threadIdx.x % 4 == 0) (which ? of.beta : of.b)[group][row(h)] = dot;
        }
    }
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; which++) {
        float (&d)[32] = which ? dk : dq;
        const float factor = which ? 1.0f : QUERY_FACTOR;
        get_panel(y, shared + OF_KEYS + (2 * which + group) * PANEL);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float r = of_rows[which * CHUNK + row(h)], dot = (which ? of.beta[0][row(h)] + of.beta[1][row(h)] : of.b[0][row(h)] + of.b[1][row(h)]) / factor;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int p = 4 * j + 2 * h; p < 4 * j + 2 * h + 2; p++) d[p] = r * (factor * d[p] - y[p] * dot);
        }
        write_rows(dqkv + (u64)rows.x * width + (which * key_heads + key_head) * 128 + group * 64, width, rows.y, d);
    }
}
