// A `WORD` has 2 to 16 bytes, and every section of a part consists of whole words. A row of a part has three sections of a, b and c words. A row of
// the matrix has each section `parts` times. Kernels run a grid-stride loop over the words of the parts.
struct Place { u64 part, matrix; };

__device__ Place place(u64 i, u64 rows, int parts, u64 a, u64 b, u64 c) {
    const u64 width = a + b + c, row = i / width, at = i % width, part = row / rows;
    u64 column;
    if (at < a) column = part * a + at;
    else if (at < a + b) column = parts * a + part * b + at - a;
    else column = parts * (a + b) + part * c + at - a - b;
    return {i, row % rows * width * parts + column};
}

extern "C" __global__ void divide_columns(WORD* __restrict__ y, const WORD* __restrict__ x, u64 rows, int parts, u64 a, u64 b, u64 c) {
    for (u64 i = grid_start(); i < rows * parts * (a + b + c); i += grid_step()) {
        const Place p = place(i, rows, parts, a, b, c);
        y[p.part] = x[p.matrix];
    }
}

extern "C" __global__ void join_columns(WORD* __restrict__ y, const WORD* __restrict__ x, u64 rows, int parts, u64 a, u64 b, u64 c) {
    for (u64 i = grid_start(); i < rows * parts * (a + b + c); i += grid_step()) {
        const Place p = place(i, rows, parts, a, b, c);
        y[p.matrix] = x[p.part];
    }
}
