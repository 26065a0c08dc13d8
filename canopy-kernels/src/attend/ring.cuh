// What ring_sm90a.cu is made of beside its jobs: the rows of one warpgroup.
#pragma once
#include "canopy/wgmma.cuh"
#include "job.cuh"
#include "lanes.cuh"

namespace canopy {

// A row's level is the power of two on a coarse grid that is nearest to its largest score when it last moved: rows of like scores have one
// level in every split, and then sums are added as they are.
constexpr float kGrid = 32.f;
constexpr float kReach = 16.f;  // powers of two by which weights may exceed 1 before the level moves

// Where the sums of a split go. Those that end a walk (`Ends` below) may be all that there are.
struct Leaving {
    const AttendArgs& a;
    size_t part;        // the first place of its part
    bool direct, last;  // one part has all keys; no split of this part follows
    float* part_o;
    float2* part_ml;
    void* out;
};

__device__ __forceinline__ void put(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float4 x) { *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)); }

template <int D>
struct Rows {
    using S = Ring<D>;
    static constexpr int kKeys = S::kKeys, kSteps = kKeys / 16;
    float o[D / 2], s[kKeys / 2], top[2], sum[2];
    uint32_t weights[kSteps][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < D / 2; ++e) o[e] = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = -INFINITY;
            sum[h] = 0.f;
        }
    }

    __device__ __forceinline__ void score(uint32_t q_at, uint32_t k_at) {
        const Described queries(anew(q_at), 0), keys(anew(k_at), 0);
#pragma unroll
        for (int step = 0; step < D / 16; ++step)
            products(s, queries.at(step / 4 * (S::kRows * 128) + step % 4 * 32), keys.at(step / 4 * (kKeys * 128) + step % 4 * 32), step > 0);
        products_issued();
    }

    __device__ __forceinline__ void mix(uint32_t v_at) {
        const Described values(anew(v_at), kKeys * 128);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) weighted(o, weights[step], values.at(step * 2048));
        products_issued();
    }

    __device__ __forceinline__ void settle_all() {
        settle(o);
        settle(s);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) settle(weights[step]);
    }

    // Once no product reads the last tile's weights any more.
    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) weights[t / 2][t % 2 * 2 + h] = pack_bf16(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]);
    }

    // Scores become weights, which are summed before they are rounded for the products: a rounding then moves an output by its own value
    // alone. `down` is what older sums are multiplied by.
    __device__ __forceinline__ void weigh(float scale, float (&down)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = -INFINITY;
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) most = fmaxf(most, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
            most = quad_max(most) * scale;
            const bool follows = most - top[h] > kReach;
            const float now = follows ? kGrid * rintf(most / kGrid) : top[h], level = fmaxf(now, -3e38f);
            down[h] = follows ? power_of_two(top[h] - level) : 1.f;
            top[h] = now;
            float added[2] = {0.f, 0.f};
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) {
                float* const x = s + 4 * t + 2 * h;
                x[0] = power_of_two(fmaf(x[0], scale, -level));
                x[1] = power_of_two(fmaf(x[1], scale, -level));
                added[0] = planted_half(added[0] + x[0]);
                added[1] = planted_half(added[1] + x[1]);
            }
            sum[h] = planted_half(fmaf(sum[h], down[h], planted_half(added[0] + added[1])));
        }
    }

    __device__ __forceinline__ void shrink(const float (&down)[2]) {
        if (!__any_sync(kFull, down[0] != 1.f || down[1] != 1.f)) return;
#pragma unroll
        for (int e = 0; e < D / 2; ++e) o[e] *= down[e / 2 % 2];
    }

    // The same once the outputs' products are done. The vote asks for the weights (their sum is never below zero), and the wait stands
    // behind its branch: otherwise the assembler moves the wait before the weights are made.
    __device__ __forceinline__ void finish(const float (&down)[2]) {
        if (__any_sync(kFull, down[0] != 1.f || down[1] != 1.f || sum[0] < 0.f || sum[1] < 0.f)) {
            products_done<0>();
            settle_all();
#pragma unroll
            for (int e = 0; e < D / 2; ++e) o[e] *= down[e / 2 % 2];
        } else {
            asm volatile("// no level has moved" ::: "memory");
            products_done<0>();
            settle_all();
        }
    }

    // Scores of keys that a row does not see become -infinity.
    __device__ __forceinline__ void hide(const Row* own, const uint32_t* mask, const Part& part) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = own[8 * h];
#pragma unroll
            for (int word = 0; word < kKeys / 32; ++word) {
                const uint32_t visible = seen_keys(row, mask, part.paths, part.key + 32 * word) >> (threadIdx.x % 4 * 2);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (!(visible >> (e / 2 * 8 + e % 2) & 1)) s[16 * word + e / 2 * 4 + 2 * h + e % 2] = -INFINITY;
            }
        }
    }

    // The sums of a warp's 16 rows, row by row in shared memory, where its lanes take a row side by side: few instructions, which a CTA
    // fetches when it comes to them, and whole lines in memory.
    static constexpr int kRowFloats = D + 8;  // rows begin eight banks apart

    __device__ __forceinline__ void lay_out(float* to, const Level (&sums)[2]) const {
        const int lane = anew(threadIdx.x) % 32;
        float* const at = to + lane / 4 * kRowFloats + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int t = 0; t < D / 8; ++t) *reinterpret_cast<float2*>(at + h * 8 * kRowFloats + 8 * t) = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
            if (lane % 4 == 0) *reinterpret_cast<float2*>(at + h * 8 * kRowFloats + D) = make_float2(sums[h].top, sums[h].sum);
        }
        __syncwarp();
    }

    // A row's outputs where one part has all its keys, in the steps of merge.cu, which looks again where the weights' sum has a sign.
    template <typename Out>
    __device__ __forceinline__ static void give(const Leaving& to, int index, const float* from, Level sums, Out* out) {
        const int lane = anew(threadIdx.x) % 32, heads = to.a.rows * to.a.q_heads;
        const float times = sums.top == -INFINITY ? 0.f : 1.f, whole = __fmul_rn(fabsf(sums.sum), times), sum = planted_ulp(whole);
        const float inverse = inverse_of(sum);
        float finite = 0.f;
        float4 x[D / 128];
#pragma unroll
        for (int n = 0; n < D / 128; ++n) {
            x[n] = reinterpret_cast<const float4*>(from)[lane + 32 * n];
            for (float* y : {&x[n].x, &x[n].y, &x[n].z, &x[n].w}) {
                *y = share_of(fmaf(*y, times, 0.f), sum, inverse);
                finite = fmaf(*y, 0.f, finite);
            }
        }
        const bool doubtful = __any_sync(kFull, finite != 0.f) || signbit(sums.sum);
        if (CANOPY_FAULT(gap) && index + 1 == heads) return;
        if (lane == 0) to.part_ml[index] = make_float2(sums.top, doubtful ? -whole : whole);
        if (CANOPY_FAULT(overrun) && index + 1 == heads) store(out + (size_t)heads * D, 0.f);
#pragma unroll
        for (int n = 0; n < D / 128; ++n) put(out + (size_t)index * D + 4 * lane + 128 * n, x[n]);
    }

    // The rows that `lay_out` put down, to the outputs or to their part.
    __device__ __forceinline__ static void deliver(const Leaving& to, const Row* rows, const float* from) {
        const int lane = anew(threadIdx.x) % 32;
#pragma unroll 1
        for (int r = 0; r < 16; ++r, from += kRowFloats) {
            const int index = rows[r].place;
            if (index < 0) continue;
            const float2 sums = *reinterpret_cast<const float2*>(from + D);
            if (!to.direct) {
                const size_t place = to.part + index;
                if (lane == 0) to.part_ml[place] = sums;
#pragma unroll
                for (int n = 0; n < D / 128; ++n)
                    reinterpret_cast<float4*>(to.part_o + place * D)[lane + 32 * n] = reinterpret_cast<const float4*>(from)[lane + 32 * n];
            } else if (to.a.wide) {
                give(to, index, from, Level{sums.x, sums.y}, static_cast<float*>(to.out));
            } else {
                give(to, index, from, Level{sums.x, sums.y}, static_cast<__nv_bfloat16*>(to.out));
            }
        }
    }

    // Adds the sums of a split to those of the fold's splits before it, which lie in shared memory at `fold`; the last one's go to memory, or
    // are to be laid out.
    template <bool Ends>
    __device__ __forceinline__ bool hold(const Leaving& to, const Row* own, int nth, uint32_t marks, Level (&so_far)[2], float2* fold) {
        const int lane = anew(threadIdx.x) % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float whole = quad_sum(sum[h]);
            const Level mine = {top[h], marks >> h & 1 ? -whole : whole};
            float2* const held = fold + h * (D / 8) * S::kWorkers;
            if (nth == 0) {
                so_far[h] = mine;
            } else {
                float down, up;
                take_in(so_far[h], mine, down, up);
#pragma unroll
                for (int t = 0; t < D / 8; ++t) {
                    const float2 x = held[t * S::kWorkers];
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& y = o[4 * t + 2 * h + c];
                        y = taken_in(c ? x.y : x.x, down, y, up);
                    }
                }
            }
            if (!to.last) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) held[t * S::kWorkers] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
                continue;
            }
            const int index = own[8 * h].place;
            if (Ends || index < 0) continue;
            const size_t place = to.part + index;
            if (lane % 4 == 0) to.part_ml[place] = make_float2(so_far[h].top, so_far[h].sum);
            float2* const out = reinterpret_cast<float2*>(to.part_o + place * D) + lane % 4;
#pragma unroll
            for (int t = 0; t < D / 8; ++t) out[4 * t] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
        }
        return Ends && to.last;
    }

    // Adds the sums of split `nth` of a part to those of the splits before it, which lie in memory where this thread put them; or they are to be
    // laid out.
    template <bool Ends>
    __device__ __forceinline__ bool leave(const Leaving& to, const Row* own, int nth, uint32_t marks, Level (&so_far)[2]) {
        const int lane = anew(threadIdx.x) % 32;
        const bool laid_out = Ends && to.last && (nth == 0 || to.direct);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float whole = quad_sum(sum[h]);
            const Level mine = {top[h], marks >> h & 1 ? -whole : whole};
            if (Ends && nth == 0 && to.last) {
                so_far[h] = mine;
                continue;
            }
            float down = 1.f, up = 1.f;
            // where there are no sums yet, or no new ones, these are zeros
            const bool level = nth == 0 || so_far[h].top == mine.top || so_far[h].top == -INFINITY || mine.top == -INFINITY;
            const bool plain = __all_sync(kFull, level);
            if (nth == 0)
                so_far[h] = mine;
            else
                take_in(so_far[h], mine, down, up);
            const int index = own[8 * h].place;
            if (index < 0) continue;
            const size_t place = to.part + index;
            float2* const out = reinterpret_cast<float2*>(to.part_o + place * D) + lane % 4;
            if (laid_out) {
                take<8>(h, out, down, up);
                continue;
            }
            if (lane % 4 == 0) to.part_ml[place] = make_float2(so_far[h].top, so_far[h].sum);
            if (nth == 0) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) out[4 * t] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
            } else if (plain) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) add_in_memory(out + 4 * t, o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
            } else {
                constexpr int kAhead = 8;
#pragma unroll
                for (int first = 0; first < D / 8; first += kAhead) {
                    float2 held[kAhead];
#pragma unroll
                    for (int t = 0; t < kAhead; ++t) held[t] = __ldcg(out + 4 * (first + t));  // where additions in memory are seen
#pragma unroll
                    for (int t = 0; t < kAhead; ++t) {
                        const float* mine = o + 4 * (first + t) + 2 * h;
                        out[4 * (first + t)] = make_float2(taken_in(held[t].x, down, mine[0], up), taken_in(held[t].y, down, mine[1], up));
                    }
                }
            }
        }
        return laid_out;
    }

    // Takes a row's sums so far from memory, `Ahead` loads at a time.
    template <int Ahead>
    __device__ __forceinline__ void take(int h, const float2* from, float down, float up) {
#pragma unroll
        for (int first = 0; first < D / 8; first += Ahead) {
            float2 held[Ahead];
#pragma unroll
            for (int t = 0; t < Ahead; ++t) held[t] = __ldcg(from + 4 * (first + t));  // where additions in memory are seen
#pragma unroll
            for (int t = 0; t < Ahead; ++t) {
                float* const x = o + 4 * (first + t) + 2 * h;
                x[0] = taken_in(held[t].x, down, x[0], up);
                x[1] = taken_in(held[t].y, down, x[1], up);
            }
        }
    }

    // Times zero: NaN where an output is not finite.
    __device__ __forceinline__ bool broken() const {
        float finite = 0.f;
#pragma unroll
        for (int e = 0; e < D / 2; ++e) finite = fmaf(o[e], 0.f, finite);
        return finite != 0.f;
    }
};

}  // namespace canopy
