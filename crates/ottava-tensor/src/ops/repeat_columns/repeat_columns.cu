// A row has three sections of `columns` columns. In the repeated matrix, each block of `width` columns occurs `times` times. Kernels run a
// grid-stride loop over the elements of the matrix without repetitions.
struct Section { int columns, width, times; };

// The first repetition of an element, the distance between repetitions, and their number.
struct Place { u64 first; int stride, times; };

__device__ Place place(u64 i, Section a, Section b, Section c) {
    const int all = a.columns + b.columns + c.columns, repeated = a.columns * a.times + b.columns * b.times + c.columns * c.times;
    int column = i % all, begin = 0;
    Section in = a;
    if (column >= a.columns) {
        column -= a.columns, begin = a.columns * a.times, in = b;
        if (column >= b.columns) column -= b.columns, begin += b.columns * b.times, in = c;
    }
    return {i / all * repeated + begin + column / in.width * in.width * in.times + column % in.width, in.width, in.times};
}

#define SECTIONS int ca, int wa, int ta, int cb, int wb, int tb, int cc, int wc, int tc

extern "C" __global__ void repeat_columns(X* __restrict__ y, const X* __restrict__ x, u64 rows, SECTIONS) {
    const Section a = {ca, wa, ta}, b = {cb, wb, tb}, c = {cc, wc, tc};
    for (u64 i = grid_start(); i < rows * (ca + cb + cc); i += grid_step()) {
        const Place p = place(i, a, b, c);
        for (int time = 0; time < p.times; time++) y[p.first + time * p.stride] = x[i];
    }
}

extern "C" __global__ void repeat_columns_backward(X* __restrict__ dx, const X* __restrict__ dy, u64 rows, SECTIONS) {
    const Section a = {ca, wa, ta}, b = {cb, wb, tb}, c = {cc, wc, tc};
    for (u64 i = grid_start(); i < rows * (ca + cb + cc); i += grid_step()) {
        const Place p = place(i, a, b, c);
        float sum = 0.0f;
        for (int time = 0; time < p.times; time++) sum += load(dy[p.first + time * p.stride]);
        store(&dx[i], sum);
    }
}
