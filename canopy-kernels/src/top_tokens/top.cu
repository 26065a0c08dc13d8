// top_tokens. Pass 1: a warp finds the best of 128 logits and the sum of exp(x - best) over them. Pass 2: a CTA owns a row, sorts the
// segments' bests, gathers from the k best segments every logit that is not below the k-th best segment's best, and sorts those. The k
// best logits lie in these segments: each logit outside has k segment bests before it. One best needs no sort. Keys are unique (logit, then lowest token), so the
// order in which candidates are gathered leaves no trace.
#include <stdint.h>

#include "canopy/fault.cuh"
#include "canopy/numeric.cuh"

namespace canopy {

constexpr uint32_t kSegment = 128, kPerWarp = 2, kWarps = 8, kMostK = 64;
constexpr uint32_t kNoDistribution = 1, kForbidden = 2;

// Unsigned order of a logit: NaN above infinity, 0 and -0 equal.
__device__ __forceinline__ uint32_t ordered(float x) {
    if (isnan(x)) return 0xffffffffu;
    const uint32_t bits = __float_as_uint(x + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint64_t key_of(uint32_t order, uint32_t token) { return (uint64_t)order << 32 | (0xffffffffu - token); }
__device__ __forceinline__ uint32_t token_of(uint64_t key) { return 0xffffffffu - (uint32_t)key; }

__device__ __forceinline__ float logit_of(uint64_t key) {
    const uint32_t order = (uint32_t)(key >> 32);
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// Descending; `n` is a power of two that the whole CTA knows.
__device__ __forceinline__ void sort_keys(uint64_t* keys, uint32_t n) {
    for (uint32_t size = 2; size <= n; size *= 2) {
        for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < n / 2; i += blockDim.x) {
                const uint32_t low = 2 * i - (i & (stride - 1)), high = low + stride;
                const uint64_t a = keys[low], b = keys[high];
                if ((a < b) == ((low & size) == 0)) keys[low] = b, keys[high] = a;
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ uint32_t power_of_two(uint32_t n) { return n <= 1 ? 1 : 1u << (32 - __clz(n - 1)); }

// The largest of n keys to keys[0]; `keys` has room for one a warp.
__device__ __forceinline__ void largest_key(const uint64_t* of, uint32_t n, uint64_t* keys) {
    const uint32_t t = threadIdx.x;
    uint64_t most = 0;
    for (uint32_t i = t; i < n; i += blockDim.x) most = max(most, of[i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) most = max(most, __shfl_xor_sync(kFull, most, offset));
    if (t % 32 == 0) keys[t / 32] = most;
    __syncthreads();
    if (t < 32) {
        most = t < blockDim.x / 32 ? keys[t] : 0;
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) most = max(most, __shfl_xor_sync(kFull, most, offset));
        if (t == 0) keys[0] = most;
    }
    __syncthreads();
}

}  // namespace canopy

// bests, sums: [N, segments]; a sum's sign says that a logit of the segment is -infinity.
extern "C" __global__ void __launch_bounds__(canopy::kWarps * 32)
    top_tokens_segments(uint32_t vocab, uint32_t segments, const float* __restrict__ logits, uint64_t* __restrict__ bests,
                        float* __restrict__ sums) {
    using namespace canopy;
    take_turn();
    const uint32_t lane = threadIdx.x % 32, row = blockIdx.y;
    const float* x = logits + (size_t)row * vocab;
    const bool whole = (vocab % 4 | (reinterpret_cast<uintptr_t>(logits) & 15)) == 0;
    const uint32_t first = (blockIdx.x * kWarps + threadIdx.x / 32) * kPerWarp;
    float value[kPerWarp][4];
#pragma unroll
    for (uint32_t s = 0; s < kPerWarp; ++s) {
        const uint32_t at = (first + s) * kSegment + lane * 4;
        if (whole && at < vocab) {
            const float4 v = load4(x + at);
            value[s][0] = v.x, value[s][1] = v.y, value[s][2] = v.z, value[s][3] = v.w;
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) value[s][i] = at + i < vocab ? x[at + i] : 0.f;
        }
    }
#pragma unroll
    for (uint32_t s = 0; s < kPerWarp; ++s) {
        const uint32_t at = (first + s) * kSegment + lane * 4;
        if (first + s >= segments) return;
        uint32_t order = 0, token = 0xffffffffu;
        bool forbidden = false;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (at + i >= vocab) continue;
            const uint32_t mine = ordered(value[s][i]);
            if (mine > order || token == 0xffffffffu) order = mine, token = at + i;
            forbidden |= value[s][i] == -INFINITY;
        }
        const uint32_t best = __reduce_max_sync(kFull, order);
        const uint32_t lowest = __reduce_min_sync(kFull, order == best ? token : 0xffffffffu);
        const float most = logit_of((uint64_t)best << 32);
        float sum = 0.f;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (at + i < vocab && value[s][i] != -INFINITY) sum += expf(value[s][i] - most);
        }
        sum = warp_sum(sum);
        forbidden = __any_sync(kFull, forbidden);
        if (lane == 0) {
            const size_t to = (size_t)row * segments + first + s;
            bests[to] = key_of(best, lowest);
            sums[to] = forbidden ? -sum : sum;
        }
    }
}

// out: [N, 2 + 2 k]; shared memory: keys, as many as the larger of both sorts needs.
extern "C" __global__ void __launch_bounds__(1024)
    top_tokens_rows(uint32_t vocab, uint32_t segments, uint32_t k, const float* __restrict__ logits,
                    const uint64_t* __restrict__ bests, const float* __restrict__ sums, uint32_t* __restrict__ out) {
    using namespace canopy;
    take_turn();
    extern __shared__ uint64_t keys[];
    __shared__ uint32_t chosen[kMostK], count;
    __shared__ float partial[32];
    const uint32_t row = blockIdx.x, t = threadIdx.x, lane = t % 32;
    const float* x = logits + (size_t)row * vocab;
    if (row == 0 && t == 0) planted_touch(logits);
    bests += (size_t)row * segments;
    sums += (size_t)row * segments;
    out += (size_t)row * (2 + 2 * k);

    if (t == 0) count = 0;
    if (k == 1) {
        largest_key(bests, segments, keys);
    } else {
        const uint32_t padded = power_of_two(segments);
        for (uint32_t i = t; i < padded; i += blockDim.x) keys[i] = i < segments ? bests[i] : 0;
        sort_keys(keys, padded);
    }

    // The sum over the row, relative to its best logit.
    const float best = logit_of(keys[0]);
    float sum = 0.f;
    bool forbidden = false;
    for (uint32_t i = t; i < segments; i += blockDim.x) {
        if (CANOPY_FAULT(dropped_slice) && i == 0) continue;
        const float most = logit_of(bests[i]), part = sums[i];
        forbidden |= signbit(part) != 0;
        if (most != -INFINITY) sum += fabsf(part) * expf(most - best);
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[t / 32] = sum;
    forbidden = __syncthreads_or(forbidden);
    if (t < 32) {
        sum = warp_sum(t < blockDim.x / 32 ? partial[t] : 0.f);
        const float ln_sum = planted_ulp(logf(planted_half(sum)));
        const bool none = !(isfinite(ln_sum) && isfinite(best));
        if (t == 0) {
            out[0] = none ? kNoDistribution : forbidden ? kForbidden : 0;
            out[1] = __float_as_uint(none ? NAN : ln_sum);
        }
    }

    if (k == 1) {
        if (t == 0) out[2] = __float_as_uint(x[token_of(keys[0])]), out[3] = token_of(keys[0]);
        return;
    }
    const uint32_t used = min(k, segments);
    const uint64_t least = segments < k ? 0 : keys[k - 1];
    for (uint32_t i = t; i < used; i += blockDim.x) chosen[i] = token_of(keys[i]) / kSegment;
    __syncthreads();
    for (uint32_t i = t; i < used * kSegment; i += blockDim.x) {
        const uint32_t token = chosen[i / kSegment] * kSegment + i % kSegment;
        if (token >= vocab) continue;
        const uint64_t key = key_of(ordered(x[token]), token);
        if (key >= least) keys[atomicAdd(&count, 1u)] = key;
    }
    __syncthreads();
    const uint32_t found = count, sorted = power_of_two(found);
    for (uint32_t i = found + t; i < sorted; i += blockDim.x) keys[i] = 0;
    sort_keys(keys, sorted);
    for (uint32_t i = t; i < k; i += blockDim.x) {
        const uint32_t token = token_of(keys[i]);
        // The logit itself, not its key's: -0 stays -0.
        out[2 + i] = __float_as_uint(x[token]);
        out[2 + k + i] = token + CANOPY_FAULT(off_by_one);
    }
}
