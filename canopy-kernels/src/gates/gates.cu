// gates: one thread per (packed row, value head).
#include "gates.cuh"

#define CANOPY_GATES(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(128) gates_##NAME(uint32_t rows, uint32_t v_heads, const T* ab,           \
                                                                   const float* a_log, const float* dt_bias, float* out) { \
        canopy::take_turn();                                                                                               \
        const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;                                                         \
        if (at >= rows * v_heads) return;                                                                                  \
        canopy::Gates<T>{rows, v_heads, ab, a_log, dt_bias, out}(at / v_heads, at % v_heads);                              \
    }

CANOPY_GATES(f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_GATES(bf16, __nv_bfloat16)
#endif
