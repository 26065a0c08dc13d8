// tree_gdn_serial: the gated delta rule node by node, f32 states, in two forms that share every operation.
//
// snapshots: the baseline, any tree. Every node's state goes to its snapshot; a node whose parent is not the node before it takes its
//            parent's state back, fetched while the node before is computed.
// chain:     chains only. The state never leaves registers; the tape (u, g_cum) is verify's, and the last state goes into the pool on
//            demand.
//
// One CTA owns 32 ROWS value rows of one value head of one sequence, a warp 4 ROWS of them. Eight lanes hold a value row: part p of eight
// holds keys 32 c + 4 p .. + 3, c = 0 .. 3. The four lanes of one part stand side by side and read the same words of k and q from shared
// memory, which serves them once. Each warp prepares one of the next eight nodes while these eight are walked: norms in f32, exp(g), k.q.
// The sums of a value row have one order whatever ROWS and the form are, and nothing off the root path enters: a row's bits depend on its
// root path alone, and a NaN reaches descendants only.
// Shared memory: two stages of 8 x (1 KiB of k and q, 16 bytes of scalars, 128 ROWS bytes of v); with snapshots 1 KiB of parents.
#include "args.cuh"
#include "canopy/fault.cuh"
#include "canopy/gdn_rows.cuh"

namespace canopy {

constexpr int kWarps = 8;  // of a CTA, and nodes of a stage
constexpr int kThreads = 32 * kWarps;

template <int ROWS>
struct Stage {
    float4 k[kWarps][kDk / 4];
    float4 q[kWarps][kDk / 4];
    float4 scalars[kWarps];  // exp(g), beta, k.q, g
    float v[kWarps][32 * ROWS];
};

// Where one CTA works.
struct Place {
    uint32_t hv, h;
    int col0, first, nodes, slot;
};

__device__ __forceinline__ Place place(const SerialArgs& a, const int* cu_nodes, const int* slots, int columns) {
    const uint32_t b = blockIdx.z, hv = blockIdx.y;
    const int first = cu_nodes[b];
    return {hv, hv / (a.v_heads / a.k_heads), (int)blockIdx.x * columns, first, cu_nodes[b + 1] - first, slots[b]};
}

// One node's rows on their way into a stage, held by one warp.
template <typename T, int ROWS>
struct Incoming {
    decltype(raw4(static_cast<const T*>(nullptr))) k, q;
    T v[ROWS];
    float g, beta;

    __device__ __forceinline__ void fetch(const SerialArgs& a, const Place& at, const T* qkv, const float* gates, int node, int lane) {
        const size_t row = at.first + node;
        const T* heads = qkv + row * qkv_width(a.k_heads, a.v_heads);
        q = raw4(heads + (size_t)at.h * kDk + 4 * lane);
        k = raw4(heads + (size_t)(a.k_heads + at.h) * kDk + 4 * lane);
        const T* values = heads + 2ull * a.k_heads * kDk + (size_t)at.hv * kDv + at.col0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = values[32 * r + lane];
        g = gates[row * 2 * a.v_heads + at.hv];
        beta = gates[(row * 2 + 1) * a.v_heads + at.hv];
    }

    __device__ __forceinline__ void put(Stage<ROWS>& stage, int x, float scale, int lane) const {
        const float4 k_row = widened(k), q_row = widened(q);
        // three sums side by side: their shuffles overlap
        const float kk = warp_sum(dot4(k_row, k_row, 0.f)), qq = warp_sum(dot4(q_row, q_row, 0.f));
        const float kq = warp_sum(dot4(k_row, q_row, 0.f));
        const float k_norm = rsqrtf(kk + 1e-6f), q_norm = planted_ulp(rsqrtf(qq + 1e-6f) * scale);
        stage.k[x][lane] = scaled(k_row, k_norm);
        stage.q[x][lane] = scaled(q_row, q_norm);
        if (lane == 0) stage.scalars[x] = make_float4(expf(g), beta, kq * (k_norm * q_norm), g);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) stage.v[x][32 * r + lane] = to_f32(v[r]);
    }
};

// One lane's part of ROWS consecutive value rows.
template <int ROWS>
struct Slice {
    float4 x[ROWS][4];

    __device__ __forceinline__ void load(const float* p) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) x[r][c] = load4(p + r * kDk + 32 * c);
    }

    __device__ __forceinline__ void save(float* p) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) *reinterpret_cast<float4*>(p + r * kDk + 32 * c) = x[r][c];
    }
};

// Sums of a and of b over the eight lanes of a value row; the upper half of them adds b up while the lower half adds a.
__device__ __forceinline__ void row_sums(float& a, float& b, bool upper) {
    float sum = (upper ? b : a) + __shfl_xor_sync(kFull, upper ? a : b, 16);
    sum += __shfl_xor_sync(kFull, sum, 8);
    sum += __shfl_xor_sync(kFull, sum, 4);
    const float other = __shfl_xor_sync(kFull, sum, 16);
    a = upper ? other : sum;
    b = upper ? sum : other;
}

// What a lane reads of one node of a stage.
template <int ROWS>
struct Operands {
    float4 k[4], q[4], scalars;
    float v[ROWS];

    __device__ __forceinline__ void load(const Stage<ROWS>& stage, int x, int part, int row0) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            k[c] = stage.k[x][8 * c + part];
            q[c] = stage.q[x][8 * c + part];
        }
        scalars = stage.scalars[x];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = stage.v[x][row0 + r];
    }
};

// The slice of a node's parent becomes the node's own; u and o of the lane's value rows.
template <int ROWS>
__device__ __forceinline__ void step(Slice<ROWS>& s, const Operands<ROWS>& node, bool upper, float (&u)[ROWS], float (&o)[ROWS]) {
    const float4(&k)[4] = node.k;
    const float4(&q)[4] = node.q;
    const float decay = node.scalars.x, beta = node.scalars.y, kq = node.scalars.z;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float4(&row)[4] = s.x[r];
        float sk = dot4(row[1], k[1], dot4(row[0], k[0], 0.f)) + dot4(row[3], k[3], dot4(row[2], k[2], 0.f));
        float sq = dot4(row[1], q[1], dot4(row[0], q[0], 0.f)) + dot4(row[3], q[3], dot4(row[2], q[2], 0.f));
        row_sums(sk, sq, upper);
        u[r] = beta * fmaf(-decay, sk, node.v[r]);
        o[r] = fmaf(u[r], kq, decay * sq);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) s.x[r][c] = planted_half(fma4(k[c], u[r], scaled(s.x[r][c], decay)));
}

template <int ROWS>
__device__ __forceinline__ void store_rows(float* to, const float (&x)[ROWS]) {
    if constexpr (ROWS == 4) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    else if constexpr (ROWS == 2) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    else *to = x[0];
}

// g_cum of a stage's nodes, by one warp; `before` is the sum up to the stage, the new one is returned.
template <int ROWS>
__device__ __forceinline__ float sum_gates(const SerialArgs& a, const Place& at, const Stage<ROWS>& stage, int base, int count,
                                           float before, float* g_cum) {
    const int lane = threadIdx.x % 32;
    float sum = lane < count ? stage.scalars[lane].w : 0.f;
#pragma unroll
    for (int offset = 1; offset < kWarps; offset *= 2) {
        const float below = __shfl_up_sync(kFull, sum, offset);
        if (lane >= offset) sum += below;
    }
    if (lane < count) g_cum[(size_t)(at.first + base + lane) * a.v_heads + at.hv] = before + sum;
    return before + __shfl_sync(kFull, sum, kWarps - 1);
}

// Zeros into a padding sequence's rows of a plane.
__device__ void clear(const SerialArgs& a, const Place& at, float* plane, int columns) {
    for (int i = threadIdx.x; i < at.nodes * columns; i += kThreads)
        plane[((size_t)(at.first + i / columns) * a.v_heads + at.hv) * kDv + at.col0 + i % columns] = 0.f;
}

template <typename T, int ROWS>
__device__ void snapshots(SerialArgs a, const T* qkv, const float* gates, const float* state, const int* parents, const int* cu_nodes,
                          const int* slots, float* kept, float* o) {
    __shared__ Stage<ROWS> stages[2];
    __shared__ int parent[256];
    take_turn();
    const Place at = place(a, cu_nodes, slots, 32 * ROWS);
    if (at.slot < -1) return;  // another launch's
    if (at.slot < 0) return clear(a, at, o, 32 * ROWS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane / 4, row0 = (warp * 4 + lane % 4) * ROWS;
    const size_t plane = (size_t)a.v_heads * kDv, size = plane * kDk;
    const size_t inside = ((size_t)at.hv * kDv + at.col0 + row0) * kDk + 4 * part;
    float* out = o + at.first * plane + (size_t)at.hv * kDv + at.col0 + row0;
    float* own = kept + at.first * size + inside;
    Slice<ROWS> s, ahead;
    s.load(state + at.slot * size + inside);
    ahead = s;
    Incoming<T, ROWS> in;
    if (warp < at.nodes) {
        in.fetch(a, at, qkv, gates, warp, lane);
        in.put(stages[0], warp, a.scale, lane);
    }
    for (int i = threadIdx.x; i < at.nodes; i += kThreads) parent[i] = parents[at.first + i];
    __syncthreads();
    for (int base = 0; base < at.nodes; base += kWarps) {
        const int turn = base / kWarps % 2, coming = base + kWarps + warp;
        if (coming < at.nodes) in.fetch(a, at, qkv, gates, coming, lane);
        const int end = min(base + kWarps, at.nodes);
        for (int node = base; node < end; ++node) {
            if (node > 0 && parent[node] != node - 1 && !CANOPY_FAULT(row_order)) s = ahead;
            if (node + 1 < at.nodes && parent[node + 1] != node) ahead.load(own + parent[node + 1] * size);
            float u_rows[ROWS], o_rows[ROWS];
            Operands<ROWS> x;
            x.load(stages[turn], node - base, part, row0);
            step(s, x, part >= 4, u_rows, o_rows);
            if (part == 0 && (!CANOPY_FAULT(gap) || node + 1 < at.nodes)) store_rows(out, o_rows);
            if (CANOPY_FAULT(overrun)) o[(size_t)cu_nodes[gridDim.z] * plane] = 0.f;
            if (threadIdx.x == 0) planted_touch(qkv);
            out += plane;
            s.save(own + node * size);
        }
        if (coming < at.nodes) in.put(stages[turn ^ 1], warp, a.scale, lane);
        __syncthreads();
    }
}

template <typename T, int ROWS>
__device__ void chain(SerialArgs a, const T* qkv, const float* gates, float* state, const int* cu_nodes, const int* slots, float* o,
                      float* u, float* g_cum) {
    __shared__ Stage<ROWS> stages[2];
    take_turn();
    const Place at = place(a, cu_nodes, slots, 32 * ROWS);
    if (at.slot < -1) return;  // another launch's
    if (at.slot < 0) {
        clear(a, at, o, 32 * ROWS);
        clear(a, at, u, 32 * ROWS);
        if (at.col0 == 0)
            for (int i = threadIdx.x; i < at.nodes; i += kThreads) g_cum[(size_t)(at.first + i) * a.v_heads + at.hv] = 0.f;
        return;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane / 4, row0 = (warp * 4 + lane % 4) * ROWS;
    float* own = state + (((size_t)at.slot * a.v_heads + at.hv) * kDv + at.col0 + row0) * kDk + 4 * part;
    Slice<ROWS> s;
    s.load(own);
    Incoming<T, ROWS> in;
    if (warp < at.nodes) {
        in.fetch(a, at, qkv, gates, warp, lane);
        in.put(stages[0], warp, a.scale, lane);
    }
    __syncthreads();
    const size_t plane = (size_t)a.v_heads * kDv;
    float* out = (part == 1 ? u : o) + at.first * plane + (size_t)at.hv * kDv + at.col0 + row0;
    float total = 0.f;
    for (int base = 0; base < at.nodes; base += kWarps) {
        const int turn = base / kWarps % 2, coming = base + kWarps + warp, count = min(kWarps, at.nodes - base);
        const Stage<ROWS>& stage = stages[turn];
        if (coming < at.nodes) in.fetch(a, at, qkv, gates, coming, lane);
        Operands<ROWS> now, next;
        next.load(stage, 0, part, row0);
#pragma unroll(ROWS == 4 ? 1 : 2)
        for (int x = 0; x < count; ++x) {
            now = next;
            // on its way while this node is computed; four rows have no registers left for it, and enough else to do
            if constexpr (ROWS < 4) {
                if (!CANOPY_FAULT(stale) || x % 2 == 0) next.load(stage, min(x + 1, kWarps - 1), part, row0);
            } else now.load(stage, x, part, row0);
            float u_rows[ROWS], o_rows[ROWS];
            step(s, now, part >= 4, u_rows, o_rows);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) o_rows[r] = part == 1 ? u_rows[r] : o_rows[r];
            if (part < 2 && (!CANOPY_FAULT(gap) || base + x + 1 < at.nodes)) store_rows(out, o_rows);
            if (CANOPY_FAULT(overrun)) o[(size_t)cu_nodes[gridDim.z] * plane] = 0.f;
            if (threadIdx.x == 0) planted_touch(qkv);
            out += plane;
        }
        if (at.col0 == 0 && warp == 0) total = sum_gates(a, at, stage, base, count, total, g_cum);
        if (coming < at.nodes) in.put(stages[turn ^ 1], warp, a.scale, lane);
        __syncthreads();
    }
    if (a.advance) s.save(own);
}

}  // namespace canopy

#define CANOPY_SNAPSHOTS(COLS, CTAS, NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256, CTAS) tree_gdn_serial_snapshots_v##COLS##_##NAME(                               \
        SerialArgs args, const T* qkv, const float* gates, const float* state, const int* parents, const int* cu_nodes,               \
        const int* slots, float* kept, float* o) {                                                                                    \
        canopy::snapshots<T, COLS / 32>(args, qkv, gates, state, parents, cu_nodes, slots, kept, o);                                  \
    }

#define CANOPY_CHAIN(COLS, CTAS, NAME, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, CTAS) tree_gdn_serial_chain_v##COLS##_##NAME(                                   \
        SerialArgs args, const T* qkv, const float* gates, float* state, const int* cu_nodes, const int* slots, float* o, float* u,   \
        float* g_cum) {                                                                                                               \
        canopy::chain<T, COLS / 32>(args, qkv, gates, state, cu_nodes, slots, o, u, g_cum);                                           \
    }

#define CANOPY_SERIAL(NAME, T)         \
    CANOPY_SNAPSHOTS(32, 3, NAME, T)   \
    CANOPY_SNAPSHOTS(64, 2, NAME, T)   \
    CANOPY_CHAIN(32, 2, NAME, T)       \
    CANOPY_CHAIN(64, 2, NAME, T)       \
    CANOPY_CHAIN(128, 2, NAME, T)

#ifdef CANOPY_CONTROLS
CANOPY_SNAPSHOTS(32, 3, bf16, __nv_bfloat16)
CANOPY_CHAIN(32, 2, bf16, __nv_bfloat16)
#else
CANOPY_SERIAL(bf16, __nv_bfloat16)
CANOPY_SERIAL(f32, float)
#endif

// The snapshot of every accepted path's last node into the pool; one CTA copies 32 value rows of one value head.
extern "C" __global__ void __launch_bounds__(256) tree_gdn_serial_commit(SerialArgs args, const float* kept, const int* path,
                                                                         const int* cu_rows, const int* slots, float* state) {
    canopy::take_turn();
    const uint32_t b = blockIdx.z;
    const int end = cu_rows[b + 1], slot = slots[b];
    if (slot < 0 || end == cu_rows[b]) return;
    constexpr size_t kHead = canopy::kDv * canopy::kDk / 4, kPart = 32 * canopy::kDk / 4;
    const size_t inside = blockIdx.y * kHead + blockIdx.x * kPart, size = args.v_heads * kHead;
    const float4* from = reinterpret_cast<const float4*>(kept) + path[end - 1 - (CANOPY_FAULT(missed_node) && end - 1 > cu_rows[b])] * size + inside;
    float4* to = reinterpret_cast<float4*>(state) + slot * size + inside;
#pragma unroll
    for (uint32_t i = 0; i < kPart / 256; ++i) to[i * 256 + threadIdx.x] = from[i * 256 + threadIdx.x];
}
