// Adds the parts that the kernels over splits left: the splits in key order, then the paths. Where a row's output is not finite, or they marked the
// row, the CTA does its sums again in float64 over the keys that the row sees; an output that float64 leaves finite keeps its bits.
#include "args.cuh"
#include "lanes.cuh"

namespace canopy {

constexpr int kMergeThreads = 128;

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(kFull, x, offset);
    return x;
}

// One row under one query head.
struct Head {
    Walk w;
    int row, head;  // packed row, query head
    bool live;
};

template <int D>
struct Exact {
    double largest[kMergeThreads / 32], weight[kMergeThreads], out[D];
    bool visible[kMergeThreads];
};

// float64's answer for one head, by the whole CTA, into x.out.
template <int D>
__device__ void exact(const AttendArgs& a, const Head& head, const __nv_bfloat16* q, const __nv_bfloat16* keys,
                      const __nv_bfloat16* values, const uint32_t* mask, Exact<D>& x) {
    const Walk& w = head.w;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, node = head.row - w.first;
    const int2 range = sight(a, w.context, w.end, node);
    const int count = w.end + (w.tree ? w.rows : 0);  // the rows of a tree lie behind its keys
    const uint32_t* words = mask + (size_t)head.row * kMaskWords;
    const auto sees = [&](int key) {
        if (key >= w.end) return (words[(key - w.end) / 32] >> ((key - w.end) % 32) & 1) != 0;
        return key >= range.x && key < range.y;
    };
    const size_t kv_head = head.head / (a.q_heads / a.kv_heads);
    const auto offset = [&](int key) { return (((size_t)w.slot * a.capacity + key) * a.kv_heads + kv_head) * D; };
    const __nv_bfloat16* query = q + ((size_t)head.row * a.q_heads + head.head) * D;
    const auto score = [&](int key) {
        double sum = 0.0;
        for (int d = lane; d < D; d += 32) sum += (double)to_f32(query[d]) * (double)to_f32(keys[offset(key) + d]);
        return warp_sum(sum) / sqrt((double)D);
    };
    double largest = -INFINITY;
    for (int key = warp; key < count; key += kMergeThreads / 32)
        if (sees(key)) largest = fmax(largest, score(key));
    if (lane == 0) x.largest[warp] = largest;
    __syncthreads();
    for (int other = 0; other < kMergeThreads / 32; ++other) largest = fmax(largest, x.largest[other]);
    double total = 0.0, mixed[D / kMergeThreads];
#pragma unroll
    for (int part = 0; part < D / kMergeThreads; ++part) mixed[part] = 0.0;
    for (int first = 0; first < count; first += kMergeThreads) {
        const int some = min(kMergeThreads, count - first);
        for (int n = warp; n < some; n += kMergeThreads / 32) {
            const bool seen = sees(first + n);
            const double weight = seen ? exp(score(first + n) - largest) : 0.0;
            if (lane == 0) {
                x.weight[n] = weight;
                x.visible[n] = seen;
            }
        }
        __syncthreads();
        for (int n = 0; n < some; ++n) {
            if (!x.visible[n]) continue;
            total += x.weight[n];
#pragma unroll
            for (int part = 0; part < D / kMergeThreads; ++part)
                mixed[part] += x.weight[n] * (double)to_f32(values[offset(first + n) + threadIdx.x + part * kMergeThreads]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int part = 0; part < D / kMergeThreads; ++part) x.out[threadIdx.x + part * kMergeThreads] = mixed[part] / total;
    __syncthreads();
}

__device__ __forceinline__ void add(float (&acc)[4], float4 x, float times) {
    acc[0] = fmaf(x.x, times, acc[0]);
    acc[1] = fmaf(x.y, times, acc[1]);
    acc[2] = fmaf(x.z, times, acc[2]);
    acc[3] = fmaf(x.w, times, acc[3]);
}

// Adds a row's parts, `step` float4s apart, lane n of the warp having the level and sum of part n; the sum of weights.
__device__ __forceinline__ float in_a_row(float scale, float2 ml, const float4* from, size_t step, int parts, float (&acc)[4]) {
    constexpr int kAhead = 16;
    float4 held[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
        if (n < parts) held[n] = from[n * step];
    float top = ml.x;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, offset));
    const float shift = top == -INFINITY ? 0.f : top;
    const float down = power_of_two((ml.x - shift) * scale), share = __fmul_rn(fabsf(ml.y), down);
    float sum = 0.f;
    for (int first = 0; first < parts; first += kAhead) {
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            if (first + n >= parts) break;
            sum += __shfl_sync(kFull, share, first + n);
            add(acc, held[n], __shfl_sync(kFull, down, first + n));
        }
#pragma unroll
        for (int n = 0; n < kAhead; ++n)
            if (first + kAhead + n < parts) held[n] = from[(first + kAhead + n) * step];
    }
    return sum;
}

// The same, parts being splits: folds of kFold of them first, as ring_sm90a.cu adds them where a CTA makes a whole fold.
__device__ __forceinline__ float in_folds(float2 ml, const float4* from, size_t step, int parts, float (&acc)[4]) {
    constexpr int kAhead = 4 * kFold;
    float4 held[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
        if (n < parts) held[n] = from[n * step];
    // every lane goes through the fold of its own split
    const int mine = threadIdx.x % 32, leader = mine / kFold * kFold;
    Level fold;
    float down = 0.f, up = 1.f;
#pragma unroll
    for (int n = 0; n < kFold; ++n) {
        const Level next = {__shfl_sync(kFull, ml.x, leader + n), __shfl_sync(kFull, ml.y, leader + n)};
        if (n == 0) {
            fold = next;
        } else if (leader + n < parts) {
            float older, newer;
            take_in(fold, next, older, newer);
            if (mine == leader + n) {
                down = older;
                up = newer;
            }
        }
    }
    float top = fold.top;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, offset));
    const float shift = top == -INFINITY ? 0.f : top;
    const float times = power_of_two(fold.top - shift), share = __fmul_rn(fabsf(fold.sum), times);
    float sum = 0.f;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < parts; first += kAhead) {
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            if (first + n >= parts) break;
            const float older = __shfl_sync(kFull, down, first + n), newer = __shfl_sync(kFull, up, first + n);
            const float4 y = held[n];
            x = n % kFold == 0 ? y
                               : make_float4(taken_in(x.x, older, y.x, newer), taken_in(x.y, older, y.y, newer),
                                             taken_in(x.z, older, y.z, newer), taken_in(x.w, older, y.w, newer));
            if (n % kFold < kFold - 1 && first + n + 1 < parts) continue;
            sum += __shfl_sync(kFull, share, first + n);
            add(acc, x, __shfl_sync(kFull, times, first + n));
        }
#pragma unroll
        for (int n = 0; n < kAhead; ++n)
            if (first + kAhead + n < parts) held[n] = from[(first + kAhead + n) * step];
    }
    return sum;
}

template <int D, typename Out>
__device__ __forceinline__ void merge(const AttendArgs& a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,
                                      const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, const int* sequence,
                                      const float* part_o, const float2* part_ml, Out* out) {
    constexpr int kLanes = D / 4, kHeads = kMergeThreads / kLanes;  // a lane has four outputs, a CTA so many heads
    __shared__ Exact<D> x;
    const size_t heads = (size_t)a.rows * a.q_heads;
    const int lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes;
    const auto head_at = [&](int which) {
        const size_t index = (size_t)blockIdx.x * kHeads + which;
        Head h;
        h.live = index < heads;
        if (!h.live) return h;
        h.row = index / a.q_heads;
        h.head = index % a.q_heads;
        h.w = walk_of<D>(a, a.block_size ? h.row / (int)a.block_size : sequence[h.row], lens, slots, cu_nodes);
        return h;
    };
    const Head h = head_at(own);
    const size_t index = (size_t)blockIdx.x * kHeads + own;
    const bool present = h.live && h.w.slot >= 0;
    wait_for_kernels_ahead();
    next_may_begin();
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    bool doubtful = false;
    if (present && h.w.fits) {
        const int parts = h.w.parts(), mine = threadIdx.x % 32;  // a lane of the warp weighs one part for all
        const float2 ml = mine < parts && !(CANOPY_FAULT(dropped_slice) && mine == 0) ? part_ml[mine * heads + index] : make_float2(-INFINITY, 0.f);
        const float4* from = reinterpret_cast<const float4*>(part_o + index * D) + lane;
        // the levels of ring_sm90a.cu are powers of two already
        const float sum = h.w.chunk == 1 ? in_folds(ml, from, heads * D / 4, parts, acc)
                                         : in_a_row(a.tiles ? 1.f : a.scale, ml, from, heads * D / 4, parts, acc);
        doubtful = __any_sync(kFull, signbit(ml.y) != 0);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            acc[e] /= sum;
            doubtful |= !isfinite(acc[e]);
        }
    } else if (present) {
        acc[0] = acc[1] = acc[2] = acc[3] = NAN;  // lengths that the slot does not hold: nothing was read
    }
    for (int which = 0; which < kHeads; ++which) {
        if (!__syncthreads_or(doubtful && own == which)) continue;
        exact<D>(a, head_at(which), q, keys, values, mask, x);
        if (own != which) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float truth = (float)x.out[4 * lane + e];
            if (!isfinite(acc[e]) || !isfinite(truth)) acc[e] = truth;
        }
    }
    if (!h.live || (CANOPY_FAULT(gap) && index + 1 == heads)) return;
    if (CANOPY_FAULT(overrun) && index + 1 == heads) store(out + heads * D, 0.f);
    if (index == 0) planted_touch(q);
#pragma unroll
    for (int e = 0; e < 4; ++e) store(out + index * D + 4 * lane + e, acc[e]);
}

}  // namespace canopy

#define CANOPY_MERGE(D, NAME, OUT)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 4) attend_merge_d##D##_##NAME(                                                  \
        const __grid_constant__ AttendArgs a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,      \
        const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, const int* sequence, const float* part_o,    \
        const float2* part_ml, OUT* out) {                                                                                         \
        canopy::merge<D, OUT>(a, q, keys, values, lens, slots, cu_nodes, mask, sequence, part_o, part_ml, out);                    \
    }

CANOPY_MERGE(256, f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_MERGE(256, bf16, __nv_bfloat16)
CANOPY_MERGE(128, bf16, __nv_bfloat16)
CANOPY_MERGE(128, f32, float)
#endif
