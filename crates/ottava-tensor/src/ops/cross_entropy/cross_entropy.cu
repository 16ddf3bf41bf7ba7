// One block per row of logits. Rows are `pitch` elements apart. Threads stride over the vocabulary, and over eights of logits if rows are aligned.
#define LOWEST -3.402823466e38f

// With CAPS, the last argument of a kernel is the upper bound of the absolute values of logits.
#ifndef CAPS
#define AND_CAP
#define CAP 0.0f
__device__ __forceinline__ float capped(float x, float) { return x; }
__device__ __forceinline__ float slope(float, float) { return 1.0f; }
#else
#define AND_CAP , float cap
#define CAP cap
__device__ __forceinline__ float capped(float x, float cap) { return cap * tanhf(x / cap); }
// Returns the derivative of a capped logit by the logit before the cap.
__device__ __forceinline__ float slope(float capped, float cap) { return 1.0f - capped / cap * (capped / cap); }

// Replaces logits in place. Threads stride over all logits.
extern "C" __global__ void cap_logits(X* logits, long long n, float cap) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        store(&logits[i], capped(load(logits[i]), cap));
}
#endif

// With SMOOTHS, the last arguments of a kernel are weights in the loss: the weight of the target's logit, and the weight of each logit of the
// vocabulary.
#ifndef SMOOTHS
#define AND_WEIGHTS
#define ON_TARGET 1.0f
#define ON_ALL 0.0f
#define SUMS_LOGITS false
#define WEIGHTED(at_target, sum) (at_target)
#else
#define AND_WEIGHTS , float on_target, float on_all
#define ON_TARGET on_target
#define ON_ALL on_all
#define SUMS_LOGITS true
#define WEIGHTED(at_target, sum) (on_target * (at_target) + on_all * (sum))
#endif

// With TOKEN_SCALES, the loss of each token has a separate factor.
#ifdef TOKEN_SCALES
#define SCALE scale_of_loss[blockIdx.x]
#else
#define SCALE *scale_of_loss
#endif

// Returns e^x by the hardware exp2: three instructions, accurate to a few ulps except for small results.
__device__ __forceinline__ float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

// A running maximum, and the sum of e^(x - maximum). With them, a row is read once. A NaN or an infinity makes the sum NaN.
struct Softmax { float largest, sum; };
__device__ __forceinline__ Softmax merge(Softmax a, Softmax b) {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * exponential(a.largest - largest) + b.sum * exponential(b.largest - largest)};
}

struct Row { float lse, sum; };

// Returns the log-sum-exp of a row and, with SMOOTHS, the sum of its logits. The first `kept` eights are stored in `keep`. Each thread has `LOADS`
// loads in flight. `LOADS` is small if many blocks share a multiprocessor. The order of sums depends on V and on the number of threads, not on `pitch`, so
// a row has the same bits with and without padding.
template <int LOADS>
__device__ __forceinline__ Row reduce(const X* row, int V, int pitch, Eight<X>* keep, int kept, float cap) {
    __shared__ Softmax warps[32];
    Softmax s = {LOWEST, 0.0f};
    float sum = 0.0f;
    const bool is_aligned = pitch % 8 == 0 && aligned(row);
    const int eights = V / 8;
#pragma unroll (LOADS == 1 ? 2 : 1)
    for (int g0 = threadIdx.x; g0 < eights; g0 += LOADS * blockDim.x) {
        Eight<X> e[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (g0 + k * blockDim.x < eights) e[k] = fetch8(row + 8 * (g0 + k * blockDim.x), 8, is_aligned);
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int g = g0 + k * blockDim.x;
            if (g >= eights) continue;
            if (g < kept) keep[g] = e[k];
            float v[8];
            unpack8(e[k], v);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = capped(v[i], cap);
            if (SUMS_LOGITS) sum += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
            const float largest = fmaxf(s.largest, fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), fmaxf(fmaxf(v[4], v[5]), fmaxf(v[6], v[7]))));
            if (largest > s.largest) s = {largest, s.sum * exponential(s.largest - largest)};
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = exponential(v[i] - s.largest);
            s.sum += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
    }
    for (int v = 8 * eights + threadIdx.x; v < V; v += blockDim.x) {
        const float x = capped(load(row[v]), cap);
        if (SUMS_LOGITS) sum += x;
        if (x > s.largest) s = {x, s.sum * exponential(s.largest - x)};
        s.sum += exponential(x - s.largest);
    }
    for (int offset = 16; offset > 0; offset /= 2)
        s = merge(s, {__shfl_xor_sync(0xFFFFFFFF, s.largest, offset), __shfl_xor_sync(0xFFFFFFFF, s.sum, offset)});
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads();
    s = warps[0];
    for (int w = 1; w < blockDim.x / 32; w++) s = merge(s, warps[w]);
    if (SUMS_LOGITS) sum = block_sum(sum);
    // If all logits are minus infinity, the result is NaN, as on the CPU.
    return {s.sum == 0.0f ? __int_as_float(0x7FC00000) : s.largest + logf(s.sum), sum};
}

extern "C" __global__ void cross_entropy(float* losses, const X* logits, const int* targets, int V, int pitch AND_CAP AND_WEIGHTS) {
    const X* row = logits + (u64)blockIdx.x * pitch;
    const int target = targets[blockIdx.x];
    if (target == IGNORE_INDEX) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }
    const Row all = reduce<1>(row, V, pitch, nullptr, 0, CAP);
    if (threadIdx.x == 0) losses[blockIdx.x] = all.lse - WEIGHTED(capped(load(row[target]), CAP), all.sum);
}

// `kept` eights of a row are cached in dynamic shared memory. The rest of the row is read again, mostly from L2.
extern "C" __global__ void __launch_bounds__(768, 2)
    cross_entropy_gradient(float* losses, X* logits, const int* targets, int V, int pitch, const float* scale_of_loss, int kept AND_CAP AND_WEIGHTS) {
    extern __shared__ uint4 row_of_the_launch[];
    Eight<X>* keep = (Eight<X>*)row_of_the_launch;
    X* row = logits + (u64)blockIdx.x * pitch;
    const int target = targets[blockIdx.x];
    const bool ignored = target == IGNORE_INDEX;
    const float scale = SCALE;
    const Row all = ignored ? Row{0.0f, 0.0f} : reduce<8 / (int)sizeof(X)>(row, V, pitch, keep, kept, CAP);
    const float lse = all.lse, at_target = ignored ? 0.0f : capped(load(row[target]), CAP);
    if (threadIdx.x == 0) losses[blockIdx.x] = ignored ? 0.0f : lse - WEIGHTED(at_target, all.sum);
    __syncthreads();
    // Returns the gradient from a capped logit.
    const auto gradient = [&](float x, float onehot) { return ignored ? 0.0f : (exponential(x - lse) - onehot - ON_ALL) * scale * slope(x, CAP); };
    const int eights = pitch % 8 == 0 && aligned(row) ? V / 8 : 0;
#pragma unroll 2
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        // Each thread reads only eights that it has stored.
        Eight<X> e = {};
        if (!ignored) {
            if (g < kept) e = keep[g];
            else e = load8(row + 8 * g);
        }
        float v[8];
        unpack8(e, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = gradient(capped(v[i], CAP), 0.0f);
        store8(row + 8 * g, pack8<X>(v));
        if (g == target / 8) store(&row[target], gradient(at_target, ON_TARGET));
    }
    for (int v = 8 * eights + threadIdx.x; v < V; v += blockDim.x) store(&row[v], gradient(capped(load(row[v]), CAP), v == target ? ON_TARGET : 0.0f));
}

// Computes two sums of the logits of the tokens `first..first + V`: the log-sum-exp, and the sum of logits times their weights in the loss. A target
// among other tokens adds nothing to the second sum.
extern "C" __global__ void partial_losses(float2* partial, const X* logits, const int* targets, int V, int first AND_CAP AND_WEIGHTS) {
    const X* row = logits + (u64)blockIdx.x * V;
    const Row all = reduce<1>(row, V, V, nullptr, 0, CAP);
    // Ignored targets are negative.
    const int target = targets[blockIdx.x] - first;
    const bool is_here = targets[blockIdx.x] >= 0 && target >= 0 && target < V;
    const float at_target = is_here ? capped(load(row[target]), CAP) : 0.0f;
    if (threadIdx.x == 0) partial[blockIdx.x] = make_float2(all.lse, WEIGHTED(at_target, all.sum));
}

// Threads stride over tokens. If a part is NaN, the results are NaN.
extern "C" __global__ void merge_losses(float* losses, float* lse, const float2* partial, const int* targets, int parts, int tokens) {
    for (int t = grid_start(); t < tokens; t += grid_step()) {
        float largest = partial[t].x, sum = 0.0f, weighted = 0.0f;
        for (int p = 1; p < parts; p++) largest = fmaxf(largest, partial[p * tokens + t].x);
        for (int p = 0; p < parts; p++) {
            const float2 of_part = partial[p * tokens + t];
            sum += expf(of_part.x - largest);
            weighted += of_part.y;
        }
        const float all = largest + logf(sum);
        lse[t] = all;
        losses[t] = targets[t] == IGNORE_INDEX ? 0.0f : all - weighted;
    }
}

extern "C" __global__ void partial_gradient(X* logits, const int* targets, const float* lse_of_row, const float* scale_of_loss, int V,
                                            int first AND_CAP AND_WEIGHTS) {
    X* row = logits + (u64)blockIdx.x * V;
    const bool ignored = targets[blockIdx.x] == IGNORE_INDEX;
    const int target = ignored ? -1 : targets[blockIdx.x] - first;
    const float scale = SCALE, lse = lse_of_row[blockIdx.x];
    const auto gradient = [&](float x, int v) {
        return ignored ? 0.0f : (exponential(x - lse) - (v == target ? ON_TARGET : 0.0f) - ON_ALL) * scale * slope(x, CAP);
    };
    const int eights = V % 8 == 0 && aligned(row) ? V / 8 : 0;
#pragma unroll 2
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        float v[8];
        unpack8(load8(row + 8 * g), v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = gradient(capped(v[i], CAP), 8 * g + i);
        store8(row + 8 * g, pack8<X>(v));
    }
    for (int v = 8 * eights + threadIdx.x; v < V; v += blockDim.x) store(&row[v], gradient(capped(load(row[v]), CAP), v));
}
