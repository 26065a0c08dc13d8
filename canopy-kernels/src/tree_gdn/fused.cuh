// tree_gdn verify, fused design: one launch for norms, G, C, the projections of S0, the solve, outputs and the tape. With a path left by
// the round before it also commits that path while it loads S0: one read and one write of the state a round.
//
// One CTA owns NV value columns of one value head of one sequence and all its nodes (at most TP). q and k rows lie raw (bf16, or f32 in the
// wide blocks) in shared memory and are multiplied on tensor cores; the L2 norms, decays and write strengths scale the f32 products. Tier A
// splits S0 into two bf16 parts (2^-17 of an element is left out), tier B rounds it once; wide blocks keep it and multiply as rows.cuh says.
// A plan has its own numbers for the nodes, by which all shared memory goes; rows outside are those that it names (row_of).
// G and C are kept by root path: entry m of row i belongs to the ancestor of i at depth m, so a row costs its depth, not the tree's size.
// The solve follows the plan: steps in order, the items of a step side by side, four in a warp, 32 columns a team of warps. Sums over a path
// run from the root down, one FMA each, and touch nothing off the path: a row's bits depend on its root path alone, and a NaN
// reaches descendants only.
// Shared memory: 2 TP + 2 NV rows of 256 bytes (tier B: 2 TP + NV; wide blocks: 2 TP + NV rows of 512), whose place R and exp(g_cum) q S0 take after the products, 8 bytes a
// path entry, 28 bytes a node, and the plan.
#pragma once
#include "canopy/fault.cuh"
#include "canopy/gdn_rows.cuh"
#include "canopy/mma.cuh"
#include "canopy/plan.cuh"
#include "canopy/ptx.cuh"
#include "args.cuh"
#include "replay.cuh"
#include "rows.cuh"

namespace canopy {

// What a node brings to a product, read as one 16-byte word.
struct __align__(16) Node {
    float g_cum;   // finite part of the cumulative log gate
    int zeroed;    // depth of the last path node whose decay is exactly 0, else -1
    float k_norm;  // 1 / |k|
    int depth;
};

struct Scalars {
    Node* node;
    float* beta;
    float* q_norm;  // scale / |q|
    int* hop;
};

__device__ __forceinline__ Node read_node(const Scalars& s, int i) {
    const int4 raw = *reinterpret_cast<const int4*>(s.node + i);
    return {__int_as_float(raw.x), raw.y, __int_as_float(raw.z), raw.w};
}

// g_cum by pointer jumping: the order of the sum depends on the node's depth alone. An infinite log gate is counted, not added.
template <typename RowOf>
__device__ void cumulative_gates(const Scalars& s, const Plan& p, RowOf row_of, const float* gates, int nodes, uint32_t v_heads, uint32_t hv) {
    const int i = threadIdx.x;
    int depth = 0, up = -1;
    if (i < nodes) {
        const float* row = gates + (size_t)row_of(i) * 2 * v_heads;
        const float g = row[hv];
        depth = p.info[i] & 0xff;
        up = depth ? p.path[(p.info[i] >> 8) * 4 + depth - 1] : -1;
        const bool zero = g == -INFINITY;
        s.node[i].g_cum = zero ? 0.f : g;
        s.node[i].zeroed = zero ? depth : -1;
        s.node[i].depth = depth;
        s.beta[i] = row[v_heads + hv];
        s.hop[i] = up;
    }
    for (uint32_t reach = 1; reach <= p.max_depth; reach *= 2) {
        __syncthreads();
        float add = 0.f;
        int zero = -1, next = -1;
        if (up >= 0) {
            add = s.node[up].g_cum;
            zero = s.node[up].zeroed;
            next = s.hop[up];
        }
        __syncthreads();
        if (up >= 0) {
            s.node[i].g_cum += add;
            s.node[i].zeroed = max(s.node[i].zeroed, zero);
            s.hop[i] = next;
            up = next;
        }
    }
}

// The four consecutive columns of a lane.
struct Columns {
    float x[4];
    __device__ __forceinline__ static Columns read(const float* p) {
        Columns c;
        *reinterpret_cast<float4*>(c.x) = *reinterpret_cast<const float4*>(p);
        return c;
    }
    __device__ __forceinline__ void write(float* p) const { *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]); }
    __device__ __forceinline__ void write(__nv_bfloat16* p) const {
        *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    }
    __device__ __forceinline__ void add(float w, const Columns& c) {
#pragma unroll
        for (int v = 0; v < 4; ++v) x[v] = planted_half(fmaf(w, c.x[v], x[v]));
    }
};

// Path depths [from, to) of one row, added to its u and o.
template <int STRIDE>
__device__ __forceinline__ void along_path(Columns& acc_u, Columns& acc_o, const float* g, const float* c,
                                           const uint8_t* path, const float* u, int from, int to) {
#pragma unroll 2
    for (int m = from; m < to; m += 4) {
        const float4 g4 = *reinterpret_cast<const float4*>(g + m), c4 = *reinterpret_cast<const float4*>(c + m);
        const uint32_t nodes4 = *reinterpret_cast<const uint32_t*>(path + m);
        const float gs[4] = {g4.x, g4.y, g4.z, g4.w}, cs[4] = {c4.x, c4.y, c4.z, c4.w};
        Columns us[4];
#pragma unroll
        for (int x = 0; x < 4; ++x)  // entries past the path's end name the node itself: read, not used
            us[x] = Columns::read(u + (nodes4 >> 8 * x & 0xff) * STRIDE);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (m + x >= to || (CANOPY_FAULT(dropped_slice) && m == 4)) continue;
            acc_u.add(gs[x], us[x]);
            acc_o.add(cs[x], us[x]);
        }
    }
}

// Raw products become G and C: norms, decay along the path and write strength, four entries a thread.
template <int THREADS>
__device__ __forceinline__ void scale_entries(const Scalars& s, const Plan& p, float* g, float* c) {
    for (uint32_t four = threadIdx.x; four < p.entries / 4; four += THREADS) {
        const int i = p.rows[four];
        const Node own = read_node(s, i);
        const float to_g = -s.beta[i] * own.k_norm, to_c = s.q_norm[i];
        const uint32_t nodes4 = reinterpret_cast<const uint32_t*>(p.path)[four];
        float gs[4], cs[4];
        *reinterpret_cast<float4*>(gs) = reinterpret_cast<float4*>(g)[four];
        *reinterpret_cast<float4*>(cs) = reinterpret_cast<float4*>(c)[four];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const Node other = read_node(s, nodes4 >> 8 * x & 0xff);
            const float down = (own.zeroed > other.depth ? 0.f : expf(own.g_cum - other.g_cum)) * other.k_norm;
            gs[x] *= down * to_g;
            cs[x] *= down * to_c;
        }
        reinterpret_cast<float4*>(g)[four] = *reinterpret_cast<float4*>(gs);
        reinterpret_cast<float4*>(c)[four] = *reinterpret_cast<float4*>(cs);
    }
}

template <int TP, int NV, int THREADS, bool SPLIT_STATE, typename Out, typename Before, typename Row>
__device__ void fused(FusedArgs a, Before before, const Row* qkv, const float* gates, typename Before::State* state,
                      const int* cu_nodes, const int* slots, const uint32_t* plans, const int* plan_at, Out* o, float* u_out,
                      float* g_cum_out) {
    constexpr int kWarps = THREADS / 32, kUnits = TP / 8;  // a unit is sixteen rows of k or of q
    constexpr int kParts = kUnits < kWarps ? kWarps / kUnits : 1;      // warps that share a unit's column tiles
    constexpr int kPasses = kUnits < kWarps ? 1 : kUnits / kWarps;
    constexpr int kColTiles = NV / 8 / kParts;
    constexpr int kStride = NV + 8, kBytes = RowTile<Row>::kBytes, kSteps = RowTile<Row>::kSteps;
    constexpr bool kWide = kBytes == 512;
    constexpr int kTeams = NV / 32, kTeamWarps = kWarps / kTeams;  // a team of warps solves 32 columns, eight lanes a node
    extern __shared__ __align__(128) char shared[];
    next_may_begin();
    const uint32_t b = blockIdx.z, hv = blockIdx.y, h = hv / (a.v_heads / a.k_heads);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, slot = slots[b];
    const int col0 = blockIdx.x * NV;
    if (slot < 0) {
        wait_for_kernels_ahead();
        if (slot < -1) return;  // another launch's
        for (int idx = tid; idx < nodes * NV; idx += THREADS) {
            const size_t at = ((size_t)(first + idx / NV) * a.v_heads + hv) * kDv + col0 + idx % NV;
            store(o + at, 0.f);
            u_out[at] = 0.f;
            if (col0 == 0 && idx % NV == 0) g_cum_out[(size_t)(first + idx / NV) * a.v_heads + hv] = 0.f;
        }
        return;
    }
    char* k_tile = shared;
    char* q_tile = k_tile + TP * kBytes;
    char* s_high = q_tile + TP * kBytes;
    char* s_low = s_high + NV * kBytes;
    constexpr int kTiles = (2 * TP + (SPLIT_STATE ? 2 : 1) * NV) * kBytes, kAfter = 8 * TP * kStride;
    float* g = reinterpret_cast<float*>(shared + (kTiles > kAfter ? kTiles : kAfter));
    float* c = g + a.entries;
    Scalars s;
    s.node = reinterpret_cast<Node*>(c + a.entries);
    s.beta = reinterpret_cast<float*>(s.node + TP);
    s.q_norm = s.beta + TP;
    s.hop = reinterpret_cast<int*>(s.q_norm + TP);
    uint32_t* words = reinterpret_cast<uint32_t*>(s.hop + TP);

    const uint32_t* plan = plans + plan_at[b];
    // lane x has the row of node x kWarps + warp
    static_assert(TP / kWarps <= 32, "a lane has one row at most");
    constexpr bool kCounted = TP > kAsGiven;
    uint32_t own_row = 0;
    if (kCounted && lane * kWarps + warp < nodes) own_row = __ldcg(Plan::rows_of(plan) + lane * kWarps + warp);
    const int plan_chunks = (plan_at[b + 1] - plan_at[b]) / 4;
    for (int idx = tid; idx < plan_chunks; idx += THREADS) copy16(shared_address(words + 4 * idx), plan + 4 * idx, true);
    copies_issued();
    wait_for_kernels_ahead();  // lists are not written by kernels that let others begin
    typename Before::State* s0 = state + (((size_t)slot * a.v_heads + hv) * kDv + col0) * kDk;
    constexpr int kStateChunks = NV * 16 / THREADS, kHeld = kStateChunks < 4 ? kStateChunks : 4;
    float4 raw[kHeld][2];
    const auto fetch_state = [&](int from) {
#pragma unroll
        for (int x = 0; x < kHeld; ++x) {
            const float* src = s0 + (size_t)(tid + (from + x) * THREADS) * 8;
            raw[x][0] = load4(src);
            raw[x][1] = load4(src + 4);
        }
    };
    // it covers the wait for the rows' numbers; more of it would spill
    constexpr bool kStateFirst = kCounted && kHeld <= 2;
    if (kStateFirst) fetch_state(0);
    const uint32_t width = (uint32_t)qkv_width(a.k_heads, a.v_heads);  // 256 rows have no more than 2^32 elements
    const Row* rows = qkv + (size_t)first * width;
    const auto row_at = [&](int x) { return rows + (kCounted ? __shfl_sync(kFull, own_row, x) : x * kWarps + warp) * width; };
    if constexpr (kWide) {  // a lane copies a chunk of the k row and one of the q row
        const uint32_t to_k = shared_address(k_tile), to_q = shared_address(q_tile);
#pragma unroll 4
        for (int x = 0; x < TP / kWarps; ++x) {
            const int i = x * kWarps + warp;
            const bool valid = i < nodes;
            const Row* src = row_at(x) + (size_t)h * kDk + lane * 4;
            copy16(to_k + chunk_at<Row>(i, lane), valid ? src + (size_t)a.k_heads * kDk : rows, valid);
            copy16(to_q + chunk_at<Row>(i, lane), valid ? src : rows, valid);
        }
    } else {  // lanes 0 to 15 copy the chunks of a k row, 16 to 31 those of the q row
        const size_t head = ((lane / 16 ? 0 : a.k_heads) + h) * kDk + lane % 16 * 8;
        const uint32_t dst = shared_address(lane / 16 ? q_tile : k_tile);
#pragma unroll
        for (int x = 0; x < TP / kWarps; ++x) {
            const int i = x * kWarps + warp;
            const bool valid = i < nodes;
            const Row* src = row_at(x) + head;
            copy16(dst + chunk_at<Row>(i, lane % 16), valid ? src : rows, valid);
        }
    }
    copies_issued();
    const Row* values = rows + 2ull * a.k_heads * kDk + (size_t)hv * kDv + col0;
    if (tid < nodes) prefetch(values + (size_t)tid * width);
    if (!kStateFirst) fetch_state(0);
    typename Before::template Replay<NV, THREADS> replay(before, a.k_heads, a.v_heads, hv, col0);
    copies_arrived<1>();
    __syncthreads();
    const Plan p = read_plan(words, nodes);
    const auto row_of = [&](int i) { return kCounted ? (int)p.row_of[i] : i; };
    cumulative_gates(s, p, row_of, gates + (size_t)first * 2 * a.v_heads, nodes, a.v_heads, hv);
#pragma unroll
    for (int from = 0; from < kStateChunks; from += kHeld) {
        if (from) fetch_state(from);
        replay.template apply<kHeld>(raw, s0, tid + from * THREADS);
#pragma unroll
        for (int x = 0; x < kHeld; ++x) {
            const int idx = tid + (from + x) * THREADS;
            const float4 l = raw[x][0], r = raw[x][1];
            if constexpr (kWide) {
                *reinterpret_cast<float4*>(s_high + chunk_at<Row>(idx / 16, idx % 16 * 2)) = l;
                *reinterpret_cast<float4*>(s_high + chunk_at<Row>(idx / 16, idx % 16 * 2 + 1)) = r;
                continue;
            }
            const uint32_t at = chunk_at<__nv_bfloat16>(idx / 16, idx % 16);
            *reinterpret_cast<uint4*>(s_high + at) =
                make_uint4(pack_bf16(l.x, l.y), pack_bf16(l.z, l.w), pack_bf16(r.x, r.y), pack_bf16(r.z, r.w));
            if (SPLIT_STATE)
                *reinterpret_cast<uint4*>(s_low + at) =
                    make_uint4(pack_bf16(residual(l.x), residual(l.y)), pack_bf16(residual(l.z), residual(l.w)),
                               pack_bf16(residual(r.x), residual(r.y)), pack_bf16(residual(r.z), residual(r.w)));
        }
    }
    copies_arrived<0>();
    __syncthreads();
    if (col0 == 0 && tid < nodes)
        g_cum_out[(size_t)(first + row_of(tid)) * a.v_heads + hv] = s.node[tid].zeroed >= 0 ? -INFINITY : s.node[tid].g_cum;

    const bool query = kParts > 1 ? (warp / kParts) & 1 : warp & 1;
    const int part = kParts > 1 ? warp % kParts : 0;
    const uint32_t tile = shared_address(query ? q_tile : k_tile);
    // every second pass runs backwards, because later rows have longer paths
    const auto row_tile = [&](int pass) {
        if (kParts > 1) return warp / kParts / 2;
        const int at = pass % 2 ? kWarps / 2 - 1 - warp / 2 : warp / 2;
        return pass * (kWarps / 2) + at;
    };
    float acc[kPasses][kColTiles][4];
#pragma unroll
    for (int x = 0; x < kPasses; ++x) {
        const int row0 = row_tile(x) * 16;
#pragma unroll
        for (int t = 0; t < kColTiles; ++t) acc[x][t][0] = acc[x][t][1] = acc[x][t][2] = acc[x][t][3] = 0.f;
        if (row0 >= nodes) continue;
        const Left<Row> left(tile, row0, lane);
        if (part == 0) {  // a row's squared norm is on the diagonal of the product of the tile with itself
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float dot[4];
                products<Row>(dot, left, tile, row0 + 8 * half, lane);
                const float square = lane / 4 % 2 ? dot[2 * half + 1] : dot[2 * half];
                const float norm = planted_ulp(rsqrtf(square + 1e-6f) * (query ? a.scale : 1.f));
                const int i = row0 + 8 * half + lane / 4;
                if (lane % 4 == lane / 8) *(query ? s.q_norm + i : &s.node[i].k_norm) = norm;
            }
        }
        const uint8_t* mask[2];
        float* entry[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row0 + lane / 4 + half * 8;
            mask[half] = i < nodes ? p.mask + i * p.mask_row : nullptr;
            entry[half] = (query ? c : g) + (i < nodes ? p.info[i] >> 8 : 0) * 4;
        }
        uint32_t bits = p.tiles[row0 / 16];
        if (kParts == 2) bits &= 0x55555555u << part;
        if (kParts == 4) bits &= 0x11111111u << part;
        while (bits) {
            const int j0 = (__ffs(bits) - 1) * 8;
            bits &= bits - 1;
            float dot[4];
            products<Row>(dot, left, shared_address(k_tile), j0, lane);
            uint32_t related[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) related[half] = mask[half] ? mask[half][j0 / 8] >> lane % 4 * 2 : 0;
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int depth = s.node[min(j0 + lane % 4 * 2 + side, TP - 1)].depth;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (related[half] >> side & 1) entry[half][depth] = dot[2 * half + side];
            }
        }
#pragma unroll(kWide ? 2 : 4)
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            uint32_t even[4], odd[4];
            load_left<Row>(even, tile, row0, 2 * pair, lane);
            load_left<Row>(odd, tile, row0, 2 * pair + 1, lane);
#pragma unroll
            for (int t = 0; t < kColTiles; ++t) {
                const int n0 = (part * kColTiles + t) * 8;
                uint32_t f[4];
                load_right<Row>(f, shared_address(s_high), n0, pair, lane);
                times<Row>(acc[x][t], even, f[0], f[1]);
                times<Row>(acc[x][t], odd, f[2], f[3]);
                if (SPLIT_STATE) {
                    load_right<Row>(f, shared_address(s_low), n0, pair, lane);
                    times<Row>(acc[x][t], even, f[0], f[1]);
                    times<Row>(acc[x][t], odd, f[2], f[3]);
                }
            }
        }
    }
    __syncthreads();
    scale_entries<THREADS>(s, p, g, c);
    float* u = reinterpret_cast<float*>(shared);  // R, then U
    float* qs = u + TP * kStride;
#pragma unroll
    for (int x = 0; x < kPasses; ++x) {
        const int row0 = row_tile(x) * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row0 + lane / 4 + half * 8;
            if (i >= nodes) continue;
            decltype(read_pair(values)) v_pairs[kColTiles];
            if (!query)
#pragma unroll
                for (int t = 0; t < kColTiles; ++t)
                    v_pairs[t] = read_pair(values + row_of(i) * width + (part * kColTiles + t) * 8 + lane % 4 * 2);
            const Node own = read_node(s, i);
            const float down = (own.zeroed >= 0 ? 0.f : expf(own.g_cum)) * (query ? s.q_norm[i] : own.k_norm), write = s.beta[i];
#pragma unroll
            for (int t = 0; t < kColTiles; ++t) {
                const int e = (part * kColTiles + t) * 8 + lane % 4 * 2;
                const float2 dot = make_float2(acc[x][t][2 * half], acc[x][t][2 * half + 1]);
                if (query) {
                    *reinterpret_cast<float2*>(qs + i * kStride + e) = make_float2(down * dot.x, down * dot.y);
                } else {
                    const float2 v = widened(v_pairs[t]);
                    *reinterpret_cast<float2*>(u + i * kStride + e) = make_float2(write * (v.x - down * dot.x), write * (v.y - down * dot.y));
                }
            }
        }
    }
    __syncthreads();

    const int team = warp % kTeams, col = team * 32 + lane % 8 * 4;
    uint32_t begin = 0;
    for (uint32_t step = 0; step < p.steps; ++step) {
        const uint32_t end = p.ends[step];
        for (uint32_t at = begin + warp / kTeams * 4 + lane / 8; at < end; at += kTeamWarps * 4) {
            const uint2 item = reinterpret_cast<const uint2*>(p.item)[at];
            const int from = item.y & 0xffff, to = item.y >> 16;
            for (uint32_t n = item.x & 0xffff; n < (item.x & 0xffff) + (item.x >> 16); ++n) {
                const uint32_t packed = p.order[n], depth = packed >> 8 & 0xff, entry = (packed >> 16) * 4;
                const int i = packed & 0xff, row = row_of(i);
                float* u_row = u + i * kStride + col;
                float* qs_row = qs + i * kStride + col;
                Columns acc_u = Columns::read(u_row), acc_o = Columns::read(qs_row);
                along_path<kStride>(acc_u, acc_o, g + entry, c + entry, p.path + entry, u + col, from, min(to, (int)depth) - CANOPY_FAULT(short_path));
                if (CANOPY_FAULT(leak)) acc_u.add(0.f, Columns::read(u + (nodes - 1) * kStride + col));
                acc_u.write(u_row);
                if (to == 0xffff) {
                    const size_t out = ((size_t)(first + row) * a.v_heads + hv) * kDv + col0 + col;
                    acc_o.add(c[entry + depth], acc_u);
                    acc_o.write(o + out);
                    if (!CANOPY_FAULT(gap) || row + 1 < nodes) acc_u.write(u_out + out);
                } else {
                    acc_o.write(qs_row);
                }
            }
        }
        begin = end;
        if constexpr (kTeamWarps == 1) __syncwarp();
        else meet<kTeamWarps * 32>(team + 1);
    }
    if (CANOPY_FAULT(overrun)) u_out[(size_t)cu_nodes[gridDim.z] * a.v_heads * kDv] = 0.f;
    if (tid == 0) planted_touch(qkv);
}

}  // namespace canopy
