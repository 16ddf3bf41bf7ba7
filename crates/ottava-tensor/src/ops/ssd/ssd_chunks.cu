// Chunks of CHUNK rows of a segment, for the state space duality with heads of 64 elements in BF16. With the chunk's inputs x [rows, P], B and C [rows, N],
// time steps dt, b = cumulative sum of dt A, G_ij = exp(b_i - b_j) for i >= j, and the state S [P, N] before the chunk:
//
// y = e^b C S' + (C B' o G o dt_j) x + d x, and the state after the chunk is e^(b_last) S + x' (dt e^(b_last - b) B). (Dao and Gu 2024, arXiv:2405.21060)
//
// All states come first: the state after a chunk needs no output of the chunk, so that a block runs the chunks of a segment one after the other with one
// product each (`ssd_scan`). Then all chunks are independent (`ssd_output`).

// Writes the cumulative sums b, as exponents of 2, and the time steps of each chunk and head, [chunks, heads, 2, CHUNK]. The time steps of rows beyond the chunk are zero.
// Grid: chunks, and an eighth of the heads; a warp has a head, and a lane has two rows.
extern "C" __global__ void __launch_bounds__(256) ssd_steps(float* steps, const bf16* dt, const float* a_log, const float* dt_bias, const int2* chunks,
                                                            int heads, float least, float most) {
    const int head = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int2 rows = chunks[blockIdx.x];
    if (head >= heads || rows.y == 0) return;
    const float a = -expf(a_log[head]) * 1.44269504f, bias = dt_bias[head];
    float step[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = 2 * lane + i;
        step[i] = r < rows.y ? time_step(load(dt[(u64)(rows.x + r) * heads + head]) + bias, least, most) : 0.0f;
    }
    const float sum = through_lane(step[0] * a + step[1] * a);
    float* const to = steps + ((u64)blockIdx.x * heads + head) * 2 * CHUNK + 2 * lane;
    *(float2*)to = make_float2(sum - step[1] * a, sum);
    *(float2*)(to + CHUNK) = make_float2(step[0], step[1]);
}

// Shared memory of `ssd_scan`: stages (rows of values, and of a panel of B or C), two panels of states, and the steps of the stages.
#define STAGE (2 * PANEL)
#define AT_STATE (STAGES * STAGE)
#define AT_STEPS (AT_STATE + 2 * PANEL)
#define STEPS_BYTES (2 * CHUNK * 4)
// A copy that has started may be incomplete while this many copies after it start.
#define LATER (STAGES / 2)
#define COPIERS 128

// What a block of `ssd_scan` runs: the chunks of a segment for a head and 64 columns of its state, from the first chunk or back from the last.
struct Scan {
    SegmentChunks segment;
    int heads, panel, panels, is_back;
    u64 head;
    u8 *kept, *shared;
    __device__ __forceinline__ int chunk(int i) const { return is_back ? segment.count - 1 - i : i; }
};

// Copies chunks. Called by COPIERS threads. A thread arrives for its own pieces after they are complete, LATER chunks later.
__device__ __forceinline__ void copy_chunks(const Scan& of, Ring& ring, const bf16* values, u64 values_pitch, const bf16* terms, u64 terms_pitch,
                                            const float* steps) {
    const int copier = threadIdx.x % COPIERS, column = copier % 8 * 8;
    for (int i = 0; i < of.segment.count + LATER; i++) {
        if (i < of.segment.count) {
            const int c = of.chunk(i), rows = of.segment.rows(c);
            u64* const full = ring.wait_until_empty(i);
            u8* const to = of.shared + i % STAGES * STAGE;
            if (copier == 0) {
                barrier_expect(full, STEPS_BYTES);
                copy_bytes(of.shared + AT_STEPS + i % STAGES * STEPS_BYTES, steps + ((u64)(of.segment.first + c) * of.heads + of.head) * 2 * CHUNK,
                           STEPS_BYTES, full);
            }
#pragma unroll
            for (int r = copier / 8; r < CHUNK; r += COPIERS / 8) {
                const u64 from = of.segment.row(c) + min(r, rows - 1);
                copy_piece(to + in_panel(r, column), values + from * values_pitch + column, r < rows);
                copy_piece(to + PANEL + in_panel(r, column), terms + from * terms_pitch + column, r < rows);
            }
        }
        end_of_pieces();
        if (i < LATER) continue;
        wait_for_pieces<LATER>();
        show_copies_what_was_written();
        barrier_arrive(&ring.full[(i - LATER) % STAGES]);
    }
}

// Runs the chunks: S <- e^(b_last) S + (x dt e^(b_last - b))' B, or back dS <- e^(b_last) dS + (dy e^b)' C. Keeps the state before each chunk, or the
// gradient by the state after it, as a panel.
__device__ __forceinline__ void scan(float (&s)[32], const Scan& of, Ring& ring) {
    u8* const shared = of.shared;
    for (int i = 0; i < of.segment.count; i++) {
        const int stage = i % STAGES;
        Left<64> state, values, scaled;
        state.set(s);
        ring.wait_until_full(i);
        const float *const b = (const float*)(shared + AT_STEPS + stage * STEPS_BYTES), *const dt = b + CHUNK, whole = b[CHUNK - 1], decay = power_of(whole);
        values.read_transposed(shared + stage * STAGE);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const int c = column(j / 2);
            const float first = of.is_back ? power_of(b[c]) : dt[c] * power_of(whole - b[c]);
            const float second = of.is_back ? power_of(b[c + 1]) : dt[c + 1] * power_of(whole - b[c + 1]);
            scaled.at[j] = pair(low(values.at[j]) * first, high(values.at[j]) * second);
            scaled.at[j + 1] = pair(low(values.at[j + 1]) * first, high(values.at[j + 1]) * second);
        }
#pragma unroll
        for (int j = 0; j < 32; j++) s[j] *= decay;
        product_of<0>(s, scaled, shared_address(shared) + stage * STAGE + PANEL, true);
        // One thread writes a panel after all have written it to shared memory.
        u8* const panel = shared + AT_STATE + i % 2 * PANEL;
        if (threadIdx.x == 0) wait_for_reads<1>();
        sync_group(1, 128);
#pragma unroll
        for (int j = 0; j < 8; j += 2) store_matrices(panel + of_matrices(j), *(const u32(*)[4])&state.at[2 * j]);
        show_copies_what_was_written();
        sync_group(1, 128);
        if (threadIdx.x == 0) {
            const u64 of_chunk = (of.segment.first + of.chunk(i)) * (u64)of.heads + of.head;
            write_bytes(of.kept + (of_chunk * of.panels + of.panel) * PANEL, panel, PANEL);
            end_of_writes();
        }
        wait_for_products<0>(s);
        ring.release(i);
    }
    if (threadIdx.x == 0) wait_for_writes();
}

// Keeps a panel [64, 64] of a state before each chunk, for `values` x and the columns B of `xbc` from `terms` on; or back, with the gradients `values` dy and
// with C, of the gradient by the state after each chunk. States begin with `from` and end in `to`, both [segments, heads, 64, N], unless they are null. A
// warp group computes, and another copies chunks. Grid: segments, heads, panels of N.
extern "C" __global__ void __launch_bounds__(128 + COPIERS) ssd_scan(u8* kept, float* to, const bf16* values, u64 pitch, const bf16* xbc, u64 width, int terms,
                                                           const float* steps, const float* from, const int2* chunks, const int2* segments, int heads,
                                                           int groups, int is_back) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Ring ring;
    const int n = blockIdx.x, head = blockIdx.y, panel = blockIdx.z, panels = gridDim.z;
    const Scan of = {chunks_of(segments[n], chunks), heads, panel, panels, is_back, (u64)head, kept, shared};
    ring.start(1 + COPIERS);
    if (threadIdx.x >= 128) {
        copy_chunks(of, ring, values + head * 64, pitch, xbc + terms + (head / (heads / groups) * panels + panel) * 64, width, steps);
        return;
    }
    float s[32];
    const u64 state = ((u64)n * heads + head) * 64 * 64 * panels + panel * 64;
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = from ? from[state + row(i / 2 % 2) * 64 * panels + column(i / 4) + i % 2] : 0.0f;
    scan(s, of, ring);
    if (!to) return;
#pragma unroll
    for (int i = 0; i < 32; i++) to[state + row(i / 2 % 2) * 64 * panels + column(i / 4) + i % 2] = s[i];
}

// Shared memory of `ssd_output`: C and B, then two stages: x, the panels of the state, and the steps.
#define OUTPUT_STAGE ((1 + PANELS) * PANEL)
#define AT_B (PANELS * PANEL)
#define AT_STAGES (2 * PANELS * PANEL)
#define AT_OUTPUT_STEPS (AT_STAGES + 2 * OUTPUT_STAGE)

// Writes y of a chunk for `each` heads of a group. Grid: chunks, and one more for the rows of padding; parts of the heads.
extern "C" __global__ void __launch_bounds__(128) ssd_output(bf16* y, const bf16* xbc, const u8* kept, const float* steps, const float* d,
                                                             const int2* chunks, const int* at, int count, int all_rows, int heads, int groups,
                                                             int each) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 full[2];
    const int head = blockIdx.y * each, group = head / (heads / groups);
    const u64 pitch = (u64)heads * 64, width = pitch + 2 * (u64)groups * PANELS * 64;
    if (blockIdx.x == gridDim.x - 1) {
        if (!at) return;
        for (int t = at[count] + threadIdx.x / 8; t < all_rows; t += 16)
            for (int h = 0; h < each; h++) *(uint4*)(y + t * pitch + (head + h) * 64 + threadIdx.x % 8 * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    const int2 rows = chunks[blockIdx.x];
    if (rows.y == 0) return;
    if (threadIdx.x == 0) {
        barrier_init(&full[0], 1);
        barrier_init(&full[1], 1);
        barriers_are_initialized();
    }
    __syncthreads();
    const bf16* const x = xbc + rows.x * width;
    const u32 base = shared_address(shared);
    // Starts the copies for the head `head + i`.
    auto fetch = [&](int i) {
        u8* const to = shared + AT_STAGES + i % 2 * OUTPUT_STAGE;
        const u64 of_head = (u64)blockIdx.x * heads + head + i;
        if (threadIdx.x == 0) {
            barrier_expect(&full[i % 2], PANELS * PANEL + STEPS_BYTES);
            copy_bytes(to + PANEL, kept + of_head * PANELS * PANEL, PANELS * PANEL, &full[i % 2]);
            copy_bytes(shared + AT_OUTPUT_STEPS + i % 2 * STEPS_BYTES, steps + of_head * 2 * CHUNK, STEPS_BYTES, &full[i % 2]);
        }
        copy_rows(to, x + (head + i) * 64, width, rows.y);
    };
    for (int p = 0; p < PANELS; p++) {
        copy_rows(shared + p * PANEL, x + pitch + ((groups + group) * PANELS + p) * 64, width, rows.y);
        copy_rows(shared + AT_B + p * PANEL, x + pitch + (group * PANELS + p) * 64, width, rows.y);
    }
    fetch(0);
    float cb[32];
    for (int i = 0; i < each; i++) {
        wait_for_copies();
        show_copies_what_was_written();
        __syncthreads();
        // Everything of the head before this one has been read.
        if (i + 1 < each) fetch(i + 1);
        if (i == 0) {
            product<64 * PANELS, PANEL, PANEL>(cb, base, base + AT_B, false);
            wait_for_products<0>(cb);
        }
        barrier_wait(&full[i % 2], i / 2 & 1);
        const u8* const stage = shared + AT_STAGES + i % 2 * OUTPUT_STAGE;
        const float *const b = (const float*)(shared + AT_OUTPUT_STEPS + i % 2 * STEPS_BYTES), *const dt = b + CHUNK;
        float sums[32], inputs[32];
        product<64 * PANELS, PANEL, PANEL>(sums, base, shared_address(stage + PANEL), false);
        Left<64> p;
        {
            float of_chunk[32];
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int k = 4 * j; k < 4 * j + 4; k++) {
                    const int r = row(k / 2 % 2), c = column(j) + k % 2;
                    of_chunk[k] = is_above(j) ? 0.0f : cb[k] * power_of(b[r] - b[c]) * dt[c];
                    if (!is_below(j) && r < c) of_chunk[k] = 0.0f;
                }
            p.set(of_chunk);
        }
        get_panel(inputs, stage);
        wait_for_products<0>(sums);
        scale_rows(sums, power_of(b[row(0)]), power_of(b[row(1)]));
        product_of<0>(sums, p, shared_address(stage), true);
        wait_for_products<0>(sums);
        const float factor = d[head + i];
#pragma unroll
        for (int j = 0; j < 32; j++) sums[j] = __fmaf_rn(factor, inputs[j], sums[j]);
        write_rows(y + rows.x * pitch + (head + i) * 64, pitch, rows.y, sums);
    }
}
