// Norm of every query and key head, then rotate-half at the row's position. A warp owns one head of one row; the row's cosines and
// sines are computed once per CTA of four heads. Angles are reduced in f64, since f32 has too few digits for an angle of 1e5 radians.
// The appending form rounds queries to the pools' type and writes keys and values (a third kind of head, copied) to their pool rows.
#include "args.cuh"
#include "canopy/fault.cuh"
#include "quad.cuh"

namespace canopy {

constexpr int kHeadDim = 256;  // widest head
constexpr int kKept = kHeadDim / 128;
constexpr int kWarps = 4;

// Cosine and sine of an f32 angle below 2^30, each within 0.51 ulp or 1e-10: glue/rotary.rs, the same series.
__device__ __forceinline__ void cos_sin(float angle, float* cosine, float* sine) {
    // Adding 1.5 * 2^52 rounds to the nearest integer and leaves it in the low bits.
    const double round = 6755399441055744.0;
    const double shifted = fma((double)angle, 0.63661977236758134308, round), quarter = shifted - round;
    const unsigned turn = (unsigned)__double2loint(shifted);
    const double r = fma(-quarter, 6.123233995736766e-17, fma(-quarter, 1.57079632679489661923, (double)angle)), z = r * r;
    double s = -1.0 / 39916800.0;
    s = fma(s, z, 1.0 / 362880.0);
    s = fma(s, z, -1.0 / 5040.0);
    s = fma(s, z, 1.0 / 120.0);
    s = fma(s, z, -1.0 / 6.0);
    s = fma(r * z, s, r);
    double c = 1.0 / 479001600.0;
    c = fma(c, z, -1.0 / 3628800.0);
    c = fma(c, z, 1.0 / 40320.0);
    c = fma(c, z, -1.0 / 720.0);
    c = fma(c, z, 1.0 / 24.0);
    c = fma(c, z, -0.5);
    c = fma(z, c, 1.0);
    const double odd_s = turn & 1 ? c : s, odd_c = turn & 1 ? s : c;
    *sine = (float)(turn & 2 ? -odd_s : odd_s);
    *cosine = (float)((turn + 1) & 2 ? -odd_c : odd_c);
}

template <typename T>
struct Head {
    const float* x;
    const float* weight;
    T* out;
    float eps, offset;
};

// `k` and `v` are null for a row that goes nowhere; `v_proj` is null unless values are appended.
template <typename T>
__device__ __forceinline__ void rope_head(const RopeArgs& a, const float* q_proj, const float* k_proj, const float* v_proj,
                                          const float* q_weight, const float* k_weight, const float* inv_freq, int position, T* q,
                                          T* k, T* v) {
    __shared__ __align__(16) float normed[kWarps][kHeadDim];
    __shared__ float cosines[kHeadDim / 2], sines[kHeadDim / 2];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = a.head_dim, head = blockIdx.y * kWarps + warp;
    const bool query = head < a.q_heads, key = !query && head < a.q_heads + a.kv_heads;
    const uint32_t kv = (head - a.q_heads) % a.kv_heads;
    const Head<T> h = query ? Head<T>{q_proj + (size_t)head * a.q_head_stride, q_weight, q + (size_t)head * d, a.q_eps, a.q_offset}
                            : Head<T>{k_proj + (size_t)kv * d, k_weight, k + (size_t)kv * d, a.k_eps, a.k_offset};
    const bool active = query || (key && k != nullptr);
    float4 kept[kKept], factor[kKept];
    if (active) {
        const bool whole = quads_whole(d, h.x, h.weight);
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            kept[j] = load_quad(h.x, (lane + 32 * j) * 4, d, whole);
            factor[j] = load_quad(h.weight, (lane + 32 * j) * 4, d, whole);
        }
    }
    // A head is at most as wide as the CTA has threads for its pairs. The head's loads are under way meanwhile.
    if (threadIdx.x < a.half) {
        cos_sin(__fmul_rn((float)(position + CANOPY_FAULT(off_by_one)), inv_freq[threadIdx.x]), &cosines[threadIdx.x], &sines[threadIdx.x]);
    }
    if (active) {
        float total = 0.f;
#pragma unroll
        for (int j = 0; j < kKept; ++j) total = dot4(kept[j], kept[j], total);
        const float inverse = planted_ulp(1.f / sqrtf(planted_half(warp_sum(total)) / (float)d + h.eps));
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const float4 w = factor[j] + make_float4(h.offset, h.offset, h.offset, h.offset);
            *reinterpret_cast<float4*>(normed[warp] + (lane + 32 * j) * 4) = scaled(kept[j], inverse) * w;
        }
    }
    __syncthreads();
    if (active) {
        const float* n = normed[warp];
#pragma unroll
        for (int j = 0; j < kHeadDim / 32; ++j) {
            const uint32_t e = lane + 32 * j;
            if (e >= d) break;
            if (CANOPY_FAULT(gap) && query && e + 1 == d) break;
            if (threadIdx.x == 0) planted_touch(q_proj);
            float y = n[e];
            if (e < a.half) {
                y = y * cosines[e] - n[e + a.half] * sines[e];
            } else if (e < 2 * a.half) {
                y = y * cosines[e - a.half] + n[e - a.half] * sines[e - a.half];
            }
            store(h.out + e, y);
        }
    } else if (v_proj != nullptr && v != nullptr && head >= a.q_heads + a.kv_heads && head < a.q_heads + 2 * a.kv_heads) {
        for (uint32_t e = lane; e < d; e += 32) store(v + (size_t)kv * d + e, v_proj[(size_t)kv * d + e]);
    }
}

}  // namespace canopy

extern "C" __global__ void __launch_bounds__(canopy::kWarps * 32)
    glue_qk_norm_rope(canopy::RopeArgs a, const float* __restrict__ q_proj, const float* __restrict__ k_proj,
                      const float* __restrict__ q_weight, const float* __restrict__ k_weight, const float* __restrict__ inv_freq,
                      const int* __restrict__ positions, float* __restrict__ q, float* __restrict__ k) {
    canopy::take_turn();
    const size_t row = blockIdx.x, width = (size_t)a.head_dim * row;
    canopy::rope_head<float>(a, q_proj + row * a.q_stride, k_proj + row * a.k_stride, nullptr, q_weight, k_weight, inv_freq,
                             positions[row], q + width * a.q_heads, k + width * a.kv_heads, nullptr);
}

#define CANOPY_ROPE_APPEND(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(canopy::kWarps * 32) glue_qk_norm_rope_append_##NAME(                         \
        canopy::RopeArgs a, const float* __restrict__ q_proj, const float* __restrict__ k_proj, const float* __restrict__ v_proj, \
        const float* __restrict__ q_weight, const float* __restrict__ k_weight, const float* __restrict__ inv_freq,            \
        const int* __restrict__ positions, const int* __restrict__ destinations, T* __restrict__ q, T* __restrict__ keys,      \
        T* __restrict__ values) {                                                                                              \
        canopy::take_turn();                                                                                                   \
        const size_t row = blockIdx.x, pool_row = (size_t)a.head_dim * a.kv_heads;                                             \
        const int to = destinations[row];                                                                                      \
        canopy::rope_head<T>(a, q_proj + row * a.q_stride, k_proj + row * a.k_stride, v_proj + row * a.v_stride, q_weight,     \
                             k_weight, inv_freq, positions[row], q + row * a.q_heads * a.head_dim,                             \
                             to < 0 ? nullptr : keys + to * pool_row, to < 0 ? nullptr : values + to * pool_row);              \
    }

CANOPY_ROPE_APPEND(f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_ROPE_APPEND(bf16, __nv_bfloat16)
#endif
