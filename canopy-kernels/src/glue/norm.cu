// RMS norms of f32 rows. A team of 1, 16 or 32 warps, chosen by the row's width alone, owns a row and holds it in registers: thread t
// takes quads t, t + team, ..., sums its squares in that order, then the lanes of a warp and the warps of the team fold in a fixed tree.
#include "args.cuh"
#include "canopy/fault.cuh"
#include "quad.cuh"

namespace canopy {

constexpr int kKept = 4;       // quads of one thread
constexpr int kRowsOfCta = 4;  // rows of a CTA whose teams are single warps

enum class Step { plain, add, gated };

template <int Warps>
__device__ __forceinline__ float team_sum(float x) {
    x = warp_sum(x);
    if constexpr (Warps > 1) {
        __shared__ float sums[Warps];
        const int lane = threadIdx.x % 32;
        if (lane == 0) sums[threadIdx.x / 32] = x;
        __syncthreads();
        x = warp_sum(lane < Warps ? sums[lane] : 0.f);
    }
    return x;
}

// Every load of a row is under way before the first is used. `other` is the residual of add and z of gated; `sum` is add's alone.
template <int Warps, Step S, bool Whole, typename Out>
__device__ __forceinline__ void norm_row_as(const NormArgs& a, const float* x, const float* other, const float* weight, float* sum,
                                            Out* out) {
    constexpr uint32_t team = Warps * 32;
    // Gated rows are heads, one warp each; larger teams would run out of registers.
    constexpr bool late = S == Step::gated && Warps > 1, latest = late && Warps == 32;
    const uint32_t t = threadIdx.x % team;
    float4 kept[kKept], extra[kKept], factor[kKept];
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
        const uint32_t at = (t + j * team) * 4;
        kept[j] = load_quad(x, at, a.width, Whole);
        if (S != Step::plain && !late) extra[j] = load_quad(other, at, a.width, Whole);
        if (!latest) factor[j] = load_quad(weight, at, a.width, Whole);
    }
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
        if (S == Step::add) {
            kept[j] = kept[j] + extra[j];
            store_quad(sum, (t + j * team) * 4, a.width, Whole, kept[j]);
        }
        if (!CANOPY_FAULT(dropped_slice) || j != 1) total = dot4(kept[j], kept[j], total);
    }
    total = planted_half(team_sum<Warps>(total));
    const float inverse = planted_ulp(1.f / sqrtf(total / (float)a.width + a.eps));
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
        const uint32_t at = (t + j * team) * 4;
        const float4 offset = make_float4(a.offset, a.offset, a.offset, a.offset);
        const float4 w = (latest ? load_quad(weight, at, a.width, Whole) : factor[j]) + offset;
        float4 y = scaled(kept[j], inverse) * w;
        if (S == Step::gated) y = y * silu(late ? load_quad(other, at, a.width, Whole) : extra[j]);
        store_quad(out, at, a.width, Whole, planted_swallow(y));
    }
}

template <int Warps, Step S, typename Out>
__device__ __forceinline__ void norm_row(const NormArgs& a, const float* x, const float* other, const float* weight, float* sum,
                                         Out* out) {
    take_turn();
    const uint32_t row = Warps == 1 ? blockIdx.x * kRowsOfCta + threadIdx.x / 32 : blockIdx.x;
    if (row >= a.rows || (CANOPY_FAULT(gap) && row + 1 == a.rows)) return;
    if (CANOPY_FAULT(overrun)) store(out + (size_t)a.rows * a.width, 0.f);
    if (row == 0 && threadIdx.x == 0) planted_touch(weight);
    const size_t first = (size_t)row * a.width;
    x += first;
    out += first;
    if (S == Step::add) other += first, sum += first;
    if (S == Step::gated) other += (size_t)(row / a.heads) * a.gate_stride + (size_t)(row % a.heads) * a.width;
    bool whole = quads_whole(a.width, x, weight, out);
    if (S != Step::plain) whole = whole && quads_whole(a.width, other);
    if (S == Step::add) whole = whole && quads_whole(a.width, sum);
    if (whole) {
        norm_row_as<Warps, S, true>(a, x, other, weight, sum, out);
    } else {
        norm_row_as<Warps, S, false>(a, x, other, weight, sum, out);
    }
}

}  // namespace canopy

// NAME_w1, NAME_w16 ... of one output type.
#define CANOPY_NORMS_TO(TYPE, SUFFIX, WARPS, THREADS)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) glue_rms_norm##SUFFIX##_w##WARPS(                                  \
        canopy::NormArgs a, const float* __restrict__ x, const float* __restrict__ weight, TYPE* __restrict__ out) {         \
        canopy::norm_row<WARPS, canopy::Step::plain>(a, x, nullptr, weight, nullptr, out);                                   \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) glue_add_rms_norm##SUFFIX##_w##WARPS(                              \
        canopy::NormArgs a, const float* __restrict__ x, const float* __restrict__ residual,                                 \
        const float* __restrict__ weight, float* __restrict__ sum, TYPE* __restrict__ out) {                                 \
        canopy::norm_row<WARPS, canopy::Step::add>(a, x, residual, weight, sum, out);                                        \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) glue_gated_rms_norm##SUFFIX##_w##WARPS(                            \
        canopy::NormArgs a, const float* __restrict__ o, const float* __restrict__ z, const float* __restrict__ weight,      \
        TYPE* __restrict__ out) {                                                                                            \
        canopy::norm_row<WARPS, canopy::Step::gated>(a, o, z, weight, nullptr, out);                                         \
    }

#define CANOPY_NORMS(WARPS, THREADS)             \
    CANOPY_NORMS_TO(float, , WARPS, THREADS)     \
    CANOPY_NORMS_TO(__nv_bfloat16, _bf16, WARPS, THREADS)

CANOPY_NORMS(1, 128)
CANOPY_NORMS(16, 512)
#ifndef CANOPY_CONTROLS
CANOPY_NORMS(32, 1024)
#endif
