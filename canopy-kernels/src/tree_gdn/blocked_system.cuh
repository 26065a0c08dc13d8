// The blocked design's system: rows, gates and norms of a CTA in shared memory, and the blocks of -G and C made from them.
#pragma once
#include "canopy/fault.cuh"
#include "canopy/gdn_rows.cuh"
#include "canopy/mma.cuh"
#include "canopy/tf32.cuh"
#include "args.cuh"

namespace canopy {

constexpr float kLargest = 3.402823466e38f;

// Rows of 128 bf16; 16-byte chunk c of row r lies at chunk c ^ spread(r): eight lanes that read four chunks of two neighbouring rows, as the
// fragments below do, meet eight different banks.
__device__ __forceinline__ int spread(int row) { return (row & 1) << 2 | (row >> 1 & 3); }

// Where a lane reads its words of row lane / 4 of eight: the summed index runs in the order 8 (lane % 4) + 0 .. 7 within 32.
struct RowWords {
    const char *even, *odd;  // of even and odd steps of 32

    __device__ __forceinline__ RowWords(const char* tile, int lane) {
        const int row = lane / 4, swap = spread(row) / 4 * 64;
        const char* at = tile + row * kRowBytes + ((lane % 4 ^ spread(row) % 4) << 4);
        even = at + swap;
        odd = at - swap;
    }

    // Of the eight rows from row0 on, a multiple of eight.
    __device__ __forceinline__ uint4 read(int row0, int step) const {
        return *reinterpret_cast<const uint4*>((step % 2 ? odd : even) + row0 * kRowBytes + 64 * step);
    }
};

// x moved by a quarter to a half of tf32's last place away from 0, so that the cut which products make errs to both sides; exact values stay
// exact under the cut, and what is not finite stays so.
__device__ __forceinline__ float for_cut(float x) { return fmaf(x, 0x1p-12f, x); }

// -G, then C, of 16 x 16 nodes, each {lane's four entries of rows 0 to 7, of rows 8 to 15}: row 8 half + lane / 4, columns 2 (lane % 4), + 1,
// + 8, + 9. The diagonal's -G becomes the inverse.
struct Block {
    float4 g[2][32], c[2][32];
};

// The next task of a list, to a warp; who makes a block changes no bit of it.
__device__ __forceinline__ int next_task(int* counter, int lane) {
    int task = 0;
    if (lane == 0) task = atomicAdd(counter, 1);
    return __shfl_sync(kFull, task, 0);
}

__device__ __forceinline__ int column_of(int lane, int entry) { return entry / 2 * 8 + lane % 4 * 2 + entry % 2; }

__device__ __forceinline__ int unit_of(int i, int j) { return i * (i + 1) / 2 + j; }

// kSets rows of blocks: the whole triangle as one, or two rows of it for trees of more than 128 nodes.
template <int TB, int NV, int THREADS>
struct Blocked {
    static constexpr bool kStaged = TB > 8;
    static constexpr int kNodes = 16 * TB, kWarps = THREADS / 32, kSets = kStaged ? 2 : 1, kUnits = kStaged ? TB : TB * (TB + 1) / 2;
    static constexpr int kSolvers = NV / 16, kWords = (TB + 1) / 2;
    static_assert(THREADS >= kNodes && kWarps >= kSolvers, "a thread a node, a warp sixteen columns");
    static_assert(!kStaged || kSolvers * 1024 <= 16 * kRowBytes, "U in the place of q");

    char k[kNodes * kRowBytes];
    char q[kNodes * kRowBytes];
    Block block[kSets][kUnits];
    float4 scale[kNodes];  // exp(g_cum) / |k|, beta, exp(g_cum) scale / |q|
    float2 gate[kNodes];   // finite part of g_cum; depth of the last path node whose decay is exactly 0, else -1
    float2 key[kNodes];    // 1 / |k|, depth
    float q_norm[kNodes];
    float beta[kNodes];
    int hop[kNodes];
    uint32_t mask[kNodes][kWords];
    uint32_t bad[kSolvers][16][kWords];  // nodes of a column that are not finite
    int live[kStaged ? kSets : 1][kStaged ? kUnits : 4];  // whether a block has an ancestor in it
    int next[TB];  // tasks that are taken
};

// Where a CTA and a warp of it work.
struct Place {
    int first, nodes, blocks, slot, col0, lane, warp;
    uint32_t hv, h, k_heads, v_heads;
    size_t width;

    __device__ __forceinline__ Place(const BlockedArgs& a, const int* cu_nodes, const int* slots, int columns)
        : lane(threadIdx.x % 32), warp(threadIdx.x / 32), hv(blockIdx.y), k_heads(a.k_heads), v_heads(a.v_heads) {
        const uint32_t b = blockIdx.z;
        first = cu_nodes[b];
        nodes = cu_nodes[b + 1] - first;
        slot = slots[b];
        blocks = (nodes + 15) / 16;
        col0 = blockIdx.x * columns;
        h = hv / (a.v_heads / a.k_heads);
        width = qkv_width(a.k_heads, a.v_heads);
    }

    // Element of a plane [N, Hv, Dv].
    __device__ __forceinline__ size_t at(int node, int col) const {
        return ((size_t)(first + node) * v_heads + hv) * kDv + col;
    }
};

// k and q rows on their way into shared memory, zeros up to a whole block.
template <typename S>
__device__ __forceinline__ void fetch_rows(S& s, const Place& p, const __nv_bfloat16* rows) {
    // lanes 0 to 15 copy the chunks of a k row, 16 to 31 those of the q row
    const __nv_bfloat16* src = rows + ((p.lane / 16 ? 0 : p.k_heads) + p.h) * kDk + p.lane % 16 * 8 + p.warp * p.width;
    const uint32_t dst = shared_address(p.lane / 16 ? s.q : s.k);
#pragma unroll 4
    for (int row = p.warp; row < 16 * p.blocks; row += S::kWarps) {
        copy16(dst + row * kRowBytes + ((p.lane % 16 ^ spread(row)) << 4), row < p.nodes ? src : rows, row < p.nodes);
        src += S::kWarps * p.width;
    }
    copies_issued();
}

// Masks, depths, write strengths, and g_cum by pointer jumping: the order of its sum depends on the node's depth alone. An infinite log gate is
// counted, not added.
template <typename S>
__device__ __forceinline__ void cumulative_gates(S& s, const Place& p, const float* gates, const int* parents, const uint32_t* masks,
                                                 float* g_cum_out) {
    const int i = threadIdx.x;
    const bool has = i < p.nodes;
    int up = -1, depth = -1;
    float beta = 0.f, g = 0.f;
    uint32_t bits[S::kWords];
    if (has) {
        const float* row = gates + (size_t)(p.first + i) * 2 * p.v_heads + p.hv;
        g = row[0];
        beta = row[p.v_heads];
        up = parents[p.first + i];
    }
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
        bits[w] = has ? masks[(size_t)(p.first + i) * kMaskWords + w] : 0;
        depth += __popc(bits[w]);
    }
    const bool zero = g == -INFINITY;
    if (i < S::kNodes) {
        s.gate[i] = make_float2(zero ? 0.f : g, __int_as_float(zero ? depth : -1));
        s.beta[i] = beta;
        s.hop[i] = up;
        s.key[i].y = __int_as_float(depth);
#pragma unroll
        for (int w = 0; w < S::kWords; ++w) s.mask[i][w] = bits[w];
    }
    if (i < S::kNodes / 16) s.next[i] = 0;
    for (int idx = threadIdx.x; idx < S::kSolvers * 16 * S::kWords; idx += 32 * S::kWarps) (&s.bad[0][0][0])[idx] = 0;
    while (__syncthreads_or(up >= 0)) {
        float2 add = make_float2(0.f, 0.f);
        int next = -1;
        if (up >= 0) {
            add = s.gate[up];
            next = s.hop[up];
        }
        __syncthreads();
        if (up >= 0) {
            float2& mine = s.gate[i];
            mine.x += add.x;
            mine.y = __int_as_float(max(__float_as_int(mine.y), __float_as_int(add.y)));
            s.hop[i] = next;
            up = next;
        }
    }
    if (has && p.col0 == 0)
        g_cum_out[(size_t)(p.first + i) * p.v_heads + p.hv] = __float_as_int(s.gate[i].y) >= 0 ? -INFINITY : s.gate[i].x;
}

// What a node's own values are scaled by, from the norms.
template <typename S>
__device__ __forceinline__ void node_scales(S& s) {
    const int i = threadIdx.x;
    if (i >= S::kNodes) return;
    const float2 gate = s.gate[i];
    const float down = __float_as_int(gate.y) >= 0 ? 0.f : expf(gate.x);
    s.scale[i] = make_float4(down * s.key[i].x, s.beta[i], down * s.q_norm[i], 0.f);
}

// Where a lane's matrices of sixteen rows lie, for the left operand of k-steps of 16 in memory order ...
__device__ __forceinline__ uint32_t rows_at(const char* tile, int row0, int lane) {
    return shared_address(tile) + (row0 + lane % 16) * kRowBytes + ((lane / 16 ^ spread(lane % 16)) << 4);
}

// ... and of eight rows, for the right operand.
__device__ __forceinline__ uint32_t columns_at(const char* tile, int row0, int lane) {
    return shared_address(tile) + (row0 + lane % 8) * kRowBytes + ((lane / 8 ^ spread(lane % 8)) << 4);
}

// K-step `step` of rows_at.
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], uint32_t at, int step) {
    load_matrices(a, (at ^ step % 4 * 32) + step / 4 * 128);
}

// K-steps 2 pair (b[0..1]) and 2 pair + 1 of columns_at.
__device__ __forceinline__ void load_columns(uint32_t (&b)[4], uint32_t at, int pair) {
    load_matrices(b, (at ^ pair % 2 * 64) + pair / 2 * 128);
}

// Norms of sixteen rows: a row's square is on the diagonal of the product of the rows with themselves.
template <typename S>
__device__ __forceinline__ void norms_of_rows(S& s, int i, bool query, float scale, int lane) {
    float own[2][4] = {};
    const uint32_t at = rows_at(query ? s.q : s.k, 16 * i, lane);
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        uint32_t a[4];
        load_rows(a, at, step);
        mma(own[0], a, a[0], a[2]);
        mma(own[1], a, a[1], a[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float square = lane / 4 % 2 ? own[half][2 * half + 1] : own[half][2 * half];
        const float norm = rsqrtf(square + 1e-6f) * (query ? scale : 1.f);
        const int node = 16 * i + 8 * half + lane / 4;
        if (lane % 4 == lane / 8) *(query ? &s.q_norm[node] : &s.key[node].x) = norm;
    }
}

// Column `col` of the inverse of a unit lower triangular block whose negated entries are in `g`, in their place; half a warp. A row
// that is not finite counts as 0 in the others: U of its node will not be finite, and what descends from it is spoiled in the end.
__device__ __forceinline__ void invert(float4 (*g)[32], int col) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == col ? 1.f : 0.f;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const float4 e = g[i / 8][i % 8 * 4 + p];
            const float es[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int j = n / 2 * 8 + 2 * p + n % 2;
                if (j < i) sum = fmaf(es[n], fabsf(x[j]) <= kLargest ? x[j] : 0.f, sum);
            }
        }
        x[i] = sum;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i)
        reinterpret_cast<float*>(&g[i / 8][i % 8 * 4 + col % 8 / 2])[col / 8 * 2 + col % 2] = for_cut(x[i]);
}

// Raw products of k and q rows of block i with k rows of block j become -G and C.
template <typename S>
__device__ __forceinline__ void scale_block(const S& s, Block& block, int i, int j, const uint32_t (&related)[2],
                                            const float (&dk)[2][4], const float (&dq)[2][4], int lane) {
    float2 key[4], other[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        key[n] = s.key[16 * j + column_of(lane, n)];
        other[n] = s.gate[16 * j + column_of(lane, n)];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 8 * half + lane / 4, node = 16 * i + row;
        const float2 gate = s.gate[node];
        const float to_g = -s.beta[node] * s.key[node].x, to_c = s.q_norm[node];
        float g[4], c[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const bool on_path = related[half] >> (n / 2 * 8 + n % 2) & 1;
            const bool gone = __float_as_int(gate.y) > __float_as_int(key[n].y);
            const float decay = __expf(gate.x - other[n].x);
            const float down = gone ? 0.f : decay * key[n].x;
            const float k_dot = dk[n / 2][2 * half + n % 2], q_dot = dq[n / 2][2 * half + n % 2];
            g[n] = on_path && (i > j || column_of(lane, n) != row) ? for_cut(k_dot * (down * to_g)) : 0.f;
            c[n] = on_path ? for_cut(q_dot * (down * to_c)) : 0.f;
        }
        block.g[half][lane] = make_float4(g[0], g[1], g[2], g[3]);
        block.c[half][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
}

// Block (i, j); one warp.
template <typename S>
__device__ __forceinline__ void make_block(S& s, int set, int unit, int i, int j, int lane) {
    Block& block = s.block[set][unit];
    uint32_t related[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        related[half] = s.mask[16 * i + 8 * half + lane / 4][j / 2] >> (j % 2 * 16 + 2 * (lane % 4)) & 0x303;
    if (CANOPY_FAULT(short_path) && j == 0 && lane % 4 == 0) {
        if (i > 0 || lane / 4 > 0) related[0] &= ~1u;
        related[1] &= ~1u;
    }
    const bool live = __any_sync(kFull, (related[0] | related[1]) != 0);
    if (S::kStaged && lane == 0) s.live[set][unit] = live;
    if (!live) {
        // a branch for every block would keep loads and products of the unrolled solve from overlapping
#pragma unroll
        for (int x = 0; x < 4 && !S::kStaged; ++x)
            (x / 2 ? block.c : block.g)[x % 2][lane] = make_float4(0.f, 0.f, 0.f, 0.f);
        return;
    }
    float dk[2][4] = {}, dq[2][4] = {};
    const uint32_t k_at = rows_at(s.k, 16 * i, lane), q_at = rows_at(s.q, 16 * i, lane), columns = columns_at(s.k, 16 * j, lane);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        uint32_t k_rows[2][4], q_rows[2][4];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            load_rows(k_rows[x], k_at, 2 * pair + x);
            load_rows(q_rows[x], q_at, 2 * pair + x);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            uint32_t b[4];
            load_columns(b, columns + 8 * n * kRowBytes, pair);
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                mma(dk[n], k_rows[x], b[2 * x], b[2 * x + 1]);
                mma(dq[n], q_rows[x], b[2 * x], b[2 * x + 1]);
            }
        }
    }
    scale_block(s, block, i, j, related, dk, dq, lane);
    if (i == j) {
        __syncwarp();
        invert(block.g, lane % 16);
    }
}

}  // namespace canopy
