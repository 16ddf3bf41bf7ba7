// `X` is the type of gradients. A slice of n values has n codes and n / GROUP biased exponents. Slices start every `stride` bytes.
// Sixteen threads process a group, eight values each.
#define LANES 16

// Reduces over the threads of a group.
template <class T, class F> __device__ __forceinline__ T of_group(T x, F combine) {
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFF, x, lane));
    return x;
}

// Encodes slices. A row of the grid encodes one slice of `groups` groups. `feedback` may be null. Block b adds the squared errors to sums[2b] and the
// squared values to sums[2b + 1]. A slice has an even number of groups, so both groups of a warp exist.
extern "C" __global__ void __launch_bounds__(256) encode_gradients(e4m3* __restrict__ codes, bf16* __restrict__ feedback, const X* __restrict__ x,
                                                                   double* __restrict__ sums, u32 groups, u64 stride) {
    const int lane = threadIdx.x % LANES;
    const u64 slice = (u64)groups * GROUP;
    x += blockIdx.y * slice;
    codes += blockIdx.y * stride;
    if (feedback) feedback += blockIdx.y * slice;
    unsigned char* scales = (unsigned char*)codes + slice;
    double errors = 0.0, values = 0.0;
    for (u32 g = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES; g < groups; g += gridDim.x * (blockDim.x / LANES)) {
        const u64 i = (u64)g * GROUP + lane * 8;
        Eight<float> e;
        unpack8(load8(x + i), e.at);
        if (feedback) {
            float lost[8];
            unpack8(load8(feedback + i), lost);
#pragma unroll
            for (int k = 0; k < 8; k++) e.at[k] += lost[k];
        }
        const u32 exponent = smallest_scale_inv(of_group(largest_bits8(e), [](u32 a, u32 b) { return max(a, b); }));
        const Eight<e4m3> code = compress8(e, exponent);
        store8(codes + i, code);
        if (lane == 0) scales[g] = exponent;
        float v[8], error = 0.0f, value = 0.0f;
        unpack8(code, v);
        const float back = __uint_as_float(exponent << 23);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] = exponent == 255 ? 0.0f : e.at[k] - v[k] * back;
            error += v[k] * v[k];
            value += e.at[k] * e.at[k];
        }
        if (feedback) store8(feedback + i, pack8<bf16>(v));
        error = of_group(error, Add()), value = of_group(value, Add());
        if (lane == 0) errors += (double)error, values += (double)value;
    }
    // The bytes between two slices are sent too, so they are set to zero.
    if (blockIdx.x == 0 && threadIdx.x < stride - slice - groups) scales[groups + threadIdx.x] = 0;
    errors = block_sum(errors);
    values = block_sum(values);
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x;
    if (sums && threadIdx.x == 0) sums[2 * block] += errors, sums[2 * block + 1] += values;
}

// Adds `parts` slices in order. A row of the grid computes one such sum. A thread processes 16 values at a time.
extern "C" __global__ void __launch_bounds__(256) decode_gradients(const e4m3* __restrict__ codes, X* __restrict__ y, u32 groups, u64 stride, int parts) {
    const u64 slice = (u64)groups * GROUP;
    codes += blockIdx.y * parts * stride;
    y += blockIdx.y * slice;
    for (u64 i = 16 * grid_start(); i < slice; i += 16 * grid_step()) {
        const e4m3* from = codes;
        float sum[16] = {};
        for (int part = 0; part < parts; part++, from += stride) {
            // Exponent 255 gives infinity, and zero times infinity is NaN.
            const float back = __uint_as_float((u32)((const unsigned char*)from)[slice + i / GROUP] << 23);
            const uint4 words = *(const uint4*)(from + i);
            const Eight<e4m3> halves[2] = {{make_uint2(words.x, words.y)}, {make_uint2(words.z, words.w)}};
            float v[16];
            unpack8(halves[0], v);
            unpack8(halves[1], v + 8);
#pragma unroll
            for (int k = 0; k < 16; k++) sum[k] = __fadd_rn(sum[k], v[k] * back);
        }
        store8(y + i, pack8<X>(sum));
        store8(y + i + 8, pack8<X>(sum + 8));
    }
}

// Computes the relative error from all pairs of sums. One block.
extern "C" __global__ void __launch_bounds__(1024) relative_error(float* error, const double* sums, int pairs) {
    double errors = 0.0, values = 0.0;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) errors += sums[2 * i], values += sums[2 * i + 1];
    errors = block_sum(errors);
    values = block_sum(values);
    if (threadIdx.x == 0) *error = (float)sqrt(errors / values);
}
