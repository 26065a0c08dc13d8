// The blocks of the fused design that commit the path of the round before while they load the state.
#include "fused.cuh"

#define CANOPY_FUSED_COMMIT(NODES, COLS, THREADS, BLOCKS, TIER, SPLIT, OUT, T)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tree_gdn_fused_commit_n##NODES##_v##COLS##_##TIER##_##OUT(           \
        FusedArgs args, const __nv_bfloat16* last_qkv, const float* last_gates, const float* last_u, const int* path,                  \
        const int* cu_path, const __nv_bfloat16* qkv, const float* gates, float* state, const int* cu_nodes, const int* slots,         \
        const uint32_t* plans, const int* plan_at, T* o, float* u, float* g_cum) {                                                    \
        const canopy::LastPath last{last_qkv, last_gates, last_u, path, cu_path};                                                     \
        canopy::fused<NODES, COLS, THREADS, SPLIT, T>(args, last, qkv, gates, state, cu_nodes, slots, plans, plan_at, o, u, g_cum);    \
    }

#define CANOPY_FUSED_COMMIT_TIERS(NODES, COLS, THREADS, BLOCKS)                         \
    CANOPY_FUSED_COMMIT(NODES, COLS, THREADS, BLOCKS, a, true, f32, float)              \
    CANOPY_FUSED_COMMIT(NODES, COLS, THREADS, BLOCKS, b, false, bf16, __nv_bfloat16)

#ifdef CANOPY_CONTROLS
CANOPY_FUSED_COMMIT(16, 32, 128, 4, a, true, f32, float)
CANOPY_FUSED_COMMIT(32, 32, 256, 2, a, true, f32, float)
CANOPY_FUSED_COMMIT(64, 32, 256, 2, a, true, f32, float)
#else
CANOPY_FUSED_COMMIT_TIERS(16, 32, 128, 4)
CANOPY_FUSED_COMMIT_TIERS(32, 32, 256, 2)
CANOPY_FUSED_COMMIT_TIERS(64, 32, 256, 2)
CANOPY_FUSED_COMMIT_TIERS(128, 32, 256, 2)
CANOPY_FUSED_COMMIT_TIERS(256, 32, 256, 1)
CANOPY_FUSED_COMMIT_TIERS(16, 128, 256, 2)
CANOPY_FUSED_COMMIT_TIERS(32, 128, 256, 2)
CANOPY_FUSED_COMMIT_TIERS(64, 128, 256, 2)
CANOPY_FUSED_COMMIT_TIERS(128, 128, 512, 1)
#endif
