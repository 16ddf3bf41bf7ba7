// Each block leaves one partial sum of squares.
extern "C" __global__ void sum_of_squares(double* partial, const float* x, u64 n) {
    double sum = 0.0;
    for (u64 i = grid_start(); i < n; i += grid_step()) sum += (double)x[i] * (double)x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block.
extern "C" __global__ void root_of_sum(float* norm, const double* partial, int n) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = (float)sqrt(sum);
}
