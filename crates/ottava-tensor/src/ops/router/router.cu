// A router. Each warp has a token, and each lane has every 32nd expert. There are at most `MOST_EXPERTS` experts and `MOST_GROUPS` groups.

#define WARPS 8
#define ALL 0xFFFFFFFF

// The routing, as `Routing` in mod.rs.
struct Routing {
    int sigmoid, normalise, by_logits, groups, groups_chosen, two_best;
    float epsilon, scale;
};

__device__ __forceinline__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, offset));
    return x;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// A candidate among keys. `id` is -1 if there is no candidate. Among equal keys, the lower id is better.
struct Best { float key; int id; };
__device__ __forceinline__ bool is_better(Best a, Best b) {
    if (a.id < 0 || b.id < 0) return b.id < 0 && a.id >= 0;
    return a.key > b.key || (!(b.key > a.key) && a.id < b.id);
}
__device__ __forceinline__ Best warp_best(Best x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const Best other = {__shfl_xor_sync(ALL, x.key, offset), __shfl_xor_sync(ALL, x.id, offset)};
        if (is_better(other, x)) x = other;
    }
    // The shuffle makes all lanes agree even if keys are NaN.
    return {__shfl_sync(ALL, x.key, 0), __shfl_sync(ALL, x.id, 0)};
}

// Sets the keys of experts outside of the best groups to minus infinity.
__device__ __forceinline__ void exclude(float* keys, float* of_groups, int E, const Routing& how) {
    const int lane = threadIdx.x % 32, size = E / how.groups;
    for (int g = lane; g < how.groups; g += 32) {
        int first = 0, second = -1;
        const float* const group = keys + g * size;
        for (int e = 1; e < size; e++) {
            if (group[e] > group[first]) {
                second = first;
                first = e;
            } else if (second < 0 || group[e] > group[second]) second = e;
        }
        of_groups[g] = how.two_best ? group[first] + group[second] : group[first];
    }
    __syncwarp();
    u64 kept = 0;
    for (int k = 0; k < how.groups_chosen; k++) {
        Best best = {0.0f, -1};
        for (int g = lane; g < how.groups; g += 32)
            if (!(kept >> g & 1) && is_better({of_groups[g], g}, best)) best = {of_groups[g], g};
        kept |= 1ull << warp_best(best).id;
    }
    for (int e = lane; e < E; e += 32) if (!(kept >> e / size & 1)) keys[e] = __int_as_float(0xFF800000);
    __syncwarp();
}

// Grid (T / WARPS), 32 WARPS threads.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route(int* ids, float* weights, float* lse, float* entropy, const float* logits, const float* bias, const int* counted, int T,
          int E, int K, const __grid_constant__ Routing how) {
    start_successors();
    wait_for_predecessors();
    __shared__ float all_keys[WARPS][MOST_EXPERTS], all_groups[WARPS][MOST_GROUPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = blockIdx.x * WARPS + warp;
    if (t >= T) return;
    float* const keys = all_keys[warp];
    logits += (u64)t * E;
    float largest = __int_as_float(0xFF800000), sum = 0.0f;
    for (int e = lane; e < E; e += 32) largest = fmaxf(largest, logits[e]);
    largest = warp_max(largest);
    for (int e = lane; e < E; e += 32) sum += expf(logits[e] - largest);
    sum = warp_sum(sum);
    const auto score = [&](int e) { return how.sigmoid ? sigmoid(logits[e]) : expf(logits[e] - largest) / sum; };
    float of_scores = 0.0f, nats = 0.0f;
    for (int e = lane; e < E; e += 32) {
        of_scores += score(e);
        keys[e] = how.by_logits ? logits[e] : score(e) + (bias ? bias[e] : 0.0f);
    }
    of_scores = warp_sum(of_scores);
    for (int e = lane; e < E; e += 32) {
        const float p = score(e) / of_scores;
        if (p > 0.0f) nats -= p * logf(p);
    }
    nats = warp_sum(nats);
    if (lane == 0) {
        lse[t] = largest + logf(sum);
        entropy[t] = counted && counted[t] == 0 ? 0.0f : nats;
    }
    __syncwarp();
    if (how.groups) exclude(keys, all_groups[warp], E, how);
    // Bit i tells whether expert lane + 32 i is taken.
    u32 taken = 0;
    float total = 0.0f;
    for (int k = 0; k < K; k++) {
        Best best = {0.0f, -1};
        for (int e = lane; e < E; e += 32)
            if (!(taken >> e / 32 & 1) && is_better({keys[e], e}, best)) best = {keys[e], e};
        best = warp_best(best);
        if (best.id % 32 == lane) taken |= 1u << best.id / 32;
        total += score(best.id);
        if (lane == 0) ids[(u64)t * K + k] = best.id;
    }
    __syncwarp();
    for (int k = lane; k < K; k += 32) {
        const float own = score(ids[(u64)t * K + k]);
        weights[(u64)t * K + k] = (how.normalise ? own / (total + how.epsilon) : own) * how.scale;
    }
}

// Grid (T / WARPS), 32 WARPS threads. `balance` is the factor of the counts, and `z` the factor of `lse` times softmax, before `scale` and the means
// over `counted` tokens. `counts` are the counts of R ranks. Without losses, `scale` is null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    route_backward(float* dlogits, const float* logits, const float* lse, const int* ids, const float* dweights, const int* counts,
                   const int* counted, const float* scale, float balance, float z, int R, int T, int E, int K,
                   const __grid_constant__ Routing how) {
    __shared__ float all_dscores[WARPS][MOST_EXPERTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = blockIdx.x * WARPS + warp;
    if (t >= T) return;
    float* const dscores = all_dscores[warp];
    dlogits += (u64)t * E;
    logits += (u64)t * E;
    ids += (u64)t * K;
    dweights += (u64)t * K;
    const float own_lse = lse[t];
    const auto softmax = [&](int e) { return expf(logits[e] - own_lse); };
    const auto score = [&](int e) { return how.sigmoid ? sigmoid(logits[e]) : softmax(e); };
    for (int e = lane; e < E; e += 32) dscores[e] = 0.0f;
    __syncwarp();
    float divisor = 1.0f, common = 0.0f;
    if (how.normalise) {
        divisor = 0.0f;
        for (int k = 0; k < K; k++) divisor += score(ids[k]);
        divisor += how.epsilon;
        for (int k = 0; k < K; k++) common += dweights[k] * (score(ids[k]) / divisor);
    }
    for (int k = lane; k < K; k += 32) dscores[ids[k]] = how.scale * ((dweights[k] - common) / divisor);
    __syncwarp();
    const bool counts_here = scale && counted[t] != 0;
    const float share = counts_here ? 1.0f / counted[t] : 0.0f;
    const float factor = counts_here ? balance * *scale * share * share : 0.0f;
    const auto count = [&](int e) {
        int sum = 0;
        for (int r = 0; r < R; r++) sum += counts[r * E + e];
        return factor * sum;
    };
    float sum = 1.0f, mean = 0.0f;
    if (counts_here && how.sigmoid) {
        sum = 0.0f;
        for (int e = lane; e < E; e += 32) sum += score(e);
        sum = warp_sum(sum);
        for (int e = lane; e < E; e += 32) mean += count(e) * (score(e) / sum);
        mean = warp_sum(mean);
    }
    float through = 0.0f;
    for (int e = lane; e < E; e += 32) {
        if (counts_here) dscores[e] += (count(e) - mean) / sum;
        if (!how.sigmoid) through += score(e) * dscores[e];
    }
    through = warp_sum(through);
    for (int e = lane; e < E; e += 32) {
        const float s = score(e);
        float d = how.sigmoid ? s * (1.0f - s) * dscores[e] : s * (dscores[e] - through);
        if (counts_here) d += z * *scale * share * own_lse * softmax(e);
        dlogits[e] = d;
    }
}

// Threads stride over all choices. Blocks count in shared memory, then add to `counts`, which are initially zero.
extern "C" __global__ void count_choices(int* counts, const int* ids, const int* counted, int T, int E, int K) {
    __shared__ int own[MOST_EXPERTS];
    for (int e = threadIdx.x; e < E; e += blockDim.x) own[e] = 0;
    __syncthreads();
    for (u64 i = grid_start(); i < (u64)T * K; i += grid_step()) if (counted[i / K] != 0) atomicAdd(&own[ids[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x) if (own[e]) atomicAdd(&counts[e], own[e]);
}

// One thread per expert.
extern "C" __global__ void add_counts(i64* counts, const int* now, int E) {
    for (u64 e = grid_start(); e < E; e += grid_step()) counts[e] += now[e];
}
