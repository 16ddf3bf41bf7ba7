// Grid (strips of rows, channels / 8 / threads). A thread walks down a strip of `strip` rows, for eight neighbouring channels, and keeps the last inputs
// in registers. TAPS is the number of taps.

#define PAST (TAPS - 1)

// The number of rows that a thread loads before it computes the first row.
#define FORWARD_LOADS 4
#define BACKWARD_LOADS 2

// A matrix with rows of C elements, and the columns that a thread reads and writes: `valid` columns from `c` on, eight aligned columns with WIDE.
template <bool WIDE> struct Columns {
    int C, c, valid;
    __device__ __forceinline__ Eight<X> load(const X* x, u64 row) const { return fetch8(x + row * C + c, valid, WIDE); }
    __device__ __forceinline__ void store(X* y, u64 row, const float* v) const { put8(y + row * C + c, pack8<X>(v), valid, WIDE); }
    __device__ __forceinline__ void copy(X* y, u64 row, const Eight<X>& v) const { put8(y + row * C + c, v, valid, WIDE); }
};

// The factors and the bias of eight channels. A missing bias is zero.
struct Parameters {
    float weight[TAPS][8], bias[8];

    template <bool WIDE> __device__ __forceinline__ void read(const X* weights, const X* biases, const Columns<WIDE>& columns) {
        // The factors of a channel are neighbours.
        const X* const from = weights + (u64)columns.c * TAPS;
        float factors[8 * TAPS];
#pragma unroll
        for (int i = 0; i < TAPS; i++) unpack8(fetch8(from + 8 * i, columns.valid * TAPS - 8 * i, WIDE), factors + 8 * i);
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) weight[i][j] = factors[j * TAPS + i];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) bias[j] = 0.0f;
        if (biases) unpack8(fetch8(biases + columns.c, columns.valid, WIDE), bias);
    }

    // Returns the sum of channel `j`, for the inputs `v` of the taps, in the order of cpu.rs.
    __device__ __forceinline__ float sum(const float (&v)[TAPS][8], int j) const {
        float sum = bias[j];
#pragma unroll
        for (int i = 0; i < TAPS; i++) sum += weight[i][j] * v[i][j];
        return sum;
    }
};

// Moves each row to the row before it. The last row is overwritten next.
__device__ __forceinline__ void shift(float (&v)[TAPS][8]) {
#pragma unroll
    for (int i = 0; i < PAST; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = v[i + 1][j];
    }
}

// The states of sequences, `[slots, PAST, C]`.
struct States {
    X* values;
    const int *slots, *past;

    // Reads the state before a segment into the last rows of `v`, and replaces it by the state after the segment. All reads of the state come before the
    // first write. No other thread accesses these channels of the state.
    template <bool WIDE>
    __device__ __forceinline__ void replace(const Segment& segment, const X* x, const Columns<WIDE>& columns, float (&v)[TAPS][8]) const {
        const u64 row = (u64)slots[segment.number] * PAST;
        const int length = segment.end - segment.first;
        Eight<X> before[TAPS] = {};
        if (past[segment.number] > 0) {
#pragma unroll
            for (int i = 0; i < PAST; i++) before[i] = columns.load(values, row + i);
        }
#pragma unroll
        for (int i = 0; i < PAST; i++) {
            unpack8(before[i], v[i + 1]);
            Eight<X> after = {};
            if (length + i >= PAST) after = columns.load(x, segment.end - PAST + i);
            // In a shorter segment, a row of the old state moves by the length of the segment.
#pragma unroll
            for (int from = i + 1; from < PAST; from++)
                if (length + i == from) after = before[from];
            columns.copy(values, row + i, after);
        }
    }
};

// Computes LOADS rows from row `t` on.
template <int LOADS, bool WIDE>
__device__ __forceinline__ void convolve_rows(X* y, const X* x, const Parameters& parameters, const Columns<WIDE>& columns, int t,
                                              float (&v)[TAPS][8]) {
    Eight<X> raw[LOADS];
#pragma unroll
    for (int l = 0; l < LOADS; l++) raw[l] = columns.load(x, t + l);
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        shift(v);
        unpack8(raw[l], v[PAST]);
        float result[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float p = parameters.sum(v, j);
            result[j] = p * sigmoid(p);
        }
        columns.store(y, t + l, result);
    }
}

// The first PAST rows of a segment are computed by the thread of the segment's first row, also if they are in the next strip. So one thread reads and
// writes the state of a segment.
template <bool WIDE>
__device__ __forceinline__ void convolve(X* y, const X* x, const X* weight, const X* bias, const Segments& segments, const States& states,
                                         const Columns<WIDE>& columns, int strip) {
    Parameters parameters;
    parameters.read(weight, bias, columns);
    int t = blockIdx.x * strip;
    const int end = min(t + strip, segments.rows);
    while (t < end) {
        const Segment segment = segments.of(t);
        int to = min(segment.end, end);
        if (segment.number < 0) {
            for (; t < to; t++) columns.copy(y, t, Eight<X>{});
            continue;
        }
        float v[TAPS][8] = {};
        if (t == segment.first) {
            to = max(to, min(segment.end, t + PAST));
            if (states.values) states.replace(segment, x, columns, v);
        } else {
            t = max(t, min(segment.end, segment.first + PAST));
            if (t < to) {
#pragma unroll
                for (int i = 0; i < PAST; i++) unpack8(columns.load(x, t - PAST + i), v[i + 1]);
            }
        }
        for (; t + FORWARD_LOADS <= to; t += FORWARD_LOADS) convolve_rows<FORWARD_LOADS>(y, x, parameters, columns, t, v);
        for (; t < to; t++) convolve_rows<1>(y, x, parameters, columns, t, v);
    }
}

// The pointers are not `__restrict__`, because reads could then move before the wait.
extern "C" __global__ void __launch_bounds__(256, 2) causal_conv(X* y, const X* x, const X* weight, const X* bias, const int* at, int count,
                                                              X* states, const int* slots, const int* past, int rows, int C, int strip) {
    start_successors();
    wait_for_predecessors();
    const int c = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= C) return;
    const Segments segments = {at, count, rows};
    const States of = {states, slots, past};
    if (C % 8 == 0 && aligned(y, x, weight, bias, states)) convolve(y, x, weight, bias, segments, of, Columns<true>{C, c, 8}, strip);
    else convolve(y, x, weight, bias, segments, of, Columns<false>{C, c, min(8, C - c)}, strip);
}

// The partial sums of eight channels over a strip of rows.
struct Sums {
    float weight[TAPS][8], bias[8];

    // Writes to row `strip` of the partial sums, `[strips, C, TAPS]` and `[strips, C]`. `of_bias` may be null.
    template <bool WIDE> __device__ __forceinline__ void write(float* of_weight, float* of_bias, const Columns<WIDE>& columns, u64 strip) const {
        const u64 at = strip * columns.C + columns.c;
        Eight<float> sums[TAPS];
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) sums[(j * TAPS + i) / 8].at[(j * TAPS + i) % 8] = weight[i][j];
        }
#pragma unroll
        for (int i = 0; i < TAPS; i++) put8(of_weight + at * TAPS + 8 * i, sums[i], columns.valid * TAPS - 8 * i, WIDE);
        if (of_bias) put8(of_bias + at, pack8<float>(bias), columns.valid, WIDE);
    }
};

// The inputs and outputs of a step of backward.
struct Gradients {
    X* dx;
    const X *dy, *x;
};

// Walks down the rows `from..to` of a segment. The rows of the segment after `to` also contribute to `dx`, but their sums belong to the next strip.
template <bool WIDE>
__device__ __forceinline__ void walk_back(const Gradients& of, const Parameters& parameters, const Columns<WIDE>& columns,
                                          const Segment& segment, int from, int to, Sums& sums) {
    // The inputs of the taps, and the gradients by the sums of the last TAPS rows.
    float v[TAPS][8] = {}, d[TAPS][8] = {};
#pragma unroll
    for (int i = 0; i < PAST; i++)
        if (from - PAST + i >= segment.first) unpack8(columns.load(of.x, from - PAST + i), v[i + 1]);
    for (int t = from; t < to + PAST; t += BACKWARD_LOADS) {
        Eight<X> xs[BACKWARD_LOADS], dys[BACKWARD_LOADS];
#pragma unroll
        for (int l = 0; l < BACKWARD_LOADS; l++) {
            // The gradient by the sums is zero after the segment, so the last row can be read instead.
            const int row = min(t + l, segment.end - 1);
            xs[l] = columns.load(of.x, row);
            dys[l] = columns.load(of.dy, row);
        }
#pragma unroll
        for (int l = 0; l < BACKWARD_LOADS; l++) {
            const int row = t + l;
            if (row >= to + PAST) break;
            shift(v);
            shift(d);
            unpack8(xs[l], v[PAST]);
            unpack8(dys[l], d[PAST]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float slope = silu_and_slope(parameters.sum(v, j)).slope;
                d[PAST][j] = row < segment.end ? d[PAST][j] * slope : 0.0f;
            }
            if (row < to) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
#pragma unroll
                    for (int i = 0; i < TAPS; i++) sums.weight[i][j] = fmaf(d[PAST][j], v[i][j], sums.weight[i][j]);
                    sums.bias[j] += d[PAST][j];
                }
            }
            if (row - PAST >= from) {
                float result[8] = {};
#pragma unroll
                for (int j = 0; j < 8; j++) {
#pragma unroll
                    for (int i = 0; i < TAPS; i++) result[j] += parameters.weight[i][j] * d[PAST - i][j];
                }
                columns.store(of.dx, row - PAST, result);
            }
        }
    }
}

template <bool WIDE>
__device__ __forceinline__ void backward(const Gradients& of, float* of_weight, float* of_bias, const X* weight, const X* bias,
                                         const Segments& segments, const Columns<WIDE>& columns, int strip) {
    Parameters parameters;
    parameters.read(weight, bias, columns);
    Sums sums = {};
    int t = blockIdx.x * strip;
    const int end = min(t + strip, segments.rows);
    while (t < end) {
        const Segment segment = segments.of(t);
        const int to = min(segment.end, end);
        if (segment.number >= 0) walk_back(of, parameters, columns, segment, t, to, sums);
        else
            for (int row = t; row < to; row++) columns.copy(of.dx, row, Eight<X>{});
        t = to;
    }
    sums.write(of_weight, of_bias, columns, blockIdx.x);
}

// 128 threads per block.
extern "C" __global__ void __launch_bounds__(128, 3)
    causal_conv_backward(X* dx, float* partial_weight, float* partial_bias, const X* dy, const X* x, const X* weight, const X* bias,
                         const int* at, int count, int rows, int C, int strip) {
    const int c = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= C) return;
    const Segments segments = {at, count, rows};
    const Gradients of = {dx, dy, x};
    if (C % 8 == 0 && aligned(dx, partial_weight, partial_bias, dy, x, weight, bias))
        backward(of, partial_weight, partial_bias, weight, bias, segments, Columns<true>{C, c, 8}, strip);
    else backward(of, partial_weight, partial_bias, weight, bias, segments, Columns<false>{C, c, min(8, C - c)}, strip);
}
