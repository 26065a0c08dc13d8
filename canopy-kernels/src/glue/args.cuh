// Arguments that launch.rs passes by value.
#pragma once
#include <stdint.h>

namespace canopy {

struct NormArgs {
    uint32_t rows, width;
    float eps;
    float offset;                // added to every weight
    uint32_t heads, gate_stride;  // gated: rows of x in one row of z, and elements between two rows of z
};
static_assert(sizeof(NormArgs) == 24, "NormArgs in launch.rs");

struct RopeArgs {
    uint32_t q_heads, kv_heads, head_dim, half;  // half = rotary_dim / 2
    uint32_t q_head_stride;                      // elements between query heads
    uint32_t q_stride, k_stride, v_stride;       // elements between rows
    float q_eps, k_eps, q_offset, k_offset;
};
static_assert(sizeof(RopeArgs) == 48, "RopeArgs in launch.rs");

}  // namespace canopy
