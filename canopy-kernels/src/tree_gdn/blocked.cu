// The blocks of the blocked design: tier B.
#include "blocked.cuh"

namespace canopy {

// The twin of `shared` in blocked.rs.
constexpr size_t shared_bytes(int nodes, int columns) {
    const size_t blocks = nodes / 16, words = (blocks + 1) / 2, units = blocks > 8 ? 2 * blocks : blocks * (blocks + 1) / 2;
    const size_t bytes = 2048 * units + nodes * (556 + 4 * words) + 4 * words * columns + 4 * (blocks > 8 ? 3 * blocks : 4 + blocks);
    return (bytes + 15) / 16 * 16;
}

}  // namespace canopy

#define CANOPY_BLOCKED(NODES, COLS, THREADS, BLOCKS)                                                                                    \
    static_assert(sizeof(canopy::Blocked<NODES / 16, COLS, THREADS>) == canopy::shared_bytes(NODES, COLS), "blocked.rs shared");         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tree_gdn_blocked_n##NODES##_v##COLS##_b_bf16(                         \
        BlockedArgs args, const __nv_bfloat16* qkv, const float* gates, const float* state, const int* parents, const uint32_t* masks, \
        const int* cu_nodes, const int* slots, __nv_bfloat16* o, float* u, float* g_cum) {                                             \
        canopy::blocked<NODES / 16, COLS, THREADS>(args, qkv, gates, state, parents, masks, cu_nodes, slots, o, u, g_cum);          \
    }

// At 128 registers a thread, which two blocks an SM need, the compiler spills this one too much for compute capability 8.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
#define CANOPY_BLOCKED_64_64_BLOCKS 1
#else
#define CANOPY_BLOCKED_64_64_BLOCKS 2
#endif

CANOPY_BLOCKED(16, 64, 128, 4)
CANOPY_BLOCKED(64, 64, 256, CANOPY_BLOCKED_64_64_BLOCKS)
#ifndef CANOPY_CONTROLS
CANOPY_BLOCKED(128, 64, 256, 1)
CANOPY_BLOCKED(256, 64, 384, 1)
CANOPY_BLOCKED(32, 32, 256, 1)
CANOPY_BLOCKED(64, 32, 256, 1)
CANOPY_BLOCKED(128, 32, 256, 1)
CANOPY_BLOCKED(256, 32, 384, 1)
CANOPY_BLOCKED(16, 128, 256, 2)
CANOPY_BLOCKED(32, 128, 256, 2)
CANOPY_BLOCKED(64, 128, 256, 2)
CANOPY_BLOCKED(128, 128, 256, 1)
#endif
