// Barriers in shared memory and bulk copies that report to them (sm_90 and newer).
#pragma once
#include <cuda.h>

#include "canopy/mma.cuh"

namespace canopy {

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The barriers that this thread set up are there for other threads and for copies.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only when copies have brought `bytes` more.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void wait_phase(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra.uni done; bra.uni again; done:}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A map that copies will ask for soon.
__device__ __forceinline__ void expect_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// `bytes` (a multiple of 16) from global to shared memory.
__device__ __forceinline__ void copy_bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

// The map's box whose first element is (column, row), zeros outside the matrix.
__device__ __forceinline__ void copy_box(uint32_t dst, const CUtensorMap* map, uint32_t column, uint32_t row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(dst), "l"(map),
                 "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// The same, to the same place in every CTA of the cluster that `ctas` has a bit for, each of which is told by its own barrier.
__device__ __forceinline__ void copy_box_to(uint32_t dst, const CUtensorMap* map, uint32_t column, uint32_t row, uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
        : "memory");
}

// Arrives at the barrier in the same place of a CTA of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

// All threads of the cluster that have not ended meet.
__device__ __forceinline__ void cluster_meets() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same of a tensor of four dimensions.
__device__ __forceinline__ void copy_box(uint32_t dst, const CUtensorMap* map, int4 at, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(dst),
                 "l"(map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(barrier)
                 : "memory");
}

}  // namespace canopy
