// Rotation of the pairs of a head. Pair i of a head of 2h elements is (i, i + h), or (2i, 2i + 1) with NEIGHBOURS. Eight pairs from pair i on are two
// eights of elements: the first begins at `at_of(i)`, the second `distance(h, 8)` elements later.
template <bool NEIGHBOURS> __device__ __forceinline__ int at_of(int i) { return NEIGHBOURS ? 2 * i : i; }
template <bool NEIGHBOURS> __device__ __forceinline__ int distance(int half, int n) { return NEIGHBOURS ? n : half; }

// Rotates eight pairs. `turn` is 1 or -1.
template <bool NEIGHBOURS>
__device__ __forceinline__ void turn8(Eight<X>& first, Eight<X>& second, const Eight<float>& cos, const Eight<float>& sin, float turn) {
    float u[8], v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        X a8 = first.at[i], b8 = second.at[i];
        if (NEIGHBOURS) {
            a8 = i < 4 ? first.at[2 * i % 8] : second.at[2 * i % 8];
            b8 = i < 4 ? first.at[(2 * i + 1) % 8] : second.at[(2 * i + 1) % 8];
        }
        const float a = load(a8), b = load(b8), s = sin.at[i] * turn;
        u[i] = a * cos.at[i] - b * s;
        v[i] = b * cos.at[i] + a * s;
    }
    if (NEIGHBOURS) {
        float lower[8], upper[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            lower[2 * i] = u[i], lower[2 * i + 1] = v[i];
            upper[2 * i] = u[i + 4], upper[2 * i + 1] = v[i + 4];
        }
        first = pack8<X>(lower);
        second = pack8<X>(upper);
        return;
    }
    first = pack8<X>(u);
    second = pack8<X>(v);
}
