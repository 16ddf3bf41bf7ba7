// Sums over the ranks of a group, whose GPUs write to each other's memory.
//
// A packet of 16 bytes has two words of values, each beside the number of the call. A store of eight bytes is not divided, so a reader that sees the number
// of the call beside a word has the word of this call: packets need no fences and no flags. This is the protocol LL of NCCL.
//
// Each block has its own region of the inboxes and its own number of calls. Consecutive calls use different halves. A rank that sends the parts of call
// i + 2 has received parts of call i + 1 from each other rank, which that rank sent after its call i had ended, so the half is no longer read.

#define VALUES (8 / (int)sizeof(X))            // of a packet
#define PACKETS (THREADS * EACH)               // of a block

// The packets of a rank's inbox that `source` writes for this block.
__device__ __forceinline__ uint4* packets(u64 inbox, u32 call, int source, int ranks) {
    return (uint4*)inbox + (((u64)(call & 1) * ranks + source) * BLOCKS + blockIdx.x) * PACKETS;
}
__device__ __forceinline__ void send(uint4* to, uint2 values, u32 call) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(call), "r"(values.y), "r"(call) : "memory");
}
// Waits for the packet of a call.
__device__ __forceinline__ uint2 receive(const uint4* from, u32 call) {
    uint4 packet;
    do asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w) : "l"(from) : "memory");
    while (packet.y != call || packet.w != call);
    return make_uint2(packet.x, packet.z);
}
// The values of a packet. The last packet may have fewer.
union Values {
    uint2 words;
    X values[VALUES];
};
__device__ __forceinline__ Values read(const X* x, u64 at, u64 n, bool whole) {
    Values v = {};
    if (whole) v.words = *(const uint2*)(x + at);
    else
        for (int i = 0; i < VALUES; i++)
            if (at + i < n) v.values[i] = x[at + i];
    return v;
}

// Computes y = addend + the sum of x over the ranks, added in their order and rounded once.
extern "C" __global__ void __launch_bounds__(THREADS) sum_in_one_shot(X* y, const X* x, const X* addend, u32* calls, const u64* inboxes, int rank, int ranks, u64 n) {
    start_successors();
    const u64 count = (n + VALUES - 1) / VALUES, each = (count + gridDim.x - 1) / gridDim.x;
    const u64 first = blockIdx.x * each, end = min(first + each, count);
    const u64 own = inboxes[rank];
    const bool is_aligned = aligned(y, x) && aligned(addend);
    wait_for_predecessors();
    const u32 call = calls[blockIdx.x] + 1;
    Values part[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u64 p = first + i * THREADS + threadIdx.x;
        if (p >= end) continue;
        part[i] = read(x, p * VALUES, n, is_aligned && (p + 1) * VALUES <= n);
        for (int other = 1; other < ranks; other++) {
            const int to = (rank + other) % ranks;
            send(packets(inboxes[to], call, rank, ranks) + (p - first), part[i].words, call);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u64 p = first + i * THREADS + threadIdx.x;
        if (p >= end) continue;
        const bool whole = is_aligned && (p + 1) * VALUES <= n;
        float sum[VALUES];
        for (int source = 0; source < ranks; source++) {
            Values v = part[i];
            if (source != rank) v.words = receive(packets(own, call, source, ranks) + (p - first), call);
#pragma unroll
            for (int k = 0; k < VALUES; k++) sum[k] = source ? sum[k] + load(v.values[k]) : load(v.values[k]);
        }
        if (addend) {
            const Values v = read(addend, p * VALUES, n, whole);
#pragma unroll
            for (int k = 0; k < VALUES; k++) sum[k] += load(v.values[k]);
        }
        Values result;
#pragma unroll
        for (int k = 0; k < VALUES; k++) store(&result.values[k], sum[k]);
        if (whole) *(uint2*)(y + p * VALUES) = result.words;
        else
            for (int k = 0; k < VALUES; k++)
                if (p * VALUES + k < n) y[p * VALUES + k] = result.values[k];
    }
    // All threads have read the number of the call.
    __syncthreads();
    if (threadIdx.x == 0) calls[blockIdx.x] = call;
}
