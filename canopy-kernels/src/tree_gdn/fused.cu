// tree_gdn verify, fused design: one launch for norms, G, C, the projections of S0, the solve, outputs and the tape.
//
// One CTA owns NV value columns of one value head of one sequence and all its nodes (at most TP). q and k rows lie raw (bf16) in shared
// memory and are multiplied on tensor cores; the L2 norms, decays and write strengths scale the f32 products. Tier A splits S0 into two
// bf16 parts (2^-17 of an element is left out), tier B rounds it once.
// G and C are kept by root path: entry m of row i belongs to the ancestor of i at depth m, so a row costs its depth, not the tree's size.
// The solve follows the plan: steps in order, the items of a step in parallel over warps, a lane owns a column. Sums over a path run from
// the root down, one FMA each, and touch nothing off the path: a row's bits depend on its root path alone, and a NaN reaches
// descendants only.
// Shared memory: (2 TP + 2 NV) rows of 256 bytes (R and exp(g_cum) q S0 take their place after the products), 8 bytes a path entry,
// 24 bytes a node, and the plan.
#include "canopy/mma.cuh"
#include "args.cuh"
#include "rows.cuh"

namespace canopy {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The twin of plan.rs: words of a sequence's plan.
struct Plan {
    uint32_t steps, items, entries, max_depth;
    const uint32_t* info;   // [nodes] depth | first entry / 4 << 8
    const uint32_t* tiles;  // [ceil(nodes / 16)] column tiles of eight nodes that hold a path node of these sixteen rows
    const uint32_t* ends;   // [steps] items up to the end of the step
    const uint2* item;      // [items] x: first position in order | count << 16; y: first depth | end depth << 16 (0xffff: to the end)
    const uint8_t* path;    // [entries] nodes of every root path
    const uint8_t* order;   // nodes of the items
};

__device__ __forceinline__ Plan read_plan(const uint32_t* words, int nodes) {
    Plan p;
    p.steps = words[0];
    p.items = words[1];
    p.entries = words[2];
    p.max_depth = words[3];
    p.info = words + 4;
    p.tiles = p.info + (nodes + 3) / 4 * 4;
    p.ends = p.tiles + 16;
    const uint32_t* rest = p.ends + (p.steps + 3) / 4 * 4;
    p.item = reinterpret_cast<const uint2*>(rest);
    p.path = reinterpret_cast<const uint8_t*>(rest + (2 * p.items + 3) / 4 * 4);
    p.order = p.path + (p.entries + 15) / 16 * 16;
    return p;
}

struct Scalars {
    float* g_cum;   // finite part of the cumulative log gate
    int* zeroed;    // depth of the last path node whose decay is exactly 0, else -1
    float* beta;
    float* k_norm;  // 1 / |k|
    float* q_norm;  // scale / |q|
    int* hop;
};

// exp of a cumulative log gate difference along a path, from the node at depth m to node i.
__device__ __forceinline__ float decay(const Scalars& s, int i, int j, int m) {
    return s.zeroed[i] > m ? 0.f : expf(s.g_cum[i] - s.g_cum[j]);
}

__device__ __forceinline__ float decay_from_root(const Scalars& s, int i) { return s.zeroed[i] >= 0 ? 0.f : expf(s.g_cum[i]); }

// g_cum by pointer jumping: the order of the sum depends on the node's depth alone. An infinite log gate is counted, not added.
__device__ void cumulative_gates(const Scalars& s, const Plan& p, const float* gates, int nodes, uint32_t v_heads, uint32_t hv) {
    const int i = threadIdx.x;
    int depth = 0, up = -1;
    if (i < nodes) {
        const float* row = gates + (size_t)i * 2 * v_heads;
        const float g = row[hv];
        depth = p.info[i] & 0xff;
        up = depth ? p.path[(p.info[i] >> 8) * 4 + depth - 1] : -1;
        const bool zero = g == -INFINITY;
        s.g_cum[i] = zero ? 0.f : g;
        s.zeroed[i] = zero ? depth : -1;
        s.beta[i] = row[v_heads + hv];
        s.hop[i] = up;
    }
    for (uint32_t reach = 1; reach <= p.max_depth; reach *= 2) {
        __syncthreads();
        float add = 0.f;
        int zero = -1, next = -1;
        if (up >= 0) {
            add = s.g_cum[up];
            zero = s.zeroed[up];
            next = s.hop[up];
        }
        __syncthreads();
        if (up >= 0) {
            s.g_cum[i] += add;
            s.zeroed[i] = max(s.zeroed[i], zero);
            s.hop[i] = next;
            up = next;
        }
    }
}

// 1 / norm of every q and k row; eight lanes share a row.
template <int TP>
__device__ void norms(const Scalars& s, const char* k_tile, const char* q_tile, float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp * 4 + lane / 8; r < 2 * TP; r += kWarps * 4) {
        const bool query = r >= TP;
        const int row = query ? r - TP : r;
        float sum = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 raw = *reinterpret_cast<const uint4*>((query ? q_tile : k_tile) + chunk_offset(row, lane % 8 * 2 + half));
            const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xffff0000u);
                sum = fmaf(high, high, fmaf(low, low, sum));
            }
        }
#pragma unroll
        for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFull, sum, offset);
        if (lane % 8 == 0) (query ? s.q_norm : s.k_norm)[row] = rsqrtf(sum + 1e-6f) * (query ? scale : 1.f);
    }
}

// One node of the solve: acc_u and acc_o over path depths [from, to), a lane owns columns lane + 32 c.
template <int NV, int STRIDE>
__device__ __forceinline__ void along_path(float (&acc_u)[NV / 32], float (&acc_o)[NV / 32], const float* g, const float* c,
                                           const uint8_t* path, const float* u, int from, int to, int lane) {
    for (int m = from; m < to; m += 4) {
        const float4 g4 = *reinterpret_cast<const float4*>(g + m), c4 = *reinterpret_cast<const float4*>(c + m);
        const uint32_t nodes4 = *reinterpret_cast<const uint32_t*>(path + m);
        const float gs[4] = {g4.x, g4.y, g4.z, g4.w}, cs[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (m + x >= to) break;
            const float* row = u + (nodes4 >> 8 * x & 0xff) * STRIDE + lane;
#pragma unroll
            for (int v = 0; v < NV / 32; ++v) {
                acc_u[v] = fmaf(gs[x], row[32 * v], acc_u[v]);
                acc_o[v] = fmaf(cs[x], row[32 * v], acc_o[v]);
            }
        }
    }
}

template <int TP, int NV, bool SPLIT_STATE, typename Out>
__device__ void fused(FusedArgs a, const __nv_bfloat16* qkv, const float* gates, const float* state, const int* cu_nodes,
                      const int* slots, const uint32_t* plans, const int* plan_at, Out* o, float* u_out, float* g_cum_out) {
    constexpr int kRowTiles = TP / 16, kUnits = 2 * kRowTiles;
    constexpr int kParts = kUnits < kWarps ? kWarps / kUnits : 1;      // warps that share a unit's column tiles
    constexpr int kPasses = kUnits < kWarps ? 1 : kUnits / kWarps;
    constexpr int kColTiles = NV / 8 / kParts > 0 ? NV / 8 / kParts : 1;
    constexpr int kStride = NV + 8;
    extern __shared__ __align__(128) char shared[];
    const uint32_t b = blockIdx.z, hv = blockIdx.y, h = hv / (a.v_heads / a.k_heads);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, slot = slots[b];
    const int col0 = blockIdx.x * NV;
    if (slot < 0) {
        for (int idx = tid; idx < nodes * NV; idx += kThreads) {
            const size_t at = ((size_t)(first + idx / NV) * a.v_heads + hv) * kDv + col0 + idx % NV;
            store(o + at, 0.f);
            u_out[at] = 0.f;
            if (col0 == 0 && idx % NV == 0) g_cum_out[(size_t)(first + idx / NV) * a.v_heads + hv] = 0.f;
        }
        return;
    }
    char* k_tile = shared;
    char* q_tile = k_tile + TP * kRowBytes;
    char* s_high = q_tile + TP * kRowBytes;
    char* s_low = s_high + NV * kRowBytes;
    float* g = reinterpret_cast<float*>(s_low + NV * kRowBytes);
    float* c = g + a.entries;
    Scalars s;
    s.g_cum = c + a.entries;
    s.zeroed = reinterpret_cast<int*>(s.g_cum + TP);
    s.beta = s.g_cum + 2 * TP;
    s.k_norm = s.g_cum + 3 * TP;
    s.q_norm = s.g_cum + 4 * TP;
    s.hop = reinterpret_cast<int*>(s.g_cum + 5 * TP);
    uint32_t* words = reinterpret_cast<uint32_t*>(s.g_cum + 6 * TP);

    const uint32_t* plan = plans + plan_at[b];
    const int plan_chunks = (plan_at[b + 1] - plan_at[b]) / 4;
    for (int idx = tid; idx < plan_chunks; idx += kThreads) copy16(shared_address(words + 4 * idx), plan + 4 * idx, true);
    copies_done();
    const size_t width = qkv_width(a.k_heads, a.v_heads);
    const __nv_bfloat16* rows = qkv + (size_t)first * width;
    for (int idx = tid; idx < TP * 32; idx += kThreads) {
        const int row = idx / 32, part = idx % 32;  // 16 chunks of k, then 16 of q
        const bool query = part >= 16, valid = row < nodes;
        const __nv_bfloat16* src = rows + (size_t)(valid ? row : 0) * width + ((query ? 0 : a.k_heads) + h) * kDk + part % 16 * 8;
        copy16(shared_address(query ? q_tile : k_tile) + chunk_offset(row, part % 16), src, valid);
    }
    const float* s0 = state + (((size_t)slot * a.v_heads + hv) * kDv + col0) * kDk;
    constexpr int kStateChunks = NV * 16 / kThreads;
    float4 raw[kStateChunks][2];
#pragma unroll
    for (int x = 0; x < kStateChunks; ++x) {
        const float* src = s0 + (size_t)(tid + x * kThreads) * 8;
        raw[x][0] = load4(src);
        raw[x][1] = load4(src + 4);
    }
    __syncthreads();
    const Plan p = read_plan(words, nodes);
    cumulative_gates(s, p, gates + (size_t)first * 2 * a.v_heads, nodes, a.v_heads, hv);
#pragma unroll
    for (int x = 0; x < kStateChunks; ++x) {
        const int idx = tid + x * kThreads;
        const uint32_t at = chunk_offset(idx / 16, idx % 16);
        const float4 l = raw[x][0], r = raw[x][1];
        *reinterpret_cast<uint4*>(s_high + at) =
            make_uint4(pack_bf16(l.x, l.y), pack_bf16(l.z, l.w), pack_bf16(r.x, r.y), pack_bf16(r.z, r.w));
        if (SPLIT_STATE)
            *reinterpret_cast<uint4*>(s_low + at) =
                make_uint4(pack_bf16(residual(l.x), residual(l.y)), pack_bf16(residual(l.z), residual(l.w)),
                           pack_bf16(residual(r.x), residual(r.y)), pack_bf16(residual(r.z), residual(r.w)));
    }
    copies_done();
    __syncthreads();
    norms<TP>(s, k_tile, q_tile, a.scale);
    if (col0 == 0 && tid < nodes)
        g_cum_out[(size_t)(first + tid) * a.v_heads + hv] = s.zeroed[tid] >= 0 ? -INFINITY : s.g_cum[tid];
    __syncthreads();

    const bool query = kParts > 1 ? (warp / kParts) & 1 : warp & 1;
    const int part = kParts > 1 ? warp % kParts : 0;
    const uint32_t tile = shared_address(query ? q_tile : k_tile);
    float acc[kPasses][kColTiles][4];
#pragma unroll
    for (int x = 0; x < kPasses; ++x) {
        const int row0 = (kParts > 1 ? warp / kParts : warp + x * kWarps) / 2 * 16;
#pragma unroll
        for (int t = 0; t < kColTiles; ++t) acc[x][t][0] = acc[x][t][1] = acc[x][t][2] = acc[x][t][3] = 0.f;
        if (row0 >= nodes) continue;
        uint32_t frag[8][4];
#pragma unroll
        for (int step = 0; step < 8; ++step) load_a(frag[step], tile, row0, step, lane);
        uint32_t bits = p.tiles[row0 / 16];
        if (kParts == 2) bits &= 0x55555555u << part;
        if (kParts == 4) bits &= 0x11111111u << part;
        while (bits) {
            const int j0 = (__ffs(bits) - 1) * 8;
            bits &= bits - 1;
            float dot[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                uint32_t f[4];
                load_b(f, shared_address(k_tile), j0, pair, lane);
                mma(dot, frag[2 * pair], f[0], f[1]);
                mma(dot, frag[2 * pair + 1], f[2], f[3]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = row0 + lane / 4 + e / 2 * 8, j = j0 + lane % 4 * 2 + e % 2;
                if (i >= nodes || j > i) continue;
                const uint32_t info = p.info[i], depth = info & 0xff, at = (info >> 8) * 4, m = p.info[j] & 0xff;
                if (m > depth || p.path[at + m] != j) continue;
                const float pair = dot[e] * s.k_norm[j] * decay(s, i, j, m);
                if (query) c[at + m] = pair * s.q_norm[i];
                else g[at + m] = -(s.beta[i] * (pair * s.k_norm[i]));
            }
        }
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
            for (int t = 0; t < kColTiles; ++t) {
                const int n0 = (part * kColTiles + t) * 8;
                if (n0 >= NV) continue;
                uint32_t f[4];
                load_b(f, shared_address(s_high), n0, pair, lane);
                mma(acc[x][t], frag[2 * pair], f[0], f[1]);
                mma(acc[x][t], frag[2 * pair + 1], f[2], f[3]);
                if (SPLIT_STATE) {
                    load_b(f, shared_address(s_low), n0, pair, lane);
                    mma(acc[x][t], frag[2 * pair], f[0], f[1]);
                    mma(acc[x][t], frag[2 * pair + 1], f[2], f[3]);
                }
            }
        }
    }
    __syncthreads();
    float* u = reinterpret_cast<float*>(shared);  // R, then U
    float* qs = u + TP * kStride;
    const __nv_bfloat16* values = rows + 2ull * a.k_heads * kDk + (size_t)hv * kDv + col0;
#pragma unroll
    for (int x = 0; x < kPasses; ++x) {
        const int row0 = (kParts > 1 ? warp / kParts : warp + x * kWarps) / 2 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row0 + lane / 4 + half * 8;
            if (i >= nodes) continue;
            const float down = decay_from_root(s, i) * (query ? s.q_norm[i] : s.k_norm[i]), write = s.beta[i];
#pragma unroll
            for (int t = 0; t < kColTiles; ++t) {
                const int e = (part * kColTiles + t) * 8 + lane % 4 * 2;
                if (e >= NV) continue;
                const float2 dot = make_float2(acc[x][t][2 * half], acc[x][t][2 * half + 1]);
                if (query) {
                    *reinterpret_cast<float2*>(qs + i * kStride + e) = make_float2(down * dot.x, down * dot.y);
                } else {
                    const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(values + (size_t)i * width + e));
                    *reinterpret_cast<float2*>(u + i * kStride + e) = make_float2(write * (v.x - down * dot.x), write * (v.y - down * dot.y));
                }
            }
        }
    }
    __syncthreads();

    uint32_t begin = 0;
    for (uint32_t step = 0; step < p.steps; ++step) {
        const uint32_t end = p.ends[step];
        for (uint32_t at = begin + warp; at < end; at += kWarps) {
            const uint2 item = p.item[at];
            const int from = item.y & 0xffff, to = item.y >> 16;
            for (uint32_t n = item.x & 0xffff; n < (item.x & 0xffff) + (item.x >> 16); ++n) {
                const int i = p.order[n];
                const uint32_t info = p.info[i], depth = info & 0xff, entry = (info >> 8) * 4;
                float acc_u[NV / 32], acc_o[NV / 32];
#pragma unroll
                for (int v = 0; v < NV / 32; ++v) {
                    acc_u[v] = u[i * kStride + 32 * v + lane];
                    acc_o[v] = qs[i * kStride + 32 * v + lane];
                }
                along_path<NV, kStride>(acc_u, acc_o, g + entry, c + entry, p.path + entry, u, from, min(to, (int)depth), lane);
                const bool final = to == 0xffff;
                const float own = c[entry + depth];
                const size_t out = ((size_t)(first + i) * a.v_heads + hv) * kDv + col0 + lane;
#pragma unroll
                for (int v = 0; v < NV / 32; ++v) {
                    u[i * kStride + 32 * v + lane] = acc_u[v];
                    if (final) {
                        store(o + out + 32 * v, fmaf(own, acc_u[v], acc_o[v]));
                        u_out[out + 32 * v] = acc_u[v];
                    } else {
                        qs[i * kStride + 32 * v + lane] = acc_o[v];
                    }
                }
                __syncwarp();
            }
        }
        begin = end;
        if (step + 1 < p.steps) __syncthreads();
    }
}

}  // namespace canopy

#define CANOPY_FUSED(NODES, COLS, TIER, SPLIT, OUT, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 1) tree_gdn_fused_n##NODES##_v##COLS##_##TIER##_##OUT(                           \
        FusedArgs args, const __nv_bfloat16* qkv, const float* gates, const float* state, const int* cu_nodes, const int* slots,       \
        const uint32_t* plans, const int* plan_at, T* o, float* u, float* g_cum) {                                                    \
        canopy::fused<NODES, COLS, SPLIT, T>(args, qkv, gates, state, cu_nodes, slots, plans, plan_at, o, u, g_cum);                   \
    }

#define CANOPY_FUSED_TIERS(NODES, COLS)                          \
    CANOPY_FUSED(NODES, COLS, a, true, f32, float)               \
    CANOPY_FUSED(NODES, COLS, b, false, bf16, __nv_bfloat16)

CANOPY_FUSED_TIERS(16, 32)
CANOPY_FUSED_TIERS(32, 32)
CANOPY_FUSED_TIERS(64, 32)
CANOPY_FUSED_TIERS(128, 32)
CANOPY_FUSED_TIERS(256, 32)
CANOPY_FUSED_TIERS(16, 64)
CANOPY_FUSED_TIERS(64, 64)
CANOPY_FUSED_TIERS(128, 64)
