// KV is the type of the cache: X, bf16, or e4m3 codes with a scale per token and head.

template <class T> struct IsCodes { static const bool value = false; };
template <> struct IsCodes<e4m3> { static const bool value = true; };

// A sequence of `context` tokens. Its last tokens are new: tokens `start` to `stop` of the batch. Earlier passes have written keys and values of its
// first `cached` tokens.
struct Place {
    int sequence, start, stop, context, cached;
    // Returns the number of tokens that a new token sees, itself included.
    __device__ __forceinline__ int seen_by(int token) const { return context - (stop - 1 - token); }
};

// The sequences of new tokens, and the blocks of their keys and values. The fields are as in PagedBatch.
struct Batch {
    const int *query_starts, *context_lens, *cached_lens, *block_tables;
    int sequences, max_blocks, block_size;

    // Padding belongs to sequence number `sequences`, which has no end and no context.
    __device__ __forceinline__ Place at(int sequence) const {
        const bool padding = sequence == sequences;
        const int stop = padding ? 0 : query_starts[sequence + 1], context = padding ? 0 : context_lens[sequence];
        return {sequence, query_starts[sequence], stop, context, padding ? 0 : cached_lens[sequence]};
    }
    // Returns the number of a sequence's first tile. A tile has up to `together` new tokens of one sequence. With several tokens per tile, tile
    // numbers have gaps, so that the sequence of a tile is found without a sum over sequences.
    __device__ __forceinline__ static int first_tile(Place place, int together) {
        return together > 1 ? place.start / together + place.sequence : place.start;
    }
    // Returns whether the first tile of a sequence is `tile` or an earlier tile, without a division.
    __device__ __forceinline__ static bool has_begun(Place place, int tile, int together) {
        return place.start < (tile + 1 - (together > 1 ? place.sequence : 0)) * together;
    }
    // Finds the sequence of a tile, with all lanes of a warp. Lanes also read the ends and lengths of the candidate sequences, so one round of loads
    // suffices instead of two.
    __device__ __forceinline__ Place find(int tile, int together) const {
        // In decode, each sequence has one token, so the first guess is right.
        const Place guess = at(min(tile, sequences));
        if (guess.start == tile && tile < guess.stop && together == 1) return guess;
        Place mine = {};
        int count = 0;
#pragma unroll 4
        for (int r = threadIdx.x % 32; r <= sequences; r += 32) {
            const Place place = at(r);
            if (has_begun(place, tile, together)) count++, mine = place;
        }
        const int sequence = __reduce_add_sync(FULL, count) - 1, lane = sequence % 32;
        return {sequence, __shfl_sync(FULL, mine.start, lane), __shfl_sync(FULL, mine.stop, lane), __shfl_sync(FULL, mine.context, lane),
                __shfl_sync(FULL, mine.cached, lane)};
    }
    // Returns the row of a position among the keys of a head. Rows have `dim` elements. The row of the value is `kv_heads · block_size` rows later.
    __device__ __forceinline__ u64 row_of(int sequence, int position, int kv_heads, int head) const {
        const u64 block = block_tables[(u64)sequence * max_blocks + position / block_size];
        return (block * 2 * kv_heads + head) * block_size + position % block_size;
    }
};

// With BOUNDED, kernels take the bounds of a spec: the window, and the soft cap in units of log2(e). 0 means no bound.
#ifdef BOUNDED
#define BOUNDS , int window, float cap
#define BOUNDS_OF_KERNEL {window, cap}
#else
#define BOUNDS
#define BOUNDS_OF_KERNEL {0, 0.0f}
#endif
struct Bounds {
    int window;
    float cap;
    // Return the first key that a query sees, and whether a position is hidden. Without a window, the query would see `seen` keys.
    __device__ __forceinline__ int first(int seen) const { return window ? max(0, seen - window) : 0; }
    __device__ __forceinline__ bool hides(int position, int seen) const { return position >= seen || (window && position < seen - window); }
};
