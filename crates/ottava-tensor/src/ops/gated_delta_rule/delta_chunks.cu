// The chunks of a batch, what all chunks need of their own rows (`delta_prepare`), and the states from chunk to chunk (`delta_states`).

// A thread's eighths of the rows of queries or keys: eight elements of each eighth row.
struct Rows {
    Eight<bf16> at[CHUNK / 8];
    __device__ __forceinline__ void fetch(const bf16* from, u64 pitch, int rows) {
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            const int r = i * 8 + threadIdx.x / 16;
            at[i] = {};
            if (r < rows) at[i] = load8(from + r * pitch + threadIdx.x % 16 * 8);
        }
    }
    // Divides the rows by their length, multiplies them by `factor`, and writes them to two panels in shared memory. Unless `image` is null, writes them to
    // device memory too, and the reciprocal lengths to `rstds`.
    __device__ __forceinline__ void put(u8* panels, float factor, float eps, u8* image, float* rstds) {
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            const int r = i * 8 + threadIdx.x / 16, c = threadIdx.x % 16 * 8;
            float v[8], square = 0.0f;
            unpack8(at[i], v);
#pragma unroll
            for (int j = 0; j < 8; j++) square = __fmaf_rn(v[j], v[j], square);
            for (int offset = 8; offset > 0; offset /= 2) square += __shfl_xor_sync(0xFFFFFFFF, square, offset);
            const float rstd = rsqrtf(square + eps);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = v[j] * rstd * factor;
            const u32 to = c / 64 * PANEL + in_panel(r, c % 64);
            *(uint4*)(panels + to) = pack8<bf16>(v).words[0];
            if (image) {
                *(uint4*)(image + to) = pack8<bf16>(v).words[0];
                if (threadIdx.x % 16 == 0) rstds[r] = rstd;
            }
        }
    }
};

// Starts copies of CHUNK x 128 elements to two panels. Rows from `rows` on become zeros.
__device__ __forceinline__ void start_copies(u8* panels, const bf16* from, u64 pitch, int rows) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        const int r = i * 8 + threadIdx.x / 16, c = threadIdx.x % 16 * 8;
        const bf16* const x = from + min(r, rows - 1) * pitch + c;
        copy_piece(panels + c / 64 * PANEL + in_panel(r, c % 64), x, r < rows);
    }
}

// A matrix [CHUNK, CHUNK] in shared memory, by columns.
struct Columns {
    float* at;
    __device__ __forceinline__ float& operator()(int row, int column) const { return at[column * PITCH + row]; }
};

// Adds a product of 16 x 16 elements `a` and 16 x 8 * TILES elements `b` to `c`, in TF32. `a` and `b` begin at a row and a column.
template <int TILES>
__device__ __forceinline__ void add_product(float (&c)[TILES][4], const Columns& of, int a_row, int a_column, int b_row, int b_column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 16; k += 8) {
        u32 a[4], b[2];
        const auto tf32 = [](float x) {
            u32 bits;
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
            return bits;
        };
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = tf32(of(a_row + g + i % 2 * 8, a_column + k + t + i / 2 * 4));
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) b[i] = tf32(of(b_row + k + t + i * 4, b_column + 8 * n + g));
            asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
}
// Writes the result of `add_product` times SIGN.
template <int SIGN, int TILES> __device__ __forceinline__ void put_product(const Columns& of, const float (&c)[TILES][4], int row, int column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) of(row + g + i / 2 * 8, column + 8 * n + 2 * t + i % 2) = SIGN * c[n][i];
}

// Replaces a block of 16 x 16 elements on the diagonal of L by the inverse of 1 + L. The block begins at row `base`; the thread has column `j`, and is in
// one warp with the threads of the block's other columns.
__device__ __forceinline__ void invert_diagonal(const Columns& of, int base, int j) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = i == j % 16 ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < 15; i++) {
#pragma unroll
        for (int k = (i + 1) / 4 * 4; k < 16; k += 4) {
            const float4 l = *(const float4*)&of(base + k, base + i);
            if (k > i) x[k] = __fmaf_rn(-l.x, x[i], x[k]);
            if (k + 1 > i) x[k + 1] = __fmaf_rn(-l.y, x[i], x[k + 1]);
            if (k + 2 > i) x[k + 2] = __fmaf_rn(-l.z, x[i], x[k + 2]);
            if (k + 3 > i) x[k + 3] = __fmaf_rn(-l.w, x[i], x[k + 3]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4) *(float4*)&of(base + i, j) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// Replaces L by the inverse of 1 + L; elements above the diagonal are zero. First the blocks of 16 x 16 on the diagonal, a column per thread; then, of
// larger blocks, the part below the diagonal: -D^-1 C A^-1 for A and D on the diagonal and C below. Called by all threads.
__device__ __forceinline__ void invert(const Columns& of) {
    const int j = threadIdx.x, base = j / 16 * 16, warp = threadIdx.x / 32;
    if (j < CHUNK) invert_diagonal(of, base, j);
    __syncthreads();
    if (warp < 2) {
        const int left = 32 * warp, down = left + 16;
        float half[2][4] = {}, inverse[2][4] = {};
        add_product(half, of, down, left, left, left);
        __syncwarp();
        put_product<1>(of, half, down, left);
        __syncwarp();
        add_product(inverse, of, down, down, down, left);
        __syncwarp();
        put_product<-1>(of, inverse, down, left);
    }
    __syncthreads();
    const int down = 32 + 16 * (warp % 2), left = 16 * (warp / 2);
    float whole[2][4] = {}, result[2][4] = {};
    add_product(whole, of, down, 0, 0, left);
    add_product(whole, of, down, 16, 16, left);
    __syncthreads();
    put_product<1>(of, whole, down, left);
    __syncthreads();
    add_product(result, of, down, 32, 32, left);
    add_product(result, of, down, 48, 48, left);
    __syncthreads();
    put_product<-1>(of, result, down, left);
    __syncthreads();
}
// Reads the gates of a head, and writes the cumulative sums and beta. Called by one warp.
__device__ __forceinline__ void load_gates(float* b, float* to_beta, float* of_chunk, const float* g, const float* beta, int heads, int rows) {
    const int lane = threadIdx.x % 32, r = 2 * lane;
    const float first = r < rows ? g[(u64)r * heads] : 0.0f, second = r + 1 < rows ? g[(u64)(r + 1) * heads] : 0.0f;
    const float sum = through_lane(first + second);
    const float2 sums = make_float2(sum - second, sum);
    const float2 betas = make_float2(r < rows ? beta[(u64)r * heads] : 0.0f, r + 1 < rows ? beta[(u64)(r + 1) * heads] : 0.0f);
    *(float2*)(b + r) = sums;
    *(float2*)(to_beta + r) = betas;
    *(float2*)(of_chunk + r) = sums;
    *(float2*)(of_chunk + CHUNK + r) = betas;
}

// Writes L in F32, by columns, and P in BF16, from the products of keys, and of queries and keys.
__device__ __forceinline__ void put_lower(const Columns& L, u8* P, const float (&kk)[32], const float (&qk)[32], const float* b, const float* beta) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = row(h);
        const float b_i = b[i], beta_i = beta[i];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int c = column(j), at = 4 * j + 2 * h;
            const float g0 = i >= c ? decay_of(b_i - b[c]) : 0.0f, g1 = i >= c + 1 ? decay_of(b_i - b[c + 1]) : 0.0f;
            L(i, c) = beta_i * kk[at] * g0;
            L(i, c + 1) = beta_i * kk[at + 1] * g1;
            *(u32*)(P + in_panel(i, c)) = pair(qk[at] * g0, qk[at + 1] * g1);
        }
    }
}

// Shared memory of `delta_prepare`: queries (later P), keys, values (later U), and L (later T times gates, then W).
#define AT_VALUES (4 * PANEL)
#define AT_LOWER (6 * PANEL)

// Computes the panels of a chunk and head. `keys` has an image for each chunk and key head, and `rstd` the reciprocal lengths of queries and keys; the
// first head of a key head writes them. `heads_images` and `gates` (b and beta) have a part for each chunk and head. T is written if `keeps_inverse`.
// Grid: chunks, heads.
extern "C" __global__ void __launch_bounds__(128, 3) delta_prepare(u8* keys, u8* heads_images, float* gates, float* rstd, const bf16* qkv, const float* g,
                                                                   const float* beta, const int2* chunks, int key_heads, int heads, float eps,
                                                                   int keeps_inverse) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ float b[CHUNK], betas[CHUNK];
    const int2 rows = chunks[blockIdx.x];
    const int head = blockIdx.y, key_head = head / (heads / key_heads);
    if (rows.y == 0) return;
    const u64 width = 128 * (2 * (u64)key_heads + heads), of_keys = (u64)blockIdx.x * key_heads + key_head, of_head = (u64)blockIdx.x * heads + head;
    const bf16* const x = qkv + rows.x * width;
    u8* const image = heads_images + of_head * HEAD_IMAGE;
    start_copies(shared + AT_VALUES, x + (2 * key_heads + head) * 128, width, rows.y);
    Rows queries, its_keys;
    queries.fetch(x + key_head * 128, width, rows.y);
    its_keys.fetch(x + (key_heads + key_head) * 128, width, rows.y);
    if (threadIdx.x < 32) load_gates(b, betas, gates + of_head * 2 * CHUNK, g + (u64)rows.x * heads + head, beta + (u64)rows.x * heads + head, heads, rows.y);
    const bool writes_keys = head % (heads / key_heads) == 0;
    queries.put(shared, QUERY_FACTOR, eps, writes_keys ? keys + of_keys * KEYS_IMAGE : nullptr, rstd + of_keys * 2 * CHUNK);
    its_keys.put(shared + AT_K, 1.0f, eps, writes_keys ? keys + of_keys * KEYS_IMAGE + AT_K : nullptr, rstd + of_keys * 2 * CHUNK + CHUNK);
    show_copies_what_was_written();
    __syncthreads();
    const u32 base = shared_address(shared);
    const Columns lower = {(float*)(shared + AT_LOWER)};
    {
        float kk[32], qk[32];
        product<128, PANEL, PANEL>(kk, base + AT_K, base + AT_K, false);
        product<128, PANEL, PANEL>(qk, base, base + AT_K, false);
        wait_for_products<0>(kk);
        hold(qk);
        __syncthreads();
        put_lower(lower, shared, kk, qk, b, betas);
    }
    __syncthreads();
    invert(lower);
    {
        // A thread has half of a column.
        const int j = threadIdx.x % CHUNK, first = threadIdx.x / CHUNK * (CHUNK / 2);
        float inverse[CHUNK / 2];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += 4) {
            const float4 four = *(const float4*)&lower(first + i, j);
            inverse[i] = four.x, inverse[i + 1] = four.y, inverse[i + 2] = four.z, inverse[i + 3] = four.w;
        }
        __syncthreads();
        const float of_values = betas[j], of_states = of_values * decay_of(b[j]);
        u8* const to = shared + AT_LOWER;
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            store((bf16*)(to + in_panel(first + i, j)), inverse[i] * of_values);
            store((bf16*)(to + PANEL + in_panel(first + i, j)), inverse[i] * of_states);
            if (keeps_inverse) store((bf16*)(image + AT_T + in_panel(first + i, j)), inverse[i]);
        }
    }
    wait_for_copies();
    show_copies_what_was_written();
    __syncthreads();
    float u[2][32], w[2][32];
#pragma unroll
    for (int p = 0; p < 2; p++) {
        product<64, PANEL, 0>(u[p], base + AT_LOWER, base + AT_VALUES + p * PANEL, false);
        product<64, PANEL, 0>(w[p], base + AT_LOWER + PANEL, base + AT_K + p * PANEL, false);
    }
    wait_for_products<0>(u[0]);
    hold(u[1]);
    hold(w[0]);
    hold(w[1]);
    __syncthreads();
#pragma unroll
    for (int p = 0; p < 2; p++) {
        put_panel(shared + AT_VALUES + p * PANEL, u[p]);
        put_panel(shared + AT_LOWER + p * PANEL, w[p]);
    }
    show_copies_what_was_written();
    __syncthreads();
    if (threadIdx.x == 0) {
        write_bytes(image, shared + AT_LOWER, 2 * PANEL);
        write_bytes(image + AT_U, shared + AT_VALUES, 2 * PANEL);
        write_bytes(image + AT_P, shared, PANEL);
        end_of_writes();
        wait_for_writes();
    }
}

// Shared memory of `delta_states`: stages, then panels that are written to device memory: the state and new values, or the output.
#define STAGE (8 * PANEL)  // queries, keys, W, a panel of U, and P
#define STAGE_W KEYS_IMAGE
#define STAGE_U (6 * PANEL)
#define STAGE_P (7 * PANEL)
#define AT_STATE (STAGES * STAGE)
#define AT_NEW (AT_STATE + SLICE)
#define AT_GATES (AT_NEW + PANEL)

// The segment, head and slice of a block of `delta_states`, and what it reads and writes.
struct StatesOf {
    SegmentChunks segment;
    int slice, heads;
    u64 head;
    bf16* o;
    u8 *kept_states, *kept_values, *shared;
};

// Writes the output of a chunk from a panel to rows of `o`.
__device__ __forceinline__ void write_output(bf16* o, u64 pitch, int rows, const u8* panel) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        const int r = i * 16 + threadIdx.x / 8, c = threadIdx.x % 8 * 8;
        if (r < rows) *(uint4*)(o + r * pitch + c) = *(const uint4*)(panel + in_panel(r, c));
    }
}

// Runs the chunks of a segment. The warp group holds the state transposed, because then the state and the new values are left operands in registers:
// R' = S' W', N' = U' - R', O' = S' Q' e^b + N' P', S' <- e^(b_last) S' + (N' e^(b_last - b)) K.
__device__ __forceinline__ void run_chunks(float (&s)[2][32], const StatesOf& of, Ring& ring) {
    u8* const shared = of.shared;
    const u32 base = shared_address(shared);
    const u64 pitch = (u64)of.heads * 128;
    for (int i = 0; i < of.segment.count; i++) {
        const int stage = i % STAGES;
        const u32 at_stage = base + stage * STAGE;
        const float* const b = (const float*)(shared + AT_GATES) + stage * CHUNK;
        float sums[32], output[32], factors[16], shares[16];
        Left<128> state;
        state.set(s[0]);
        state.set(s[1], 64);
        ring.wait_until_full(i);
        const float whole = b[CHUNK - 1], decay = decay_of(whole);
#pragma unroll
        for (int j = 0; j < 32; j++) s[0][j] *= decay, s[1][j] *= decay;
        product_of<PANEL>(sums, state, at_stage + STAGE_W, false);
        if (!KEEPS) product_of<PANEL>(output, state, at_stage, false);
        Left<64> u, new_values, weighted;
        u.read_transposed(shared + stage * STAGE + STAGE_U);
        set_columns(shares, b, [&](float b) { return decay_of(whole - b); });
        if (!KEEPS) set_columns(factors, b, decay_of);
        if (KEEPS) wait_for_products<0>(sums);
        else wait_for_products<1>(sums);
#pragma unroll
        for (int j = 0; j < 16; j++) sums[2 * j] = low(u.at[j]) - sums[2 * j], sums[2 * j + 1] = high(u.at[j]) - sums[2 * j + 1];
        new_values.set(sums);
        scale_columns(sums, shares);
        weighted.set(sums);
        product_of<0>(s[0], weighted, at_stage + AT_K, true);
        product_of<0>(s[1], weighted, at_stage + AT_K + PANEL, true);
#if KEEPS
        // One thread writes panels after all have written them to shared memory.
        if (threadIdx.x == 0) wait_for_reads();
        sync_group(1, 128);
        state.write_transposed(shared + AT_STATE);
        new_values.write_transposed(shared + AT_NEW);
        show_copies_what_was_written();
        sync_group(1, 128);
        if (threadIdx.x == 0) {
            const u64 panel = ((of.segment.first + i) * (u64)of.heads + of.head) * 2 + of.slice;
            write_bytes(of.kept_states + panel * SLICE, shared + AT_STATE, SLICE);
            write_bytes(of.kept_values + panel * PANEL, shared + AT_NEW, PANEL);
            end_of_writes();
        }
        wait_for_products<0>(s[0]);
        hold(s[1]);
#else
        wait_for_products<2>(output);
        scale_columns(output, factors);
        product_of<PANEL>(output, new_values, at_stage + STAGE_P, true);
        wait_for_products<0>(s[0]);
        hold(s[1]);
        hold(output);
        new_values.set(output);
        sync_group(1, 128);
        new_values.write_transposed(shared + AT_NEW);
        sync_group(1, 128);
        write_output(of.o + of.segment.row(i) * pitch, pitch, of.segment.rows(i), shared + AT_NEW);
#endif
        ring.release(i);
    }
    if (KEEPS && threadIdx.x == 0) wait_for_writes();
}

// Copies the chunks of a segment, one after the other. Called by one thread.
__device__ __forceinline__ void copy_chunks(const StatesOf& of, Ring& ring, const u8* keys, const u8* heads_images, const float* gates, int key_heads) {
    const u64 key_head = of.head / (of.heads / key_heads);
    for (int i = 0; i < of.segment.count; i++) {
        const u64 c = of.segment.first + i, panel = c * of.heads + of.head;
        const u8 *const of_keys = keys + (c * key_heads + key_head) * KEYS_IMAGE, *const of_head = heads_images + panel * HEAD_IMAGE;
        u64* const full = ring.wait_until_empty(i);
        u8* const to = of.shared + i % STAGES * STAGE;
        barrier_expect(full, (KEEPS ? 5 * PANEL : STAGE) + CHUNK * 4);
        copy_bytes(to + STAGE_W, of_head, 2 * PANEL, full);
        copy_bytes(to + STAGE_U, of_head + AT_U + of.slice * PANEL, PANEL, full);
        copy_bytes(of.shared + AT_GATES + i % STAGES * CHUNK * 4, gates + panel * 2 * CHUNK, CHUNK * 4, full);
        copy_bytes(to + AT_K, of_keys + AT_K, 2 * PANEL, full);
        if (!KEEPS) {
            copy_bytes(to, of_keys, 2 * PANEL, full);
            copy_bytes(to + STAGE_P, of_head + AT_P, PANEL, full);
        }
    }
}

// Runs the chunks of a segment for 64 columns of a head's values. Without KEEPS, writes `o`. With KEEPS, writes what backward needs: the state before each
// chunk, and the new values, as panels. The state begins with `before` [N, H, 128, 128] unless that is null. A warp group computes; one more warp copies
// chunks. Grid: segments, and without KEEPS and with offsets one more for the rows of padding; heads; two slices.
extern "C" __global__ void __launch_bounds__(160) delta_states(bf16* o, u8* kept_states, u8* kept_values, const u8* keys, const u8* heads_images,
                                                               const float* gates, const float* before, const int2* chunks, const int2* segments,
                                                               const int* at, int count, int rows, int key_heads, int heads) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Ring ring;
    const int slice = blockIdx.z, head = blockIdx.y, n = blockIdx.x;
    const u64 pitch = (u64)heads * 128;
    o += head * 128 + slice * 64;
    if (n == count) {
        for (int t = at[n] + threadIdx.x / 8; t < rows; t += 20) *(uint4*)(o + t * pitch + threadIdx.x % 8 * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    const StatesOf of = {chunks_of(segments[n], chunks), slice, heads, (u64)head, o, kept_states, kept_values, shared};
    ring.start(1);
    if (threadIdx.x >= 128) {
        if (threadIdx.x == 128) copy_chunks(of, ring, keys, heads_images, gates, key_heads);
        return;
    }
    float s[2][32];
    read_state(s, before ? before + ((u64)n * heads + head) * 128 * 128 : nullptr, slice);
    run_chunks(s, of, ring);
}
