// SwiGLU and the attention's output gate: a thread owns one quad of one row.
#include "canopy/fault.cuh"
#include "quad.cuh"

using namespace canopy;

template <typename Out>
__device__ __forceinline__ void swiglu(uint32_t width, uint32_t gate_stride, uint32_t up_stride, const float* gate, const float* up, Out* out) {
    take_turn();
    const uint32_t at = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (at >= width) return;
    gate += (size_t)blockIdx.x * gate_stride;
    up += (size_t)blockIdx.x * up_stride;
    out += (size_t)blockIdx.x * width;
    const bool whole = quads_whole(width, gate, up, out);
    const float4 u = load_quad(up, at, width, whole);
    float4 y = planted_swallow(silu(load_quad(gate, at, width, whole)) * u);
    y.x = planted_ulp(y.x);
    if (CANOPY_FAULT(gap) && blockIdx.x + 1 == gridDim.x) return;
    if (CANOPY_FAULT(overrun) && blockIdx.x + 1 == gridDim.x) store(out + width, 0.f);
    if (blockIdx.x == 0 && at == 0) planted_touch(up);
    store_quad(out, at, width, whole, y);
}

#define CANOPY_SWIGLU(NAME, OUT)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                          \
        NAME(uint32_t width, uint32_t gate_stride, uint32_t up_stride, const float* __restrict__ gate,                         \
             const float* __restrict__ up, OUT* __restrict__ out) {                                                            \
        swiglu<OUT>(width, gate_stride, up_stride, gate, up, out);                                                             \
    }

CANOPY_SWIGLU(glue_swiglu, float)
CANOPY_SWIGLU(glue_swiglu_bf16, __nv_bfloat16)

// Quads never cross a head; the gate follows its head's query in q_proj.
template <typename T>
__device__ __forceinline__ void attn_gate(uint32_t q_heads, uint32_t head_dim, uint32_t q_stride, const T* attn, const float* q_proj,
                                          float* out) {
    take_turn();
    const uint32_t quads = (head_dim + 3) / 4, index = blockIdx.y * blockDim.x + threadIdx.x;
    const uint32_t head = index / quads, at = index % quads * 4;
    if (head >= q_heads) return;
    const size_t first = ((size_t)blockIdx.x * q_heads + head) * head_dim;
    const float* gate = q_proj + (size_t)blockIdx.x * q_stride + (2 * head + 1) * head_dim;
    attn += first;
    out += first;
    const bool whole = quads_whole(head_dim, gate, out), attn_whole = quads_whole(head_dim, attn);
    const float4 x = load_quad(attn, at, head_dim, attn_whole);
    float4 y = planted_swallow(x * sigmoid(load_quad(gate, at, head_dim, whole)));
    y.x = planted_ulp(y.x);
    const bool last = blockIdx.x + 1 == gridDim.x && head + 1 == q_heads;
    if (CANOPY_FAULT(gap) && last) return;
    if (CANOPY_FAULT(overrun) && last) out[head_dim] = 0.f;
    if (blockIdx.x == 0 && index == 0) planted_touch(attn);
    store_quad(out, at, head_dim, whole, y);
}

#define CANOPY_ATTN_GATE(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                          \
        glue_attn_gate_##NAME(uint32_t q_heads, uint32_t head_dim, uint32_t q_stride, const T* __restrict__ attn,              \
                              const float* __restrict__ q_proj, float* __restrict__ out) {                                     \
        attn_gate<T>(q_heads, head_dim, q_stride, attn, q_proj, out);                                                          \
    }

CANOPY_ATTN_GATE(f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_ATTN_GATE(bf16, __nv_bfloat16)
#endif
