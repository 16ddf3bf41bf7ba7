// The keys and values of a split of a context, in tiles of 16 tokens. A warp processes TILES tiles at a time, in registers (`LoadedTiles`) or in
// shared memory (`CopiedTiles`).

// 16 bytes of a row. EACH is the number of elements in a piece. In a cache of 16-bit values, a piece of K is two runs of 8 bytes, 32 bytes apart, so that the
// runs of the four lanes of a row are 16 neighbouring channels.
struct Piece { u32 words[4]; };
#define EACH (16 / (int)sizeof(KV))
#define TILES (DIM * (int)sizeof(KV) <= 128 ? 2 : 1)
// The number of pieces per lane. Four lanes share a row of K, and eight lanes share a row of V.
#define K_PIECES ((DIM / EACH + 3) / 4)
#define V_PIECES ((DIM / EACH + 7) / 8)
// The number of tokens that a block reads at a time.
#define STRIDE (16 * TILES * WARPS)

// A warp's tiles among tokens `begin` to `end` of a sequence, for one key head. Tiles beyond the last tile give the last tile, and tiles before the token
// `first`, a multiple of 16, give its tile: their blocks may belong to other sequences by now.
struct Walk {
    const int* blocks;                 // blocks of the sequence
    int log2_block, begin, end, first, last, kv, kv_heads, warp, lane;

    __device__ __forceinline__ Walk(const Batch& batch, int sequence, int kv, int kv_heads, int begin, int end, int first, int warp, int lane)
        : blocks(batch.block_tables + (u64)sequence * batch.max_blocks), log2_block(__ffs(batch.block_size) - 1), begin(begin), end(end),
          first(first), last((end - 1) / 16 * 16), kv(kv), kv_heads(kv_heads), warp(warp), lane(lane) {}
    // Returns the first token of a tile.
    __device__ __forceinline__ int tile(int number) const { return begin + ((number / TILES * WARPS + warp) * TILES + number % TILES) * 16; }
    // Returns the row of the first key of tile `number` + lane. So the lanes of a warp have the rows of 32 tiles.
    __device__ __forceinline__ u32 row_from(int number) const {
        const int position = max(min(tile(number + lane), last), first), block = blocks[position >> log2_block];
        return (((u32)block * 2 * kv_heads + kv) << log2_block) + (position & ((1 << log2_block) - 1));
    }
    // Returns the number of rows from a key to its value.
    __device__ __forceinline__ int to_values() const { return kv_heads << log2_block; }
};

#ifndef COPIED
__device__ __forceinline__ Piece fetch(const void* from) {
    Piece p;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3]) : "l"(from));
    return p;
}

__device__ __forceinline__ void fetch_run(const void* from, u32* words) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
}

// Loads tiles into registers. When a warp has multiplied with the current keys, it starts to load the next keys; values are loaded likewise. This has
// the least latency.
struct LoadedTiles {
    // Whether several tiles can be processed after each other.
    static constexpr bool HAS_PARTS = true;
    struct Cache {
        const KV* data;
        const float* scale_inv;
        int dim;
    };
    Walk walk;
    Cache cache;
    int tile, number, pieces, g, t;
    u32 row;
    Piece keys[TILES][2][K_PIECES], values[TILES][4][V_PIECES];
    float key_scales[TILES][2], value_scales[TILES][2];

    __device__ __forceinline__ LoadedTiles(const Walk& walk, const Cache& cache) : walk(walk), cache(cache), keys{}, values{} {
        tile = walk.tile(0), number = 0, pieces = cache.dim / EACH, g = walk.lane / 4, t = walk.lane % 4;
        row = walk.row_from(0);
    }
    // Starts to read the first keys and values.
    __device__ __forceinline__ void start() { load_keys(tile), load_values(tile); }
    // Start to read the next keys or values, after the keys or values of the current tiles were read.
    __device__ __forceinline__ void start_next_keys() {
        number += TILES;
        if (number % 32 == 0) row = walk.row_from(number);
        if (tile + STRIDE < walk.end) load_keys(tile + STRIDE);
    }
    __device__ __forceinline__ void start_next_values() {
        if (tile + STRIDE < walk.end) load_values(tile + STRIDE);
    }
    __device__ __forceinline__ void wait_for_keys() {}
    __device__ __forceinline__ void wait_for_values() {}
    __device__ __forceinline__ void next() { tile += STRIDE; }
    // Return piece `j` of this lane in tile `u`: of the key of token g + 8 i, or of the value of token 2 t + i % 2 + i / 2 · 8.
    __device__ __forceinline__ Piece key(int u, int i, int j) const { return keys[u][i][j]; }
    __device__ __forceinline__ Piece value(int u, int i, int j) const { return values[u][i][j]; }
    // Return the inverse scales of token g + 8 i.
    __device__ __forceinline__ float key_scale(int u, int i) const { return key_scales[u][i]; }
    __device__ __forceinline__ float value_scale(int u, int i) const { return value_scales[u][i]; }
    // Returns shared memory for a block's `T`, which is used after the last tile.
    template <class T> __device__ __forceinline__ T& room_for() {
        __shared__ T room;
        return room;
    }

  private:
    // Returns the row of a token of tile `u`, counted from `tile`. Tokens beyond the split give its last token.
    __device__ __forceinline__ u32 row_of(int tile, int u, int token) const {
        return __shfl_sync(FULL, row, (number + u) % 32) + min(token, walk.end - 1 - min(tile + 16 * u, walk.last));
    }
    __device__ __forceinline__ const char* address_of(u32 row) const { return (const char*)(cache.data + (u64)row * cache.dim); }
    __device__ __forceinline__ void load_keys(int tile) {
#pragma unroll
        for (int u = 0; u < TILES; u++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const char* const from = address_of(row_of(tile, u, g + 8 * i));
#pragma unroll
                for (int j = 0; j < K_PIECES; j++) {
                    if (IsCodes<KV>::value) {
                        if (j * 4 + t < pieces) keys[u][i][j] = fetch(from + j * 64 + t * 16);
                    } else {
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            if (j * 4 + half * 2 < pieces) fetch_run(from + j * 64 + half * 32 + t * 8, keys[u][i][j].words + 2 * half);
                        }
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void load_values(int tile) {
#pragma unroll
        for (int u = 0; u < TILES; u++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const char* const from = address_of(row_of(tile, u, 2 * t + i % 2 + i / 2 * 8) + walk.to_values()) + g * 16;
#pragma unroll
                for (int j = 0; j < V_PIECES; j++) {
                    if (j * 8 + g < pieces) values[u][i][j] = fetch(from + j * 128);
                }
            }
            if (IsCodes<KV>::value) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 row = row_of(tile, u, g + 8 * i);
                    key_scales[u][i] = __ldcg(cache.scale_inv + row);
                    value_scales[u][i] = __ldcg(cache.scale_inv + row + walk.to_values());
                }
            }
        }
    }
};
#else
// Copies tiles to shared memory by the copy engine. When all lanes have read the current keys of a warp, its next keys are copied; values are copied
// likewise. This takes fewer registers, so four blocks share a multiprocessor and have more bytes in flight. But the first keys arrive later.
struct CopiedTiles {
    static constexpr bool HAS_PARTS = false;
    struct Cache {
        const TensorMap* map;
        const float* scale_inv;
    };
    static constexpr int BOX_BYTES = 16 * STEP, BOXES = (DIM * (int)sizeof(KV) + STEP - 1) / STEP;
    struct Tile {
        char keys[BOXES][BOX_BYTES], values[BOXES][BOX_BYTES];
    };
    struct Scales { alignas(64) float keys[16], values[16]; };

    Walk walk;
    Cache cache;
    Tile* tiles;                       // TILES tiles of this warp
    Scales* scales;                    // scales of these tiles
    u64* arrived;                      // barriers of keys and of values
    int tile, number, g, t;
    u32 row, parity;

    __device__ __forceinline__ CopiedTiles(const Walk& walk, const Cache& cache) : walk(walk), cache(cache) {
        __shared__ Scales shared_scales[WARPS][TILES];
        __shared__ u64 barriers[WARPS][2];
        tiles = (Tile*)shared() + walk.warp * TILES, scales = shared_scales[walk.warp];
        arrived = barriers[walk.warp];
        tile = walk.tile(0), number = 0, g = walk.lane / 4, t = walk.lane % 4, parity = 0;
        row = walk.row_from(0);
        if (walk.lane < 2) {
            barrier_init(arrived + walk.lane, TILES);
            barriers_are_initialized();
        }
        __syncwarp();
    }
    __device__ __forceinline__ void start() { copy_keys(), copy_values(); }
    __device__ __forceinline__ void start_next_keys() {
        __syncwarp();
        number += TILES;
        if (number % 32 == 0) row = walk.row_from(number);
        if (tile + STRIDE < walk.end) copy_keys();
    }
    __device__ __forceinline__ void start_next_values() {
        __syncwarp();
        if (tile + STRIDE < walk.end) copy_values();
    }
    __device__ __forceinline__ void wait_for_keys() { barrier_wait(arrived, parity); }
    __device__ __forceinline__ void wait_for_values() {
        barrier_wait(arrived + 1, parity);
        if (tile + 16 * TILES <= walk.end) return;
        // Values after the last token may be NaN, and NaN times zero is NaN.
#pragma unroll 1
        for (int u = 0; u < TILES; u++) {
#pragma unroll 1
            for (int i = max(walk.end - tile - 16 * u, 0) * STEP / 16 + walk.lane; i < BOX_BYTES / 16; i += 32) {
#pragma unroll
                for (int b = 0; b < BOXES; b++) ((uint4*)tiles[u].values[b])[i] = make_uint4(0, 0, 0, 0);
            }
        }
        __syncwarp();
    }
    __device__ __forceinline__ void next() { tile += STRIDE, parity ^= 1; }
    __device__ __forceinline__ Piece key(int u, int i, int j) const { return piece_in(tiles[u].keys, g + 8 * i, j * 4 + t); }
    __device__ __forceinline__ Piece value(int u, int i, int j) const { return piece_in(tiles[u].values, 2 * t + i % 2 + i / 2 * 8, j * 8 + g); }
    __device__ __forceinline__ float key_scale(int u, int i) const { return scales[u].keys[g + 8 * i]; }
    __device__ __forceinline__ float value_scale(int u, int i) const { return scales[u].values[g + 8 * i]; }
    template <class T> __device__ __forceinline__ T& room_for() {
        static_assert(sizeof(T) <= SHARED, "sums of warps fit in the memory of tiles");
        __syncthreads();
        return *(T*)shared();
    }

  private:
    static constexpr int SHARED = 34 << 10;
    static_assert(sizeof(Tile) * TILES * WARPS <= SHARED, "tiles fit in shared memory");
    __device__ __forceinline__ static char* shared() {
        // Swizzled boxes start at multiples of 1024 bytes.
        __shared__ alignas(1024) char memory[SHARED];
        return memory;
    }
    // Returns a piece. The copy engine swizzles the pieces of eight rows.
    __device__ __forceinline__ static Piece piece_in(const char (*boxes)[BOX_BYTES], int row, int piece) {
        const uint4 words = *(const uint4*)(boxes[piece / 8] + row * STEP + ((piece ^ row) & 7) * 16);
        return {{words.x, words.y, words.z, words.w}};
    }
    // The lane that knows the row of a tile copies the tile.
    __device__ __forceinline__ void copy_keys() {
        const int u = walk.lane - number % 32;
        if (u < 0 || u >= TILES) return;
        barrier_expect(arrived, BOXES * BOX_BYTES + sizeof(Scales));
#pragma unroll
        for (int b = 0; b < BOXES; b++) copy_box(tiles[u].keys[b], cache.map, b * STEP, row, arrived);
        copy_bytes(scales[u].keys, cache.scale_inv + row, sizeof(scales[u].keys), arrived);
        copy_bytes(scales[u].values, cache.scale_inv + row + walk.to_values(), sizeof(scales[u].values), arrived);
    }
    __device__ __forceinline__ void copy_values() {
        const int u = walk.lane - number % 32;
        if (u < 0 || u >= TILES) return;
        barrier_expect(arrived + 1, BOXES * BOX_BYTES);
#pragma unroll
        for (int b = 0; b < BOXES; b++) copy_box(tiles[u].values[b], cache.map, b * STEP, row + walk.to_values(), arrived + 1);
    }
};
#endif
