// tree_build: one CTA a tree. Its threads read the candidates' log-probabilities, its first warp takes the nodes: of every taken node the
// next child waits, a lane keeps the best of its own nodes', and a step asks the warp for the least size of the (never positive) joint
// log-probability, in two words. Then all threads write the lists. Sums are f64 in path order, as on the CPU.
// The lists are read by kernels that are launched early and do not wait before that: so this one lets nobody begin before it has ended.
#include <stdint.h>

#include "canopy/fault.cuh"
#include "canopy/numeric.cuh"
#include "plan.cuh"

struct BuildArgs {
    uint32_t k;       // candidates of a row
    uint32_t stated;  // log-probabilities are given
};
static_assert(sizeof(BuildArgs) == 8, "launch.rs BuildArgs");

namespace canopy {

constexpr int kThreads = 128, kMostDepth = 15, kMostK = 64, kMaskWords = 8;
constexpr uint64_t kNone = ~0ull;

struct Tree : Paths {
    double log_probs[kMostDepth][kMostK];
    double joint[kMostNodes];
    uint64_t next[kMostNodes];      // size of the joint log-probability of the node's next child
    uint8_t rank[kMostNodes];
    uint8_t children[kMostNodes];   // taken so far
    int candidates[kMostDepth];     // of every depth
    int depths;                     // that have candidates
    int taken;
};

struct Cta {
    __device__ __forceinline__ static int id() { return threadIdx.x; }
    __device__ __forceinline__ static int size() { return kThreads; }
    __device__ __forceinline__ static void sync() { __syncthreads(); }
    __device__ __forceinline__ static void add(int* to, int n) { atomicAdd(to, n); }
    __device__ __forceinline__ static void set(uint32_t* to, uint32_t bits) { atomicOr(to, bits); }
};

// Whether the next child of node a comes before that of node b, when both are as probable: by the ranks along their paths.
__device__ __forceinline__ bool ranks_before(const Tree& t, int a, int b) {
    if (CANOPY_FAULT(row_order)) return a > b;
    int of_a = t.children[a], of_b = t.children[b];
    while (a != b) {
        const bool up_a = t.depth[a] >= t.depth[b], up_b = t.depth[b] >= t.depth[a];
        if (up_a) of_a = t.rank[a], a = t.parent[a];
        if (up_b) of_b = t.rank[b], b = t.parent[b];
    }
    return of_a < of_b;
}

// The most probable next child of a lane's nodes.
struct Best {
    uint64_t size;
    int node;
};

__device__ __forceinline__ Best best_of(const Tree& t, int lane, int nodes) {
    Best best = {kNone, lane};
    for (int i = lane; i < nodes; i += 32) {
        const uint64_t size = t.next[i];
        if (size < best.size || (size == best.size && size != kNone && ranks_before(t, i, best.node))) best = {size, i};
    }
    return best;
}

__device__ __forceinline__ double joint_of(const Tree& t, double above, int depth, int rank) {
    return (CANOPY_FAULT(dropped_slice) ? 0. : above) + t.log_probs[depth - 1][rank];
}

// What waits: the child of a rank at a depth, below a node of joint log-probability `above`.
__device__ __forceinline__ uint64_t waiting(const Tree& t, double above, int depth, int rank) {
    if (depth > t.depths || rank >= t.candidates[depth - 1]) return kNone;
    return (uint64_t)__double_as_longlong(joint_of(t, above, depth, rank)) & ~(1ull << 63);
}

// Takes up to `nodes` nodes; one warp.
__device__ __forceinline__ void grow(Tree& t, int lane, int nodes) {
    if (lane == 0) {
        t.joint[0] = 0.;
        t.parent[0] = t.rank[0] = t.depth[0] = t.children[0] = 0;
        t.next[0] = waiting(t, 0., 1, 0);
    }
    __syncwarp();
    Best best = best_of(t, lane, 1);
    int n = 1;
    for (; n < nodes - CANOPY_FAULT(missed_node); ++n) {
        const uint32_t high = (uint32_t)(best.size >> 32), low = (uint32_t)best.size;
        const uint32_t least_high = __reduce_min_sync(kFull, high);
        if (least_high == 0xffffffffu) break;
        const uint32_t least_low = __reduce_min_sync(kFull, high == least_high ? low : 0xffffffffu);
        uint32_t lanes = __ballot_sync(kFull, high == least_high && low == least_low);
        int parent = __shfl_sync(kFull, best.node, __ffs(lanes) - 1);
        for (lanes &= lanes - 1; lanes; lanes &= lanes - 1) {
            const int other = __shfl_sync(kFull, best.node, __ffs(lanes) - 1);
            if (ranks_before(t, other, parent)) parent = other;
        }
        const int depth = t.depth[parent] + 1, rank = t.children[parent];
        const double above = t.joint[parent], joint = joint_of(t, above, depth, rank);
        const uint64_t sibling = waiting(t, above, depth, rank + 1), child = waiting(t, joint, depth + 1, 0);
        __syncwarp();
        if (lane == 0) {
            t.children[parent] = (uint8_t)(rank + 1);
            t.next[parent] = sibling;
            t.joint[n] = joint;
            t.next[n] = child;
            t.parent[n] = (uint8_t)parent;
            t.rank[n] = (uint8_t)rank;
            t.depth[n] = (uint8_t)depth;
            t.children[n] = 0;
        }
        __syncwarp();
        if (lane == parent % 32 || lane == n % 32) best = best_of(t, lane, n + 1);
    }
    if (lane == 0) t.taken = n;
}

}  // namespace canopy

// best: [R][2 + 2 k]; drafts: [B][2] first row of best, -1: none, and depths; log_probs: [depths][k].
extern "C" __global__ void __launch_bounds__(canopy::kThreads)
    tree_build(const BuildArgs a, const uint32_t* __restrict__ best, const int* __restrict__ drafts, const double* __restrict__ log_probs,
               const int* __restrict__ cu_nodes, const int* __restrict__ lens, const int* __restrict__ plan_at, uint32_t* tokens,
               uint32_t* nodes_out, int* positions, int* parents, uint32_t* mask, uint32_t* plans) {
    using namespace canopy;
    __shared__ Tree t;
    __shared__ Numbers numbers;
    wait_for_kernels_ahead();
    const int b = blockIdx.x, tid = threadIdx.x;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, row0 = drafts[2 * b], depths = drafts[2 * b + 1];
    if (row0 < 0) return;
    const int k = (int)a.k, stride = 2 + 2 * k;
    const uint32_t* rows = best + (size_t)row0 * stride;
    if (tid < kMostDepth) t.candidates[tid] = 0;
    if (tid == 0) t.depths = depths;
    __syncthreads();
    for (int idx = tid; idx < depths * k; idx += kThreads) {
        const int depth = idx / k, rank = idx % k;
        const uint32_t* row = rows + depth * stride;
        const float logit = __uint_as_float(row[2 + rank]);
        const double own = (double)logit - (double)__uint_as_float(row[2]) - (double)__uint_as_float(row[1]);
        t.log_probs[depth][rank] = a.stated ? log_probs[idx] : fmin(own, 0.);
        if (logit > -INFINITY) atomicAdd(&t.candidates[depth], 1);
        if (rank == 0 && (row[0] & 1) && !CANOPY_FAULT(swallow)) atomicMin(&t.depths, depth);
    }
    __syncthreads();
    if (tid < 32) grow(t, tid, nodes);
    __syncthreads();

    // rows that are left over are roots
    const int taken = t.taken, from = CANOPY_FAULT(short_path) ? 1 : 0;
    for (int i = taken + tid; i < nodes; i += kThreads) t.parent[i] = t.rank[i] = t.depth[i] = 0;
    __syncthreads();
    find_paths(Cta{}, t, nodes);
    for (int i = tid; i < nodes; i += kThreads) {
        const int depth = t.depth[i], rank = t.rank[i];
        const bool root = i == 0 || i >= taken;
        if (i > 0) tokens[first + i] = root ? tokens[first] : rows[(depth - 1) * stride + 2 + k + (rank + CANOPY_FAULT(off_by_one)) % k];
        nodes_out[first + i] = rank | (uint32_t)depth << 16;
        positions[first + i] = lens[b] + depth;
        parents[first + i] = root ? -1 : (int)t.parent[i];
    }
    for (int idx = tid; idx < nodes * kMaskWords; idx += kThreads)
        mask[(size_t)first * kMaskWords + idx] = seen(t.path[idx / kMaskWords], from, t.depth[idx / kMaskWords], idx % kMaskWords);
    const int room = plan_at[b + 1] - plan_at[b];
    if (room > 0) write_plan(Cta{}, t, numbers, nodes, from, plans + plan_at[b], room);
    if (b == 0 && tid == 0) planted_touch(best);
    __threadfence();
}
