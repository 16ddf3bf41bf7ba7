// Computes `a · bᵀ` for few rows of `a`, as in decoding. It takes as long as reading `b`. Hopper's tensor cores compute the transpose, 64 rows of `b`
// (output columns) times up to TOKENS rows of `a`, so few rows of `a` waste nothing.
//
// A tile is LINES rows of `b`. A block computes a whole tile, or one part of the tile's steps along K (128 bytes per step). One thread copies, and
// each of two warp groups multiplies for half of the tile. Both operands pass through a ring of STAGES slots in shared memory. If two blocks share a
// multiprocessor, one block multiplies while the other adds. A block that is alone multiplies the next step while it adds, if it has enough
// registers. The parts of a tile form a cluster. Each block of the cluster adds all parts, in order, for its share of the rows.
//
// Loops over steps, rows and parts are not unrolled. They run only a few times, and instructions that run once take longer to fetch than to execute.

// Copies like `copy_box`, for data that is read once. It is evicted first, so that the cache keeps activations and the code of kernels.
__device__ __forceinline__ void copy_once(void* to, const TensorMap* from, int byte, int row, u64* barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     shared_address(to)), "l"(from), "r"(byte), "r"(row), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// Computes d (+)= a · b over 32 bytes of K. `adds` is 0 for the first product of a sum.
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
#define R64                                                                                                                                 \
    R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "   \
        "%57, %58, %59, %60, %61, %62, %63"
PRODUCT(8, "%0, %1, %2, %3", "%4", "%5", "%6", D4(0))
PRODUCT(16, R8, "%8", "%9", "%10", D4(0), D4(4))
PRODUCT(32, R16, "%16", "%17", "%18", D16(0))
PRODUCT(64, R32, "%32", "%33", "%34", D16(0), D16(16))
PRODUCT(128, R64, "%64", "%65", "%66", D16(0), D16(16), D16(32), D16(48))

// Four neighbouring elements.
struct alignas(4 * sizeof(X)) Four { X at[4]; };

struct Arguments {
    X* out;
    const X* addend;                  // [rows, columns], or null
    const float *a_scale, *b_scale;     // one scale, or one per row if the stride is 1; null for plain operands
    int rows, columns, steps, steps_of_part, rows_of_part, a_stride, b_stride;
};

// Read values at an address in the cluster's shared memory.
__device__ __forceinline__ float4 read_four(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float read_one(u32 address) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
// Synchronizes the threads that multiply.
__device__ __forceinline__ void groups_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(2 * GROUP) : "memory"); }

template <int TOKENS, int BLOCKS> __device__ __forceinline__ void skinny(const TensorMap* a, const TensorMap* b, const Arguments& args) {
    // At the end, the ring holds the sums, in rows of PITCH floats to reduce bank conflicts.
    constexpr int BYTES = (LINES + TOKENS) * STEP, STAGES = (SHARED_BYTES / BLOCKS - 1024) / BYTES, SUMS = TOKENS / 2, PITCH = LINES + 4;
    static_assert(TOKENS * PITCH * 4 <= STAGES * BYTES, "the ring has room for sums");
    extern __shared__ char ring_of_the_launch[];
    // Swizzled boxes start at multiples of 1024 bytes.
    char* const ring = ring_of_the_launch + (1024 - shared_address(ring_of_the_launch) % 1024) % 1024;
    float* const staged = (float*)ring;
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ alignas(16) float a_scales[TOKENS], b_scales[LINES];
    const int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    const int parts = blocks_of_cluster(), part = block_of_cluster(), first_line = blockIdx.x / parts * LINES;
    const int first_step = part * args.steps_of_part, steps = min(args.steps_of_part, args.steps - first_step);
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 2 * GROUP / 32);
        }
        barriers_are_initialized();
    }
    __syncthreads();
    start_successors();
    if (group == 2) {
        if (thread != 0) return;
        const auto copy_a = [&](int s, int step) { copy_box(ring + s * BYTES + LINES * STEP, a, (first_step + step) * STEP, 0, full + s); };
        const auto copy_b = [&](int s, int step) {
            barrier_expect(full + s, BYTES);
            copy_once(ring + s * BYTES, b, (first_step + step) * STEP, first_line, full + s);
        };
        // Weights do not depend on preceding kernels, so the first weights are copied before `a` is ready.
#pragma unroll 1
        for (int s = 0; s < min(STAGES, steps); s++) copy_b(s, s);
        wait_for_predecessors();
        int s = 0;
        u32 turn = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            if (turn > 0) {
                barrier_wait(empty + s, turn % 2 ^ 1);
                copy_b(s, step);
            }
            copy_a(s, step);
            if (++s == STAGES) s = 0, turn++;
        }
        return;
    }
    // Values 4 j to 4 j + 3 of a thread belong to the rows `row` + 8 j and `row` + 8 j + 1 of `a`: two values for `line` of the tile, and two for
    // `line` + 8.
    const int row = lane % 4 * 2, line = group * (LINES / 2) + thread / 32 * 16 + lane / 4;
    // The scales of `b` are constants, like `b`.
    if (threadIdx.x < LINES) {
        const int column = first_line + threadIdx.x;
        b_scales[threadIdx.x] = args.b_scale && column < args.columns ? args.b_scale[column * args.b_stride] : 1.0f;
    }
    wait_for_predecessors();
    if (threadIdx.x < TOKENS) a_scales[threadIdx.x] = args.a_scale && threadIdx.x < args.rows ? args.a_scale[threadIdx.x * args.a_stride] : 1.0f;
    // At the end, a warp processes ROWS rows of sums at a time, with four columns per thread. The addends of the first rows are read early.
    constexpr int ROWS = TOKENS < 32 ? TOKENS / 8 : 4, WARPS = 2 * GROUP / 32;
    const bool is_whole = args.columns % 4 == 0 && aligned(args.out, args.addend);
    const int columns = args.columns - first_line, first_row = part * args.rows_of_part + threadIdx.x / 32;
    const int end_row = min((part + 1) * args.rows_of_part, args.rows), end_whole = is_whole && 4 * lane < columns ? end_row : 0;
    const auto at = [&](int r, int column) { return (u64)r * args.columns + first_line + column; };
    Four addends[ROWS] = {};
    const auto read_addends = [&](int first) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int r = first + k * WARPS;
            if (args.addend && r < end_whole) addends[k] = *(const Four*)(args.addend + at(r, 4 * lane));
        }
    };
    read_addends(first_row);
    // The slot of the products that are enqueued next, and the slot of the products that are added next.
    int ahead = 0, s = 0;
    u32 parity = 0;
    const auto enqueue = [&](float (&d)[SUMS]) {
        const char* const slot = ring + ahead * BYTES;
        barrier_wait(full + ahead, parity);
        const u64 of_b = descriptor(slot + group * (LINES / 2) * STEP), of_a = descriptor(slot + LINES * STEP);
        hold(d);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEP / 32; k++) Product<TOKENS>::add(d, of_b + 2 * k, of_a + 2 * k, k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (++ahead == STAGES) ahead = 0, parity ^= 1;
    };
    // Tensor cores add FP8 products with about 14 bits, so the sums of each step are added to F32 registers.
    float sums[SUMS] = {};
    const auto add = [&](float (&d)[SUMS]) {
        if (lane == 0) barrier_arrive(empty + s);
        if (++s == STAGES) s = 0;
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] += d[i];
    };
    if constexpr (BLOCKS == 1 && TOKENS <= 64) {
        float even[SUMS], odd[SUMS];
        enqueue(even);
        int left = steps - 1;
#pragma unroll 1
        for (; left > 1; left -= 2) {
            enqueue(odd);
            wait_for_products<1>(even);
            add(even);
            enqueue(even);
            wait_for_products<1>(odd);
            add(odd);
        }
        if (left > 0) {
            enqueue(odd);
            wait_for_products<1>(even);
            add(even);
            wait_for_products<0>(odd);
            add(odd);
        } else {
            wait_for_products<0>(even);
            add(even);
        }
    } else {
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            float of_step[SUMS];
            enqueue(of_step);
            wait_for_products<0>(of_step);
            add(of_step);
        }
    }
    groups_barrier();
#pragma unroll
    for (int i = 0; i < SUMS; i++) staged[(row + i / 4 * 8 + i % 2) * PITCH + line + i % 4 / 2 * 8] = sums[i];
    if (parts > 1) cluster_sync();
    else groups_barrier();
    // Adding a negative zero does not change any value.
    const auto finish = [&](X* to, float sum, float b_scale, int r, X addend) {
        store(to, sum * (a_scales[r] * b_scale) + (args.addend ? load(addend) : -0.0f));
    };
#pragma unroll 1
    for (int first = first_row; first < end_whole; first += ROWS * WARPS) {
        float4 totals[ROWS] = {};
        // The number of parts that are read at a time.
        constexpr int AHEAD = 4 / ROWS;
#pragma unroll 1
        for (int p = 0; p < parts; p += AHEAD) {
            float4 read[ROWS][AHEAD] = {};
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const int r = first + k * WARPS;
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    if (r < end_whole && p + i < parts) read[k][i] = read_four(address_in(p + i, staged + r * PITCH + 4 * lane));
                }
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    totals[k].x += read[k][i].x;
                    totals[k].y += read[k][i].y;
                    totals[k].z += read[k][i].z;
                    totals[k].w += read[k][i].w;
                }
            }
        }
        const float4 scales = *(const float4*)(b_scales + 4 * lane);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int r = first + k * WARPS;
            if (r >= end_whole) break;
            Four out;
            finish(&out.at[0], totals[k].x, scales.x, r, addends[k].at[0]);
            finish(&out.at[1], totals[k].y, scales.y, r, addends[k].at[1]);
            finish(&out.at[2], totals[k].z, scales.z, r, addends[k].at[2]);
            finish(&out.at[3], totals[k].w, scales.w, r, addends[k].at[3]);
            *(Four*)(args.out + at(r, 4 * lane)) = out;
        }
        read_addends(first + ROWS * WARPS);
    }
    // Unaligned rows are processed one element at a time.
#pragma unroll 1
    for (int r = first_row; r < end_row && !is_whole; r += WARPS) {
#pragma unroll 1
        for (int c = lane; c < min(LINES, columns); c += 32) {
            float total = 0.0f;
#pragma unroll 1
            for (int p = 0; p < parts; p++) total += read_one(address_in(p, staged + r * PITCH + c));
            finish(args.out + at(r, c), total, b_scales[c], r, args.addend ? args.addend[at(r, c)] : X{});
        }
    }
    // Other blocks of the cluster may still read the sums of this block.
    __syncwarp();
    if (parts > 1) cluster_sync();
}

// A grid of clusters; a cluster has the parts of a tile. 288 threads, SHARED_BYTES / BLOCKS bytes. Boxes of `a` have TOKENS rows, boxes of `b` have
// LINES rows.
#define SKINNY(NAME, TOKENS, BLOCKS)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(2 * GROUP + 32, BLOCKS) NAME(                                                              \
        const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, X* out, const X* addend, const float* a_scale,            \
        const float* b_scale, int rows, int columns, int steps, int steps_of_part, int rows_of_part, int a_stride, int b_stride) {          \
        skinny<TOKENS, BLOCKS>(&a, &b,                                                                                                      \
            {out, addend, a_scale, b_scale, rows, columns, steps, steps_of_part, rows_of_part, a_stride, b_stride});                        \
    }
SKINNY(skinny_8, 8, 2)
SKINNY(skinny_16, 16, 2)
SKINNY(skinny_32, 32, 2)
SKINNY(skinny_64, 64, 2)
SKINNY(skinny_32_alone, 32, 1)
SKINNY(skinny_64_alone, 64, 1)
SKINNY(skinny_128_alone, 128, 1)
