#define INFINITY __int_as_float(0x7F800000)
#define FULL 0xFFFFFFFF
// KV is the type of the cache: X, bf16, or e4m3 codes with a scale per token and head.

template <class T> struct IsCodes { static const bool value = false; };
template <> struct IsCodes<e4m3> { static const bool value = true; };

// Where new tokens belong, and where their keys and values are; fields as of PagedBatch.
struct Batch {
    const int *query_starts, *context_lens, *block_tables;
    int sequences, max_blocks, block_size;

    // New tokens are numbered in tiles of `together` tokens of one sequence. Numbers of several tokens per tile have gaps, so that no sum
    // over sequences is needed to find a tile's sequence. Padding counts as the sequence `sequences`.
    __device__ __forceinline__ int first_tile(int sequence, int together) const {
        return query_starts[sequence] / together + (together > 1 ? sequence : 0);
    }
    // The sequence of a tile, by all lanes of a warp.
    __device__ __forceinline__ int sequence_of(int tile, int together) const {
        int count = 0;
#pragma unroll 4
        for (int r = threadIdx.x % 32; r <= sequences; r += 32) count += first_tile(r, together) <= tile;
        return __reduce_add_sync(FULL, count) - 1;
    }
    // The number of tokens that a new token sees, itself included.
    __device__ __forceinline__ int seen_by(int token, int sequence) const {
        return context_lens[sequence] - (query_starts[sequence + 1] - 1 - token);
    }
    // The row of a position among the keys of a head, in rows of `dim` elements; its value is `kv_heads · block_size` rows later.
    __device__ __forceinline__ u64 row_of(int sequence, int position, int kv_heads, int head) const {
        const u64 block = block_tables[(u64)sequence * max_blocks + position / block_size];
        return (block * 2 * kv_heads + head) * block_size + position % block_size;
    }
};

// A power of two; 2^-infinity is 0.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// What to subtract from scores of which `largest` is the largest, or of which none is seen.
__device__ __forceinline__ float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// Warps of a block of attention.
#define WARPS 4
