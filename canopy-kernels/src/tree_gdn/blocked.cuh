// tree_gdn verify, blocked design: the tree's system in dense blocks of 16 nodes on tensor cores, one launch, tier B.
//
// One CTA owns NV value columns of one value head of one sequence and all its nodes. K K^T and Q K^T become -G and C block by block (tf32,
// masked, decays and norms applied); the diagonal blocks of I + G are inverted in f32.
// Then every warp solves 16 columns by itself, block row by block row: U_i^T = (R_i^T - sum U_j^T G_ij^T) Inv_i^T. With the value columns as
// the products' rows a finished block of U is the next products' left operand as it lies in registers.
// Up to 128 nodes all blocks are made first and the solve needs no barrier (`blocked`); beyond, some warps make a row of blocks while others
// solve the row before, and U takes the place of the q rows that it no longer needs (`staged`). The sums run in the same order.
// A column of zeros times a value that is not finite would leak, so such values count as 0 in products, are remembered, and their
// descendants are made NaN at the end; finite rows keep their bits.
// A row's bits depend on its node's place in the tree alone: blocks beyond the tree and blocks without an ancestor are left out, everything
// else is a fixed order of sums.
// Shared memory: 512 bytes a node of k and q rows, 2 KiB a block, 50 to 80 bytes a node.
#pragma once
#include "blocked_solver.cuh"

namespace canopy {

// A padding sequence's rows.
template <int NV, typename Out>
__device__ __forceinline__ void write_zeros(const Place& p, Out* o, float* u_out, float* g_cum_out) {
    for (int idx = threadIdx.x; idx < p.nodes * NV; idx += blockDim.x) {
        const int row = idx / NV;
        const size_t at = p.at(row, p.col0 + idx % NV);
        store(o + at, 0.f);
        u_out[at] = 0.f;
        if (p.col0 == 0 && idx % NV == 0) g_cum_out[(size_t)(p.first + row) * p.v_heads + p.hv] = 0.f;
    }
}

// The system as a whole, then U and outputs; o and u_out at the sequence's first node and the warp's columns.
template <int TB, typename S, typename Out>
__device__ __forceinline__ void solve_at_once(S& s, const Place& p, Solver<S>& solver, Out* o, float* u_out) {
    const bool solves = p.warp < S::kSolvers;
    float r[TB][2][4] = {}, d[TB][2][4] = {};
    uint32_t v[TB][2][2];
    const auto project = [&] {
#pragma unroll
        for (int i = 0; i < TB; ++i) {
            solver.project(r[i], RowWords(s.k, p.lane), i);
            solver.project(d[i], RowWords(s.q, p.lane), i);
        }
    };
    // while others make blocks; where all warps solve the sums would only be in the way
    constexpr bool kHelpers = S::kWarps > S::kSolvers;
    if (kHelpers && solves) project();
    for (int task; (task = next_task(s.next, p.lane)) < unit_of(p.blocks, 0);) {
        int i = task, j = task;  // the diagonal first
        if (task >= p.blocks) {
            i = 1;
            j = task - p.blocks;
            while (j >= i) j -= i++;
        }
        make_block(s, 0, unit_of(i, j), i, j, p.lane);
    }
    if (solves) {
        if (!kHelpers) project();
#pragma unroll
        for (int i = 0; i < TB; ++i) solver.fetch_values(v[i], p, i);
    }
    __syncthreads();
    if (!solves) return;
#pragma unroll
    for (int i = 0; i < TB; ++i) solver.scale_rows(r[i], d[i], v[i], s, i, p.lane);
    // a solved block is taken off all that follow at once: their sums do not wait for each other
#pragma unroll
    for (int j = 0; j < TB; ++j) {
        if (j >= p.blocks) break;
        float u[2][4], operand[2][4];
        solver.solve(u, operand, s, p, r[j], s.block[0][unit_of(j, j)], j);
#pragma unroll
        for (int i = j; i < TB; ++i) {
            const Block& block = s.block[0][unit_of(i, j)];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (i > j) times(r[i][n], operand, block.g[n][p.lane]);
                times(d[i][n], operand, block.c[n][p.lane]);
            }
        }
        solver.write(o, u_out, p, d[j], u, j);
    }
}

// A row of the system while the row before is solved.
template <typename S, typename Out>
__device__ __forceinline__ void solve_in_stages(S& s, const Place& p, Solver<S>& solver, Out* o, float* u_out) {
    const bool solves = p.warp < S::kSolvers;
    float operand[2][4];
    for (int i = -1; i < p.blocks; ++i) {
        if (i >= 0 && solves) {
            float4* place = reinterpret_cast<float4*>(s.q) + p.warp * 64 + p.lane;  // U of block j is at 256 j
            if (i > 0)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    place[256 * (i - 1) + 32 * n] = make_float4(operand[n][0], operand[n][1], operand[n][2], operand[n][3]);
            float r[2][4] = {}, d[2][4] = {}, u[2][4];
            uint32_t v[2][2];
            solver.fetch_values(v, p, i);
            solver.project(r, RowWords(s.k, p.lane), i);
            solver.project(d, RowWords(s.q, p.lane), i);
            solver.scale_rows(r, d, v, s, i, p.lane);
            const Block* row = s.block[i % 2];
#pragma unroll 2
            for (int j = 0; j < i; ++j) {
                if (!s.live[i % 2][j]) continue;
                float above[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) *reinterpret_cast<float4*>(above[n]) = place[256 * j + 32 * n];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    times(r[n], above, row[j].g[n][p.lane]);
                    times(d[n], above, row[j].c[n][p.lane]);
                }
            }
            solver.solve(u, operand, s, p, r, row[i], i);
#pragma unroll
            for (int n = 0; n < 2; ++n) times(d[n], operand, row[i].c[n][p.lane]);
            solver.write(o, u_out, p, d, u, i);
        }
        if (i + 1 < p.blocks)
            for (int task; (task = next_task(s.next + i + 1, p.lane)) < i + 2;)
                make_block(s, (i + 1) % 2, i + 1 - task, i + 1, i + 1 - task, p.lane);
        __syncthreads();
    }
}

template <int TB, int NV, int THREADS, typename Out>
__device__ void blocked(const BlockedArgs& a, const __nv_bfloat16* qkv, const float* gates, const float* pool, const int* parents,
                        const uint32_t* masks, const int* cu_nodes, const int* slots, Out* o, float* u_out, float* g_cum_out) {
    using S = Blocked<TB, NV, THREADS>;
    extern __shared__ __align__(128) char shared[];
    S& s = *reinterpret_cast<S*>(shared);
    next_may_begin();
    const Place p(a, cu_nodes, slots, NV);
    wait_for_kernels_ahead();  // lists are not written by kernels that let others begin
    if (p.slot < -1) return;  // another launch's
    if (p.slot < 0) return write_zeros<NV>(p, o, u_out, g_cum_out);
    const __nv_bfloat16* rows = qkv + (size_t)p.first * p.width;
    fetch_rows(s, p, rows);
    const bool solves = p.warp < S::kSolvers;
    Solver<S> solver;
    solver.seen = 0;
    solver.col = p.col0 + p.warp * 16 + p.lane / 4 * 2;
    solver.values = rows + 2ull * p.k_heads * kDk + (size_t)p.hv * kDv + solver.col;
    float4 raw[4][2][2];
    if (solves) {
        const float* s0 = pool + (((size_t)p.slot * p.v_heads + p.hv) * kDv + solver.col) * kDk + 8 * (p.lane % 4);
#pragma unroll
        for (int x = 0; x < 16; ++x) raw[x / 4][x / 2 % 2][x % 2] = load4(s0 + x / 2 % 2 * kDk + 32 * (x / 4) + 4 * (x % 2));
    }
    cumulative_gates(s, p, gates, parents, masks, g_cum_out);
    for (int idx = threadIdx.x; idx < p.nodes * ((NV + 63) / 64); idx += THREADS)
        prefetch(rows + 2ull * p.k_heads * kDk + (size_t)p.hv * kDv + p.col0 + idx / p.nodes * 64 + idx % p.nodes * p.width);
    if (solves) {
#pragma unroll
        for (int x = 0; x < 16; ++x) {
            const float4 four = raw[x / 4][x / 2 % 2][x % 2];
            solver.state[x / 4 * 2 + x % 2][x / 2 % 2] = pack_bf16(four.x, four.y);
            solver.state[x / 4 * 2 + x % 2][2 + x / 2 % 2] = pack_bf16(four.z, four.w);
        }
    }
    copies_arrived<0>();
    __syncthreads();
    for (int task = p.warp; task < 2 * p.blocks; task += S::kWarps)
        norms_of_rows(s, task % p.blocks, task >= p.blocks, a.scale, p.lane);
    __syncthreads();
    node_scales(s);
    const size_t origin = p.at(0, solver.col);
    if constexpr (S::kStaged) solve_in_stages(s, p, solver, o + origin, u_out + origin);
    else solve_at_once<TB>(s, p, solver, o + origin, u_out + origin);
    if (!solves) return;
    solver.spoil(o, u_out, s, p);
    if (CANOPY_FAULT(overrun)) u_out[(size_t)cu_nodes[gridDim.z] * a.v_heads * kDv] = 0.f;
    if (threadIdx.x == 0) planted_touch(qkv);
}

}  // namespace canopy
