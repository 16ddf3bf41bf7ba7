// A row of x `[T, 2F]` holds F gates, then F ups. Everything is done on eight neighbouring channels where rows are aligned.
__device__ __forceinline__ float sigmoid(float x) {
    float y;
    // One step from the quotient at most, as the exponential is.
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + expf(-x)));
    return y;
}
__device__ __forceinline__ float forward(float gate, float up) { return gate * sigmoid(gate) * up; }
struct Gradient { float gate, up; };
__device__ __forceinline__ Gradient backward(float d, float gate, float up) {
    const float s = sigmoid(gate);
    return {d * up * s * (1.0f + gate * (1.0f - s)), d * (gate * s)};
}

#ifndef FORMAT
// One block per row.
extern "C" __global__ void __launch_bounds__(256) swiglu(X* __restrict__ y, const X* __restrict__ x, int F) {
    y += (u64)blockIdx.x * F;
    x += (u64)blockIdx.x * 2 * F;
    const int eights = F % 8 == 0 && aligned(y, x) ? F / 8 : 0;
#pragma unroll 2
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> gate = load8(x + 8 * g), up = load8(x + F + 8 * g);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = forward(load(gate.at[i]), load(up.at[i]));
        store8(y + 8 * g, pack8<X>(v));
    }
    for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) store(&y[c], forward(load(x[c]), load(x[F + c])));
}

// One block per row.
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(X* __restrict__ dx, const X* __restrict__ dy,
                                                                  const X* __restrict__ x, int F) {
    dx += (u64)blockIdx.x * 2 * F;
    x += (u64)blockIdx.x * 2 * F;
    dy += (u64)blockIdx.x * F;
    const int eights = F % 8 == 0 && aligned(dx, dy, x) ? F / 8 : 0;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> gate = load8(x + 8 * g), up = load8(x + F + 8 * g), d = load8(dy + 8 * g);
        float v[2][8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const Gradient g = backward(load(d.at[i]), load(gate.at[i]), load(up.at[i]));
            v[0][i] = g.gate;
            v[1][i] = g.up;
        }
        store8(dx + 8 * g, pack8<X>(v[0]));
        store8(dx + F + 8 * g, pack8<X>(v[1]));
    }
    for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) {
        const Gradient g = backward(load(dy[c]), load(x[c]), load(x[F + c]));
        store(&dx[c], g.gate);
        store(&dx[F + c], g.up);
    }
}

// Largest absolute values alone. Blocks take every gridDim-th row.
extern "C" __global__ void __launch_bounds__(256) swiglu_amax(float* amax, const X* __restrict__ x, int rows, int F) {
    const int eights = F % 8 == 0 && aligned(x) ? F / 8 : 0;
    float largest = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const X* from = x + (u64)row * 2 * F;
#pragma unroll 4
        for (int g = threadIdx.x; g < eights; g += blockDim.x) {
            const Eight<X> gate = load8(from + 8 * g), up = load8(from + F + 8 * g);
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = forward(load(gate.at[i]), load(up.at[i]));
            largest = fmaxf(largest, largest8(pack8<X>(v)));
        }
        for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) {
            X y;
            store(&y, forward(load(from[c]), load(from[F + c])));
            largest = fmaxf(largest, fabsf(load(y)));
        }
    }
    block_raise(amax, largest);
}

extern "C" __global__ void __launch_bounds__(256) swiglu_backward_amax(float* amax, const X* __restrict__ dy, const X* __restrict__ x,
                                                                       int rows, int F) {
    const int eights = F % 8 == 0 && aligned(dy, x) ? F / 8 : 0;
    float largest = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *from = x + (u64)row * 2 * F, *d = dy + (u64)row * F;
#pragma unroll 2
        for (int g = threadIdx.x; g < eights; g += blockDim.x) {
            const Eight<X> gate = load8(from + 8 * g), up = load8(from + F + 8 * g), dy8 = load8(d + 8 * g);
            float v[2][8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const Gradient g = backward(load(dy8.at[i]), load(gate.at[i]), load(up.at[i]));
                v[0][i] = g.gate;
                v[1][i] = g.up;
            }
            largest = fmaxf(largest, fmaxf(largest8(pack8<X>(v[0])), largest8(pack8<X>(v[1]))));
        }
        for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) {
            const Gradient g = backward(load(d[c]), load(from[c]), load(from[F + c]));
            X dx[2];
            store(&dx[0], g.gate);
            store(&dx[1], g.up);
            largest = fmaxf(largest, fmaxf(fabsf(load(dx[0])), fabsf(load(dx[1]))));
        }
    }
    block_raise(amax, largest);
}
#else
struct Activations {
    const X* x;
    int F;
    bool wide;
    struct Raw { Eight<X> gate, up; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        const X* from = x + (u64)row * 2 * F + column;
        return {fetch8(from, F - column, wide), fetch8(from + F, F - column, wide)};
    }
    __device__ __forceinline__ void values(const Raw& raw, float* v) const {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = forward(load(raw.gate.at[i]), load(raw.up.at[i]));
        round8(v);
    }
};

// Grid (F / 128, T / 128), 256 threads.
extern "C" __global__ void __launch_bounds__(256) swiglu_codes(DESTINATION, const X* x) {
    const Destination to = THE_DESTINATION;
    quantize_tile<4>(to, Activations{x, columns, columns % 8 == 0 && aligned(x)});
}

// A tile of the gates' gradient, one of the ups' and, if `ACTIVATED`, one of the activation itself, in E4M3. F is a multiple of 16.
template <bool ACTIVATED>
__device__ __forceinline__ void backward_tiles(const Destination& to, const Destination& activated, Tile* tiles, const X* dy, const X* x) {
    const int F = to.columns / 2, row0 = first_row(), column0 = blockIdx.x * TILE, column = threadIdx.x % 16 * 8;
    Seen seen, activated_seen;
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep += 2) {
        Eight<X> gate[2], up[2], d[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = row0 + (sweep + k) * 16 + threadIdx.x / 16;
            if (row >= to.rows || column0 + column >= F) continue;
            const X* from = x + (u64)row * to.columns + column0 + column;
            gate[k] = load8(from);
            up[k] = load8(from + F);
            d[k] = load8(dy + (u64)row * F + column0 + column);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = (sweep + k) * 16 + threadIdx.x / 16;
            uint2 eight[3] = {};
            if (row0 + row < to.rows && column0 + column < F) {
                float v[3][8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const Gradient g = backward(load(d[k].at[i]), load(gate[k].at[i]), load(up[k].at[i]));
                    v[0][i] = g.gate;
                    v[1][i] = g.up;
                    if (ACTIVATED) v[2][i] = forward(load(gate[k].at[i]), load(up[k].at[i]));
                }
                round8(v[0]);
                round8(v[1]);
                eight[0] = encode8(v[0], to.scale, seen);
                eight[1] = encode8(v[1], to.scale, seen);
                if (ACTIVATED) {
                    round8(v[2]);
                    eight[2] = encode8<e4m3>(v[2], activated.scale, activated_seen);
                }
            }
            *(uint2*)tiles[0].at(row, column / 4) = eight[0];
            *(uint2*)tiles[1].at(row, column / 4) = eight[1];
            if (ACTIVATED) put(activated, tiles[2], row0, column0, row, column, eight[2]);
            if (to.codes && row0 + row < to.padded_rows && column0 + column < F) {
                unsigned char* at = to.codes + (u64)(row0 + row) * to.padded_columns + column0 + column;
                *(uint2*)at = eight[0];
                *(uint2*)(at + F) = eight[1];
            }
        }
    }
    measure(to, seen);
    // The two halves as destinations of their own, so that a tile ends where its half does.
    Destination half = to;
    half.padded_columns = F;
    flush(half, tiles[0], row0, column0);
    if (half.transposed) half.transposed += (u64)F * to.padded_rows;
    flush(half, tiles[1], row0, column0);
    if (ACTIVATED) {
        flush(activated, tiles[2], row0, column0);
        __syncthreads();
        measure(activated, activated_seen);
    }
}

// Grid (F / 128, T / 128), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 4) swiglu_backward_codes(DESTINATION, const X* dy, const X* x) {
    __shared__ Tile tiles[2];
    const Destination to = THE_DESTINATION;
    backward_tiles<false>(to, to, tiles, dy, x);
}

// The same, with three tiles of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 3)
    swiglu_backward_and_activated_codes(DESTINATION, DESTINATION_OF(activated_), const X* dy, const X* x) {
    extern __shared__ Tile tiles_of_the_launch[];
    const Destination to = THE_DESTINATION, activated = THE_DESTINATION_OF(activated_);
    backward_tiles<true>(to, activated, tiles_of_the_launch, dy, x);
}
#endif
