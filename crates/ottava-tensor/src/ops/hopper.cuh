// Hopper instructions: copies by the copy engine (TMA) with their barriers, descriptors of wgmma operands, and waits for the products of wgmma.

// A matrix in device memory that the copy engine reads (CUtensorMap).
struct alignas(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Copies a box: STEP bytes of each of a number of rows. Elements beyond the matrix become zeros.
__device__ __forceinline__ void copy_box(void* to, const TensorMap* from, int byte, int row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)), "l"(from), "r"(byte), "r"(row), "r"(shared_address(barrier)) : "memory");
}
// Copies like `copy_box`, but into the shared memory of both blocks of a cluster, at the same address. The copies arrive at the barrier of each
// block.
__device__ __forceinline__ void copy_box_to_both(void* to, const TensorMap* from, int byte, int row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     shared_address(to)), "l"(from), "r"(byte), "r"(row), "r"(shared_address(barrier)), "h"((short)3) : "memory");
}
// Copies `bytes` bytes, a multiple of 16, between addresses that are multiples of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Copies a box to a matrix; elements beyond the matrix are not written. `end_of_writes` ends a group of such copies. `wait_for_reads` waits until all
// groups except the last PENDING have read shared memory, and `wait_for_writes` until all groups have written. Called by one thread, after the barrier that follows
// `show_copies_what_was_written`.
__device__ __forceinline__ void write_box(const TensorMap* to, const void* from, int byte, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(to), "r"(byte), "r"(row), "r"(shared_address(from))
                 : "memory");
}
__device__ __forceinline__ void end_of_writes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0> __device__ __forceinline__ void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
__device__ __forceinline__ void wait_for_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void show_copies_what_was_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Stores four matrices of 8 x 8 16-bit values. Each thread holds two values of a row, in the layout of `wgmma`. Lane l passes the address of row l %
// 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrices(void* to, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
}
// Arrives at the copy of `barrier` in a block of the cluster, without a release: operands of `wgmma` and copies need no ordering, and a release would
// cost a fence of the GPU.
__device__ __forceinline__ void barrier_arrive_at(u64* barrier, u32 block) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(block, barrier)) : "memory");
}

// Returns the descriptor of an operand: rows of 128 bytes, with 16-byte pieces swizzled within groups of eight rows.
__device__ __forceinline__ u64 descriptor(u32 address) { return (u64)(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
__device__ __forceinline__ u64 descriptor(const void* p) { return descriptor(shared_address(p)); }

// Keeps the compiler from moving or delaying computations of `d` across this point.
template <int N> __device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Waits until all groups of products except the last PENDING are complete. The products in `d` must be in a complete group.
template <int PENDING, int N> __device__ __forceinline__ void wait_for_products(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    hold(d);
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
