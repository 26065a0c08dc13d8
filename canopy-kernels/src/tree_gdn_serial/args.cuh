// The C twin of SerialArgs in launch.rs.
#pragma once
#include <stdint.h>

struct SerialArgs {
    uint32_t k_heads;  // Hk
    uint32_t v_heads;  // Hv
    uint32_t advance;  // chain: 1 = the state after the last node goes into the pool
    float scale;       // Dk^-1/2
};
static_assert(sizeof(SerialArgs) == 16, "launch.rs SerialArgs");
