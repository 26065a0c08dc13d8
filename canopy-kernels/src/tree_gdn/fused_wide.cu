// The blocks of the fused design for f32 rows, f32-class: q, k and S0 in f32, three tf32 products in place of one.
#include "fused.cuh"

#define CANOPY_FUSED_WIDE(NODES, COLS, THREADS, BLOCKS)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tree_gdn_fused_wide_n##NODES##_v##COLS##_a_f32(                      \
        FusedArgs args, const float* qkv, const float* gates, const float* state, const int* cu_nodes, const int* slots,               \
        const uint32_t* plans, const int* plan_at, float* o, float* u, float* g_cum) {                                                \
        canopy::fused<NODES, COLS, THREADS, false, float>(args, canopy::Committed{}, qkv, gates, state, cu_nodes, slots, plans,        \
                                                          plan_at, o, u, g_cum);                                                      \
    }

CANOPY_FUSED_WIDE(16, 64, 128, 2)
CANOPY_FUSED_WIDE(32, 64, 256, 1)
CANOPY_FUSED_WIDE(64, 64, 256, 1)
#ifndef CANOPY_CONTROLS
CANOPY_FUSED_WIDE(16, 32, 128, 2)
CANOPY_FUSED_WIDE(32, 32, 256, 1)
CANOPY_FUSED_WIDE(64, 32, 256, 1)
CANOPY_FUSED_WIDE(128, 32, 256, 1)
CANOPY_FUSED_WIDE(128, 64, 256, 1)
#endif
