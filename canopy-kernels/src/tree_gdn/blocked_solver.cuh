// The blocked design's solve: a warp's sixteen value columns.
#pragma once
#include "blocked_system.cuh"

namespace canopy {

// Values as a left operand; those that are not finite count as 0, and their bits are in the result.
__device__ __forceinline__ uint32_t as_operand(float (&a)[2][4], const float (&x)[2][4]) {
    float probe[2] = {0.f, 0.f};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float y = for_cut(x[e / 4][e % 4]);
        a[e / 4][e % 2 * 2 + e % 4 / 2] = y;
        probe[e % 2] = fmaf(y, 0.f, probe[e % 2]);
    }
    uint32_t bad = 0;
    if (__any_sync(kFull, !(probe[0] + probe[1] == 0.f)) && !CANOPY_FAULT(leak)) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float& y = a[e / 4][e % 2 * 2 + e % 4 / 2];
            if (!(fabsf(y) <= kLargest)) {
                y = 0.f;
                bad |= 1u << e;
            }
        }
    }
    return bad;
}

// d += A B for eight nodes; `b` as in a Block.
__device__ __forceinline__ void times(float (&d)[4], const float (&a)[2][4], float4 b) {
    mma_tf32(d, a[0], b.x, b.y);
    mma_tf32(d, a[1], b.z, b.w);
}

// A warp's sixteen columns: product row r is column 2 r, row 8 + r column 2 r + 1; d[n][e] is node 8 n + 2 (lane % 4) + e % 2 of a block.
template <typename S>
struct Solver {
    uint32_t state[8][4];  // S0 as the left operand, bf16
    uint32_t seen;
    int col;
    const __nv_bfloat16* values;

    __device__ __forceinline__ static int node_of(int i, int n, int e, int lane) { return 16 * i + 8 * n + lane % 4 * 2 + e; }

    // Two columns of block i's values.
    __device__ __forceinline__ void fetch_values(uint32_t (&v)[2][2], const Place& p, int i) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t node = node_of(i, n, e, p.lane);
                v[n][e] = node < p.nodes ? __ldg(reinterpret_cast<const unsigned*>(values + node * (uint32_t)p.width)) : 0;
            }
    }

    // d += sixteen rows of k or q times S0.
    __device__ __forceinline__ void project(float (&d)[2][4], const RowWords& words, int i) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if (CANOPY_FAULT(dropped_slice) && step == 1) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const uint4 f = words.read(16 * i + 8 * n, step);
                mma(d[n], state[2 * step], f.x, f.y);
                mma(d[n], state[2 * step + 1], f.z, f.w);
            }
        }
    }

    // R from k S0, and exp(g_cum) q S0 from q S0.
    __device__ __forceinline__ void scale_rows(float (&r)[2][4], float (&d)[2][4], const uint32_t (&v)[2][2], const S& s, int i, int lane) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float4 scale = s.scale[node_of(i, n, e, lane)];
                r[n][e] = scale.y * (__uint_as_float(v[n][e] << 16) - scale.x * r[n][e]);
                r[n][2 + e] = scale.y * (__uint_as_float(v[n][e] & 0xffff0000u) - scale.x * r[n][2 + e]);
                d[n][e] *= scale.z;
                d[n][2 + e] *= scale.z;
            }
    }

    // U of block i from R less its ancestors in other blocks, and U as an operand.
    __device__ __forceinline__ void solve(float (&u)[2][4], float (&operand)[2][4], S& s, const Place& p, const float (&r)[2][4],
                                          const Block& own, int i) {
        float left[2][4];
        const uint32_t r_bad = as_operand(left, r);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            u[n][0] = u[n][1] = u[n][2] = u[n][3] = 0.f;
            times(u[n], left, own.g[n][p.lane]);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            u[e / 4][e % 4] = planted_ulp(u[e / 4][e % 4]);
            if (r_bad >> e & 1) u[e / 4][e % 4] = r[e / 4][e % 4];
        }
        const uint32_t u_bad = as_operand(operand, u);
        seen |= u_bad;
        if (u_bad)
            for (int e = 0; e < 8; ++e)
                if (u_bad >> e & 1) {
                    const int node = node_of(i, e / 4, e % 2, p.lane);
                    atomicOr(&s.bad[p.warp][p.lane / 4 * 2 + e / 2 % 2][node / 32], 1u << node % 32);
                }
    }

    // o and u_out at the first node's columns.
    template <typename Out>
    __device__ __forceinline__ void write(Out* o, float* u_out, const Place& p, const float (&d)[2][4], const float (&u)[2][4], int i) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int node = node_of(i, n, e, p.lane);
                const uint32_t at = node * p.v_heads * kDv;
                if (node < p.nodes) store2(o + at, d[n][e], d[n][2 + e]);
                if (node < p.nodes - CANOPY_FAULT(gap)) store2(u_out + at, u[n][e], u[n][2 + e]);
            }
    }

    // What descends from a value that is not finite.
    template <typename Out>
    __device__ __forceinline__ void spoil(Out* o, float* u_out, const S& s, const Place& p) const {
        if (!__any_sync(kFull, seen != 0)) return;
        __syncwarp();
        if (p.lane >= 16) return;
        const int column = p.col0 + p.warp * 16 + p.lane;
        for (int node = 0; node < p.nodes; ++node) {
            uint32_t hit = 0, above = 0;
            for (int w = 0; w < S::kWords; ++w) {
                const uint32_t both = s.mask[node][w] & s.bad[p.warp][p.lane][w];
                hit |= both;
                above |= node / 32 == w ? both & ~(1u << node % 32) : both;
            }
            const size_t at = p.at(node, column);
            if (hit) store(o + at, NAN);
            if (above) u_out[at] = NAN;
        }
    }
};

}  // namespace canopy
