// Adds the checksum of `x` to `sum`. Threads stride over the 64-bit words of `x`, and each warp adds its sum to `sum` once.
extern "C" __global__ void __launch_bounds__(256) checksum(u64* sum, const unsigned char* x, u64 bytes) {
    const u64 whole = bytes / 8, words = (bytes + 7) / 8;
    const bool wide = (u64(x) & 7) == 0;
    u64 mine = 0;
    for (u64 i = grid_start(); i < words; i += grid_step()) {
        u64 word = 0;
        if (wide && i < whole) {
            word = ((const u64*)x)[i];
        } else {
            // The last word is padded with zeros. Slices may start at any element.
            for (u64 at = 8 * i; at < bytes && at < 8 * i + 8; at++) word |= (u64)x[at] << (8 * (at - 8 * i));
        }
        mine += hash(word + i * 0x9E3779B97F4A7C15ull);
    }
    // Integers have the same sum in any order.
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}
