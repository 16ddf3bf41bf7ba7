// Products on Hopper's tensor cores, with and without groups. A block computes tiles of SIDE x COLUMNS. The two blocks of a cluster compute neighbouring columns of
// the same rows, or neighbouring rows of the same columns if WGRAD. Each block copies half of the operand that both blocks read. One warp group
// copies. Two warp groups multiply, each for half of the rows of a tile.
//
// `A` and `B` are the types of the operands, `X` the type of the result. A_SCALES and B_SCALES are:
// - AT_END: no scales, or one scale per row or tensor
// - STRIPS: one scale for 128 neighbours along a row
// - SQUARES: one scale for a block of 128 x 128
//
// A_MN and B_MN are 1 if the operand is stored as [contracted, rows], which only 16-bit operands may be. WGRAD contracts the rows of groups. With
// PROMOTES, sums of FP8 products are added to F32 registers after each step; then registers suffice only for tiles of 128 or 192 columns.
//
// SINGLE computes a product without groups, with an addend.

#define AT_END 0
#define STRIPS 1
#define SQUARES 2
#define HALF (SIDE / 2)
#define GROUP 128                                   // number of threads
#define BOX (HALF * STEP)                           // bytes of half of an operand in a stage
#define STAGE ((SIDE + COLUMNS) * STEP)             // bytes of a stage: first a, then b
#define STAGED (OUT_BITS == 16 ? SIDE * COLUMNS * 2 : 0) // bytes that stage a result before it is written
#define SCALES (A_SCALES == STRIPS || B_SCALES == STRIPS ? 2 * SIDE * 4 : 0) // bytes of the scales of a stage
#define HAS_FACTORS (SCALED && A_SCALES == AT_END)  // whether scales (called factors) multiply complete sums
// Whether the next tile is located while the last WGMMAs of a tile run. This is slower with block scales.
#define FINDS_NEXT (!PROMOTES || HAS_FACTORS)
#define STAGES ((SHARED - STAGED) / (STAGE + SCALES))
#define TERMS (STEP / (int)sizeof(A))               // number of contracted elements of a stage
// Whether a second step of products is enqueued while products are added. If products are promoted, registers suffice only for 128 columns; with STRIPS,
// adding also reads the scales of the columns of `b`, and registers do not suffice.
#define LOOKS_AHEAD (PROMOTES ? B_SCALES != STRIPS && COLUMNS == 128 : SCALED || !WGRAD)

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64 D16(0), D16(16), D16(32), D16(48)
#define NAMES_64                                                                                                                                  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "  \
    "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
    "%58, %59, %60, %61, %62, %63"
#if COLUMNS == 128
#define SUMS D64
#define NAMES NAMES_64
#define OPERANDS "%64, %65"
#define ADDS "%66"
#elif COLUMNS == 192
#define SUMS D64, D16(64), D16(80)
#define NAMES                                                                                                                                     \
    NAMES_64                                                                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "          \
    "%90, %91, %92, %93, %94, %95"
#define OPERANDS "%96, %97"
#define ADDS "%98"
#else
#define SUMS D64, D16(64), D16(80), D16(96), D16(112)
#define NAMES                                                                                                                                     \
    NAMES_64                                                                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "          \
    "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "              \
    "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OPERANDS "%128, %129"
#define ADDS "%130"
#endif
#if SCALED
#define INSTRUCTION "m64n" TEXT(COLUMNS) "k32.f32." TEXT(A) "." TEXT(B)
#define MAJORS ", 1, 1;"
#else
#define INSTRUCTION "m64n" TEXT(COLUMNS) "k16.f32." TEXT(A) "." TEXT(B)
#define MAJORS ", 1, 1, " TEXT(A_MN) ", " TEXT(B_MN) ";"
#endif
// The number of sums per thread.
#define OWN (COLUMNS / 2)
// Computes d (+)= a · b for 64 rows, all columns and 32 bytes of terms. `adds` is 0 for the first product of a sum.
__device__ __forceinline__ void multiply(float (&d)[OWN], u64 a, u64 b, int adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\nwgmma.mma_async.sync.aligned." INSTRUCTION " {" NAMES "}, " OPERANDS ", p" MAJORS "\n}"
                 : SUMS : "l"(a), "l"(b), "r"(adds));
}
// Returns the descriptor of the half of an operand at `address`, advanced by `k` times 32 bytes of terms. If the operand is [contracted, rows], 32
// bytes of terms are 16 rows of 128 bytes, and the next 64 rows of the operand are in the next box.
template <int IS_MN> __device__ __forceinline__ u64 operand(u32 address, int k) {
    const u64 at = (address + k * (IS_MN ? 16 * STEP : 32)) >> 4 & 0x3FFF;
    return at | (u64)(BOX >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Inverse scales. STRIPS: [terms / 128, pitch]. SQUARES: [rows / 128, pitch]. Otherwise one scale (`by_row` is 0), or one for each of `pitch` rows.
struct Scales {
    const float* inverse;
    int pitch, by_row;
    __device__ __forceinline__ const float* strip(int row, int term) const { return inverse + (u64)(term / 128) * pitch + row; }
    __device__ __forceinline__ float square(int row, int term) const { return __ldg(inverse + (u64)(row / 128) * pitch + term / 128); }
    // Returns the bytes of the scales of up to `rows` rows from `row` on. Rows beyond the matrix are not counted.
    __device__ __forceinline__ int bytes(int row, int rows) const { return 4 * max(min(rows, pitch - row), 0); }
};

// The last argument, with the layout of wgmma.rs.
struct Arguments {
    Scales a, b;
    X* out;
    const int *offsets, *counts;
    int groups, rows, columns;      // rows of the result, or of each group if WGRAD
    int terms, b_rows, b_terms;     // unless WGRAD: `b` of group g begins at row g * b_rows and term g * b_terms
    const X* addend;                // has the shape of the result, and may be the result; null without an addend
};

// The positions at which the operands and the result of a tile begin, the number of steps, and the number of rows of the result.
struct Tile { int a_row, a_term, b_row, b_term, steps, rows, column; u64 out_row; };

// If SINGLE, the number of rows of tiles in a band. Tiles are ordered by bands, and in a band by columns, so that the tiles that are computed at the
// same time share rows of both operands in the L2 cache.
#define BAND 8

// Returns the number of rows that tiles divide. Unless SINGLE or WGRAD, tiles end at the last group. A predecessor wrote its end, so the read-only cache may
// not hold it.
__device__ __forceinline__ int rows_of_tiles(const Arguments& of) {
#if SINGLE || WGRAD
    return of.rows;
#else
    int end;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(end) : "l"(of.offsets + of.groups));
    return end;
#endif
}

// Locates the tiles of a cluster, in ascending order. If the tile of a block is beyond the result, the block multiplies the tile of the other block.
struct Walk {
    const Arguments& of;
    const int wide, high, tiles;
    int group;
    __device__ Walk(const Arguments& of)
        : of(of), wide((of.columns + COLUMNS * (2 - WGRAD) - 1) / (COLUMNS * (2 - WGRAD))),
          high((rows_of_tiles(of) + SIDE * (1 + WGRAD) - 1) / (SIDE * (1 + WGRAD))),
          tiles((WGRAD ? of.groups : 1) * high * wide), group(0) {}
    __device__ __forceinline__ Tile at(int index, int block) {
#if WGRAD
        const int column = index % wide * COLUMNS, first = index / wide % high * 2 * SIDE, row = first + block * SIDE, g = index / wide / high;
        const int from = __ldg(of.offsets + g), steps = (__ldg(of.counts + g) + TERMS - 1) / TERMS;
        return {row < of.rows ? row : first, from, column, from, steps, min(SIDE, of.rows - row), column, (u64)g * of.rows + row};
#elif SINGLE
        const int band = index / (BAND * wide), in_band = index % (BAND * wide), rows = min(BAND, high - band * BAND);
        const int first = in_band / rows * 2 * COLUMNS, column = first + block * COLUMNS, row = (band * BAND + in_band % rows) * SIDE;
        return {row, 0, column < of.columns ? column : first, 0, (of.terms + TERMS - 1) / TERMS, min(SIDE, of.rows - row), column, (u64)row};
#else
        const int first = index % wide * 2 * COLUMNS, column = first + block * COLUMNS, row = index / wide * SIDE;
        while (group < of.groups && __ldg(of.offsets + group + 1) <= row) group++;
        const int b_column = column < of.columns ? column : first;
        return {row, 0, group * of.b_rows + b_column, group * of.b_terms, (of.terms + TERMS - 1) / TERMS, SIDE, column, (u64)row};
#endif
    }
};

#if PROMOTES
// The factors of the sums of a step, for 2 rows and thirds of the columns of a tile of 192 columns: 64 columns have the same scale.
struct Factors { float of[COLUMNS == 192 ? 3 : 1][2]; };
// Adds the products of a step to the sums, times the factors and, with STRIPS, times the scales of 32 columns.
__device__ __forceinline__ void add_scaled(float (&total)[OWN], const float (&sums)[OWN], const Factors& rows, const float* columns) {
#pragma unroll
    for (int j = 0; j < OWN / 4; j++) {
        const float* const pair_of_rows = rows.of[COLUMNS == 192 ? j / 8 : 0];
#if B_SCALES == STRIPS
        const float2 pair = *(const float2*)(columns + 8 * j);
        const float factors[4] = {pair_of_rows[0] * pair.x, pair_of_rows[0] * pair.y, pair_of_rows[1] * pair.x, pair_of_rows[1] * pair.y};
#else
        const float factors[4] = {pair_of_rows[0], pair_of_rows[0], pair_of_rows[1], pair_of_rows[1]};
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) total[4 * j + i] = __fmaf_rn(factors[i], sums[4 * j + i], total[4 * j + i]);
    }
}
#endif

#if OUT_BITS == 16
__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 words;
    asm("cvt.rn." TEXT(X) "x2.f32 %0, %1, %2;" : "=r"(words) : "f"(high), "f"(low));
    return words;
}
#if SINGLE
// Copies the addends of a warp group to the boxes at `staged`, after the copies of the preceding tile have read them. Called by one thread.
__device__ __forceinline__ void copy_addends(const TensorMap* map, char* staged, int column, int row, u64* barrier) {
    wait_for_reads();
    barrier_expect(barrier, HALF * COLUMNS * 2);
    for (int box = 0; box < COLUMNS / HALF; box++) copy_box(staged + box * BOX, map, 2 * column + box * STEP, row, barrier);
}
// Adds the addends at `staged`.
__device__ __forceinline__ void add_addends(float (&sums)[OWN], const char* staged, int thread) {
    const int lane = thread % 32;
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) {
        const int piece = i / 2, line = thread / 32 * 16 + lane / 4 + i % 2 * 8;
        const X* const pair = (const X*)(staged + piece / 8 * BOX + line * STEP + (piece ^ line) % 8 * 16 + lane % 4 * 4);
        sums[2 * i] += load(pair[0]);
        sums[2 * i + 1] += load(pair[1]);
    }
}
#endif
// Writes the 64 rows of a warp group by the copy engine, in boxes at `staged`. The copy engine does not write columns or rows beyond the matrix.
// `barrier` belongs to this warp group.
__device__ __forceinline__ void write_staged(const TensorMap* map, char* staged, const float (&sums)[OWN], int thread, int column, int row, int barrier) {
    // Waits until the copies of the preceding tile have read `staged`.
    if (thread == 0) wait_for_reads();
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    const int line = thread / 32 * 16 + thread % 16, right = thread % 32 / 16;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
        const int piece = 2 * i + right;
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = rounded(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
        store_matrices(staged + piece / 8 * BOX + line * STEP + ((piece ^ line) % 8) * 16, words);
    }
    show_copies_what_was_written();
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    if (thread != 0) return;
    for (int box = 0; box < COLUMNS / HALF; box++) write_box(map, staged + box * BOX, 2 * column + box * STEP, row);
    end_of_writes();
}
#else
// Writes the columns of one row, which four neighbouring lanes hold. `sums[4 j]` and `sums[4 j + 1]` are the columns 8 j + 2 lane and 8 j + 2 lane +
// 1.
__device__ __forceinline__ void write_whole(X* to, const X* addend, const float* sums, int lane) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
        const float2 added = addend ? *(const float2*)(addend + 8 * j + 2 * lane) : float2{};
        const float2 sum = {sums[4 * j] + added.x, sums[4 * j + 1] + added.y};
        *(float2*)(to + 8 * j + 2 * lane) = addend ? sum : float2{sums[4 * j], sums[4 * j + 1]};
    }
}
#endif
__device__ __forceinline__ void write_some(X* to, const X* addend, const float* sums, int lane, int columns) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
        const int column = i / 2 * 8 + 2 * lane + i % 2;
        const float value = sums[i / 2 * 4 + i % 2];
        if (column < columns) store(to + column, addend ? value + load(addend[column]) : value);
    }
}

// The number of rows of an operand that a block copies.
#define A_ROWS (WGRAD ? SIDE : HALF)
#define B_ROWS (WGRAD ? COLUMNS / 2 : COLUMNS)
template <int IS_MN, int ROWS, int TO_BOTH> __device__ __forceinline__ void copy(char* to, const TensorMap* from, int row, int term, u64* barrier) {
    for (int i = 0; i < (IS_MN ? ROWS / HALF : 1); i++) {
        const int byte = (IS_MN ? row + i * HALF : term) * (int)sizeof(A), line = IS_MN ? term : row;
        if (TO_BOTH) copy_box_to_both(to + i * BOX, from, byte, line, barrier);
        else copy_box(to + i * BOX, from, byte, line, barrier);
    }
}

// A grid of pairs of blocks, at most one block per multiprocessor; 384 threads. Shared memory: 1024 bytes to align the stages, SHARED bytes, and the
// bytes of the factors. `map_a` has boxes of A_ROWS rows (HALF if A_MN), `map_b` of B_ROWS rows (HALF if B_MN), `map_addend` and `map_out` of HALF
// rows. `map_addend` and `map_out` are read only if OUT_BITS is 16 and rows are multiples of 16 bytes.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(3 * GROUP, 1)
    wgmma(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_addend,
          const __grid_constant__ TensorMap map_out, const __grid_constant__ Arguments of) {
    extern __shared__ char shared_of_the_launch[];
    // Swizzled boxes start at multiples of 1024 bytes.
    char* const ring = shared_of_the_launch + (1024 - shared_address(shared_of_the_launch) % 1024) % 1024;
    float* const scales = (float*)(ring + STAGES * STAGE + STAGED); // for each stage, SIDE scales of `a` and SIDE of `b`
    float* const factors = (float*)(ring + SHARED);                 // for a tile, SIDE factors of `a` and COLUMNS of `b`
    __shared__ u64 full[STAGES], empty[STAGES], read, addends[2];
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / GROUP, 0), block = block_of_cluster();
    if (threadIdx.x == 0) {
        barrier_init(&read, 2 * GROUP / 32);                    // arrivals: the warps that have read the factors
        for (int g = 0; g < 2; g++) barrier_init(addends + g, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 2 * 2 * GROUP / 32);        // arrivals: the warps of both blocks that multiply
        }
        barriers_are_initialized();
    }
    start_successors();
    wait_for_predecessors();
    cluster_sync();
    Walk walk(of);
    const int first = blockIdx.x / 2, every = gridDim.x / 2;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == 2 * GROUP) {
            int s = 0, parity = 1, tile_parity = 1;
            for (int index = first; index < walk.tiles; index += every) {
                const Tile tile = walk.at(index, block);
                for (int step = 0; step < tile.steps; step++) {
                    barrier_wait(empty + s, parity);
                    char* const to = ring + s * STAGE;
                    const int a_term = tile.a_term + step * TERMS, b_term = tile.b_term + step * TERMS;
                    int a_bytes = 0, b_bytes = 0;
                    float *a_scales = scales + s * 2 * SIDE, *b_scales = a_scales + SIDE;
                    if (A_SCALES == STRIPS) a_bytes = of.a.bytes(tile.a_row, SIDE);
                    if (B_SCALES == STRIPS) b_bytes = of.b.bytes(tile.b_row, SIDE);
                    // Factors are copied with the last step.
                    const bool ends = HAS_FACTORS && step + 1 == tile.steps;
                    if (ends) {
                        barrier_wait(&read, tile_parity);
                        tile_parity ^= 1;
                        a_scales = factors, b_scales = factors + SIDE;
                        if (of.a.by_row) a_bytes = of.a.bytes(tile.a_row, SIDE);
                        if (of.b.by_row) b_bytes = of.b.bytes(tile.b_row, COLUMNS);
                    }
                    barrier_expect(full + s, STAGE + a_bytes + b_bytes);
                    if (a_bytes) copy_bytes(a_scales, of.a.strip(tile.a_row, ends ? 0 : a_term), a_bytes, full + s);
                    if (b_bytes) copy_bytes(b_scales, of.b.strip(tile.b_row, ends ? 0 : b_term), b_bytes, full + s);
                    const int a_half = WGRAD ? 0 : block * HALF, b_half = WGRAD ? block * (COLUMNS / 2) : 0;
                    copy<A_MN, A_ROWS, !WGRAD>(to + a_half * STEP, &map_a, tile.a_row + a_half, a_term, full + s);
                    copy<B_MN, B_ROWS, WGRAD>(to + (SIDE + b_half) * STEP, &map_b, tile.b_row + b_half, b_term, full + s);
                    if (++s == STAGES) s = 0, parity ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const int thread = threadIdx.x % GROUP, lane = thread % 32, row = group * HALF + thread / 32 * 16 + lane / 4;
#if HAS_FACTORS
        // Per-tensor scales, which are used if `by_row` is 0.
        const float a_factor = of.a.by_row ? 0.0f : *of.a.inverse, b_factor = of.b.by_row ? 0.0f : *of.b.inverse;
#endif
        // The stage of the products that are enqueued next, and the stage of the products that are added next.
        int ahead = 0, parity = 0, s = 0, addends_parity = 0;
        const auto enqueue = [&](float (&sums)[OWN]) {
            barrier_wait(full + ahead, parity);
            // The shuffle tells the compiler that the address is the same in all threads of a warp, so that descriptors take few instructions.
            const u32 stage = __shfl_sync(0xFFFFFFFF, shared_address(ring + ahead * STAGE), 0), a = stage + group * BOX, b = stage + 2 * BOX;
            if (PROMOTES) hold(sums);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < STEP / 32; k++) multiply(sums, operand<A_MN>(a, k), operand<B_MN>(b, k), PROMOTES ? k > 0 : 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (++ahead == STAGES) ahead = 0, parity ^= 1;
        };
        const auto release = [&] {
            __syncwarp();
            if (lane < 2) barrier_arrive_at(empty + s, lane);
            if (++s == STAGES) s = 0;
        };
#if !PROMOTES
        // Two barriers make the two warp groups multiply in turn, so that one multiplies while the other writes.
        if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
        Tile next = {};
        if (FINDS_NEXT) next = walk.at(first, block);
        for (int index = first; index < walk.tiles; index += every) {
            const Tile tile = FINDS_NEXT ? next : walk.at(index, block);
            const int steps = __shfl_sync(0xFFFFFFFF, tile.steps, 0);
            float total[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) total[i] = 0.0f;
            const bool is_whole = (tile.rows == SIDE || SINGLE && OUT_BITS == 16) && of.columns % 8 == 0 &&
                                  (OUT_BITS == 16 ? SINGLE || !of.addend : tile.column + COLUMNS <= of.columns);
#if SINGLE && OUT_BITS == 16
            char* const staged = ring + STAGES * STAGE + group * (STAGED / 2);
            // Products are enqueued already, so they run while this waits.
            const auto begin_addends = [&](int step) {
                if (thread == 0 && step == 0 && is_whole && tile.column < of.columns && of.addend) {
                    copy_addends(&map_addend, staged, tile.column, (int)tile.out_row + group * HALF, addends + group);
                }
            };
#else
            const auto begin_addends = [](int) {};
#endif
#if PROMOTES
            // Tensor cores add FP8 products with about 14 bits, so the sums of each step are added to F32 registers.
            const auto add = [&](float (&sums)[OWN], int step, auto wait) {
                Factors rows;
                float of_rows[2] = {1.0f, 1.0f};
                if (A_SCALES == SQUARES) of_rows[0] = of_rows[1] = of.a.square(tile.a_row, tile.a_term + step * TERMS);
                if (A_SCALES == STRIPS) of_rows[0] = scales[s * 2 * SIDE + row], of_rows[1] = scales[s * 2 * SIDE + row + 8];
                // A tile of 192 columns begins at a multiple of 64, so it has the scales of two squares, and the second third of its columns has either.
                const int second = SIDE - tile.b_row % SIDE;
                float squares[2] = {1.0f, 1.0f};
                if (B_SCALES == SQUARES) squares[0] = squares[1] = of.b.square(tile.b_row, tile.b_term + step * TERMS);
                if (B_SCALES == SQUARES && COLUMNS == 192 && tile.column + second < of.columns) {
                    squares[1] = of.b.square(tile.b_row + second, tile.b_term + step * TERMS);
                }
#pragma unroll
                for (int third = 0; third < (COLUMNS == 192 ? 3 : 1); third++) {
                    const float square = third * 64 >= second ? squares[1] : squares[0];
                    for (int i = 0; i < 2; i++) rows.of[third][i] = of_rows[i] * square;
                }
                wait(sums);
                if (B_SCALES != STRIPS) release();
                add_scaled(total, sums, rows, scales + s * 2 * SIDE + SIDE + 2 * (lane % 4));
                if (B_SCALES == STRIPS) release();
            };
            const auto all = [](float (&sums)[OWN]) { wait_for_products<0>(sums); };
#if LOOKS_AHEAD
            const auto all_but_last = [](float (&sums)[OWN]) { wait_for_products<1>(sums); };
            float even[OWN], odd[OWN];
            if (steps > 0) {
                enqueue(even);
                begin_addends(0);
                int step = 0;
                for (; step + 2 < steps; step += 2) {
                    enqueue(odd);
                    add(even, step, all_but_last);
                    enqueue(even);
                    add(odd, step + 1, all_but_last);
                }
                if (step + 1 < steps) {
                    enqueue(odd);
                    add(even, step, all_but_last);
                    add(odd, step + 1, all);
                } else {
                    add(even, step, all);
                }
            }
#else
            float sums[OWN];
            for (int step = 0; step < steps; step++) {
                enqueue(sums);
                begin_addends(step);
                add(sums, step, all);
            }
#endif
#else
            hold(total);
            for (int step = 0; step < steps; step++) {
                asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
                enqueue(total);
                asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
                begin_addends(step);
                asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LOOKS_AHEAD) : "memory");
                if (step >= LOOKS_AHEAD) release();
            }
#endif
            // Unless products are promoted, the last WGMMAs are still running. Meanwhile, locate the next tile and multiply half of the scales;
            // registers do not suffice for all scales.
            if (FINDS_NEXT && index + every < walk.tiles) next = walk.at(index + every, block);
#if HAS_FACTORS
            const bool a_own = of.a.by_row && steps > 0, b_own = of.b.by_row && steps > 0;
            const float of_rows[2] = {a_own ? factors[row] : a_factor, a_own ? factors[row + 8] : a_factor};
            // The factors of sums 4 j to 4 j + 3.
            const auto factors_of = [&](int j, float* four) {
                const float2 pair = b_own ? *(const float2*)(factors + SIDE + 8 * j + 2 * (lane % 4)) : float2{b_factor, b_factor};
#pragma unroll
                for (int i = 0; i < 4; i++) four[i] = of_rows[i / 2] * (i % 2 ? pair.y : pair.x);
            };
            float early[OWN / 2];
#pragma unroll
            for (int j = 0; j < OWN / 8; j++) factors_of(j, early + 4 * j);
            hold(early);
#endif
#if !PROMOTES
            wait_for_products<0>(total);
            if (LOOKS_AHEAD && steps > 0) release();
#endif
#if HAS_FACTORS
#pragma unroll
            for (int i = 0; i < OWN / 2; i++) total[i] *= early[i];
#pragma unroll
            for (int j = OWN / 8; j < OWN / 4; j++) {
                float four[4];
                factors_of(j, four);
#pragma unroll
                for (int i = 0; i < 4; i++) total[4 * j + i] *= four[i];
            }
            __syncwarp();
            if (lane == 0 && steps > 0) barrier_arrive(&read);
#endif
            if (tile.rows <= 0 || tile.column >= of.columns || (of.addend && steps == 0)) continue;
#if OUT_BITS == 16
            if (is_whole) {
#if SINGLE
                if (of.addend) {
                    barrier_wait(addends + group, addends_parity);
                    addends_parity ^= 1;
                    add_addends(total, staged, thread);
                }
#else
                char* const staged = ring + STAGES * STAGE + group * (STAGED / 2);
#endif
                write_staged(&map_out, staged, total, thread, tile.column, (int)tile.out_row + group * HALF, 3 + group);
                continue;
            }
#endif
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u64 at = (tile.out_row + row + 8 * half) * of.columns + tile.column;
                const X* const addend = of.addend ? of.addend + at : nullptr;
#if OUT_BITS == 32
                if (is_whole) {
                    write_whole(of.out + at, addend, total + 2 * half, lane % 4);
                    continue;
                }
#endif
                if (row + 8 * half < tile.rows) write_some(of.out + at, addend, total + 2 * half, lane % 4, of.columns - tile.column);
            }
        }
        if (thread == 0) wait_for_writes();
    }
    // A block must not end while the other block may write to its shared memory or arrive at its barriers.
    cluster_sync();
}
