// Accepted rows to the front of the appended window, in place, for all pools of a model in one launch. A thread owns one 16-byte column of a
// pool and walks the path in order. A path's nodes ascend and entry j is node j or later, so reading some entries ahead never meets a
// row that has been written.
#include <stdint.h>

#include "canopy/fault.cuh"

#include "canopy/numeric.cuh"

constexpr int kMostPools = 64;
constexpr int kAhead = 8;

struct CompactArgs {
    uint32_t words;     // 16-byte words of a row
    uint32_t capacity;  // rows of a slot
    uint4* pools[kMostPools];
};
static_assert(sizeof(CompactArgs) == 8 + 8 * kMostPools, "launch.rs CompactArgs");

extern "C" __global__ void __launch_bounds__(128)
    kv_compact(const __grid_constant__ CompactArgs a, const int* lens, const int* slots, const int* rows, const int* cu_rows, const int* cu_nodes) {
    canopy::take_turn();
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.z;
    const int slot = slots[b], context = lens[b], first = cu_rows[b], entries = cu_rows[b + 1] - first - CANOPY_FAULT(missed_node), nodes = cu_nodes[b + 1] - cu_nodes[b];
    if (column >= a.words || slot < 0 || context < 0 || context > (int)a.capacity - nodes) return;
    uint4* window = a.pools[blockIdx.y] + ((size_t)slot * a.capacity + context) * a.words + column;
    for (int from = 0; from < entries; from += kAhead) {
        uint4 held[kAhead];
#pragma unroll
        for (int e = 0; e < kAhead; ++e)
            if (from + e < entries) held[e] = window[(size_t)(rows[first + max(from + e - CANOPY_FAULT(off_by_one), 0)] - cu_nodes[b]) * a.words];
#pragma unroll
        for (int e = 0; e < kAhead; ++e)
            if (from + e < entries) window[(size_t)(from + e) * a.words] = held[e];
    }
}
