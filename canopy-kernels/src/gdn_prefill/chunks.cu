// The blocks of gdn_prefill's second launch: on Hopper a pair of warps a sixteen columns while heads are few, one warp while they are
// many; one stage where shared memory is small.
#include "chunks.cuh"

#define CANOPY_CHUNKS(NAME, COLS, PAIRED, STAGES, TIER, SPLIT, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(COLS / 16 * (PAIRED ? 64 : 32), 1) gdn_prefill_chunks_v##COLS##_##NAME##_##TIER(      \
        PrefillArgs args, const __nv_bfloat16* qkv, float* state, const int* cu_rows, const int* slots, const char* scratch, T* o) {   \
        canopy::chunks<COLS, PAIRED, SPLIT, STAGES, T>(args, qkv, state, cu_rows, slots, scratch, o);                                  \
    }

#define CANOPY_CHUNKS_TIERS(NAME, COLS, PAIRED, STAGES)              \
    CANOPY_CHUNKS(NAME, COLS, PAIRED, STAGES, a, true, float)        \
    CANOPY_CHUNKS(NAME, COLS, PAIRED, STAGES, b, false, __nv_bfloat16)

CANOPY_CHUNKS_TIERS(small, 64, false, 1)
#ifndef CANOPY_CONTROLS
CANOPY_CHUNKS_TIERS(pairs, 32, true, 2)
CANOPY_CHUNKS_TIERS(pairs, 64, true, 2)
CANOPY_CHUNKS_TIERS(alone, 128, false, 2)
#endif
