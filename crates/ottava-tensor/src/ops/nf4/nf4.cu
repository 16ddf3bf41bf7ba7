// Weights in four bits, as in cpu.rs. A byte has the codes of two neighbours; the first has the high bits.

// The number of midpoints between neighbouring values that are below x.
__device__ __forceinline__ int nearest(float x, const float* values) {
    int low = 0, high = 15;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int middle = (low + high) / 2;
        if (low < high) {
            if ((values[middle] + values[middle + 1]) / 2.0f >= x) high = middle;
            else low = middle + 1;
        }
    }
    return low;
}

__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// Grid-stride loop over blocks of 64 elements, a warp each: a lane has two neighbours.
extern "C" __global__ void quantize_nf4(unsigned char* codes, float* amaxes, const float* x, const float* levels, u64 n) {
    __shared__ float values[16];
    if (threadIdx.x < 16) values[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const u64 blocks = (n + 63) / 64, step = (u64)gridDim.x * blockDim.x / 32;
    for (u64 b = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32; b < blocks; b += step) {
        const u64 at = 64 * b + 2 * lane;
        const float first = at < n ? x[at] : 0.0f, second = at + 1 < n ? x[at + 1] : 0.0f;
        // NaN stays NaN, so that the host sees it.
        float amax = larger(fabsf(first), fabsf(second));
#pragma unroll
        for (int i = 16; i > 0; i /= 2) amax = larger(amax, __shfl_xor_sync(0xFFFFFFFF, amax, i));
        if (lane == 0) amaxes[b] = amax;
        const float divisor = fmaxf(amax, 1e-38f);
        const bool full = 64 * (b + 1) <= n;
        float a = full ? first * (1.0f / divisor) : first / divisor, c = full ? second * (1.0f / divisor) : second / divisor;
        a = fminf(fmaxf(a, -1.0f), 1.0f);
        c = fminf(fmaxf(c, -1.0f), 1.0f);
        if (at < n) codes[at / 2] = (unsigned char)(nearest(a, values) << 4 | nearest(c, values));
    }
}

// Grid-stride loop over eights of elements, which are in one block.
extern "C" __global__ void dequantize_nf4(X* y, const unsigned char* codes, const unsigned char* scales, const float* groups,
                                          const float* levels, float mean, u64 n) {
    __shared__ float of_codes[16], of_scales[256];
    if (threadIdx.x < 16) of_codes[threadIdx.x] = levels[threadIdx.x];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) of_scales[i] = levels[16 + i];
    __syncthreads();
    const bool wide = aligned(y) && (u64(codes) & 3) == 0;
    for (u64 g = grid_start(); g < (n + 7) / 8; g += grid_step()) {
        const u64 block = g / 8;
        const float amax = of_scales[scales[block]] * groups[block / 256] + mean;
        float v[8];
        if (wide && 8 * g + 8 <= n) {
            const u32 four = *(const u32*)(codes + 4 * g);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 pair = four >> (8 * i) & 255;
                v[2 * i] = of_codes[pair >> 4] * amax;
                v[2 * i + 1] = of_codes[pair & 15] * amax;
            }
            store8(y + 8 * g, pack8<X>(v));
        } else {
            for (u64 i = 8 * g; i < 8 * g + 8 && i < n; i++) {
                const u32 pair = codes[i / 2];
                store(&y[i], of_codes[i % 2 == 0 ? pair >> 4 : pair & 15] * amax);
            }
        }
    }
}
