// Runs of columns: run i of `from` begins at column `from_first + i * from_step`.

// Sizes are in units of `T`; all runs consist of whole units. Grid (rows). Threads stride over the units of all runs.
template <class T> __device__ __forceinline__ void move(void* to_rows, const void* from_rows, int to_columns, int from_columns, int to_first,
                                                        int to_step, int from_first, int from_step, int count, int width) {
    T* const to = (T*)to_rows + (u64)blockIdx.x * to_columns + to_first;
    const T* const from = (const T*)from_rows + (u64)blockIdx.x * from_columns + from_first;
    for (int c = threadIdx.x; c < count * width; c += blockDim.x) {
        const int i = c / width, at = c - i * width;
        to[i * to_step + at] = from[i * from_step + at];
    }
}

#define PARAMETERS                                                                                                                                \
    void *to, const void *from, int to_columns, int from_columns, int to_first, int to_step, int from_first, int from_step, int count, int width
#define ARGUMENTS to, from, to_columns, from_columns, to_first, to_step, from_first, from_step, count, width

// Moves elements.
extern "C" __global__ void move_columns(PARAMETERS) { move<X>(ARGUMENTS); }
// Moves words of 16 bytes.
extern "C" __global__ void move_wide_columns(PARAMETERS) { move<uint4>(ARGUMENTS); }

// One thread for each eight columns of a row of the sum.
extern "C" __global__ void sum_columns(X* y, const X* x, int rows, int columns, int first, int step, int count, int width) {
    const int across = (width + 7) / 8, i = blockIdx.x * blockDim.x + threadIdx.x, row = i / across, c = i % across * 8;
    if (row >= rows) return;
    x += (u64)row * columns + first + c;
    y += (u64)row * width + c;
    const int valid = min(width - c, 8);
    const bool wide = (width | columns | first | step) % 8 == 0 && aligned(x, y);
    float sum[8] = {};
    for (int i = 0; i < count; i++) {
        float v[8];
        unpack8(fetch8(x + i * step, valid, wide), v);
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] += v[k];
    }
    put8(y, pack8<X>(sum), valid, wide);
}
