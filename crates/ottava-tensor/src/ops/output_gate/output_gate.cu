// Grid-stride loops over eights. The remainder, and unaligned views, are processed element by element. With SILU, the function of a gate is SiLU, otherwise
// it is a sigmoid.

__device__ __forceinline__ float value_of(float gate) { return SILU ? gate * sigmoid(gate) : sigmoid(gate); }

struct Gradient { float x, gate; };
__device__ __forceinline__ Gradient gradient_of(float d, float x, float gate) {
    const float s = sigmoid(gate);
    if (!SILU) return {d * s, d * x * s * (1.0f - s)};
    const Silu silu = silu_and_slope(gate);
    return {d * silu.value, d * x * silu.slope};
}

// The pointers are not `__restrict__`, because reads could then move before the wait.
extern "C" __global__ void output_gate(X* y, const X* x, const X* gate, u64 n) {
    start_successors();
    wait_for_predecessors();
    const u64 eights = aligned(y, x, gate) ? n / 8 : 0;
    for (u64 g = grid_start(); g < eights; g += grid_step()) {
        const Eight<X> u = load8(x + 8 * g), v = load8(gate + 8 * g);
        float result[8];
#pragma unroll
        for (int i = 0; i < 8; i++) result[i] = load(u.at[i]) * value_of(load(v.at[i]));
        store8(y + 8 * g, pack8<X>(result));
    }
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) store(&y[i], load(x[i]) * value_of(load(gate[i])));
}

extern "C" __global__ void output_gate_backward(X* __restrict__ dx, X* __restrict__ dgate, const X* __restrict__ dy,
                                                const X* __restrict__ x, const X* __restrict__ gate, u64 n) {
    const u64 eights = aligned(dx, dgate, dy, x, gate) ? n / 8 : 0;
    for (u64 g = grid_start(); g < eights; g += grid_step()) {
        const Eight<X> d = load8(dy + 8 * g), u = load8(x + 8 * g), v = load8(gate + 8 * g);
        float of_x[8], of_gate[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const Gradient gradient = gradient_of(load(d.at[i]), load(u.at[i]), load(v.at[i]));
            of_x[i] = gradient.x;
            of_gate[i] = gradient.gate;
        }
        store8(dx + 8 * g, pack8<X>(of_x));
        store8(dgate + 8 * g, pack8<X>(of_gate));
    }
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) {
        const Gradient gradient = gradient_of(load(dy[i]), load(x[i]), load(gate[i]));
        store(&dx[i], gradient.x);
        store(&dgate[i], gradient.gate);
    }
}
