// The C twin of PrefillArgs in launch.rs.
#pragma once
#include <stdint.h>

struct PrefillArgs {
    uint32_t k_heads;      // Hk
    uint32_t v_heads;      // Hv
    uint32_t first_chunk;  // of every sequence, in this launch
    uint32_t chunks;       // records that the scratch holds for a sequence
    float scale;           // Dk^-1/2
};
static_assert(sizeof(PrefillArgs) == 20, "launch.rs PrefillArgs");
