// S <- exp(g_0 + .. + g_a) S + sum over an accepted path of exp(g_{j+1} + .. + g_a) k_j u_j^T while S is on its way from the pool into a
// kernel: the operations of commit.cu in commit.cu's order, so the state has the same bits.
#pragma once
#include "canopy/fault.cuh"
#include "canopy/gdn_rows.cuh"

namespace canopy {

constexpr int kPath = 256;

// later[j] = g of path entries j .. length - 1, by doubling; later[length] = 0.
template <int THREADS>
__device__ const float* suffix_sums(float (*buffer)[kPath + 1], const float* gates, const int* path, int length, uint32_t v_heads,
                                    uint32_t hv) {
    for (int j = threadIdx.x; j < length; j += THREADS) buffer[0][j] = gates[(size_t)path[j] * 2 * v_heads + hv];
    if (threadIdx.x == 0) buffer[0][length] = buffer[1][length] = 0.f;
    __syncthreads();
    int now = 0;
    for (int reach = 1; reach < length; reach *= 2) {
        for (int j = threadIdx.x; j < length; j += THREADS)
            buffer[now ^ 1][j] = buffer[now][j] + (j + reach < length ? buffer[now][j + reach] : 0.f);
        __syncthreads();
        now ^= 1;
    }
    return buffer[now];
}

// Nothing is left to commit: the pool is read only.
struct Committed {
    using State = const float;

    template <int NV, int THREADS>
    struct Replay {
        __device__ __forceinline__ Replay(const Committed&, uint32_t, uint32_t, uint32_t, int) {}
        template <int HELD>
        __device__ __forceinline__ void apply(float4 (&)[HELD][2], const float*, int) const {}
    };
};

// The round before left this accepted path for the next verify.
struct LastPath {
    using State = float;

    const __nv_bfloat16* qkv;
    const float* gates;
    const float* u;
    const int* rows;
    const int* cu_rows;

    // Path rows in shared memory, a warp a row: k weighted, u of the CTA's NV value columns.
    template <int NV, int THREADS>
    struct Shared {
        static constexpr int kRows = THREADS < 256 ? 4 : 8;
        float4 k[kRows][kDk / 4];
        float u[kRows][NV];
        float suffix[2][kPath + 1];
    };

    template <int NV, int THREADS>
    struct Replay {
        static constexpr int kRows = Shared<NV, THREADS>::kRows;
        const LastPath& from;
        const int* path;
        const float* later;
        Shared<NV, THREADS>* shared;
        int length;
        uint32_t width, k_at, u_width, u_at;
        uint2 k;
        float u[NV / 32];

        // Fetches the first rows and sums the gates; all threads of the CTA.
        __device__ __forceinline__ Replay(const LastPath& last, uint32_t k_heads, uint32_t v_heads, uint32_t hv, int col0) : from(last) {
            __shared__ Shared<NV, THREADS> place;
            shared = &place;
            const int begin = last.cu_rows[blockIdx.z];
            path = last.rows + begin;
            length = last.cu_rows[blockIdx.z + 1] - begin;
            width = qkv_width(k_heads, v_heads);
            k_at = (k_heads + hv / (v_heads / k_heads)) * kDk;
            u_width = v_heads * kDv;
            u_at = hv * kDv + col0;
            fetch(0);
            later = suffix_sums<THREADS>(place.suffix, last.gates, path, length, v_heads, hv);
        }

        __device__ __forceinline__ void fetch(int j0) {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            if (warp >= kRows || j0 + warp >= length) return;
            const size_t row = path[j0 + warp];
            k = raw4(from.qkv + row * width + k_at + 4 * lane);
#pragma unroll
            for (int r = 0; r < NV / 32; ++r) u[r] = from.u[row * u_width + u_at + 32 * r + lane];
        }

        __device__ __forceinline__ void put(int j0) const {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            if (warp >= kRows || j0 + warp >= length) return;
            shared->k[warp][lane] = scaled(normed(widened(k), 1.f), expf(later[j0 + warp + 1]));
#pragma unroll
            for (int r = 0; r < NV / 32; ++r) shared->u[warp][32 * r + lane] = u[r];
        }

        // Advances chunks idx, idx + THREADS .. of eight keys of the CTA's slice s0 and writes them back; all threads. The slice may come
        // in several parts, idx of the first part below THREADS.
        template <int HELD>
        __device__ __forceinline__ void apply(float4 (&raw)[HELD][2], float* s0, int idx) {
            if (length == 0) return;
            const float decay = planted_ulp(expf(later[0]));
#pragma unroll
            for (int x = 0; x < HELD; ++x) {
                raw[x][0] = scaled(raw[x][0], decay);
                raw[x][1] = scaled(raw[x][1], decay);
            }
            for (int j0 = 0; j0 < length; j0 += kRows) {
                if (j0 > 0 || idx >= THREADS) fetch(j0);
                __syncthreads();
                put(j0);
                __syncthreads();
                const int count = min(kRows, length - j0) - (CANOPY_FAULT(missed_node) && j0 + kRows >= length);
                for (int j = 0; j < count; ++j) {
                    const float4 left = shared->k[j][idx % 16 * 2], right = shared->k[j][idx % 16 * 2 + 1];
#pragma unroll
                    for (int x = 0; x < HELD; ++x) {
                        const float w = shared->u[j][(idx + x * THREADS) / 16];
                        raw[x][0] = planted_half(fma4(left, w, raw[x][0]));
                        raw[x][1] = planted_half(fma4(right, w, raw[x][1]));
                    }
                }
            }
#pragma unroll
            for (int x = 0; x < HELD; ++x) {
                float* to = s0 + (size_t)(idx + x * THREADS) * 8;
                *reinterpret_cast<float4*>(to) = raw[x][0];
                *reinterpret_cast<float4*>(to + 4) = raw[x][1];
            }
        }
    };
};

}  // namespace canopy
