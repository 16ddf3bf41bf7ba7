// Chunks of CHUNK rows of a segment, whose matrices are operands of wgmma. Matrices are divided into panels of 64 columns in BF16: rows of 128 bytes whose
// 16-byte pieces are swizzled within groups of eight rows.

typedef unsigned char u8;

#define PANEL (CHUNK * 128) // the bytes of a panel of a chunk

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// Computes d (+)= SIGN a b for 64 rows, 64 columns and 16 terms. An operand is [rows, terms], or [terms, rows] (MN).
template <int A_MN, int B_MN, int SIGN> __device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
                 "%28, %29, %30, %31}, %32, %33, p, %35, 1, %36, %37;\n}"
                 : D16(0), D16(16)
                 : "l"(a), "l"(b), "r"(adds), "n"(SIGN), "n"(A_MN), "n"(B_MN));
}
// The same address in all threads of a warp, as descriptors must be.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

// Enqueues d (+)= SIGN a b with TERMS terms. `a` and `b` are addresses of panels in shared memory. Terms of an operand [rows, terms] continue in the
// panel A_NEXT or B_NEXT bytes further; an operand [terms, rows] (NEXT of 0) has all terms in one panel.
template <int TERMS, int A_NEXT, int B_NEXT, int SIGN = 1>
__device__ __forceinline__ void product(float (&d)[32], u32 a, u32 b, bool adds) {
    // Found here, descriptors are not kept in registers: copies from registers to descriptors take longer.
    a = uniform(a), b = uniform(b);
    hold(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < TERMS / 16; k++) {
        const u32 of_a = A_NEXT ? a + k / 4 * A_NEXT + k % 4 * 32 : a + k * 2048, of_b = B_NEXT ? b + k / 4 * B_NEXT + k % 4 * 32 : b + k * 2048;
        multiply<A_NEXT == 0, B_NEXT == 0, SIGN>(d, descriptor(of_a), descriptor(of_b), adds || k > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// The place of a thread's sums: element 4 j + 2 h + e is in row `row(h)` and column `column(j) + e`.
__device__ __forceinline__ int row(int h) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h; }
__device__ __forceinline__ int column(int j) { return 8 * j + threadIdx.x % 4 * 2; }
// The byte of a row and column of a panel.
__device__ __forceinline__ u32 in_panel(int row, int column) { return row * 128 + (column * 2 ^ (row & 7) << 4); }

__device__ __forceinline__ u32 pair(float a, float b) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
    return bits;
}
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }

// The address, in a panel, of the row that the lane passes for matrices j and j + 1 of 16 rows and 8 columns each.
__device__ __forceinline__ u32 of_matrices(int j) {
    const int lane = threadIdx.x % 32;
    return in_panel(threadIdx.x % 128 / 32 * 16 + lane % 16, 8 * (j + lane / 16));
}
// Writes sums to a panel; row h of a thread is multiplied by a factor.
__device__ __forceinline__ void put_panel(u8* panel, const float (&d)[32], float factor0 = 1.0f, float factor1 = 1.0f) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float factor = i % 2 ? factor1 : factor0;
            words[i] = pair(d[4 * j + 2 * i] * factor, d[4 * j + 2 * i + 1] * factor);
        }
        store_matrices(panel + of_matrices(j), words);
    }
}
// Reads four words of a thread's elements of a panel: of columns `column(j)` and `column(j + 1)`.
__device__ __forceinline__ void get_words(u32 (&words)[4], const u8* panel, int j) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(panel + of_matrices(j))) : "memory");
}
// Reads a thread's elements of a panel.
__device__ __forceinline__ void get_panel(float (&d)[32], const u8* panel) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        u32 words[4];
        get_words(words, panel, j);
#pragma unroll
        for (int i = 0; i < 4; i++) d[4 * j + 2 * i] = low(words[i]), d[4 * j + 2 * i + 1] = high(words[i]);
    }
}
// Returns exp(x) for x <= 0, to a relative error of 2^-21 for factors that matter in BF16.
__device__ __forceinline__ float decay_of(float x) { return __expf(x); }
// Returns 2^x, likewise.
__device__ __forceinline__ float power_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The left operand of wgmma in registers: 16 rows per warp, of 16 terms for each four words. Sums of a product, rounded to BF16, are such an operand.
template <int TERMS> struct Left {
    u32 at[TERMS / 4];
    // Takes sums as the terms from `first` on.
    __device__ __forceinline__ void set(const float (&d)[32], int first = 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) at[first / 4 + i] = pair(d[2 * i], d[2 * i + 1]);
    }
    // Reads a panel [TERMS, 64] transposed: its columns are the rows of the operand.
    __device__ __forceinline__ void read_transposed(const u8* panel) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < TERMS / 16; k++) {
            const u32 from = in_panel(16 * k + lane / 16 * 8 + lane % 8, threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(at[4 * k]), "=r"(at[4 * k + 1]), "=r"(at[4 * k + 2]),
                         "=r"(at[4 * k + 3]) : "r"(shared_address(panel + from)) : "memory");
        }
    }
    // Writes the operand transposed to a panel.
    __device__ __forceinline__ void write_transposed(u8* panel) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < TERMS / 16; k++) {
            const u32 to = in_panel(16 * k + lane / 16 * 8 + lane % 8, threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(panel + to)), "r"(at[4 * k]),
                         "r"(at[4 * k + 1]), "r"(at[4 * k + 2]), "r"(at[4 * k + 3]) : "memory");
        }
    }
};
// Enqueues d (+)= SIGN a b with `a` in registers. `b` is as in `product`.
template <int B_NEXT, int SIGN = 1, int TERMS> __device__ __forceinline__ void product_of(float (&d)[32], const Left<TERMS>& a, u32 b, bool adds) {
    b = uniform(b);
    hold(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < TERMS / 16; k++) {
        const u64 of_b = descriptor(B_NEXT ? b + k / 4 * B_NEXT + k % 4 * 32 : b + k * 2048);
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
                     "%28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, %38, 1, %39;\n}"
                     : D16(0), D16(16)
                     : "r"(a.at[4 * k]), "r"(a.at[4 * k + 1]), "r"(a.at[4 * k + 2]), "r"(a.at[4 * k + 3]), "l"(of_b), "r"(int(adds || k > 0)), "n"(SIGN),
                       "n"(B_NEXT == 0));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Multiplies the columns of sums by factors of all columns.
__device__ __forceinline__ void scale_columns(float (&d)[32], const float (&factors)[16]) {
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] *= factors[i / 4 * 2 + i % 2];
}

// Multiplies the rows of sums.
__device__ __forceinline__ void scale_rows(float (&d)[32], float factor0, float factor1) {
#pragma unroll
    for (int j = 0; j < 8; j++) d[4 * j] *= factor0, d[4 * j + 1] *= factor0, d[4 * j + 2] *= factor1, d[4 * j + 3] *= factor1;
}

// Copies bytes of shared memory to device memory. Called by one thread, after the barrier that follows `show_copies_what_was_written`.
__device__ __forceinline__ void write_bytes(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void sync_group(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// Sets factors of the columns of sums, from values of all columns.
template <class Of> __device__ __forceinline__ void set_columns(float (&factors)[16], const float* values, Of of) {
#pragma unroll
    for (int i = 0; i < 16; i++) factors[i] = of(values[column(i / 2) + i % 2]);
}

// Adds over the four lanes that share a row.
__device__ __forceinline__ float over_row(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}
// Multiplies two matrices elementwise and adds the products of row h.
__device__ __forceinline__ float row_dot(const float (&a)[32], const float (&b)[32], int h) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) sum = __fmaf_rn(a[4 * j + 2 * h + 1], b[4 * j + 2 * h + 1], __fmaf_rn(a[4 * j + 2 * h], b[4 * j + 2 * h], sum));
    return over_row(sum);
}
// Multiplies sums elementwise with a panel, and adds the products of each row to `dots`.
__device__ __forceinline__ void add_panel_dots(float (&dots)[2], const float (&a)[32], const u8* panel) {
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        u32 words[4];
        get_words(words, panel, j);
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[i % 2] = __fmaf_rn(a[4 * j + 2 * i + 1], high(words[i]), __fmaf_rn(a[4 * j + 2 * i], low(words[i]), sums[i % 2]));
    }
    dots[0] += over_row(sums[0]), dots[1] += over_row(sums[1]);
}
// Whether the columns `column(j)` of the rows of this warp are above the diagonal of a triangular matrix.
__device__ __forceinline__ bool is_above(int j) { return 8 * j > threadIdx.x % 128 / 32 * 16 + 15; }
// Whether they are below it.
__device__ __forceinline__ bool is_below(int j) { return 8 * j + 7 < threadIdx.x % 128 / 32 * 16; }
// Writes the sums of the columns over the rows of the warp.
__device__ __forceinline__ void column_sums(float* to, const float (&a)[32], const float (&b)[32]) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float sum = __fmaf_rn(a[4 * j + 2 + e], b[4 * j + 2 + e], a[4 * j + e] * b[4 * j + e]);
            for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
            if (threadIdx.x % 32 < 4) to[column(j) + e] = sum;
        }
}
// Returns the sum of `x` over the lanes up to this one.
__device__ __forceinline__ float through_lane(float x) {
    for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xFFFFFFFF, x, offset);
        if (threadIdx.x % 32 >= offset) x = other + x;
    }
    return x;
}
// Returns the sum of `x` over the lanes after this one.
__device__ __forceinline__ float after_lane(float x) {
    const int lane = threadIdx.x % 32;
    float sum = __shfl_down_sync(0xFFFFFFFF, x, 1);
    if (lane == 31) sum = 0.0f;
    for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_down_sync(0xFFFFFFFF, sum, offset);
        if (lane + offset < 32) sum += other;
    }
    return sum;
}
// Writes rows of sums to [T, pitch] as BF16.
__device__ __forceinline__ void write_rows(bf16* to, u64 pitch, int rows, const float (&d)[32]) {
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (row(h) < rows)
#pragma unroll
            for (int j = 0; j < 8; j++) *(u32*)(to + row(h) * pitch + column(j)) = pair(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
}

// The chunks of a segment.
struct SegmentChunks {
    int first, count;         // of the chunks of the batch
    int first_row, last_rows; // the first row, and the number of rows of the last chunk: all others have CHUNK rows
    __device__ __forceinline__ u64 row(int i) const { return first_row + i * CHUNK; }
    __device__ __forceinline__ int rows(int i) const { return i + 1 < count ? CHUNK : last_rows; }
};
__device__ __forceinline__ SegmentChunks chunks_of(int2 segment, const int2* chunks) {
    if (segment.y == 0) return {};
    return {segment.x, segment.y, chunks[segment.x].x, chunks[segment.x + segment.y - 1].y};
}

// The barriers of a ring of stages: some threads copy chunk after chunk, and each of the four warps that compute releases each stage once.
struct Ring {
    u64 full[STAGES], empty[STAGES];
    // Called by all threads of the block. A stage is full after `arrivals` arrivals.
    __device__ __forceinline__ void start(int arrivals) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) barrier_init(&full[i], arrivals), barrier_init(&empty[i], 4);
            barriers_are_initialized();
        }
        __syncthreads();
    }
    // Waits until the chunk `i` can be copied, and returns the barrier of its copies.
    __device__ __forceinline__ u64* wait_until_empty(int i) {
        if (i >= STAGES) barrier_wait(&empty[i % STAGES], i / STAGES - 1 & 1);
        return &full[i % STAGES];
    }
    __device__ __forceinline__ void wait_until_full(int i) { barrier_wait(&full[i % STAGES], i / STAGES & 1); }
    // Called by all threads of a warp that has read the stage.
    __device__ __forceinline__ void release(int i) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&empty[i % STAGES]);
    }
};

// Starts a copy of 16 bytes to shared memory, or writes zeros there.
__device__ __forceinline__ void copy_piece(void* to, const void* from, bool copies) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(copies ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// `end_of_pieces` ends a group of such copies. `wait_for_pieces` waits until all groups of this thread except the last PENDING are complete.
__device__ __forceinline__ void end_of_pieces() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_pieces() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Starts copies of 64 columns of rows to a panel. Rows from `rows` on become zeros. Called by all threads of the block.
__device__ __forceinline__ void copy_rows(u8* panel, const bf16* from, u64 pitch, int rows) {
    for (int r = threadIdx.x / 8; r < CHUNK; r += blockDim.x / 8) {
        const int column = threadIdx.x % 8 * 8;
        copy_piece(panel + in_panel(r, column), from + min(r, rows - 1) * pitch + column, r < rows);
    }
}
// Arrives at a barrier when the copies that this thread has started are complete.
__device__ __forceinline__ void copies_arrive_at(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
