// Adds the parts that the kernels over splits left: the splits in key order, then the paths. Where a row's output is not finite, or they marked the
// row, the CTA does its sums again in float64 over the keys that the row sees; an output that float64 leaves finite keeps its bits.
#include "args.cuh"
#include "canopy/mma.cuh"
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
    const Walk& w;
    int row, head;  // packed row, query head
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

// A row's outputs in its parts, `step` float4s apart, on their way into shared memory: a thread's own, up to Ahead of them. A loop that is not
// unrolled, as what adds them is not: a CTA runs its code once, and to fetch unrolled code takes longer than what it does.
template <int Ahead>
struct Held {
    float4 (*at)[kMergeThreads];
    const float4* from;
    size_t step;
    int parts;

    __device__ __forceinline__ void bring(int first) const {
        const int some = min(parts - first, Ahead);
#pragma unroll 1
        for (int n = 0; n < some; ++n) copy16(shared_address(&at[n][threadIdx.x]), from + (first + n) * step, true);
        copies_issued();
    }

    __device__ __forceinline__ float4 of(int n) const { return at[n % Ahead][threadIdx.x]; }

    // Part n is wanted next.
    __device__ __forceinline__ void want(int n) const {
        if (n % Ahead) return;
        if (n) bring(n);
        copies_arrived<0>();
    }
};

// Adds them, lane n of the warp having the level and sum of part n; the sum of weights.
template <int Ahead>
__device__ __forceinline__ float in_a_row(float scale, float2 ml, const Held<Ahead>& held, float (&acc)[4]) {
    float top = ml.x;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, offset));
    const float shift = top == -INFINITY ? 0.f : top;
    const float down = power_of_two((ml.x - shift) * scale), share = __fmul_rn(fabsf(ml.y), down);
    float sum = 0.f;
#pragma unroll 1
    for (int n = 0; n < held.parts; ++n) {
        held.want(n);
        sum += __shfl_sync(kFull, share, n);
        add(acc, held.of(n), __shfl_sync(kFull, down, n));
    }
    return sum;
}

// The same, parts being splits: folds of kFold of them first, as ring_sm90a.cu adds them where a CTA makes a whole fold.
template <int Ahead>
__device__ __forceinline__ float in_folds(float2 ml, const Held<Ahead>& held, float (&acc)[4]) {
    const int parts = held.parts;
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
#pragma unroll 1
    for (int n = 0; n < parts; ++n) {
        held.want(n);
        const float older = __shfl_sync(kFull, down, n), newer = __shfl_sync(kFull, up, n);
        const float4 y = held.of(n);
        x = n % kFold == 0 ? y
                           : make_float4(taken_in(x.x, older, y.x, newer), taken_in(x.y, older, y.y, newer),
                                         taken_in(x.z, older, y.z, newer), taken_in(x.w, older, y.w, newer));
        if (n % kFold < kFold - 1 && n + 1 < parts) continue;
        sum += __shfl_sync(kFull, share, n);
        add(acc, x, __shfl_sync(kFull, times, n));
    }
    return sum;
}

template <typename T>
__device__ __forceinline__ void store4(T* to, const float (&x)[4]);

template <>
__device__ __forceinline__ void store4(float* to, const float (&x)[4]) {
    if ((size_t)to % 16 == 0) {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) store(to + e, x[e]);
}

template <>
__device__ __forceinline__ void store4(__nv_bfloat16* to, const float (&x)[4]) {
    if ((size_t)to % 8 == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) store(to + e, x[e]);
}

// A CTA has some heads of one row, as many at a time as its lanes hold.
template <int D, typename Out, int Ahead>
struct Merge {
    static constexpr int kLanes = D / 4, kHeads = kMergeThreads / kLanes;  // a lane has four outputs
    const AttendArgs& a;
    const float* part_o;
    const float2* part_ml;
    Out* out;
    const Walk& w;
    int row;
    float4 (*place)[kMergeThreads];  // for Ahead parts

    __device__ __forceinline__ size_t index_of(int head) const { return (size_t)row * a.q_heads + head; }
    __device__ __forceinline__ size_t step() const { return (size_t)a.rows * a.q_heads * D / 4; }
    __device__ __forceinline__ const float4* from(int head) const {
        return reinterpret_cast<const float4*>(part_o + index_of(head) * D) + threadIdx.x % kLanes;
    }
    // A lane of the warp weighs one part for all.
    __device__ __forceinline__ float2 weight_of(int head, int parts) const {
        const int mine = threadIdx.x % 32;
        if (mine >= parts || (CANOPY_FAULT(dropped_slice) && mine == 0)) return make_float2(-INFINITY, 0.f);
        return part_ml[(size_t)mine * a.rows * a.q_heads + index_of(head)];
    }

    // The outputs from their parts; whether they are in doubt.
    __device__ __forceinline__ bool add_up(float2 ml, const Held<Ahead>& held, float (&acc)[4]) const {
        // the levels of ring_sm90a.cu are powers of two already
        const float sum = w.chunk == 1 ? in_folds(ml, held, acc) : in_a_row(a.tiles ? 1.f : a.scale, ml, held, acc);
        bool doubtful = __any_sync(kFull, signbit(ml.y) != 0);
        const float whole = planted_ulp(sum), inverse = inverse_of(whole);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            acc[e] = share_of(acc[e], whole, inverse);
            doubtful |= !isfinite(acc[e]);
        }
        return doubtful;
    }

    __device__ __forceinline__ void leave(int head, const float (&acc)[4]) const {
        const size_t index = index_of(head), heads = (size_t)a.rows * a.q_heads;
        if (CANOPY_FAULT(gap) && index + 1 == heads) return;
        if (CANOPY_FAULT(overrun) && index + 1 == heads) store(out + heads * D, 0.f);
        store4(out + index * D + threadIdx.x % kLanes * 4, acc);
    }

    // kHeads heads from `first` on, and float64's answer where they are in doubt.
    __device__ __forceinline__ void finish(int first, int last, int parts, const __nv_bfloat16* q, const __nv_bfloat16* keys,
                                            const __nv_bfloat16* values, const uint32_t* mask, Exact<D>& x) const {
        const int lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes, head = min(first + own, last - 1);
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        bool doubtful = false;
        if (parts > 0) {
            const Held<Ahead> held{place, from(head), step(), parts};
            held.bring(0);
            doubtful = add_up(weight_of(head, parts), held, acc);
        } else if (w.slot >= 0) {
            acc[0] = acc[1] = acc[2] = acc[3] = NAN;  // lengths that the slot does not hold: nothing was read
        }
        for (int which = 0; which < kHeads; ++which) {
            if (!__syncthreads_or(doubtful && own == which && first + own < last)) continue;
            exact<D>(a, Head{w, row, first + which}, q, keys, values, mask, x);
            if (own != which) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float truth = (float)x.out[4 * lane + e];
                if (!isfinite(acc[e]) || !isfinite(truth)) acc[e] = truth;
            }
        }
        if (first + own < last) leave(head, acc);
    }

    // Outputs that ring_sm90a.cu gave: float64's answer where it left a mark.
    __device__ __forceinline__ void review(int first, int last, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,
                                            const uint32_t* mask, Exact<D>& x) const {
        const int mine = first + (int)threadIdx.x;
        if (!__syncthreads_or(mine < last && signbit(part_ml[index_of(min(mine, last - 1))].y))) return;
        for (int head = first; head < last; ++head) {
            if (!signbit(part_ml[index_of(head)].y)) continue;
            exact<D>(a, Head{w, row, head}, q, keys, values, mask, x);
            for (int d = threadIdx.x; d < D; d += kMergeThreads) {
                Out* const given = out + index_of(head) * D + d;
                const float truth = (float)x.out[d];
                if (!isfinite(to_f32(*given)) || !isfinite(truth)) store(given, truth);
            }
            __syncthreads();
        }
    }
};

template <int D, typename Out, int Ahead>
__device__ __forceinline__ void merge(const AttendArgs& a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,
                                      const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, const int* sequence,
                                      const float* part_o, const float2* part_ml, Out* out) {
    using M = Merge<D, Out, Ahead>;
    __shared__ Exact<D> x;
    __shared__ float4 held[Ahead][kMergeThreads];
    const int places = gridDim.x / a.rows, row = blockIdx.x / places, place = blockIdx.x - row * places;
    const int stream = a.alone ? 0 : a.block_size ? row / (int)a.block_size : sequence[row];
    const Walk w = walk_of<D>(a, stream, lens, slots, cu_nodes);
    const M merge{a, part_o, part_ml, out, w, row, held};
    const int turns = ((int)a.q_heads + M::kHeads * places - 1) / (M::kHeads * places), parts = w.slot >= 0 && w.fits ? w.parts() : 0;
    const int first = place * turns * M::kHeads, last = min(first + turns * M::kHeads, (int)a.q_heads);
    wait_for_kernels_ahead();
    next_may_begin();
    if (blockIdx.x == 0 && threadIdx.x == 0) planted_touch(q);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
    if (parts > 0 && w.direct()) return merge.review(first, last, q, keys, values, mask, x);
#endif
#pragma unroll 1
    for (int head = first; head < last; head += M::kHeads) merge.finish(head, last, parts, q, keys, values, mask, x);
}

}  // namespace canopy

// Parts under way and CTAs of a multiprocessor: few rows wait for memory once, many share it.
#define CANOPY_MERGE(D, NAME, OUT, AHEAD, CTAS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, CTAS) attend_merge_d##D##_##NAME(                                            \
        const __grid_constant__ AttendArgs a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,      \
        const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, const int* sequence, const float* part_o,    \
        const float2* part_ml, OUT* out) {                                                                                         \
        canopy::merge<D, OUT, AHEAD>(a, q, keys, values, lens, slots, cu_nodes, mask, sequence, part_o, part_ml, out);             \
    }

CANOPY_MERGE(256, f32, float, 16, 4)
CANOPY_MERGE(256, f32_many, float, 8, 6)
#ifndef CANOPY_CONTROLS
CANOPY_MERGE(256, bf16, __nv_bfloat16, 16, 4)
CANOPY_MERGE(128, bf16, __nv_bfloat16, 16, 4)
CANOPY_MERGE(128, f32, float, 16, 4)
CANOPY_MERGE(256, bf16_many, __nv_bfloat16, 8, 6)
CANOPY_MERGE(128, bf16_many, __nv_bfloat16, 8, 6)
CANOPY_MERGE(128, f32_many, float, 8, 6)
#endif
