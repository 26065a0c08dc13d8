// The blocks of the fused design that read the pool only.
#include "fused.cuh"

#define CANOPY_FUSED(NODES, COLS, THREADS, BLOCKS, TIER, SPLIT, OUT, T)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tree_gdn_fused_n##NODES##_v##COLS##_##TIER##_##OUT(                  \
        FusedArgs args, const __nv_bfloat16* qkv, const float* gates, const float* state, const int* cu_nodes, const int* slots,       \
        const uint32_t* plans, const int* plan_at, T* o, float* u, float* g_cum) {                                                    \
        canopy::fused<NODES, COLS, THREADS, SPLIT, T>(args, canopy::Committed{}, qkv, gates, state, cu_nodes, slots, plans, plan_at,   \
                                                      o, u, g_cum);                                                                   \
    }

#define CANOPY_FUSED_TIERS(NODES, COLS, THREADS, BLOCKS)                         \
    CANOPY_FUSED(NODES, COLS, THREADS, BLOCKS, a, true, f32, float)              \
    CANOPY_FUSED(NODES, COLS, THREADS, BLOCKS, b, false, bf16, __nv_bfloat16)

CANOPY_FUSED_TIERS(64, 64, 256, 2)
#ifndef CANOPY_CONTROLS
CANOPY_FUSED_TIERS(16, 32, 128, 4)
CANOPY_FUSED_TIERS(32, 32, 256, 2)
CANOPY_FUSED_TIERS(64, 32, 256, 2)
CANOPY_FUSED_TIERS(128, 32, 256, 2)
CANOPY_FUSED_TIERS(256, 32, 256, 1)
CANOPY_FUSED_TIERS(128, 64, 256, 2)
CANOPY_FUSED_TIERS(16, 128, 256, 2)
CANOPY_FUSED_TIERS(32, 128, 256, 2)
CANOPY_FUSED_TIERS(64, 128, 256, 2)
CANOPY_FUSED_TIERS(128, 128, 512, 1)
CANOPY_FUSED_TIERS(256, 64, 512, 1)
#endif
