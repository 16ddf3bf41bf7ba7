// Calls `work` for the eights of this thread in a slice of a row-major matrix. The sizes of the matrix are multiples of 128. The slice has `length`
// elements from index `start` on, both multiples of 128. Grid (columns / 128, rows / 128) of the whole matrix: 256 threads for each 128x128 block, 16
// threads for each row of a block.
template <class Work> __device__ __forceinline__ void each_eight(u64 start, u64 length, const Work& work) {
    const u64 columns = (u64)gridDim.x * TILE;
#pragma unroll
    for (int sweep = 0; sweep < 8; sweep++) {
        // Indices of elements before the start wrap around to large numbers.
        const u64 row = (u64)blockIdx.y * TILE + tile_row(sweep), at = row * columns + blockIdx.x * TILE + eight_column() - start;
        if (at < length) work(at);
    }
}

// Returns eight values of type `S`, rounded to the type that is cast.
template <class S> __device__ __forceinline__ Eight<X> rounded8(const S* x, bool wide) {
    float v[8];
    unpack8(fetch8(x, 8, wide), v);
    return pack8<X>(v);
}
template <> __device__ __forceinline__ Eight<X> rounded8<X>(const X* x, bool wide) { return fetch8(x, 8, wide); }

template <class S> __device__ __forceinline__ void find_amax(float* amaxes, const S* x, u64 start, u64 length) {
    const bool wide = aligned(x);
    float largest = 0.0f;
    each_eight(start, length, [&](u64 at) { largest = fmaxf(largest, largest8(rounded8(x + at, wide))); });
    largest = block_max(largest);
    if (threadIdx.x == 0) amaxes[blockIdx.y * gridDim.x + blockIdx.x] = largest;
}
extern "C" __global__ void slice_amaxes(float* amaxes, const X* x, u64 start, u64 length) { find_amax(amaxes, x, start, length); }
extern "C" __global__ void slice_amaxes_rounded(float* amaxes, const f32* x, u64 start, u64 length) { find_amax(amaxes, x, start, length); }

// Casts a block. The codes of `to` are the codes of the slice, with its number of elements as rows and columns. The scales of `to` cover the whole
// matrix.
template <class S>
__device__ __forceinline__ void cast_square(const float* amaxes, const S* x, u64 start, u64 length, const Destination& to) {
    const bool wide = aligned(x);
    const float scale = own_scale(to, max_finite<FORMAT>(), amaxes[blockIdx.y * gridDim.x + blockIdx.x]);
    Seen seen;
    each_eight(start, length, [&](u64 at) { *(uint2*)(to.codes + at) = encode8<FORMAT>(rounded8(x + at, wide), scale, seen); });
    if (threadIdx.x == 0) {
        to.scale_inv[blockIdx.y * to.scale_pitch + blockIdx.x] = 1.0f / scale;
        to.transposed_scale_inv[blockIdx.x * to.transposed_scale_pitch + blockIdx.y] = 1.0f / scale;
    }
    measure(to, seen, [] {});
}
extern "C" __global__ void
quantize_slice(const float* amaxes, const X* x, u64 start, u64 length, const __grid_constant__ Destination to) {
    cast_square(amaxes, x, start, length, to);
}
extern "C" __global__ void
quantize_slice_rounded(const float* amaxes, const f32* x, u64 start, u64 length, const __grid_constant__ Destination to) {
    cast_square(amaxes, x, start, length, to);
}
