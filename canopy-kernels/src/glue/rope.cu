// Norm of every query and key head, then rotate-half at the row's position. A warp owns one head of one row; the row's cosines and
// sines are computed once per CTA of four heads. Angles are reduced in f64, since an f32 reduction is off by radians at position 1e5.
#include "args.cuh"
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

struct Head {
    const float* x;
    const float* weight;
    float* out;
    float eps, offset;
};

// The normed head to shared memory.
__device__ __forceinline__ void norm_head(const Head& h, uint32_t d, uint32_t lane, float* normed) {
    const bool whole = quads_whole(d, h.x, h.weight);
    float4 kept[kKept], factor[kKept];
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
        kept[j] = load_quad(h.x, (lane + 32 * j) * 4, d, whole);
        factor[j] = load_quad(h.weight, (lane + 32 * j) * 4, d, whole);
    }
#pragma unroll
    for (int j = 0; j < kKept; ++j) total = dot4(kept[j], kept[j], total);
    const float inverse = 1.f / sqrtf(warp_sum(total) / (float)d + h.eps);
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
        const float4 w = factor[j] + make_float4(h.offset, h.offset, h.offset, h.offset);
        *reinterpret_cast<float4*>(normed + (lane + 32 * j) * 4) = scaled(kept[j], inverse) * w;
    }
}

}  // namespace canopy

extern "C" __global__ void __launch_bounds__(canopy::kWarps * 32)
    glue_qk_norm_rope(canopy::RopeArgs a, const float* __restrict__ q_proj, const float* __restrict__ k_proj,
                      const float* __restrict__ q_weight, const float* __restrict__ k_weight, const float* __restrict__ inv_freq,
                      const int* __restrict__ positions, float* __restrict__ q, float* __restrict__ k) {
    using namespace canopy;
    __shared__ __align__(16) float normed[kWarps][kHeadDim];
    __shared__ float cosines[kHeadDim / 2], sines[kHeadDim / 2];
    const uint32_t row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = a.head_dim;
    const uint32_t head = blockIdx.y * kWarps + warp;
    const bool query = head < a.q_heads, active = head < a.q_heads + a.kv_heads;
    const size_t kv = head - a.q_heads;
    const Head h = query ? Head{q_proj + (size_t)row * a.q_stride + (size_t)head * a.q_head_stride, q_weight,
                                q + ((size_t)row * a.q_heads + head) * d, a.q_eps, a.q_offset}
                         : Head{k_proj + (size_t)row * a.k_stride + kv * d, k_weight, k + ((size_t)row * a.kv_heads + kv) * d,
                                a.k_eps, a.k_offset};
    if (active) norm_head(h, d, lane, normed[warp]);
    // A head is at most as wide as the CTA has threads for its pairs.
    if (threadIdx.x < a.half) {
        cos_sin(__fmul_rn((float)positions[row], inv_freq[threadIdx.x]), &cosines[threadIdx.x], &sines[threadIdx.x]);
    }
    __syncthreads();
    if (!active) return;
    const float* n = normed[warp];
#pragma unroll
    for (int j = 0; j < kHeadDim / 32; ++j) {
        const uint32_t e = lane + 32 * j;
        if (e >= d) break;
        float y = n[e];
        if (e < a.half) {
            y = y * cosines[e] - n[e + a.half] * sines[e];
        } else if (e < 2 * a.half) {
            y = y * cosines[e - a.half] + n[e - a.half] * sines[e - a.half];
        }
        h.out[e] = y;
    }
}
