// Grid-stride loop over elements. Every operation rounds as in cpu.rs.
__device__ double natural_logarithm(double x) {
    const i64 bits = __double_as_longlong(x);
    const int exponent = (int)(bits >> 52) - 1023;
    const double mantissa = __longlong_as_double((bits & 0x000FFFFFFFFFFFFFll) | 0x3FF0000000000000ll);
    const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
    double sum = 0.0;
    for (double odd = 23.0; odd > 0.0; odd -= 2.0) sum = sum * square + 1.0 / odd;
    return (double)exponent * 0.6931471805599453 + 2.0 * s * sum;
}

__device__ double quantile(double p) {
    const double q = p - 0.5;
    if (fabs(q) <= 0.425) {
        const double r = 0.180625 - q * q;
        const double numerator = ((59.10937472 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179;
        const double denominator = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0;
        return q * numerator / denominator;
    }
    double r = sqrt(-natural_logarithm(q < 0.0 ? p : 1.0 - p)), x;
    if (r <= 5.0) {
        r = r - 1.6;
        const double numerator = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777;
        x = numerator / ((0.12021132975 * r + 0.73700164250) * r + 1.0);
    } else {
        r = r - 5.0;
        const double numerator = ((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150;
        x = numerator / ((0.012258202635 * r + 0.24197894225) * r + 1.0);
    }
    return q < 0.0 ? -x : x;
}

extern "C" __global__ void normal(float* x, u64 n, float std, u64 seed, u64 first) {
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const double uniform = ((double)(hash(seed ^ hash(first + i)) >> 32) + 0.5) * (1.0 / 4294967296.0);
        x[i] = (float)quantile(uniform) * std;
    }
}
