// Computes `a · bᵀ` for few rows of `a`, as in decoding. It takes as long as reading `b`.
//
// A block computes COLUMNS columns of the result, and reads their rows of `b` from the first to the last term, so sums have the order that gemm/mod.rs
// states. `a` is the first operand of wgmma, which has 64 rows; rows beyond the result are computed too, and are not written. Both
// operands pass through a ring of slots in shared memory; a slot has SPAN steps of 128 bytes along K. One warp copies `b`, one warp copies `a`, and
// GROUPS warp groups multiply. Two groups divide the columns, or the rows if TOKENS is 128. One group is faster for few columns, because each group
// reads all rows of `a`. The products of a slot are separate sums, which are added while the products of the next slot run.
//
// If STRIPS is 1, each step has a scale for each row of `a` (strips of 128) and a scale for the columns (squares of 128 x 128).

// Copies like `copy_box`, for data that is read once. It is evicted first, so that the cache keeps activations and the code of kernels.
__device__ __forceinline__ void copy_once(void* to, const TensorMap* from, int byte, int row, u64* barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     shared_address(to)), "l"(from), "r"(byte), "r"(row), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// Whether tensor cores add the products of a whole sum. They add FP8 products with about 14 bits, so each step of these is a separate sum.
#define CHAINS (IN_BITS == 16)

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
PRODUCT(16, R8, "%8", "%9", "%10", D4(0), D4(4))
PRODUCT(32, R16, "%16", "%17", "%18", D16(0))
PRODUCT(64, R32, "%32", "%33", "%34", D16(0), D16(16))
PRODUCT(128, R64, "%64", "%65", "%66", D16(0), D16(16), D16(32), D16(48))

// Two neighbouring elements.
struct alignas(2 * sizeof(X)) Pair { X at[2]; };

// The number of slots whose products may still run.
template <int N> struct Pending { static constexpr int VALUE = N; };

struct Arguments {
    X* out;
    const X* addend;                    // [rows, columns], or null
    const float *a_scale, *b_scale;     // one scale, or one per row if the stride is 1; null for plain operands
    int rows, columns, steps, slots;
    int a_stride, b_stride;             // with STRIPS, the pitches of strips [steps, a_stride] and of squares [columns / 128, b_stride]
};

template <int TOKENS, int COLUMNS, int GROUPS, int SPAN, int BLOCKS>
__device__ __forceinline__ void skinny(const TensorMap* a, const TensorMap* b, const Arguments& of) {
    constexpr int BYTES = (TOKENS + COLUMNS) * STEP;
    constexpr bool HALVES_ROWS = TOKENS == 128;
    // The columns and the sums of a warp group and of a thread.
    constexpr int WIDTH = HALVES_ROWS ? COLUMNS : COLUMNS / GROUPS, SUMS = WIDTH / 2;
    // Whether registers suffice for the products of two slots, and for addends that are read early.
    constexpr bool LOOKS_AHEAD = SUMS * SPAN <= 16 || BLOCKS == 1 && (SUMS * SPAN < 64 || GROUPS == 1 && SUMS * SPAN == 64), ADDS_EARLY = SUMS <= 16;
    extern __shared__ char ring_of_the_launch[];
    // Swizzled boxes start at multiples of 1024 bytes.
    char* const ring = ring_of_the_launch + (1024 - shared_address(ring_of_the_launch) % 1024) % 1024;
    __shared__ u64 full[MOST_SLOTS], empty[MOST_SLOTS];
    __shared__ alignas(16) float b_scales[COLUMNS];
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / GROUP, 0), thread = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    const int first_column = blockIdx.x * COLUMNS, steps = of.steps, slots = of.slots;
    // The scales of rows follow the ring, and room that wgmma reads as rows beyond TOKENS.
    float* const strips = (float*)(ring + slots * SPAN * BYTES + (TOKENS < 64 ? (64 - TOKENS) * STEP : 0));
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int s = 0; s < slots; s++) {
            barrier_init(full + s, 2);                     // arrivals: the warps that copy
            barrier_init(empty + s, GROUPS * GROUP / 32);  // arrivals: the warps that multiply
        }
        barriers_are_initialized();
    }
    // The scales of `b` are constants, like `b`.
    if (threadIdx.x < COLUMNS) {
        const int c = first_column + threadIdx.x;
        b_scales[threadIdx.x] = !STRIPS && of.b_scale && c < of.columns ? of.b_scale[c * of.b_stride] : 1.0f;
    }
    __syncthreads();
    start_successors();
    if (group == GROUPS) {
        const bool copies_a = thread >= 32;
        // Weights do not depend on preceding kernels, so the first weights are copied before `a` is ready.
        if (copies_a) wait_for_predecessors();
        // Rows beyond the strips are rows beyond the result.
        const int strip_bytes = STRIPS ? 4 * min(TOKENS, of.a_stride) : 0;
        int s = 0, turn = 0;
#pragma unroll 1
        for (int first = 0; lane == 0 && first < steps; first += SPAN) {
            if (turn > 0) barrier_wait(empty + s, turn % 2 ^ 1);
            const int with_scales = min(SPAN, steps - first);
            barrier_expect(full + s, copies_a ? SPAN * TOKENS * STEP + with_scales * strip_bytes : SPAN * COLUMNS * STEP);
#pragma unroll
            for (int i = 0; i < SPAN; i++) {
                // Steps beyond the last step are zeros.
                char* const to = ring + (s * SPAN + i) * BYTES;
                const int byte = (first + i) * STEP;
                if (!copies_a) copy_once(to + TOKENS * STEP, b, byte, first_column, full + s);
                else copy_box(to, a, byte, 0, full + s);
                if (STRIPS && copies_a && i < with_scales) {
                    copy_bytes(strips + (s * SPAN + i) * TOKENS, of.a_scale + (u64)(first + i) * of.a_stride, strip_bytes, full + s);
                }
            }
            if (++s == slots) s = 0, turn++;
        }
        return;
    }
    // Sums 4 j to 4 j + 3 of a thread belong to the columns `column` + 8 j and `column` + 8 j + 1: two sums of `row`, and two of `row` + 8.
    const int row = (HALVES_ROWS ? group * 64 : 0) + thread / 32 * 16 + lane / 4;
    const int left = HALVES_ROWS ? 0 : group * WIDTH, column = first_column + left + 2 * (lane % 4);
    const float* const squares = of.b_scale + (u64)(first_column / 128) * of.b_stride;
    wait_for_predecessors();
    float a_scales[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        a_scales[i] = !STRIPS && of.a_scale && row + 8 * i < of.rows ? of.a_scale[(row + 8 * i) * of.a_stride] : 1.0f;
    }
    const bool is_whole = of.columns % 2 == 0 && aligned(of.out, of.addend);
    const auto at = [&](int i, int j) { return (u64)(row + 8 * i) * of.columns + column + 8 * j; };
    const auto has = [&](int i, int j) { return row + 8 * i < of.rows && column + 8 * j < of.columns; };
    const auto addend_of = [&](int i, int j) {
        Pair pair = {};
        if (!of.addend || !has(i, j)) return pair;
        if (is_whole) return *(const Pair*)(of.addend + at(i, j));
        pair.at[0] = of.addend[at(i, j)];
        if (column + 8 * j + 1 < of.columns) pair.at[1] = of.addend[at(i, j) + 1];
        return pair;
    };
    Pair addends[ADDS_EARLY ? WIDTH / 4 : 1];
    if constexpr (ADDS_EARLY) {
#pragma unroll
        for (int j = 0; j < WIDTH / 4; j++) addends[j] = addend_of(j % 2, j / 2);
    }
    // The slot of the products that are enqueued next. The slot and the first step of the products that are added next.
    int ahead = 0, slot = 0, added = 0;
    u32 parity = 0;
    // Waits for the next slot. Returns the low word of the descriptor of its first byte. The shuffle tells the compiler that the word is the same in
    // all threads of a warp; without it, computing descriptors takes longer than the products.
    const auto begin = [&] {
        barrier_wait(full + ahead, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u32 from = __shfl_sync(0xFFFFFFFF, (u32)descriptor(ring + ahead * SPAN * BYTES), 0);
        if (++ahead == slots) ahead = 0, parity ^= 1;
        return from;
    };
    // Multiplies a step, whose descriptor has the low word `from`.
    const u64 high = descriptor(ring) >> 32 << 32;
    const auto multiply = [&](float (&d)[SUMS], u32 from, bool continues) {
        const u32 of_a = from + ((HALVES_ROWS ? group * 64 * STEP : 0) >> 4), of_b = from + ((TOKENS + left) * STEP >> 4);
#pragma unroll
        for (int k = 0; k < STEP / 32; k++) Product<WIDTH>::add(d, high | of_a + 2 * k, high | of_b + 2 * k, k > 0 || continues);
    };
    const auto release = [&] {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + slot);
        if (++slot == slots) slot = 0;
    };
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0.0f;
#if CHAINS
    hold(sums);
#pragma unroll 1
    for (int first = 0; first < steps; first += SPAN) {
        const u32 from = begin();
#pragma unroll
        for (int i = 0; i < SPAN; i++) multiply(sums, from + i * (BYTES >> 4), i > 0 || first > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (first > 0) release();
    }
    wait_for_products<0>(sums);
#else
    // Tensor cores add FP8 products with about 14 bits, so the sums of each step are added to F32 registers.
    const auto enqueue = [&](float (&d)[SPAN][SUMS]) {
#pragma unroll
        for (int i = 0; i < SPAN; i++) hold(d[i]);
        const u32 from = begin();
#pragma unroll
        for (int i = 0; i < SPAN; i++) multiply(d[i], from + i * (BYTES >> 4), false);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };
    // Adds the products of a slot, when only the products of PENDING slots may still run.
    const auto add = [&](float (&d)[SPAN][SUMS], auto pending) {
#if STRIPS
        float factors[SPAN][2];
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            const float of_columns = added + i < steps ? squares[added + i] : 0.0f;
            const float* const of_rows = strips + (slot * SPAN + i) * TOKENS + row;
            // Rows beyond TOKENS have no scales.
            for (int j = 0; j < 2; j++) factors[i][j] = row + 8 * j < TOKENS ? of_rows[8 * j] * of_columns : 0.0f;
        }
#endif
#pragma unroll
        for (int i = 0; i < SPAN; i++) wait_for_products<decltype(pending)::VALUE>(d[i]);
        release();
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            if (added + i >= steps) break;
#pragma unroll
            for (int j = 0; j < SUMS; j++) {
#if STRIPS
                sums[j] = __fmaf_rn(factors[i][j / 2 % 2], d[i][j], sums[j]);
#else
                sums[j] += d[i][j];
#endif
            }
        }
        added += SPAN;
    };
    if constexpr (LOOKS_AHEAD) {
        float even[SPAN][SUMS], odd[SPAN][SUMS];
        enqueue(even);
        int rest = (steps + SPAN - 1) / SPAN - 1;
#pragma unroll 1
        for (; rest > 1; rest -= 2) {
            enqueue(odd);
            add(even, Pending<1>());
            enqueue(even);
            add(odd, Pending<1>());
        }
        if (rest > 0) {
            enqueue(odd);
            add(even, Pending<1>());
            add(odd, Pending<0>());
        } else {
            add(even, Pending<0>());
        }
    } else {
#pragma unroll 1
        for (int step = 0; step < steps; step += SPAN) {
            float of_slot[SPAN][SUMS];
            enqueue(of_slot);
            add(of_slot, Pending<0>());
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            if (!has(i, j)) continue;
            const Pair addend = ADDS_EARLY ? addends[ADDS_EARLY ? 2 * j + i : 0] : addend_of(i, j);
            const float2 scales = *(const float2*)(b_scales + left + 2 * (lane % 4) + 8 * j);
            Pair pair;
            // Adding a negative zero does not change any value.
            store(&pair.at[0], sums[4 * j + 2 * i] * (a_scales[i] * scales.x) + (of.addend ? load(addend.at[0]) : -0.0f));
            store(&pair.at[1], sums[4 * j + 2 * i + 1] * (a_scales[i] * scales.y) + (of.addend ? load(addend.at[1]) : -0.0f));
            if (is_whole) {
                *(Pair*)(of.out + at(i, j)) = pair;
            } else {
                of.out[at(i, j)] = pair.at[0];
                if (column + 8 * j + 1 < of.columns) of.out[at(i, j) + 1] = pair.at[1];
            }
        }
    }
}

// A grid of blocks, each with COLUMNS columns; GROUPS * GROUP + 64 threads. Boxes of `a` have TOKENS rows, boxes of `b` have COLUMNS rows. Shared memory: 1024 bytes to align the ring, the ring, and what follows it.
#define SKINNY(NAME, TOKENS, COLUMNS, GROUPS, SPAN, BLOCKS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(GROUPS * GROUP + 64, BLOCKS) NAME(                                                         \
        const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, X* out, const X* addend, const float* a_scale,            \
        const float* b_scale, int rows, int columns, int steps, int slots, int a_stride, int b_stride) {                                    \
        skinny<TOKENS, COLUMNS, GROUPS, SPAN, BLOCKS>(                                                                                      \
            &a, &b, {out, addend, a_scale, b_scale, rows, columns, steps, slots, a_stride, b_stride});                                      \
    }
SKINNY(skinny_16_32, 16, 32, 1, 4, 1)
SKINNY(skinny_16_64, 16, 64, 2, 4, 1)
SKINNY(skinny_16_64_shared, 16, 64, 2, 2, 2)
SKINNY(skinny_16_128_shared, 16, 128, 2, 1, 2)
SKINNY(skinny_64_32, 64, 32, 1, 4, 1)
SKINNY(skinny_64_64, 64, 64, 2, 2, 1)
SKINNY(skinny_64_64_shared, 64, 64, 2, 1, 2)
SKINNY(skinny_64_128, 64, 128, 2, 1, 1)
SKINNY(skinny_128_32, 128, 32, 2, 2, 1)
SKINNY(skinny_128_64, 128, 64, 2, 1, 1)
SKINNY(skinny_128_128, 128, 128, 2, 1, 1)
