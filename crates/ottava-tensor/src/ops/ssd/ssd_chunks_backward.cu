// The gradients of a chunk, from the states and the gradients by states that `ssd_scan` keeps. With dY, the state S before the chunk, the gradient dS by
// the state after it, w = e^(b_last - b), and M o G etc. elementwise:
//
// M = dY x' o dt_j o G, P = C B' o G; dX = P' dY + w B dS', dx = dt dX + d dY, dC = e^b dY S + M B, dB = M' C + Z with Z = w dt x dS,
// db = <e^b dY S, C> + (rows - columns)(M o C B') - <Z, B>; db of the last row adds sum <Z, B> + e^(b_last) <S, dS>;
// q = reverse cumulative sum of db, and the gradient by dt is A q + <dX, x>. dB and dC add over the heads of a group; so does M, before its products.

// Shared memory of `ssd_gradients`: B and C, then stages (x, dY, the panels of S and of dS), M, and the steps of the stages.
#define AT_C (PANELS * PANEL)
#define AT_STAGES (2 * PANELS * PANEL)
#define STAGE_DY PANEL
#define STAGE_S (2 * PANEL)
#define STAGE_DS ((2 + PANELS) * PANEL)
#define STAGE ((2 + 2 * PANELS) * PANEL)
#define AT_M (AT_STAGES + HEAD_STAGES * STAGE)
#define AT_STEPS (AT_M + PANEL)
#define STEPS_BYTES (2 * CHUNK * 4)

// What the threads of a head have computed of each row.
struct RowSums {
    float b[2][CHUNK];       // of db, of each warp group
    float z[2][CHUNK];       // <Z, B>
    float columns[4][CHUNK]; // sums of M o C B' over the rows of each warp
    float of_x[CHUNK];       // <dX, x>
    float of_d[CHUNK];       // <dY, x>
    float states[8];         // <S, dS> of each warp
};

// The parameters of the heads, and where their gradients go.
struct Heads {
    bf16* ddt;
    float* partial; // [3, chunks, heads]: of a_log, dt_bias and d
    const bf16* dt;
    const float *a_log, *dt_bias;
    int heads;
    float least, most;
};

// Computes the gradients of the time steps of a chunk's rows. Called by one warp; a lane has two rows.
__device__ __forceinline__ void write_steps(const Heads& of, const RowSums& sums, const float* steps, int2 rows, int head) {
    const int lane = threadIdx.x % 32;
    const float a = -expf(of.a_log[head]), bias = of.dt_bias[head];
    float q[2], of_z = 0.0f, states = 0.0f, terms[3] = {};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = 2 * lane + k;
        const float z = sums.z[0][i] + sums.z[1][i];
        q[k] = sums.b[0][i] + sums.b[1][i] - z;
        for (int w = 0; w < 4; w++) q[k] -= sums.columns[w][i];
        of_z += z;
    }
    for (int w = 0; w < 8; w++) states += sums.states[w];
    // The last row adds the sum over all rows: a cumulative sum from the last row adds it to each.
    const float last = warp_sum(of_z) + power_of(steps[CHUNK - 1]) * states;
    q[1] += after_lane(q[0] + q[1]) + last;
    q[0] += q[1];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = 2 * lane + k;
        if (i < rows.y) {
            const u64 at = (u64)(rows.x + i) * of.heads + head;
            const float ddt = (a * q[k] + sums.of_x[i]) * slope_of_step(load(of.dt[at]) + bias, of.least, of.most);
            store(&of.ddt[at], ddt);
            terms[0] += steps[CHUNK + i] * a * q[k];
            terms[1] += ddt;
            terms[2] += sums.of_d[i];
        }
    }
#pragma unroll
    for (int k = 0; k < 3; k++) {
        const float sum = warp_sum(terms[k]);
        if (lane == 0) of.partial[((u64)k * (gridDim.x - 1) + blockIdx.x) * of.heads + head] = sum;
    }
}

// Writes zeros as the gradients of the rows of padding, of the heads of a group.
__device__ __forceinline__ void clear_padding(bf16* dxbc, bf16* ddt, int first, int rows, int group, int groups, int heads) {
    const int in_group = heads / groups;
    const u64 width = (u64)heads * 64 + (u64)groups * 128 * PANELS;
    for (int t = first; t < rows; t++) {
        for (int c = threadIdx.x; c < in_group * 64; c += 256) store(&dxbc[t * width + group * in_group * 64 + c], 0.0f);
        for (int c = threadIdx.x; c < PANELS * 128; c += 256)
            store(&dxbc[t * width + heads * 64 + (c / (PANELS * 64) * groups + group) * PANELS * 64 + c % (PANELS * 64)], 0.0f);
        for (int h = threadIdx.x; h < in_group; h += 256) store(&ddt[(u64)t * heads + group * in_group + h], 0.0f);
    }
}

// Returns the sum of this warp's part of S o dS.
__device__ __forceinline__ float dot_of_states(const u8* stage) {
    float sum = 0.0f;
    for (int p = threadIdx.x; p < PANELS * PANEL / 16; p += 256) {
        const uint4 s = *(const uint4*)(stage + STAGE_S + p * 16), ds = *(const uint4*)(stage + STAGE_DS + p * 16);
        sum += low(s.x) * low(ds.x) + high(s.x) * high(ds.x) + low(s.y) * low(ds.y) + high(s.y) * high(ds.y);
        sum += low(s.z) * low(ds.z) + high(s.z) * high(ds.z) + low(s.w) * low(ds.w) + high(s.w) * high(ds.w);
    }
    return warp_sum(sum);
}

// Grid: chunks, and one more for the rows of padding; groups; parts of 128 columns of dB and dC. Each of two warp groups has 64 of these columns. The first
// also computes M, and the second dX. All parts compute the sums over all columns; the first part writes what does not depend on the part.
extern "C" __global__ void __launch_bounds__(256) ssd_gradients(bf16* dxbc, bf16* ddt, float* partial, const bf16* dy, const bf16* xbc, const bf16* dt,
                                                                const float* a_log, const float* dt_bias, const float* d, const u8* kept_states,
                                                                const u8* kept_gradients, const float* steps, const int2* chunks, const int* at,
                                                                int count, int all_rows, int heads, int groups, float least, float most) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ RowSums of;
    __shared__ u64 full[2];
    const int of_group = blockIdx.y, in_group = heads / groups, half = uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
    const u64 pitch = (u64)heads * 64, width = pitch + (u64)groups * 128 * PANELS;
    const bool is_first = blockIdx.z == 0;
    if (blockIdx.x == gridDim.x - 1) {
        if (at && is_first) clear_padding(dxbc, ddt, at[count], all_rows, of_group, groups, heads);
        return;
    }
    const int2 rows = chunks[blockIdx.x];
    if (rows.y == 0) {
        for (int h = threadIdx.x; h < 3 * in_group; h += 256)
            partial[((u64)(h / in_group) * (gridDim.x - 1) + blockIdx.x) * heads + of_group * in_group + h % in_group] = 0.0f;
        return;
    }
    if (threadIdx.x == 0) {
        barrier_init(&full[0], 1);
        barrier_init(&full[1], 1);
        barriers_are_initialized();
    }
    __syncthreads();
    const Heads of_heads = {ddt, partial, dt, a_log, dt_bias, heads, least, most};
    const u64 first = rows.x, columns = pitch + (of_group * PANELS + 2 * blockIdx.z + half) * 64;
    const u32 base = uniform(shared_address(shared));
    // Starts the copies for a head of the group.
    auto fetch = [&](int i) {
        const int head = of_group * in_group + i;
        const u64 of_head = (u64)blockIdx.x * heads + head;
        u8* const to = shared + AT_STAGES + i % HEAD_STAGES * STAGE;
        if (threadIdx.x == 0) {
            barrier_expect(&full[i % HEAD_STAGES], 2 * PANELS * PANEL + STEPS_BYTES);
            copy_bytes(to + STAGE_S, kept_states + of_head * PANELS * PANEL, PANELS * PANEL, &full[i % HEAD_STAGES]);
            copy_bytes(to + STAGE_DS, kept_gradients + of_head * PANELS * PANEL, PANELS * PANEL, &full[i % HEAD_STAGES]);
            copy_bytes(shared + AT_STEPS + i % HEAD_STAGES * STEPS_BYTES, steps + of_head * 2 * CHUNK, STEPS_BYTES, &full[i % HEAD_STAGES]);
        }
        copy_rows(to, xbc + first * width + head * 64, width, rows.y);
        copy_rows(to + STAGE_DY, dy + first * pitch + head * 64, pitch, rows.y);
    };
    for (int p = 0; p < PANELS; p++) {
        copy_rows(shared + p * PANEL, xbc + first * width + pitch + (of_group * PANELS + p) * 64, width, rows.y);
        copy_rows(shared + AT_C + p * PANEL, xbc + first * width + pitch + ((groups + of_group) * PANELS + p) * 64, width, rows.y);
    }
    fetch(0);
    // Products of rows of C and B: `cb` has C B' in the first warp group, and B C' in the second. `sum` is of M, in the first.
    float cb[32], sum[32] = {}, dc[32] = {}, db[32] = {}, r[32], z[32];
    for (int i = 0; i < in_group; i++) {
        const int head = of_group * in_group + i;
        // After a barrier, everything of the head before this one has been read.
        if (HEAD_STAGES == 1 && i > 0) {
            __syncthreads();
            fetch(i);
        }
        wait_for_copies();
        show_copies_what_was_written();
        __syncthreads();
        if (HEAD_STAGES > 1 && i + 1 < in_group) fetch(i + 1);
        if (i == 0) {
            product<64 * PANELS, PANEL, PANEL>(cb, base + (half ? 0 : AT_C), base + (half ? AT_C : 0), false);
            wait_for_products<0>(cb);
        }
        barrier_wait(&full[i % HEAD_STAGES], i / HEAD_STAGES & 1);
        u8* const stage = shared + AT_STAGES + i % HEAD_STAGES * STAGE;
        const u32 at_stage = base + AT_STAGES + i % HEAD_STAGES * STAGE;
        const float *const b = (const float*)(shared + AT_STEPS + i % HEAD_STAGES * STEPS_BYTES), *const step = b + CHUNK, whole = b[CHUNK - 1];
        float of_states = 0.0f, of_b[2] = {}, of_z[2] = {}, of_rows[2], of_columns[2];
#pragma unroll
        for (int h = 0; h < 2; h++) of_rows[h] = power_of(b[row(h)]), of_columns[h] = step[row(h)] * power_of(whole - b[row(h)]);
#pragma unroll
        for (int part = 0; part < PANELS / 2; part++) {
            const int at_panel = (2 * part + half) * PANEL;
            product<64, PANEL, 0>(r, at_stage + STAGE_DY, at_stage + STAGE_S + at_panel, false);
            product<64, PANEL, 0>(z, at_stage, at_stage + STAGE_DS + at_panel, false);
            if (part == 0) of_states = dot_of_states(stage);
            wait_for_products<0>(r);
            hold(z);
            add_panel_dots(of_b, r, shared + AT_C + at_panel);
            add_panel_dots(of_z, z, shared + at_panel);
            if (PANELS == 2 || part == blockIdx.z) {
#pragma unroll
                for (int j = 0; j < 32; j++) dc[j] = __fmaf_rn(of_rows[j / 2 % 2], r[j], dc[j]), db[j] = __fmaf_rn(of_columns[j / 2 % 2], z[j], db[j]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) of_b[h] *= of_rows[h], of_z[h] *= of_columns[h];
        if (threadIdx.x % 32 == 0) of.states[warp] = of_states;
        if (threadIdx.x % 4 == 0) of.z[half][row(0)] = of_z[0], of.z[half][row(1)] = of_z[1];
        if (half == 0) {
            product<64, PANEL, PANEL>(r, at_stage + STAGE_DY, at_stage, false);
            wait_for_products<0>(r);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int k = 4 * j; k < 4 * j + 4; k++) {
                    const int i = row(k / 2 % 2), c = column(j) + k % 2;
                    r[k] = is_above(j) ? 0.0f : r[k] * step[c] * power_of(b[i] - b[c]);
                    if (!is_below(j) && i < c) r[k] = 0.0f;
                    sum[k] += r[k];
                }
#pragma unroll
            for (int h = 0; h < 2; h++) of_b[h] += row_dot(r, cb, h);
            column_sums(of.columns[warp % 4], r, cb);
        } else {
            product<64 * PANELS, PANEL, PANEL>(r, base, at_stage + STAGE_DS, false);
            Left<64> p;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int k = 4 * j; k < 4 * j + 4; k++) {
                    const int c = row(k / 2 % 2), i = column(j) + k % 2;
                    z[k] = is_below(j) ? 0.0f : cb[k] * power_of(b[i] - b[c]);
                    if (!is_above(j) && i < c) z[k] = 0.0f;
                }
            p.set(z);
            wait_for_products<0>(r);
            scale_rows(r, power_of(whole - b[row(0)]), power_of(whole - b[row(1)]));
            product_of<0>(r, p, at_stage + STAGE_DY, true);
            get_panel(z, stage + STAGE_DY);
            float of_x[2] = {}, of_d[2] = {};
            add_panel_dots(of_d, z, stage);
            wait_for_products<0>(r);
            add_panel_dots(of_x, r, stage);
            if (threadIdx.x % 4 == 0)
                of.of_x[row(0)] = of_x[0], of.of_x[row(1)] = of_x[1], of.of_d[row(0)] = of_d[0], of.of_d[row(1)] = of_d[1];
            scale_rows(r, step[row(0)], step[row(1)]);
            const float factor = d[head];
#pragma unroll
            for (int j = 0; j < 32; j++) r[j] = __fmaf_rn(factor, z[j], r[j]);
            if (is_first) write_rows(dxbc + first * width + head * 64, width, rows.y, r);
        }
        if (threadIdx.x % 4 == 0) of.b[half][row(0)] = of_b[0], of.b[half][row(1)] = of_b[1];
        __syncthreads();
        if (is_first && warp == 0) write_steps(of_heads, of, b, rows, head);
    }
    if (half == 0) put_panel(shared + AT_M, sum);
    show_copies_what_was_written();
    __syncthreads();
    product<64, PANEL, 0>(dc, base + AT_M, base + (2 * blockIdx.z + half) * PANEL, true);
    product<64, 0, 0>(db, base + AT_M, base + AT_C + (2 * blockIdx.z + half) * PANEL, true);
    wait_for_products<0>(dc);
    hold(db);
    write_rows(dxbc + first * width + columns, width, rows.y, db);
    write_rows(dxbc + first * width + columns + groups * PANELS * 64, width, rows.y, dc);
}
