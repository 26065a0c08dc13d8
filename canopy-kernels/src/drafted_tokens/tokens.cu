// drafted_tokens: a thread a node.
#include <stdint.h>

#include "canopy/fault.cuh"
#include "canopy/numeric.cuh"

extern "C" __global__ void __launch_bounds__(128)
    drafted_tokens(uint32_t nodes, uint32_t k, const uint32_t* __restrict__ best, const int* __restrict__ sources, uint32_t* tokens) {
    canopy::take_turn();
    const uint32_t node = blockIdx.x * blockDim.x + threadIdx.x;
    if (node >= nodes) return;
    const int source = sources[node];
    if (source >= 0) {
        const uint32_t row = source / k, rank = source % k;
        tokens[node] = best[(size_t)row * (2 + 2 * k) + 2 + k + (CANOPY_FAULT(off_by_one) ? (rank + 1) % k : rank)];
    }
    if (node == 0) canopy::planted_touch(best);
}
