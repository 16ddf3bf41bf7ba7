// `a · bᵀ` for few rows of `a`, as in decoding: its time is that of reading `b`. Hopper's tensor cores compute the transpose, 64 rows of `b`
// (output columns) times up to TOKENS rows of `a`, so that few rows waste nothing.
//
// A block has one thread that copies and two warp groups that multiply, each for half of the LINES rows of a tile of `b`. Both operands pass
// through a ring of STAGES slots in shared memory, in steps of 128 bytes along K. A block computes `most` tiles, or, where there are fewer tiles
// than multiprocessors, one of `parts` parts of a tile's steps; then the part that is last adds all of them, in order.
//
// Loops over tiles, steps and parts are not unrolled: they run a few times, and instructions that run once take longer to fetch than to execute.

// `copy_box` of what is read once and should leave the cache to others: activations, and the code of the kernels.
__device__ __forceinline__ void copy_once(void* to, const TensorMap* from, int byte, int row, u64* barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     shared_address(to)), "l"(from), "r"(byte), "r"(row), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// d (+)= a · b over 32 bytes of K; `adds` is 0 for the first of a sum.
#if IN_BITS == 8
#define SHAPE(N) "m64n" #N "k32.f32.e4m3.e4m3"
#define FLAGS ", 1, 1;"
#else
#define SHAPE(N) "m64n" #N "k16.f32." TEXT(IN) "." TEXT(IN)
#define FLAGS ", 1, 1, 0, 0;"
#endif
template <int N> struct Product;
#define PRODUCT(N, REGISTERS, A, B, ADDS, ...)                                                                                              \
    template <> struct Product<N> {                                                                                                         \
        __device__ __forceinline__ static void add(float (&d)[N / 2], u64 a, u64 b, int adds) {                                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\nwgmma.mma_async.sync.aligned." SHAPE(N) " {" REGISTERS "}, " A     \
                         ", " B ", p" FLAGS "\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(adds));                                               \
        }                                                                                                                                   \
    };
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R16 R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R32 R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
PRODUCT(8, "%0, %1, %2, %3", "%4", "%5", "%6", D4(0))
PRODUCT(16, R8, "%8", "%9", "%10", D4(0), D4(4))
PRODUCT(32, R16, "%16", "%17", "%18", D16(0))
PRODUCT(64, R32, "%32", "%33", "%34", D16(0), D16(16))

struct Arguments {
    X* out;
    const X* addend;                  // [rows, columns], or null
    const float *a_scale, *b_scale;     // one, or one per row where the stride is 1; null for plain operands
    float* partial;                     // [tiles, parts, LINES, TOKENS], if there are parts
    int rows, columns, steps, most, parts, a_stride, b_stride;
};

// How many blocks have written their part of a half of a tile; zeros between launches. Of tiles with parts there are fewer than multiprocessors.
__device__ u32 arrived[2 * 1024];

__device__ __forceinline__ void group_barrier(int group) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP) : "memory"); }

template <int TOKENS> __device__ __forceinline__ void skinny(const TensorMap* a, const TensorMap* b, const Arguments& args) {
    constexpr int BYTES = (LINES + TOKENS) * STEP, STAGES = (SHARED_BYTES - 1024) / BYTES, SUMS = TOKENS / 2;
    extern __shared__ char ring_of_the_launch[];
    // Swizzled boxes start at multiples of 1024.
    char* const ring = ring_of_the_launch + (1024 - shared_address(ring_of_the_launch) % 1024) % 1024;
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ bool is_last[2];
    const int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    const int steps = args.steps, tiles = (args.columns + LINES - 1) / LINES, parts = args.parts, part = blockIdx.x % parts;
    const int first_tile = blockIdx.x / parts * args.most, last_tile = min(first_tile + args.most, tiles) - 1;
    const int first_step = steps * part / parts, last_step = steps * (part + 1) / parts - 1;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 2 * GROUP / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    start_successors();
    if (group == 2) {
        if (thread != 0) return;
        const auto copy_a = [&](int s, int step) { copy_box(ring + s * BYTES + LINES * STEP, a, step * STEP, 0, full + s); };
        const auto copy_b = [&](int s, int tile, int step) {
            barrier_expect(full + s, BYTES);
            copy_once(ring + s * BYTES, b, step * STEP, tile * LINES, full + s);
        };
        // Weights do not depend on what runs before; the first ones are on their way when `a` is ready.
        int filled = 0;
#pragma unroll 1
        for (int tile = first_tile, step = first_step; filled < STAGES && tile <= last_tile; filled++) {
            copy_b(filled, tile, step);
            if (++step > last_step) step = first_step, tile++;
        }
        wait_for_predecessors();
        int s = 0;
        u32 turn = 0;
#pragma unroll 1
        for (int tile = first_tile; tile <= last_tile; tile++) {
#pragma unroll 1
            for (int step = first_step; step <= last_step; step++) {
                if (turn > 0) {
                    barrier_wait(empty + s, turn % 2 ^ 1);
                    copy_b(s, tile, step);
                }
                copy_a(s, step);
                if (++s == STAGES) s = 0, turn++;
            }
        }
        return;
    }
    // Values 4 j to 4 j + 3 of a thread are those of rows `row` + 8 j and the next one of `a`, and of lines `line` of the tile, twice, and `line` + 8.
    const int row = lane % 4 * 2, line = group * (LINES / 2) + thread / 32 * 16 + lane / 4;
    // Scales of `b` are constants, as `b` is.
    float b_scale[2];
    const auto read_b_scale = [&](int tile) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = tile * LINES + line + 8 * i;
            b_scale[i] = args.b_scale && column < args.columns ? args.b_scale[column * args.b_stride] : 1.0f;
        }
    };
    read_b_scale(first_tile);
    wait_for_predecessors();
    // All that is multiplied and added is read before anything is written, which might be the same memory.
    float a_scale[SUMS / 2];
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
        const int of_row = row + i / 2 * 8 + i % 2;
        a_scale[i] = args.a_scale && of_row < args.rows ? args.a_scale[of_row * args.a_stride] : 1.0f;
    }
    int s = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int tile = first_tile; tile <= last_tile; tile++) {
        if (tile > first_tile) read_b_scale(tile);
        float sums[SUMS] = {};
#pragma unroll 1
        for (int step = first_step; step <= last_step; step++) {
            const char* const slot = ring + s * BYTES;
            barrier_wait(full + s, parity);
            const u64 of_b = descriptor(slot + group * (LINES / 2) * STEP), of_a = descriptor(slot + LINES * STEP);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            // Tensor cores add FP8 products with about 14 bits, so the sums of a step join F32 registers.
            float of_step[SUMS] = {};
#pragma unroll
            for (int k = 0; k < STEP / 32; k++) Product<TOKENS>::add(of_step, of_b + 2 * k, of_a + 2 * k, k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane == 0) barrier_arrive(empty + s);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] += of_step[i];
            if (++s == STAGES) s = 0, parity ^= 1;
        }
        // Calls `work` with the number and the place of each value inside the matrix.
        const auto for_values = [&](auto work) {
            const int column = tile * LINES + line;
            u64 at = (u64)row * args.columns + column;
#pragma unroll
            for (int i = 0; i < SUMS; i += 4, at += 8 * (u64)args.columns) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const bool is_inside = row + 2 * i + k % 2 < args.rows && column + k / 2 * 8 < args.columns;
                    if (is_inside) work(i + k, at + k % 2 * args.columns + k / 2 * 8);
                }
            }
        };
        // Adding a negative zero changes no value.
        float added[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) added[i] = -0.0f;
        constexpr int OF_PART = 2 * (SUMS / 4) * GROUP;
        float4* const partial = (float4*)args.partial + (u64)tile * parts * OF_PART + group * (SUMS / 4) * GROUP + thread;
        if (parts > 1) {
            float4* const mine = partial + part * OF_PART;
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++)
                mine[i * GROUP] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
            group_barrier(group);
            if (thread == 0) {
                u32* const counter = arrived + 2 * tile + group;
                const bool last = count_arrival(counter) == parts - 1;
                if (last) *counter = 0;
                is_last[group] = last;
            }
            group_barrier(group);
            if (!is_last[group]) return;
        }
        if (args.addend) for_values([&](int i, u64 at) { added[i] = load(args.addend[at]); });
        if (parts > 1) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] = 0.0f;
            // Parts that are read at a time.
            constexpr int AHEAD = TOKENS < 16 ? 8 : 4;
#pragma unroll 1
            for (int p = 0; p < parts; p += AHEAD) {
                float4 read[AHEAD][SUMS / 4];
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) read[k][i] = p + k < parts ? __ldcg(partial + (p + k) * OF_PART + i * GROUP) : float4{};
                }
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
#pragma unroll
                    for (int i = 0; i < SUMS / 4; i++) {
                        sums[4 * i] += read[k][i].x;
                        sums[4 * i + 1] += read[k][i].y;
                        sums[4 * i + 2] += read[k][i].z;
                        sums[4 * i + 3] += read[k][i].w;
                    }
                }
            }
        }
        for_values([&](int i, u64 at) {
            store(args.out + at, sums[i] * (a_scale[i / 4 * 2 + i % 2] * b_scale[i / 2 % 2]) + added[i]);
        });
    }
}

// Grid of at most one block per multiprocessor, 288 threads, SHARED_BYTES bytes. `a` has boxes of TOKENS rows, `b` of LINES.
#define SKINNY(TOKENS)                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(2 * GROUP + 32, 1) skinny_##TOKENS(                                                        \
        const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, X* out, const X* addend, const float* a_scale,        \
        const float* b_scale, float* partial, int rows, int columns, int steps, int most, int parts, int a_stride, int b_stride) {          \
        skinny<TOKENS>(&a, &b, {out, addend, a_scale, b_scale, partial, rows, columns, steps, most, parts, a_stride, b_stride});            \
    }
SKINNY(8)
SKINNY(16)
SKINNY(32)
SKINNY(64)
