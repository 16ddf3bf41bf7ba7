// Causal attention of whole documents in the order of sums of attention_order.cuh, in BF16 for heads of a multiple of 16 channels up to DIM, on Hopper. A row
// has the bits that attention over a cache in BF16 gives its token.
//
// Rows are queries: up to ROWS queries of a block share a key head. Two warp groups compute 64 rows each, and a third copies keys and values. A step computes
// the scores S = Q·Kᵀ of the keys of one or two streams, the powers P of the scores, and the weighted values P·V. While a warp group computes powers, the
// tensor cores compute products of the other warp group. In comments, g = lane / 4 and t = lane % 4: a lane has the rows g and g + 8 of the 16 rows of its
// warp, and the columns 8 j + 2 t and 8 j + 2 t + 1, as in the PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16".

#define GROUP 128                                   // number of threads of a warp group
#define ROWS 128
#define ROW_BYTES 128                               // bytes of 64 channels: the width of a box
#define BOXES (DIM / 64)
// The numbers of tiles of 16 tokens in a unit, of tokens in a unit, of streams in a part, of units in a stream of a part, and of keys of a stream.
#define TILES (DIM <= 64 ? 2 : 1)
#define UNIT (16 * TILES)
#define STREAMS 4
#define UNITS 4
#define KEYS (UNIT * UNITS)
#define PART (KEYS * STREAMS)
// The numbers of streams and of keys in a step. A part has whole steps.
#define PER_STEP (DIM <= 64 ? 1 : 2)
#define STEP_KEYS (KEYS * PER_STEP)
#define STAGES (DIM <= 64 ? 4 : 2)
// Whether the two warp groups multiply in turn. With small heads, powers take more time than products.
#define TURNS (DIM > 64)
#define STAGE (STEP_KEYS * DIM * 2)                 // bytes of the keys, or of the values, of a step
#define SCORES (STEP_KEYS / 2)                      // scores of a lane
#define OWN (DIM / 2)                               // sums of a lane

// A document, and the queries of a tile of it.
struct Tile { int start, length, first; };

// Finds the tile of a block. Document d has the tiles from `at[d] / together + d` on, so that the document of a tile is found by its number.
__device__ __forceinline__ Tile find(const int* at, int documents, int seq_len, int together, int tile) {
    if (!at) {
        const int of_sequence = (seq_len + together - 1) / together;
        return {tile / of_sequence * seq_len, seq_len, tile % of_sequence * together};
    }
    int low = 0, high = documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (at[middle] / together + middle <= tile) low = middle;
        else high = middle;
    }
    return {at[low], at[low + 1] - at[low], (tile - at[low] / together - low) * together};
}

// Returns the distance of a key of a step from the first key of the step.
__device__ __forceinline__ int key_of(int row) { return row / KEYS * UNIT + row % KEYS / UNIT * (STREAMS * UNIT) + row % UNIT; }

// Copies 16 bytes to shared memory, or zeros if `is_read` is false.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool is_read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_read ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the last PENDING, and shows them to the tensor cores.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    show_copies_what_was_written();
}

// Returns the byte at which a piece of 16 bytes of a row stands in a matrix of `rows` rows.
__device__ __forceinline__ u32 place(int rows, int row, int piece) {
    return piece / 8 * rows * ROW_BYTES + row * ROW_BYTES + (piece % 8 ^ row % 8) * 16;
}

// Waits until all threads of the warp group that copies are here.
__device__ __forceinline__ void producers_meet() { asm volatile("bar.sync 3, 128;" ::: "memory"); }

// The number of rows that producers copy at a time.
#define APART (GROUP / (DIM / 8))
// Copies a piece of every row number APART of a step from `token` on, which may have rows after the last of `seen` tokens. They are copies of this
// token, so that their values are finite. `to` is the place of the first row.
__device__ __forceinline__ void copy_last(u32 to, const char* from, int stride, int token, int seen, bool is_read) {
#pragma unroll 1
    for (int i = 0; i < STEP_KEYS / APART; i++) {
        copy16(to + i * APART * ROW_BYTES, from + (u64)min(token + key_of(i * APART), seen - 1) * stride, is_read);
    }
    end_of_copies();
}
// Copies the keys or values of a step, for one head, by the copy engine: for each stream and 64 channels, UNITS units of UNIT rows.
__device__ __forceinline__ void copy_whole(u32 to, const TensorMap* from, int kv, int row, u64* barrier) {
    barrier_expect(barrier, STAGE);
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
        for (int n = 0; n < PER_STEP; n++)
            asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                             to + (box * STEP_KEYS + n * KEYS) * ROW_BYTES), "l"(from), "r"(box * ROW_BYTES), "r"(row + n * UNIT), "r"(0), "r"(kv), "r"(shared_address(barrier)) : "memory");
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define NAMES_32                                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "    \
    "%27, %28, %29, %30, %31"
#define NAMES_64                                                                                                                        \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "    \
             "%55, %56, %57, %58, %59, %60, %61, %62, %63"
// Computes d (+)= a · bᵀ for 64 rows, 16 channels, and the 128 keys of a step. `adds` is 0 for the first product of a sum.
__device__ __forceinline__ void multiply_keys(float (&d)[SCORES], u64 a, u64 b, int adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : D16(0), D16(16), D16(32), D16(48) : "l"(a), "l"(b), "r"(adds));
}
// Computes d (+)= p · v for 64 rows, 16 keys and 64 channels.
__device__ __forceinline__ void multiply_values(float (&d)[32], const u32* p, u64 v, int adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
                 : D16(0), D16(16) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v), "r"(adds));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Return the low words of descriptors of queries or keys, and of values [keys, channels], which have their next 64 channels in the next box. The shuffle tells
// the compiler that all threads of a warp have the same word.
__device__ __forceinline__ u32 low_of_keys(u32 address) { return __shfl_sync(FULL, address >> 4 | 1 << 16, 0); }
__device__ __forceinline__ u32 low_of_values(u32 address) { return __shfl_sync(FULL, address >> 4 | STEP_KEYS * ROW_BYTES >> 4 << 16, 0); }
// Returns the descriptor `bytes` bytes after the descriptor with the low word `low`.
__device__ __forceinline__ u64 descriptor_at(u32 low, int bytes) {
    u64 all;
    asm("mov.b64 %0, {%1, %2};" : "=l"(all) : "r"(low + (bytes >> 4)), "r"(0x40000040));
    return all;
}

// Grid (tiles · key heads), 384 threads. `heads` is the number of query heads. `group` query heads share a key head, and tiles have `together` tokens. `lse_length` is
// the length of `Lse`. `sinks` may be null. `scale` and `cap` contain log2(e). Shared memory has
// 1024 bytes to align the matrices, the queries, STAGES stages of keys and of values, and ROWS · DIM sums in F32.
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) ordered_attention(
    X* o, float* lse, const X* q, const X* k, const X* v, const __grid_constant__ TensorMap map_of_k, const __grid_constant__ TensorMap map_of_v, const X* sinks, int q_stride, int k_stride, int v_stride, int seq_len,
    const int* cu_seqlens, int documents, int heads, int group, int together, int dim, int lse_length, float scale, int window, float cap) {
    extern __shared__ char shared_of_the_launch[];
    // Swizzled boxes start at multiples of 1024 bytes.
    char* const memory = shared_of_the_launch + (1024 - shared_address(shared_of_the_launch) % 1024) % 1024;
    const u32 queries = shared_address(memory), keys = queries + ROWS * DIM * 2, values = keys + STAGES * STAGE;
    __shared__ u64 queries_full, keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
    const int lane = threadIdx.x % 32, role = __shfl_sync(FULL, threadIdx.x / GROUP, 0);
    const int kv_heads = heads / group, kv = blockIdx.x % kv_heads;
    // Tiles with many keys come first.
    const Tile tile = find(cu_seqlens, documents, seq_len, together, (gridDim.x - 1 - blockIdx.x) / kv_heads);
    const int count = min(together, tile.length - tile.first);
    if (count <= 0) return;
    // The block reads the keys from `base` to `seen`. Stream `s`, counted from the first token, has units in the part s / STREAMS.
    const int seen = tile.first + count, base = window ? max(0, tile.first + 1 - window) : 0;
    const int first_stream = base / PART * STREAMS;
    const auto first_key = [](int s) { return s / STREAMS * PART + s % STREAMS * UNIT; };
    // The last part may have keys in its first streams only.
    const int in_last = (seen - 1) % PART, streams = (seen - 1) / PART * STREAMS + min(STREAMS, in_last / UNIT + 1);
    if (threadIdx.x == 0) {
        barrier_init(&queries_full, GROUP);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(keys_full + s, 1), barrier_init(values_full + s, 1);
            barrier_init(keys_empty + s, 2 * GROUP / 32), barrier_init(values_empty + s, 2 * GROUP / 32);
        }
        barriers_are_initialized();
    }
    __syncthreads();

    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int thread = threadIdx.x % GROUP;
        // A thread copies the same piece of several rows.
        const int piece = thread % (DIM / 8), first_row = thread / (DIM / 8);
        const bool is_piece = piece * 8 < dim;
        for (int row = first_row; row < ROWS; row += APART) {
            const int token = row / group;
            const X* const from = q + (u64)(tile.start + tile.first + min(token, count - 1)) * q_stride + (kv * group + row % group) * dim + piece * 8;
            copy16(queries + place(ROWS, row, piece), from, is_piece && token < count);
        }
        end_of_copies();
        wait_for_copies<0>();
        barrier_arrive(&queries_full);
        const char* const own_k = (const char*)(k + (u64)tile.start * k_stride + kv * dim + piece * 8);
        const char* const own_v = (const char*)(v + (u64)tile.start * v_stride + kv * dim + piece * 8);
        const u32 own = place(STEP_KEYS, first_row, piece);
        // The steps before `last` have no rows after the last token.
        int last = max(first_stream, seen / PART * STREAMS);
        while (last < streams && first_key(last) + PART - (STREAMS - PER_STEP) * UNIT <= seen) last += PER_STEP;
        if (thread == 0) {
            int stage = 0, parity = 1;
            for (int s = first_stream; s < last; s += PER_STEP) {
                const int row = tile.start + first_key(s);
                barrier_wait(keys_empty + stage, parity);
                copy_whole(keys + stage * STAGE, &map_of_k, kv, row, keys_full + stage);
                barrier_wait(values_empty + stage, parity);
                copy_whole(values + stage * STAGE, &map_of_v, kv, row, values_full + stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        // A thread that waited apart from the others could miss a phase of a barrier.
        producers_meet();
        const int done = (last - first_stream) / PER_STEP;
        int stage = done % STAGES, parity = done / STAGES % 2 ^ 1;
        for (int s = last; s < streams; s += PER_STEP) {
            const int token = first_key(s) + first_row;
            barrier_wait(keys_empty + stage, parity);
            copy_last(keys + stage * STAGE + own, own_k, 2 * k_stride, token, seen, is_piece);
            barrier_wait(values_empty + stage, parity);
            copy_last(values + stage * STAGE + own, own_v, 2 * v_stride, token, seen, is_piece);
            wait_for_copies<1>();
            producers_meet();
            if (thread == 0) barrier_arrive(keys_full + stage);
            wait_for_copies<0>();
            producers_meet();
            if (thread == 0) barrier_arrive(values_full + stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int thread = threadIdx.x % GROUP, g = lane / 4, t = lane % 4, first_row = role * 64 + thread / 32 * 16 + g;
    float4* const total = (float4*)(memory + ROWS * DIM * 2 + 2 * STAGES * STAGE) + threadIdx.x;
    // The number of tokens that the two rows of this lane see, or 0 beyond the tile.
    int limits[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int token = (first_row + 8 * r) / group;
        limits[r] = token < count ? tile.first + token + 1 : 0;
    }
    // All rows see the keys from `from_all` to `least`.
    const int least = tile.first + 1, from_all = window ? max(0, seen - window) : 0;

    float of_part[OWN], weighted[BOXES][32], scores[SCORES];
    u32 p[SCORES / 2];
    // The base of all sums, except for the sums of all parts before, which have the base `total_base`.
    float bases[2] = {-INFINITY, -INFINITY}, part_sum[2] = {}, total_base[2] = {-INFINITY, -INFINITY}, total_sum[2] = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) of_part[i] = 0.0f;

    int stage = 0, parity = 0;
    const u32 own_queries = low_of_keys(queries + role * 64 * ROW_BYTES), all_keys = low_of_keys(keys), all_values = low_of_values(values);
    const auto enqueue_scores = [&] {
        barrier_wait(keys_full + stage, parity);
        const u32 of_stage = all_keys + stage * (STAGE >> 4);
        hold(scores);
        begin_products();
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            const int box = i / 4, byte = i % 4 * 32;
            multiply_keys(scores, descriptor_at(own_queries, box * ROWS * ROW_BYTES + byte), descriptor_at(of_stage, box * STEP_KEYS * ROW_BYTES + byte), i > 0);
        }
        end_products();
    };
    // Enqueues the weighted values of the keys of stream `n` of the step, for the channels of a box.
    const auto enqueue_values = [&](int n, int box) {
        const u32 of_stream = all_values + (stage * STAGE + box * (STEP_KEYS * ROW_BYTES) + n * KEYS * ROW_BYTES >> 4);
        hold(weighted[box]);
        begin_products();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) multiply_values(weighted[box], p + n * (KEYS / 4) + 4 * i, descriptor_at(of_stream, i * 16 * ROW_BYTES), i > 0);
        end_products();
    };
    const auto add_weighted = [&](int box) {
#pragma unroll
        for (int i = 0; i < 32; i++) of_part[box * 32 + i] += weighted[box][i];
    };
    const auto release = [&](u64* empty) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    };
    // Replaces scores by powers, and raises the base. Gets the factors of sums with the base before, and the sums of powers of each stream.
    float factors[2], sums[2][PER_STEP];
    const auto compute_powers = [&](int s) {
        if (cap > 0.0f) {
#pragma unroll
            for (int i = 0; i < SCORES; i++) scores[i] = score_of(scores[i], scale, cap);
        } else {
#pragma unroll
            for (int i = 0; i < SCORES; i++) scores[i] = score_of(scores[i], scale, 0.0f);
        }
        const int first = first_key(s);
        if (first + PART > least || first < from_all) {
#pragma unroll
            for (int i = 0; i < SCORES; i++) {
                const int position = first + key_of(i / 4 * 8 + i % 2) + 2 * t, limit = limits[i / 2 % 2];
                if (position >= limit || (window && position < limit - window)) scores[i] = -INFINITY;
            }
        }
        float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, subtracted[2];
#pragma unroll
        for (int i = 0; i < SCORES; i++) most[i / 2 % 2][i % 2] = fmaxf(most[i / 2 % 2][i % 2], scores[i]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = fmaxf(most[r][0], most[r][1]);
            for (int bits = 1; bits < 4; bits *= 2) all = fmaxf(all, __shfl_xor_sync(FULL, all, bits));
            const float raised = fmaxf(bases[r], integer_above(all));
            factors[r] = rise(bases[r], raised), subtracted[r] = subtrahend(raised);
            bases[r] = raised;
        }
#pragma unroll
        for (int n = 0; n < PER_STEP; n++) {
            float of_lane[2][2] = {};
#pragma unroll
            for (int i = n * (KEYS / 2); i < (n + 1) * (KEYS / 2); i++) {
                scores[i] = power(scores[i] - subtracted[i / 2 % 2]);
                of_lane[i / 2 % 2][i % 2] += scores[i];
            }
#pragma unroll
            for (int r = 0; r < 2; r++) sums[r][n] = of_lane[r][0] + of_lane[r][1];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int n = 0; n < PER_STEP; n++) {
                for (int bits = 1; bits < 4; bits *= 2) sums[r][n] += __shfl_xor_sync(FULL, sums[r][n], bits);
            }
        }
    };
    const auto round_powers = [&] {
#pragma unroll
        for (int i = 0; i < SCORES / 2; i++) p[i] = pair_of(X(), scores[2 * i], scores[2 * i + 1]);
    };
    // Joins the sums of a part and of all parts before.
    const auto end_part = [&](bool is_first, bool is_last) {
        const float kept[2] = {rise(total_base[0], bases[0]), rise(total_base[1], bases[1])};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            total_sum[r] = fmaf(total_sum[r], kept[r], part_sum[r]);
            total_base[r] = bases[r], part_sum[r] = 0.0f;
        }
#pragma unroll
        for (int c = 0; c < OWN / 4; c++) {
            float* const own = of_part + 4 * c;
            float4 all = make_float4(own[0], own[1], own[2], own[3]);
            if (!is_first) {
                const float4 before = total[c * 2 * GROUP];
                all = make_float4(fmaf(before.x, kept[0], all.x), fmaf(before.y, kept[0], all.y), fmaf(before.z, kept[1], all.z), fmaf(before.w, kept[1], all.w));
            }
            if (is_last) {
                own[0] = all.x, own[1] = all.y, own[2] = all.z, own[3] = all.w;
            } else {
                total[c * 2 * GROUP] = all;
                own[0] = own[1] = own[2] = own[3] = 0.0f;
            }
        }
    };
    const auto rescale = [&] {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            part_sum[r] *= factors[r];
#pragma unroll
            for (int n = 0; n < PER_STEP; n++) part_sum[r] += sums[r][n];
        }
        if (!__any_sync(FULL, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < OWN; i++) of_part[i] *= factors[i / 2 % 2];
    };

    barrier_wait(&queries_full, 0);
    // Two barriers make the two warp groups multiply in turn.
    if (TURNS && role == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#pragma unroll 1
    for (int s = first_stream; s < streams; s += PER_STEP) {
        if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + role) : "memory");
        enqueue_scores();
        if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(2 - role) : "memory");
        wait_for_products<0>(scores);
        release(keys_empty + stage);
        compute_powers(s);
        rescale();
        round_powers();
        barrier_wait(values_full + stage, parity);
        // While the weighted values of a box are added, the tensor cores compute the weighted values of the next box.
        enqueue_values(0, 0);
#pragma unroll
        for (int i = 1; i < PER_STEP * BOXES; i++) {
            enqueue_values(i / BOXES, i % BOXES);
            wait_for_products<1>(weighted[(i - 1) % BOXES]);
            add_weighted((i - 1) % BOXES);
        }
        wait_for_products<0>(weighted[BOXES - 1]);
        add_weighted(BOXES - 1);
        release(values_empty + stage);
        const bool is_last = s + PER_STEP >= streams;
        if ((s + PER_STEP) % STREAMS == 0 || is_last) end_part(s / STREAMS == first_stream / STREAMS, is_last);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (limits[r] == 0) continue;
        const int row = first_row + 8 * r, token = tile.start + tile.first + row / group, head = kv * group + row % group;
        if (sinks) total_sum[r] += sink_power(sinks[head], total_base[r]);
        const float inverse = 1.0f / total_sum[r];
        X* const out = o + ((u64)token * heads + head) * dim;
#pragma unroll
        for (int c = 0; c < DIM / 8; c++) {
            const int channel = c * 8 + 2 * t;
            if (channel < dim) *(u32*)(out + channel) = pair_of(X(), of_part[4 * c + 2 * r] * inverse, of_part[4 * c + 2 * r + 1] * inverse);
        }
        if (t == 0) Lse{lse, lse_length}.store(token, head, heads, total_base[r], total_sum[r]);
    }
}
